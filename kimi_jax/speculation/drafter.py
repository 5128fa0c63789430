"""What a drafter is to a run: it sees committed tokens, with the model's hidden states there, and
proposes the next ones.

One round of a request whose state has seen n tokens (positions 0 to n - 1). Its anchor, the newest
token of the text, stands at position n and has not been run through the model:

    propose   drafts for positions n + 1 .. n + k, from the anchor and the drafter's state
    verify    the model runs the anchor and the drafts: k + 1 rows
    accept    the first a drafts are kept, and the model gives one more token: the next anchor
    commit    the model's state, and by `extend` the drafter's, are those after a + 1 rows
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int

from ..model.step import Tapped


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafts of a round, a row for each request. Entries at and beyond a row's length are
    undefined; a row may have none.
    """

    ids: Int[Any, "B k"]  # the drafts, of positions n + 1 to n + k
    lengths: Int[Any, " B"]  # how many of them the model is to verify, 0 to k
    # The distribution that each draft was drawn from; None: a draft is certain (one-hot), as where
    # it is the drafter's best token.
    probabilities: Float[Array, "B k Z"] | None = None
    # How likely the drafter thinks each is to be accepted where those before it are; None: unknown.
    confidences: Float[Array, "B k"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. A drafter is a frozen value; what it remembers of B requests of at most
    `max_length` tokens is in a state, which is given back to it. `extend` and `write_row` consume
    the state that they are given.

    A position's rows in a state depend on the tokens and taps up to it alone. Every call says where
    it begins, so that rows of requests that ended, or went back, need no reset: what lies at and
    beyond a row's `starts` is undefined, and overwritten.
    """

    @property
    def tapped(self) -> Tapped | None:
        """The hidden states of the model that it reads: layers, ascending, and stream. None: it
        reads none, and `extend` gets None for taps.
        """
        ...

    @property
    def most(self) -> int:
        """The most drafts that it proposes at once."""
        ...

    def begin(self, batch: int, max_length: int) -> Any:
        """An empty state; `batch` is a multiple of the model's data ranks."""
        ...

    def extend(
        self,
        state: Any,
        ids: Int[np.ndarray, "B T"],
        taps: Float[Array, "B T MD"] | None,
        starts: Int[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
    ) -> Any:
        """The state with the first `lengths[b]` of these tokens committed at positions from
        `starts[b]` on: rows of the prompt, and the anchor and accepted drafts of a round. `taps`
        are the model's hidden states there, those of several layers side by side. A row of length 0
        changes nothing.
        """
        ...

    def propose(
        self,
        state: Any,
        anchors: Int[np.ndarray, " B"],
        starts: Int[np.ndarray, " B"],
        limits: Int[np.ndarray, " B"],
        count: int,
        temperature: Float[np.ndarray, " B"],
        seeds: Int[np.ndarray, " B"],
        threshold: float = 0.0,
    ) -> Proposal:
        """At most `count` drafts after each anchor, which stands at position `starts[b]`; at most
        `limits[b]` of them, where the text or the model's context ends (0: an inactive row).

        A row of `temperature` 0 gets the best tokens. In others drafts may be drawn; their noise is
        a function of the row's seed and of the position alone, in a stream of the drafter's own. A
        row ends before the first draft whose confidence is below `threshold`. Beyond its own
        context a drafter proposes fewer drafts, or none. The state is not consumed.
        """
        ...

    # Rows of states, for continuous batching, prefix caches and sessions.

    def read_row(self, state: Any, row: int, first: int, last: int) -> Any:
        """A copy of a row's positions `first` to `last`."""
        ...

    def write_row(self, state: Any, row: int, first: int, copy: Any) -> Any:
        """The state with a row's positions from `first` on replaced by a copy that `read_row` made,
        of a state of any size.
        """
        ...
