"""MXFP4: decoding equals the numpy definition bit for bit, never through float arithmetic."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load_file

from kimi_jax.model import mxfp4
from kimi_jax.numerics import at_least_float32

GOLDEN = Path(__file__).parents[1] / "golden" / "ops" / "mxfp4.safetensors"
FORMATS = {
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "float32": (np.float32, np.uint32),
    "float64": (np.float64, np.uint64),
}


def unpacked_bits(packed, scale, dtype, unpack=mxfp4.unpack):
    """The bit patterns `unpack` produces, read on the host."""
    with jax.enable_x64(dtype == "float64"):
        values = unpack(jnp.asarray(packed), jnp.asarray(scale), dtype)
        return np.asarray(values).view(FORMATS[dtype][1])


def defined_bits(packed, scale, dtype):
    kind, bits = FORMATS[dtype]
    with np.errstate(over="ignore"):
        return mxfp4.unpack_numpy(packed, scale).astype(kind).view(bits)


@pytest.fixture(scope="module")
def everything():
    """All bytes in all scales: [255, 256] bytes and their scales."""
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (255, 256)).copy()
    scale = np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None], (255, 16)).copy()
    return packed, scale


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_at_every_scale_is_exact(everything, dtype):
    np.testing.assert_array_equal(
        unpacked_bits(*everything, dtype), defined_bits(*everything, dtype)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_at_every_scale_is_exact_when_compiled(everything, dtype):
    compiled = jax.jit(mxfp4.unpack, static_argnums=2)
    np.testing.assert_array_equal(
        unpacked_bits(*everything, dtype, compiled), defined_bits(*everything, dtype)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_values_are_subnormal_and_only_too_large_ones_are_inf(dtype):
    packed = np.full((4, 16), 0x71, np.uint8)  # 0.5 and 6
    scale = np.array([[0], [1], [252], [253]], np.uint8)
    values = mxfp4.unpack(jnp.asarray(packed), jnp.asarray(scale), dtype)
    values = np.asarray(values).astype(np.float64)[:, :2]
    expected = np.ldexp([0.5, 6.0], scale.astype(int) - 127)
    expected[3, 1] = np.inf
    np.testing.assert_array_equal(values, expected)
    assert expected[0, 0] == 2.0**-128


def test_the_low_nibble_comes_first():
    packed = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)[None]
    packed[0, 8] = 0x21
    scale = np.full((1, 1), 127, np.uint8)
    ramp = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5, 1.0]
    np.testing.assert_array_equal(mxfp4.unpack_numpy(packed, scale)[0, :18], ramp)
    packed, scale = jnp.asarray(packed), jnp.asarray(scale)
    np.testing.assert_array_equal(np.asarray(mxfp4.unpack(packed, scale, "float32"))[0, :18], ramp)
    low, high = mxfp4.decode(packed, scale, "float32")
    assert (low[0, 8], high[0, 8]) == (0.5, 1.0)


@pytest.mark.parametrize("case", ["all", "rand", "range"])
def test_golden(case):
    golden = load_file(GOLDEN)
    kinds = [kind for kind in ("f32", "bf16") if f"{case}.w_{kind}" in golden]
    for kind in kinds:
        dtype = {"f32": "float32", "bf16": "bfloat16"}[kind]
        expected = golden[f"{case}.w_{kind}"].view(FORMATS[dtype][1])
        packed, scale = golden[f"{case}.packed"], golden[f"{case}.scale"]
        np.testing.assert_array_equal(unpacked_bits(packed, scale, dtype), expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=30)
def test_representable_weights_come_back_exactly(seed, outputs, groups):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (2, outputs, 16 * groups), dtype=np.uint8)
    scale = rng.integers(0, 255, (2, outputs, groups), dtype=np.uint8)
    weights = mxfp4.unpack_numpy(packed, scale)
    repacked = mxfp4.unpack_numpy(*mxfp4.pack(weights))
    np.testing.assert_array_equal(repacked.view(np.uint64), weights.view(np.uint64))


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float32])
def test_packing_narrow_floats_is_exact_too(kind):
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (64, 32), dtype=np.uint8)
    scale = rng.integers(0, 252, (64, 2), dtype=np.uint8)
    weights = mxfp4.unpack_numpy(packed, scale).astype(kind)
    repacked = mxfp4.unpack_numpy(*mxfp4.pack(weights)).astype(kind)
    assert repacked.tobytes() == weights.tobytes()


FLOATS = st.floats(-1e30, 1e30, allow_nan=False)


@given(arrays.arrays(np.float64, (2, 64), elements=FLOATS))
@settings(max_examples=100)
def test_packing_is_close_and_no_single_code_is_closer(weights):
    packed, scale = mxfp4.pack(weights)
    error = np.abs(mxfp4.unpack_numpy(packed, scale) - weights)
    largest = np.abs(weights).reshape(2, 2, 32).max(axis=-1).repeat(32, axis=-1)
    assert (error <= np.maximum(largest / 4, 2.0**-127)).all()
    unit = np.ldexp(1.0, scale.astype(int) - 127).repeat(32, axis=-1)
    codes = np.concatenate([mxfp4.MAGNITUDES, -mxfp4.MAGNITUDES])
    nearest = np.abs(weights[..., None] - codes * unit[..., None]).min(axis=-1)
    np.testing.assert_array_equal(error, nearest)


def test_the_better_of_two_scales_is_taken():
    saturates = np.full((1, 32), 7.9)  # 6 at scale 1, 8 at scale 2
    assert mxfp4.pack(saturates)[1] == 128
    fits = np.full((1, 32), 6.2)
    assert mxfp4.pack(fits)[1] == 127


def test_ties_go_to_the_even_code():
    weights = np.zeros((1, 32))
    weights[0, :8] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    values = mxfp4.unpack_numpy(*mxfp4.pack(weights))
    np.testing.assert_array_equal(values[0, :8], [6, 0, 1, 1, 2, 2, 4, 4])


@pytest.mark.parametrize("weights", [np.zeros((1, 48)), np.full((1, 32), np.nan)])
def test_what_cannot_be_packed_is_refused(weights):
    with pytest.raises(ValueError, match=r"multiple of 32|NaN"):
        mxfp4.pack(weights)


def test_decode_refuses_what_it_cannot_do():
    packed, scale = jnp.zeros((2, 32), np.uint8), jnp.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match="one scale is for 16 bytes"):
        mxfp4.decode(packed, scale[:, :1], "float32")
    with pytest.raises(ValueError, match="not to float16"):
        mxfp4.decode(packed, scale, "float16")
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        mxfp4.decode(packed, scale, "float64")


@pytest.mark.parametrize("dtype", FORMATS)
def test_matmul_equals_the_product_with_unpacked_weights(dtype):
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (7, 48), dtype=np.uint8)
    scale = rng.integers(120, 130, (7, 3), dtype=np.uint8)
    x = rng.standard_normal((5, 96)).astype(FORMATS[dtype][0])
    with jax.enable_x64(dtype == "float64"):
        product = mxfp4.matmul(jnp.asarray(x), jnp.asarray(packed), jnp.asarray(scale))
        assert product.dtype == at_least_float32(dtype)
    expected = x.astype(np.float64) @ mxfp4.unpack_numpy(packed, scale).T
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-3)


def test_factors_are_the_decoded_weights_but_for_subnormals(everything):
    stored = tuple(map(jnp.asarray, everything))
    pairs = zip(mxfp4._factors(*stored, "float32"), mxfp4.decode(*stored, "float32"), strict=True)
    for factors, weights in pairs:
        normal = np.abs(np.asarray(weights, np.float64)) >= 2.0**-126
        np.testing.assert_array_equal(factors, np.where(normal, weights, 0))


@pytest.mark.parametrize("in_hardware", [False, True])
def test_float32_rows_are_multiplied_as_exactly_in_three_parts(monkeypatch, in_hardware):
    """All 24 bits of mantissa, small and large numbers."""
    monkeypatch.setattr(mxfp4, "multiplies_bfloat16", lambda: in_hardware)
    rng = np.random.default_rng(2)
    packed = jnp.asarray(rng.integers(0, 256, (32, 128), dtype=np.uint8))
    scale = jnp.asarray(rng.integers(120, 130, (32, 8), dtype=np.uint8))
    x = rng.standard_normal((3, 256)).astype(np.float32)
    x[1] *= 1e-20
    x[2] = 0
    x[2, 5] = np.finfo(np.float32).max
    scale = scale.at[:, 0].set(100)
    product = jax.jit(mxfp4.matmul)(x, packed, scale)
    exact = x.astype(np.float64) @ mxfp4.unpack_numpy(*map(np.asarray, (packed, scale))).T
    size = np.abs(x) @ np.abs(mxfp4.unpack_numpy(*map(np.asarray, (packed, scale)))).T
    assert (np.abs(np.asarray(product, np.float64) - exact) <= 4e-7 * size).all()
