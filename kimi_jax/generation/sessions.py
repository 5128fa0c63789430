"""What has been computed once: a conversation's state between its turns (`Session`), and the states
that prefixes leave, shared between prompts (`PrefixCache`).

A recurrent state cannot be cut back: it is valid for exactly the tokens that it has seen. So copies
of its memories are kept where one may want to return to, and a prefix is one of them or nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import PromptError, shown
from ..numerics import is_whole
from ..parallel.collectives import DATA
from ..parallel.placement import to_device, to_host
from ..runtime.memory import device_memory

if TYPE_CHECKING:
    from ..model.state import State
    from ..runtime.runner import Model
    from .chat import ChatStream, Reply
    from .generate import Completion, Event


ROOM = 2048  # tokens that a session's memory begins with


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a `PrefixCache` holds and has done. Bytes are those of one device, the fullest."""

    entries: int
    bytes: int
    limit: int
    lookups: int  # prompts that were looked up
    hits: int  # of them, those of which a prefix was there
    tokens: int  # of prompts, that were not computed again
    evicted: int  # entries that made room for others


@dataclasses.dataclass(eq=False)
class _Chunk:
    """A chunk of a prompt behind others: the row as it was after it, caches of this chunk alone."""

    copy: "State | None" = None
    behind: dict[tuple[int, ...], "_Chunk"] = dataclasses.field(default_factory=dict)
    parent: "_Chunk | None" = None
    ids: tuple[int, ...] = ()


