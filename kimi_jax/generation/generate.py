"""From prompts to continuations: requests for the engine, and text from the tokens it reports."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from ..errors import PromptError, shown
from ..numerics import is_number, is_whole
from ..parallel.processes import agree, together
from ..progress import Progress
from ..runtime.sampling import TokenLogprob
from ..speculation.drafter import Drafter
from ..speculation.rounds import ACCEPTANCE, EXACT, Drafting
from ..text.stops import TextBuilder
from ..text.tokenizer import Tokenizer
from .engine import SLOTS, STEPS_PER_CALL, Report, RunOptions, run
from .option_checks import RequestKeywords, per_prompt, request_options
from .options import Options, described, make_options
from .prefix_cache import PrefixCache
from .prompts import Prompt, Prompts, TextRunner, as_list, encode
from .requests import Acceptance, PromptIds, Request, RequestOptions, Usage
from .session_state import SessionState

STREAM_STEPS = 4  # decode steps on the devices between the events of a stream
MAX_SLOTS = 256  # also of `trip`, decode steps a call
MAX_COMPLETIONS = 1024  # of one prompt


class StreamKeywords(RequestKeywords, total=False):
    """The options of `stream`, for type checkers."""

    trip: int
    prefix_cache: PrefixCache | None
    draft: Drafter | None
    drafts: int | None
    draft_threshold: float
    draft_rule: str


class GenerateKeywords(StreamKeywords, total=False):
    """The options of `generate`, for type checkers."""

    slots: int
    progress: bool | None
    verbose: bool
    on_completion: Callable[[int, "Completion"], None] | None


NO_USAGE = Usage(0, 0, 0.0, 0.0)
NO_DRAFT = (None, None, 0.0, EXACT)  # draft, drafts, draft_threshold, draft_rule


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
    acceptance: Acceptance | None = None  # of drafts, where there were any


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of a stream: text that is now final (maybe empty), its token, the
    usage so far, and in the last event the reason.
    """

    text: str
    token: int | None
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    usage: Usage = NO_USAGE
    acceptance: Acceptance | None = None  # of drafts, in the last event


@described()
def generate(
    model: TextRunner,
    prompts: Prompts,
    *,
    n: int | Sequence[int] = 1,
    slots: int = SLOTS,
    trip: int = STEPS_PER_CALL,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
    draft: Drafter | None = None,
    drafts: int | None = None,
    draft_threshold: float = 0.0,
    draft_rule: str = EXACT,
    progress: bool | None = None,
    verbose: bool = False,
    on_completion: Callable[[int, Completion], None] | None = None,
    **options: Unpack[RequestKeywords],
) -> list[Completion]:
    """Continue each prompt: a string, a list of strings, or lists of token ids (NumPy or JAX arrays
    too), or, where the model has a vision tower, lists of parts with images: strings and
    `{"type": "image", "image": ...}`. `n` `Completion`s each, in order. A result depends on its
    prompt, options and seed alone.

    Invalid options and prompts raise `PromptError`, with every problem, before anything runs. A
    prompt that leaves no room for a reply, and logits that cannot be used, are the `error` of that
    prompt's `Completion` alone.

    Options of the run:

    - `n`: completions of each prompt, 1 to 1024, one after another; completion k is the one that
      the prompt has with `seed` + k. A prompt is prefilled once where slots allow.
    - `slots`: prompts that decode together, 1 to 256; one that ends makes room for the next.
    - `trip`: multi-step decode, 1 to 256 steps on the devices before the host sees their tokens;
      rounds of drafts are seen one by one.
    - `prefix_cache`: a `PrefixCache`: cached prefixes are restored, new ones are added.
    - `session`: a `Session` that the one prompt continues.
    - `draft`: a drafter, whose proposals are verified several tokens a step. Tokens are those
      without it, but for near ties of rounded logits, whatever it drafts; `Completion.acceptance`
      says what became of its drafts.
    - `drafts`: most drafts a round; None: as many as the drafter proposes.
    - `draft_threshold`: a round ends before the first draft of which the drafter is less confident,
      0 to 1.
    - `draft_rule`: which drafts are accepted: "exact", those that the model would have sampled, so
      that replies are those without a draft; or rejection sampling, "standard" or "block", which
      accepts more of what a drafter draws and has the same distribution. Greedy replies are equal.
    - `progress`: show a bar; None: on a terminal, after a second.
    - `verbose`: print a line for each prompt that begins or ends, on standard error.
    - `on_completion`: called with the number of a completion and the completion when it ends.
    """
    log = _say if verbose else None
    common = make_options(options, "generate", GenerateKeywords.__annotations__.keys() | {"n"})
    requests, run_options = _prepare(
        model, lambda: as_list(prompts), common, n=n, slots=slots, trip=trip,
        cache=prefix_cache, session=session, log=log,
        drafting=(draft, drafts, draft_threshold, draft_rule),
    )  # fmt: skip
    if session and not requests[0].error:
        session.end_turn()
    replies = [_TextReply(request, model.tokenizer) for request in requests]
    total = sum(len(request.ids) + request.limit for request in requests)
    reports = run(model, requests, run_options)
    with contextlib.closing(reports), Progress("generating", total, show=progress) as bar:
        running = dict(enumerate(replies))
        for report in _feed(reports, replies):
            bar.advance(report.advanced)
            _tell_completions(running, on_completion)
    _tell_completions(running, on_completion)  # also of requests that could not run
    if session and not requests[0].error:
        session.hold(requests[0].prompt, requests[0].tokens)
    return [reply.completion() for reply in replies]


