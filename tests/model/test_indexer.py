"""K3.1's best keys where ranks hold some positions each: both forms against the full sort.

MLA's other selections are held against oracles in test_mla.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from devices import BOTH, per_device
from oracles import quick_jit

from kimi_jax.model.attention import selection
from kimi_jax.model.attention.selection import best_slots
from kimi_jax.model.indexer import candidates, keep_best, select_sorted, selection_bytes
from kimi_jax.parallel.mesh import DATA, MODEL

S, BLOCK = 48, 2  # every number of ranks below divides S / BLOCK
KEEPS = 5, 20, 60  # fewer than a rank's slots; more than most ranks'; more than all
APART = 97  # positions this far apart take two digits
FORMS = "candidates", "histograms", "auto"
NOWHERE = -np.inf
one_of = pytest.mark.parametrize
sort = quick_jit(select_sorted, static_argnums=1)


def owned(n):
    """The positions of each rank [n, S / n]: blocks are dealt to the ranks in turn."""
    return np.arange(S, dtype=np.int32).reshape(-1, n, BLOCK).swapaxes(0, 1).reshape(n, -1)


def rows(n, dtype):
    """Rows of scores [cases, S] with something extreme each; of n ranks, whatever they hold."""
    rng, held = np.random.default_rng(n), owned(n)
    finfo, normal = np.finfo(dtype), rng.normal(size=S)
    few = np.where(np.isin(np.arange(S), rng.choice(S, 3, replace=False)), normal, NOWHERE)
    one_rank = np.isin(np.arange(S), held[n - 1])
    extreme = [NOWHERE, finfo.min, -1, -finfo.tiny, 0, finfo.tiny, 1, finfo.max, np.inf]
    yield normal
    yield -np.abs(normal)
    yield from rng.integers(-2, 3, (4, S))
    yield from rng.integers(0, 2, (2, S)) * 1.5
    yield from (np.full(S, x) for x in (0.0, -3.0, 7.0))
    yield few
    yield np.where(few > NOWHERE, -1.0, NOWHERE)
    yield np.full(S, NOWHERE)
    yield np.where(np.arange(S) < BLOCK, 1.0, NOWHERE)  # on the first rank alone
    yield np.where(np.arange(S) < 7, rng.integers(0, 3, S), NOWHERE)
    yield np.where(one_rank, 9.0, 1.0)
    yield np.where(one_rank, normal, NOWHERE)
    yield np.where(one_rank, NOWHERE, np.round(normal))
    yield np.where(one_rank, np.arange(S) // 3, -1.0)
    yield 1 + rng.integers(0, 3, S) * finfo.eps  # these differ in the last digit alone
    yield -1 - rng.integers(0, 600, S) * finfo.eps
    yield from rng.choice(extreme, (2, S))


def joined(n, dtype):
    """The rows as two queries each of a batch: [B, 2, S]."""
    return 0.0 + np.stack(list(rows(n, dtype))).astype(dtype).reshape(-1, 2, S)  # no -0.0


def cut(scores, n):
    """What each rank holds of whole rows: scores [n, B, T, S / n], positions [n, S / n]."""
    held = owned(n)
    return np.moveaxis(scores[..., held], 2, 0), held


def select(scores, positions, keep, axis=MODEL, limit=S, form="auto"):
    """A rank's candidates and which of them are kept."""
    best, slots = candidates(scores, keep)
    return slots, keep_best(best, positions[slots], keep, limit, axis, form)


WAYS = [
    (form, keep, apart) for form in FORMS for keep, apart in zip(KEEPS, (1, APART, 1), strict=True)
]


@functools.lru_cache
def run(n):
    """Every form at every number of kept keys, near positions and far ones, in one program."""

    def every(scores, positions):
        return [
            select(scores, positions * apart, keep, limit=S * apart, form=form)
            for form, keep, apart in WAYS
        ]

    return quick_jit(per_device(every, 1, n))


@one_of("n", [2, 3, 4, 8])
@one_of("dtype", ["float32", "float64"])
def test_all_ranks_together_keep_what_the_full_sort_keeps(n, dtype):
    scores = joined(n, dtype)
    parts, held = cut(scores, n)
    expected = {keep: sort(scores, keep) for keep in KEEPS}
    for keep in KEEPS:
        np.testing.assert_array_equal(expected[keep], oracles.select(scores, keep))
    for (_, keep, _), (slots, kept) in zip(WAYS, run(n)(parts, held), strict=True):
        check(scores, held, slots, kept, keep, expected[keep])


def check(scores, held, slots, kept, keep, expected):
    """The union is the expected mask; each rank lists its own best first, and the kept lead."""
    u = min(keep, held.shape[1])
    assert slots.dtype == np.int32 and kept.dtype == bool
    assert slots.shape == kept.shape == (len(held), *scores.shape[:2], u)
    union = np.zeros(scores.shape, int)
    for r, positions in enumerate(held):
        assert (np.diff(kept[r].astype(int)) <= 0).all()
        for at in np.ndindex(scores.shape[:2]):
            np.add.at(union[at], positions[slots[r][at]][kept[r][at]], 1)
            best = np.lexsort((positions, -scores[at][positions]))[:u]
            np.testing.assert_array_equal(slots[r][at], best)
    np.testing.assert_array_equal(union, expected)
    real = (scores > NOWHERE).sum(-1)
    np.testing.assert_array_equal(kept.sum((0, -1)), np.minimum(keep, real))


