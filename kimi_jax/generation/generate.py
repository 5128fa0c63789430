"""From prompts to continuations: options, requests, and text put back together."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import PromptError, shown
from ..numerics import is_number, is_whole
from ..parallel.processes import agree, together
from ..runtime.progress import Progress
from ..runtime.sampling import Sample, TokenLogprob, sampling_problems
from ..text.stops import TextBuilder
from .engine import run
from .prefix_cache import PrefixCache
from .prompts import TextRunner
from .session_state import SessionState

Prompt = str | Sequence[int]
SLOTS = 8  # requests that decode together
TRIP = 8  # tokens of each that a loop on the device makes before the host sees them
LARGEST = 2**31 - 1  # the largest whole number of an option: int32 holds it
PLAIN = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one completion took: tokens, and seconds from its first chunk to its last token; others
    may have run beside it. `cached_tokens` of the prompt came from an earlier state.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int = 0


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
    """A piece of a stream: text that is now certain (maybe none yet), the token behind it, what the
    reply has taken so far, and at the end the reason.
    """

    text: str
    token: int | None
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    usage: Usage = Usage(0, 0, 0.0, 0.0)


@dataclasses.dataclass
class Request:
    """One prompt on its way: its ids, limits, and what has come so far."""

    ids: list[int]
    limit: int
    seed: int
    builder: TextBuilder
    tokens: list[int] = dataclasses.field(default_factory=list)
    made: list[int] = dataclasses.field(default_factory=list)  # also behind the reply's end
    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    late: bool = False  # it ended without a token of its own, or text came behind the last one
    cached: int = 0  # prompt tokens that were known
    began: float = 0.0
    ready: float = 0.0
    ended: float = 0.0

    def take(
        self, token: int, usable: bool, logprob: TokenLogprob, stop_ids: frozenset[int]
    ) -> None:
        """Add a token and the text that it made certain, or end the request."""
        if not usable:
            self.fail("the logits hold NaN, or nothing finite that may be chosen")
        elif token in stop_ids:
            self.reason, self.late = "stop", True
        else:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.text.append(self.builder.push(token))
            if self.builder.stopped:
                self.reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.reason = "length"
        if self.reason:
            rest = self.builder.finish()
            if self.builder.stopped:
                self.reason = "stop"
            if self.late or not self.text:
                self.text.append(rest)
            else:
                self.text[-1] += rest
            self.ended = time.perf_counter()

    def fail(self, why: str) -> None:
        """End with an error of its own."""
        self.reason, self.error = "error", why

    def usage(self, count: int) -> Usage:
        """What it has taken, with so many tokens of the reply."""
        prefill = max(0.0, self.ready - self.began)
        decode = max(0.0, (self.ended or time.perf_counter()) - self.ready) if self.ready else 0.0
        return Usage(len(self.ids), count, prefill, decode, self.cached)


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
    bias: tuple[tuple[int, float], ...] = ()
    fewest: int = 0
    slots: int = SLOTS
    trip: int = TRIP


def _options(model: TextRunner, count: int, sampling: Any, seed: Any, **given: Any) -> Options:
    """The options of a run, or one error that lists all that is wrong with them."""
    problems: list[str] = []
    new, logprobs = given["max_new_tokens"], given["logprobs"]
    if not is_whole(new, 1, LARGEST):
        problems.append(
            f"max_new_tokens must be a positive whole number below 2^31, got {shown(new)}"
        )
    if not isinstance(logprobs, bool) and not is_whole(logprobs, 0, model.config.vocab):
        problems.append(
            "logprobs must be True, False or a number of tokens up to the vocabulary; "
            f"got {shown(logprobs)}"
        )
    for name in ("slots", "trip"):
        if not is_whole(given.get(name, 1), 1, 256):
            problems.append(f"{name} must be a whole number in 1..256, got {shown(given[name])}")
    fewest = given.get("min_new_tokens", 0)
    if not is_whole(fewest, 0, LARGEST) or (is_whole(new, 1) and fewest > new):
        problems.append(f"min_new_tokens must lie in 0..max_new_tokens, got {shown(fewest)}")
    bias = _bias(model, given.get("logit_bias"), problems)
    sampling = _sampling(sampling, given, problems)
    seeds = _seeds(seed, count, problems)
    stops = _stops(model, given["stop"], problems)
    stop_ids = _stop_ids(model, given["stop_tokens"], problems)
    if problems:
        raise PromptError("\n".join(problems))
    top = 0 if isinstance(logprobs, bool) else int(logprobs)
    return Options(
        sampling, int(new), seeds, stops, stop_ids, bool(logprobs), top, bias, int(fewest),
        int(given.get("slots", SLOTS)), int(given.get("trip", TRIP)),
    )  # fmt: skip


def _bias(model: TextRunner, bias: Any, problems: list[str]) -> tuple[tuple[int, float], ...]:
    """logit_bias as pairs of id and number."""
    if bias is None:
        return ()
    if not isinstance(bias, Mapping):
        problems.append(f"logit_bias must map token ids to numbers, got {shown(bias)}")
        return ()
    bad = [
        (token, value)
        for token, value in bias.items()
        if not (_is_id(model, token) and is_number(value) and value < float("inf"))
    ]
    problems += [
        f"logit_bias: {shown(token)}: {shown(value)} is not an id and a number"
        for token, value in bad
    ]
    return () if bad else tuple(sorted((int(t), float(v)) for t, v in bias.items()))


def _sampling(sampling: Any, given: dict[str, Any], problems: list[str]) -> Sample:
    own = {name: given[name] for name in PLAIN}
    if sampling is None:
        wrong = sampling_problems(**own)
        problems += wrong
        if not wrong:
            return Sample(float(own["temperature"]), int(own["top_k"]), float(own["top_p"]))
    elif not isinstance(sampling, Sample):
        problems.append(f"sampling must be Greedy() or Sample(...), got {shown(sampling)}")
    elif any(own[name] is not default and own[name] != default for name, default in PLAIN.items()):
        problems.append("sampling= excludes temperature, top_p and top_k")
    return sampling if isinstance(sampling, Sample) else Sample()


def _seeds(seed: Any, count: int, problems: list[str]) -> tuple[int, ...]:
    items = _items(seed)
    seeds = [seed] * count if items is None else items
    if len(seeds) != count or not all(is_whole(s, 0, LARGEST) for s in seeds):
        problems.append(
            f"seed must be a whole number in 0..2^31-1, or one for each of the {count} prompts; "
            f"got {shown(seed)}"
        )
        return ()
    return tuple(map(int, seeds))


def _stops(model: TextRunner, stop: Any, problems: list[str]) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else _items(stop)
    if stops is None or not all(isinstance(text, str) for text in stops):
        problems.append(f"stop must be a string or a list of strings, got {shown(stop)}")
        return ()
    if stops and model.tokenizer is None:
        problems.append("stop strings need a tokenizer, and this folder has none: use stop_tokens")
    if "" in stops:
        problems.append("an empty stop string would stop at once")
    return tuple(stops)


def _stop_ids(model: TextRunner, stop_tokens: Any, problems: list[str]) -> frozenset[int]:
    wanted = model.config.eos if stop_tokens is None else stop_tokens
    ids = list(wanted) if isinstance(wanted, set | frozenset) else _items(wanted)
    if ids is None:
        problems.append(f"stop_tokens must be a list of token ids, got {shown(stop_tokens)}")
        return frozenset()
    bad = [i for i in ids if not _is_id(model, i)]
    problems += [f"stop_tokens: {shown(i)} is not a token id" for i in bad]
    return frozenset() if bad else frozenset(map(int, ids))


def _items(value: Any) -> list | None:
    """The items of a list or an array; None for text and for all that has no items in order."""
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim else None
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return list(value) if is_list else None


def _is_id(model: TextRunner, token: Any) -> bool:
    return is_whole(token, 0, model.config.vocab - 1)


def _encoded(
    model: TextRunner, prompts: Sequence[Prompt], before: Sequence[int] = ()
) -> list[list[int]]:
    """Every prompt as ids, behind what it continues, or one error that names each prompt that
    cannot run.
    """
    problems: list[str] = []
    bad = [token for token in before if not _is_id(model, token)]
    if bad:
        problems.append(f"the session's tokens hold {shown(bad[0])}, which is not a token id")
    encoded = [_ids(model, i, prompt, not before, problems) for i, prompt in enumerate(prompts)]
    if problems:
        raise PromptError("\n".join(problems))
    return [[*map(int, before), *ids] for ids in encoded]


def _ids(model: TextRunner, i: int, prompt: Any, begins: bool, problems: list[str]) -> list[int]:
    """One prompt as ids, which may be none unless it begins its text."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            problems.append(f"prompt {i} is text, and this folder has no tokenizer: give token ids")
            return []
        ids = model.tokenizer.encode(prompt)
    else:
        ids = _items(prompt)
    if ids is None:
        problems.append(f"prompt {i} must be text or token ids, got {shown(prompt)}")
        return []
    bad = [token for token in ids if not _is_id(model, token)]
    if bad:
        problems.append(
            f"prompt {i}: {shown(bad[0])} is not a token id below the vocabulary of "
            f"{model.config.vocab}"
        )
    elif not ids and begins:
        problems.append(f"prompt {i} is empty")
    return [] if bad else [int(token) for token in ids]


