"""How arrays move between devices: every collective of the package.

Every function is written for the inside of a `shard_map` and is the identity on an axis of size 1,
so that one device runs the same code and its program holds no collective. Of P rows, split over n
ranks, rank r holds rows r c to (r + 1) c, c = ceil(P / n); the last ones are zero-padded.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt

from ..numerics import widen
from .mesh import MODEL
from .reductions import SUM, Reduction, deals_of

Axis = str | Sequence[str]
DEFAULT_AXIS: Axis = MODEL  # along which a function moves arrays where it is not told


def ranks(axis: Axis = DEFAULT_AXIS) -> int:
    """Devices along a mesh axis, or along several; a Python integer while tracing."""
    axes = (axis,) if isinstance(axis, str) else axis
    return math.prod(jax.lax.axis_size(name) for name in axes)


def rank(axis: Axis = DEFAULT_AXIS) -> Int[Array, ""]:
    """This device's number along an axis; along several, the last one counts fastest."""
    if ranks(axis) == 1:
        return jnp.int32(0)
    return jax.lax.axis_index(axis).astype(jnp.int32)


def all_gather(part: Array, dim: int, axis: Axis = DEFAULT_AXIS) -> Array:
    """Every rank's part, joined along `dim` in rank order, on every rank."""
    if ranks(axis) == 1:
        return part
    return jax.lax.all_gather(part, axis, axis=dim, tiled=True)


def embed(table: Float[Array, "Z D"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Rows of a vocabulary-sharded table, as a partial sum: each rank looks up the ids of its shard
    and has zero for the others.
    """
    local = tokens - rank() * table.shape[0]
    if ranks() == 1:
        return table[local]
    in_shard = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(in_shard, local, 0)]
    return jnp.where(in_shard[..., None], rows, jnp.zeros((), table.dtype))


# Local rows and columns.


def local_rows(x: Array, axis: Axis = DEFAULT_AXIS) -> Array:
    """The rows of x that are local to this rank, zero-padded; moves nothing."""
    n = ranks(axis)
    if n == 1:
        return x
    c = -(-x.shape[0] // n)
    return jax.lax.dynamic_slice_in_dim(_zero_pad(x, n * c), rank(axis) * c, c)


def zero_padded_rows(own: Array, rows: int, axis: Axis = DEFAULT_AXIS) -> Array:
    """Inverse of `local_rows`: all rows, exactly zero but for the local ones; moves nothing."""
    n, c = ranks(axis), own.shape[0]
    if n == 1:
        return own
    zeros = jnp.zeros((n * c, *own.shape[1:]), own.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, own, rank(axis) * c, 0)[:rows]


def local_columns(x: Float[Array, "P L"], axis: Axis = DEFAULT_AXIS) -> Array:
    """The columns of x that are local to this rank; moves nothing."""
    size = x.shape[1] // ranks(axis)
    return jax.lax.dynamic_slice_in_dim(x, rank(axis) * size, size, 1)


def columns_to_rows(x: Array, axis: Axis = DEFAULT_AXIS) -> Array:
    """All rows of the local columns [P, X] -> the local rows of every rank's columns [c, n, X]."""
    n = ranks(axis)
    if n == 1:
        return x[:, None]
    c = -(-x.shape[0] // n)
    blocks = _zero_pad(x, n * c).reshape(n, c, -1)
    return jnp.moveaxis(jax.lax.all_to_all(blocks, axis, 0, 0), 0, 1)


def rows_to_columns(own: Float[Array, "c L"], rows: int, axis: Axis = DEFAULT_AXIS) -> Array:
    """All columns of the local rows [c, n X] -> all rows of the local columns [P, X]."""
    n, c = ranks(axis), own.shape[0]
    if n == 1:
        return own
    blocks = jnp.moveaxis(own.reshape(c, n, -1), 1, 0)
    return jax.lax.all_to_all(blocks, axis, 0, 0).reshape(n * c, -1)[:rows]


def _zero_pad(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))


def all_rows(
    own: Shaped[Array, "c *X"], rows: int, axis: Axis = DEFAULT_AXIS
) -> Shaped[Array, "P *X"]:
    """Every rank's local rows, joined, without the zero padding."""
    return all_gather(own, 0, axis)[:rows]


def to_head_owners(x: Array, axis: Axis = DEFAULT_AXIS) -> Array:
    """What a rank has of all heads [B, T, H, X] -> what every rank has of this rank's heads
    [n, B, T, h, X], h = ceil(H / n); heads beyond H are zero.
    """
    n = ranks(axis)
    if n == 1:
        return x[None]
    B, T, H, X = x.shape
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, -H % n), (0, 0)))
    return jax.lax.all_to_all(jnp.moveaxis(padded.reshape(B, T, n, -1, X), 2, 0), axis, 0, 0)


