"""The network of a DSpark draft: one parallel pass over the anchor and masks, then a short chain of
Markov steps.

What is unusual in it:
- a committed token leaves rows in the cache that are made of the model's hidden states alone, once
  for all layers: each layer projects the same context row, which its own input norm never sees;
- the rows of the block, made of its residual stream, see all context rows and one another (or, in
  causal drafts, those before), and are not kept;
- embedding and head are the model's; the last norm is the draft's;
- a draft's logits are those of its row, plus a bias of low rank that the token before it chooses.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..config.draft import DraftConfig
from ..config.rope import Rope
from ..model.layers import Term, dot, linear, linear_wide, rms_norm, with_rank
from ..model.layers import weight as any_weight
from ..numerics import at_least_float32, widen
from ..parallel import collectives
from ..parallel.roles import Dim, Role
from ..runtime.sampling import gumbel_noise
from .acceptance import DRAFTING

weight = functools.partial(any_weight, term=Term.DRAFTER)


def turned(
    x: Float[Array, "B T H K"], positions: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T H K"]:
    """Heads rotated by their positions: pairs (2j, 2j + 1), or (j, j + K / 2)."""
    wide = at_least_float32(x.dtype)
    angles = positions.astype(wide)[..., None] * jnp.asarray(rope.frequencies, wide)[None, None]
    cos, sin = (
        (f(angles) * jnp.asarray(rope.cos_factor, wide))[:, :, None] for f in (jnp.cos, jnp.sin)
    )
    split = (-1, 2) if rope.is_interleaved else (2, -1)
    pairs = x.astype(wide).reshape(*x.shape[:-1], *split)
    axis = -1 if rope.is_interleaved else -2
    a, b = (jnp.take(pairs, i, axis=axis) for i in (0, 1))
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis).reshape(x.shape).astype(x.dtype)


class LatentAttention(nnx.Module):
    """Attention to latent rows, of this rank's heads."""

    def __init__(self, config: DraftConfig, dtype: DTypeLike):
        D, Q, C, R = config.hidden, config.q_rank, config.kv_rank, config.latent_row
        H, K, V = config.heads, config.nope_dim, config.value_dim
        heads = Dim(H, role=Role.HEADS)
        self.config = config
        self.w_q_a = weight(dtype, Q=Q, D=D)
        self.q_norm = weight(dtype, Q=Q)
        self.w_q_b = weight(dtype, HK=Dim(H, K + config.rope_dim, Role.HEADS), Q=Q)
        self.w_kv_a = weight(dtype, R=R, D=D)
        self.kv_norm = weight(dtype, C=C)
        self.w_k_b = weight(dtype, H=heads, K=K, C=C)
        self.w_v_b = weight(dtype, H=heads, V=V, C=C)
        self.w_o = weight(dtype, D=D, HV=Dim(H, V, Role.HEADS))

    def rows(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T R"]:
        """What the tokens are seen by: [normed latent, rotated key part]."""
        C, eps = self.config.kv_rank, self.config.norm_eps
        latent, key = jnp.split(linear(x, self.w_kv_a[...]), [C], axis=-1)
        key = turned(key[:, :, None], positions, self.config.rope)[:, :, 0]
        return jnp.concatenate([rms_norm(latent, self.kv_norm[...], eps), key], axis=-1)

    def __call__(
        self, x: Float[Array, "B T D"], cached: Array, seen: Array, positions: Array
    ) -> Float[Array, "B T X"]:
        """Each head's output [B, T, h V], before its projection."""
        C, K = self.config.kv_rank, self.config.nope_dim
        query = rms_norm(linear(x, self.w_q_a[...]), self.q_norm[...], self.config.norm_eps)
        q = linear(query, self.w_q_b[...]).reshape(*x.shape[:2], -1, K + self.config.rope_dim)
        absorbed = dot("bthk,hkc->bthc", q[..., :K], self.w_k_b[...]).astype(x.dtype)
        q = jnp.concatenate([absorbed, turned(q[..., K:], positions, self.config.rope)], axis=-1)
        both = (cached, self.rows(x, positions))
        scores = [dot("bthr,bsr->bhts", q, rows) for rows in both]
        weights = _shares(scores, seen, self.config.score_scale)
        out = sum(
            dot("bhts,bsc->bthc", w.astype(x.dtype), rows[..., :C])
            for w, rows in zip(weights, both, strict=True)
        )
        values = dot("bthc,hvc->bthv", jnp.asarray(out).astype(x.dtype), self.w_v_b[...])
        return values.reshape(*x.shape[:2], -1).astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Grouped-query attention with a norm on every query and key head, of this rank's key heads."""

    def __init__(self, config: DraftConfig, dtype: DTypeLike):
        D, h, K = config.hidden, config.kv_heads, config.rope_dim
        queries = Dim(h, config.heads // h * K, Role.HEADS)
        self.config = config
        self.w_q = weight(dtype, HK=queries, D=D)
        self.q_norm = weight(dtype, K=K)
        self.w_k = weight(dtype, hK=Dim(h, K, Role.HEADS), D=D)
        self.k_norm = weight(dtype, K=K)
        self.w_v = weight(dtype, hK=Dim(h, K, Role.HEADS), D=D)
        self.w_o = weight(dtype, D=D, HK=queries)

    def rows(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T R"]:
        """What the tokens are seen by: [key, value] of each head."""
        values = self._heads(x, self.w_v[...])
        keys = rms_norm(self._heads(x, self.w_k[...]), self.k_norm[...], self.config.norm_eps)
        keys = turned(keys, positions, self.config.rope)
        return jnp.concatenate([keys, values], axis=-1).reshape(*x.shape[:2], -1)

    def _heads(self, x: Array, w: Array) -> Float[Array, "B T H K"]:
        return linear(x, w).reshape(*x.shape[:2], -1, self.config.rope_dim)

    def __call__(
        self, x: Float[Array, "B T D"], cached: Array, seen: Array, positions: Array
    ) -> Float[Array, "B T X"]:
        """Each head's output [B, T, h g K], before its projection."""
        (B, T, _), K = x.shape, self.config.rope_dim
        q = rms_norm(self._heads(x, self.w_q[...]), self.q_norm[...], self.config.norm_eps)
        q = turned(q, positions, self.config.rope)
        q = q.reshape(B, T, -1, self.config.heads // self.config.kv_heads, K)
        both = [
            rows.reshape(B, rows.shape[1], -1, 2 * K) for rows in (cached, self.rows(x, positions))
        ]
        scores = [dot("bthgk,bshk->bhgts", q, rows[..., :K]) for rows in both]
        h, g = scores[0].shape[1:3]
        flat = [s.reshape(B, h * g, T, -1) for s in scores]
        weights = _shares(flat, seen, self.config.score_scale)
        out = sum(
            dot("bhgts,bshk->bthgk", w.reshape(B, h, g, T, -1).astype(x.dtype), rows[..., K:])
            for w, rows in zip(weights, both, strict=True)
        )
        return jnp.asarray(out).reshape(B, T, -1).astype(x.dtype)


def _shares(
    scores: list[Float[Array, "B H T _"]], seen: Bool[Array, "B T S"], scale: float
) -> list[Float[Array, "B H T _"]]:
    """Softmax over two sets of keys together, of which a query sees some."""
    together = jnp.where(seen[:, None], jnp.concatenate(scores, axis=-1) * scale, -jnp.inf)
    return jnp.split(jax.nn.softmax(together), [scores[0].shape[-1]], axis=-1)


class DraftLayer(nnx.Module):
    """norm, attention; norm, SwiGLU."""

    def __init__(self, config: DraftConfig, dtype: DTypeLike):
        D, F = config.hidden, Dim(config.ffn, role=Role.FFN_WIDTH)
        attention = LatentAttention if config.form == "mla" else GroupedAttention
        self.config = config
        self.attention_norm = weight(dtype, D=D)
        self.attention = attention(config, dtype)
        self.mlp_norm = weight(dtype, D=D)
        self.w_gate = weight(dtype, F=F, D=D)
        self.w_up = weight(dtype, F=F, D=D)
        self.w_down = weight(dtype, D=D, F=F)

    def __call__(
        self, x: Float[Array, "B T D"], cached: Array, seen: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """The residual stream of the block after this layer."""
        eps, attention = self.config.norm_eps, self.attention
        h = rms_norm(x, self.attention_norm[...], eps)
        x = x + _reduced(linear(attention(h, cached, seen, positions), attention.w_o[...]))
        h = rms_norm(x, self.mlp_norm[...], eps)
        gate, up = linear(h, self.w_gate[...]), linear(h, self.w_up[...])
        return x + _reduced(linear(jax.nn.silu(gate) * up, self.w_down[...]))


def _reduced(partial: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The sum over model ranks."""
    return collectives.all_reduce(partial.reshape(-1, partial.shape[-1])).reshape(partial.shape)


class Block(NamedTuple):
    """What a pass makes of k drafts."""

    ids: Int[Array, "B k"]
    confidences: Float[Array, "B k"] | None
    base: Float[Array, "B k Z"]  # logits of the rows
    corrected: Float[Array, "B k Z"]  # with the bias of the token before


class Network(nnx.Module):
    """A draft's own weights: taps to context rows, layers, Markov and confidence heads.

    Sharded by its own mapping: heads, width and the input of the context projection over the model
    ranks; latent rows whole, and the cache never by sequence. The Markov matrices are whole on
    every rank, so that the chain of steps waits for no other rank.
    """

    def __init__(self, config: DraftConfig, dtype: DTypeLike):
        D, Z, r, M = config.hidden, config.vocab, config.markov_rank, len(config.layers_tapped)
        self.config, self.dtype = config, jnp.dtype(dtype)
        if config.fc_norm:
            self.tap_norms = nnx.List([weight(dtype, D=D) for _ in range(M)])
        self.w_context = weight(dtype, D=D, X=Dim(M * D, role=Role.FFN_WIDTH))
        self.context_norm = weight(dtype, D=D)
        self.layers = nnx.List([DraftLayer(config, dtype) for _ in range(config.layers)])
        self.norm = weight(dtype, D=D)
        self.w_markov_in = weight(dtype, Z=Z, Q=r)
        self.w_markov_out = weight(dtype, Z=Z, Q=r)
        if config.confidence:
            self.w_confidence = weight(dtype, X=D + r)
            self.b_confidence = weight(dtype, X=1)

    def names_of(self, path: tuple) -> tuple[str, ...]:
        """The name of the weight at a path."""
        return (".".join(map(str, path)),)

    def context_rows(
        self, taps: Float[Array, "B T MD"], positions: Int[Array, "B T"]
    ) -> Float[Array, "layers B T R"]:
        """What committed tokens leave in the cache of each layer."""
        D, eps = self.config.hidden, self.config.norm_eps
        if self.config.fc_norm:
            each = taps.reshape(*taps.shape[:2], -1, D)
            normed = [rms_norm(each[:, :, j], w[...], eps) for j, w in enumerate(self.tap_norms)]
            taps = jnp.concatenate(normed, axis=-1)
        w, n = self.w_context[...], collectives.ranks()
        columns = jnp.pad(taps, ((0, 0), (0, 0), (0, w.shape[1] * n - taps.shape[-1])))
        flat = columns.reshape(-1, columns.shape[-1])
        own = collectives.local_columns(flat).reshape(*taps.shape[:2], -1)
        context = rms_norm(_reduced(linear(own, w)), self.context_norm[...], eps)
        return jnp.stack([layer.attention.rows(context, positions) for layer in self.layers])

    def hidden(
        self,
        embedded: Float[Array, "B k D"],
        cache: Float[Array, "layers B S R"],
        starts: Int[Array, " B"],
    ) -> Float[Array, "B k D"]:
        """Normed rows of the anchor, which stands at position `starts[b]`, and of the masks after
        it: context rows before the anchor are seen, and rows of the block.
        """
        (B, k, _), S = embedded.shape, cache.shape[2]
        numbers = jnp.arange(k, dtype=jnp.int32)
        positions = starts[:, None] + numbers[None]
        context = jnp.arange(S, dtype=jnp.int32)[None, None] < starts[:, None, None]
        inside = numbers[None] <= numbers[:, None] if self.config.causal else jnp.ones((k, k), bool)
        seen = jnp.concatenate(
            [jnp.broadcast_to(context, (B, k, S)), jnp.broadcast_to(inside[None], (B, k, k))], -1
        )
        x = embedded
        for layer, cached in zip(self.layers, cache, strict=True):
            x = layer(x, cached, seen, positions)
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def chain(
        self,
        hidden: Float[Array, "B k D"],
        base: Float[Array, "B k Z"],
        anchors: Int[Array, " B"],
        starts: Int[Array, " B"],
        temperature: Float[Array, " B"],
        seeds: Int[Array, " B"],
    ) -> Block:
        """Drafts one after another: each row's logits are biased by the token before it. Rows of a
        temperature draw, others take the best token.
        """

        def step(before: Array, row: tuple[Array, Array]) -> tuple[Array, tuple]:
            logits, number = row
            embedded = self.w_markov_in[...][before]
            logits = logits + linear_wide(embedded, self.w_markov_out[...]).astype(logits.dtype)
            draft = _draw(logits, temperature, seeds, starts + number)
            return draft, (draft, logits, embedded)

        numbers = jnp.arange(base.shape[1], dtype=jnp.int32)
        rows = jnp.moveaxis(base, 1, 0), numbers
        _, (ids, corrected, embedded) = jax.lax.scan(step, anchors, rows)
        ids, corrected, embedded = (jnp.moveaxis(x, 0, 1) for x in (ids, corrected, embedded))
        confidences = self._confidences(hidden, embedded) if self.config.confidence else None
        return Block(ids, confidences, base, corrected)

    def _confidences(self, hidden: Array, embedded: Array) -> Float[Array, "B k"]:
        rows = widen(jnp.concatenate([hidden, embedded], axis=-1))
        w, b = (x[...].astype(rows.dtype) for x in (self.w_confidence, self.b_confidence))
        return jax.nn.sigmoid(linear_wide(rows, w[None])[..., 0] + with_rank(b, 2))


def _draw(logits: Array, temperature: Array, seeds: Array, positions: Array) -> Int[Array, " B"]:
    """The best token, or one of softmax(logits / temperature)."""
    is_drawn = temperature > 0
    scale = jnp.where(is_drawn, temperature, 1).astype(logits.dtype)[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[-1], DRAFTING).astype(logits.dtype)
    noise = jnp.where(is_drawn[:, None], noise, jnp.zeros((), noise.dtype))
    return jnp.argmax(logits / scale + noise, axis=-1).astype(jnp.int32)


def in_block(anchors: Int[Array, " B"], mask: int, count: int) -> Int[Array, "B k"]:
    """The ids of a block: the anchor, then masks."""
    return jnp.full((len(anchors), count), mask, anchors.dtype).at[:, 0].set(anchors)


def vocabulary_head(w: Any, hidden: Float[Array, "B k D"], vocab: int) -> Float[Array, "B k Z"]:
    """Logits by the model's head, whose rows are sharded over the model ranks."""
    return collectives.all_gather(linear_wide(hidden, w), hidden.ndim - 1)[..., :vocab]
