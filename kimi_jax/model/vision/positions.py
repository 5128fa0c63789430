"""Where a patch is: the order in which the tower takes patches, the learned position table, the
time table, and the two-dimensional rotation.

The tower takes the patches of a frame in merge order: the four of each 2 x 2 group one after
another, groups row by row. Attention does not depend on the order, and merging is a reshape. Places
beyond an image's patches are padding; what they hold is undefined.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ...config.vision import MERGE
from ...numerics import at_least_float32, widen

THETA = 10_000.0  # base of the wave lengths, of the rotation and of the time table


def merge_order(rows: int, columns: int) -> Int[np.ndarray, " L"]:
    """The number, row by row, of each patch of a frame in merge order."""
    grid = np.arange(rows * columns, dtype=np.int32)
    groups = grid.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE)
    return groups.swapaxes(1, 2).reshape(-1)


def places(L: int, columns: Int[Array, ""]) -> tuple[Int[Array, " L"], Int[Array, " L"]]:
    """Row and column of L patches in merge order, on a grid of this many columns: the inverse of
    `merge_order` for a grid that is known at run time.
    """
    at = jnp.arange(L, dtype=jnp.int32)
    group, inside = at // MERGE**2, at % MERGE**2
    across = columns // MERGE
    row = MERGE * (group // across) + inside // MERGE
    return row, MERGE * (group % across) + inside % MERGE


# The learned table.


def positions(
    table: Float[Array, "R Q C"],
    row: Int[Array, " L"],
    column: Int[Array, " L"],
    grid: Int[Array, "2"],
) -> Float[Array, "L C"]:
    """The position table, resized to a grid (rows, columns): bilinear, corners not aligned, without
    smoothing where it shrinks. In at least float32; the table itself, bit for bit, on a grid of its
    size.
    """
    wide = widen(table)
    up, down, v = _neighbours(row, grid[0], table.shape[0], wide.dtype)
    left, right, u = _neighbours(column, grid[1], table.shape[1], wide.dtype)
    u, v = u[:, None], v[:, None]
    upper = wide[up, left] * (1 - u) + wide[up, right] * u
    lower = wide[down, left] * (1 - u) + wide[down, right] * u
    return upper * (1 - v) + lower * v


def _neighbours(
    at: Int[Array, " L"], count: Int[Array, ""], size: int, dtype: DTypeLike
) -> tuple[Int[Array, " L"], Int[Array, " L"], Float[Array, " L"]]:
    """The two entries of a table of `size` between which the centre of place `at` of `count` lies,
    and the weight of the second.
    """
    scale = size / count.astype(dtype)
    source = jnp.maximum((at.astype(dtype) + 0.5) * scale - 0.5, 0)
    low = jnp.minimum(jnp.floor(source).astype(jnp.int32), size - 1)
    return low, jnp.minimum(low + 1, size - 1), source - low.astype(dtype)


def frame_table(frames: int, C: int) -> Float[np.ndarray, "frames C"]:
    """[sin(f w) | cos(f w)] of each frame f, w_j = 10000^(-j / (C/2)), in float64. It is added
    where an entry has several frames; an image has one, and nothing is added: not even the cosines
    of frame 0, which are 1.
    """
    waves = THETA ** (-np.arange(C // 2) / (C // 2))
    angles = np.arange(frames)[:, None] * waves[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


# The rotation.


def angles(
    row: Int[Array, " L"], column: Int[Array, " L"], K: int, dtype: DTypeLike
) -> Float[Array, "L half"]:
    """The angle of each pair of channels of a head of width K, in at least float32: column *
    10000^(-4i / K) of pair 2i, row times the same of pair 2i + 1.
    """
    wide = at_least_float32(dtype)
    waves = jnp.asarray(THETA ** (-4 * np.arange(K // 4) / K), wide)[None, :, None]
    at = jnp.stack([column, row], -1).astype(wide)[:, None]
    return (at * waves).reshape(len(row), K // 2)


def rotate(x: Float[Array, "S H K"], turn: Float[Array, "S half"]) -> Float[Array, "S H K"]:
    """Channels (2m, 2m + 1) of every head turned by angle m of the patch: (a cos - b sin,
    a sin + b cos), rounded once.
    """
    cos, sin = jnp.cos(turn)[:, None], jnp.sin(turn)[:, None]
    pairs = x.astype(turn.dtype).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape).astype(x.dtype)
