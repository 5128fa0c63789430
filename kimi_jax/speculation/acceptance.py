"""Rejection sampling of drafts: which of them stand, so that the text has the model's own
distribution whatever was drafted.

p_i is the model's distribution after i accepted drafts, q_i the one that draft i was drawn from (or
one-hot, where the draft is certain), d_i the draft and u_i uniform noise. Two rules:

    standard   d_i stands if u_i < p_i(d_i) / q_i(d_i) and all before it do; the next token is drawn
               from max(p - q, 0) at the first that falls (Leviathan et al., arXiv 2211.17192)
    block      all drafts are judged together, which accepts as many or more on average
               (Sun et al., arXiv 2403.10444)

With temperature 0 p is one-hot and both rules accept exactly the drafts that are the best tokens.
The number of drafts may depend on the drafts before, never on the one that is left out.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..numerics import widen
from ..runtime.rows import Rows
from ..runtime.sampling import adjust, allowed, gumbel_noise, uniform_noise

# Streams of noise of a row's seed. Stream 0 is that of decode steps.
DRAFTING, ACCEPTING, RESAMPLING = 1, 2, 3
_NO_MASS = 1e-8  # of a difference of two distributions: rounding alone


class Verdict(NamedTuple):
    """How many drafts stand, and the distribution of the token after them."""

    accepted: Int[Array, ""]
    following: Float[Array, " Z"]


def standard(
    p: Float[Array, "T Z"],
    q: Float[Array, "k Z"],
    drafts: Int[Array, " k"],
    count: Int[Array, ""],
    noise: Float[Array, " k"],
) -> Verdict:
    """The verdict on the first `count` of k = T - 1 drafts, each on its own."""
    stands = noise < jnp.minimum(_ratios(p, q, drafts), 1)
    stands &= jnp.arange(len(drafts), dtype=jnp.int32) < count
    accepted = jnp.cumprod(stands.astype(jnp.int32)).sum(dtype=jnp.int32)
    return Verdict(accepted, _residual(p, q, accepted, count, jnp.ones((), p.dtype)))


def block(
    p: Float[Array, "T Z"],
    q: Float[Array, "k Z"],
    drafts: Int[Array, " k"],
    count: Int[Array, ""],
    noise: Float[Array, " k"],
) -> Verdict:
    """The verdict on the first `count` of k = T - 1 drafts, all together: the longest prefix whose
    own noise accepts it.
    """
    weights, chances = _prefixes(p, q, drafts, count)
    numbers = jnp.arange(1, len(drafts) + 1, dtype=jnp.int32)
    stands = (noise < chances) & (numbers <= count)
    accepted = jnp.max(jnp.where(stands, numbers, 0), initial=0)
    weight = jnp.concatenate([jnp.ones(1, p.dtype), weights])[accepted]
    return Verdict(accepted, _residual(p, q, accepted, count, weight))


RULES: dict[str, Callable[..., Verdict]] = {"standard": standard, "block": block}


def _ratios(p: Array, q: Array, drafts: Array) -> Float[Array, " k"]:
    """p(d) / q(d) of each draft; q(d) > 0, as d was drawn from q."""
    at = drafts[:, None]
    of_p, of_q = (jnp.take_along_axis(x, at, 1)[:, 0] for x in (p[:-1], q))
    return of_p / jnp.where(of_q > 0, of_q, 1)


def _prefixes(
    p: Array, q: Array, drafts: Array, count: Array
) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
    """The weight w_i of each prefix of i drafts, w_i = min(1, w_{i-1} p(d_i) / q(d_i)), and the
    chance that it stands if no longer one does: R / (R + 1 - w), R = sum max(w p - q, 0) of the
    draft after it; w for the last prefix.
    """

    def grow(weight: Array, ratio: Array) -> tuple[Array, Array]:
        weight = jnp.minimum(weight * ratio, 1)
        return weight, weight

    _, weights = jax.lax.scan(grow, jnp.ones((), p.dtype), _ratios(p, q, drafts))
    after = jnp.concatenate([q[1:], jnp.zeros_like(q[:1])])
    rest = jnp.maximum(weights[:, None] * p[1:] - after, 0).sum(-1)
    whole = rest + 1 - weights
    chances = jnp.where(whole > 0, rest / jnp.where(whole > 0, whole, 1), 1)
    is_last = jnp.arange(1, len(drafts) + 1, dtype=jnp.int32) == count
    return weights, jnp.where(is_last, weights, chances)


def _residual(p: Array, q: Array, accepted: Array, count: Array, weight: Array) -> Array:
    """The distribution of the token after the accepted drafts: max(w p - q, 0), scaled to sum 1;
    p after the last draft.
    """
    q_next = jnp.concatenate([q, jnp.zeros_like(q[:1])])[accepted]
    rest = jnp.maximum(weight * p[accepted] - q_next, 0)
    mass = rest.sum()
    is_plain = (accepted >= count) | (mass <= _NO_MASS)
    return jnp.where(is_plain, p[accepted], rest / jnp.where(is_plain, 1, mass))


def distribution(
    logits: Float[Array, " Z"], temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> Float[Array, " Z"]:
    """What a decode step draws a token from; temperature 0: one-hot at the best token."""
    wide = widen(logits)
    temperature, top_p, min_p = (x.astype(wide.dtype) for x in (temperature, top_p, min_p))
    may = allowed(wide, temperature, top_k, top_p, min_p)
    scaled = (wide - wide.max()) / jnp.where(temperature > 0, temperature, 1)
    drawn = jax.nn.softmax(jnp.where(may, scaled, -jnp.inf))
    best = jax.nn.one_hot(jnp.argmax(wide), len(wide), dtype=wide.dtype)
    return jnp.where(temperature > 0, drawn, best)


def adjusted_logits(
    logits: Float[Array, "B T Z"], drafts: Int[Array, "B k"], rows: Rows
) -> Float[Array, "B T Z"]:
    """The logits after each verified row with bias and penalties of `rows`, which count the drafts
    before.
    """

    def of_row(rows: Rows, column: tuple[Array, Array]) -> tuple[Rows, Array]:
        at_row, draft = column
        return rows.after(draft, jnp.ones(len(draft), bool)), adjust(at_row, rows)

    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    _, adjusted = jax.lax.scan(of_row, rows, (jnp.moveaxis(logits, 1, 0), padded.T))
    return jnp.moveaxis(adjusted, 0, 1)


def target_distributions(adjusted: Float[Array, "B T Z"], rows: Rows) -> Float[Array, "B T Z"]:
    """The model's distribution after each verified row, of `adjusted_logits`: temperature and
    truncation of `rows`.
    """
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    of_request = jax.vmap(distribution, (0, None, None, None, None))
    return jax.vmap(of_request)(adjusted, *settings)


@functools.partial(jax.jit, static_argnames="rule")
def accept_drawn(
    adjusted: Float[Array, "B T Z"],
    drafts: Int[Array, "B k"],
    q: Float[Array, "B k Z"] | None,
    counts: Int[Array, " B"],
    rows: Rows,
    rule: str = "block",
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """The next tokens of each request, and how many they are: the accepted ones of its first
    `counts[b]` drafts and one more, or up to a stop id among them. 0 for rows that are not active.

    `adjusted` are `adjusted_logits` after the anchor and each of k = T - 1 drafts, `q` what drafts
    were drawn from (None: they are certain). The noise is a function of the row's seed and of the
    number of its tokens.
    """
    p = target_distributions(adjusted, rows)
    if q is None:
        q = jax.nn.one_hot(drafts, p.shape[-1], dtype=p.dtype)
    accept = functools.partial(uniform_noise, count=drafts.shape[1], stream=ACCEPTING)
    noise = accept(rows.seeds, rows.counts).astype(p.dtype)
    verdict = jax.vmap(RULES[rule])(p, q.astype(p.dtype), drafts, counts, noise)
    tag = rows.counts + verdict.accepted
    gumbel = gumbel_noise(rows.seeds, tag, p.shape[-1], RESAMPLING).astype(p.dtype)
    following = jnp.argmax(jnp.log(verdict.following) + gumbel, -1).astype(drafts.dtype)
    batch = jnp.arange(len(drafts), dtype=jnp.int32)
    tokens = jnp.pad(drafts, ((0, 0), (0, 1))).at[batch, verdict.accepted].set(following)
    lengths = jnp.minimum(verdict.accepted, _first_stop(drafts, rows)) + 1
    return tokens, jnp.where(rows.active, lengths, 0)


def _first_stop(drafts: Int[Array, "B k"], rows: Rows) -> Int[Array, " B"]:
    """The number of drafts before the first that ends a reply; k where none does."""
    ends: Bool[Array, "B k"] = (drafts[:, :, None] == rows.stop_ids[:, None, :]).any(-1)
    return jnp.cumprod(~ends, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
