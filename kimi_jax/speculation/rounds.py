"""The rounds of a run: prompts prefilled for the model and its drafter, then draft, verify, accept
and commit. Knows rows of states and token ids, no requests.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from ..model.state import State
from ..parallel.processes import to_host
from ..runtime.images.rows import GivenRows
from ..runtime.rows import Rows
from ..runtime.runner import Runner
from .accept import accept_step, logits_step, rejection_step
from .acceptance import RULES
from .drafter import Drafter
from .taps import prefill_tapped
from .verify import commit_rows, verify_rows

EXACT = "exact"  # `accept`: the tokens are those without a draft
ACCEPTANCE = (EXACT, *RULES)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts, and how much: at most `count` tokens a round, fewer where the drafter's
    confidence in one falls below `threshold`. `rule`: how they are accepted, `EXACT` or a name of
    `acceptance.RULES`; under these, drafts may be drawn.
    """

    drafter: Drafter
    count: int
    threshold: float = 0.0
    rule: str = EXACT


@dataclasses.dataclass(frozen=True)
class Round:
    """What a round sampled: arrays [T, B, ...] as those of `Program.decode_steps`; how many of them
    are each row's next tokens; and how many drafts of each row were verified.
    """

    sampled: tuple[np.ndarray, ...]
    count: Int[np.ndarray, " B"]
    drafts: Int[np.ndarray, " B"]


