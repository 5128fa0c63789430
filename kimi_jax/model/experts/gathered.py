"""Products with the matrices of many experts at once, each read out of its stack where it is used.

Two ways, for each quantization: `terms`, whose sum over the last dim is the product, for a few rows
of each expert (decoding and products are one reduction, no decoded weight is ever in memory); and
`matrices`, decoded for a matrix product with many rows.

Stacks are indexed *after* what is done to all of their numbers, as if a whole stack were widened:
XLA for GPUs then fuses it all into the consumer's reads. The other way round it writes out the
gathered scales, or the gathered weights.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8, UInt32

from ...numerics import at_least_float32, widen
from ..mxfp4 import GROUP, MXFP4, PLAIN, SCALE_BIAS

Stacks = Mapping[str, Array]  # [G, E, o, i]: what a matrix is stored as, by its prefix

WORD = 8  # 4-bit numbers in 32 bits
# A 4-bit number put under float16's sign and over its top mantissa bit is 2^-14 of its value, the
# subnormal 0.5 included: XLA flushes no subnormal float16 when it is converted.
NUMBER_SCALE = 14


class Gathered(NamedTuple):
    """How one quantization multiplies rows by gathered experts."""

    # (x [S, R, i], stacks, group, expert [S]) -> of each of R rows [S, o, k], and a scale: x w^T is
    # the sum over k times the scale.
    terms: Callable[[Array, Stacks, int | Array, Array], tuple[list[Array], float]]
    # (stacks, group, expert [S], dtype) -> [S, o, i], the inputs in the order of `reorder`.
    matrices: Callable[[Stacks, int | Array, Array, DTypeLike], Array]
    reorder: Callable[[Array], Array]  # [..., i] -> [..., i]


def gather_experts(
    stack: Shaped[Array, "G E *rest"], group: int | Array, expert: Int[Array, " S"]
) -> Shaped[Array, "S *rest"]:
    """What a stack holds for experts 0 to E - 1 of one layer."""
    return stack.at[group, expert].get(mode="promise_in_bounds")


# Plain numbers.


def plain_terms(
    x: Float[Array, "S R i"], stacks: Stacks, group: int | Array, expert: Int[Array, " S"]
) -> tuple[list[Float[Array, "S o i"]], float]:
    """w x, one input a term."""
    w, x = widen(gather_experts(stacks["w"], group, expert)), widen(x)
    return [w * x[:, r, None, :] for r in range(x.shape[1])], 1.0


def plain_matrices(
    stacks: Stacks, group: int | Array, expert: Int[Array, " S"], dtype: DTypeLike
) -> Float[Array, "S o i"]:
    """As they are stored."""
    return gather_experts(stacks["w"], group, expert)


# MXFP4.


def mxfp4_terms(
    x: Float[Array, "S R i"], stacks: Stacks, group: int | Array, expert: Int[Array, " S"]
) -> tuple[list[Float[Array, "S o words"]], float]:
    """A term is the product of the 8 numbers of a 32-bit word with their inputs. Decoding is
    arithmetic, two numbers at a time.
    """
    wide = at_least_float32(x.dtype)
    w, s = stacks["w"], stacks["s"]
    words = w.shape[-1] // 4
    as_words = jax.lax.bitcast_convert_type(w.reshape(*w.shape[:-1], words, 4), jnp.uint32)
    gathered = gather_experts(as_words, group, expert)
    per_word = jnp.broadcast_to(s[..., None], (*s.shape, GROUP // WORD))
    scale = power_of_two(gather_experts(per_word, group, expert), wide)
    scale = scale.reshape(*scale.shape[:-2], words)
    inputs = widen(x).reshape(*x.shape[:-1], words, WORD)
    terms = [
        scale
        * sum(
            n.astype(wide) * inputs[:, r, None, :, k]
            for k, n in enumerate(word_numbers(gathered, r))
        )
        for r in range(x.shape[1])
    ]
    return terms, 2.0**NUMBER_SCALE


def word_numbers(words: UInt32[Array, "*dims"], spelling: int) -> list[Float[Array, "*dims"]]:
    """The 8 numbers of each word, inputs in order, times 2^-14 in float16.

    Shifts to the left are written as products by the bits of `spelling`, which gives the same. A
    number with several users is one that XLA may write to memory, so each row of a slot spells its
    own; the compiler behind XLA makes them one again.
    """
    shift_sign, shift_magnitude = (
        (lambda bits, by: bits * jnp.uint32(1 << by))
        if spelling >> bit & 1
        else (lambda bits, by: bits << jnp.uint32(by))
        for bit in range(2)
    )
    numbers: list = [None] * WORD
    for k in range(WORD // 2):  # number k of both halves of a word
        pair = words >> jnp.uint32(4 * k)
        sign, magnitude = pair & jnp.uint32(0x00080008), pair & jnp.uint32(0x00070007)
        pair = shift_sign(sign, 12) | shift_magnitude(magnitude, 9)
        for half in range(2):
            bits = (pair >> jnp.uint32(16 * half)).astype(jnp.uint16)
            numbers[k + 4 * half] = jax.lax.bitcast_convert_type(bits, jnp.float16)
    return numbers


def power_of_two(scale: UInt8[Array, "*dims"], dtype: DTypeLike) -> Float[Array, "*dims"]:
    """2^(s - 127) in float32 or float64."""
    if jnp.dtype(dtype) == jnp.float32:
        bits = jnp.maximum(scale.astype(jnp.int32) << 23, 1 << 22)  # 2^-127 is subnormal
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    bits = (scale.astype(jnp.int64) + (1023 - SCALE_BIAS)) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def mxfp4_matrices(
    stacks: Stacks, group: int | Array, expert: Int[Array, " S"], dtype: DTypeLike
) -> Float[Array, "S o i"]:
    """Decoded numbers: those of even inputs, then those of odd inputs."""
    wide = at_least_float32(dtype)
    packed = gather_experts(stacks["w"], group, expert)
    S, o, half = packed.shape
    shift = 4 * jax.lax.broadcasted_iota(jnp.uint8, (S, o, 2, half), 2)
    halves = (packed[:, :, None, :] >> shift).astype(jnp.uint16)
    bits = ((halves & 8) << 12) | ((halves & 7) << 9)
    numbers = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(wide)
    s = stacks["s"]
    per_number = jnp.broadcast_to(s[:, :, :, None, :, None], (*s.shape[:3], 2, s.shape[3], 16))
    scale = power_of_two(gather_experts(per_number, group, expert), wide).reshape(halves.shape)
    matrices = numbers * np.asarray(2.0**NUMBER_SCALE, wide) * scale
    return matrices.astype(dtype).reshape(S, o, 2 * half)


def even_then_odd(x: Shaped[Array, "*rows i"]) -> Shaped[Array, "*rows i"]:
    """The order of inputs of `mxfp4_matrices`."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


GATHERED = {
    PLAIN.name: Gathered(plain_terms, plain_matrices, lambda x: x),
    MXFP4.name: Gathered(mxfp4_terms, mxfp4_matrices, even_then_odd),
}
