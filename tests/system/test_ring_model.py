"""Reductions inside the decoder: every sum of a prefill by its definition, when they are used, that
off is off; and the bench that proposes a threshold.

Two programs may round what comes before a sum differently, so whole models agree within a tolerance
and the sums themselves to the bit.
"""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from models import MESHED, ODD, prompts, write
from tolerances import CHOSEN_SUMS

import kimi_jax as kj
from kimi_jax.cli import main as cli
from kimi_jax.cli import measure as bench
from kimi_jax.errors import PlacementError
from kimi_jax.parallel import collectives
from kimi_jax.parallel.reductions import SUM, Reduction, emulate
from kimi_jax.runtime.program import make_program

T, LENGTHS = 16, (16, 11)
PAD = ("heads", "experts", "vocab", "dense", "shared")
RING = kj.Placement(prefill_reduce="ring_bf16", prefill_ring_rows=1)
EXACT = dataclasses.replace(RING, prefill_reduce="two_shot")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda config: write(config, base / f"{config.heads} heads")


def prefill(folder, config, n, place, dtype="float32"):
    """The logits of a ragged prefill at n ranks, run twice with the same bits."""
    model = kj.load(folder, kj.make_mesh(model=n), place, dtype, chunk=T)
    model = dataclasses.replace(model, program=dataclasses.replace(model.program))  # traced again
    ids = prompts(config, LENGTHS)
    one, two = (np.asarray(model.prefill(model.new_state(2, 64), *ids)[0]) for _ in range(2))
    assert np.array_equal(one, two)
    return one


@pytest.fixture
def sums(monkeypatch):
    """(number, rank) -> partial and result of every sum by a chosen reduction, in the steps that a
    test traces.
    """
    found, asked, real = {}, [], collectives.all_reduce

    def spy(partial, how=SUM, axis="model"):
        result = real(partial, how, axis)
        if how != SUM:
            number = len(asked)
            asked.append(how)

            def keep(rank, *values):
                found[number, int(rank)] = [np.asarray(value) for value in values]

            jax.debug.callback(keep, collectives.rank(axis), partial, result)
        return result

    monkeypatch.setattr(collectives, "all_reduce", spy)
    return found


def assert_defined(sums, n, how):
    """Every sum has on every rank the bits of its definition: two in each of three layers."""
    jax.effects_barrier()
    assert len(sums) == 6 * n
    for number in range(6):
        parts, results = zip(*(sums[number, rank] for rank in range(n)), strict=True)
        expected = emulate(np.stack(parts), how)
        assert all(result.tobytes() == expected.tobytes() for result in results)


# What a prefill computes


def test_exact_reductions_give_the_sum(folders, sums):
    run = lambda place: prefill(folders(MESHED), MESHED, 4, place)  # noqa: E731
    total = run(kj.Placement())
    assert abs(run(EXACT) - total).max() < CHOSEN_SUMS
    assert_defined(sums, 4, Reduction("two_shot"))


def test_a_bfloat16_ring_is_as_far_from_float32_as_its_roundings_say(folders, sums):
    """At 4 ranks a ring rounds three times where the exact path rounds once: 1.58 times the error
    in each sum, beside all other roundings of the model.
    """
    run = lambda *how: prefill(folders(MESHED), MESHED, 4, *how)  # noqa: E731
    wide, total = run(kj.Placement()), run(kj.Placement(), "bfloat16")
    ring = run(dataclasses.replace(RING, ring_pieces=2, ring_granule_rows=2), "bfloat16")
    assert_defined(sums, 4, Reduction("ring_bf16", 2, 0, 2))
    error = lambda found: np.sqrt(np.mean((found - wide) ** 2))  # noqa: E731
    assert 0.5 * error(total) < error(ring) < 2 * error(total)


@pytest.mark.parametrize("n, reduce", [(3, "ring_bf16"), (5, "ring_fp32")])
def test_odd_rank_counts_give_one_devices_logits_through_padding(folders, sums, n, reduce):
    place = dataclasses.replace(RING, prefill_reduce=reduce, pad=PAD)
    found = prefill(folders(ODD), ODD, n, place)
    assert_defined(sums, n, Reduction(reduce))
    assert abs(found - prefill(folders(ODD), ODD, 1, kj.Placement())).max() < CHOSEN_SUMS


