"""MXFP4 weights: two 4-bit floats in a byte, low nibble first, and a power of two for 32 inputs.

A nibble is a sign (bit 3) and a magnitude out of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1). A scale byte s
(E8M0) stands for 2^(s - 127); 255 is not a scale, and the checkpoint reader refuses it.

Decoded weights are exact, but XLA on CPU flushes subnormal results: products of float32 near 1e-38
and below, as of scale bytes 0 to 8 with small inputs, become zero.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from ..numerics import at_least_float32
from ..parallel.roles import Dim
from .layers import Term, linear, weight

GROUP = 32
SCALE_BIAS = 127
SCALE_MAX = 254
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


class _Layout(NamedTuple):
    """How a float format lays out its bits; `signed` is as wide as `bits`."""

    bits: type
    signed: type
    mantissa: int
    bias: int


_LAYOUTS = {
    "bfloat16": _Layout(jnp.uint16, jnp.int16, 7, 127),
    "float32": _Layout(jnp.uint32, jnp.int32, 23, 127),
    "float64": _Layout(jnp.uint64, jnp.int64, 52, 1023),
}


def unpack_numpy(
    packed: UInt8[np.ndarray, "... half"], scale: UInt8[np.ndarray, "... groups"]
) -> np.ndarray:
    """The definition: the float64 weights of packed bytes, inputs in order."""
    _check_sizes(packed.shape, scale.shape)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    exponents = np.repeat(scale.astype(np.int32) - SCALE_BIAS, GROUP, axis=-1)
    return np.ldexp(_VALUES[nibbles], exponents)


def pack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [.., out, in/2] and scales [.., out, in/32] nearest to float weights [.., out, in].

    Values round to the nearest code, ties to the even code. Of the two scales that put a group's
    largest magnitude into [4, 8) or [2, 4), the smaller squared error decides, so weights that are
    representable come back exactly. Raises ValueError for other widths, NaN and Inf.
    """
    if weights.shape[-1] % GROUP:
        raise ValueError(f"the input width {weights.shape[-1]} is not a multiple of {GROUP}")
    if not np.isfinite(weights).all():
        raise ValueError("weights to pack hold NaN or Inf")
    wide = weights.astype(at_least_float32(weights.dtype), copy=False)
    groups = wide.reshape(*wide.shape[:-1], -1, GROUP)
    _, exponent = np.frexp(np.abs(groups).max(axis=-1))
    low = np.clip(exponent - 3 + SCALE_BIAS, 0, SCALE_MAX)
    high = np.clip(low + 1, 0, SCALE_MAX)
    low_codes, low_error = _round(groups, low)
    high_codes, high_error = _round(groups, high)
    step = np.square(np.ldexp(1.0, high - low))  # errors are measured in units of the scale
    better = high_error * step < low_error
    codes = np.where(better[..., None], high_codes, low_codes).reshape(weights.shape)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, np.where(better, high, low).astype(np.uint8)


