"""Gated multi-head latent attention (MLA) over a cache of latent rows. MLA: DeepSeek-V2, arXiv
2405.04434.

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
from .attention import static
from .attention.latents import (
    attend_rows,
    attend_selected,
    expanded,
    over_queries,
    per_head,
)
from .indexer import (
    SELECTIONS,
    Indexer,
    candidates,
    keep_best,
    score,
    score_cache,
)
from .layers import Term, linear, rms_norm, weight
from .state import MLAState, read_block, write_rows
from .step import Step


class StaticAttention(nnx.Module):
    """`MLA.static` and its parts: attention in blocks whose number is known when compiling."""

    def static(
        self: Any,
        q: Float[Array, "B T H K"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
    ) -> Float[Array, "B T h V"]:
        """`absorbed` in blocks whose number is known when compiling, for GPUs; keys are selected by
        a radix search instead of a sort.
        """
        S, U = state.latents.shape[2], self.config.index_topk
        is_selective = self.config.sparse and step.stripes.most(S) > U

        def among(slots: int) -> Array:
            if not is_selective:
                return self._static_dense(q, state, step, slots)
            return self._static_sparse(q, x, query_latent, state, step, slots)

        # A decode step is compiled layer by layer.
        most = 4 if q.shape[1] <= static.FEW_QUERIES else 8
        narrowest = step.blocks.narrowest_slots // 2
        widths = selection_widths(S, U // 2 if is_selective else 1, narrowest, most)
        if not is_selective:  # fewer rows than all are copied
            row_bytes = q.shape[0] * state.latents.shape[3] * q.dtype.itemsize
            few = [width for width in widths if width * row_bytes <= step.blocks.dense_bytes]
            widths = [S, *(width for width in few if width < S)]
        return _switch_width(among, widths, step)

    def _static_dense(
        self: Any, q: Float[Array, "B T H K"], state: MLAState, step: Step, slots: int
    ) -> Float[Array, "B T h V"]:
        """Attention to all keys among the first slots, a block of queries at a time."""
        B, T, H, _ = q.shape
        rows = static.stored_rows(state.latents, slots, q.dtype, step.group)
        if step.stripes.ranks == 1 and self._expanding_pays(T):
            seen = lambda positions: static.seen_slots(positions, slots, step)  # noqa: E731
            return self._static_expanded(q, rows, seen, step.positions, step)

        def of_requests(requests: tuple[Array, Array, Array]) -> Partial:
            q, positions, rows = requests
            seen = static.seen_slots(positions, slots, step)
            return static.attend_all(q, rows, seen, self.config.kv_rank, self._scale)

        def attend(block: tuple[Array, Array]) -> Array:
            q, positions = block
            arrays = (self._absorb(q), positions, rows)
            return self._merged(static.by_requests(of_requests, arrays, requests), step)

        # Queries by their scores; requests by their rows, which are masked before they are used.
        scores = B * H * slots * at_least_float32(q.dtype).itemsize  # of a query
        row_bytes = slots * rows.shape[2] * q.dtype.itemsize  # of a request
        requests = max(1, step.blocks.dense_bytes // row_bytes)
        size = max(1, step.blocks.dense_bytes // scores)
        return static.in_blocks(attend, (q, step.positions), size)

    def _static_sparse(
        self: Any,
        q: Float[Array, "B T H K"],
        x: Float[Array, "B T D"],
        query_latent: Float[Array, "B T Q"],
        state: MLAState,
        step: Step,
        slots: int,
    ) -> Float[Array, "B T h V"]:
        """Attention to the selected keys among the first slots, a block of queries at a time."""
        B, T, H, _ = q.shape
        index_keys, keep = state.index_keys, self.config.index_topk
        assert index_keys is not None
        keys = static.stored_rows(index_keys, slots, q.dtype, step.group)
        with jax.named_scope("indexer"):
            index_q, head_weights = self.indexer.queries(x, query_latent)
            chosen = static.choose(index_q, head_weights, keys, keep, step)

        def attend(block: tuple[Array, Array]) -> Array:
            q, chosen = block
            q, C = self._absorb(q), self.config.kv_rank
            latents = state.latents
            partial = static.attend_chosen(q, latents, step.group, chosen, C, self._scale)
            return self._merged(partial, step)

        R, stripes = state.latents.shape[3], step.stripes
        if (
            stripes.ranks == 1
            and self._expanding_pays(T)
            and static.masking_pays(H, slots, keep, R * q.dtype.itemsize)
        ):
            rows = static.stored_rows(state.latents, slots, q.dtype, step.group)
            mask = static.mask_of(chosen, slots)
            return self._static_expanded(q, rows, lambda mask: mask, mask, step)

        def gather(width: int) -> Array:
            # The largest arrays of a query: gathered rows, or absorbed queries of all heads.
            elements = B * R * max(width, H)
            size = max(1, step.blocks.select_bytes // (elements * q.dtype.itemsize))
            return static.in_blocks(attend, (q, chosen[..., :width]), size)

        # Of keys dealt to ranks, most queries keep few on each. Few rows are not worth a branch.
        U = chosen.shape[2]
        if stripes.ranks == 1 or T <= static.FEW_QUERIES:
            return gather(U)
        widths = [width for width in (U, U // 2, U // 4) if width]
        which = static.narrowest(jnp.sum(chosen >= 0, -1), widths)
        return jax.lax.switch(which, [functools.partial(gather, width) for width in widths])

    def _static_expanded(
        self: Any,
        q: Float[Array, "B T H K"],
        rows: Float[Array, "B S R"],
        allowed: Callable[[Array], Array],
        of_queries: Shaped[Array, "B T *X"],
        step: Step,
    ) -> Float[Array, "B T H V"]:
        """Attention with keys and values expanded from the rows, a head and a block of queries at a
        time.
        """
        B, S, _ = rows.shape
        written = static.written_slots(S, step)
        rows = jnp.where(written[..., None], rows, jnp.zeros((), rows.dtype))
        scores = B * S * at_least_float32(q.dtype).itemsize  # of a query and head
        size = max(1, step.blocks.dense_bytes // scores)
        w_k, w_v = self.w_k_b[...], self.w_v_b[...]
        return static.attend_expanded(q, rows, w_k, w_v, allowed, of_queries, self._scale, size)

    def _expanding_pays(self: Any, T: int) -> bool:
        c = self.config
        return static.expanding_pays(T, c.nope_dim, c.rope_dim, c.value_dim, c.kv_rank)

    def _absorb(self: Any, q: Float[Array, "B T H K"]) -> Float[Array, "B T H R"]:
        """Queries that meet the latent rows themselves."""
        N = self.config.nope_dim
        return jnp.concatenate([per_head(q[..., :N], self.w_k_b[...]), q[..., N:]], -1)

    def _merged(self: Any, partial: Partial, step: Step) -> Float[Array, "B T h V"]:
        """The values of partial attention: of all heads, or where keys are sharded of this rank's
        heads over the keys of all ranks.
        """
        w_values = jnp.swapaxes(self.w_v_b[...], 1, 2)
        if step.stripes.ranks == 1:
            return per_head(partial.o, w_values)
        with jax.named_scope("heads"):
            if step.place.exchange == "values":
                return helix.merge_over_ranks(partial._replace(o=per_head(partial.o, w_values)))
            return per_head(helix.merge_over_ranks(partial), w_values)


class MLA(StaticAttention):
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
        absorbed = self._absorb(q)
        partial = self._attend_local_keys(absorbed, x, query_latent, state, step)
        return self._merged(partial, step)

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


IMPLEMENTATIONS = {
    "absorbed": MLA.absorbed,
    "static": MLA.static,
    "expanded": MLA.expanded,
}


def _switch_width(among: Callable[[int], Any], widths: list[int], step: Step) -> Any:
    """`among` the narrowest of a few widths that holds all keys, the most first; the same width on
    all ranks, which may exchange in there.
    """
    which = sum((step.most_keys_of_a_rank <= width).astype(jnp.int32) for width in widths[1:])
    return jax.lax.switch(which, [functools.partial(among, width) for width in widths])


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

    widths = selection_widths(index_keys.shape[2], keep, step.blocks.narrowest_slots)
    return _switch_width(among, widths, step)


def selection_widths(slots: int, keep: int, narrowest: int, most: int = 4) -> list[int]:
    """How many slots to select among, the most first: few keys of a long state are not ranked with
    all its empty slots. Each is a branch of the program, so there are at most `most`.
    """
    widths = [slots]
    while len(widths) < most and widths[-1] >= 2 * max(narrowest, keep):
        widths.append(-(-widths[-1] // 2))
    return widths