def _as_list(prompts: Any) -> list:
    """The prompts one by one; a lone string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items is None:
        raise PromptError(f"prompts must be strings or lists of token ids, got {shown(prompts)}")
    flat = [not isinstance(item, str | Sequence | np.ndarray) for item in items]
    if any(flat) and not all(flat):
        raise PromptError("prompts mix token ids with whole prompts: give [[ids], [ids], ...]")
    return [items] if any(flat) else items


def generate(
    model: TextRunner,
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
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    slots: int = SLOTS,
    trip: int = TRIP,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
    progress: bool | None = None,
    verbose: bool = False,
) -> list[Completion]:
    """Continue each prompt: a string, a list of strings, or lists of token ids; one `Completion`
    each, in order. Up to `slots` of them decode together; whatever ends makes room for the next.

    `sampling` (`Greedy()`, `Sample(...)`) excludes `temperature`, `top_p` and `top_k`. `seed`: one
    for all or one per prompt; a result depends on its own prompt and seed alone. `stop`: strings
    that end a reply and are cut from it. `stop_tokens`: ids that end it (None: the config's end
    ids, []: none), not before `min_new_tokens`. `logprobs`: True, or how many best tokens to report
    beside the chosen one. `logit_bias`: numbers added to the logits of ids. `trip`: steps that run
    on the device before the host sees their tokens. `prefix_cache`: a `PrefixCache`, which gives
    and keeps what prompts begin with. `session`: a `Session` that the one prompt continues.
    `verbose` prints a line per event.

    Options and prompts that make no sense raise `PromptError` before anything runs. A prompt that
    leaves no room for a reply, and logits that cannot be used, are the error of their own result.
    """
    requests, options = _prepared(
        model, lambda: _as_list(prompts), prefix_cache, session, sampling, seed,
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        stop=stop, stop_tokens=stop_tokens, logprobs=logprobs, logit_bias=logit_bias,
        min_new_tokens=min_new_tokens, slots=slots, trip=trip,
    )  # fmt: skip
    if session and not requests[0].error:
        session.end_turn()
    total = sum(len(one.ids) + one.limit for one in requests)
    log = _say if verbose else None
    trips = run(model, requests, options, log, prefix_cache, session)
    with contextlib.closing(trips), Progress("generating", total, show=progress) as bar:
        for advanced in trips:
            bar.advance(advanced)
    if session and not requests[0].error:
        session.tokens = requests[0].ids + requests[0].tokens
    return [_completion(one, model, options) for one in requests]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def stream(
    model: TextRunner,
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
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    trip: int = 4,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
) -> Iterator[Event]:
    """Continue one prompt, yielding an `Event` per token, in groups of up to `trip`; the texts
    joined are `generate`'s text. Closing the iterator ends it.

    Options as there. A prompt over the context raises PromptError, a model whose logits cannot be
    used (NaN) FloatingPointError.
    """
    return start(
        model, prompt, prefix_cache, session, sampling, seed,
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        stop=stop, stop_tokens=stop_tokens, logprobs=logprobs, logit_bias=logit_bias,
        min_new_tokens=min_new_tokens, trip=trip,
    )  # fmt: skip


def start(
    model: TextRunner,
    prompt: Prompt,
    cache: PrefixCache | None,
    session: SessionState | None,
    sampling: Sample | None,
    seed: int,
    whole: bool = False,
    **given: Any,
) -> Iterator[Event]:
    """`stream`; with `whole` the prompt is all of the session's conversation and not its new part.
    A session stays as it is where anything is refused.
    """
    (request,), options = _prepared(
        model, lambda: [prompt], cache, session, sampling, seed, whole=whole, **given
    )
    if request.error:
        raise PromptError(request.error)
    events = _events(model, request, options, cache, session)
    if session:
        session.end_turn(follow=events)
    return events


def _events(
    model: TextRunner,
    request: Request,
    options: Options,
    cache: PrefixCache | None,
    session: SessionState | None,
) -> Iterator[Event]:
    sent = 0
    with contextlib.closing(run(model, [request], options, None, cache, session)) as trips:
        for _ in trips:
            if request.error:
                raise FloatingPointError(request.error)
            while sent < len(request.tokens):
                sent += 1
                if session:
                    session.tokens = [*request.ids, *request.tokens[:sent]]
                yield _event(request, options, sent)
    if session:
        session.tokens = [*request.ids, *request.tokens]
    if request.late or not request.tokens:
        rest = "".join(request.text[sent:])
        yield Event(rest, None, None, request.reason, request.usage(sent))


def _event(request: Request, options: Options, count: int) -> Event:
    """The last of so many tokens."""
    at = count - 1
    last = request.reason if count == len(request.tokens) and not request.late else None
    logprob = request.logprobs[at] if options.logprobs else None
    return Event(request.text[at], request.tokens[at], logprob, last, request.usage(count))


def _prepared(
    model: TextRunner,
    prompts: Callable[[], list],
    cache: Any,
    session: Any,
    sampling: Any,
    seed: Any,
    whole: bool = False,
    **given: Any,
) -> tuple[list[Request], Options]:
    """The requests and the options of a run, alike on all processes, or one error on all."""

    def read() -> tuple[list[list[int]], Options]:
        many = prompts()
        options = _options(model, len(many), sampling, seed, **given)
        for name, kind, given_one in (
            ("prefix_cache", PrefixCache, cache), ("session", SessionState, session)
        ):  # fmt: skip
            if not isinstance(given_one, kind | None):
                kind_name = kind.__name__.removesuffix("State")
                raise PromptError(f"{name} must be a {kind_name}, got {shown(given_one)}")
            if given_one is not None:
                given_one.refuse_other(model)
        if session and len(many) != 1:
            raise PromptError(f"a session continues one prompt, got {len(many)}")
        before = session.tokens if session and not whole else ()
        return _encoded(model, many, before), options

    encoded, options = together("a prompt or an option", read)
    known = (cache and cache.stats, session and session.tokens)
    agree("prompts and options", encoded, options, known)
    return _requests(model, encoded, options, session), options


def _requests(
    model: TextRunner, encoded: list[list[int]], options: Options, session: SessionState | None
) -> list[Request]:
    limit = session.max_length if session else model.config.max_positions
    requests = [
        Request(
            ids,
            min(options.max_new_tokens, max(0, limit - len(ids))),
            seed,
            TextBuilder(model.tokenizer, options.stops, options.fewest),
        )
        for ids, seed in zip(encoded, options.seeds, strict=True)
    ]
    for i, one in enumerate(requests):
        if not one.limit:
            one.fail(
                f"prompt {i} has {len(one.ids)} tokens: "
                f"the context of {limit} leaves no room for a reply"
            )
    return requests


def _completion(one: Request, model: TextRunner, options: Options) -> Completion:
    text = "".join(one.text) if model.tokenizer else None
    assert one.reason is not None
    logprobs = one.logprobs if options.logprobs else None
    return Completion(one.tokens, text, one.reason, logprobs, one.usage(len(one.tokens)), one.error)
