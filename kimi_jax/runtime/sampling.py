"""Which token comes next: strategies, and how they choose on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int

from ..errors import PromptError, shown
from ..numerics import is_number, is_whole


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw from the model's distribution: logits / temperature, cut to the `top_k` best tokens (0:
    all), to the smallest set of best tokens that holds probability `top_p` (always at least one),
    and to tokens of at least `min_p` times the best one's probability. Temperature 0 takes the best
    token. `repetition_penalty` p divides positive logits of tokens that prompt or reply hold by p
    and multiplies negative ones (1: none; Keskar et al. 2019).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if problems := sampling_problems(**dataclasses.asdict(self)):
            raise PromptError("\n".join(problems))


def sampling_problems(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any = 0.0, repetition_penalty: Any = 1.0
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
    return problems


def Greedy() -> Sample:
    """Always the best token; of equals the lowest id."""
    return Sample(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """log P(token) before temperature and cuts, in nats, and the `top` n (id, logprob) pairs, best
    first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """How each row of a batch chooses its next tokens; travels through a loop of steps."""

    active: Bool[Array, " B"]  # rows that go on
    left: Int[Array, " B"]  # tokens that each may still bring
    seeds: Int[Array, " B"]
    counts: Int[Array, " B"]  # tokens that each has brought
    settings: Float[Array, "B 6"]  # temperature, top_k, top_p, min_p, penalty, fewest tokens
    stops: Int[Array, "B M"]  # ids that end a row; -1: none
    bias: Float[Array, "B Z"] | None  # added to logits
    seen: Bool[Array, "B Z"] | None  # ids that prompt or reply hold, where a penalty asks
    top: int = dataclasses.field(metadata={"static": True})  # log-probabilities to report
    draws: bool = dataclasses.field(metadata={"static": True})  # some row has a temperature
    waits: bool = dataclasses.field(metadata={"static": True})  # stop ids must wait for the fewest
    trip: int = dataclasses.field(metadata={"static": True})  # most steps of a loop

    def after(self, ids: Int[Array, " B"], usable: Bool[Array, " B"]) -> "Rows":
        """What is left to do once these tokens were chosen."""
        stopped = jnp.any(ids[:, None] == self.stops, axis=1)
        left = self.left - self.active.astype(jnp.int32)
        seen = self.seen
        if seen is not None:
            batch = jnp.arange(len(ids), dtype=jnp.int32)
            seen = seen.at[batch, ids].set(seen[batch, ids] | self.active)
        return dataclasses.replace(
            self,
            active=self.active & usable & ~stopped & (left > 0),
            left=left,
            counts=self.counts + self.active.astype(jnp.int32),
            seen=seen,
        )


def adjusted(logits: Float[Array, "B Z"], rows: Rows) -> Float[Array, "B Z"]:
    """Logits with bias and penalty, and without stop ids where a row must go on."""
    B, Z = logits.shape
    if rows.bias is not None:
        logits = logits + rows.bias.astype(logits.dtype)
    if rows.seen is not None:
        penalty = rows.settings[:, 4:5].astype(logits.dtype)
        punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(rows.seen, punished, logits)
    if not rows.waits:
        return logits
    batch, stops = jnp.arange(B, dtype=jnp.int32)[:, None], rows.stops
    ends = jnp.zeros((B, Z), bool)
    ends = ends.at[batch, jnp.where(stops < 0, Z, stops)].set(True, mode="drop")
    early = rows.counts.astype(jnp.float32) < rows.settings[:, 5]
    return jnp.where(early[:, None] & ends, -jnp.inf, logits)


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
        (rank.astype(top_k.dtype) < jnp.where(top_k > 0, top_k, Z))
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
    also after bias and penalty), its log-probability and the `top` best, both before bias, penalty,
    temperature and cuts.
    """
    bent = adjusted(logits, rows)
    usable = jnp.isfinite(logits.max(-1)) & ~jnp.isnan(logits).any(-1) & jnp.isfinite(bent.max(-1))
    ids = jnp.argmax(bent, -1)
    if rows.draws:
        cuts = rows.settings[:, :4].astype(logits.dtype)
        may = jax.vmap(allowed)(bent, *cuts.T)
        warm = jnp.where(cuts[:, :1] > 0, cuts[:, :1], 1)
        noise = gumbel_noise(rows.seeds, rows.counts, logits.shape[1])
        scaled = (bent - bent.max(-1, keepdims=True)) / warm
        drawn = jnp.argmax(jnp.where(may, scaled + noise.astype(bent.dtype), -jnp.inf), -1)
        ids = jnp.where(cuts[:, 0] > 0, drawn, ids)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    best, best_ids = jax.lax.top_k(logprobs, rows.top)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], 1)[:, 0]
    return ids.astype(jnp.int32), usable, chosen, best_ids.astype(jnp.int32), best


def gumbel_noise(
    seeds: Int[Array, " B"], counts: Int[Array, " B"], vocab: int
) -> Float[Array, "B Z"]:
    """Standard Gumbel noise of each row, from its own seed and its own count of tokens alone.

    Equals `jax.random.gumbel` for the key of the seed with the count folded in, under JAX's default
    settings. It is written out because those settings are the caller's: under another generator
    (`jax_default_prng_impl`) a row of a batch would depend on its neighbours.
    """

    def of_row(seed: Array, count: Array) -> Array:
        pair = lambda low: jnp.stack([jnp.uint32(0), low.astype(jnp.uint32)])  # noqa: E731
        key = threefry_2x32(pair(seed), pair(count))
        counters = jnp.concatenate(
            [jnp.zeros(vocab, jnp.uint32), jnp.arange(vocab, dtype="uint32")]
        )
        high, low = jnp.split(threefry_2x32(key, counters), 2)
        bits = ((high ^ low) >> np.uint32(9)) | np.uint32(0x3F800000)  # the mantissa of 1 to 2
        uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(1)
        return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))

    return jax.vmap(of_row)(seeds, counts)