class PrefixCache:
    """Prefixes of prompts that need not be computed again, for `prefix_cache=` of `generate`,
    `stream` and `chat`.

    A copy of the state is kept wherever a whole chunk of a prompt ends (`kj.load(chunk=)`): KDA's
    memories and windows, and that chunk's latent rows and index keys, on the devices and cut as the
    model's states are. A prompt goes on from the longest chain of chunks that it begins with, and
    gives what it gives without the cache, bit for bit. `bytes`: the most that one device holds;
    what was used least recently makes room, the end of a chain before its beginning.
    """

    def __init__(self, model: "Model", bytes: int):
        self.model = model
        self._width = model.program.stripes.window(model.chunk)
        self._entry = model.program.row_bytes(self._width)
        if not is_whole(bytes, self._entry):
            raise ValueError(
                f"bytes must be a whole number of at least {self._entry:,}, what {model.chunk} "
                f"tokens leave on a device; got {shown(bytes)}"
            )
        self._limit = int(bytes)
        self._refuse_what_exceeds()
        self._root = _Chunk()
        self._used: dict[_Chunk, None] = {}  # the least recently used first
        self._lookups = self._hits = self._tokens = self._evicted = 0

    @property
    def stats(self) -> CacheStats:
        """Counts so far."""
        held = len(self._used)
        return CacheStats(
            held, held * self._entry, self._limit,
            self._lookups, self._hits, self._tokens, self._evicted,
        )  # fmt: skip

    def _refuse_what_exceeds(self) -> None:
        program, memory = self.model.program, device_memory(self.model.program.mesh)
        least = program.plan(1, self.model.chunk).total_bytes
        if memory is not None and least + self._limit > memory:
            raise ValueError(
                f"bytes={self._limit:,} beside {least:,} of the model and one request: more than "
                f"the {memory:,} of a device"
            )

    def clear(self) -> None:
        """Forget all entries; the counts stay."""
        self._root, self._used = _Chunk(), {}

    def refuse_other(self, model: "Model") -> None:
        """Raise `PromptError` for a model whose states are not this cache's."""
        mine = self.model
        same = mine.program is model.program and mine.weights is model.weights
        if not same or mine.chunk != model.chunk:
            raise PromptError("prefix_cache was made for another model, or another chunk size")

    def restore(self, state: "State", row: int, ids: Sequence[int]) -> tuple["State", int]:
        """The state with the longest known prefix of `ids` in a row, and its length. Consumes the
        state.
        """
        chain, chunk = self._chain(ids), self.model.chunk
        for i, one in enumerate(chain):
            state = self.model.program.put(state, row, one.copy, i * chunk)
        self._lookups += 1
        self._hits += bool(chain)
        self._tokens += len(chain) * chunk
        self._touch(chain)
        return state, len(chain) * chunk

    def add(self, state: "State", row: int, ids: Sequence[int]) -> None:
        """Keep what a row has seen: `ids`, whole chunks. What lies before the last must be here."""
        *before, last = self._cut(ids)
        assert len(ids) == (len(before) + 1) * self.model.chunk
        chain = self._chain(ids[: len(before) * self.model.chunk])
        if len(chain) < len(before):
            return  # it had to make room meanwhile
        parent = chain[-1] if chain else self._root
        if last not in parent.behind:
            first = len(before) * self.model.chunk
            copy = self.model.program.take(state, row, first, self._width)
            parent.behind[last] = _Chunk(copy, {}, parent, last)
        self._touch([*chain, parent.behind[last]])
        while len(self._used) * self._entry > self._limit:
            self._evict()

    def _cut(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        chunk = self.model.chunk
        return [tuple(ids[i : i + chunk]) for i in range(0, len(ids) - chunk + 1, chunk)]

    def _chain(self, ids: Sequence[int]) -> list[_Chunk]:
        """The longest chain of chunks that `ids` begin with."""
        chain, at = [], self._root
        for part in self._cut(ids):
            if part not in at.behind:
                break
            at = at.behind[part]
            chain.append(at)
        return chain

    def _touch(self, chain: list[_Chunk]) -> None:
        """Used now, the end of the chain first: so nothing is older than what lies behind it."""
        for one in reversed(chain):
            self._used.pop(one, None)
            self._used[one] = None

    def _evict(self) -> None:
        oldest = next(iter(self._used))
        assert oldest.parent is not None and not oldest.behind
        del self._used[oldest], oldest.parent.behind[oldest.ids]
        self._evicted += 1


class Session:
    """A conversation with a model that keeps its state: each turn computes only what is new.

    `generate` and `stream` continue what the session has seen, `chat` takes the whole conversation
    as `Model.chat` does. Turns give what the same ids give without a session. Where a turn does not
    continue what the state has seen (a reply ended inside a trip by a stop string or by closing its
    stream, was written otherwise by its chat message, or is another one now) the state goes back to
    where the latest prompt ended that both share, or to nothing. A new turn ends one that runs.
    """

    def __init__(self, model: "Model", max_length: int | None = None):
        limit = model.config.max_positions
        if max_length is not None and not is_whole(max_length, 2, limit):
            raise ValueError(
                f"max_length must be a whole number of tokens in 2..{limit}, "
                f"got {shown(max_length)}"
            )
        self.model = model
        self.max_length = max_length or limit
        self.tokens: list[int] = []  # the conversation so far
        self._fixed = max_length is not None
        self._state: State | None = None
        self._seen: list[int] = []  # what the state has taken in
        self._marks: list[tuple[int, State]] = []  # lengths of the latest prompts, memories there
        self._turn: Any = None

    def generate(self, prompt: str | Sequence[int], **options: Any) -> "Completion":
        """Continue the conversation with more text or ids, and a reply; options as in
        `kimi_jax.generate.generate`.
        """
        return self.model.generate([prompt], session=self, **options)[0]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator["Event"]:
        """`generate` as a stream; what was yielded is what the conversation goes on from."""
        return self.model.stream(prompt, session=self, **options)

    def chat(self, messages: Any, *more: Any, **options: Any) -> "Reply | ChatStream":
        """`Model.chat` of a whole conversation, of which what the state has seen is not computed
        again.
        """
        return self.model.chat(messages, *more, session=self, **options)

    def reset(self) -> None:
        """Forget the conversation; the memory stays for the next one."""
        self.end_turn()
        self.tokens, self._seen, self._marks = [], [], []

    def end_turn(self, follow: Any = None) -> None:
        """Close the stream of the turn that runs, if any; `follow` is the next one's."""
        turn, self._turn = self._turn, follow
        if turn is not None:
            turn.close()

    def refuse_other(self, model: "Model") -> None:
        """Raise `PromptError` for another model than this session's."""
        mine = self.model
        if mine.program is not model.program or mine.weights is not model.weights:
            raise PromptError("the session is of another model")

    # What the engine asks for

    def resume(self, ids: Sequence[int], length: int) -> tuple["State", int]:
        """The state for a prompt of such ids, with room for so many tokens, and how many of the
        ids it has seen. It is the engine's until `keep`.
        """
        state, marks, seen = self._state, self._marks, self._seen
        if state is None:
            state, marks, seen = self.model.new_state(1, self._room(length)), [], []
        elif state.max_length < length:
            state = self._grown(state, self._room(length))
        # Nothing has changed so far: a state that the devices cannot hold was refused.
        self._state, self._marks, self._seen = None, marks, []
        shared = _shared(seen, ids)
        if shared < len(seen):
            state, shared = self._return(state, shared)
        rows = NamedSharding(self.model.mesh, PartitionSpec(DATA))
        begins = np.zeros(len(state.length), np.int32)
        begins[0] = shared
        return dataclasses.replace(state, length=to_device(begins, rows)), shared

    def mark(self, state: "State", length: int) -> None:
        """A prompt of such a length ends here: its memories are copied. Those of the prompt before
        are kept too, for a turn that is asked again.
        """
        self._marks = [*self._marks[-1:], (length, self.model.program.take(state, 0, 0, 0))]

    def keep(self, state: "State", ids: Sequence[int]) -> None:
        """Take the state back, unless a step that was broken off has consumed it; `ids` begin with
        what it has seen.
        """
        if not any(x.is_deleted() for x in jax.tree.leaves(state)):
            self._state, self._seen = state, list(ids[: int(to_host(state.length)[0])])

    def _return(self, state: "State", shared: int) -> tuple["State", int]:
        """Back to the last mark among the first `shared` tokens; to none where there is no such."""
        self._marks = [(length, copy) for length, copy in self._marks if length <= shared]
        if not self._marks:
            return state, 0
        length, copy = self._marks[-1]
        return self.model.program.put(state, 0, copy, length), length

    def _room(self, length: int) -> int:
        """Slots for so many tokens: growth is rare, as each size compiles its own programs."""
        slots = self.max_length if self._fixed else ROOM
        while slots < length:
            slots *= 4
        return min(slots, self.max_length)

    def _grown(self, state: "State", S: int) -> "State":
        slots = self.model.program.stripes.slots(state.max_length)
        row = self.model.program.take(state, 0, 0, slots)
        return self.model.program.put(self.model.new_state(1, S), 0, row, 0)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:n]) != np.asarray(second[:n]))
    return int(differ[0]) if differ.size else n
