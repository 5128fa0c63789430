"""Attention residuals: the mixture, the push, and the order of both through a decoder's layers."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import bits, close, filled, of_type, quick_jit, small_config
from tolerances import MIX, SKELETON

from kimi_jax.model.decoder import Layer
from kimi_jax.model.mxfp4 import PLAIN
from kimi_jax.model.residual import Mix, mix, push
from kimi_jax.parallel.mesh import DATA, MODEL

WIDE = ("float32", "float64")
EPS = 1e-5
N, P, D = 3, 4, 24


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def random(rng, *shape, dtype="float64"):
    return of_type(rng.normal(size=shape), dtype)


run_mix, run_push = quick_jit(mix, static_argnums=4), quick_jit(push)
static_mix, static_push = (
    quick_jit(mix, static_argnums=(2, 4)),
    quick_jit(push, static_argnums=(2, 3)),
)


@pytest.mark.parametrize("case", ["a0", "a1", "a2"])
@pytest.mark.parametrize("dtype", WIDE)
def test_mix_equals_golden(ops, case, dtype):
    g = ops("attn_res")
    norm, proj = (g[f"{case}.{name}"].astype(np.float64).reshape(-1) for name in ("norm", "proj"))
    x, bank = (of_type(g[f"{case}.{name}"], dtype) for name in ("prefix_sum", "bank"))
    direction = of_type(norm * proj, dtype)
    actual, _ = static_mix(x, bank.swapaxes(0, 1), bank.shape[1], direction, EPS)
    close(actual, g[f"{case}.y_f64"], MIX)


@pytest.mark.parametrize("case", ["a0", "a1", "a2"])
@pytest.mark.parametrize("traced", [False, True])
def test_mix_equals_golden_bit_for_bit_in_bfloat16(ops, case, traced):
    g = ops("attn_res")
    x = jnp.asarray(g[f"{case}.prefix_sum_bf16"])
    bank = jnp.asarray(g[f"{case}.bank_bf16"].swapaxes(0, 1))
    module = filled(Mix(small_config(hidden=x.shape[1]), jnp.bfloat16))
    module.norm.set_value(jnp.asarray(g[f"{case}.norm"]))
    module.proj.set_value(jnp.asarray(g[f"{case}.proj"][0]))
    count = jnp.int32(len(bank)) if traced else len(bank)
    np.testing.assert_array_equal(bits(module(x, bank, count)[0]), bits(g[f"{case}.y_bf16"]))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("dtype", WIDE)
def test_mix_equals_oracle(rng, count, dtype):
    """Values of unlike sizes: scores see them normalised, the sum takes them as they are."""
    bank = rng.normal(size=(N, P, D)) * np.array([1, 30, 0.01])[:, None, None]
    x, norm, proj = rng.normal(size=(P, D)), rng.uniform(0.5, 1.5, D), rng.normal(size=D)
    expected = oracles.mix(np.stack([*bank[:count], x]), norm, proj, EPS)
    x, bank, direction = (of_type(a, dtype) for a in (x, bank, norm * proj))
    for a, e in zip(static_mix(x, bank, count, direction, EPS), expected, strict=True):
        close(a, e, MIX)


def test_rows_beyond_the_count_weigh_nothing(rng):
    """A traced count masks what a static one cuts off, whatever the spare rows hold."""
    x, direction = random(rng, P, D), random(rng, D)
    bank = random(rng, N, P, D)
    bank[2] = 1e30
    for count in range(3):
        static, weights = static_mix(x, bank, count, direction, EPS)
        traced, traced_weights = run_mix(x, bank, np.int32(count), direction, EPS)
        close(traced, static, MIX)
        close(traced_weights, [*weights[:-1], *np.zeros((N - count, P)), weights[-1]], MIX)


@pytest.mark.parametrize("pushing", [False, True])
def test_a_traced_push_equals_a_static_one(rng, pushing):
    x, bank = random(rng, P, D), random(rng, N, P, D)
    for count in range(N):
        static = static_push(x, bank, count, pushing)
        traced = run_push(x, bank, np.int32(count), np.bool_(pushing))
        for a, e in zip(traced, static, strict=True):
            np.testing.assert_array_equal(a, e)


def test_a_push_moves_the_sum_into_the_bank_and_restarts_it_at_zero(rng):
    x, bank = random(rng, P, D), random(rng, N, P, D)
    rest, pushed, count = static_push(x, bank, 1, True)
    np.testing.assert_array_equal(rest, np.zeros((P, D)))
    np.testing.assert_array_equal(pushed, [bank[0], x, bank[2]])
    assert count == 2
    for a, b in zip(static_push(x, bank, 1, False), (x, bank, 1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_full_bank_is_rewritten_with_what_it_holds(rng):
    """A traced push that does not happen has no free slot to aim at when the bank is full."""
    x, bank = random(rng, P, D), random(rng, N, P, D)
    rest, after, count = run_push(x, bank, np.int32(N), np.bool_(False))
    np.testing.assert_array_equal(after, bank)
    np.testing.assert_array_equal(rest, x)
    assert count == N


def test_mixing_before_the_push_counts_the_sum_once(rng):
    """It equals mixing the new bank without a partial, and not with the empty one as a value."""
    x, bank, direction = random(rng, P, D), random(rng, N, P, D), random(rng, D)
    before, _ = static_mix(x, bank, 2, direction, EPS)
    rest, pushed, count = static_push(x, bank, 2, True)
    assert count == 3
    close(before, oracles.mix(pushed, direction, 1.0, EPS)[0], MIX)
    after, _ = static_mix(rest, pushed, 3, direction, EPS)
    assert np.abs(after - before).max() > 0.05


def test_an_extra_row_of_zeros_only_rescales(rng):
    """Its score is 0 and it adds nothing: every token's mixture shrinks by one factor."""
    x, bank, direction = random(rng, P, D), random(rng, N, P, D), random(rng, D)
    bank[2] = 0
    plain, weights = static_mix(x, bank, 2, direction, EPS)
    extra, extra_weights = static_mix(x, bank, 3, direction, EPS)
    factor = extra_weights[-1] / weights[-1]
    assert factor.max() < 1
    close(extra, plain * factor[:, None], MIX)