@pytest.mark.parametrize("reduce", ["two_shot", "ring_fp32", "ring_bf16"])
def test_sliced_rows_are_reduced_as_chosen(folders, monkeypatch, reduce):
    """Each rank keeps its rows of a sum, with the bits of its definition: attention of three
    layers and the dense MLP, 2 rows of 16 tokens over four ranks.
    """
    found, asked, real = {}, [], collectives.reduce_scatter

    def spy(partial, how=SUM, axis="model"):
        result = real(partial, how, axis)
        if how != SUM:
            number = len(asked)
            asked.append(how)

            def keep(rank, *values):
                found[number, int(rank)] = [np.asarray(value) for value in values]

            jax.debug.callback(keep, collectives.rank(axis), partial, result)
        return result

    monkeypatch.setattr(collectives, "reduce_scatter", spy)
    place = dataclasses.replace(RING, prefill_reduce=reduce, rows="sliced")
    logits = prefill(folders(MESHED), MESHED, 4, place)
    jax.effects_barrier()
    assert asked == [Reduction(reduce)] * 4 and len(found) == 4 * 4
    for number in range(4):
        parts, kept = zip(*(found[number, rank] for rank in range(4)), strict=True)
        expected = emulate(np.stack(parts), Reduction(reduce))
        assert len(expected) == 2 * T
        np.testing.assert_array_equal(np.concatenate(kept), expected)
    exact = prefill(folders(MESHED), MESHED, 1, kj.Placement())
    assert abs(logits - exact).max() < (CHOSEN_SUMS if reduce != "ring_bf16" else 10 * CHOSEN_SUMS)


# When they are used


def jaxpr(place, T):
    """The text of a step of two rows and T tokens a row."""
    program = make_program(MESHED, kj.make_mesh(model=4), place, "bfloat16")
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, T), (2,)))
    step = program.step_of("decode" if T == 1 else "prefill")
    traced = step.trace(program.weight_shapes, program.state_shapes(2, 64), ids, lengths)
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr))


def test_off_is_the_program_without_the_feature():
    off = dataclasses.replace(RING, prefill_ring_rows=0, ring_pieces=4)
    for width in (1, T):
        assert jaxpr(off, width) == jaxpr(kj.Placement(), width)


def test_a_step_takes_the_ring_from_the_threshold_on_and_never_in_decode():
    at = dataclasses.replace(RING, prefill_ring_rows=2 * T)
    assert "ppermute" in jaxpr(at, T)
    below = jaxpr(at, T // 2)
    assert "ppermute" not in below and "all_to_all" in below  # two_shot
    assert jaxpr(RING, 1) == jaxpr(kj.Placement(), 1)


def test_a_threshold_above_the_chunk_warns_and_is_off(folders):
    place = dataclasses.replace(RING, prefill_ring_rows=17)
    with pytest.warns(UserWarning, match="17 is above the chunk of 16"):
        model = kj.load(folders(MESHED), kj.make_mesh(model=4), place, chunk=16)
    assert model.placement.prefill_ring_rows == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at = dataclasses.replace(place, prefill_ring_rows=16)
        assert kj.load(folders(MESHED), placement=at, chunk=16).placement == at


def test_hops_that_the_ranks_do_not_have_are_refused():
    place = dataclasses.replace(RING, ring_fp32_hops=3)
    with pytest.raises(
        PlacementError, match=r"ring_fp32_hops must lie in 0\.\.2 at 4 ranks, got 3"
    ):
        place.check(MESHED, {"model": 4})
    place.check(MESHED, {"model": 8})


# The bench


def test_reductions_are_measured_and_a_threshold_is_said(capsys, monkeypatch):
    monkeypatch.setattr(bench, "REDUCE_ROWS", (8, 16))
    monkeypatch.setattr(bench, "REDUCE_PIECES", (1, 2))
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert cli.main(["bench", "--reduce", "--shape", "shipped", "--mesh", "1x4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r" 16 +ring_bf16 +2 .* 12\.29 kB", out)  # 2 (4 - 1) / 4 of 16 x 128 x 4 bytes
    assert re.search(
        r"here: (ring_bf16 is not faster|Placement\(prefill_reduce=\"ring_bf16\")", out
    )
    assert cli.main(["bench", "--reduce", "--mesh", "1x1"]) == 2


def test_the_ring_must_win_twice_in_a_row_by_two_per_cent():
    def rows(pieces, *ratios):
        return [(8 << i, "ring_bf16", pieces, 1.0, by, 0) for i, by in enumerate(ratios)]

    assert bench.ring_from(rows(1, 2.0, 0.9, 0.99, 0.9, 0.9)) == (64, 1)
    assert bench.ring_from(rows(1, 2.0, 0.9, 0.99, 0.9)) is None
    assert bench.ring_from(rows(1, 2.0, 0.9, 0.9) + rows(2, 0.9, 0.9, 2.0)) == (8, 2)
    assert bench.ring_from(rows(2, 0.9, 0.9) + rows(1, 0.9, 0.9)) == (8, 1)


def test_the_shipped_model_gives_the_logits_of_the_plain_sum():
    """64 tokens of trained weights over four ranks in float32."""
    ids, mesh, logits = np.arange(64)[None] + 40, kj.make_mesh(model=4), {}
    for how in ("sum", "ring_bf16"):
        place = kj.Placement(prefill_reduce=how, prefill_ring_rows=16)
        model = kj.load(ROOT / "kimi_jax" / "shipped", mesh, place, "float32")
        logits[how], _ = model.prefill(model.new_state(1, 128), ids)
    worst = np.abs(np.asarray(logits["ring_bf16"]) - np.asarray(logits["sum"])).max()
    assert worst < CHOSEN_SUMS
