"""From prompts to continuations: sampling on the device, the batched loop, and text put back
together.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from .placement import agree, to_host
from .progress import Progress
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .runner import Model

Prompt = str | Sequence[int]
BATCHES = (
    1,
    2,
    4,
    8,
)  # rows that run together; a smaller group is completed with rows that never start


class PromptError(ValueError):
    """Prompts or options that cannot run: every problem in one message, nothing computed."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw from the model's distribution: logits / temperature, cut to the `top_k` best tokens (0:
    all), to the smallest set of best tokens that holds probability `top_p` (always at least one),
    and to tokens of at least `min_p` times the best one's probability. Temperature 0 takes the best
    token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not (_is_number(self.temperature) and 0 <= self.temperature < np.inf):
            problems.append(f"temperature must be a finite number >= 0, got {self.temperature!r}")
        if not _is_whole(self.top_k, 0):
            problems.append(f"top_k must be a whole number >= 0 (0: all), got {self.top_k!r}")
        for name in ("top_p", "min_p"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) <= 1):
                problems.append(f"{name} must lie in 0..1, got {getattr(self, name)!r}")
        if problems:
            raise PromptError("\n".join(problems))


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


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one completion took: tokens, and the seconds of the batch that it ran in."""

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float


@dataclasses.dataclass(frozen=True)
class Completion:
    """One prompt's continuation. `finish_reason`: "stop" (a stop id or string), "length"
    (`max_new_tokens` or the context) or "error"; the stop id itself is neither in `tokens` nor in
    `text`. `text` is None without a tokenizer.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    usage: Usage
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of a stream: text that is now certain (maybe none yet), the token behind it, and at
    the end the reason.
    """

    text: str
    token: int | None
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None


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


@functools.partial(jax.jit, static_argnames=("top", "greedy"))
def sample(
    logits: Float[Array, "B Z"],
    seeds: Int[Array, " B"],
    counts: Int[Array, " B"],
    settings: Float[Array, "B 4"],
    top: int,
    greedy: bool,
) -> tuple[
    Int[Array, " B"],
    Bool[Array, " B"],
    Float[Array, " B"],
    Int[Array, "B top"],
    Float[Array, "B top"],
]:
    """The next token of each row, whether its logits could be used (no NaN, some finite maximum),
    its log-probability and the `top` best. `settings` rows are (temperature, top_k, top_p, min_p);
    `greedy`: no row draws.
    """
    usable = jnp.isfinite(logits.max(-1)) & ~jnp.isnan(logits).any(-1)
    ids = jnp.argmax(logits, -1)
    if not greedy:
        may = jax.vmap(allowed)(logits, *settings.T)
        warm = jnp.where(settings[:, :1] > 0, settings[:, :1], 1)
        keys = step_keys(seeds, counts)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        drawn = jnp.argmax(
            jnp.where(may, (logits - logits.max(-1, keepdims=True)) / warm + noise, -jnp.inf), -1
        )
        ids = jnp.where(settings[:, 0] > 0, drawn, ids)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    best, best_ids = jax.lax.top_k(logprobs, top)
    chosen = jnp.take_along_axis(logprobs, ids[:, None], 1)[:, 0]
    return ids.astype(jnp.int32), usable, chosen, best_ids.astype(jnp.int32), best


def step_keys(seeds: Int[Array, " B"], counts: Int[Array, " B"]) -> Key[Array, " B"]:
    """A key per row from its own seed and its own count of tokens: its place in a batch does not
    matter.
    """
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(
        seeds, counts
    )


class TextBuilder:
    """Text out of one row's tokens: whole characters only, held back while it may still turn into a
    stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]):
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain after one more token; `stopped` turns true once a stop string is
        complete.
        """
        return self._settle(self._decoder.push(token)) if self._decoder else ""

    def finish(self) -> str:
        """What is still held once no more tokens come."""
        if self._decoder is None or self.stopped:
            return ""
        text = self._settle(self._decoder.finish())
        rest, self._held = ("", "") if self.stopped else (self._held, "")
        return text + rest

    def _settle(self, text: str) -> str:
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        ready, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return ready


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


@dataclasses.dataclass
class _Row:
    """One prompt on its way: its ids, limits, and what has come so far."""

    ids: list[int]
    limit: int
    seed: int
    builder: TextBuilder
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    reason: str | None = None
    error: str | None = None

    def take(
        self, token: int, usable: bool, logprob: TokenLogprob, stop_ids: frozenset[int]
    ) -> None:
        """Add a token and the text that it made certain, or end the row."""
        if not usable:
            self.reason, self.error = "error", "the logits hold NaN or no finite value"
        elif token in stop_ids:
            self.reason = "stop"
        else:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.text.append(self.builder.push(token))
            if self.builder.stopped:
                self.reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.reason = "length"
        if self.reason:
            self.text.append(self.builder.finish())


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that a run needs beside its prompts, checked."""

    sampling: Sample
    max_new_tokens: int
    seeds: tuple[int, ...]
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: bool
    top: int


