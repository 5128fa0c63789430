"""Which token comes next: sampling parameters, and sampling on the devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int

from ..errors import PromptError, shown
from ..numerics import is_number, is_whole
from .rows import Rows


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw from the softmax of logits / temperature, among the `top_k` best tokens (0: all), the
    smallest set of best tokens that holds probability `top_p` (always at least one), and tokens of
    at least `min_p` times the best one's probability. Temperature 0 takes the best token.
    `repetition_penalty` p divides positive logits of tokens that prompt or reply hold by p and
    multiplies negative ones (1: none; Keskar et al. 2019). `frequency_penalty` is subtracted from
    the logit of a token as often as the reply holds it, `presence_penalty` once where it holds it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        if problems := sampling_problems(**dataclasses.asdict(self)):
            raise PromptError("\n".join(problems))


def sampling_problems(
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
) -> list[str]:
    """What is wrong with the fields of a `Sample`."""
    problems = []
    if not (is_number(temperature) and 0 <= temperature < np.inf):
        problems.append(f"temperature must be a finite number >= 0, got {shown(temperature)}")
    if not is_whole(top_k, 0, 2**31 - 1):
        problems.append(f"top_k must be a whole number in 0..2^31-1 (0: all), got {shown(top_k)}")
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if not (is_number(share) and 0 <= share <= 1):
            problems.append(f"{name} must lie in 0..1, got {shown(share)}")
    p = repetition_penalty
    if not (is_number(p) and np.finfo(np.float32).tiny <= p < np.inf):
        problems.append(f"repetition_penalty must be a finite number > 0, got {shown(p)}")
    for name, penalty in (
        ("frequency_penalty", frequency_penalty),
        ("presence_penalty", presence_penalty),
    ):
        if not (is_number(penalty) and abs(penalty) < np.inf):
            problems.append(f"{name} must be a finite number, got {shown(penalty)}")
    return problems


def Greedy() -> Sample:
    """Always the best token, of equal logits the lowest id."""
    return Sample(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """log P(token) in nats, before temperature and truncation (top_k, top_p, min_p), and the `top`
    n (id, logprob) pairs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def adjust(logits: Float[Array, "B Z"], rows: Rows) -> Float[Array, "B Z"]:
    """Apply logit bias, then repetition, frequency and presence penalty; mask stop ids until
    `min_new_tokens`.
    """
    if rows.bias is not None:
        logits = logits + rows.bias.astype(logits.dtype)
    if rows.seen is not None:
        penalty = rows.repetition_penalty[:, None].astype(logits.dtype)
        penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(rows.seen, penalized, logits)
    if rows.reply_counts is not None:
        frequency, presence = (
            penalty[:, None].astype(logits.dtype)
            for penalty in (rows.frequency_penalty, rows.presence_penalty)
        )
        times = rows.reply_counts.astype(logits.dtype)
        logits = logits - (frequency * times + presence * jnp.minimum(times, 1))
    if rows.masks_stops:
        too_early = rows.counts < rows.min_new_tokens
        logits = jnp.where(too_early[:, None] & is_stop_id(rows, logits.shape[1]), -jnp.inf, logits)
    return logits


def is_stop_id(rows: Rows, vocab: int) -> Bool[Array, "B Z"]:
    """Which ids end each row."""
    batch = jnp.arange(len(rows.stop_ids), dtype=jnp.int32)[:, None]
    ids = jnp.where(rows.stop_ids < 0, vocab, rows.stop_ids)  # -1 would be the last id
    none = jnp.zeros((len(rows.stop_ids), vocab), bool)
    return none.at[batch, ids].set(True, mode="drop")