@described()
def stream(
    model: TextRunner,
    prompt: Prompt,
    *,
    trip: int = STREAM_STEPS,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
    draft: Drafter | None = None,
    drafts: int | None = None,
    draft_threshold: float = 0.0,
    draft_rule: str = EXACT,
    **options: Unpack[RequestKeywords],
) -> Iterator[Event]:
    """Continue one prompt, yielding an `Event` per token, in groups of up to `trip`; the texts
    joined are `generate`'s text. Closing the iterator ends it.

    `trip`, `prefix_cache`, `session` and drafts as in `generate`. What cannot run, also a prompt
    over the context, raises `PromptError` at once, a model whose logits cannot be used (NaN)
    `FloatingPointError`.
    """
    common = make_options(options, "stream", StreamKeywords.__annotations__.keys())
    drafting = (draft, drafts, draft_threshold, draft_rule)
    _, events = start(
        model, prompt, common, trip=trip, cache=prefix_cache, session=session, drafting=drafting
    )
    return events


def start(
    model: TextRunner,
    prompt: Prompt | PromptIds,
    options: Options,
    *,
    trip: int = STREAM_STEPS,
    cache: PrefixCache | None = None,
    session: SessionState | None = None,
    drafting: tuple[Any, Any, Any, Any] = NO_DRAFT,
    is_conversation: bool = False,
) -> tuple[Request, Iterator[Event]]:
    """The request of `stream`, and its events; with `is_conversation` the prompt is the
    session's full conversation and not its new part. A refused request leaves a session unchanged.
    """
    (request,), run_options = _prepare(
        model, lambda: [prompt], options, slots=1, trip=trip, cache=cache, session=session,
        drafting=drafting, is_conversation=is_conversation,
    )  # fmt: skip
    if request.error:
        raise PromptError(request.error)
    events = _events(model, request, run_options)
    if session:
        session.end_turn(follow=events)
    return request, events


# Requests


