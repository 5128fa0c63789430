"""Keys cut over ranks: closed forms against brute force, partial attention merged against attention
over all keys, and faults that must show.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import per_device
from oracles import blocks_of, of_type, quick_jit
from tolerances import ATTENTION

from kimi_jax.model.attention.latents import attend_rows
from kimi_jax.model.implementations import Implementations
from kimi_jax.model.state import write_rows
from kimi_jax.model.step import Step
from kimi_jax.parallel import helix
from kimi_jax.parallel.helix import Partial, Stripes, merge
from kimi_jax.parallel.placement import Placement

one_of = pytest.mark.parametrize
BLOCKS, RANKS = (1, 2, 4, 64), (1, 2, 3, 4, 8)


# Where a position lives


def dealt(block, n, total):
    """Brute force: every rank's positions in the order in which its blocks are dealt."""
    held = [[] for _ in range(n)]
    for position in range(total):
        held[(position // block) % n].append(position)
    return held


@one_of("n", RANKS)
@one_of("block", BLOCKS)
def test_closed_forms_equal_brute_force(block, n):
    stripes, total = Stripes(block, n), 3 * block * n + block + 1
    positions = np.arange(total)
    for r, held in enumerate(dealt(block, n, total)):
        np.testing.assert_array_equal(positions[stripes.owner(positions) == r], held)
        np.testing.assert_array_equal(stripes.slot(np.array(held)), np.arange(len(held)))
        np.testing.assert_array_equal(stripes.position(np.arange(len(held)), r), held)
    for length in range(total + 1):
        counts = [len(held) for held in dealt(block, n, length)]
        assert [stripes.length(length, r) for r in range(n)] == counts
        assert sum(counts) == length and max(counts) - min(counts) <= block
        assert stripes.slots(length) == max(counts)
    for slots in range(1, 2 * block + 2):
        most = stripes.most(slots)
        assert stripes.slots(most) <= slots < stripes.slots(most + 1)


def test_closed_forms_take_arrays_of_a_program():
    stripes, total = Stripes(4, 3), np.arange(50, dtype=np.int32)
    for f in (stripes.owner, stripes.slot, lambda x: stripes.length(x, 1)):
        got = jax.jit(f)(total)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, f(total))


def test_known_values():
    """100 tokens a rank in blocks of 32 over four ranks: 384 whole ones; 401 take 128 a rank."""
    stripes = Stripes(32, 4)
    assert stripes.most(96) == 384 and stripes.slots(401) == 113
    assert [stripes.length(401, r) for r in range(4)] == [113, 96, 96, 96]
    # Whole blocks: what a rank opens, not what it fills.
    assert -(-stripes.slots(401) // 32) * 32 == 128
    # A verify step of two rows after 40 tokens, blocks of 4 over two ranks: row 0 sees 20 keys on
    # rank 1. The bound "length after the step less the rows that follow" would say 19.
    stripes = Stripes(4, 2)
    assert stripes.length(41, 1) == 20
    assert stripes.length(42, 1) - (2 - 1 - 0) == 19


# Merging


def test_merged_parts_are_attention_over_all_keys():
    """A part without keys changes nothing, NaN in it included; a row without any key gives 0."""
    rng, (n, B, T, H, X, S) = np.random.default_rng(0), (3, 2, 2, 4, 5, 7)
    scores, values = rng.normal(size=(n, B, T, H, S)) * 9, rng.normal(size=(n, S, X))
    scores[2, 0] += 800  # beyond what exp holds, against what rank 0 has
    scores[1, :, :, 2:] = -np.inf
    scores[:, 1, 1, 0] = -np.inf
    top = scores.max(-1)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top)[..., None])
    mass = weights.sum(-1)
    o = np.einsum("nbths,nsx->nbthx", weights, values) / np.maximum(mass, 1e-30)[..., None]
    o[mass == 0] = np.nan
    got = np.asarray(jax.jit(merge)(Partial(jnp.asarray(o), jnp.asarray(top), jnp.asarray(mass))))
    every = np.moveaxis(scores, 0, -2).reshape(B, T, H, n * S)
    with np.errstate(invalid="ignore"):
        soft = np.exp(every - every.max(-1, keepdims=True))
        want = np.einsum("bths,sx->bthx", soft / soft.sum(-1, keepdims=True), values.reshape(-1, X))
    want[1, 1, 0] = 0
    np.testing.assert_allclose(got, want, atol=ATTENTION["float64"], rtol=0)


# Attention

B, T, H, C, ROPE, SLOTS = 2, 5, 8, 6, 2, 64
R, SCALE = C + ROPE, (C + ROPE) ** -0.5


def arrays(dtype, seed=0):
    """Queries of a step and the latent rows of all positions."""
    rng = np.random.default_rng(seed)
    return of_type(rng.normal(size=(B, T, H, R)), dtype), of_type(
        rng.normal(size=(B, SLOTS, R)), dtype
    )