def test_ranks_along_both_axes_and_along_one():
    """Over data and model they share one row; over data alone, each column has its own."""
    scores = joined(8, "float32")
    parts, held = cut(scores, 8)
    over_both = lambda *a: select(*a, 5, BOTH, form="histograms")  # noqa: E731
    check(scores, held, *quick_jit(per_device(over_both, 2, 4))(parts, held), 5, sort(scores, 5))
    parts, held = cut(scores, 2)
    shifted, _ = cut(scores[::-1], 2)
    both = np.stack([parts, shifted], 1).reshape(4, *parts.shape[1:])
    for form in FORMS[:2]:
        over_data = lambda *a: select(*a, 5, DATA, form=form)  # noqa: B023, E731
        slots, kept = quick_jit(per_device(over_data, 2, 2))(both, held.repeat(2, 0))
        for column, whole in enumerate((scores, scores[::-1])):
            mine = slice(column, None, 2)
            check(whole, held, slots[mine], kept[mine], 5, sort(whole, 5))


@one_of("n", [1, 2, 3, 4, 8])
@one_of("dtype", ["float32", "float64"])
@one_of("few", [0, 2**24], ids=["narrow digits", "wide digits"])
def test_a_radix_search_over_ranks_keeps_what_the_full_sort_keeps(monkeypatch, n, dtype, few):
    monkeypatch.setattr(selection, "FEW_SCORES", few)
    scores = joined(n, dtype)
    parts, held = cut(scores, n)
    every = lambda scores: [best_slots(scores, keep, MODEL, BLOCK) for keep in KEEPS]  # noqa: E731
    found = quick_jit(per_device(every, 1, n))(parts)
    for keep, slots in zip(KEEPS, found, strict=True):
        assert slots.shape == (n, *scores.shape[:2], min(keep, S // n))
        union = np.zeros(scores.shape, int)
        for r, at in itertools.product(range(n), np.ndindex(scores.shape[:2])):
            mine = slots[r][at]
            kept = mine[mine >= 0]
            assert (mine[len(kept) :] == -1).all() and (np.diff(kept) > 0).all()
            union[at][held[r][kept]] += 1
        np.testing.assert_array_equal(union, oracles.select(scores, keep))


@one_of("keep", [5, 60])
def test_one_rank_alone_selects_as_one_device_does(keep):
    scores = joined(2, "float32")
    alone = lambda *a: select(*a, keep)  # noqa: E731
    slots, kept = quick_jit(per_device(alone, 1, 1))(scores[None], owned(1))
    best, expected = quick_jit(candidates, static_argnums=1)(scores, keep)
    np.testing.assert_array_equal(slots[0], expected)
    np.testing.assert_array_equal(kept[0], best > NOWHERE)


# What is sent


def sent(n, slots, keep, limit, form, dtype):
    """The collectives that a query's selection holds: name -> (how many, bytes of what each
    gives).
    """
    one = lambda *a: select(*a, keep, MODEL, limit, form)  # noqa: E731
    shapes = [((n, 1, 1, slots), dtype), ((n, slots), "int32")]
    shapes = [jax.ShapeDtypeStruct(*s) for s in shapes]
    inner = jax.make_jaxpr(per_device(one, 1, n))(*shapes).eqns[0].params["jaxpr"]
    found = {}
    for eqn in inner.eqns:
        if ("axes" in eqn.params and MODEL in eqn.params["axes"]) or "axis_name" in eqn.params:
            found.setdefault(eqn.primitive.name, []).append(eqn.outvars[0].aval)
    return {name: (len(a), a[0].dtype.itemsize * a[0].size) for name, a in found.items()}


@one_of("dtype,size", [("float32", 4), ("float64", 8)])
@one_of("limit,digits", [(1, 0), (2, 1), (256, 1), (257, 2), (2**17, 3), (2**31, 4)])
def test_the_bytes_are_those_of_the_program(dtype, size, limit, digits):
    n, slots, keep = 4, 16, 9
    count = size + digits
    assert selection_bytes(n, keep, dtype, limit) == {
        "candidates": 3 * 9 * 2 * size,
        "histograms": 2 * 3 * 256 * count,
    }
    assert sent(1, slots, keep, limit, "auto", dtype) == {}
    assert sent(n, slots, keep, limit, "histograms", dtype) == {"psum": (count, 1024)}
    gathered = {"all_gather": (1, 4 * 9 * 2 * size)}
    assert sent(n, slots, keep, limit, "candidates", dtype) == gathered


def test_fewer_bytes_are_chosen():
    """At 128k positions over 8 ranks, of which each may hold all that are kept."""
    most = selection_bytes(8, 2048, jnp.float32, 2**17)
    assert most == {"candidates": 114_688, "histograms": 12_544}
    assert selection_bytes(8, 2**7, "float32", 2**17)["candidates"] == 7168
    assert not any(selection_bytes(1, 2048, "float32", 2**17).values())
    for slots, chosen in [(128, "all_gather"), (256, "psum")]:
        assert set(sent(8, slots, 2048, 2**17, "auto", "float32")) == {chosen}


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="'sorted'"):
        sent(2, 4, 2, 8, "sorted", "float32")