class Rounds:
    """A drafter's states of a run: of its decode slots, and of its prefill rows where these are
    rows of their own.
    """

    def __init__(
        self, runner: Runner, drafting: Drafting, slots: int, prefill_rows: int, kept: Any, S: int
    ):
        """States for S tokens a row; `kept`, of as many, is the decode slots' where given."""
        self.runner, self.drafting, drafter = runner, drafting, drafting.drafter
        self.slots = drafter.begin(slots, S) if kept is None else kept
        self._in_place, self._rows = slots == prefill_rows, prefill_rows
        self._prefill_rows = None if self._in_place else drafter.begin(prefill_rows, S)

    @property
    def prefill_rows(self) -> Any:
        """The drafter's state of the rows in which prompts are prefilled."""
        return self.slots if self._in_place else self._prefill_rows

    @prefill_rows.setter
    def prefill_rows(self, state: Any) -> None:
        if self._in_place:
            self.slots = state
        else:
            self._prefill_rows = state

    def prefill(
        self,
        state: State,
        ids: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        given: GivenRows = (),
    ) -> State:
        """The model's state after more of the prompts, ids [B, T] from positions `starts` on, with
        the rows given in place of embeddings; the drafter sees ids and hidden states.
        """
        drafter, taps = self.drafting.drafter, None
        if drafter.tapped is None:
            _, state = self.runner.advance(state, ids, lengths, rows=given)
        else:
            taps, state = prefill_tapped(self.runner, state, ids, lengths, drafter.tapped, given)
            ids = np.pad(ids, ((0, 0), (0, taps.shape[1] - ids.shape[1])))
        self.prefill_rows = drafter.extend(self.prefill_rows, ids, taps, starts, lengths)
        return state

    def restore(self, row: int, first: int, ids: Sequence[int], copy: Any) -> None:
        """The drafter sees `ids` from position `first` of a prefill row on, which the model has
        seen already; `copy` is what `copy_row` made of them.
        """
        drafter, count = self.drafting.drafter, len(ids)
        if copy is not None:
            self.prefill_rows = drafter.write_row(self.prefill_rows, row, first, copy)
        elif drafter.tapped is None and count:
            starts, lengths = np.zeros((2, self._rows), np.int32)
            tokens = np.zeros((self._rows, count), np.int32)
            tokens[row], starts[row], lengths[row] = ids, first, count
            state = drafter.extend(self.prefill_rows, tokens, None, starts, lengths)
            self.prefill_rows = state

    def copy_row(self, row: int, first: int, last: int) -> Any:
        """The drafter's rows of positions of a prefill row; None where it reads no taps: ids are
        all that it needs.
        """
        if self.drafting.drafter.tapped is None:
            return None
        return self.drafting.drafter.read_row(self.prefill_rows, row, first, last)

    def move(self, row: int, slot: int, length: int) -> None:
        """A prompt of `length` tokens is complete: from its prefill row to its decode slot."""
        if not self._in_place:
            drafter = self.drafting.drafter
            copy = drafter.read_row(self.prefill_rows, row, 0, length)
            self.slots = drafter.write_row(self.slots, slot, 0, copy)

    def first(self, state: State, rows: Rows, is_new: np.ndarray) -> Round:
        """The first token of rows whose prompts are complete: no round of drafts yet."""
        logits = logits_step(self.runner.program)(self.runner.params, state.bare())
        lengths = is_new.astype(np.int32)
        sampled, count = self._accept(logits, np.zeros((len(is_new), 1), np.int32), lengths, rows)
        return Round(sampled, count, np.zeros(len(is_new), np.int32))

    def run(
        self, state: State, rows: Rows, anchors: np.ndarray, starts: np.ndarray, limits: np.ndarray
    ) -> tuple[Round, State]:
        """A round: the newest token of each row stands at position `starts[b]`, at most `limits[b]`
        drafts follow it; -1 is a row without a request. The state is consumed.
        """
        drafter, is_active = self.drafting.drafter, limits >= 0
        tokens, drafts, q = self._proposed(rows, anchors, starts, np.maximum(limits, 0))
        lengths = np.where(is_active, drafts + 1, 0).astype(np.int32)
        verified = verify_rows(self.runner, state, tokens, lengths, drafter.tapped)
        sampled, count = self._accept(verified.logits, tokens, lengths, rows, q)
        state = commit_rows(self.runner, verified, count)
        self.slots = drafter.extend(self.slots, tokens, verified.taps, starts, count)
        return Round(sampled, count, np.where(is_active, drafts, 0)), state

    def _proposed(
        self, rows: Rows, anchors: np.ndarray, starts: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Array | None]:
        """The rows to verify [B, T], how many drafts each has, and what these were drawn from: T is
        1 where none has any, so that few programs are compiled.
        """
        B, most, drafting = len(anchors), self.drafting.count, self.drafting
        temperature, seeds = np.zeros(B, np.float32), np.zeros(B, np.int32)
        if drafting.rule != EXACT:
            temperature, seeds = to_host(rows.temperature), to_host(rows.seeds)
        proposal = drafting.drafter.propose(
            self.slots, anchors, starts, limits, most, temperature, seeds, drafting.threshold
        )
        ids, lengths = _on_host(proposal.ids), _on_host(proposal.lengths)
        drafts = np.minimum(lengths[:B], limits).astype(np.int32)
        tokens = np.zeros((B, 1 + most if drafts.any() else 1), np.int32)
        tokens[:, 0] = anchors
        width = min(ids.shape[1], tokens.shape[1] - 1)
        tokens[:, 1 : 1 + width] = ids[:B, :width]
        return tokens, drafts, proposal.probabilities

    def _accept(
        self,
        logits: Array,
        tokens: np.ndarray,
        lengths: np.ndarray,
        rows: Rows,
        q: Array | None = None,
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        program, rule = self.runner.program, self.drafting.rule
        placed = [self.runner.place_rows(x) for x in (tokens, lengths)]
        if rule == EXACT or tokens.shape[1] == 1:
            results = accept_step(program)(logits, *placed, rows)
        else:
            step = rejection_step(program, rule, q is not None)
            results = step(logits, *placed, rows, *([] if q is None else [q]))
        sampled, count = jax.tree.map(to_host, results)
        return sampled, count


def _on_host(x: Any) -> np.ndarray:
    return to_host(x) if isinstance(x, Array) else np.asarray(x)