# Messages: arrays of several types side by side.


def to_bits(*arrays: Array) -> UInt[Array, "... X"]:
    """Arrays side by side along their last dim as bits: unsigned integers as wide as the first's
    numbers. Numbers of the others may be wider, whole numbers go by value.
    """
    bits = jnp.dtype(f"uint{8 * arrays[0].dtype.itemsize}")
    columns = [
        x.astype(bits)
        if jnp.issubdtype(x.dtype, jnp.integer)
        else jax.lax.bitcast_convert_type(x, bits).reshape(*x.shape[:-1], -1)
        for x in arrays
    ]
    return jnp.concatenate(columns, axis=-1)


def of_bits(bits: UInt[Array, "... X"], *widths: tuple[int, DTypeLike]) -> list[Array]:
    """Inverse of `to_bits`: arrays of (width, dtype), the numbers in each row and their type."""
    arrays = []
    first = 0
    for width, dtype in widths:
        dtype = jnp.dtype(dtype)
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        words = 1 if is_integer else dtype.itemsize // bits.dtype.itemsize  # of a number
        part = bits[..., first : first + width * words]
        first += width * words
        if is_integer:
            arrays.append(part.astype(dtype))
        else:
            numbers = part.reshape(*part.shape[:-1], width, words) if words > 1 else part
            arrays.append(jax.lax.bitcast_convert_type(numbers, dtype))
    return arrays


