"""Sums over ranks: the bits of their definitions, the published errors, the bytes they say."""

import functools
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import ROOT
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from kimi_jax import make_mesh
from kimi_jax.parallel import reductions
from kimi_jax.parallel.collectives import all_reduce, reduce_scatter, round_to
from kimi_jax.parallel.reductions import (
    Reduction,
    Traffic,
    choose,
    emulate,
    emulate_exact,
    traffic,
    two_shot_rows,
)

SUM, TWO_SHOT, RING_FP32 = map(Reduction, ("sum", "two_shot", "ring_fp32"))
RING = Reduction("ring_bf16")
MIXED = Reduction("ring_bf16", pieces=2, fp32_hops=1, granule_rows=2)
RANKS = (2, 3, 4, 8)
SHAPES = ((24, 10), (13, 5))  # rows that every n divides, and rows that none does
CASES = [
    *((n, how) for n in RANKS for how in (SUM, TWO_SHOT, RING_FP32, RING)),
    *((n, MIXED) for n in (3, 4, 8)),
    (2, Reduction("ring_bf16", pieces=3, granule_rows=1)),
    (4, Reduction("ring_bf16", fp32_hops=2)),
    (8, Reduction("ring_bf16", pieces=2, fp32_hops=6)),
]


def gaussian(rng, shape):
    return rng.normal(size=shape)


def heavy(rng, shape):
    return rng.standard_t(2.5, shape)


def opposite(rng, shape):
    partials = rng.normal(size=shape)
    half = shape[0] // 2
    partials[half : 2 * half] = -partials[:half] + 0.2 * partials[half : 2 * half]
    return partials


def order_matters(rng, shape):
    """Even in float32: what the first rank adds dwarfs the rest, and the last takes it away."""
    partials = rng.normal(size=shape)
    partials[0] *= 2**22
    partials[-1] = -partials[0]
    return partials


def whole_numbers(rng, shape):
    return rng.integers(-16, 17, shape)


def zeros_of_both_signs(rng, shape):
    return rng.choice([0.0, -0.0], shape)


KINDS = (gaussian, heavy, opposite, order_matters, whole_numbers, zeros_of_both_signs)