def _options(model: "Model", count: int, sampling: Any, seed: Any, **given: Any) -> Options:
    """The options of a run, or one error that lists all that is wrong with them."""
    problems: list[str] = []
    new, logprobs = given["max_new_tokens"], given["logprobs"]
    if not _is_whole(new, 1):
        problems.append(f"max_new_tokens must be a positive whole number, got {new!r}")
    if not isinstance(logprobs, bool) and not _is_whole(logprobs, 0, model.config.vocab):
        problems.append(
            "logprobs must be True, False or a number of tokens up to the vocabulary; "
            f"got {logprobs!r}"
        )
    sampling = _sampling(sampling, given, problems)
    seeds = _seeds(seed, count, problems)
    stops = _stops(model, given["stop"], problems)
    stop_ids = _stop_ids(model, given["stop_tokens"], problems)
    if problems:
        raise PromptError("\n".join(problems))
    top = 0 if isinstance(logprobs, bool) else int(logprobs)
    return Options(sampling, int(new), seeds, stops, stop_ids, bool(logprobs), top)


def _is_whole(value: Any, low: int, high: int | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return low <= int(value) and (high is None or int(value) <= high)


def _sampling(sampling: Any, given: dict[str, Any], problems: list[str]) -> Sample:
    own = {name: given[name] for name in ("temperature", "top_p", "top_k")}
    if sampling is None:
        try:
            return Sample(**own)
        except PromptError as error:
            problems.append(str(error))
    elif not isinstance(sampling, Sample):
        problems.append(f"sampling must be Greedy() or Sample(...), got {sampling!r}")
    elif own != {"temperature": 0.0, "top_p": 1.0, "top_k": 0}:
        problems.append("sampling= excludes temperature, top_p and top_k")
    return sampling if isinstance(sampling, Sample) else Sample()


def _seeds(seed: Any, count: int, problems: list[str]) -> tuple[int, ...]:
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * count
    if len(seeds) != count or not all(_is_whole(s, 0, 2**31 - 1) for s in seeds):
        problems.append(
            f"seed must be a whole number in 0..2^31-1, or one for each of the {count} prompts; "
            f"got {seed!r}"
        )
        return ()
    return tuple(map(int, seeds))


def _stops(model: "Model", stop: Any, problems: list[str]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) for one in stops):
        problems.append(f"stop must be a string or a list of strings, got {stop!r}")
        return ()
    if stops and model.tokenizer is None:
        problems.append("stop strings need a tokenizer, and this folder has none: use stop_tokens")
    if "" in stops:
        problems.append("an empty stop string would stop at once")
    return tuple(stops)


