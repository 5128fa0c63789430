"""The best keys of each query without a sort: a radix search for the last one that is kept, then
the slots of all that rank no lower. For GPUs, where `top_k` of thousands among 10^5 is a full sort.

Digit by digit from the top, keys are counted against every value of the next digit, in one pass
over them; where ranks hold some keys each, they add their counts. Of equal scores the lowest
positions are kept. There is no loop: a score has few digits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from ...parallel import collectives
from ...parallel.collectives import Axis
from ..layers import HIGHEST

NARROW_BITS, WIDE_BITS = 4, 8  # of a digit: many scores are counted against 15 values, few with 255
FEW_SCORES = 2**24
SCAN_KEYS = 256  # keys of a block of the running count


def sortable(x: Float[Array, "*dims"]) -> UInt[Array, "*dims"]:
    """Unsigned numbers in the order of x: of negative ones all bits turn, of others the sign."""
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, word)
    return jnp.where(x < 0, ~bits, bits | word.type(1 << (8 * word.itemsize - 1)))


def best_slots(
    scores: Float[Array, "B T S"], keep: int, axis: Axis = (), stripe: int = 1
) -> Int[Array, "B T U"]:
    """The slots of those of a rank's keys that are among the `keep` best of all ranks along `axis`,
    in order; -1 beyond the last. -inf is never kept.

    Scores as `indexer.score` gives them: float32 or float64, no -0.0. Blocks of `stripe` slots are
    dealt to the ranks in turn (`helix.Stripes`).
    """
    n, S = collectives.ranks(axis), scores.shape[-1]
    keys = jnp.where(scores > -jnp.inf, sortable(scores), 0)  # 0 ranks below every score
    last = _last_kept(keys, keep, axis)

    # Blocks of keys: how many rank above the last kept one, how many tie with it.
    size = stripe if n > 1 else min(SCAN_KEYS, S)
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, -S % size)))
    keys = keys.reshape(*keys.shape[:2], -1, size)
    is_above = keys > last[..., None]
    is_tie = (keys == last[..., None]) & (keys > 0)
    above = jnp.sum(is_above, -1, dtype=jnp.int32)
    ties = jnp.sum(is_tie, -1, dtype=jnp.int32)

    # Ties are kept in the order of positions, as many as are left to keep.
    left = keep - _over_ranks(jnp.sum(above, -1, keepdims=True, dtype=jnp.int32), axis)
    ties_kept = jnp.clip(left - _ties_before(ties, axis), 0, ties)

    # The place of each key among the kept ones: those of the blocks before, then of its own.
    kept_before = _exclusive_sum(above + ties_kept)
    above_here, ties_here = _running_counts(is_above, is_tie)
    is_kept = is_above | (is_tie & (ties_here <= ties_kept[..., None]))
    place = kept_before[..., None] + above_here + jnp.minimum(ties_here, ties_kept[..., None]) - 1
    return _slots_by_place(is_kept, place, min(keep, S))


def _over_ranks(counts: Array, axis: Axis) -> Array:
    return collectives.all_reduce(counts, axis=axis) if collectives.ranks(axis) > 1 else counts


def _last_kept(keys: UInt[Array, "B T S"], keep: int, axis: Axis) -> UInt[Array, "B T 1"]:
    """The greatest number that `keep` keys of all ranks reach; 0 where there are fewer keys."""
    word, width = keys.dtype, 8 * keys.dtype.itemsize
    bits = WIDE_BITS if keys.size <= FEW_SCORES else NARROW_BITS
    digits = jnp.arange(1, 2**bits, dtype=word)[None, None]
    last = jnp.zeros((*keys.shape[:2], 1), word)
    for shift in reversed(range(0, width, bits)):
        bounds = last | (digits << word.type(shift))
        reach = jnp.sum(keys[:, :, None] >= bounds[..., None], -1, dtype=jnp.int32)
        reached = _over_ranks(reach, axis) >= keep
        digit = jnp.sum(reached, -1, keepdims=True, dtype=jnp.int32)
        last = last | (digit.astype(word) << word.type(shift))
    return last


def _ties_before(ties: Int[Array, "B T n"], axis: Axis) -> Int[Array, "B T n"]:
    """How many ties stand in earlier blocks of positions than each of this rank's blocks."""
    n = collectives.ranks(axis)
    if n == 1:
        return _exclusive_sum(ties)
    everywhere = collectives.all_gather(ties[..., None], 3, axis)  # blocks are dealt in turn
    before = _exclusive_sum(everywhere.reshape(*ties.shape[:2], -1))
    return before.reshape(everywhere.shape)[..., collectives.rank(axis)]


def _exclusive_sum(counts: Int[Array, "B T n"]) -> Int[Array, "B T n"]:
    """The sum of the counts before each one, as a product: exact below 2^24."""
    n = counts.shape[-1]
    earlier = jnp.triu(jnp.ones((n, n), jnp.float32), 1)
    product = jnp.einsum("btm,mn->btn", counts.astype(jnp.float32), earlier, precision=HIGHEST)
    return product.astype(jnp.int32)


def _running_counts(
    is_above: Bool[Array, "B T n m"], is_tie: Bool[Array, "B T n m"]
) -> tuple[Int[Array, "B T n m"], Int[Array, "B T n m"]]:
    """How many keys of a block, up to each one, rank above and tie. One product for both: a tie
    counts `base`. All numbers are powers of two and their sums are below 2^24, hence exact.
    """
    size = is_above.shape[-1]
    base = 2 ** size.bit_length()
    worth = jnp.where(is_above, 1, jnp.where(is_tie, base, 0)).astype(jnp.bfloat16)
    up_to = jnp.triu(jnp.ones((size, size), jnp.bfloat16))
    product = jnp.einsum("btnm,mk->btnk", worth, up_to, preferred_element_type=jnp.float32)
    counts = product.astype(jnp.int32)
    return counts % base, counts // base


def _slots_by_place(
    is_kept: Bool[Array, "B T n m"], place: Int[Array, "B T n m"], U: int
) -> Int[Array, "B T U"]:
    """The slots of the kept keys, each at its place among them; -1 where there is none."""
    B, T = place.shape[:2]
    b, t = jnp.arange(B, dtype=jnp.int32), jnp.arange(T, dtype=jnp.int32)
    place = jnp.where(is_kept, place, U).reshape(B, T, -1)  # U does not exist: dropped
    slots = jnp.arange(place.shape[-1], dtype=jnp.int32)[None, None]
    empty = jnp.full((B, T, U), -1, jnp.int32)
    places = empty.at[b[:, None, None], t[None, :, None], place]
    return places.set(jnp.broadcast_to(slots, place.shape), mode="drop")
