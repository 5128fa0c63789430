"""How arrays move between devices. With placement.py, the only module that names a mesh axis.

Every function is written for the inside of a `shard_map` and is the identity on an axis of size 1,
so that one device runs the same code and its program holds no collective.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MODEL = "model"
DATA = "data"


def ranks(axis: str = MODEL) -> int:
    """Devices along a mesh axis; a Python integer, known while tracing."""
    return jax.lax.axis_size(axis)


def all_reduce(partial: Array, axis: str = MODEL) -> Array:
    """The sum over `axis` of every rank's partial, on every rank."""
    return partial if ranks(axis) == 1 else jax.lax.psum(partial, axis)


def all_gather(part: Array, dim: int, axis: str = MODEL) -> Array:
    """Every rank's part, joined along `dim` in rank order, on every rank."""
    if ranks(axis) == 1:
        return part
    return jax.lax.all_gather(part, axis, axis=dim, tiled=True)


def first_row(part_rows: int, axis: str = MODEL) -> Array:
    """Where this rank's contiguous part of `part_rows` begins in the whole, int32."""
    if ranks(axis) == 1:
        return jnp.int32(0)
    return jax.lax.axis_index(axis).astype(jnp.int32) * part_rows


def embed(table: Float[Array, "Z D"], tokens: Array) -> Array:
    """Rows of a vocabulary-sharded table: each rank looks up the ids it owns, zero elsewhere, then
    one sum.
    """
    local = tokens - first_row(table.shape[0])
    if ranks() == 1:
        return table[local]
    owned = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(owned, local, 0)]
    return all_reduce(jnp.where(owned[..., None], rows, jnp.zeros((), table.dtype)))
