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


def agree(n, how, partials):
    """Every rank holds the bits of the definition; the scattered rows are those of the sum."""
    expected = bits(emulate(partials, how))
    whole, own = run_both(n, how, partials)
    np.testing.assert_array_equal(whole, np.broadcast_to(expected, whole.shape))
    rows = own.reshape(-1, own.shape[-1])
    assert own.shape[1] == -(-len(expected) // n)
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    assert not rows[len(expected) :].any()


@pytest.mark.parametrize("n, how", CASES)
def test_every_rank_holds_the_bits_of_the_definition(n, how):
    plain = how == Reduction(how.algorithm)
    for shape in SHAPES if plain else SHAPES[1:]:
        for kind in KINDS:
            agree(n, how, draw(kind, n, shape))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", [SUM, TWO_SHOT, MIXED])
def test_wider_types_keep_their_own_precision(how, dtype):
    partials = draw(opposite, 3, SHAPES[1], dtype)
    agree(3, how, partials)
    close = {"float32": 1e-6, "float64": 1e-15}[dtype]
    np.testing.assert_allclose(emulate(partials, how), partials.sum(0, float), atol=close)


def test_the_exact_sum_is_in_rank_order():
    for n in (3, 4, 8):
        partials = draw(order_matters, n, SHAPES[0])
        other = bits(emulate_exact(np.roll(partials, 1, 0)))
        assert (bits(emulate_exact(partials)) != other).mean() > 0.1  # else the data shows nothing


def test_fewer_rows_than_ranks():
    for how in (TWO_SHOT, RING_FP32, RING):
        agree(4, how, draw(gaussian, 4, (3, 5)))


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


def test_the_exact_ring_is_two_shot_and_the_rounding_ring_is_not():
    partials = draw(gaussian, 8, SHAPES[0])
    sums = [next(iter(run_both(8, how, partials)))[0] for how in (TWO_SHOT, RING_FP32, RING)]
    np.testing.assert_array_equal(sums[0], sums[1])
    assert (sums[0] != sums[2]).mean() > 0.2


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


def test_granules_make_halves_reproduce_the_whole():
    """24 rows are three times 4 ranks with granules of 2 rows; without granules, bits differ."""
    granules = Reduction("ring_bf16", granule_rows=2)
    partials = draw(gaussian, 4, (24, 40))
    for how, same in ((granules, True), (RING, False)):
        parts = [bits(emulate(part, how)) for part in np.split(partials, [8, 16], axis=1)]
        assert np.array_equal(np.concatenate(parts), bits(emulate(partials, how))) == same
    agree(4, granules, partials)


def test_repeated_calls_give_equal_bits_whatever_ran_between():
    """2,000 calls of the ring, 200 of them after one on NaN alone; 100 and 10 of the others."""
    for how, calls in ((TWO_SHOT, 100), (RING_FP32, 100), (RING, 2000)):
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


def test_errors_reproduce_the_published_table(table):
    """Exact errors to 2 %, ratios to 3 %; the heaviest tail has no finite fourth moment."""
    for case, found in table.table(rows=96, width=1024):
        ratio = found["ring"] / found["exact"]
        low, _, high = case.ratio.partition("..")
        slack = 0.06 if "2.5" in case.name or "log" in case.name else 0.03
        assert float(low) * (1 - slack) < ratio < float(high or low) * (1 + slack), case
        if case.exact:
            assert found["exact"] == pytest.approx(float(case.exact), rel=slack), case
        errors = [error for name, error in found.items() if name != "exact"]
        assert errors == sorted(errors, reverse=True)  # each hop in float32 helps
        assert errors[-1] == pytest.approx(found["exact"], rel=1e-2)


def test_the_error_of_the_ring_grows_with_cancellation(table):
    def ratio(noise):
        found = table.errors(table.Case("", 8, table.cancelling(noise, 4), "", "", ""), 64, 512)
        return found["ring"] / found["exact"]

    assert 10 < ratio(0.2) < 13
    assert ratio(0.4) < 0.6 * ratio(0.2)


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


@pytest.mark.parametrize("n, hops", [(2, 1), (4, 3), (8, 7)])
def test_more_fp32_hops_than_there_are_is_refused(n, hops):
    how = Reduction("ring_bf16", fp32_hops=hops)
    partials = draw(gaussian, n, SHAPES[1])
    for refuse in (
        lambda: program(n, both(how))(partials),
        lambda: emulate(partials, how),
        lambda: traffic(how, n, 8, 8, "bfloat16"),
        lambda: select(how, n=n),
    ):
        with pytest.raises(ValueError, match=rf"fp32_hops must lie in 0\.\.{n - 2}"):
            refuse()


def select(how=RING, step="prefill", capacity=2048, chunk=4096, threshold=1024, n=8, **more):
    return choose(how, step, capacity=capacity, chunk=chunk, threshold=threshold, n=n, **more)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("how", [SUM, TWO_SHOT, RING_FP32, RING])
def test_choice(how, n):
    assert select(how, n=n) == select(how, n=n, capacity=1024) == how
    assert select(how, n=n, capacity=1023) == TWO_SHOT
    assert select(how, n=n, threshold=4096, capacity=4096) == how
    for step in ("decode", "verify"):
        assert select(how, step, n=n) == SUM
    for step in ("prefill", "decode", "verify"):
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


def test_a_ring_demanded_outside_prefill_is_refused():
    for how in (RING, RING_FP32):
        for step in ("decode", "verify"):
            with pytest.raises(ValueError, match=f"{how.algorithm} is for prefill, not for a"):
                select(how, step, demanded=True)
    assert select(TWO_SHOT, "decode", demanded=True) == TWO_SHOT
    assert select(RING, capacity=8, threshold=0, demanded=True) == RING
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


def test_one_rank_moves_nothing():
    partials = draw(gaussian, 1, SHAPES[0])
    for how in (SUM, TWO_SHOT, RING_FP32, MIXED, Reduction("ring_bf16", fp32_hops=3)):
        whole, own = run_both(1, how, partials)
        np.testing.assert_array_equal(whole, bits(partials))
        np.testing.assert_array_equal(own, bits(partials))
        assert sent(program(1, both(how)), partials) == ({}, 0)
        assert traffic(how, 1, 8, 8, "bfloat16") == Traffic(0, 0, 0)
        np.testing.assert_array_equal(bits(emulate(partials, how)), bits(partials[0]))


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


def test_the_ring_sends_the_least_and_the_published_scratch():
    whole = 3072 * 7168 * 2
    ring = traffic(RING, 8, 3072, 7168, "bfloat16")
    assert ring == Traffic(sent=2 * 7 * whole // 8, steps=14, scratch=int(73.5 * 2**20))
    assert ring.sent == traffic(SUM, 8, 3072, 7168, "bfloat16").sent
    assert traffic(SUM, 8, 1, 7168, "bfloat16") == Traffic(sent=2 * 7 * 7168 * 2 // 8, steps=1)
    exact = traffic(RING_FP32, 8, 3072, 7168, "bfloat16", scatter=True)
    assert exact.sent == 7 * whole // 2  # four times what the scatter half of two_shot sends
    assert exact.sent == 4 * traffic(TWO_SHOT, 8, 3072, 7168, "bfloat16", scatter=True).sent


def test_the_flag_of_the_copy_engines_is_one_that_this_jaxlib_knows(monkeypatch):
    flag = reductions.copy_engine_flags()
    assert flag.startswith("--xla_gpu_")
    monkeypatch.setattr(reductions, "_COPY_ENGINE", "--xla_gpu_no_such_flag=true")
    reductions.copy_engine_flags.cache_clear()
    with pytest.raises(NotImplementedError, match="does not know --xla_gpu_no_such_flag"):
        reductions.copy_engine_flags()
    reductions.copy_engine_flags.cache_clear()
