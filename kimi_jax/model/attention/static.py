"""Attention to cached rows in blocks of known number, for GPUs: a loop whose length is data waits
for the host at every turn, and rows that are masked before they are multiplied are written first.

Scores of slots that hold no key are masked, whatever their rows hold; their values are zeroed where
they are multiplied.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...numerics import at_least_float32
from ...parallel import collectives
from ...parallel.collectives import Axis
from ...parallel.helix import Partial
from ...parallel.roles import Role
from ..indexer import head_scores, positive_zero
from ..layers import dot
from ..state import from_cache
from ..step import Step
from .selection import best_slots

# Queries of a request up to which a step is one of decoding: keys are its cost, not queries.
FEW_QUERIES = 16


def stored_rows(
    cache: Shaped[Array, "G B S R"], slots: int, dtype: jnp.dtype, group: int | Array
) -> Float[Array, "B s R"]:
    """The first `slots` slots of a layer as they are: what was never written may be NaN."""
    _, B, _, R = cache.shape
    start = (jnp.int32(group), jnp.int32(0), jnp.int32(0), jnp.int32(0))
    return from_cache(jax.lax.dynamic_slice(cache, start, (1, B, slots, R))[0], dtype)


def softmax_partial(
    scores: Float[Array, "*rows S"], weigh: Callable[[Array], Array], dtype: jnp.dtype
) -> tuple[Float[Array, "*rows X"], Float[Array, "*rows"], Float[Array, "*rows"]]:
    """The fields of `Partial` out of scores, -inf where a key is not seen; `weigh` multiplies
    weights with the keys' values.
    """
    top = scores.max(-1)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(scores.dtype).min)[..., None])
    mass = weights.sum(-1)
    o = weigh(weights.astype(dtype)) / jnp.maximum(mass, 1e-30)[..., None]
    return o.astype(dtype), top, mass


def attend_all(
    q: Float[Array, "B T H R"],
    rows: Float[Array, "B S R"],
    is_seen: Bool[Array, "B T S"],
    value_width: int,
    scale: float,
) -> Partial:
    """Every query over the latent rows that it sees, absorbed. NaN in a row that is not seen
    changes nothing, in one that is seen it reaches the result through its score.
    """
    scores = jnp.where(is_seen[:, :, None], dot("bthr,bsr->bths", q, rows) * scale, -jnp.inf)
    values = jnp.where(jnp.abs(rows) < jnp.inf, rows, jnp.zeros((), rows.dtype))
    weigh = lambda weights: dot("bths,bsr->bthr", weights, values)[..., :value_width]  # noqa: E731
    return Partial(*softmax_partial(scores, weigh, q.dtype))


def by_requests(function: Callable[[Any], Any], arrays: tuple[Array, ...], size: int) -> Any:
    """`function` of arrays [B, ...], applied to at most `size` requests in turn, as many in each:
    nothing is padded, which would copy a cache.
    """
    B = arrays[0].shape[0]
    size = max(divisor for divisor in range(1, B + 1) if B % divisor == 0 and divisor <= size)
    if size == B:
        return function(arrays)
    split = tuple(x.reshape(-1, size, *x.shape[1:]) for x in arrays)
    return jax.tree.map(
        lambda parts: parts.reshape(B, *parts.shape[2:]), jax.lax.map(function, split)
    )


def attend_expanded(
    q: Float[Array, "B T H K"],
    rows: Float[Array, "B S R"],
    w_k_b: Float[Array, "H N C"],
    w_v_b: Float[Array, "H V C"],
    allowed: Callable[[Array], Bool[Array, "B t S"]],
    of_queries: Shaped[Array, "B T *X"],
    scale: float,
    size: int,
) -> Float[Array, "B T H V"]:
    """Every query over the keys that it is allowed to see, head by head, `size` queries at a time:
    a head's keys and values are made once for all of them. `rows` are finite; `allowed` is given
    the block of `of_queries`.
    """
    C = w_k_b.shape[-1]
    c, k_rope = rows[..., :C], rows[..., C:]

    def of_head(head: tuple[Array, Array, Array]) -> Array:
        q, w_k, w_v = head
        k_nope = dot("bsc,nc->bsn", c, w_k).astype(q.dtype)
        k = jnp.concatenate([k_nope, k_rope], -1)
        v = dot("bsc,vc->bsv", c, w_v).astype(q.dtype)

        def attend(block: tuple[Array, Array]) -> Array:
            q, of_queries = block
            scores = dot("btk,bsk->bts", q, k) * scale
            scores = jnp.where(allowed(of_queries), scores, -jnp.inf)
            return softmax_partial(scores, lambda w: dot("bts,bsv->btv", w, v), q.dtype)[0]

        return in_blocks(attend, (q, of_queries), size)

    o = jax.lax.map(of_head, (jnp.moveaxis(q, 2, 0), w_k_b, w_v_b))
    return jnp.moveaxis(o, 0, 2)


def expanding_pays(T: int, nope: int, rope: int, value: int, kv_rank: int) -> bool:
    """Whether T queries over expanded keys and values, expansion included, take fewer products than
    over latent rows. Both write as many scores.
    """
    absorbed = T * (2 * kv_rank + rope)
    expanded = T * (nope + rope + value) + kv_rank * (nope + value)
    return expanded < absorbed


def masking_pays(heads: int, slots: int, keep: int, row_bytes: int) -> bool:
    """Whether a query moves fewer bytes where it scores all slots and masks those not selected,
    than where it gathers the selected rows: these are read, written, and read for scores and for
    values; a score is written and read three times in four bytes.
    """
    return heads * slots * 16 < 4 * keep * row_bytes


def mask_of(slots: Int[Array, "B T U"], S: int) -> Bool[Array, "B T S"]:
    """The first S slots of a cache as a mask of those listed; -1 is none."""
    B, T, _ = slots.shape
    b, t = jnp.arange(B, dtype=jnp.int32), jnp.arange(T, dtype=jnp.int32)
    places = jnp.where(slots < 0, S, slots)
    mask = jnp.zeros((B, T, S), bool).at[b[:, None, None], t[None, :, None], places]
    return mask.set(True, mode="drop")


def attend_chosen(
    q: Float[Array, "B T H R"],
    cache: Shaped[Array, "G B S R"],
    group: int | Array,
    slots: Int[Array, "B T U"],
    value_width: int,
    scale: float,
) -> Partial:
    """Every query over the rows in its `slots`, -1 for none: gathered once, used for scores and
    values. Values are cut out of the result, so that the gathered rows are not cut.
    """
    batch = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    is_kept = slots >= 0
    rows = from_cache(cache[group, batch, jnp.maximum(slots, 0)], q.dtype)
    rows = jnp.where(is_kept[..., None], rows, jnp.zeros((), q.dtype))
    scores = dot("bthr,btur->bthu", q, rows) * scale
    scores = jnp.where(is_kept[..., None, :], scores, -jnp.inf)
    weigh = lambda weights: dot("bthu,btur->bthr", weights, rows)[..., :value_width]  # noqa: E731
    return Partial(*softmax_partial(scores, weigh, q.dtype))


def seen_slots(positions: Int[Array, "B T"], slots: int, step: Step) -> Bool[Array, "B T S"]:
    """Which of a rank's first slots hold a key that each query sees."""
    return _slot_positions(slots, step)[None, None] <= positions[..., None]