def over_ranks(n, block):
    """(q, rows, start, lengths) -> attention over the keys that n ranks hold, written in two steps:
    what was seen before, then the new tokens.
    """
    place = Placement(keys="helix", helix_block=block)
    sizes = {"data": 1, "model": n}

    def inside(q, rows, start, lengths):
        held = place.stripes(sizes).slots(SLOTS)
        cache = jnp.full((1, B, held, R), jnp.nan, q.dtype)  # what no step wrote
        before = Step.of(jnp.zeros_like(start), start, SLOTS, Implementations(), place, sizes)
        cache = write_rows(cache, rows, before)
        small = Implementations(blocks=blocks_of(keys=4))
        step = Step.of(start, lengths, T, small, place, sizes)
        new = jnp.take_along_axis(rows, jnp.minimum(step.positions, SLOTS - 1)[..., None], 1)
        cache = write_rows(cache, new, step)
        part = attend_rows(q, cache, step.positions, step, C, SCALE, held)
        return helix.merge_over_ranks(part) if n > 1 else part.o

    def run(q, rows, start, lengths):
        everywhere = [np.broadcast_to(x, (n, *x.shape)) for x in (q, rows, start, lengths)]
        parts = quick_jit(per_device(inside, 1, n))(*everywhere)
        return np.concatenate(list(parts), axis=2)[:, :, :H]

    return run


def expected(q, rows, start, lengths, bound=None):
    """Each query over the positions up to its own, in float64 numpy; or over those that `bound`
    (position, total, row) lets it see.
    """
    out = np.zeros((B, T, H, C))
    for b in range(B):
        for t in range(lengths[b]):
            seen = np.arange(SLOTS) <= start[b] + t
            if bound is not None:
                seen = bound(np.arange(SLOTS), start[b] + lengths[b], t, lengths[b])
            keys = rows[b, seen].astype(np.float64)
            scores = q[b, t].astype(np.float64) @ keys.T * SCALE
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, t] = weights / weights.sum(-1, keepdims=True) @ keys[:, :C]
    return out


# Starts around k whole turns of n blocks, straddling one, and shorter than a block.
STARTS = [(0, 0), (1, 40), (31, 32), (33, 15), (7, 58)]


@one_of("n, block", [(2, 4), (4, 4), (8, 1), (8, 4), (4, 64), (3, 2)])
def test_attention_over_cut_keys_is_attention(n, block):
    """Ranks without keys, groups of new tokens that straddle blocks, rows of padding, H over 3."""
    q, rows = arrays("float64")
    run = over_ranks(n, block)
    for start in STARTS:
        start, lengths = np.array(start, np.int32), np.array([5, 2], np.int32)
        got, want = run(q, rows, start, lengths), expected(q, rows, start, lengths)
        for b, new in enumerate(lengths):
            np.testing.assert_allclose(got[b, :new], want[b, :new], atol=1e-14, rtol=0)


def test_a_row_of_padding_without_any_key_is_zero():
    q, rows = arrays("float32")
    got = over_ranks(4, 4)(q, rows, np.zeros(B, np.int32), np.array([5, 0], np.int32))
    np.testing.assert_array_equal(got[1], 0)


FAULTS = {
    "the owner is one rank on": ("owner", lambda s, p: (p // s.block + 1) % s.ranks),
    "local positions": ("position", lambda s, slot, rank: slot),
    "slots count from the start": ("slot", lambda s, p: p % s.block),
}


@one_of("fault", FAULTS)
def test_a_fault_in_a_closed_form_shows(monkeypatch, fault):
    monkeypatch.setattr(Stripes, *FAULTS[fault])
    q, rows = arrays("float64")
    start, lengths = np.array([13, 30], np.int32), np.array([5, 2], np.int32)
    got, want = over_ranks(4, 4)(q, rows, start, lengths), expected(q, rows, start, lengths)
    assert not np.abs(got[0] - want[0]).max() < 1e-2


def test_the_shortcut_for_rows_of_a_group_would_show():
    """Rank r's bound for row j by its length after the step less the rows after j: it drops keys
    that are there wherever the rank owns no tail of the group.
    """
    stripes = Stripes(4, 2)

    def shortcut(positions, total, row, count):
        slot, owner = stripes.slot(positions), stripes.owner(positions)
        held = np.array([stripes.length(total, r) - (count - 1 - row) for r in range(2)])
        return slot < held[owner]

    q, rows = arrays("float64")
    start, lengths = np.array([40, 40], np.int32), np.array([2, 2], np.int32)
    got = over_ranks(2, 4)(q, rows, start, lengths)[:, :2]
    np.testing.assert_allclose(got, expected(q, rows, start, lengths)[:, :2], atol=1e-14, rtol=0)
    assert np.abs(got - expected(q, rows, start, lengths, shortcut)[:, :2]).max() > 1e-3


def test_float32_attention_over_cut_keys_stays_near():
    q, rows = arrays("float32")
    start, lengths = np.array([13, 50], np.int32), np.array([5, 5], np.int32)
    got, want = over_ranks(4, 4)(q, rows, start, lengths), expected(q, rows, start, lengths)
    np.testing.assert_allclose(got, want, atol=ATTENTION["float32"], rtol=0)
