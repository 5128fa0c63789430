"""A KV cache that is split over ranks, block by block: where each position lives, and how partial
attention over the shards is merged.

A cache that is not split is the case of one rank. Positions are global: a prompt's and those that
follow alike. The layout is that of Helix Parallelism (arXiv 2507.07120).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..numerics import at_least_float32, widen
from .collectives import of_bits, to_bits, to_head_owners


@dataclasses.dataclass(frozen=True)
class Stripes:
    """Block b of `block` positions lives on rank b mod `ranks`, behind that rank's earlier blocks.

    Closed forms, for numbers and arrays of positions, slots and ranks alike.
    """

    block: int = 64
    ranks: int = 1

    def owner(self, position: Any) -> Any:
        """The rank that holds a position."""
        return position // self.block % self.ranks

    def slot(self, position: Any) -> Any:
        """Where its owner keeps a position."""
        if self.ranks == 1:
            return position
        return position // (self.block * self.ranks) * self.block + position % self.block

    def position(self, slot: Any, rank: Any) -> Any:
        """The position in a rank's slot: inverse of `slot`."""
        if self.ranks == 1:
            return slot
        block = slot // self.block * self.ranks + rank
        return block * self.block + slot % self.block

    def length(self, total: Any, rank: Any) -> Any:
        """How many of the first `total` positions a rank holds."""
        if self.ranks == 1:
            return total
        lap = self.block * self.ranks
        rest = total % lap
        clip = jnp.clip if isinstance(rest - rank, jax.Array) else np.clip
        return total // lap * self.block + clip(rest - rank * self.block, 0, self.block)

    def slots(self, positions: int) -> int:
        """The slots that every rank needs for a number of positions: as many as the first rank."""
        return int(self.length(positions, 0))

    def window(self, size: int) -> int:
        """The most slots that a rank needs for positions k size to (k + 1) size, of any k."""
        lap = self.block * self.ranks
        begins = np.arange(0, math.lcm(size, lap), size)[:, None]
        ranks = np.arange(self.ranks)
        return int(np.max(self.length(begins + size, ranks) - self.length(begins, ranks)))

    def most(self, slots: int) -> int:
        """The most positions that a number of slots a rank hold: inverse of `slots`."""
        blocks, rest = divmod(slots, self.block)
        return (blocks * self.ranks * self.block + rest) if rest else slots * self.ranks


class Partial(NamedTuple):
    """Attention over some of the keys, head by head: softmax-weighted values, the largest score and
    the sum of exp(score - largest). No key: (0, -inf, 0).
    """

    o: Float[Array, "B T H X"]
    top: Float[Array, "B T H"]
    mass: Float[Array, "B T H"]


def merge(parts: Partial) -> Float[Array, "B T H X"]:
    """Attention over all keys out of partial attention over disjoint shards [n, B, T, H, ...],
    summed in rank order in at least float32 and rounded once. Rows without any key give 0.

    o = sum_i w_i o_i / sum_i w_i, w_i = mass_i exp(top_i - max top) (online softmax).
    """
    top = parts.top.max(0)
    weights = parts.mass * jnp.exp(parts.top - jnp.where(top == -jnp.inf, 0, top)[None])
    rows = jnp.where(weights[..., None] > 0, widen(parts.o) * weights[..., None], 0)
    return (rows.sum(0) / jnp.maximum(weights.sum(0), 1e-30)[..., None]).astype(parts.o.dtype)


def merge_over_ranks(part: Partial) -> Float[Array, "B T h X"]:
    """Every rank's partial attention of all heads -> attention over all keys of this rank's heads.

    One all-to-all over heads; its size does not depend on how many keys there are. What travels is
    rounded to the type of o, the statistics in at least float32 beside it.
    """
    X = part.o.shape[-1]
    wide = at_least_float32(part.o.dtype)
    statistics = jnp.stack([part.top, part.mass], -1).astype(wide)
    arrived = to_head_owners(to_bits(part.o, statistics))
    o, statistics = of_bits(arrived, (X, part.o.dtype), (2, wide))
    return merge(Partial(o, statistics[..., 0], statistics[..., 1]))