def written_slots(slots: int, step: Step) -> Bool[Array, "B S"]:
    """Which of a rank's first slots hold a key."""
    return _slot_positions(slots, step)[None] < step.total[:, None]


def _slot_positions(slots: int, step: Step) -> Int[Array, " S"]:
    return step.positions_of(jnp.arange(slots, dtype=jnp.int32))


def choose(
    q: Float[Array, "B T J I"],
    w: Float[Array, "B T J"],
    keys: Float[Array, "B S I"],
    keep: int,
    step: Step,
) -> Int[Array, "B T U"]:
    """The slots of the index keys that each query keeps, -1 for none.

    Where every rank holds all keys, each one selects for its share of the queries.
    """
    axis = step.place.axes(Role.CACHED_KEYS)
    if step.stripes.ranks > 1:
        return _choose(q, w, keys, step.positions, keep, step, axis)
    n, (B, T) = step.model_ranks, step.positions.shape
    if n == 1 or n > B * T:
        return _choose(q, w, keys, step.positions, keep, step, ())
    split = 0 if T == 1 or (T <= FEW_QUERIES and n <= B) else 1  # requests, or tokens

    def local(x: Array) -> Array:
        rows = collectives.local_rows(jnp.moveaxis(x, split, 0))
        return jnp.moveaxis(rows, 0, split)

    local_keys = local(keys) if split == 0 else keys
    chosen = _choose(local(q), local(w), local_keys, local(step.positions), keep, step, ())
    rows = collectives.all_rows(jnp.moveaxis(chosen, split, 0), (B, T)[split])
    return jnp.moveaxis(rows, 0, split)


def narrowest(counts: Int[Array, "B T"], widths: list[int]) -> Int[Array, ""]:
    """The index of the narrowest of falling widths that is at least all counts of all ranks."""
    most = collectives.all_gather(jnp.max(counts).astype(jnp.int32)[None], 0)
    return jnp.sum(jnp.max(most) <= jnp.array(widths[1:], jnp.int32), dtype=jnp.int32)


def _choose(
    q: Float[Array, "B T J I"],
    w: Float[Array, "B T J"],
    keys: Float[Array, "B S I"],
    positions: Int[Array, "B T"],
    keep: int,
    step: Step,
    axis: Axis,
) -> Int[Array, "B T U"]:
    (B, _, J, _), S = q.shape, keys.shape[1]

    def of_block(block: tuple[Array, Array, Array]) -> Array:
        q, w, positions = block
        is_seen = seen_slots(positions, S, step)
        # A sum and no product, for which the scores of all heads would be transposed.
        scores = jnp.sum(w[..., None] * head_scores(q, keys), 2)
        return jnp.where(is_seen, positive_zero(scores), -jnp.inf)

    dots = B * J * S * at_least_float32(q.dtype).itemsize  # of a query
    size = max(1, step.blocks.select_bytes // dots)
    scores = in_blocks(of_block, (q, w, positions), size)
    return best_slots(scores, keep, axis, step.stripes.block)


def in_blocks(function: Callable[[Any], Any], arrays: tuple[Array, ...], size: int) -> Any:
    """`function` of arrays [B, T, ...], applied to blocks of at most `size` queries in turn."""
    B, T = arrays[0].shape[:2]
    if size >= T:
        return function(arrays)
    size = -(-T // -(-T // size))  # blocks of equal size

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -T % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    def join(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(B, -1, *parts.shape[3:])[:, :T]

    return jax.tree.map(join, jax.lax.map(function, tuple(split(x) for x in arrays)))
