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

    def problem_with(self, model: Runner) -> str | None:
        """What is wrong where a model is not this session's."""
        is_same = self.model.program is model.program and self.model.params is model.params
        return None if is_same else "the session is of another model"

    def resume(self, keys: Sequence[int], length: int) -> tuple[State, int]:
        """The state for a prompt of `keys`, with room for `length` tokens, and how many of them it
        has seen. It is the engine's until `keep`. Where it is refused, nothing has changed.
        """
        state, marks, seen = self._state, self._marks, self._seen
        if state is None:
            state = self.model.new_state(1, self.room(length))
            marks, seen = [], []
        elif state.max_length < length:
            state = self._grown(state, self.room(length))
        # Nothing has changed so far: the devices may have no room for the state.
        self._state, self._marks, self._seen = None, marks, []
        shared = _shared(seen, keys)
        if shared < len(seen):
            state, shared = self._return(state, shared)
        begins = np.zeros(len(state.length), np.int32)
        begins[0] = shared
        return dataclasses.replace(state, length=self.model.place_rows(begins)), shared

    def mark(self, state: State, length: int) -> None:
        """A prompt of `length` tokens ends here: copy its recurrent and conv states. Those of the
        prompt before are kept too, for a turn that is asked again.
        """
        self._marks = [*self._marks[-1:], (length, self.model.program.copy_row(state, 0, 0, 0))]

    def keep(self, state: State, keys: Sequence[int]) -> None:
        """Take the state back, unless a step that was broken off has consumed it; `keys` begin with
        what it has seen.
        """
        if not any(x.is_deleted() for x in jax.tree.leaves(state)):
            self._state, self._seen = state, list(keys[: int(to_host(state.length)[0])])

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


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:n]) != np.asarray(second[:n]))
    return int(differ[0]) if differ.size else n
