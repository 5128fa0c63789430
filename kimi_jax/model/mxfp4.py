"""MXFP4 weights: two 4-bit floats in a byte, low nibble first, and a power of two for 32 inputs.

A nibble is a sign (bit 3) and a magnitude out of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1). A scale byte s
(E8M0) stands for 2^(s - 127); 255 is not a scale, and the checkpoint reader refuses it. The format
is that of the OCP Microscaling Formats (MX) specification; see arXiv 2310.10537.

Decoded weights are exact, but XLA on CPU flushes subnormal results: products of float32 near 1e-38
and below, as of scale bytes 0 to 8 with small inputs, become zero.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from ..numerics import at_least_float32, multiplies_bfloat16
from ..parallel.roles import Dim
from .layers import Term, linear, linear_wide, weight

GROUP = 32
SCALE_BIAS = 127
SCALE_MAX = 254
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


class _Layout(NamedTuple):
    """How a float format lays out its bits."""

    bits: type
    mantissa: int
    bias: int


_LAYOUTS = {
    "bfloat16": _Layout(jnp.uint16, 7, 127),
    "float32": _Layout(jnp.uint32, 23, 127),
    "float64": _Layout(jnp.uint64, 52, 1023),
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
    groups = packed.reshape(*scale.shape, GROUP // 2).astype(_LAYOUTS[dtype.name].bits)
    low, high = (
        jax.lax.bitcast_convert_type(
            _assemble(nibbles, scale[..., None], _LAYOUTS[dtype.name]).reshape(packed.shape), dtype
        )
        for nibbles in (groups & 15, groups >> 4)
    )
    return low, high


def _assemble(nibbles: Array, scale: Array, layout: _Layout) -> Array:
    """The bit pattern of every value. What depends on the scale alone is computed once a group: a
    value takes about ten operations as wide as its bits.
    """
    bits, mantissa = layout.bits, layout.mantissa
    width = jnp.iinfo(bits).bits
    half = 1 << (mantissa - 1)  # the single mantissa bit of E2M1
    inf = (1 << (width - 1)) - (1 << mantissa)

    # Both fields of a magnitude of 2 or more, E2M1's exponent and mantissa bit, stand side by side
    # as in the wider format: they move there together, and the scale adds to the exponent. Codes
    # that are too large for the format exceed Inf as integers. (The base of scale 0 wraps around.)
    magnitude = nibbles & 7
    base = (scale.astype(bits) + bits(layout.bias - SCALE_BIAS) - bits(1)) << mantissa
    value = (magnitude << (mantissa - 1)) + base

    # Code 1 is E2M1's subnormal, 0.5: an exponent without the mantissa bit. At scale 1 of narrow
    # exponents it is a subnormal of the format too, which has that bit.
    narrow = layout.bias == SCALE_BIAS
    extra = jnp.where(scale == 1, bits(0), bits(half)) if narrow else bits(half)
    value = jnp.minimum(jnp.where(magnitude == 1, value - extra, value), bits(inf))

    # Zero; and at scale 0 of narrow exponents all of 0 to 1.5, which are subnormals: multiples of
    # 2^-128.
    subnormals = jnp.where(scale == 0, bits(4), bits(1)) if narrow else bits(1)
    value = jnp.where(magnitude < subnormals, magnitude << (mantissa - 2), value)
    return value | (nibbles >> 3) << (width - 1)


def unpack(
    packed: UInt8[Array, "... half"], scale: UInt8[Array, "... groups"], dtype: DTypeLike
) -> Float[Array, "... inputs"]:
    """The weights with their inputs in order: the definition that `matmul` is tested against."""
    return jnp.stack(decode(packed, scale, dtype), axis=-1).reshape(*packed.shape[:-1], -1)


def _factors(
    packed: UInt8[Array, "... half"], scale: UInt8[Array, "... groups"], dtype: DTypeLike
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """`decode`, where subnormal weights may be zero: in float32, half as many operations.

    A code moved to the top of a float16's exponent and mantissa is its value times 2^-14, as a
    float16 subnormal where it is 0.5, which conversion to float32 keeps. The scale is two factors
    that are finite and normal for every scale.
    """
    if jnp.dtype(dtype) != jnp.float32:
        return decode(packed, scale, dtype)
    _check_sizes(packed.shape, scale.shape)
    exponent = scale.astype(jnp.int32) - SCALE_BIAS
    first, second = _power_of_two(exponent // 2 + 14), _power_of_two(exponent - exponent // 2)
    groups = packed.reshape(*scale.shape, GROUP // 2).astype(jnp.uint16)

    def values(magnitude: Array, sign: Array) -> Array:
        codes = jax.lax.bitcast_convert_type(magnitude | sign, jnp.float16)
        scaled = codes.astype(jnp.float32) * first[..., None] * second[..., None]
        return scaled.reshape(packed.shape)

    low = values((groups & 7) << 9, (groups & 8) << 12)
    return low, values((groups & 0x70) << 5, (groups & 0x80) << 8)


def _power_of_two(exponent: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """2^exponent in float32, -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def matmul(
    x: Float[Array, "rows inputs"],
    packed: UInt8[Array, "outputs half"],
    scale: UInt8[Array, "outputs groups"],
) -> Float[Array, "rows outputs"]:
    """x times the transposed weights, summed in float32 or wider, even and odd inputs apart.

    They are taken as pairs: of slices with a stride, XLA's CUDA compiler of jaxlib 0.10.2 dies.
    Weights are decoded as they are stored, outputs first: transposed, CPUs would write them with
    strides.
    """
    if x.dtype != jnp.float32 or not multiplies_bfloat16():
        return _multiply_decoded(x, packed, scale)
    multiply = _multiply_decoded
    return jax.lax.platform_dependent(x, packed, scale, cpu=_multiply_parts, default=multiply)


def _multiply_decoded(
    x: Float[Array, "rows inputs"],
    packed: UInt8[Array, "outputs half"],
    scale: UInt8[Array, "outputs groups"],
) -> Float[Array, "rows outputs"]:
    """`matmul` with weights decoded to the type of x."""
    return _multiply_pairs(x, *_factors(packed, scale, x.dtype))


def _multiply_pairs(
    x: Float[Array, "rows inputs"], low: Float[Array, "o half"], high: Float[Array, "o half"]
) -> Float[Array, "rows o"]:
    """x times the transposed weights of its even and of its odd inputs."""
    pairs = x.reshape(len(x), -1, 2)
    return linear_wide(pairs[..., 0], low) + linear_wide(pairs[..., 1], high)


def _multiply_parts(
    x: Float[Array, "rows inputs"],
    packed: UInt8[Array, "outputs half"],
    scale: UInt8[Array, "outputs groups"],
) -> Float[Array, "rows outputs"]:
    """`matmul` of float32 rows as bfloat16 ones, three to a row, for CPUs that multiply these in
    hardware.

    Each part of x holds 8 of its 24 bits of mantissa, and bfloat16 holds every weight, so every
    product is exact; the parts' sums are added from the smallest on.
    """
    high = _leading_bits(x)
    middle = _leading_bits(x - high)
    parts = jnp.concatenate([high, middle, x - high - middle]).astype(jnp.bfloat16)
    sums = _multiply_pairs(parts, *decode(packed, scale, jnp.bfloat16))
    sums = sums.reshape(3, len(x), -1)
    return (sums[2] + sums[1]) + sums[0]


def _leading_bits(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """A float32 without the bits that bfloat16 lacks: rounded towards zero, so never to Inf."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


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