def as_message(move: Callable[..., Array], operands: tuple, *arrays: Array) -> tuple[Array, ...]:
    """`move(x, *operands)` of each array x, which moves numbers but along the last dim, in one
    message of their bits. Bits have no gradient: those of the arrays go back one by one.
    """
    return tuple(_message(move, operands, *arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _message(move: Callable[..., Array], operands: tuple, *arrays: Array) -> Any:
    widths = [(x.shape[-1], x.dtype) for x in arrays]
    return tuple(of_bits(move(to_bits(*arrays), *operands), *widths))


def _sent_message(move: Callable[..., Array], operands: tuple, *arrays: Array) -> tuple:
    return _message(move, operands, *arrays), (operands, arrays)


def _message_back(move: Callable[..., Array], sent: tuple, gradients: Sequence) -> tuple:
    operands, arrays = sent

    def back(array: Array, gradient: Array) -> Array | None:
        if jnp.issubdtype(array.dtype, jnp.integer):
            return None
        return jax.linear_transpose(lambda x: move(x, *operands), array)(gradient)[0]

    return None, *map(back, arrays, gradients)


_message.defvjp(_sent_message, _message_back)


# The all-to-all of variable size: each rank holds a block of up to c rows for every rank.


class RaggedOffsets(NamedTuple):
    """Where the rows of each peer begin and how many they are, in buffers without gaps: sent rows
    stand in the order of destinations, received rows in the order of sources.
    """

    send_offsets: Int[Array, " n"]
    send_sizes: Int[Array, " n"]
    recv_offsets: Int[Array, " n"]
    recv_sizes: Int[Array, " n"]
    landing_offsets: Int[Array, " n"]  # of this rank's rows, in each destination's buffer


def ragged_offsets(counts: Int[Array, "n n"], me: Int[Array, ""] | int) -> RaggedOffsets:
    """The offsets of rank `me` out of counts[i, j], the rows that i sends to j."""
    counts = counts.astype(jnp.int32)
    by_destination = jnp.cumsum(counts, 1, dtype=jnp.int32) - counts
    by_source = jnp.cumsum(counts, 0, dtype=jnp.int32) - counts
    return RaggedOffsets(
        by_destination[me], counts[me], by_source[:, me], counts[:, me], by_source[me]
    )


def gather_counts(sizes: Int[Array, " n"], axis: Axis) -> Int[Array, "n n"]:
    """The counts matrix on every rank, out of the rows that each sends to every other."""
    return jax.lax.all_gather(sizes.astype(jnp.int32), axis)


def all_to_all_blocks(
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
    at = ragged_offsets(counts, rank(axis))
    send_buffer = to_buffer(blocks, at.send_offsets, at.send_sizes)
    recv_buffer = jax.lax.ragged_all_to_all(
        send_buffer,
        jnp.zeros_like(send_buffer),
        at.send_offsets,
        at.send_sizes,
        at.landing_offsets,
        at.recv_sizes,
        axis_name=axis,
    )
    return to_blocks(recv_buffer, at.recv_offsets, at.recv_sizes)


def to_buffer(blocks: Array, offsets: Int[Array, " n"], sizes: Int[Array, " n"]) -> Array:
    """The first rows of each block [n, c, X], one block after the other without gaps: [n c, X]."""
    n, c, X = blocks.shape
    slot = jnp.arange(c, dtype=jnp.int32)[None]
    places = jnp.where(slot < sizes[:, None], offsets[:, None] + slot, n * c)
    return jnp.zeros((n * c, X), blocks.dtype).at[places].set(blocks, mode="drop")


def to_blocks(buffer: Array, offsets: Int[Array, " n"], sizes: Int[Array, " n"]) -> Array:
    """Inverse of `to_buffer`: blocks [n, c, X], zero beyond their sizes."""
    n = len(sizes)
    slot = jnp.arange(buffer.shape[0] // n, dtype=jnp.int32)[None]
    filled = slot < sizes[:, None]
    rows = buffer[jnp.where(filled, offsets[:, None] + slot, 0)]
    return jnp.where(filled[..., None], rows, jnp.zeros((), buffer.dtype))


# Sums over ranks, by the algorithm that was chosen; reductions.py defines each in numpy.


def all_reduce(partial: Array, how: Reduction = SUM, axis: Axis = DEFAULT_AXIS) -> Array:
    """The sum over `axis` of every rank's partial, the same bits on every rank; [P, X] for all but
    the backend's own sum.
    """
    n = ranks(axis)
    if n == 1:
        return partial
    if how.algorithm == "sum":
        return jax.lax.psum(partial, axis)
    how.check(n)
    chunks = split_chunks(partial, n, how.granule_rows)
    # Reduce: each chunk is summed on one rank. Gather: every rank gets all sums.
    if how.algorithm == "two_shot":
        sums = jax.lax.all_gather(_two_shot(chunks, axis), axis)
    elif how.algorithm == "ring_fp32":
        sums = ring_gather(_ring_fp32(chunks, axis), axis)
    else:
        sums = _by_pieces(_ring_all_reduce, chunks, how, axis)
    return join_chunks(sums, partial.shape[0], how.granule_rows)


def reduce_scatter(
    partial: Float[Array, "P X"], how: Reduction = SUM, axis: Axis = DEFAULT_AXIS
) -> Float[Array, "c X"]:
    """The rows r c to (r + 1) c of `all_reduce` on rank r, bit for bit; rows beyond P are zero.

    ring_bf16 ends on the rank before, and takes one more copy. Granules are spread over the rows,
    so with them all rows travel, as in `all_reduce`.
    """
    n = ranks(axis)
    if n == 1:
        return partial
    if how.granule_rows:
        return local_rows(all_reduce(partial, how, axis), axis)
    how.check(n)
    chunks = split_chunks(partial, n)
    if how.algorithm == "sum":
        return jax.lax.psum_scatter(chunks, axis)
    if how.algorithm == "two_shot":
        return _two_shot(chunks, axis)
    if how.algorithm == "ring_fp32":
        return _ring_fp32(chunks, axis)
    return _by_pieces(_ring_reduce_scatter, chunks, how, axis)


def _two_shot(chunks: Float[Array, "n c X"], axis: Axis) -> Float[Array, "c X"]:
    """The sum of chunk r on rank r: each rank's part of it arrives at once."""
    return add_in_order(jax.lax.all_to_all(chunks, axis, 0, 0))


def _ring_fp32(chunks: Float[Array, "n c X"], axis: Axis) -> Float[Array, "c X"]:
    """The sum of chunk r on rank r: each rank's part of it travels round the ring, not summed.

    A hop passes on the parts that have not arrived: n (n - 1) / 2 together, where two_shot sends
    n - 1.
    """
    n = ranks(axis)
    # Order this rank's parts by the hops that each has to go; the first has arrived.
    by_hops_to_go = chunks[(rank(axis) + jnp.arange(n, dtype=jnp.int32)) % n]
    arrived = [by_hops_to_go[0]]
    # Hop: pass the others on; the first of those that come in has arrived.
    for _ in range(n - 1):
        by_hops_to_go = to_next(by_hops_to_go[1:], axis)
        arrived.append(by_hops_to_go[0])
    # Add in the order of ranks, which is that of two_shot.
    return add_in_order(_by_source(arrived, axis))


def _ring(pieces: list[Array], fp32_hops: int, axis: Axis) -> list[Array]:
    """Of chunks [n, c, X], here in pieces, the sum of chunk r + 1 on rank r: chunk i starts on rank
    i, and each next rank adds its part.

    The order i, i + 1, ..., i - 1 differs from chunk to chunk, and so do the bits of equal rows.
    While a piece is added the next one travels: pieces are added in turn, and barriers keep XLA
    from fusing their additions into one kernel, which would wait for all copies.
    """
    n, dtype = ranks(axis), pieces[0].dtype
    me = rank(axis)
    # Start with this rank's part of the chunk of its number.
    partial_sums = [piece[me] for piece in pieces]
    latest = partial_sums[-1]
    for hop in range(n - 1):
        for i, piece in enumerate(pieces):
            # Copy: the sum of the chunk that started hop + 1 ranks before comes in.
            incoming = to_next(partial_sums[i], axis)
            if len(pieces) > 1:
                incoming, _ = jax.lax.optimization_barrier((incoming, latest))
            # Add this rank's part of that chunk, in at least float32.
            latest = widen(incoming) + widen(piece[(me - hop - 1) % n])
            # Round, but for the `fp32_hops` additions before the last, whose sums travel wide.
            if not n - 2 - fp32_hops <= hop < n - 2:
                latest = round_to(latest, dtype)
            partial_sums[i] = latest
    return partial_sums


def _ring_all_reduce(pieces: list[Array], fp32_hops: int, axis: Axis) -> list[Array]:
    """The sums of all chunks on every rank: those of `_ring`, then copies round the ring."""
    by_rank = [ring_gather(piece, axis) for piece in _ring(pieces, fp32_hops, axis)]
    return [jnp.roll(piece, 1, 0) for piece in by_rank]  # rank r summed chunk r + 1


def _ring_reduce_scatter(pieces: list[Array], fp32_hops: int, axis: Axis) -> list[Array]:
    """The sum of chunk r on rank r: `_ring`, and one more copy."""
    return [to_next(piece, axis) for piece in _ring(pieces, fp32_hops, axis)]


def _by_pieces(
    run: Callable[[list[Array], int, Axis], list[Array]], chunks: Array, how: Reduction, axis: Axis
) -> Array:
    """A ring over pieces of the chunks, whose copies and additions take turns."""
    pieces = jnp.array_split(chunks, min(how.pieces, chunks.shape[1]), axis=1)
    return jnp.concatenate(run(pieces, how.fp32_hops, axis), axis=-2)


def add_in_order(parts: Float[Array, "n c X"]) -> Float[Array, "c X"]:
    """parts[0] + parts[1] + ... from left to right in at least float32, rounded once."""
    total = widen(parts[0])
    for part in parts[1:]:
        total = total + widen(part)
    return round_to(total, parts.dtype)


def round_to(wide: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """wide in dtype, to nearest even, by an operation that compilers keep.

    A cast alone is no rounding: XLA may drop a pair of casts to bfloat16 and back. Subnormal
    numbers of float16 become zero; bfloat16 has the exponents of float32.
    """
    target = jnp.finfo(dtype)
    return jax.lax.reduce_precision(wide, target.nexp, target.nmant).astype(dtype)


def to_next(x: Shaped[Array, "..."], axis: Axis) -> Shaped[Array, "..."]:
    """x of the rank before, bit for bit: one hop of a ring."""
    n = ranks(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def ring_gather(block: Shaped[Array, "*dims"], axis: Axis) -> Shaped[Array, "n *dims"]:
    """Every rank's block, in rank order, by n - 1 copies round the ring."""
    arrived = [block]  # by the hops that each has come
    for _ in range(ranks(axis) - 1):
        arrived.append(to_next(arrived[-1], axis))
    return _by_source(arrived, axis)


def _by_source(arrived: list[Array], axis: Axis) -> Array:
    """Blocks by the hops that each has come -> blocks by the rank that each came from."""
    n = ranks(axis)
    return jnp.stack(arrived)[(rank(axis) - jnp.arange(n, dtype=jnp.int32)) % n]


def split_chunks(x: Shaped[Array, "P X"], n: int, granule_rows: int = 0) -> Shaped[Array, "n c X"]:
    """n chunks of equal size: contiguous rows, or granules dealt in turn; zero-padded."""
    P, X = x.shape
    block, deals = deals_of(P, n, granule_rows)
    padded = jnp.pad(x, ((0, deals * n * block - P), (0, 0)))
    return padded.reshape(deals, n, block, X).swapaxes(0, 1).reshape(n, deals * block, X)


def join_chunks(
    chunks: Shaped[Array, "n c X"], rows: int, granule_rows: int = 0
) -> Shaped[Array, "P X"]:
    """Inverse of `split_chunks`: the first `rows` rows."""
    n, _, X = chunks.shape
    block, deals = deals_of(rows, n, granule_rows)
    return chunks.reshape(n, deals, block, X).swapaxes(0, 1).reshape(-1, X)[:rows]