def allowed(
    logits: Float[Array, " Z"], temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> Bool[Array, " Z"]:
    """Which tokens may be drawn. The best token always may; of equal logits the lower id ranks
    first.
    """
    Z = logits.shape[0]
    scaled = (logits - logits.max()) / jnp.where(temperature > 0, temperature, 1)
    order = jnp.argsort(-scaled, stable=True)
    probability = jax.nn.softmax(scaled)[order]
    before = jnp.cumsum(probability) - probability
    rank = jnp.arange(Z, dtype=jnp.int32)
    kept = (
        (rank < jnp.where(top_k > 0, top_k, Z))
        & ((before < top_p) | (top_p >= 1))
        & (probability >= min_p * probability[0])
    )
    return jnp.zeros(Z, bool).at[order].set(kept | (rank == 0))


def sample(
    logits: Float[Array, "B Z"], rows: Rows
) -> tuple[
    Int[Array, " B"],
    Bool[Array, " B"],
    Float[Array, " B"],
    Int[Array, "B top"],
    Float[Array, "B top"],
]:
    """The next token of each row, whether its logits could be used (no NaN, some finite maximum,
    also after bias and penalties), its log-probability, and the `top_logprobs` best tokens with
    their log-probabilities. Log-probabilities are those before bias, penalties, temperature and
    truncation.
    """
    adjusted = adjust(logits, rows)
    ids = jnp.argmax(adjusted, -1)
    if rows.draws:
        ids = jnp.where(rows.temperature > 0, draw(adjusted, rows), ids)
    return described(logits, adjusted, ids.astype(jnp.int32), rows.top_logprobs)


def described(
    logits: Float[Array, "B Z"], adjusted: Float[Array, "B Z"], ids: Int[Array, " B"], top: int
) -> tuple[
    Int[Array, " B"],
    Bool[Array, " B"],
    Float[Array, " B"],
    Int[Array, "B top"],
    Float[Array, "B top"],
]:
    """What `sample` returns of sampled ids; `adjusted` are the logits that these were chosen by."""
    usable = jnp.isfinite(logits.max(-1)) & ~jnp.isnan(logits).any(-1)
    usable &= jnp.isfinite(adjusted.max(-1))
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    best, best_ids = jax.lax.top_k(logprobs, top)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], 1)[:, 0]
    return ids, usable, chosen, best_ids.astype(jnp.int32), best


def draw(logits: Float[Array, "B Z"], rows: Rows) -> Int[Array, " B"]:
    """A token of each row from its distribution: the best sum of scaled logits and Gumbel noise
    among the tokens that may be drawn.
    """
    temperature, top_p, min_p = (
        x.astype(logits.dtype) for x in (rows.temperature, rows.top_p, rows.min_p)
    )
    may = jax.vmap(allowed)(logits, temperature, rows.top_k, top_p, min_p)
    divisor = jnp.where(temperature > 0, temperature, 1)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / divisor
    noise = gumbel_noise(rows.seeds, rows.counts, logits.shape[1]).astype(logits.dtype)
    return jnp.argmax(jnp.where(may, scaled + noise, -jnp.inf), -1)


def gumbel_noise(
    seeds: Int[Array, " B"], counts: Int[Array, " B"], vocab: int, stream: int = 0
) -> Float[Array, "B Z"]:
    """Standard Gumbel noise of each row: minus log of minus log of `uniform_noise`."""
    uniform = uniform_noise(seeds, counts, vocab, stream)
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))


def uniform_noise(
    seeds: Int[Array, " B"], counts: Int[Array, " B"], count: int, stream: int = 0
) -> Float[Array, "B Z"]:
    """`count` numbers in 0 to 1 (exclusive) of each row, from the row's seed and count of tokens
    alone; streams are independent of one another.

    In stream 0 they are those of `jax.random.uniform` for the key of the seed with the count folded
    in, under JAX's default settings. It is written out because those settings are the caller's:
    under another generator (`jax_default_prng_impl`) a row of a batch would depend on its
    neighbours.
    """

    def of_row(seed: Array, tokens: Array) -> Array:
        word = lambda high, low: jnp.stack([jnp.uint32(high), low.astype(jnp.uint32)])  # noqa: E731
        key = threefry_2x32(word(0, seed), word(stream, tokens))
        counters = jnp.concatenate(
            [jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype="uint32")]
        )
        high, low = jnp.split(threefry_2x32(key, counters), 2)
        bits = ((high ^ low) >> np.uint32(9)) | np.uint32(0x3F800000)  # the mantissa of 1 to 2
        return jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(1)

    return jax.vmap(of_row)(seeds, counts)