def _prepare(
    model: TextRunner,
    prompts: Callable[[], list],
    options: Options,
    *,
    n: Any = 1,
    slots: Any,
    trip: Any,
    cache: Any,
    session: Any,
    drafting: tuple[Any, Any, Any, Any],
    log: Callable[[str], None] | None = None,
    is_conversation: bool = False,
) -> tuple[list[Request], RunOptions]:
    """The requests and the options of a run, equal on all processes, or one error on all."""

    def read() -> list[tuple[int, PromptIds, RequestOptions]]:
        problems = [
            f"{name} must be a whole number in 1..{MAX_SLOTS}, got {shown(value)}"
            for name, value in (("slots", slots), ("trip", trip))
            if not is_whole(value, 1, MAX_SLOTS)
        ]
        given = prompts()
        drafts = _drafting(*drafting, problems)
        _check_owners(model, cache, session, drafts, len(given), problems)
        is_sound = isinstance(session, SessionState) and not is_conversation
        before = session.conversation if is_sound else PromptIds([])
        encoded = encode(model, given, before, problems)
        each = request_options(options, model, len(given), problems)
        counts = _completions(n, len(given), session, problems)
        if problems:
            raise PromptError("\n".join(problems))
        return [
            (number, prompt, own.with_seed(k))
            for number, (prompt, own, count) in enumerate(zip(encoded, each, counts, strict=True))
            for k in range(count)
        ]

    asked = together("a prompt or an option", read)
    cached = (cache and cache.stats, session and session.conversation)
    agree("prompts and options", asked, slots, trip, cached, drafting[1:])
    limit = session.max_length if session else model.config.max_positions
    requests = [_request(number, prompt, own, limit) for number, prompt, own in asked]
    run_options = RunOptions(int(slots), int(trip), cache, session, _drafting(*drafting, []))
    return requests, run_options if log is None else dataclasses.replace(run_options, log=log)


def _completions(n: Any, count: int, session: Any, problems: list[str]) -> list[int]:
    """How many completions each of `count` prompts is to have."""
    values = per_prompt("n", n, count, problems)
    problems += {
        f"n must be a whole number in 1..{MAX_COMPLETIONS}, got {shown(value)}": None
        for value in values
        if not is_whole(value, 1, MAX_COMPLETIONS)
    }
    if session is not None and any(is_whole(value, 2) for value in values):
        problems.append("a session goes on from one completion: n must be 1")
    return [int(value) if is_whole(value, 1) else 1 for value in values]


def _drafting(
    draft: Any, drafts: Any, threshold: Any, rule: Any, problems: list[str]
) -> Drafting | None:
    """The checked options of drafts; anything where there are problems."""
    if draft is None:
        problems += ["drafts= is for a draft: give one with draft="] * (drafts is not None)
        problems += ["draft_threshold= is for a draft: give one with draft="] * (threshold != 0)
        problems += ["draft_rule= is for a draft: give one with draft="] * (rule != EXACT)
        return None
    found = []
    if not isinstance(draft, Drafter):
        found.append(f"draft must be a Drafter, got {shown(draft)}")
    elif drafts is not None and not is_whole(drafts, 1, draft.most):
        found.append(f"drafts must be a whole number in 1..{draft.most}, got {shown(drafts)}")
    if not (is_number(threshold) and 0 <= threshold <= 1):
        found.append(f"draft_threshold must lie in 0..1, got {shown(threshold)}")
    if rule not in ACCEPTANCE:
        found.append(f"draft_rule must be one of {', '.join(ACCEPTANCE)}, got {shown(rule)}")
    problems += found
    if found:
        return None
    count = draft.most if drafts is None else int(drafts)
    return Drafting(draft, count, float(threshold), rule)


def _check_owners(
    model: TextRunner,
    cache: Any,
    session: Any,
    drafting: Drafting | None,
    count: int,
    problems: list[str],
) -> None:
    """Problems of a cache or a session of another model, or of another type."""
    draft = drafting and drafting.drafter
    for name, kind, owner in (
        ("PrefixCache", PrefixCache, cache), ("Session", SessionState, session)
    ):  # fmt: skip
        argument = "prefix_cache" if kind is PrefixCache else "session"
        if owner is not None and not isinstance(owner, kind):
            problems.append(f"{argument} must be a {name}, got {shown(owner)}")
        elif owner is not None and (problem := owner.problem_with(model, draft)):
            problems.append(problem)
    if session is not None and count != 1:
        problems.append(f"a session continues one prompt, got {count}")


