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
    """One row of all data ranks, on every one of them."""
    at = STATE_DIMS[name].index("B")
    own = array.shape[at]
    mine = jax.lax.dynamic_slice_in_dim(array, row % own, 1, at)
    every = collectives.all_gather(mine, at, DATA)
    return jax.lax.dynamic_slice_in_dim(every, row // own, 1, at)


def with_row(name: str, array: Array, row: Int[Array, ""], new: Array) -> Array:
    """The array with one row of all data ranks replaced."""
    at = STATE_DIMS[name].index("B")
    own = array.shape[at]
    here = jax.lax.dynamic_slice_in_dim(array, row % own, 1, at)
    kept = jnp.where(row // own == collectives.rank(DATA), new, here)
    return jax.lax.dynamic_update_slice_in_dim(array, kept, row % own, at)


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
    `new`. All else aims at a slot that does not exist.
    """
    _, own, S, _ = array.shape
    slots = first + jnp.arange(new.shape[2], dtype=jnp.int32)
    here = (slots < last) & (row // own == collectives.rank(DATA))
    return array.at[:, row % own, jnp.where(here, slots, S)].set(new[:, 0], mode="drop")
