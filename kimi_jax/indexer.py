"""K3.1's sparse selection: a light scorer over all past keys, of which each query keeps the best
`index_topk`.

    score(t, s) = sum_j w[t, j] relu(q[t, j] . k[s] I^-0.5),   w = w_weights x J^-0.5

after DeepSeek-V3.2's indexer, without rotation. Ties go to the lowest position.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .config import Config
from .layers import HIGHEST, at_least_float32, layer_norm, linear, linear_wide, weight
from .state import Step, read_block


def score(
    q: Float[Array, "B T J I"], w: Float[Array, "B T J"], keys: Float[Array, "B S I"]
) -> Float[Array, "B T S"]:
    """The indexer's score of each key for each query, in at least float32. -0.0 becomes 0.0, so
    that both tie.
    """
    dots = jnp.einsum(
        "btji,bsi->btjs",
        q,
        keys,
        precision=HIGHEST,
        preferred_element_type=at_least_float32(q.dtype),
    )
    dots = jax.nn.relu(dots * q.shape[-1] ** -0.5)
    summed = jnp.einsum("btj,btjs->bts", w, dots, precision=HIGHEST)
    return jnp.where(summed == 0, jnp.zeros((), summed.dtype), summed)


def select_sorted(scores: Float[Array, "B T S"], keep: int) -> Bool[Array, "B T S"]:
    """The `keep` best keys of each query as a mask, by a full stable sort: the definition. -inf is
    never kept.
    """
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return (rank < keep) & (scores > -jnp.inf)


def select_top_k(
    scores: Float[Array, "B T S"], keep: int
) -> tuple[Int[Array, "B T U"], Bool[Array, "B T U"]]:
    """The positions of the `keep` best keys of each query, and which of them are keys at all (score
    > -inf).
    """
    best, positions = jax.lax.top_k(scores, keep)
    return positions.astype(jnp.int32), best > -jnp.inf


def select_mask(scores: Float[Array, "B T S"], keep: int) -> Bool[Array, "B T S"]:
    """`select_sorted` without the sorts: all that ranks no lower than the last key that
    `select_top_k` keeps.
    """
    keep = min(keep, scores.shape[-1])
    best, positions = jax.lax.top_k(scores, keep)
    last, at = best[..., -1:], positions[..., -1:]
    slots = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return ((scores > last) | ((scores == last) & (slots <= at))) & (scores > -jnp.inf)


class Indexer(nnx.Module):
    """Projects index keys and queries. Whole on every rank, so that all select the same keys."""

    def __init__(self, config: Config, dtype: DTypeLike):
        J, I, D, Q = config.index_heads, config.index_dim, config.hidden, config.q_rank  # noqa: E741
        self.config = config
        self.w_q = weight(dtype, JI=J * I, Q=Q)
        self.w_k = weight(dtype, I=I, D=D)
        self.w_weights = weight(dtype, J=J, D=D)
        self.k_norm = weight(dtype, I=I)
        self.k_bias = weight(dtype, I=I)

    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T I"]:
        """The keys that the cache holds for new tokens."""
        return layer_norm(
            linear(x, self.w_k[...]), self.k_norm[...], self.k_bias[...], self.config.norm_eps
        )

    def queries(
        self, x: Float[Array, "B T D"], latent: Float[Array, "B T Q"]
    ) -> tuple[Array, Array]:
        """Index queries [B, T, J, I] out of the normed query latent, and head weights [B, T, J] out
        of x.
        """
        J, I = self.config.index_heads, self.config.index_dim  # noqa: E741
        q = linear(latent, self.w_q[...])
        return q.reshape(*q.shape[:2], J, I), linear_wide(x, self.w_weights[...]) * J**-0.5


def score_cache(
    q: Float[Array, "B T J I"],
    w: Float[Array, "B T J"],
    cache: Array,
    positions: Int[Array, "B T"],
    step: Step,
    block: int,
) -> Float[Array, "B T S"]:
    """Scores against a whole cache of index keys, -inf beyond each query's own position; empty
    blocks cost nothing.
    """
    B, T = positions.shape
    S = cache.shape[2]
    total = step.start + step.lengths
    dtype = at_least_float32(q.dtype)

    def one(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, S - block)
        keys = read_block(cache, step.group, first, block, total, q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(scores, score(q, w, keys), first, 2)

    blocks = (jnp.max(total) + block - 1) // block
    scores = jax.lax.fori_loop(0, blocks, one, jnp.full((B, T, S), -jnp.inf, dtype))
    causal = jnp.arange(S, dtype=jnp.int32) <= positions[..., None]
    return jnp.where(causal, scores, -jnp.inf)
