"""Gated multi-head latent attention without rotation, expanded and absorbed, over a cache of latent
rows.

A token leaves one row [c, k_rope] in the cache. Expanded (the definition), each head's keys and
values are made from it: k = [w_k_b c, k_rope], v = w_v_b c. Absorbed, w_k_b moves to the query and
w_v_b to the output, so that all heads attend to the rows themselves. The `rope` part is carried but
never rotated: positions only order the keys.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel import helix
from ..parallel.helix import Partial
from .indexer import (
    Indexer,
    candidates,
    keep_best,
    score,
    score_cache,
    select_mask,
    select_sorted,
)
from .layers import HIGHEST, linear, rms_norm, weight
from .state import MLAState, Step, from_cache, read_block, write_rows

KEY_BLOCK = 512
BLOCK_ELEMENTS = 2**23  # latent elements, or scores, of a block of queries that selects
NARROWEST = 4096  # slots that selection always ranks, whether they hold keys or not
DENSE_ELEMENTS = 2**26  # scores of a block of keys, or values, of a block of queries


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
    cache: Array,
    positions: Int[Array, "B T"],
    step: Step,
    value_width: int,
    scale: float,
    slots: int,
) -> Partial:
    """Every query over all latent rows up to its position that this rank holds, a block of keys at
    a time (online softmax).

    Only the first `slots` slots can hold keys, and only blocks that hold some are read. A block
    comes straight out of the stack of caches, so that no layer's cache is copied.
    """
    B, T, H, _ = q.shape
    block = min(KEY_BLOCK, slots)

    def one(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, acc = carry
        first = jnp.minimum(i * block, slots - block)
        rows, held = read_block(cache, first, block, q.dtype, step)
        slot = first + jnp.arange(block, dtype=jnp.int32)
        seen = (held[None, None] <= positions[..., None]) & (slot >= i * block)[None, None]
        scores = jnp.where(seen[:, None], dot("bthr,bsr->bhts", q, rows) * scale, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights = jnp.exp(scores - safe[..., None])
        kept = jnp.exp(top - safe)
        part = dot("bhts,bsc->bhtc", weights.astype(q.dtype), rows[..., :value_width])
        return new_top, mass * kept + weights.sum(-1), acc * kept[..., None] + part

    wide = at_least_float32(q.dtype)
    empty = (
        jnp.full((B, H, T), -jnp.inf, wide),
        jnp.zeros((B, H, T), wide),
        jnp.zeros((B, H, T, value_width), wide),
    )
    blocks = (jnp.minimum(step.held, slots) + block - 1) // block
    top, mass, acc = jax.lax.fori_loop(0, blocks, one, empty)
    o = (acc / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype)
    return Partial(*(jnp.moveaxis(x, 1, 2) for x in (o, top, mass)))


def attend_selected(
    q: Float[Array, "B T H R"],
    cache: Array,
    group: int | Array,
    chosen: Int[Array, "B T U"],
    kept: Bool[Array, "B T U"],
    value_width: int,
    scale: float,
) -> Partial:
    """Every query over the rows chosen for it, gathered from the stack of caches."""
    batch = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    rows = from_cache(cache[group, batch, chosen], q.dtype)
    rows = jnp.where(kept[..., None], rows, jnp.zeros((), q.dtype))
    scores = jnp.where(kept[..., None, :], dot("bthr,btur->bthu", q, rows) * scale, -jnp.inf)
    top = scores.max(-1)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(scores.dtype).min)[..., None])
    mass = weights.sum(-1)
    out = dot("bthu,btuc->bthc", weights.astype(q.dtype), rows[..., :value_width])
    return Partial((out / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype), top, mass)


class MLA(nnx.Module):
    """The MLA sublayer on this rank's heads; its result is a partial sum over heads.

    Where keys are cut over ranks, every rank makes the queries of all heads, attends over its own
    keys, and goes on with its own heads after one exchange.
    """

    def __init__(self, config: Config, dtype: DTypeLike):
        D, H, Q, C = config.hidden, config.heads, config.q_rank, config.kv_rank
        N, V, K = config.nope_dim, config.value_dim, config.nope_dim + config.rope_dim
        self.config = config
        self.w_q_a = weight(dtype, Q=Q, D=D)
        self.q_norm = weight(dtype, Q=Q)
        self.w_q_b = weight(dtype, MK=(H, K), Q=Q)
        self.w_kv_a = weight(dtype, R=config.latent_row, D=D)
        self.kv_norm = weight(dtype, C=C)
        self.w_k_b = weight(dtype, M=H, N=N, C=C)
        self.w_v_b = weight(dtype, O=H, V=V, C=C)
        if config.mla_output_gate:
            self.w_gate = weight(dtype, HV=(H, V), D=D)
        self.w_o = weight(dtype, D=D, HV=(H, V))
        if config.sparse:
            self.indexer = Indexer(config, dtype)

    @jax.named_scope("mla")
    def __call__(
        self, x: Float[Array, "B T D"], state: MLAState, step: Step
    ) -> tuple[Array, MLAState]:
        """x [B, T, D] -> this rank's partial of the output [B, T, D], and the state with the new
        rows written.
        """
        eps = self.config.mla_norm_eps
        latent = rms_norm(linear(x, self.w_q_a[...]), self.q_norm[...], eps)
        q = linear(latent, self.w_q_b[...])
        q = q.reshape(*q.shape[:2], -1, self.config.nope_dim + self.config.rope_dim)
        state = self._remember(x, state, step)
        attend = self._expanded if step.forms.mla == "expanded" else self._absorbed
        o = attend(q, x, latent, state, step)
        o = o.reshape(*o.shape[:2], -1).astype(x.dtype)
        if self.config.mla_output_gate:
            gate = jax.nn.sigmoid(widen(linear(x, self.w_gate[...]))).astype(x.dtype)
            o = o * gate
        return linear(o, self.w_o[...]), state

    def _remember(self, x: Array, state: MLAState, step: Step) -> MLAState:
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

    def _expanded(self, q: Array, x: Array, latent: Array, state: MLAState, step: Step) -> Array:
        S = state.latents.shape[2]
        latents, _ = read_block(state.latents, jnp.int32(0), S, q.dtype, step)
        allowed = jnp.arange(S, dtype=jnp.int32)[None, None] <= step.positions[..., None]
        bias = 0.0
        if self.config.sparse and state.index_keys is not None:
            q_i, w_i = self.indexer.queries(x, latent)
            keys, _ = read_block(state.index_keys, jnp.int32(0), S, q.dtype, step)
            scores = score(q_i, w_i, keys)
            teach = step.forms.select == "teach"
            select = select_mask if teach else select_sorted
            allowed &= select(
                jax.lax.stop_gradient(jnp.where(allowed, scores, -jnp.inf)), self.config.index_topk
            )
            if teach:  # a value of zero through which attention's gradient reaches the scores
                bias = scores - jax.lax.stop_gradient(scores)
        return expanded(q, latents, self.w_k_b[...], self.w_v_b[...], allowed, self._scale, bias)

    def _absorbed(self, q: Array, x: Array, latent: Array, state: MLAState, step: Step) -> Array:
        N, values = self.config.nope_dim, jnp.swapaxes(self.w_v_b[...], 1, 2)
        q = jnp.concatenate([per_head(q[..., :N], self.w_k_b[...]), q[..., N:]], -1)
        part = self._partial(q, x, latent, state, step)
        if step.stripes.ranks == 1:
            return per_head(part.o, values)
        with jax.named_scope("heads"):
            if step.place.exchange == "values":
                return helix.exchange(part._replace(o=per_head(part.o, values)))
            return per_head(helix.exchange(part), values)

    def _partial(self, q: Array, x: Array, latent: Array, state: MLAState, step: Step) -> Partial:
        """Attention over the latent rows that this rank holds."""
        slots, U = state.latents.shape[2], self.config.index_topk

        def dense(slots: int) -> Partial:
            C, (B, T, H, _) = self.config.kv_rank, q.shape
            size = max(1, DENSE_ELEMENTS // (B * H * max(KEY_BLOCK, C)))
            one = lambda block: attend_rows(  # noqa: E731
                block[0], state.latents, block[1], step, C, self._scale, slots
            )
            return over_queries(one, (q, step.positions), step.valid, min(T, size))

        if not self.config.sparse or step.stripes.most(slots) <= U:
            return dense(slots)
        few = jnp.max(step.total) <= U
        sparse = lambda: self._sparse(q, x, latent, state, step)  # noqa: E731
        return jax.lax.cond(few, lambda: dense(step.stripes.slots(U)), sparse)

    def _sparse(self, q: Array, x: Array, latent: Array, state: MLAState, step: Step) -> Partial:
        """Attention over the rows that are selected, a block of queries at a time."""
        chosen, kept = self.select(x, latent, state, step)

        def attend(block: tuple[Array, Array, Array]) -> Partial:
            q, chosen, kept = block
            C = self.config.kv_rank
            return attend_selected(q, state.latents, step.group, chosen, kept, C, self._scale)

        return over_queries(attend, (q, chosen, kept), step.valid, self._queries(state, step))

    @jax.named_scope("indexer")
    def select(
        self, x: Array, latent: Array, state: MLAState, step: Step
    ) -> tuple[Int[Array, "B T U"], Bool[Array, "B T U"]]:
        """The slots of this rank's best keys for each query, and which of them are kept.

        Scores are made a block of queries at a time, so that memory follows the block and not the
        prompt; ranks agree on what is kept once, behind the blocks.
        """
        U, keys = self.config.index_topk, state.index_keys
        assert keys is not None

        size = self._queries(state, step)
        find = lambda block: self._best(block, keys, step)  # noqa: E731
        best, chosen = over_queries(find, (x, latent, step.positions), step.valid, size)
        if step.stripes.ranks == 1:
            return chosen, best > -jnp.inf
        limit = keys.shape[2] * step.stripes.ranks
        with jax.named_scope("selection"):
            return chosen, keep_best(best, step.positions_of(chosen), U, limit)

    def _best(
        self, queries: tuple[Array, Array, Array], keys: Array, step: Step
    ) -> tuple[Array, Array]:
        """`candidates` of queries (x, latent, position) among all slots that hold keys and some of
        the empty ones.
        """
        x, latent, positions = queries
        q, w = self.indexer.queries(x, latent)

        def among(slots: int) -> tuple[Array, Array]:
            scores = score_cache(q, w, keys, positions, step, min(KEY_BLOCK, slots), slots)
            return candidates(scores, self.config.index_topk)

        widths = halves(keys.shape[2], self.config.index_topk)
        which = sum((step.held <= slots).astype(jnp.int32) for slots in widths[1:])
        return jax.lax.switch(which, [functools.partial(among, slots) for slots in widths])

    def _queries(self, state: MLAState, step: Step) -> int:
        """Queries of a block, by what the largest array of it holds for each: a row per chosen key,
        or a score per slot, which top_k reads and writes.
        """
        _, B, S, R = state.latents.shape
        each = max(min(self.config.index_topk, S) * R, 2 * S)
        return max(1, BLOCK_ELEMENTS // (B * each))


def halves(slots: int, keep: int) -> list[int]:
    """How many slots to select among, the most first: few keys of a long state are not ranked with
    all its empty slots. Each is a branch of the program, so there are at most four.
    """
    widths = [slots]
    while len(widths) < 4 and widths[-1] >= 2 * max(NARROWEST, keep):
        widths.append(-(-widths[-1] // 2))
    return widths


def over_queries(one, arrays: tuple[Array, ...], valid: Bool[Array, "B T"], size: int):
    """Apply `one` to blocks of at most `size` queries [B, size, ...] in turn and join them; blocks
    of padding are skipped, and zero in what `one` returns.
    """
    B, T = valid.shape
    if size >= T:
        return one(arrays)
    size = -(-T // -(-T // size))  # blocks alike: 256 queries by 204 are two of 128

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -T % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    def join(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(B, -1, *parts.shape[3:])[:, :T]

    out = jax.eval_shape(one, tuple(split(x)[0] for x in arrays))
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)  # noqa: E731

    def maybe(block):
        return jax.lax.cond(jnp.any(block[0]), lambda: one(block[1]), zeros)

    parts = jax.lax.map(maybe, (split(valid), tuple(split(x) for x in arrays)))
    return jax.tree.map(join, parts)
