"""The state of a conversation between its turns, as the engine asks for it.

A recurrent state cannot be shortened: it is valid for exactly the tokens that it has seen. So
copies of it are kept where prompts end, and the state returns to one of them or to an empty one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..errors import shown
from ..model.state import State
from ..numerics import is_whole
from ..parallel.processes import to_host
from ..runtime.runner import Runner
from ..speculation.drafter import Drafter
from .requests import PlacedImage, PromptIds

ROOM = 2048  # tokens that a session has room for at first


class SessionState:
    """The tokens of a conversation, the state that has seen some of them, and copies of that state
    where the latest two prompts ended.
    """

    def __init__(self, model: Runner, max_length: int | None = None):
        limit = model.config.max_positions
        if max_length is not None and not is_whole(max_length, 2, limit):
            raise ValueError(
                f"max_length must be a whole number of tokens in 2..{limit}, "
                f"got {shown(max_length)}"
            )
        self.model = model
        self.max_length = max_length or limit
        self.tokens: list[int] = []  # the conversation so far
        self.images: tuple[PlacedImage, ...] = ()  # that stand in it
        self._fixed = max_length is not None
        self._state: State | None = None
        self._seen: list[int] = []  # what the state has seen, as `PromptIds.keys`
        self._marks: list[tuple[int, State]] = []  # where prompts ended: (length, state)
        # The drafter of the latest turn and its state, which has seen what the state has.
        self._drafted: tuple[Drafter, Any] | None = None
        self._turn: Any = None

    def reset(self) -> None:
        """Forget the conversation; its buffers stay for the next one."""
        self.end_turn()
        self.hold(PromptIds([]))
        self._seen, self._marks = [], []

    @property
    def conversation(self) -> PromptIds:
        """The conversation so far, as a prompt."""
        return PromptIds(self.tokens, self.images)

    def hold(self, prompt: PromptIds, reply: Sequence[int] = ()) -> None:
        """The conversation is this prompt and what was replied to it."""
        self.tokens, self.images = [*prompt.ids, *reply], prompt.images

    def end_turn(self, follow: Any = None) -> None:
        """Close the stream of the turn that runs, if any; `follow` is the next one's."""
        turn, self._turn = self._turn, follow
        if turn is not None:
            turn.close()

    def problem_with(self, model: Runner, draft: Drafter | None = None) -> str | None:
        """What is wrong where a model is not this session's. Any draft will do."""
        is_same = self.model.program is model.program and self.model.params is model.params
        return None if is_same else "the session is of another model"

    def resume(
        self, keys: Sequence[int], length: int, drafter: Drafter | None = None
    ) -> tuple[State, int, Any]:
        """The state for a prompt of `keys`, with room for `length` tokens, how many of them it has
        seen, and the drafter's state, if it has seen them too. A drafter that reads hidden
        states and has not seen them: they are computed again, so that its drafts are those of a
        run without a session. All is the engine's until `keep`. Where it is refused, nothing has
        changed.
        """
        state, marks, seen = self._state, self._marks, self._seen
        if state is None:
            state = self.model.new_state(1, self.room(length))
            marks, seen = [], []
        elif state.max_length < length:
            state = self._grown(state, self.room(length))
        kept = self._drafted if self._drafted and self._drafted[0] is drafter else None
        # Nothing has changed so far: the devices may have no room for the state.
        self._state, self._marks, self._seen, self._drafted = None, marks, [], None
        is_new = drafter is not None and drafter.tapped is not None and kept is None
        shared = 0 if is_new else _shared(seen, keys)
        if shared < len(seen):
            state, shared = self._return(state, shared)
        begins = np.zeros(len(state.length), np.int32)
        begins[0] = shared
        state = dataclasses.replace(state, length=self.model.place_rows(begins))
        drafted = _drafted(kept, state, shared)
        return state, shared, drafted

    def mark(self, state: State, length: int) -> None:
        """A prompt of `length` tokens ends here: copy its recurrent and conv states. Those of the
        prompt before are kept too, for a turn that is asked again.
        """
        self._marks = [*self._marks[-1:], (length, self.model.program.copy_row(state, 0, 0, 0))]

    def keep(
        self, state: State, keys: Sequence[int], drafted: tuple[Drafter, Any] | None = None
    ) -> None:
        """Take the state back, unless a step that was broken off has consumed it; `keys` begin with
        what it has seen. `drafted` is a drafter with its state.
        """
        if not any(x.is_deleted() for x in jax.tree.leaves(state)):
            self._state, self._seen = state, list(keys[: int(to_host(state.length)[0])])
            self._drafted = drafted

    def _return(self, state: State, shared: int) -> tuple[State, int]:
        """Back to the last mark within the first `shared` tokens, or to an empty state."""
        self._marks = [(length, copy) for length, copy in self._marks if length <= shared]
        if not self._marks:
            return state, 0
        length, copy = self._marks[-1]
        return self.model.program.restore_row(state, 0, copy, length), length

    def room(self, length: int) -> int:
        """Slots for `length` tokens: growth is rare, as each size compiles its own programs."""
        slots = self.max_length if self._fixed else ROOM
        while slots < length:
            slots *= 4
        return min(slots, self.max_length)

    def _grown(self, state: State, S: int) -> State:
        slots = self.model.program.stripes.slots(state.max_length)
        row = self.model.program.copy_row(state, 0, 0, slots)
        return self.model.program.restore_row(self.model.new_state(1, S), 0, row, 0)


def _drafted(kept: tuple[Drafter, Any] | None, state: State, shared: int) -> Any:
    """The drafter's state for a session's, of as many tokens, from one that has seen `shared`."""
    if kept is None or kept[0].tapped is None:
        return None
    drafter, old = kept
    fresh = drafter.begin(len(state.length), state.max_length)
    return drafter.write_row(fresh, 0, 0, drafter.read_row(old, 0, 0, shared)) if shared else fresh


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:n]) != np.asarray(second[:n]))
    return int(differ[0]) if differ.size else n