def run_layer(number, x, bank):
    """Layer `number`, counted from 1, of 25 dense KDA layers in blocks of 12: the next bank and the
    weights of its two mixtures.
    """
    config = small_config(layers=25, residual_block=12, mla_layers=(), dense_layers=25)
    module = filled(Layer(config, jnp.float32, number - 1, quantization=PLAIN))
    state, step = oracles.fresh_kda(config, 1, "float32"), oracles.step_of([0], [2], 2)
    state = jax.tree.map(jnp.asarray, state)

    def call(x, bank):
        _, bank, _, mixtures, _ = module(x, bank, state, step, number - 1)
        return bank, *mixtures

    for axis in (MODEL, DATA):
        call = jax.vmap(call, axis_name=axis, axis_size=1, in_axes=None, out_axes=None)
    return quick_jit(call)(x, bank)


@pytest.mark.parametrize("layer, rows", [(1, 1), (2, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_the_bank_of_a_layer_holds_every_block_begun(rng, layer, rows):
    """A layer that begins a block adds the sum before it as the next row; all else stays. Attention
    mixes the rows before that, the MLP those after.
    """
    x, bank = (random(rng, *shape, dtype="float32") for shape in ((2, D), (3, 2, D)))
    after, attention, mlp = run_layer(layer, x, bank)
    begins = (layer - 1) % 12 == 0
    expected = bank.copy()
    if begins:
        expected[rows - 1] = x
    np.testing.assert_array_equal(after, expected)
    assert attention.shape == (rows - begins + 1, 2) and mlp.shape == (rows + 1, 2)
    for weights in (attention, mlp):
        np.testing.assert_allclose(weights.sum(0), 1, atol=1e-6)
        assert (weights > 0).all()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", WIDE)
def test_seven_layers_in_blocks_of_three_equal_the_skeleton(rng, traced, dtype):
    """Mix before the push, the partial restarts, the last mixture sees the partial of its own."""
    block, layers = 3, 7
    matrices = rng.normal(0, 0.3, (layers, 2, D, D))
    mixers = np.stack([rng.uniform(0.5, 1.5, (15, D)), rng.normal(size=(15, D))], 1)
    x = rng.normal(size=(P, D))

    @quick_jit
    def run(x, indices):
        bank, feed = jnp.zeros((3, P, D), dtype), jnp.asarray(matrices, dtype)
        direction = jnp.asarray(mixers[:, 0] * mixers[:, 1], dtype)
        for i in range(layers):
            index = indices[i] if traced else i
            count = -(-index // block)
            h, _ = mix(x, bank, count, direction[2 * i], EPS)
            x, bank, count = push(x, bank, count, index % block == 0)
            x = x + h @ feed[i, 0]
            x = x + mix(x, bank, count, direction[2 * i + 1], EPS)[0] @ feed[i, 1]
        return mix(x, bank, 3, direction[-1], EPS)[0]

    pairs = [(lambda h, m=m: h @ m[0], lambda h, m=m: h @ m[1]) for m in matrices]
    expected, rows = oracles.decoder(x, mixers, pairs, block, EPS)
    assert rows == 3
    close(run(of_type(x, dtype), np.arange(layers, dtype=np.int32)), expected, SKELETON)
