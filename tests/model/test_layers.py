"""Norms, SiTU, linear maps, the gated MLP: equal to their equations, bit for bit in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import bits, close, filled, small_config, weights_of
from tolerances import LINEAR, MLP_OUTPUT, NORM, SITU

from kimi_jax.model.layers import MLP, layer_norm, linear, linear_wide, rms_norm, situ

WIDE = ("float32", "float64")


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_equals_golden_bit_for_bit_in_bfloat16(ops, eps):
    g = ops("norms_conv")
    x, w, y = (jnp.asarray(g[f"rms{eps:.0e}.{name}"]) for name in ("x_bf16", "w", "y_bf16"))
    np.testing.assert_array_equal(bits(rms_norm(x, w, eps)), bits(y))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_equals_golden(ops, eps, dtype):
    g = ops("norms_conv")
    x, w, y = (g[f"rms{eps:.0e}.{name}"].astype(np.float64) for name in ("x_f32", "w", "y_f32"))
    actual = rms_norm(jnp.asarray(x, dtype), jnp.asarray(w, dtype), eps)
    close(actual, oracles.rms_norm(x, w, eps), NORM)
    close(actual.astype(jnp.float32), y, NORM)


def test_rms_norm_rounds_before_the_weight(rng):
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((8, 24), 24))
    normed = oracles.rms_norm(oracles.as_float64(x), 1.0, 1e-5).astype(jnp.bfloat16)
    expected = (normed.astype(np.float32) * np.asarray(w, np.float32)).astype(jnp.bfloat16)
    late = oracles.rms_norm(oracles.as_float64(x), oracles.as_float64(w), 1e-5)
    assert (expected != late.astype(jnp.bfloat16)).any()  # else this input shows nothing
    np.testing.assert_array_equal(bits(rms_norm(x, w, 1e-5)), bits(expected))


@pytest.mark.parametrize("dtype", WIDE)
def test_layer_norm_equals_oracle(rng, dtype):
    x, w, bias = rng.normal(3, 2, (5, 3, 12)), rng.normal(size=12), rng.normal(size=12)
    actual = layer_norm(*(jnp.asarray(a, dtype) for a in (x, w, bias)), 1e-5)
    close(actual, oracles.layer_norm(x, w, bias, 1e-5), NORM)


@pytest.mark.parametrize("name", ["s0", "s1"])
@pytest.mark.parametrize("dtype", WIDE)
def test_situ_equals_golden(ops, name, dtype):
    g = ops("situ")
    b1, b2 = map(float, g[f"{name}.beta"])
    gate, up = jnp.split(jnp.asarray(g[f"{name}.gate_up"], dtype), 2, axis=-1)
    config = small_config(situ_beta=b1, situ_linear_beta=b2)
    close(situ(gate, up, config), g[f"{name}.y_f64"], SITU)


@pytest.mark.parametrize("name", ["s0", "s1"])
def test_situ_equals_golden_bit_for_bit_in_bfloat16(ops, name):
    g = ops("situ")
    b1, b2 = map(float, g[f"{name}.beta"])
    gate, up = jnp.split(jnp.asarray(g[f"{name}.gate_up_bf16"]), 2, axis=-1)
    actual = situ(gate, up, small_config(situ_beta=b1, situ_linear_beta=b2)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(bits(actual), bits(g[f"{name}.y_bf16"]))


def test_situ_with_a_huge_linear_beta_leaves_up_alone(ops):
    """The golden case without a linear bound is the limit of the formula."""
    g = ops("situ")
    gate, up = jnp.split(jnp.asarray(g["s2.gate_up"], jnp.float64), 2, axis=-1)
    config = small_config(situ_beta=1.0, situ_linear_beta=1e8)
    close(situ(gate, up, config), g["s2.y_f64"], SITU)


def test_situ_is_bounded_by_its_betas_and_is_not_silu():
    gate, up = jnp.asarray([[8.0]]), jnp.asarray([[40.0]])
    by_hand = 4 * np.tanh(2) / (1 + np.exp(-8)) * 25 * np.tanh(1.6)
    close(situ(gate, up, small_config()), [[by_hand]], SITU)
    assert abs(by_hand - 88.8) < 0.1
    assert abs(8 / (1 + np.exp(-8)) * 40 - by_hand) > 200


def test_linear_accumulates_in_float32_and_rounds_once():
    ones = jnp.ones((1, 516), jnp.bfloat16)  # a bfloat16 sum of ones stops at 256
    assert linear(ones, ones).dtype == jnp.bfloat16
    assert float(linear(ones, ones)[0, 0]) == 516
    assert linear_wide(ones, ones).dtype == jnp.float32


def test_linear_wide_is_not_rounded_to_the_type_of_x(rng):
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((4, 33), (7, 33)))
    expected = oracles.as_float64(x) @ oracles.as_float64(w).T
    close(linear_wide(x, w), expected, LINEAR)


@pytest.mark.parametrize("dtype", WIDE)
def test_mlp_equals_oracle(rng, dtype):
    config = small_config()
    module = filled(MLP(config, 20, dtype))
    w, x = weights_of(module), rng.normal(0, 3, (6, 24))
    expected = oracles.mlp(x, w["w_gate"], w["w_up"], w["w_down"], 4.0, 25.0)
    close(module(jnp.asarray(x, dtype)), expected, MLP_OUTPUT)


def test_bfloat16_rows_have_the_bits_of_any_batch(rng):
    w = jnp.asarray(rng.normal(size=(40, 64)) / 8, jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(2, 8, 64)), jnp.bfloat16)
    wide = jax.jit(linear_wide)
    of_batch = bits(wide(x, w))
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(bits(wide(x[:1, :rows], w)), of_batch[:1, :rows])
    close(wide(x[0, 0], w), oracles.as_float64(x[0, 0]) @ oracles.as_float64(w).T, LINEAR)


def test_a_few_rows_have_the_bits_of_a_few_more_and_the_values_of_many(rng):
    """Float32 rows 2 to 15, which CPUs multiply in another form."""
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((40, 64), (16, 64)))
    wide = jax.jit(linear_wide)
    of_fifteen = np.asarray(wide(x[:15], w / 8))
    for rows in (2, 7):
        np.testing.assert_array_equal(wide(x[:rows], w / 8), of_fifteen[:rows])
    for rows in (1, 15, 16):
        wanted = oracles.as_float64(x[:rows]) @ oracles.as_float64(w / 8).T
        close(wide(x[:rows], w / 8), wanted, LINEAR)
