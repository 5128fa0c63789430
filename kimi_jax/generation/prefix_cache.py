"""States of prompt prefixes, shared between prompts.

A recurrent state cannot be shortened: it is valid for exactly the tokens that it has seen. So a
copy of it is kept where a chunk of a prompt ends, and a cached prefix is a chain of chunks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..errors import shown
from ..model.state import State
from ..numerics import is_whole
from ..runtime.fitting import device_memory
from ..runtime.runner import Runner
from ..speculation.drafter import Drafter
from ..speculation.rounds import Rounds


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """What a `PrefixCache` holds and has done. Bytes are those of one device, the fullest."""

    entries: int
    bytes: int
    limit: int
    lookups: int  # prompts that were looked up
    hits: int  # those of them whose beginning was cached
    tokens: int  # prompt tokens that were not computed again
    evicted: int  # entries that made room for others


@dataclasses.dataclass(eq=False)
class Chunk:
    """A chunk of a prompt after its parent chunk, with a copy of its state."""

    copy: Any = None
    next: dict[tuple[int, ...], "Chunk"] = dataclasses.field(default_factory=dict)
    parent: "Chunk | None" = None
    ids: tuple[int, ...] = ()


class ChunkTree:
    """Chains of chunks of `size` ids from the beginnings of prompts, at most `limit` chunks: the
    least recently used makes room, the end of a chain before its beginning.
    """

    def __init__(self, size: int, limit: int):
        self._size = size
        self._limit = limit
        self._root = Chunk()
        self._used: dict[Chunk, None] = {}  # the least recently used first
        self.evicted = 0

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, the least recently used first."""
        return list(self._used)

    def clear(self) -> None:
        """Forget all chunks."""
        self._root, self._used = Chunk(), {}

    def lookup(self, ids: Sequence[int]) -> list[Chunk]:
        """The longest chain that `ids` begin with; it becomes the most recently used."""
        chain = self._chain(ids)
        self._touch(chain)
        return chain

    def add(self, ids: Sequence[int], copy: Callable[[int], Any]) -> None:
        """Keep the last chunk of `ids`, which are full chunks: `copy` of the position where it
        begins, unless it is here already. The chunks before it must be here; where one had to make
        room, nothing is kept.
        """
        *before, last = self._split(ids)
        assert len(ids) == (len(before) + 1) * self._size
        first = len(before) * self._size
        chain = self._chain(ids[:first])
        if len(chain) < len(before):
            return
        parent = chain[-1] if chain else self._root
        if last not in parent.next:
            parent.next[last] = Chunk(copy(first), {}, parent, last)
        self._touch([*chain, parent.next[last]])
        while len(self._used) > self._limit:
            self._evict()

    def _split(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._size
        return [tuple(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]

    def _chain(self, ids: Sequence[int]) -> list[Chunk]:
        chain, end = [], self._root
        for part in self._split(ids):
            if part not in end.next:
                break
            end = end.next[part]
            chain.append(end)
        return chain

    def _touch(self, chain: list[Chunk]) -> None:
        """Mark a chain as used, its end first: a chunk is never evicted before its successors."""
        for chunk in reversed(chain):
            self._used.pop(chunk, None)
            self._used[chunk] = None

    def _evict(self) -> None:
        oldest = next(iter(self._used))
        assert oldest.parent is not None and not oldest.next
        del self._used[oldest], oldest.parent.next[oldest.ids]
        self.evicted += 1


class PrefixCache:
    """Prefixes of prompts that need not be computed again, for `prefix_cache=` of `generate`,
    `stream` and `chat`.

    A copy of the state is kept wherever a full chunk of a prompt ends (`kj.load(chunk=)`): KDA's
    recurrent and conv states, and that chunk's latent rows and index keys, on the devices and
    sharded as the model's states are. A prompt goes on from the longest chain of chunks that it
    begins with; results are bit-identical with and without a cache hit. `bytes`: the most that one
    device holds; the least recently used makes room, the end of a chain before its beginning.
    `draft`: the drafter of the runs, whose rows are kept too, so that its first drafts after a hit
    are those without one. Raises `ValueError` for fewer bytes than one chunk takes, and for more
    than a device has.
    """

    def __init__(self, model: Runner, bytes: int, *, draft: Drafter | None = None):
        self.model, self.draft = model, draft if draft and draft.tapped else None
        self._width = model.program.stripes.window(model.chunk)
        self._entry = model.program.row_bytes(self._width) + _draft_bytes(model, self.draft)
        if not is_whole(bytes, self._entry, 2**63 - 1):
            raise ValueError(
                f"bytes must be a whole number of at least {self._entry:,}, what {model.chunk} "
                f"tokens leave on a device; got {shown(bytes)}"
            )
        self._limit = int(bytes)
        self._refuse_what_exceeds()
        self._tree = ChunkTree(model.chunk, self._limit // self._entry)
        self._lookups = self._hits = self._tokens = 0

    def __repr__(self) -> str:
        stats = self.stats
        return f"PrefixCache({stats.entries:,} entries, {stats.bytes:,} of {stats.limit:,} bytes)"

    @property
    def stats(self) -> CacheStats:
        """Counts so far."""
        entries = len(self._tree.chunks)
        return CacheStats(
            entries, entries * self._entry, self._limit,
            self._lookups, self._hits, self._tokens, self._tree.evicted,
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
        self._tree.clear()

    def problem_with(self, model: Runner, draft: Drafter | None = None) -> str | None:
        """What is wrong where a model's states, or a drafter's, are not this cache's."""
        is_same = self.model.program is model.program and self.model.params is model.params
        if not is_same or self.model.chunk != model.chunk:
            return "prefix_cache was made for another model, or another chunk size"
        if self.draft is not (draft if draft and draft.tapped else None):
            return "prefix_cache was made for another draft: PrefixCache(model, bytes, draft=draft)"
        return None

    def restore(
        self, state: State, row: int, ids: Sequence[int], rounds: Rounds | None = None
    ) -> tuple[State, int]:
        """The state with the longest cached prefix of `ids` in a row, and its length; a drafter
        gets its rows in `rounds`. Consumes the state.
        """
        chain, size = self._tree.lookup(ids), self.model.chunk
        for i, chunk in enumerate(chain):
            copy, drafted = chunk.copy
            state = self.model.program.restore_row(state, row, copy, i * size)
            if rounds and drafted is not None:
                rounds.restore(row, i * size, (), drafted)
        self._lookups += 1
        self._hits += bool(chain)
        self._tokens += len(chain) * size
        return state, len(chain) * size

    def add(self, state: State, row: int, ids: Sequence[int], rounds: Rounds | None = None) -> None:
        """Keep what a row has seen: `ids`, full chunks."""

        def copy(first: int) -> tuple[State, Any]:
            drafted = rounds.copy_row(row, first, len(ids)) if rounds else None
            return self.model.program.copy_row(state, row, first, self._width), drafted

        self._tree.add(ids, copy)


def _draft_bytes(model: Runner, draft: Drafter | None) -> int:
    """Bytes of a device for a chunk of a drafter's rows."""
    if draft is None:
        return 0
    rows = draft.read_row(draft.begin(model.data_ranks, model.chunk), 0, 0, model.chunk)
    return sum(
        array.addressable_shards[0].data.nbytes if isinstance(array, jax.Array) else array.nbytes
        for array in jax.tree.leaves(rows)
    )