def _round(groups: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest code of every value, and a group's squared error in units of its scale."""
    scaled = np.ldexp(np.abs(groups), (SCALE_BIAS - scale)[..., None])
    codes = np.zeros(groups.shape, np.uint8)
    for code, border in enumerate((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2):
        codes += scaled >= border if code % 2 else scaled > border  # a tie goes to the even code
    error = np.square(scaled - MAGNITUDES.astype(scaled.dtype)[codes]).sum(axis=-1)
    return codes | np.signbit(groups).astype(np.uint8) << 3, error


def decode(
    packed: UInt8[Array, "... half"], scale: UInt8[Array, "... groups"], dtype: DTypeLike
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """The weights of the even inputs and those of the odd inputs, exact in `dtype`.

    Bits are put together as integers: a multiplication would lose the small values, because
    XLA flushes subnormals on CPU. A value becomes Inf only where it exceeds the format's largest.
    """
    _check_sizes(packed.shape, scale.shape)
    dtype = jnp.dtype(dtype)
    if dtype.name not in _LAYOUTS:
        raise ValueError(f"MXFP4 decodes to {', '.join(_LAYOUTS)}, not to {dtype.name}")
    if dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("MXFP4 decodes to float64 only where jax_enable_x64 is set")
    layout = _LAYOUTS[dtype.name]
    groups = packed.reshape(*scale.shape, GROUP // 2)
    low, high = (
        jax.lax.bitcast_convert_type(
            _assemble(nibbles, scale[..., None], layout).reshape(packed.shape), dtype
        )
        for nibbles in (groups & 15, groups >> 4)
    )
    return low, high


def _assemble(nibbles: Array, scale: Array, layout: _Layout) -> Array:
    """The bit pattern of every value: sign, exponent, and the single mantissa bit of E2M1."""
    bits, mantissa = layout.bits, layout.mantissa
    width = jnp.iinfo(bits).bits
    largest = 2 ** (width - 1 - mantissa) - 1  # the exponent field of Inf
    magnitude = (nibbles & 7).astype(layout.signed)
    normal = magnitude >= 2
    exponent = scale.astype(layout.signed) + (layout.bias - SCALE_BIAS - 1)
    exponent = exponent + jnp.where(normal, magnitude >> 1, 0)
    fraction = jnp.where(normal, magnitude & 1, 0).astype(bits) << (mantissa - 1)
    value = (jnp.clip(exponent, 0, largest).astype(bits) << mantissa) | fraction
    shift = jnp.clip(1 - exponent, 0, 2).astype(bits)  # 2^-128 is the smallest there is
    subnormal = (fraction | bits(1 << mantissa)) >> shift
    value = jnp.where(exponent < 1, subnormal, value)
    value = jnp.where(exponent >= largest, bits(largest << mantissa), value)
    value = jnp.where(magnitude == 0, bits(0), value)
    return value | ((nibbles >> 3).astype(bits) << (width - 1))


def unpack(
    packed: UInt8[Array, "... half"], scale: UInt8[Array, "... groups"], dtype: DTypeLike
) -> Float[Array, "... inputs"]:
    """The weights with their inputs in order: the definition that `matmul` is tested against."""
    return jnp.stack(decode(packed, scale, dtype), axis=-1).reshape(*packed.shape[:-1], -1)


def matmul(
    x: Float[Array, "rows inputs"],
    packed: UInt8[Array, "outputs half"],
    scale: UInt8[Array, "outputs groups"],
) -> Float[Array, "rows outputs"]:
    """x times the transposed weights, summed in float32 or wider, even and odd inputs apart.

    They are taken as pairs: of slices with a stride, XLA's CUDA compiler of jaxlib 0.10.2 dies.
    """
    wide = at_least_float32(x.dtype)
    low, high = decode(packed, scale, x.dtype)
    dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    pairs = x.reshape(len(x), -1, 2)
    return dot(pairs[..., 0], low.T) + dot(pairs[..., 1], high.T)


def _check_sizes(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    if packed[:-1] != scale[:-1] or 2 * packed[-1] != GROUP * scale[-1]:
        raise ValueError(f"packed {packed} and scale {scale} differ: one scale is for 16 bytes")


# How the matrices of a linear map are stored and multiplied.


PARTS = ("w", "s")  # prefixes of weights: the numbers, their scales


class Quantization:
    """How a matrix [..., out, in] is stored, as one or several weights, and multiplied. Each
    subclass has a single value, listed by name in `QUANTIZATIONS`.
    """

    name: str
    title: str  # as text, before "experts"
    group: int = 1  # inputs that share a scale: the input width must be a multiple of it

    def declare(
        self, dtype: DTypeLike, kind: type[nnx.Param], term: Term, **dims: int | Dim
    ) -> dict:
        """The weights of a matrix by their prefixes. Of `dims`, letter = size, the last is the
        input's; `dtype` is that of plain numbers.
        """
        raise NotImplementedError

    def decode(
        self, parts: Mapping[str, Shaped[Array, "... out i"]], dtype: DTypeLike
    ) -> Float[Array, "... out inputs"]:
        """The numbers of a stored matrix: the definition that `multiply` is tested against."""
        raise NotImplementedError

    def multiply(
        self, x: Float[Array, "rows inputs"], parts: Mapping[str, Shaped[Array, "out i"]]
    ) -> Float[Array, "rows out"]:
        """x times the transposed matrix, summed in at least float32 and rounded to x's type."""
        raise NotImplementedError


class _Plain(Quantization):
    name, title = "none", "plain"

    def declare(
        self, dtype: DTypeLike, kind: type[nnx.Param], term: Term, **dims: int | Dim
    ) -> dict:
        return {"w": weight(dtype, kind, term=term, **dims)}

    def decode(self, parts: Mapping[str, Array], dtype: DTypeLike) -> Array:
        return parts["w"]

    def multiply(self, x: Array, parts: Mapping[str, Array]) -> Array:
        return linear(x, parts["w"])


class _Mxfp4(Quantization):
    name, title, group = "mxfp4", "MXFP4", GROUP

    def declare(
        self, dtype: DTypeLike, kind: type[nnx.Param], term: Term, **dims: int | Dim
    ) -> dict:
        *outer, (letter, inputs) = dims.items()
        assert isinstance(inputs, int)
        packed = {**dict(outer), f"{letter}2": inputs // 2}
        scales = {**dict(outer), f"{letter}{GROUP}": inputs // GROUP}
        return {
            "w": weight(jnp.uint8, kind, term=term, **packed),
            "s": weight(jnp.uint8, kind, term=term, **scales),
        }

    def decode(self, parts: Mapping[str, Array], dtype: DTypeLike) -> Array:
        return unpack(parts["w"], parts["s"], dtype)

    def multiply(self, x: Array, parts: Mapping[str, Array]) -> Array:
        return matmul(x, parts["w"], parts["s"]).astype(x.dtype)


PLAIN = _Plain()
MXFP4 = _Mxfp4()
QUANTIZATIONS = {value.name: value for value in (PLAIN, MXFP4)}


def expert_quantization(quantized: bool) -> Quantization:
    """How routed experts are stored, by `Config.quantized` or by what a checkpoint holds."""
    return MXFP4 if quantized else PLAIN
