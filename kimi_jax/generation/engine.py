"""Continuous batching with chunked prefill. Prompts are prefilled in prefill rows and moved to
decode slots; a request that ends frees its slot. Knows token ids and no text.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..compilation.function import running_seconds
from ..model.state import State
from ..parallel.processes import to_host
from ..runtime.images.rows import PromptRows
from ..runtime.program import state_maker
from ..runtime.runner import prepare_prefill
from ..runtime.sampling import TokenLogprob
from ..speculation.rounds import Drafting, Rounds
from .batch import Batch, power_of_two
from .prefix_cache import PrefixCache
from .prompts import TextRunner
from .requests import Request, rows_of
from .schedule import Schedule
from .session_state import SessionState

SLOTS = 8  # requests that decode together
STEPS_PER_CALL = 8  # decode steps on the devices before the host sees the tokens
NO_TOKEN = -1
MIN_CAPACITY = 128  # least tokens that a state has room for


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A token that became part of a request's reply."""

    request: Request
    token: int
    logprob: TokenLogprob


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of one call of the devices: prompt tokens prefilled or cached, or new tokens.

    Requests that ended have a `finish_reason`. Whoever reads the report may end others before the
    next one (`Request.stop`): their slots are free then.
    """

    prompt_tokens: int = 0
    sampled: tuple[Sampled, ...] = ()

    @property
    def advanced(self) -> int:
        """Prompt tokens and new tokens."""
        return self.prompt_tokens + len(self.sampled)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What belongs to a run and not to one of its requests."""

    slots: int = SLOTS
    steps_per_call: int = STEPS_PER_CALL
    cache: PrefixCache | None = None
    session: SessionState | None = None  # of the only request
    drafting: Drafting | None = None
    log: Callable[[str], None] = lambda line: None


def capacity(length: int, limit: int) -> int:
    """Slots for a state that must hold `length` tokens: a power of two from 128 on, at most the
    model's limit.
    """
    return min(max(MIN_CAPACITY, power_of_two(length)), limit)


def run(
    runner: TextRunner, requests: Sequence[Request], options: RunOptions
) -> Generator[Report, None, None]:
    """Run all requests that have not ended until they have."""
    waiting = [i for i, request in enumerate(requests) if request.finish_reason is None]
    if waiting:
        engine = _Engine(runner, requests, waiting, options)
        try:
            yield from engine.reports()
        finally:
            engine.leave()


def prepare(runner: TextRunner, request: Request, session: SessionState | None) -> None:
    """Compile in the background what a request runs, alone or as the first of a session."""
    needed = len(request.ids) + request.limit
    limit = runner.config.max_positions
    length = session.room(needed) if session else capacity(needed, limit)
    rows = runner.data_ranks
    state = runner.program.state_shapes(rows, length)
    batch = Batch([request.options], rows, runner.config.vocab, STEPS_PER_CALL, runner.place_rows)
    state_maker(runner.program, rows, length).prepare()
    runner.program.decode_steps.prepare(runner.params, state, batch.rows({}), 1)
    prepare_prefill(runner, state, [len(request.ids)])