def _stop_ids(model: "Model", stop_tokens: Any, problems: list[str]) -> frozenset[int]:
    ids = model.config.eos if stop_tokens is None else stop_tokens
    if not isinstance(ids, Sequence | set | frozenset | np.ndarray) or isinstance(ids, str):
        problems.append(f"stop_tokens must be a list of token ids, got {stop_tokens!r}")
        return frozenset()
    bad = [i for i in ids if not _is_id(model, i)]
    problems += [f"stop_tokens: {i!r} is not a token id" for i in bad]
    return frozenset() if bad else frozenset(map(int, ids))


def _is_id(model: "Model", token: Any) -> bool:
    return _is_whole(token, 0, model.config.vocab - 1)


def _encoded(model: "Model", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Every prompt as ids, or one error that names each prompt that cannot run."""
    encoded, problems = [], []
    limit = model.config.max_positions
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                problems.append(
                    f"prompt {i} is text, and this folder has no tokenizer: give token ids"
                )
                continue
            ids = model.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        bad = [t for t in ids if not _is_id(model, t)]
        if bad:
            problems.append(
                f"prompt {i}: {bad[0]!r} is no token id "
                f"below the vocabulary of {model.config.vocab}"
            )
        elif not ids:
            problems.append(f"prompt {i} is empty")
        elif len(ids) >= limit:
            problems.append(
                f"prompt {i} has {len(ids)} tokens: "
                f"the context of {limit} leaves no room for a reply"
            )
        encoded.append(ids)
    if problems:
        raise PromptError("\n".join(problems))
    return encoded


def _as_list(prompts: Any) -> list:
    """The prompts one by one; a lone string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise PromptError(f"prompts must be strings or lists of token ids, got {prompts!r}")
    flat = [not isinstance(one, str | Sequence | np.ndarray) for one in prompts]
    if any(flat) and not all(flat):
        raise PromptError("prompts mix token ids with whole prompts: give [[ids], [ids], ...]")
    return [prompts] if any(flat) else list(prompts)


def generate(
    model: "Model",
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sampling: Sample | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | None = None,
    stop_tokens: Sequence[int] | None = None,
    logprobs: bool | int = False,
    progress: bool | None = None,
) -> list[Completion]:
    """Continue each prompt: a string, a list of strings, or lists of token ids; one `Completion`
    each, in order.

    `sampling` (`Greedy()`, `Sample(...)`) excludes `temperature`, `top_p` and `top_k`. `seed`: one
    for all or one per prompt; a result depends on its own prompt and seed alone. `stop`: strings
    that end a reply and are cut from it. `stop_tokens`: ids that end it (None: the config's end
    ids, []: none). `logprobs`: True, or how many best tokens to report beside the chosen one.
    """
    many = _as_list(prompts)
    options = _options(
        model, len(many), sampling, seed, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, top_k=top_k, stop=stop, stop_tokens=stop_tokens, logprobs=logprobs,
    )  # fmt: skip
    rows = _rows(model, _encoded(model, many), options)
    agree("prompts and options", [row.ids for row in rows], options)
    done: list[Completion] = []
    with Progress("generating", len(rows) * max_new_tokens, show=progress) as bar:
        for first in range(0, len(rows), BATCHES[-1]):
            batch = rows[first : first + BATCHES[-1]]
            clock = _Clock()
            for _ in _run(model, batch, options, clock):
                bar.advance(sum(row.reason is None for row in batch))
            done.extend(_completion(row, model, options, clock) for row in batch)
    return done


def stream(
    model: "Model",
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sampling: Sample | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    stop_tokens: Sequence[int] | None = None,
    logprobs: bool | int = False,
) -> Iterator[Event]:
    """Continue one prompt, yielding an `Event` per token; the texts joined are `generate`'s text.

    Options as there. A model whose logits cannot be used (NaN) raises FloatingPointError.
    """
    options = _options(
        model, 1, sampling, seed, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, top_k=top_k, stop=stop, stop_tokens=stop_tokens, logprobs=logprobs,
    )  # fmt: skip
    rows = _rows(model, _encoded(model, [prompt]), options)
    agree("prompt and options", rows[0].ids, options)
    return _events(model, rows, options)


def _events(model: "Model", rows: list[_Row], options: Options) -> Iterator[Event]:
    (row,) = rows
    sent = 0
    for _ in _run(model, rows, options, _Clock()):
        if row.error:
            raise FloatingPointError(row.error)
        new = len(row.tokens) > sent
        sent = len(row.tokens)
        logprob = row.logprobs[-1] if new and options.logprobs else None
        text = "".join(row.text)
        row.text.clear()
        yield Event(text, row.tokens[-1] if new else None, logprob, row.reason)


@dataclasses.dataclass
class _Clock:
    prefill: float = 0.0
    decode: float = 0.0


def _rows(model: "Model", encoded: list[list[int]], options: Options) -> list[_Row]:
    limit = model.config.max_positions
    return [
        _Row(
            ids,
            min(options.max_new_tokens, limit - len(ids)),
            seed,
            TextBuilder(model.tokenizer, options.stops),
        )
        for ids, seed in zip(encoded, options.seeds, strict=True)
    ]


def capacity(length: int, limit: int) -> int:
    """Slots for a state that must hold `length` tokens: a power of two from 128 on, at most the
    model's limit.
    """
    return min(max(128, 1 << (length - 1).bit_length()), limit)


def _run(model: "Model", rows: list[_Row], options: Options, clock: _Clock) -> Iterator[None]:
    """Prefill a batch of rows and decode until all have ended; yields after each token of the
    batch.
    """
    B = next(size for size in BATCHES if size >= len(rows))
    lengths = np.array([len(row.ids) for row in rows] + [0] * (B - len(rows)), np.int32)
    tokens = np.zeros((B, lengths.max()), np.int32)
    for row, line in zip(rows, tokens, strict=False):
        line[: len(row.ids)] = row.ids
    longest = max(len(row.ids) + row.limit for row in rows)
    began = time.perf_counter()
    state = model.new_state(B, capacity(longest, model.config.max_positions))
    logits, state = model._advance(state, tokens, lengths)
    jax.block_until_ready(logits)
    clock.prefill = time.perf_counter() - began
    began = time.perf_counter()
    while True:
        chosen = _choose(logits, rows, B, options)
        clock.decode = time.perf_counter() - began
        yield
        running = np.array([row.reason is None for row in rows] + [False] * (B - len(rows)))
        if not running.any():
            return
        logits, state = model._advance(state, chosen[:, None], running.astype(np.int32))


def _choose(logits: Array, rows: list[_Row], B: int, options: Options) -> np.ndarray:
    """Sample a token per row and hand it to the rows still running."""
    pad = [0] * (B - len(rows))
    s = options.sampling
    settings = np.tile(np.array([s.temperature, s.top_k, s.top_p, s.min_p], np.float32), (B, 1))
    seeds = np.array([r.seed for r in rows] + pad, np.int32)
    counts = np.array([len(r.tokens) for r in rows] + pad, np.int32)
    out = sample(logits, seeds, counts, settings, options.top, s.temperature == 0)
    ids, usable, chosen, best_ids, best = map(to_host, out)
    for i, row in enumerate(rows):
        if row.reason is None:
            top = tuple(zip(best_ids[i].tolist(), best[i].tolist(), strict=True))
            row.take(
                int(ids[i]),
                bool(usable[i]),
                TokenLogprob(int(ids[i]), float(chosen[i]), top),
                options.stop_ids,
            )
    return ids


def _completion(row: _Row, model: "Model", options: Options, clock: _Clock) -> Completion:
    usage = Usage(len(row.ids), len(row.tokens), clock.prefill, clock.decode)
    text = "".join(row.text) if model.tokenizer else None
    assert row.reason is not None
    return Completion(
        row.tokens, text, row.reason, row.logprobs if options.logprobs else None, usage, row.error
    )
