"""Many requests through few slots: prompts are taken in chunk by chunk in rows of their own, join
the rows that decode, and leave room for the next when they end.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..model.state import State
from ..parallel.mesh import DATA
from ..parallel.processes import to_device, to_host
from ..runtime.runner import Runner
from ..runtime.sampling import Rows, TokenLogprob
from .prefix_cache import PrefixCache
from .session_state import SessionState

if TYPE_CHECKING:
    from .generate import Options, Request

LOOP = 8  # steps that a loop on the device has room for, at least


@dataclasses.dataclass
class Schedule:
    """Who stands where: waiting, taken in on a stage with a slot kept for it, or decoding in that
    slot. Requests are numbers, first come first served.
    """

    waiting: collections.deque[int]
    free_slots: list[int]
    free_stages: list[int] | None  # None: a prompt is taken in where it will decode
    staged: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # stage: who, slot
    running: dict[int, int] = dataclasses.field(default_factory=dict)  # slot: who

    @classmethod
    def of(cls, requests: Sequence[int], slots: int, stages: int) -> "Schedule":
        """All requests waiting before empty slots; as many stages as slots are the slots."""
        free = None if stages == slots else list(range(stages))
        return cls(collections.deque(requests), list(range(slots)), free)

    @property
    def busy(self) -> bool:
        """Whether anyone has not left yet."""
        return bool(self.waiting or self.staged or self.running)

    @property
    def filling(self) -> bool:
        """Whether a prompt is being taken in, or another could be."""
        return bool(self.staged or (self.waiting and self.free_slots))

    def admit(self) -> list[tuple[int, int]]:
        """Let in as many as there is room for: (stage, who)."""
        admitted = []
        while self.waiting and self.free_slots and self.free_stages != []:
            who, slot = self.waiting.popleft(), self.free_slots.pop(0)
            stage = slot if self.free_stages is None else self.free_stages.pop(0)
            self.staged[stage] = (who, slot)
            admitted.append((stage, who))
        return admitted

    def begin(self, stage: int) -> int:
        """A prompt is taken in: it decodes from now on, in the slot that is returned."""
        who, slot = self.staged.pop(stage)
        if self.free_stages is not None:
            self.free_stages.append(stage)
        self.running[slot] = who
        return slot

    def end(self, slot: int) -> int:
        """A request has ended: its slot is free again."""
        self.free_slots.append(slot)
        return self.running.pop(slot)


def capacity(length: int, limit: int) -> int:
    """Slots for a state that must hold `length` tokens: a power of two from 128 on, at most the
    model's limit.
    """
    return min(max(128, _power(length)), limit)


def run(
    model: Runner,
    requests: Sequence["Request"],
    options: "Options",
    log: Callable[[str], None] | None = None,
    cache: PrefixCache | None = None,
    session: SessionState | None = None,
) -> Generator[int, None, None]:
    """Run all requests that have no error yet to their ends; yields after each trip to the device
    the tokens that it took in or made. A session is for one request.
    """
    due = [i for i, one in enumerate(requests) if one.reason is None]
    if due:
        engine = _Engine(model, requests, due, options, log or (lambda line: None), cache, session)
        try:
            yield from engine.steps()
        finally:
            engine.leave()


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _completed(ids: Sequence[int]) -> np.ndarray:
    """Stop ids, completed with -1, which is none, to a power of two of them, at least 8."""
    row = np.full(max(8, _power(len(ids))), -1, np.int32)
    row[: len(ids)] = ids
    return row


def _ending(who: int, one: "Request") -> str:
    usage = one.usage(len(one.tokens))
    return (
        f"request {who}: {one.reason} after {usage.generated_tokens} tokens, "
        f"prefill {usage.prefill_seconds:.2f} s, decode {usage.decode_seconds:.2f} s"
    )


class _Engine:
    """The states of a run: one whose rows are slots and one whose rows are stages, or one for
    both.
    """

    def __init__(
        self,
        model: Runner,
        requests: Sequence["Request"],
        due: list[int],
        options: "Options",
        log: Callable[[str], None],
        cache: PrefixCache | None,
        session: SessionState | None,
    ):
        self.model, self.requests, self.options, self.log = model, requests, options, log
        self.made: Any = None  # by the latest trip, while no request has it yet
        self.cache, self.session = cache, session
        stages = model.program.sizes[DATA]
        wanted = min(options.slots, _power(len(due)))
        slots = -(-wanted // stages) * stages
        longest = max(len(requests[i].ids) + requests[i].limit for i in due)
        self.schedule = Schedule.of(due, slots, stages)
        self.taken = np.zeros(stages, np.int32)  # tokens of each stage's prompt
        self.in_place, self.resumed = slots == stages, 0
        if session:
            self.slots, self.resumed = session.resume(requests[due[0]].ids, longest)
        else:
            S = capacity(longest, model.config.max_positions)
            if not self.in_place:  # both together
                model.program.refuse_what_exceeds(slots + stages, S)
            self.slots = model.new_state(slots, S)
        S = self.slots.max_length
        self._stages = self.slots if self.in_place else model.new_state(stages, S)
        self.fixed = self._fixed()

    @property
    def stages(self) -> State:
        """The state that prompts are taken into."""
        return self.slots if self.in_place else self._stages

    @stages.setter
    def stages(self, state: State) -> None:
        if self.in_place:
            self.slots = state
        else:
            self._stages = state

    def steps(self) -> Iterator[int]:
        """Chunks of prompts and trips of decoding in turns, until nobody is left."""
        while self.schedule.busy:
            for stage, who in self.schedule.admit():
                if known := self._admit(stage, who):
                    yield known
            if self.schedule.staged:
                yield self._take_in()
            if self.schedule.running:
                yield self._decode()

    def leave(self) -> None:
        """The run is over, or left: a session gets its state back, unless it cannot be used, with
        the ids that it may have seen, also those of a trip that the host was not told of.
        """
        one = self.requests[0]
        if self.session and one.reason != "error":
            trip = [] if self.made is None else to_host(self.made[0])[:, 0].tolist()
            self.session.keep(self.slots, one.ids + one.made + trip)

    def _admit(self, stage: int, who: int) -> int:
        """A request enters a stage, with what is known of its prompt."""
        one, known = self.requests[who], self.resumed
        one.began = time.perf_counter()
        if self.cache and not known:
            self.stages, known = self.cache.restore(self.stages, stage, one.ids)
        self.taken = np.where(np.arange(len(self.taken)) == stage, known, self.taken)
        one.cached = known
        self.log(f"request {who}: {len(one.ids)} prompt tokens, {known} of them known")
        return known

    def _take_in(self) -> int:
        """The next chunk of every staged prompt; those that are complete move to their slots."""
        parts = {
            stage: self.requests[who].ids[self.taken[stage] :][: self.model.chunk]
            for stage, (who, _) in self.schedule.staged.items()
        }
        lengths = np.array([len(parts.get(i, ())) for i in range(len(self.taken))], np.int32)
        if lengths.any():
            self._advance(parts, lengths)
        for stage, (who, _) in list(self.schedule.staged.items()):
            one = self.requests[who]
            whole = lengths[stage] == self.model.chunk
            if self.cache and whole and not self.resumed:  # else chunks end elsewhere than cold
                self.cache.add(self.stages, stage, one.ids[: self.taken[stage]])
            if self.taken[stage] == len(one.ids):
                self._begin(stage, one)
        return int(lengths.sum())

    def _advance(self, parts: dict[int, list[int]], lengths: np.ndarray) -> None:
        tokens = np.zeros((len(lengths), lengths.max()), np.int32)
        for stage, part in parts.items():
            tokens[stage, : len(part)] = part
        staged = np.isin(np.arange(len(lengths)), list(parts))
        begins = np.where(staged, self.taken, to_host(self.stages.length)).astype(np.int32)
        state = dataclasses.replace(self.stages, length=self._on_mesh(begins))
        logits, self.stages = self.model._advance(state, tokens, lengths)
        jax.block_until_ready(logits)  # what is measured has happened
        self.taken = self.taken + lengths  # anew: a device may look at the numbers it was given

    def _begin(self, stage: int, one: "Request") -> None:
        """A prompt is complete: it decodes from now on."""
        slot = self.schedule.begin(stage)
        if not self.in_place:
            self.slots = self.model.program.transfer(self.stages, stage, self.slots, slot)
        if self.session:
            self.session.mark(self.slots, len(one.ids))
        one.ready = time.perf_counter()

    def _decode(self) -> int:
        """A trip: some steps for all slots, and what became of each request."""
        running = {slot: self.requests[who] for slot, who in self.schedule.running.items()}
        most = max(one.limit - len(one.tokens) for one in running.values())
        n = 1 if self.schedule.filling else min(self.options.trip, most)  # slots fill up first
        self.made, self.slots = self.model.program.trip(
            self.model.weights, self.slots, self._rows(running), n
        )
        ids, usable, chosen, best_ids, best = map(to_host, self.made)
        for slot, one in running.items():
            one.made += ids[:n, slot].tolist()
        self.made, top = None, self.options.top
        before = sum(len(one.tokens) for one in running.values())
        for slot, one in running.items():
            for i in range(n):
                token = int(ids[i, slot])
                others = (of[i, slot, :top].tolist() for of in (best_ids, best))
                best_of = tuple(zip(*others, strict=True))
                logprob = TokenLogprob(token, float(chosen[i, slot]), best_of)
                one.take(token, bool(usable[i, slot]), logprob, self.options.stop_ids)
                if one.reason:
                    who = self.schedule.end(slot)
                    self.log(_ending(who, one))
                    break
        return sum(len(one.tokens) for one in running.values()) - before

    def _fixed(self) -> dict[str, Any]:
        """What the rows of all trips share: strategy, stop ids and bias, of few sizes, so that few
        programs are compiled.
        """
        B, s, o = len(self.slots.length), self.options.sampling, self.options
        row = (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, o.fewest)
        bias = None
        if o.bias:
            bias = np.zeros((B, self.model.config.vocab), np.float32)
            for token, value in o.bias:
                bias[:, token] = value
        return {
            "settings": self._on_mesh(np.tile(np.array(row, np.float32), (B, 1))),
            "stops": self._on_mesh(np.tile(_completed(sorted(o.stop_ids)), (B, 1))),
            "bias": None if bias is None else self._on_mesh(bias),
            "top": min(_power(o.top), self.model.config.vocab) if o.top else 0,
            "draws": s.temperature > 0,
            "waits": o.fewest > 0,
            "trip": max(_power(o.trip), LOOP),
        }

    def _rows(self, running: dict[int, "Request"]) -> Rows:
        """What every slot is to do next."""
        B = len(self.slots.length)

        def filled(dtype: Any, value: Callable[["Request"], Any]) -> Any:
            row = np.zeros(B, dtype)
            row[list(running)] = [value(one) for one in running.values()]
            return self._on_mesh(row)

        seen = None
        if self.options.sampling.repetition_penalty != 1:
            seen = np.zeros((B, self.model.config.vocab), bool)
            for slot, one in running.items():
                seen[slot, one.ids + one.tokens] = True
        return Rows(
            active=filled(bool, lambda one: True),
            left=filled(np.int32, lambda one: one.limit - len(one.tokens)),
            seeds=filled(np.int32, lambda one: one.seed),
            counts=filled(np.int32, lambda one: len(one.tokens)),
            seen=None if seen is None else self._on_mesh(seen),
            **self.fixed,
        )

    def _on_mesh(self, x: np.ndarray) -> Any:
        """An array whose rows are cut over `data`."""
        return to_device(x, NamedSharding(self.model.mesh, PartitionSpec(DATA)))
