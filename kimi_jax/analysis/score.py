"""The probability of given text: log-probabilities of its tokens, chunk by chunk."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import PromptError, shown
from ..generation.engine import capacity
from ..generation.prompts import Prompts, TextRunner, as_list, encode
from ..generation.requests import PromptIds
from ..model.decoder import Kimi
from ..model.state import State
from ..numerics import is_whole
from ..parallel.processes import agree, to_host, together
from ..runtime.model_on_mesh import BY_ROW, STATE, WEIGHTS, CallsInTurn, StatesFunction
from ..runtime.program import Program

BATCH = 8  # rows that are scored together
ROWS_AT_ONCE = 256  # positions whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-probabilities of a text's tokens.

    `logprobs` [T] are log P(token | the tokens before it) in nats, float64; that of the first token
    is NaN, as nothing precedes it, and it counts nowhere. `byte_count` is that of the other tokens'
    text, None without a tokenizer.
    """

    tokens: list[int]
    logprobs: np.ndarray
    byte_count: int | None

    @property
    def nats(self) -> float:
        """-log P of all tokens after the first."""
        return -float(self.logprobs[1:].sum())

    @property
    def perplexity(self) -> float:
        """exp of the nats of a token; NaN for a single token."""
        return math.exp(self.nats / (len(self.tokens) - 1)) if len(self.tokens) > 1 else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """The bits of a byte of text; None without a tokenizer, NaN without bytes."""
        if self.byte_count is None:
            return None
        return self.nats / math.log(2) / self.byte_count if self.byte_count else math.nan


@dataclasses.dataclass(frozen=True)
class _Window:
    """Tokens `begin` to `end` of a prompt, of which those from `first` on are scored."""

    prompt: int
    begin: int
    first: int
    end: int


def score(
    model: TextRunner, prompts: Prompts, *, window: int | None = None, batch: int = BATCH
) -> list[Score]:
    """The `Score` of each prompt, text or token ids, in order.

    `window`: a longer prompt is scored in windows of so many tokens, each of which begins half a
    window after the one before it: every token is scored once, after at least half a window where
    that much precedes it. Default: the model's context. `batch`: windows that run together, 1 to
    256. Memory is that of a prefill chunk and of a state of the longest window. Raises one
    `PromptError` for what cannot be scored, `FloatingPointError` where the logits hold NaN.
    """

    def read() -> list[list[int]]:
        problems = [
            f"{name} must be a whole number in {least}..{most}, got {shown(value)}"
            for name, value, least, most in (
                ("window", context if window is None else window, 2, context),
                ("batch", batch, 1, 256),
            )
            if not is_whole(value, least, most)
        ]
        encoded = encode(model, as_list(prompts), PromptIds([]), problems)
        problems += [
            f"prompt {i} has images, and only text is scored"
            for i, prompt in enumerate(encoded)
            if prompt.images
        ]
        if problems:
            raise PromptError("\n".join(problems))
        return [prompt.ids for prompt in encoded]

    context = model.config.max_positions
    texts = together("a prompt or an option", read)
    agree("prompts and options", texts, window, batch)
    found = [np.full(len(ids), np.nan) for ids in texts]
    pending = [w for i, ids in enumerate(texts) for w in _windows(i, len(ids), window or context)]
    pending.sort(key=lambda w: w.begin - w.end)
    for at in range(0, len(pending), batch):
        group = pending[at : at + batch]
        rows = _score_windows(model, [texts[w.prompt][w.begin : w.end] for w in group])
        for w, row in zip(group, rows, strict=True):
            found[w.prompt][w.first : w.end] = row[w.first - w.begin : w.end - w.begin]
    if any(np.isnan(logprobs[1:]).any() for logprobs in found):
        raise FloatingPointError("the logits hold NaN")
    return [
        Score(ids, logprobs, _byte_count(model, ids))
        for ids, logprobs in zip(texts, found, strict=True)
    ]


def _byte_count(model: TextRunner, ids: Sequence[int]) -> int | None:
    return None if model.tokenizer is None else len(model.tokenizer.decode_bytes(ids[1:]))


def _windows(prompt: int, length: int, window: int) -> Iterator[_Window]:
    """The windows of a prompt: together they score every token after the first, once."""
    begin, first = 0, 1
    while first < length:
        end = min(begin + window, length)
        yield _Window(prompt, begin, first, end)
        begin, first = end - window + max(1, window // 2), end


def _score_windows(model: TextRunner, texts: list[list[int]]) -> np.ndarray:
    """[B, T] log P of each id after the ids before it, NaN for the first and after the last."""
    lengths = np.array([len(ids) for ids in texts], np.int32)
    ids = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    targets = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], axis=1)
    room = capacity(int(lengths.max()), model.config.max_positions)
    chunks = model.in_chunks(_score_step(model.program), ids, lengths, targets, room=room)
    pieces = [to_host(chunk)[: len(ids), :width] for chunk, width in chunks]
    after = np.concatenate(pieces, axis=1).astype(np.float64)
    positions = np.arange(ids.shape[1])
    found = np.full(ids.shape, np.nan)
    found[:, 1:] = after[:, : ids.shape[1] - 1]
    return np.where(positions < lengths[:, None], found, np.nan)


@functools.lru_cache(maxsize=32)
def _score_step(program: Program) -> StatesFunction:
    """(weights, state, tokens, lengths, targets) -> log P of each target after its token [B, T],
    state. Compiled; the state is consumed.
    """

    if program.walk == "by_group":
        parts = program.by_group("prefill")
        of_targets = parts.after_end(target_logprobs, 2)

        def by_group(
            weights: dict, state: State, tokens: Any, lengths: Any, targets: Any
        ) -> tuple[Array, State]:
            out, state = parts.advance(weights, state, tokens, lengths)
            return of_targets(weights, out, targets), state

        return StatesFunction(program, CallsInTurn(by_group, program.mesh), donate=1)

    def device_fn(
        weights: dict, state: State, tokens: Array, lengths: Array, targets: Array
    ) -> tuple[Array, State]:
        model, out, state, _ = program.run(weights, state, tokens, lengths)
        return target_logprobs(model, out, targets), state

    inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW, BY_ROW)
    compiled = program.compiled(device_fn, inputs, (BY_ROW, STATE), "log-probabilities", donate=1)
    return StatesFunction(program, compiled, donate=1)


def target_logprobs(
    model: Kimi, out: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """log P of the targets by the normed output rows, the logits of some rows at a time."""
    count = targets.size
    at_once = min(ROWS_AT_ONCE, count)
    pad = -count % at_once
    rows = jnp.pad(out.reshape(count, -1), ((0, pad), (0, 0))).reshape(-1, at_once, out.shape[-1])
    wanted = jnp.pad(targets.reshape(count), (0, pad)).reshape(-1, at_once)

    def of_rows(piece: tuple[Array, Array]) -> Array:
        x, ids = piece
        logprobs = jax.nn.log_softmax(model.head_logits(x), axis=-1)
        return jnp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]

    return jax.lax.map(of_rows, (rows, wanted)).reshape(-1)[:count].reshape(targets.shape)