class _Engine:
    """The states of a run: one whose rows are decode slots and one whose rows are prefilled, or one
    for both.
    """

    def __init__(
        self,
        runner: TextRunner,
        requests: Sequence[Request],
        waiting: list[int],
        options: RunOptions,
    ):
        self.runner, self.requests, self.options = runner, requests, options
        self.pending: Any = None  # what the latest call sampled, until the requests have it
        rows = runner.data_ranks
        slots = -(-min(options.slots, power_of_two(len(waiting))) // rows) * rows
        self.schedule = Schedule.of(waiting, slots, rows)
        self.prefilled = np.zeros(rows, np.int32)  # prompt tokens that each prefill row has seen
        self.complete: dict[int, list[int]] = {}  # prefill row: the keys of its prompt, if any
        self.given: list[PromptRows | None] = [None] * rows  # of images, by prefill row
        self.in_place, self.resumed = slots == rows, 0
        length = max(len(requests[i].ids) + requests[i].limit for i in waiting)
        self.slots, drafted = self._new_slots(slots, rows, length)
        capacity = self.slots.max_length
        states = (slots, rows, drafted, capacity)
        self.rounds = options.drafting and Rounds(runner, options.drafting, *states)
        self._prefill_rows = self.slots if self.in_place else runner.new_state(rows, capacity)
        self.batch = Batch(
            [requests[i].options for i in waiting],
            len(self.slots.length),
            runner.config.vocab,
            options.steps_per_call,
            runner.place_rows,
        )
        if not self.rounds:
            self._prepare(rows, [requests[i].ids for i in waiting])

    def _prepare(self, rows: int, prompts: Sequence[Sequence[int]]) -> None:
        """Compile in the background what this run will need: several programs at a time."""
        runner = self.runner
        runner.program.decode_steps.prepare(runner.params, self.slots, self.batch.rows({}), 1)
        if rows == 1 and not (self.options.cache or self.options.session):
            prepare_prefill(runner, self.prefill_rows, map(len, prompts))

    def _new_slots(self, slots: int, prefill_rows: int, length: int) -> tuple[State, Any]:
        """The state of the decode slots, and the drafter's that a session kept with it."""
        if session := self.options.session:
            (request,) = self.requests
            drafting = self.options.drafting
            state, self.resumed, drafted = session.resume(
                request.prompt.keys, length, drafting and drafting.drafter
            )
            return state, drafted
        room = capacity(length, self.runner.config.max_positions)
        if not self.in_place:  # both states together
            self.runner.program.refuse_what_exceeds(slots + prefill_rows, room)
        return self.runner.new_state(slots, room), None

    @property
    def prefill_rows(self) -> State:
        """The state in which prompts are prefilled."""
        return self.slots if self.in_place else self._prefill_rows

    @prefill_rows.setter
    def prefill_rows(self, state: State) -> None:
        if self.in_place:
            self.slots = state
        else:
            self._prefill_rows = state

    def reports(self) -> Iterator[Report]:
        """Alternate prefill chunks and multi-step decode until no request is left."""
        while self.schedule.is_busy:
            for row, number in self.schedule.admit():
                if cached := self._admit(row, number):
                    yield Report(cached)
            if self.schedule.prefilling:
                yield Report(self._prefill())
            if self.schedule.decoding:
                yield Report(sampled=tuple(self._decode()))
                self._free_slots()

    def leave(self) -> None:
        """The run has ended, or was closed: a session gets its state back, unless it cannot be
        used, with the ids that it may have seen, also those of a call whose results were not read.
        """
        request = self.requests[0]
        if self.options.session and request.finish_reason != "error":
            pending = [] if self.pending is None else to_host(self.pending[0])[:, 0].tolist()
            drafted = self.rounds and (self.rounds.drafting.drafter, self.rounds.slots)
            seen = request.prompt.keys + request.sampled + pending
            self.options.session.keep(self.slots, seen, drafted)

    def _admit(self, row: int, number: int) -> int:
        """A request enters a prefill row, with what is cached of its prompt."""
        request, cached = self.requests[number], self.resumed
        request.start()
        keys = request.prompt.keys
        if self.complete.pop(row, None) == keys:  # another completion of the same prompt
            cached = len(request.ids)
        elif self.options.cache and not cached:
            state, cached = self.options.cache.restore(self.prefill_rows, row, keys, self.rounds)
            self.prefill_rows = state
        if self.rounds:
            self.rounds.restore(row, 0, request.ids[:cached], None)
        is_row = np.arange(len(self.prefilled)) == row
        self.prefilled = np.where(is_row, cached, self.prefilled)
        request.cached = cached
        self.given[row] = rows_of(request.prompt.images, cached, self.runner.encode_images)
        self.options.log(
            f"request {number}: {len(request.ids)} prompt tokens, {cached} of them cached"
        )
        return cached

    def _prefill(self) -> int:
        """Prefill the next chunk of every prompt; those that are complete move to their slots."""
        chunks = {
            row: self.requests[number].ids[self.prefilled[row] :][: self.runner.chunk]
            for row, (number, _) in self.schedule.prefilling.items()
        }
        lengths = np.array([len(chunks.get(i, ())) for i in range(len(self.prefilled))], np.int32)
        if lengths.any():
            self._advance(chunks, lengths)
        for row, (number, _) in list(self.schedule.prefilling.items()):
            request = self.requests[number]
            is_full = lengths[row] == self.runner.chunk
            # After a session's turn, chunks end elsewhere than in a run without it.
            if self.options.cache and is_full and not self.resumed:
                seen = request.prompt.keys[: self.prefilled[row]]
                self.options.cache.add(self.prefill_rows, row, seen, self.rounds)
            if self.prefilled[row] == len(request.ids):
                self._begin(row, request)
        return int(lengths.sum())

    def _advance(self, chunks: Mapping[int, list[int]], lengths: np.ndarray) -> None:
        tokens = np.zeros((len(lengths), lengths.max()), np.int32)
        for row, chunk in chunks.items():
            tokens[row, : len(chunk)] = chunk
        is_prefilling = np.isin(np.arange(len(lengths)), list(chunks))
        seen = np.where(is_prefilling, self.prefilled, to_host(self.prefill_rows.length))
        state = dataclasses.replace(
            self.prefill_rows, length=self.runner.place_rows(seen.astype(np.int32))
        )
        given = _pieces(self.given, self.prefilled, lengths)
        if self.rounds:
            self.prefill_rows = self.rounds.prefill(state, tokens, seen, lengths, given)
        else:
            _, self.prefill_rows = self.runner.advance(state, tokens, lengths, rows=given)
        jax.block_until_ready(self.prefill_rows.hidden)  # so that prefill is timed to its end
        # A new array: a device may still read the one that it was given.
        self.prefilled = self.prefilled + lengths

    def _begin(self, row: int, request: Request) -> None:
        """A prompt is complete: it decodes from now on."""
        slot = self.schedule.begin(row)
        if not self.in_place:
            self.complete[row] = request.prompt.keys
            self.slots = self.runner.program.move_row(self.prefill_rows, row, self.slots, slot)
            if self.rounds:
                self.rounds.move(row, slot, len(request.ids))
        if self.options.session:
            self.options.session.mark(self.slots, len(request.ids))
        request.prefilled_at = running_seconds()

    def _decode(self) -> Iterator[Sampled]:
        """Multi-step decode for all slots, or a round of drafts: the tokens that it sampled."""
        decoding = {slot: self.requests[n] for slot, n in self.schedule.decoding.items()}
        if self.rounds:
            return self._draft(self.rounds, decoding)
        most = max(request.remaining for request in decoding.values())
        # One step a call while slots can still be filled.
        steps = 1 if self.schedule.is_filling else min(self.options.steps_per_call, most)
        self.pending, self.slots = self.runner.program.decode_steps(
            self.runner.params, self.slots, self.batch.rows(decoding), steps
        )
        sampled = tuple(map(to_host, self.pending))
        tokens = _tokens_of(decoding, sampled, np.full(len(self.slots.length), steps))
        self.pending = None
        return tokens

    def _draft(self, rounds: Rounds, decoding: Mapping[int, Request]) -> Iterator[Sampled]:
        """The first tokens of requests that have none yet, or a round of all slots."""
        rows, newest = self.batch.rows(decoding), _newest(decoding, len(self.slots.length))
        is_new = newest == NO_TOKEN
        if is_new.any():
            done = rounds.first(self.slots, rows, is_new)
        else:
            starts, limits = _limits(decoding, self.slots.max_length, rounds.drafting.count, newest)
            done, self.slots = rounds.run(self.slots, rows, newest, starts, limits)
            for slot, request in decoding.items():
                request.rounds.append((int(done.drafts[slot]), int(done.count[slot]) - 1))
        return _tokens_of(decoding, done.sampled, done.count)

    def _free_slots(self) -> None:
        """Free the slots of requests that have ended."""
        for slot, number in list(self.schedule.decoding.items()):
            request = self.requests[number]
            if request.finish_reason:
                self.schedule.end(slot)
                self.options.log(_ended(number, request))


def _ended(number: int, request: Request) -> str:
    """A line of the log about a request that has ended."""
    usage = request.usage(len(request.tokens))
    return (
        f"request {number}: {request.finish_reason} after {usage.generated_tokens} tokens, "
        f"prefill {usage.prefill_seconds:.2f} s, decode {usage.decode_seconds:.2f} s, "
        f"compiling {usage.compile_seconds:.2f} s"
    )


def _pieces(
    given: Sequence[PromptRows | None], begins: np.ndarray, lengths: np.ndarray
) -> list[PromptRows | None]:
    """The rows of images in each prompt's next chunk."""
    return [
        own and own.piece(int(begin), int(begin + length))
        for own, begin, length in zip(given, begins, lengths, strict=True)
    ]


def _newest(decoding: Mapping[int, Request], B: int) -> np.ndarray:
    """The newest token of each slot's text, `NO_TOKEN` before the first; 0 where no request
    decodes.
    """
    newest = np.zeros(B, np.int32)
    for slot, request in decoding.items():
        newest[slot] = request.tokens[-1] if request.tokens else NO_TOKEN
    return newest


def _limits(
    decoding: Mapping[int, Request], max_length: int, most: int, newest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the newest token of each slot's text stands, and how many drafts may follow it: those
    that its reply and the state have room for; -1 where no request decodes.
    """
    starts, limits = np.zeros_like(newest), np.full_like(newest, -1)
    for slot, request in decoding.items():
        starts[slot] = len(request.ids) + len(request.tokens) - 1
        limits[slot] = min(most, request.remaining - 1, max_length - 1 - starts[slot])
    return starts, limits


def _tokens_of(
    decoding: Mapping[int, Request], sampled: Sequence[np.ndarray], count: np.ndarray
) -> Iterator[Sampled]:
    """Give requests the first `count[slot]` tokens that a call sampled for each; then, one by one,
    those that become part of a reply.
    """
    for slot, request in decoding.items():
        request.sampled += sampled[0][: count[slot], slot].tolist()
    return _added(decoding, count, *sampled)


def _added(
    decoding: Mapping[int, Request],
    count: np.ndarray,
    ids: np.ndarray,
    usable: np.ndarray,
    chosen: np.ndarray,
    best_ids: np.ndarray,
    best: np.ndarray,
) -> Iterator[Sampled]:
    for slot, request in decoding.items():
        top = request.options.top_logprobs
        for step in range(count[slot]):
            at, token = (step, slot), int(ids[step, slot])
            pairs = zip(best_ids[at][:top].tolist(), best[at][:top].tolist(), strict=True)
            logprob = TokenLogprob(token, float(chosen[at]), tuple(pairs))
            if request.add(token, bool(usable[at]), logprob):
                yield Sampled(request, token, logprob)
            if request.finish_reason:
                break