def _request(number: int, prompt: PromptIds, options: RequestOptions, context: int) -> Request:
    """A request of a prompt, ended by an error where the context leaves no room."""
    room = max(0, context - len(prompt.ids))
    request = Request(prompt, options, min(options.max_new_tokens, room))
    if not room:
        request.fail(
            f"prompt {number} has {len(prompt.ids)} tokens: the context of {context} leaves no "
            "room for a reply"
        )
    return request


# Text


class _TextReply:
    """The text of one request's reply, from the tokens that the engine reports."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request = request
        self.pieces: list[str] = []  # text that each token made final
        self.rest = ""  # text after the last token, before a stop id or an error
        self._has_text = tokenizer is not None
        options = request.options
        self._builder = TextBuilder(tokenizer, options.stop, options.min_new_tokens)
        self._is_finished = False

    def push(self, token: int) -> None:
        """Add a token; the request ends where that completes a stop string."""
        if not self._builder.stopped:
            self.pieces.append(self._builder.push(token))
            if self._builder.stopped:
                self.request.stop(len(self.pieces))

    def finish(self) -> None:
        """Add the text that was held back, once the request has ended."""
        if self._is_finished or not self.request.finish_reason:
            return
        self._is_finished = True
        text = self._builder.finish()
        if self._builder.stopped and self.request.finish_reason == "length":
            self.request.stop(len(self.pieces))
        if self.pieces and self.request.stop_id is None:
            self.pieces[-1] += text
        else:
            self.rest = text

    def completion(self) -> Completion:
        """The complete reply."""
        request = self.request
        assert request.finish_reason is not None
        text = "".join([*self.pieces, self.rest]) if self._has_text else None
        logprobs = request.logprobs if request.options.logprobs else None
        usage = request.usage(len(request.tokens))
        return Completion(
            request.tokens, text, request.finish_reason, logprobs, usage, request.error,
            request.acceptance,
        )  # fmt: skip

    def event(self, count: int) -> Event:
        """The event of token number `count`."""
        request, i = self.request, count - 1
        is_last = count == len(request.tokens) and request.stop_id is None
        reason = request.finish_reason if is_last else None
        logprob = request.logprobs[i] if request.options.logprobs else None
        acceptance = request.acceptance if is_last else None
        return Event(
            self.pieces[i], request.tokens[i], logprob, reason, request.usage(count), acceptance
        )


def _tell_completions(
    running: dict[int, _TextReply], tell: Callable[[int, Completion], None] | None
) -> None:
    """Take the replies that have ended out of those that run, and tell of each who listens."""
    if tell is None:
        return
    for at in [at for at, reply in running.items() if reply.request.finish_reason]:
        tell(at, running.pop(at).completion())


def _feed(reports: Iterable[Report], replies: Sequence[_TextReply]) -> Iterator[Report]:
    """Reports, each once its tokens are text and stop strings in it have ended their requests."""
    by_request: Mapping[Request, _TextReply] = {reply.request: reply for reply in replies}
    for report in reports:
        for sampled in report.sampled:
            by_request[sampled.request].push(sampled.token)
        for reply in replies:
            reply.finish()
        yield report


def _events(
    model: TextRunner, request: Request, options: RunOptions
) -> Generator[Event, None, None]:
    """The events of a stream. A session holds the yielded tokens; after an error, those before."""
    session, reply, sent = options.session, _TextReply(request, model.tokenizer), 0
    before = session.conversation if session else PromptIds([])
    with contextlib.closing(run(model, [request], options)) as reports:
        for _ in _feed(reports, [reply]):
            if request.error:
                if session:
                    session.hold(before)
                raise FloatingPointError(request.error)
            while sent < len(reply.pieces):
                sent += 1
                if session:
                    session.hold(request.prompt, request.tokens[:sent])
                yield reply.event(sent)
    if session:
        session.hold(request.prompt, request.tokens)
    if request.stop_id is not None:
        usage, acceptance = request.usage(sent), request.acceptance
        yield Event(reply.rest, None, None, request.finish_reason, usage, acceptance)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
