"""Drafters for tests: one that is told what comes, one that guesses, and what they were given."""

import dataclasses

import numpy as np

import kimi_jax as kj
from kimi_jax.model.step import Tapped


@dataclasses.dataclass(frozen=True, eq=False)
class Told:
    """Drafts the continuations of `texts`, of which it is right about the first `right` tokens of a
    round and wrong about the next; what it does not know it guesses. It keeps all that it was given
    and checks that every position comes once, in order, with hidden states where it reads some.
    """

    texts: list
    vocab: int
    right: int = 99
    tapped: Tapped | None = None
    most: int = 3
    begun: list = dataclasses.field(
        default_factory=list
    )  # (ids, taps) at each request's first round

    def begin(self, batch, max_length):
        return np.full((batch, max_length), -1), [[None] * max_length for _ in range(batch)]

    def extend(self, state, ids, taps, starts, lengths):
        assert (taps is None) == (self.tapped is None)
        rows, kept = state[0].copy(), [list(row) for row in state[1]]
        host = None if taps is None else np.asarray(taps)
        for b in np.flatnonzero(lengths):
            assert (rows[b, : starts[b]] >= 0).all()
            for i in range(lengths[b]):
                rows[b, starts[b] + i] = ids[b, i]
                kept[b][starts[b] + i] = None if host is None else host[b, i]
            rows[b, starts[b] + lengths[b] :] = -1
        return rows, kept

    def propose(self, state, anchors, starts, limits, count, temperature, seeds, threshold=0.0):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.vocab, (len(anchors), count))
        for b in np.flatnonzero(limits):
            seen = [*state[0][b, : starts[b]].tolist(), int(anchors[b])]
            assert -1 not in seen
            self.begun.append((seen, state[1][b][: starts[b]]))
            text = next((t for t in self.texts if t[: len(seen)] == seen), seen)
            known = text[len(seen) : len(seen) + count]
            ids[b, : len(known)] = known
            if self.right < count:
                ids[b, self.right] = (ids[b, self.right] + 1) % self.vocab
        return kj.Proposal(ids, np.minimum(limits, count))

    def read_row(self, state, row, first, last):
        return state[0][row, first:last].copy(), state[1][row][first:last]

    def write_row(self, state, row, first, copy):
        rows, kept = state[0].copy(), [list(x) for x in state[1]]
        rows[row, first : first + len(copy[0])] = copy[0]
        kept[row][first : first + len(copy[0])] = copy[1]
        return rows, kept
