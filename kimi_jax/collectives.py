"""How arrays move between devices. With placement.py, the only module that names a mesh axis.

Every function is written for the inside of a `shard_map` and is the identity on an axis of size 1,
so that one device runs the same code and its program holds no collective.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

MODEL = "model"
DATA = "data"
Axis = str | Sequence[str]


def ranks(axis: Axis = MODEL) -> int:
    """Devices along a mesh axis, or along several; a Python integer, known while tracing."""
    axes = (axis,) if isinstance(axis, str) else axis
    return math.prod(jax.lax.axis_size(one) for one in axes)


def rank(axis: Axis = MODEL) -> Int[Array, ""]:
    """This device's number along an axis; along several, the last one counts fastest."""
    if ranks(axis) == 1:
        return jnp.int32(0)
    return jax.lax.axis_index(axis).astype(jnp.int32)


def all_reduce(partial: Array, axis: Axis = MODEL) -> Array:
    """The sum over `axis` of every rank's partial, on every rank."""
    return partial if ranks(axis) == 1 else jax.lax.psum(partial, axis)


def all_gather(part: Array, dim: int, axis: Axis = MODEL) -> Array:
    """Every rank's part, joined along `dim` in rank order, on every rank."""
    if ranks(axis) == 1:
        return part
    return jax.lax.all_gather(part, axis, axis=dim, tiled=True)


def reduce_scatter(partial: Array, dim: int, axis: Axis = MODEL) -> Array:
    """The sum of every rank's partial, of which a rank keeps its own part along `dim`."""
    if ranks(axis) == 1:
        return partial
    return jax.lax.psum_scatter(partial, axis, scatter_dimension=dim, tiled=True)


def embed(table: Float[Array, "Z D"], tokens: Array) -> Array:
    """Rows of a vocabulary-sharded table: each rank looks up the ids it owns, zero elsewhere, then
    one sum.
    """
    local = tokens - rank() * table.shape[0]
    if ranks() == 1:
        return table[local]
    owned = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(owned, local, 0)]
    return all_reduce(jnp.where(owned[..., None], rows, jnp.zeros((), table.dtype)))


# Slices of rows and of columns. Rank r of n owns rows r c to (r + 1) c of P, c = ceil(P / n).


def own_rows(x: Array, axis: Axis = MODEL) -> Array:
    """The rows of x that this rank owns, completed with zeros; moves nothing."""
    n = ranks(axis)
    if n == 1:
        return x
    c = -(-x.shape[0] // n)
    return jax.lax.dynamic_slice_in_dim(_complete(x, n * c), rank(axis) * c, c)


def among_zeros(own: Array, rows: int, axis: Axis = MODEL) -> Array:
    """`own_rows` undone: all rows, exactly zero outside this rank's own; moves nothing."""
    n, c = ranks(axis), own.shape[0]
    if n == 1:
        return own
    whole = jnp.zeros((n * c, *own.shape[1:]), own.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, own, rank(axis) * c, 0)[:rows]


def own_columns(x: Float[Array, "P L"], axis: Axis = MODEL) -> Array:
    """The columns of x that this rank owns; moves nothing."""
    size = x.shape[1] // ranks(axis)
    return jax.lax.dynamic_slice_in_dim(x, rank(axis) * size, size, 1)


def columns_to_rows(x: Array, axis: Axis = MODEL) -> Array:
    """All rows of a rank's own columns [P, X] -> every rank's columns of its own rows [c, n, X]."""
    n = ranks(axis)
    if n == 1:
        return x[:, None]
    c = -(-x.shape[0] // n)
    blocks = _complete(x, n * c).reshape(n, c, -1)
    return jnp.moveaxis(jax.lax.all_to_all(blocks, axis, 0, 0), 0, 1)


def rows_to_columns(own: Float[Array, "c L"], rows: int, axis: Axis = MODEL) -> Array:
    """All columns of a rank's own rows [c, n X] -> all rows of its own columns [P, X]."""
    n, c = ranks(axis), own.shape[0]
    if n == 1:
        return own
    blocks = jnp.moveaxis(own.reshape(c, n, -1), 1, 0)
    return jax.lax.all_to_all(blocks, axis, 0, 0).reshape(n * c, -1)[:rows]


def _complete(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))


# The all-to-all of variable size: each rank holds a block of up to c rows for every rank.


class Layout(NamedTuple):
    """Where the rows of each peer begin and how many they are, in buffers without gaps: those that
    are sent stand in the order of destinations, those that are received in the order of sources.
    """

    send: Int[Array, " n"]
    sent: Int[Array, " n"]
    receive: Int[Array, " n"]
    received: Int[Array, " n"]
    landing: Int[Array, " n"]  # where this rank's rows begin in each destination's buffer


def layout(counts: Int[Array, "n n"], me: Int[Array, ""] | int) -> Layout:
    """The offsets of rank `me` out of counts[i, j], the rows that i sends to j."""
    counts = counts.astype(jnp.int32)
    by_destination = jnp.cumsum(counts, 1, dtype=jnp.int32) - counts
    by_source = jnp.cumsum(counts, 0, dtype=jnp.int32) - counts
    return Layout(by_destination[me], counts[me], by_source[:, me], counts[:, me], by_source[me])


def gather_counts(sizes: Int[Array, " n"], axis: Axis) -> Int[Array, "n n"]:
    """The counts matrix on every rank, out of the rows that each sends to every other."""
    return jax.lax.all_gather(sizes.astype(jnp.int32), axis)


def exchange(
    blocks: UInt[Array, "n c X"] | Float[Array, "n c X"], counts: Array | None, axis: Axis
) -> Array:
    """Block j goes to rank j; block i of the result came from rank i. The inverse is the same with
    the counts transposed.

    Without counts, whole blocks travel (`all_to_all`). With counts [n, n], only the first
    counts[me, j] rows of each (`ragged_all_to_all`, on backends that have it), and zeros fill the
    blocks up. Blocks that hold zeros beyond their counts arrive alike both ways.
    """
    if counts is None:
        return jax.lax.all_to_all(blocks, axis, 0, 0)
    at = layout(counts, rank(axis))
    packed = pack(blocks, at.send, at.sent)
    received = jax.lax.ragged_all_to_all(
        packed,
        jnp.zeros_like(packed),
        at.send,
        at.sent,
        at.landing,
        at.received,
        axis_name=axis,
    )
    return unpack(received, at.receive, at.received)


def pack(blocks: Array, begins: Int[Array, " n"], sizes: Int[Array, " n"]) -> Array:
    """The first rows of each block [n, c, X], one block after the other without gaps: [n c, X]."""
    n, c, X = blocks.shape
    slot = jnp.arange(c, dtype=jnp.int32)
    places = jnp.where(slot < sizes[:, None], begins[:, None] + slot, n * c)
    return jnp.zeros((n * c, X), blocks.dtype).at[places].set(blocks, mode="drop")


def unpack(packed: Array, begins: Int[Array, " n"], sizes: Int[Array, " n"]) -> Array:
    """`pack` undone: blocks [n, c, X], zero beyond their sizes."""
    n = len(sizes)
    slot = jnp.arange(packed.shape[0] // n, dtype=jnp.int32)
    real = slot < sizes[:, None]
    rows = packed[jnp.where(real, begins[:, None] + slot, 0)]
    return jnp.where(real[..., None], rows, jnp.zeros((), packed.dtype))
