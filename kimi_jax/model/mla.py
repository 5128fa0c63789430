"""Gated multi-head latent attention (MLA) over a cache of latent rows.

What is unusual in it:
- a token leaves one row [c, k_rope] in the cache, for all heads together. Expanded (the
  definition), each head's keys and values are made from it: k = [w_k_b c, k_rope], v = w_v_b c.
  Absorbed, w_k_b moves to the query and w_v_b to the output, so that all heads attend to the rows
  themselves;
- nothing is rotated: the `rope` part is carried as it is, and positions only order the keys;
- K3.1 selects: each query attends to the `index_topk` keys that an indexer scores highest;
- the output is gated by a sigmoid of the sublayer's input;
- cached rows may be sharded over ranks (helix): every rank then attends for all heads over its own
  keys, and one all-to-all merges.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel import helix
from ..parallel.helix import Partial
from ..parallel.roles import Dim, Role
from .indexer import (
    SELECTIONS,
    Indexer,
    candidates,
    keep_best,
    score,
    score_cache,
)
from .layers import HIGHEST, Term, linear, rms_norm, weight
from .state import MLAState, from_cache, read_block, write_rows
from .step import Step


def dot(spec: str, a: Array, b: Array) -> Array:
    """einsum accumulated in at least float32 at full precision, not rounded back."""
    wide = at_least_float32(a.dtype)
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=wide)


def per_head(x: Float[Array, "B T H i"], w: Float[Array, "H i o"]) -> Float[Array, "B T H o"]:
    """x_h w_h for every head, rounded once. Heads lead both operands: CPUs run no other batched
    bfloat16 product.
    """
    B, T, H, _ = x.shape
    rows = jnp.moveaxis(x, 2, 0).reshape(H, B * T, -1)
    y = dot("hpi,hio->hpo", rows, w).astype(x.dtype)
    return jnp.moveaxis(y.reshape(H, B, T, -1), 0, 2)


def expanded(
    q: Float[Array, "B T H K"],
    latents: Float[Array, "B S R"],
    w_k_b: Float[Array, "H N C"],
    w_v_b: Float[Array, "H V C"],
    allowed: Bool[Array, "B T S"],
    scale: float,
    bias: Float[Array, "B T S"] | float = 0.0,
) -> Float[Array, "B T H V"]:
    """softmax(q k^T scale + bias) v with every key and value written out: the definition."""
    q, latents = widen(q), widen(latents)
    c, k_rope = latents[..., : w_k_b.shape[-1]], latents[..., w_k_b.shape[-1] :]
    k_nope = dot("bsc,hnc->bshn", c, widen(w_k_b))
    v = dot("bsc,hvc->bshv", c, widen(w_v_b))
    q_nope, q_rope = q[..., : w_k_b.shape[1]], q[..., w_k_b.shape[1] :]
    scores = dot("bthn,bshn->bhts", q_nope, k_nope) + dot("bthr,bsr->bhts", q_rope, k_rope)
    scores = scores * scale + jnp.expand_dims(bias, -3) if jnp.ndim(bias) else scores * scale
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
    return dot("bhts,bshv->bthv", weights, v)


def attend_rows(
    q: Float[Array, "B T H R"],
    cache: Shaped[Array, "G B S R"],
    positions: Int[Array, "B T"],
    step: Step,
    value_width: int,
    scale: float,
    slots: int,
) -> Partial:
    """Every query over all latent rows up to its position that this rank holds, a block of keys at
    a time (online softmax). The first `value_width` numbers of a row are its values.

    Only the first `slots` slots can hold keys, and only blocks that hold some are read. A block
    comes straight out of the stack of caches, so that no layer's cache is copied.
    """
    B, T, H, _ = q.shape
    block = min(step.blocks.keys, slots)

    def add_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, acc = carry

        # Read. The last block begins early, to end with the slots: its overlap is not seen twice.
        first = jnp.minimum(i * block, slots - block)
        rows, key_positions = read_block(cache, first, block, q.dtype, step)
        slot = first + jnp.arange(block, dtype=jnp.int32)
        is_new = slot >= i * block
        is_seen = (key_positions[None, None] <= positions[..., None]) & is_new[None, None]

        # Score; unseen keys weigh exp(-inf) = 0.
        products = dot("bthr,bsr->bhts", q, rows)
        scores = jnp.where(is_seen[:, None], products * scale, -jnp.inf)

        # Rescale what was summed so far to the new largest score, and add this block.
        new_top = jnp.maximum(top, scores.max(-1))
        reference = jnp.where(new_top == -jnp.inf, 0, new_top)  # no key yet: -inf - -inf is NaN
        weights = jnp.exp(scores - reference[..., None])
        rescale = jnp.exp(top - reference)
        added = dot("bhts,bsc->bhtc", weights.astype(q.dtype), rows[..., :value_width])
        return new_top, mass * rescale + weights.sum(-1), acc * rescale[..., None] + added

    wide = at_least_float32(q.dtype)
    empty = (
        jnp.full((B, H, T), -jnp.inf, wide),
        jnp.zeros((B, H, T), wide),
        jnp.zeros((B, H, T, value_width), wide),
    )
    blocks = (jnp.minimum(step.max_local_keys, slots) + block - 1) // block
    top, mass, acc = jax.lax.fori_loop(0, blocks, add_block, empty)
    o = (acc / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype)
    return Partial(*(jnp.moveaxis(x, 1, 2) for x in (o, top, mass)))


def attend_selected(
    q: Float[Array, "B T H R"],
    cache: Shaped[Array, "G B S R"],
    group: int | Array,
    slots: Int[Array, "B T U"],
    kept: Bool[Array, "B T U"],
    value_width: int,
    scale: float,
) -> Partial:
    """Every query over those of its `slots` that are kept, gathered from the stack of caches."""
    batch = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    rows = from_cache(cache[group, batch, slots], q.dtype)
    rows = jnp.where(kept[..., None], rows, jnp.zeros((), q.dtype))
    scores = jnp.where(kept[..., None, :], dot("bthr,btur->bthu", q, rows) * scale, -jnp.inf)
    top = scores.max(-1)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(scores.dtype).min)[..., None])
    mass = weights.sum(-1)
    out = dot("bthu,btuc->bthc", weights.astype(q.dtype), rows[..., :value_width])
    return Partial((out / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype), top, mass)


class MLA(nnx.Module):
    """The MLA sublayer on this rank's heads; its result is a partial sum over heads.

    Where cached keys are sharded, every rank makes the queries of all heads, attends over its keys,
    and goes on with its heads after one exchange.
    """

    def __init__(self, config: Config, dtype: DTypeLike):
        D, Q, C = config.hidden, config.q_rank, config.kv_rank
        H, N, V = config.heads, config.nope_dim, config.value_dim
        HV = Dim(H, V, Role.HEADS)
        self.config = config
        self.w_q_a = weight(dtype, term=Term.MLA_DOWN, Q=Q, D=D)
        self.q_norm = weight(dtype, Q=Q)
        self.w_q_b = weight(
            dtype, term=Term.MLA, HK=Dim(H, N + config.rope_dim, Role.QUERY_HEADS), Q=Q
        )
        self.w_kv_a = weight(dtype, term=Term.MLA_DOWN, R=config.latent_row, D=D)
        self.kv_norm = weight(dtype, C=C)
        self.w_k_b = weight(dtype, term=Term.MLA, H=Dim(H, role=Role.QUERY_HEADS), N=N, C=C)
        self.w_v_b = weight(dtype, term=Term.MLA, H=Dim(H, role=Role.VALUE_HEADS), V=V, C=C)
        if config.mla_output_gate:
            self.w_gate = weight(dtype, term=Term.MLA, HV=HV, D=D)
        self.w_o = weight(dtype, term=Term.MLA, D=D, HV=HV)
        if config.sparse:
            self.indexer = Indexer(config, dtype)

    @jax.named_scope("mla")
    def __call__(
        self, x: Float[Array, "B T D"], state: MLAState, step: Step
    ) -> tuple[Float[Array, "B T D"], MLAState]:
        """The partial sum over this rank's heads of the output for x, and the state with the new
        rows written.
        """
        state = self._write(x, state, step)
        query_latent = rms_norm(
            linear(x, self.w_q_a[...]), self.q_norm[...], self.config.mla_norm_eps
        )
        q = linear(query_latent, self.w_q_b[...])
        q = q.reshape(*q.shape[:2], -1, self.config.nope_dim + self.config.rope_dim)
        attend = IMPLEMENTATIONS[step.implementations.mla]
        o = attend(self, q, x, query_latent, state, step)
        o = o.reshape(*o.shape[:2], -1).astype(x.dtype)
        if self.config.mla_output_gate:
            gate = jax.nn.sigmoid(widen(linear(x, self.w_gate[...]))).astype(x.dtype)
            o = o * gate
        return linear(o, self.w_o[...]), state

    def _write(self, x: Float[Array, "B T D"], state: MLAState, step: Step) -> MLAState:
        """The caches with the latent rows and index keys of the new tokens."""
        C = self.config.kv_rank
        row = linear(x, self.w_kv_a[...])
        c = rms_norm(row[..., :C], self.kv_norm[...], self.config.mla_norm_eps)
        latents = write_rows(state.latents, jnp.concatenate([c, row[..., C:]], -1), step)
        index_keys = state.index_keys
        if index_keys is not None:
            index_keys = write_rows(index_keys, self.indexer.keys(x), step)
        return MLAState(latents, index_keys)

    @property
    def _scale(self) -> float:
        return (self.config.nope_dim + self.config.rope_dim) ** -0.5

    def expanded(
        self,
        q: Float[Array, "B T H K"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> Float[Array, "B T H V"]:
        """Attention by the definition, over unsharded keys."""
        S = state.latents.shape[2]
        latents, _ = read_block(state.latents, jnp.int32(0), S, q.dtype, step)
        allowed = jnp.arange(S, dtype=jnp.int32)[None, None] <= step.positions[..., None]
        bias: Array | float = 0.0
        if self.config.sparse and state.index_keys is not None:
            index_q, head_weights = self.indexer.queries(x, query_latent)
            keys, _ = read_block(state.index_keys, jnp.int32(0), S, q.dtype, step)
            scores = score(index_q, head_weights, keys)
            select = SELECTIONS[step.implementations.select]
            allowed, bias = select(scores, allowed, self.config.index_topk)
        return expanded(q, latents, self.w_k_b[...], self.w_v_b[...], allowed, self._scale, bias)

    def absorbed(
        self,
        q: Float[Array, "B T H K"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> Float[Array, "B T h V"]:
        """Attention to the latent rows themselves: of all heads, or of this rank's where keys are
        sharded.
        """
        N, w_values = self.config.nope_dim, jnp.swapaxes(self.w_v_b[...], 1, 2)
        q = jnp.concatenate([per_head(q[..., :N], self.w_k_b[...]), q[..., N:]], -1)
        partial = self._attend_local_keys(q, x, query_latent, state, step)
        if step.stripes.ranks == 1:
            return per_head(partial.o, w_values)
        with jax.named_scope("heads"):
            if step.place.exchange == "values":
                return helix.merge_over_ranks(partial._replace(o=per_head(partial.o, w_values)))
            return per_head(helix.merge_over_ranks(partial), w_values)

    def _attend_local_keys(
        self,
        q: Float[Array, "B T H R"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> Partial:
        """Attention over the latent rows that this rank holds: over all of them where they are no
        more than a query selects, else over those that are selected.
        """
        slots, U = state.latents.shape[2], self.config.index_topk
        all_keys = lambda slots: self._dense(q, state, step, slots)  # noqa: E731
        if not self.config.sparse or step.stripes.most(slots) <= U:
            return all_keys(slots)
        nothing_to_select = jnp.max(step.total) <= U
        selected = lambda: self._sparse(q, x, query_latent, state, step)  # noqa: E731
        return jax.lax.cond(nothing_to_select, lambda: all_keys(step.stripes.slots(U)), selected)

    def _dense(
        self, q: Float[Array, "B T H R"], state: MLAState, step: Step, slots: int
    ) -> Partial:
        """Attention over the first `slots` slots, a block of queries at a time."""
        C, (B, T, H, _) = self.config.kv_rank, q.shape

        def attend(block: tuple[Array, Array]) -> Partial:
            q, positions = block
            return attend_rows(q, state.latents, positions, step, C, self._scale, slots)

        row_bytes = B * H * max(step.blocks.keys, C) * at_least_float32(q.dtype).itemsize
        queries = max(1, step.blocks.dense_bytes // row_bytes)
        return over_queries(attend, (q, step.positions), step.valid, min(T, queries))

    def _sparse(
        self,
        q: Float[Array, "B T H R"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> Partial:
        """Attention over the rows that are selected, a block of queries at a time."""
        slots, kept = self.select(x, query_latent, state, step)

        def attend(block: tuple[Array, Array, Array]) -> Partial:
            q, slots, kept = block
            C = self.config.kv_rank
            return attend_selected(q, state.latents, step.group, slots, kept, C, self._scale)

        queries = self._queries_per_block(state, x.dtype, step)
        return over_queries(attend, (q, slots, kept), step.valid, queries)

    @jax.named_scope("indexer")
    def select(
        self,
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> tuple[Int[Array, "B T U"], Bool[Array, "B T U"]]:
        """The slots of this rank's best keys for each query, and which of them are kept."""
        index_keys = state.index_keys
        assert index_keys is not None

        # Each rank ranks its own keys, a block of queries at a time, so that memory follows the
        # block and not the prompt.
        keep = self.config.index_topk
        find = functools.partial(
            _local_candidates, self.indexer, index_keys=index_keys, step=step, keep=keep
        )
        queries = self._queries_per_block(state, x.dtype, step)
        arrays = (x, query_latent, step.positions)
        scores, slots = over_queries(find, arrays, step.valid, queries)
        if step.stripes.ranks == 1:
            return slots, scores > -jnp.inf

        # Ranks agree on what is kept, once for all queries.
        limit = index_keys.shape[2] * step.stripes.ranks
        with jax.named_scope("selection"):
            positions = step.positions_of(slots)
            axes = step.place.axes(Role.CACHED_KEYS)
            return slots, keep_best(scores, positions, keep, limit, axes)

    def _queries_per_block(self, state: MLAState, dtype: jnp.dtype, step: Step) -> int:
        """Queries of a block, by the largest array that it makes for each: a row per selected key,
        or a score per slot, which top_k reads and writes.
        """
        _, B, S, R = state.latents.shape
        latents = min(self.config.index_topk, S) * R * dtype.itemsize
        scores = 2 * S * at_least_float32(dtype).itemsize
        return max(1, step.blocks.select_bytes // (B * max(latents, scores)))


IMPLEMENTATIONS = {"absorbed": MLA.absorbed, "expanded": MLA.expanded}


def _local_candidates(
    indexer: Indexer,
    queries: tuple[Array, Array, Array],
    index_keys: Shaped[Array, "G B S I"],
    step: Step,
    keep: int,
) -> tuple[Float[Array, "B T U"], Int[Array, "B T U"]]:
    """The scores and slots of this rank's best keys for queries (x, query latent, position),
    the best first, out of all slots that hold keys and some of the empty ones.
    """
    x, query_latent, positions = queries
    index_q, head_weights = indexer.queries(x, query_latent)

    def among(slots: int) -> tuple[Array, Array]:
        block = min(step.blocks.keys, slots)
        scores = score_cache(index_q, head_weights, index_keys, positions, step, block, slots)
        return candidates(scores, keep)

    # The narrowest of a few widths that holds all keys.
    widths = selection_widths(index_keys.shape[2], keep, step.blocks.narrowest_slots)
    which = sum((step.max_local_keys <= width).astype(jnp.int32) for width in widths[1:])
    return jax.lax.switch(which, [functools.partial(among, width) for width in widths])


def selection_widths(slots: int, keep: int, narrowest: int) -> list[int]:
    """How many slots to select among, the most first: few keys of a long state are not ranked with
    all its empty slots. Each is a branch of the program, so there are at most four.
    """
    widths = [slots]
    while len(widths) < 4 and widths[-1] >= 2 * max(narrowest, keep):
        widths.append(-(-widths[-1] // 2))
    return widths


def over_queries(
    function: Callable[[Any], Any], arrays: tuple[Array, ...], valid: Bool[Array, "B T"], size: int
) -> Any:
    """`function` of arrays [B, T, ...], applied to blocks of at most `size` queries in turn. Blocks
    of padding alone are skipped: their results are zero.
    """
    B, T = valid.shape
    if size >= T:
        return function(arrays)
    size = -(-T // -(-T // size))  # blocks of equal size: 256 queries by 204 are two of 128

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -T % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    def join(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(B, -1, *parts.shape[3:])[:, :T]

    blocks = tuple(split(x) for x in arrays)
    shapes = jax.eval_shape(function, tuple(x[0] for x in blocks))
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731

    def of_block(block: tuple[Array, tuple[Array, ...]]) -> Any:
        valid, arrays = block
        return jax.lax.cond(jnp.any(valid), lambda: function(arrays), zeros)

    return jax.tree.map(join, jax.lax.map(of_block, (split(valid), blocks)))
