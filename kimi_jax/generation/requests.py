"""A request: one prompt, its options, and its reply so far. Token ids and images, no text."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ..compilation.function import running_seconds, waited_seconds
from ..runtime.images.rows import PromptRows
from ..runtime.sampling import Greedy, Sample, TokenLogprob
from ..vision.patches import ImagePatches

GREEDY = Greedy()


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one completion took: tokens, and seconds from its first chunk to its last token; others
    may have run at the same time. `cached_tokens` of the prompt came from an earlier state.
    `compile_seconds` were spent waiting for programs, and are in neither of the other two.
    `image_tokens` of the prompt stand for rows of images.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int = 0
    compile_seconds: float = 0.0
    image_tokens: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image whose placeholders begin at position `first` of a prompt."""

    first: int
    image: ImagePatches

    @property
    def end(self) -> int:
        """The position after its last placeholder."""
        return self.first + self.image.rows

    @property
    def key(self) -> int:
        """A negative number that is this image's alone: what stands for its placeholders where
        prompts are compared. Equal ids are not equal rows.
        """
        return -1 - int.from_bytes(self.image.digest, "big")

    def __repr__(self) -> str:
        return f"PlacedImage({self.first}, {self.image.digest.hex()})"


@dataclasses.dataclass(frozen=True)
class PromptIds:
    """A prompt as the engine takes it."""

    ids: list[int]
    images: tuple[PlacedImage, ...] = ()  # in the order of their positions

    def after(self, before: "PromptIds") -> "PromptIds":
        """This prompt as the continuation of another."""
        moved = (
            PlacedImage(placed.first + len(before.ids), placed.image) for placed in self.images
        )
        return PromptIds([*before.ids, *self.ids], (*before.images, *moved))

    @functools.cached_property
    def keys(self) -> list[int]:
        """What tells prompts apart token by token: ids, and for the placeholders of an image its
        key.
        """
        if not self.images:
            return self.ids
        keys = list(self.ids)
        for placed in self.images:
            keys[placed.first : placed.end] = [placed.key] * placed.image.rows
        return keys

    @property
    def image_tokens(self) -> int:
        """Tokens that stand for rows of images."""
        return sum(placed.image.rows for placed in self.images)


def rows_of(
    images: Sequence[PlacedImage], seen: int, encode: Callable[[Sequence[ImagePatches]], list]
) -> PromptRows | None:
    """The rows of the images that end after the first `seen` tokens of their prompt, each image
    encoded once; None where there are none.
    """
    left = [placed for placed in images if placed.end > seen]
    if not left:
        return None
    distinct = {placed.key: placed.image for placed in left}
    rows = dict(zip(distinct, encode(list(distinct.values())), strict=True))
    positions = [np.arange(placed.first, placed.end, dtype=np.int32) for placed in left]
    return PromptRows(np.concatenate(positions), np.concatenate([rows[p.key] for p in left]))


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of a reply, round by round: how many were verified, and how many of
    them the model accepted. A round gives one token more than it accepts.
    """

    drafts: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def rounds(self) -> int:
        """Verify steps."""
        return len(self.accepted)

    @property
    def length(self) -> float:
        """Tokens of a round on average, 1 + accepted / rounds; 1 without a round."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def histogram(self) -> tuple[int, ...]:
        """In how many rounds 0, 1, 2, ... drafts were accepted."""
        return tuple(self.accepted.count(n) for n in range(max(self.accepted, default=-1) + 1))


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """The checked options of one prompt; `options.Options` documents them."""

    sampling: Sample = GREEDY
    seed: int = 0
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def with_seed(self, k: int) -> "RequestOptions":
        """The options of completion `k` of a prompt: another seed."""
        return dataclasses.replace(self, seed=(self.seed + k) % 2**31)


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt in the engine.

    It ends with a `finish_reason`: "stop" (a stop id, which is in `stop_id` and not in `tokens`, or
    whoever reads the tokens called `stop`), "length" (`limit` tokens) or "error" (`error` says
    which).
    """

    prompt: PromptIds
    options: RequestOptions
    limit: int  # most tokens of the reply
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    sampled: list[int] = dataclasses.field(default_factory=list)  # also after the reply's end
    rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # drafts, accepted
    finish_reason: str | None = None
    error: str | None = None
    stop_id: int | None = None
    cached: int = 0  # prompt tokens that were not computed again
    started_at: float = 0.0  # seconds of `running_seconds`, in which nothing is compiled
    prefilled_at: float = 0.0
    ended_at: float = 0.0
    compiled_before: float = 0.0  # seconds that had been waited for programs when it started
    compiled_after: float = 0.0  # and when it ended

    @property
    def ids(self) -> list[int]:
        """The prompt's."""
        return self.prompt.ids

    def start(self) -> None:
        """Its first chunk begins."""
        self.started_at, self.compiled_before = running_seconds(), waited_seconds()

    @property
    def remaining(self) -> int:
        """Tokens that the reply may still get."""
        return self.limit - len(self.tokens)

    def add(self, token: int, usable: bool, logprob: TokenLogprob) -> bool:
        """Add a sampled token or end the request; whether the token is part of the reply."""
        if not usable:
            self.fail("the logits hold NaN, or nothing finite that may be chosen")
            return False
        if token in self.options.stop_ids:
            self.stop_id = token
            self._end("stop")
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if not self.remaining:
            self._end("length")
        return True

    def stop(self, count: int) -> None:
        """End it after its first `count` tokens; later ones are dropped."""
        del self.tokens[count:], self.logprobs[count:]
        self.stop_id, self.error = None, None
        self._end("stop")

    def fail(self, why: str) -> None:
        """End it with an error; other requests go on."""
        self.error = why
        self._end("error")

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.ended_at, self.compiled_after = running_seconds(), waited_seconds()

    @property
    def acceptance(self) -> Acceptance | None:
        """What became of its drafts; None where it had no round."""
        return Acceptance(*zip(*self.rounds, strict=True)) if self.rounds else None

    def usage(self, count: int) -> Usage:
        """Tokens and seconds, with the first `count` tokens of the reply."""
        prefill = max(0.0, self.prefilled_at - self.started_at)
        until = self.ended_at or running_seconds()
        decode = max(0.0, until - self.prefilled_at) if self.prefilled_at else 0.0
        waited = (self.compiled_after or waited_seconds()) - self.compiled_before
        compiled = max(0.0, waited) if self.started_at else 0.0
        images = self.prompt.image_tokens
        return Usage(len(self.ids), count, prefill, decode, self.cached, compiled, images)
