"""Rows of a sharded state, read and written per device. A row is numbered over all data ranks, each
of which holds an equal share of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..model.state import STATE_DIMS
from ..parallel import collectives
from ..parallel.mesh import DATA


def row_of(name: str, array: Array, row: Int[Array, ""]) -> Array:
    """One row of all data ranks, replicated over them."""
    at = STATE_DIMS[name].index("B")
    local_rows = array.shape[at]
    candidate = jax.lax.dynamic_slice_in_dim(array, row % local_rows, 1, at)
    candidates = collectives.all_gather(candidate, at, DATA)
    return jax.lax.dynamic_slice_in_dim(candidates, row // local_rows, 1, at)


def with_row(name: str, array: Array, row: Int[Array, ""], new: Array) -> Array:
    """The array with one row of all data ranks replaced."""
    at = STATE_DIMS[name].index("B")
    local_rows = array.shape[at]
    old = jax.lax.dynamic_slice_in_dim(array, row % local_rows, 1, at)
    updated = jnp.where(row // local_rows == collectives.rank(DATA), new, old)
    return jax.lax.dynamic_update_slice_in_dim(array, updated, row % local_rows, at)


def slots_of(
    name: str, array: Array, row: Int[Array, ""], first: Int[Array, ""], width: int
) -> Array:
    """`width` slots from `first` on, of one row of all data ranks."""
    slots = first + jnp.arange(width, dtype=jnp.int32)
    return row_of(name, jnp.take(array, slots, axis=STATE_DIMS[name].index("S"), mode="clip"), row)


def with_slots(
    array: Array, row: Int[Array, ""], first: Int[Array, ""], last: Int[Array, ""], new: Array
) -> Array:
    """The cache with slots first .. last of one row of all data ranks replaced by the first of
    `new`. Other slots, and other ranks, write to index S, which is dropped.
    """
    _, local_rows, S, _ = array.shape
    slots = first + jnp.arange(new.shape[2], dtype=jnp.int32)
    is_written = (slots < last) & (row // local_rows == collectives.rank(DATA))
    index = jnp.where(is_written, slots, S)
    return array.at[:, row % local_rows, index].set(new[:, 0], mode="drop")