def draw(kind, n, shape, dtype=ml_dtypes.bfloat16, seed=0):
    return kind(np.random.default_rng(seed), (n, *shape)).astype(dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@functools.cache
def program(n, run):
    """run(partial) on n devices: partials [n, P, X] -> what each rank ends with [n, ...]."""
    if len(jax.devices()) < n:
        pytest.skip("XLA_FLAGS=--xla_force_host_platform_device_count=8 gives the devices")
    spec = PartitionSpec("model")
    return jax.jit(
        jax.shard_map(
            lambda partials: jax.tree.map(lambda x: x[None], run(partials[0])),
            mesh=make_mesh(model=n),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


@functools.cache
def both(how):
    """The sum and the scatter half of one partial, in one program."""
    return lambda partial: (all_reduce(partial, how), reduce_scatter(partial, how))


def run_both(n, how, partials):
    return map(bits, program(n, both(how))(partials))


def assert_sum_is_defined(n, how, partials):
    """Every rank holds the bits of the definition."""
    whole, _ = run_both(n, how, partials)
    expected = bits(emulate(partials, how))
    np.testing.assert_array_equal(whole, np.broadcast_to(expected, whole.shape))


def assert_rows_are_those_of_the_sum(n, how, partials):
    """Each rank keeps its rows of the definition, and zeros where there is no row left."""
    _, local = run_both(n, how, partials)
    expected = bits(emulate(partials, how))
    rows = local.reshape(-1, local.shape[-1])
    assert local.shape[1] == -(-len(expected) // n)
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    assert not rows[len(expected) :].any()


HALVES = {"sum": assert_sum_is_defined, "scattered rows": assert_rows_are_those_of_the_sum}
each_half = pytest.mark.parametrize("half", HALVES)


def cases_of(n, how):
    """Partials of every kind; a row count that every n divides for plain algorithms only."""
    for shape in SHAPES if how == Reduction(how.algorithm) else SHAPES[1:]:
        for kind in KINDS:
            yield draw(kind, n, shape)


@pytest.mark.parametrize("n, how", CASES)
def test_every_rank_holds_the_bits_of_the_definition(n, how):
    for partials in cases_of(n, how):
        assert_sum_is_defined(n, how, partials)


@pytest.mark.parametrize("n, how", CASES)
def test_scattered_rows_have_the_bits_of_the_sum(n, how):
    for partials in cases_of(n, how):
        assert_rows_are_those_of_the_sum(n, how, partials)


@each_half
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", [SUM, TWO_SHOT, MIXED])
def test_wider_types_are_reduced_by_their_definition(how, dtype, half):
    HALVES[half](3, how, draw(opposite, 3, SHAPES[1], dtype))


@pytest.mark.parametrize("dtype, near", [("float32", 1e-6), ("float64", 1e-15)])
@pytest.mark.parametrize("how", [SUM, TWO_SHOT, MIXED])
def test_wider_types_keep_their_own_precision(how, dtype, near):
    partials = draw(opposite, 3, SHAPES[1], dtype)
    np.testing.assert_allclose(emulate(partials, how), partials.sum(0, float), atol=near)


def test_the_exact_sum_is_in_rank_order():
    for n in (3, 4, 8):
        partials = draw(order_matters, n, SHAPES[0])
        other = bits(emulate_exact(np.roll(partials, 1, 0)))
        assert (bits(emulate_exact(partials)) != other).mean() > 0.1  # else the data shows nothing


@each_half
@pytest.mark.parametrize("how", [TWO_SHOT, RING_FP32, RING], ids=lambda how: how.algorithm)
def test_fewer_rows_than_ranks(how, half):
    HALVES[half](4, how, draw(gaussian, 4, (3, 5)))


def test_a_tensor_is_cut_flat_where_the_ranks_divide_its_rows():
    """The ring as it is published: W chunks of the flat tensor, chunk i summed from rank i on."""
    n, partials = 4, draw(gaussian, 4, SHAPES[0])
    flat = partials.reshape(n, n, -1)
    expected = np.empty_like(flat[0])
    for i in range(n):
        total = flat[i, i]
        for rank in range(i + 1, i + n):
            total = (total.astype(np.float32) + flat[rank % n, i]).astype(ml_dtypes.bfloat16)
        expected[i] = total
    whole, _ = run_both(n, RING, partials)
    np.testing.assert_array_equal(whole[0].reshape(n, -1), bits(expected))


def first_rank_of_eight(how):
    """The bits of a sum that rank 0 of 8 holds."""
    whole, _ = run_both(8, how, draw(gaussian, 8, SHAPES[0]))
    return whole[0]


def test_the_exact_ring_gives_the_bits_of_two_shot():
    np.testing.assert_array_equal(first_rank_of_eight(TWO_SHOT), first_rank_of_eight(RING_FP32))


def test_the_rounding_ring_gives_other_bits_than_two_shot():
    assert (first_rank_of_eight(TWO_SHOT) != first_rank_of_eight(RING)).mean() > 0.2


def test_two_ranks_round_once_and_so_exactly():
    for kind in KINDS:
        partials = draw(kind, 2, SHAPES[0])
        np.testing.assert_array_equal(bits(emulate(partials, RING)), bits(emulate_exact(partials)))


def test_whole_numbers_are_exact():
    partials = draw(whole_numbers, 8, SHAPES[0])
    for how in (TWO_SHOT, RING, MIXED):
        np.testing.assert_array_equal(emulate(partials, how), partials.astype(int).sum(0))


def test_all_fp32_hops_leave_one_rounding():
    """In another order than two_shot, so a last bit may differ here and there."""
    partials = draw(opposite, 8, (64, 40))
    how = Reduction("ring_bf16", fp32_hops=6)
    assert (bits(emulate(partials, how)) != bits(emulate_exact(partials))).mean() < 1e-3


def test_pieces_never_change_bits():
    """Uneven ones, and more than a chunk has rows, included."""
    partials = draw(gaussian, 4, (12, 40))
    expected = bits(emulate(partials, RING))
    for pieces in (2, 100):
        run = functools.partial(all_reduce, how=Reduction("ring_bf16", pieces=pieces))
        np.testing.assert_array_equal(bits(program(4, run)(partials))[3], expected)


GRANULES = Reduction("ring_bf16", granule_rows=2)


def thirds_equal_the_whole(how):
    """Whether 24 rows over 4 ranks, reduced at once, have the bits of three times 8 rows."""
    partials = draw(gaussian, 4, (24, 40))
    parts = [bits(emulate(part, how)) for part in np.split(partials, [8, 16], axis=1)]
    return np.array_equal(np.concatenate(parts), bits(emulate(partials, how)))


def test_with_granules_parts_of_a_prefill_have_the_bits_of_the_whole():
    assert thirds_equal_the_whole(GRANULES)


def test_without_granules_parts_of_a_prefill_have_other_bits():
    assert not thirds_equal_the_whole(RING)


@each_half
def test_granules_are_reduced_by_their_definition(half):
    HALVES[half](4, GRANULES, draw(gaussian, 4, (24, 40)))


@pytest.mark.parametrize("how, calls", [(TWO_SHOT, 100), (RING_FP32, 100), (RING, 2000)], ids=str)
def test_repeated_calls_give_equal_bits_whatever_ran_between(how, calls):
    """Every tenth call comes after one on NaN alone."""
    run = program(8, both(how))
    partials = draw(gaussian, 8, SHAPES[1])
    poison = np.full_like(partials, np.nan)
    expected = bits(run(partials)[0])
    for call in range(calls):
        if call % 10 == 0:
            assert np.isnan(np.asarray(run(poison)[0], np.float32)).all()
        np.testing.assert_array_equal(bits(run(partials)[0]), expected)


def test_a_nan_stays_in_its_element():
    partials = draw(gaussian, 4, SHAPES[1])
    expected = emulate(partials, RING)
    partials[2, 6, 3] = np.nan
    whole = np.asarray(program(4, both(RING))(partials)[0])
    spoilt = np.isnan(whole.astype(np.float32))
    assert spoilt[:, 6, 3].all() and spoilt.sum() == 4
    np.testing.assert_array_equal(whole[~spoilt], np.broadcast_to(expected, whole.shape)[~spoilt])


def test_rounding_is_that_of_bfloat16_for_every_kind_of_number():
    """Ties, subnormal numbers, infinities and overflow included, and kept where it is undone."""
    numbers = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    numbers[:50_000] = numbers[:50_000] & 0xFFFF0000 | 0x8000  # ties
    numbers = numbers.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    rounded = jax.jit(lambda x: round_to(x, jnp.bfloat16).astype(jnp.float32))(numbers)
    with np.errstate(over="ignore"):
        expected = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bits(rounded), bits(expected))


def test_no_cast_to_a_narrower_type_goes_without_its_rounding():
    """XLA on CPU keeps such casts, other compilers do not: so this is seen in the program alone."""
    for how in (TWO_SHOT, RING_FP32, RING):
        program_of = jax.make_jaxpr(program(4, both(how)))(draw(gaussian, 4, SHAPES[1]))
        rounded, casts = set(), 0
        for equation in equations(program_of.jaxpr):
            if equation.primitive.name == "reduce_precision":
                rounded.update(equation.outvars)
            elif equation.primitive.name == "convert_element_type":
                (x,), (y,) = equation.invars, equation.outvars
                if x.aval.dtype == jnp.float32 and y.aval.dtype == jnp.bfloat16:
                    casts += 1
                    assert x in rounded
        assert casts == (6 if how == RING else 2)


# The errors that were published for these sums.


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import ring_error

        return ring_error


@pytest.fixture(scope="module")
def measured(table):
    """(case, error by algorithm) of every row of the published table."""
    return list(table.table(rows=96, width=1024))


def slack(case):
    """3 %, and 6 % where a tail has no finite fourth moment."""
    return 0.06 if "2.5" in case.name or "log" in case.name else 0.03


def test_the_ring_is_as_far_from_the_exact_sum_as_published(measured):
    for case, found in measured:
        low, _, high = case.ratio.partition("..")
        least, most = float(low) * (1 - slack(case)), float(high or low) * (1 + slack(case))
        assert least < found["ring"] / found["exact"] < most, case


def test_exact_errors_are_those_published(measured):
    published = [(case, found) for case, found in measured if case.exact]
    assert published
    for case, found in published:
        assert found["exact"] == pytest.approx(float(case.exact), rel=slack(case)), case


def test_each_hop_in_float32_lowers_the_error_of_the_ring(measured):
    for case, found in measured:
        errors = [error for name, error in found.items() if name != "exact"]
        assert errors == sorted(errors, reverse=True), case


def test_all_hops_in_float32_are_as_good_as_the_exact_sum(measured):
    for case, found in measured:
        *_, last = (error for name, error in found.items() if name != "exact")
        assert last == pytest.approx(found["exact"], rel=1e-2), case


@pytest.fixture(scope="module")
def cancelling_ratios(table):
    """The ring's error over the exact one by what cancellation leaves."""
    cases = {
        noise: table.Case("", 8, table.cancelling(noise, 4), "", "", "") for noise in (0.2, 0.4)
    }
    found = {noise: table.errors(case, 64, 512) for noise, case in cases.items()}
    return {noise: errors["ring"] / errors["exact"] for noise, errors in found.items()}


def test_a_ring_that_cancels_has_ten_times_the_exact_error(cancelling_ratios):
    assert 10 < cancelling_ratios[0.2] < 13


def test_the_error_of_the_ring_grows_with_cancellation(cancelling_ratios):
    assert cancelling_ratios[0.4] < 0.6 * cancelling_ratios[0.2]


# Options, choice, traffic.


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(algorithm="nccl"), "algorithm must be one of sum, two_shot"),
        (dict(algorithm="ring_bf16", pieces=0), "pieces must be a whole number >= 1"),
        (dict(algorithm="ring_bf16", granule_rows=-1), "granule_rows must be a whole number"),
        (dict(algorithm="ring_bf16", fp32_hops=True), "fp32_hops must be a whole number"),
        (dict(algorithm="two_shot", fp32_hops=1), "fp32_hops is for ring_bf16"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        Reduction(**options)


TAKES_HOPS = {
    "the program": lambda how, n: program(n, both(how))(draw(gaussian, n, SHAPES[1])),
    "the definition": lambda how, n: emulate(draw(gaussian, n, SHAPES[1]), how),
    "traffic": lambda how, n: traffic(how, n, 8, 8, "bfloat16"),
    "choose": lambda how, n: select(how, n=n),
}


@pytest.mark.parametrize("entry", TAKES_HOPS)
@pytest.mark.parametrize("n, hops", [(2, 1), (4, 3), (8, 7)])
def test_more_fp32_hops_than_there_are_is_refused(n, hops, entry):
    with pytest.raises(ValueError, match=rf"fp32_hops must lie in 0\.\.{n - 2}"):
        TAKES_HOPS[entry](Reduction("ring_bf16", fp32_hops=hops), n)


def select(how=RING, step="prefill", capacity=2048, chunk=4096, threshold=1024, n=8, **more):
    return choose(how, step, capacity=capacity, chunk=chunk, threshold=threshold, n=n, **more)


every_choice = pytest.mark.parametrize(
    "how, n", [(how, n) for how in (SUM, TWO_SHOT, RING_FP32, RING) for n in RANKS]
)


@every_choice
@pytest.mark.parametrize("capacity, threshold", [(2048, 1024), (1024, 1024), (4096, 4096)])
def test_a_prefill_from_the_threshold_on_takes_what_was_asked_for(how, n, capacity, threshold):
    assert select(how, n=n, capacity=capacity, threshold=threshold) == how


@every_choice
def test_a_prefill_below_the_threshold_takes_two_shot(how, n):
    assert select(how, n=n, capacity=1023) == TWO_SHOT


@every_choice
@pytest.mark.parametrize("step", ["decode", "verify"])
def test_other_steps_than_prefill_take_the_plain_sum(how, n, step):
    assert select(how, step, n=n) == SUM


@every_choice
@pytest.mark.parametrize("step", ["prefill", "decode", "verify"])
def test_a_threshold_of_zero_is_the_plain_sum(how, n, step):
    assert select(how, step, n=n, threshold=0) == SUM


def test_a_threshold_above_the_chunk_does_nothing_but_warn():
    with pytest.warns(UserWarning, match="4097 is above the chunk of 4096"):
        assert select(threshold=4097, capacity=4096) == SUM
    with warnings.catch_warnings(action="error"):
        select(threshold=4096)


@pytest.mark.parametrize("threshold", [-1, 2.5, 1024.0, True, float("nan")])
def test_bad_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be a whole number >= 0"):
        select(threshold=threshold)


@pytest.mark.parametrize("step", ["decode", "verify"])
@pytest.mark.parametrize("how", [RING, RING_FP32], ids=lambda how: how.algorithm)
def test_a_ring_demanded_outside_prefill_is_refused(how, step):
    with pytest.raises(ValueError, match=f"{how.algorithm} is for prefill, not for a"):
        select(how, step, demanded=True)


def test_two_shot_may_be_demanded_in_decode():
    assert select(TWO_SHOT, "decode", demanded=True) == TWO_SHOT


def test_a_ring_that_is_demanded_needs_no_threshold():
    assert select(RING, capacity=8, threshold=0, demanded=True) == RING


def test_an_unknown_step_is_refused():
    with pytest.raises(ValueError, match="step must be one of prefill, decode, verify"):
        select(step="draft")


def test_scratch_is_made_for_the_largest_prefill_below_the_threshold():
    assert two_shot_rows((4096, 512, 1023, 1024), 1024) == 1023
    assert two_shot_rows((1024, 4096), 1024) == two_shot_rows((8, 16), 0) == 0


def test_switched_off_the_program_is_that_of_the_plain_sum():
    partials = draw(gaussian, 4, SHAPES[0])
    off = program(4, functools.partial(all_reduce, how=select(threshold=0, n=4)))
    plain = program(4, lambda partial: jax.lax.psum(partial, "model"))
    assert str(jax.make_jaxpr(off)(partials)) == str(jax.make_jaxpr(plain)(partials))


on_one_rank = pytest.mark.parametrize(
    "how", [SUM, TWO_SHOT, RING_FP32, MIXED, Reduction("ring_bf16", fp32_hops=3)], ids=str
)


@on_one_rank
def test_one_rank_keeps_its_partial_as_it_is(how):
    partials = draw(gaussian, 1, SHAPES[0])
    for kept in run_both(1, how, partials):
        np.testing.assert_array_equal(kept, bits(partials))


@on_one_rank
def test_the_definition_for_one_rank_is_its_partial(how):
    partials = draw(gaussian, 1, SHAPES[0])
    np.testing.assert_array_equal(bits(emulate(partials, how)), bits(partials[0]))


@on_one_rank
def test_one_rank_sends_nothing(how):
    assert sent(program(1, both(how)), draw(gaussian, 1, SHAPES[0])) == ({}, 0)


@on_one_rank
def test_one_rank_is_said_to_send_nothing(how):
    assert traffic(how, 1, 8, 8, "bfloat16") == Traffic(0, 0, 0)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from equations(value.jaxpr if isinstance(value, ClosedJaxpr) else value)


def sent(run, partials):
    """Collectives by name, and the bytes a rank sends in them: XLA on CPU would widen bfloat16."""
    n, calls, total = len(partials), Counter(), 0
    for equation in equations(jax.make_jaxpr(run)(partials).jaxpr):
        name = equation.primitive.name
        size = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        share = {"ppermute": size, "all_to_all": size * (n - 1) // n, "all_gather": size * (n - 1)}
        if name in share:
            calls[name] += 1
            total += share[name]
        assert name in share or "axis_name" not in equation.params or name == "axis_index"
    return dict(calls), total


@pytest.mark.parametrize("half", [all_reduce, reduce_scatter])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n, how", [case for case in CASES if case[1] != SUM])
def test_traffic_is_what_the_program_sends(n, how, shape, half):
    partials = draw(gaussian, n, shape)
    run = program(n, functools.partial(half, how=how))
    calls, total = sent(run, partials)
    rows, width = shape
    said = traffic(how, n, rows, width, "bfloat16", scatter=half is reduce_scatter)
    assert said.sent == total
    chunk_rows = -(-rows // (n * (how.granule_rows or 1))) * (how.granule_rows or 1)
    assert said.steps * min(how.pieces, chunk_rows) == sum(calls.values())


LARGE = (8, 3072, 7168, "bfloat16")  # ranks, rows, width of a published prefill
LARGE_BYTES = 3072 * 7168 * 2


def test_the_ring_sends_and_holds_what_was_published():
    wanted = Traffic(sent=2 * 7 * LARGE_BYTES // 8, steps=14, scratch=int(73.5 * 2**20))
    assert traffic(RING, *LARGE) == wanted


def test_the_ring_sends_no_more_than_the_plain_sum():
    assert traffic(RING, *LARGE).sent == traffic(SUM, *LARGE).sent


def test_the_plain_sum_of_one_row_takes_one_step():
    expected = Traffic(sent=2 * 7 * 7168 * 2 // 8, steps=1)
    assert traffic(SUM, 8, 1, 7168, "bfloat16") == expected


def test_the_exact_ring_scatters_four_times_the_bytes_of_two_shot():
    exact = traffic(RING_FP32, *LARGE, scatter=True).sent
    assert exact == 7 * LARGE_BYTES // 2 == 4 * traffic(TWO_SHOT, *LARGE, scatter=True).sent


@pytest.fixture
def asked_again():
    """The answer of this jaxlib is kept: asked anew in a test, and forgotten after it."""
    reductions._known.cache_clear()
    yield
    reductions._known.cache_clear()


def test_the_flag_of_the_copy_engines_is_one_that_this_jaxlib_knows(asked_again):
    assert reductions.copy_engine_flags().startswith("--xla_gpu_")
    assert reductions.command_buffer_flags().startswith("--xla_gpu_")


def test_a_flag_that_this_jaxlib_does_not_know_is_refused_by_name(asked_again, monkeypatch):
    monkeypatch.setattr(reductions, "_COPY_ENGINE", "--xla_gpu_no_such_flag=true")
    with pytest.raises(NotImplementedError, match="does not know --xla_gpu_no_such_flag"):
        reductions.copy_engine_flags()
