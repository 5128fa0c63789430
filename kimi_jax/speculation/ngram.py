"""A drafter without weights: what followed the latest tokens where they stood before in the text
(prompt lookup decoding).
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import shown
from ..numerics import is_whole
from .drafter import Proposal

MOST_DRAFTS = 64  # of a round


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Drafts what followed the latest `n` tokens of a request's text where they stood before, the
    last time; where they never did, what followed the latest n - 1, down to one. At most `most`
    tokens a round, none where the newest token is new. For text that repeats itself or its prompt:
    code, summaries, conversations about a document.

    Raises ValueError for numbers that are not whole and positive.
    """

    n: int = 3
    most: int = 7

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a whole number in 1..{MOST_DRAFTS}, got {shown(value)}"
            for name, value in vars(self).items()
            if not is_whole(value, 1, MOST_DRAFTS)
        ]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def tapped(self) -> None:
        """It reads no hidden states."""
        return None

    def begin(self, batch: int, max_length: int) -> Int[np.ndarray, "B S"]:
        """The ids of each request, none yet."""
        return np.zeros((batch, max_length), np.int32)

    def extend(
        self,
        state: Int[np.ndarray, "B S"],
        ids: Int[np.ndarray, "B T"],
        taps: Float[Array, "B T MD"] | None,
        starts: Int[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
    ) -> Int[np.ndarray, "B S"]:
        """The ids with more of them, written in place."""
        for b in np.flatnonzero(lengths):
            state[b, starts[b] : starts[b] + lengths[b]] = ids[b, : lengths[b]]
        return state

    def propose(
        self,
        state: Int[np.ndarray, "B S"],
        anchors: Int[np.ndarray, " B"],
        starts: Int[np.ndarray, " B"],
        limits: Int[np.ndarray, " B"],
        count: int,
        temperature: Float[np.ndarray, " B"],
        seeds: Int[np.ndarray, " B"],
        threshold: float = 0.0,
    ) -> Proposal:
        """What followed, the same at any temperature. ValueError for a threshold: these drafts
        have no confidence.
        """
        if threshold:
            raise ValueError("drafts of an NgramDraft have no confidence: leave the threshold out")
        ids, lengths = np.zeros((len(anchors), count), np.int32), np.zeros(len(anchors), np.int32)
        for b in np.flatnonzero(limits):
            text = np.append(state[b, : starts[b]], anchors[b])
            found = following(text, self.n)[: min(count, int(limits[b]))]
            ids[b, : len(found)], lengths[b] = found, len(found)
        return Proposal(ids, lengths)

    def read_row(self, state: Any, row: int, first: int, last: int) -> Int[np.ndarray, " T"]:
        """The ids of a request's positions."""
        return state[row, first:last].copy()

    def write_row(self, state: Any, row: int, first: int, copy: Any) -> Int[np.ndarray, "B S"]:
        """The ids with those of a request replaced, in place."""
        state[row, first : first + len(copy)] = copy
        return state


def following(text: Int[np.ndarray, " T"], n: int) -> Int[np.ndarray, " t"]:
    """What followed the longest ending of at most `n` tokens that stands earlier in a text, where
    it stood last; empty where the last token is new.
    """
    for size in range(min(n, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        places = np.flatnonzero((windows == text[-size:]).all(1))
        if places.size:
            return text[places[-1] + size :]
    return text[:0]
