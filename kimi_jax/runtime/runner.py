"""A decoder on a mesh: its weights, read slice by slice, its compiled steps, and the checks of what
they are given. Knows no text.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from ..config.config import Config
from ..errors import RequestError, shown
from ..model.state import State, home_of
from ..numerics import is_whole
from ..parallel.mesh import DATA
from ..parallel.on_mesh import own_mesh
from ..parallel.placement import Placement
from ..parallel.processes import agree, to_device, to_host, to_mesh
from .images.rows import GivenRows, check_rows, embedded_piece
from .memory import PREFILL_ROWS
from .program import Program, state_maker

Ids = ArrayLike | Sequence  # whole numbers, as an array or nested lists

BUCKETS = (1, *PREFILL_ROWS)


def bucket(T: int, chunk: int) -> int:
    """The padded width of a call with T new tokens: one of few, so that few programs compile."""
    fitting = [size for size in BUCKETS if T <= size <= chunk]
    return fitting[0] if fitting else chunk if chunk >= T else -(-T // chunk) * chunk


@dataclasses.dataclass(frozen=True)
class Runner:
    """A decoder ready to run: `logits`, `new_state`, `prefill` and `decode` of token ids."""

    program: Program
    params: dict[tuple, Array]  # by path in the module, equal layers stacked
    chunk: int = dataclasses.field(default=256, kw_only=True)  # most tokens of a row in a prefill

    @property
    def config(self) -> Config:
        """Sizes and switches of the model."""
        return self.program.config

    @property
    def mesh(self) -> Mesh:
        """The devices it lives on."""
        return self.program.mesh

    @property
    def placement(self) -> Placement:
        """How it is partitioned over them."""
        return self.program.place

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        return self.program.dtype

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the rows of a batch are sharded."""
        return self.program.sizes[DATA]

    def place_rows(self, x: np.ndarray) -> Array:
        """An array on the mesh, its first dim sharded over the data ranks."""
        return to_device(x, NamedSharding(self.mesh, PartitionSpec(DATA)))

    def logits(self, tokens: Ids, lengths: Ids | None = None, *, rows: GivenRows = ()) -> Array:
        """Logits [B, T, vocab] in at least float32 of right-padded prompts [B, T]; keeps no state.
        `rows` as in `prefill`.

        Positions at and after a row's length are undefined. Raises `RequestError` for a row longer
        than the model's context.
        """
        ids, lengths = checked(tokens, lengths, self.config.vocab)
        check_rows(rows, lengths, self.config.hidden)
        _refuse_over(lengths, self.config.max_positions)
        B, T = ids.shape
        placed = self.placed(ids, lengths)
        embedded = embedded_piece(self.program, rows, 0, placed[0].shape)
        logits = self.program.jitted_logits(self.params, *placed, *embedded)
        with own_mesh(self.mesh):
            return logits[:B, :T]

    def mixtures(self, tokens: Sequence[int]) -> np.ndarray:
        """The weights of each residual mixture: [2 * layers + 1, bank rows + 1, T]. The running sum
        comes last, after the bank; 0 where a bank row is not used.
        """
        ids, lengths = checked([tokens], None, self.config.vocab)
        _refuse_over(lengths, self.config.max_positions)
        T = ids.shape[1]
        rows = self.program.jitted_mixtures(self.params, *self.placed(ids, lengths))
        weights = np.zeros((len(rows), self.config.bank_rows + 1, T))
        for out, mixed in zip(weights, map(to_host, rows), strict=True):
            out[: len(mixed) - 1], out[-1] = mixed[:-1, :T], mixed[-1, :T]
        return weights

    def new_state(self, batch: int, max_length: int) -> State:
        """An empty state for `batch` requests of at most `max_length` tokens each, prompt and reply
        together.
        """
        for name, value in (("batch", batch), ("max_length", max_length)):
            if not is_whole(value, 1, 2**31 - 1):
                raise RequestError(
                    f"{name} must be a positive whole number below 2^31, got {shown(value)}"
                )
        if max_length > self.config.max_positions:
            raise RequestError(
                f"max_length {max_length} is over the model's context of "
                f"{self.config.max_positions} tokens"
            )
        self.program.refuse_what_exceeds(int(batch), int(max_length))
        empty = state_maker(self.program, self.program.padded_rows(int(batch)), int(max_length))()
        return dataclasses.replace(empty, batch=int(batch), home=self.program)

    def prefill(
        self, state: State, tokens: Ids, lengths: Ids | None = None, *, rows: GivenRows = ()
    ) -> tuple[Array, State]:
        """Prefill right-padded new tokens [B, T] after what the state has seen: logits [B, vocab],
        next state.

        Row b brings `lengths[b]` tokens, 0 to T (default T); its logits are those after its last
        token so far. A prompt given in pieces equals the prompt given at once. The state passed in
        is consumed. Long pieces run in chunks. `rows`: for each row of the batch, those that
        replace embeddings of these tokens, or None.
        """
        return self._checked_advance(state, tokens, lengths, "prefill", rows)

    def decode(self, state: State, tokens: Ids) -> tuple[Array, State]:
        """One more token per row, tokens [B]: logits [B, vocab] after it, next state. The state is
        consumed.
        """
        ids = _array("tokens", tokens, "[B]")
        if ids.ndim != 1:
            raise RequestError(f"decode takes one token per row, [B]; got shape {ids.shape}")
        return self._checked_advance(state, ids[:, None], None, "decode")

    def _checked_advance(
        self, state: State, tokens: Ids, lengths: Ids | None, kind: str, rows: GivenRows = ()
    ) -> tuple[Array, State]:
        ids, lengths = checked(tokens, lengths, self.config.vocab)
        check_rows(rows, lengths, self.config.hidden)
        self.check_fits(state, lengths)
        return self.advance(state, ids, lengths, kind, rows)

    def advance(
        self,
        state: State,
        ids: np.ndarray,
        lengths: np.ndarray,
        kind: str = "prefill",
        rows: GivenRows = (),
    ) -> tuple[Array, State]:
        """`prefill` or `decode` of checked ids [B, T] and rows, a chunk at a time. A chunk in which
        no row is given runs the program of tokens alone.
        """
        logits = None
        for piece, placed in self._pieces(ids, lengths, max(1, int(lengths.max(initial=0)))):
            embedded = embedded_piece(self.program, rows, piece.start, placed[0].shape)
            logits, state = self.program.advance(self.params, state, *placed, kind, *embedded)
        assert logits is not None
        with own_mesh(self.mesh):
            return logits if len(logits) == len(ids) else logits[: len(ids)], state

    def in_chunks(
        self,
        step: Callable,
        tokens: Ids,
        lengths: Ids | None,
        *more: np.ndarray,
        room: int | None = None,
    ) -> Iterator[tuple[Array, int]]:
        """The results of a compiled step, (params, state, tokens, lengths, *more) -> (result,
        state), over prompts [B, T] and arrays like them, a chunk at a time in a state for `room`
        tokens (default T); with each result how many of its positions are not padding.
        """
        ids, lengths = checked(tokens, lengths, self.config.vocab)
        _refuse_over(lengths, self.config.max_positions)
        B, T = ids.shape
        state = self.new_state(B, room or T)
        for piece, placed in self._pieces(ids, lengths, T):
            extra = [self._place_ids(array[:, piece]) for array in more]
            result, state = step(self.params, state, *placed, *extra)
            yield result, min(self.chunk, T - piece.start)

    def _pieces(
        self, ids: np.ndarray, lengths: np.ndarray, end: int
    ) -> Iterator[tuple[slice, tuple[Any, Any]]]:
        """Positions up to `end`, a chunk at a time, with their ids and lengths on the mesh."""
        for first in range(0, end, self.chunk):
            piece = slice(first, first + self.chunk)
            yield piece, self.placed(ids[:, piece], np.clip(lengths - first, 0, self.chunk))

    def placed(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[Any, Any]:
        """Ids and lengths on the mesh, padded to a multiple of the data ranks."""
        B = len(ids)
        lengths = np.pad(lengths, (0, self.program.padded_rows(B) - B)).astype(np.int32)
        rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        return self._place_ids(ids), to_mesh(lengths, rows)

    def _place_ids(self, ids: np.ndarray) -> Any:
        """Ids on the mesh, padded to a multiple of the data ranks and to a bucket's width."""
        B, T = ids.shape
        pads = ((0, self.program.padded_rows(B) - B), (0, bucket(T, self.chunk) - T))
        rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        return to_mesh(np.pad(ids, pads).astype(np.int32), rows)

    def check_fits(self, state: State, lengths: np.ndarray) -> None:
        """Refuse a state of another model, consumed, or without room for these new tokens."""
        self._is_own(state)
        seen = to_host(state.length)
        if state.batch != len(lengths):
            raise RequestError(f"the state holds {state.batch} rows, the tokens {len(lengths)}")
        seen = seen[: len(lengths)]
        over = np.flatnonzero(seen + lengths > state.max_length)
        if over.size:
            row = over[0]
            raise RequestError(
                f"row {row} has seen {seen[row]} tokens and brings {lengths[row]}: "
                f"more than the state's max_length {state.max_length}"
            )

    def _is_own(self, state: State) -> None:
        """Refuse what is not a state, one that a step has consumed, and one of another model."""
        problems = home_of(state).other_states_than(self.program)
        if problems:
            raise RequestError("\n".join(problems))


def checked(tokens: Ids, lengths: Ids | None, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] and lengths [B] as int32. Raises `RequestError` for invalid ones."""
    ids = _array("tokens", tokens, "[B, T]: pad rows to one length")
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
        raise RequestError(
            f"tokens must be whole numbers [B, T], none empty; got {ids.dtype} {ids.shape}"
        )
    B, T = ids.shape
    lengths = np.full(B, T) if lengths is None else _array("lengths", lengths, "[B]")
    if (
        lengths.shape != (B,)
        or lengths.dtype.kind not in "iu"
        or lengths.min() < 0
        or lengths.max() > T
    ):
        raise RequestError(
            f"lengths must be {B} whole numbers from 0 to {T}; got {shown(lengths.tolist())}"
        )
    bad = ((ids < 0) | (ids >= vocab)) & (np.arange(T) < lengths[:, None])
    if bad.any():
        row, at = np.argwhere(bad)[0]
        raise RequestError(
            f"token id {ids[row, at]} at row {row}, position {at} is outside the vocabulary of "
            f"{vocab}"
        )
    ids = np.where(np.arange(T) < lengths[:, None], ids, 0).astype(np.int32)
    agree("tokens and lengths", ids, lengths)
    return ids, lengths.astype(np.int32)


def _refuse_over(lengths: np.ndarray, limit: int) -> None:
    """Raise `RequestError` for a row longer than the model's context."""
    over = np.flatnonzero(lengths > limit)
    if over.size:
        raise RequestError(
            f"row {over[0]} has {lengths[over[0]]} tokens: more than the model's context of {limit}"
        )


def _array(name: str, value: Any, shape: str) -> np.ndarray:
    """`value` as an array. Raises `RequestError` with the expected shape where it is not one."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"{name} must be {shape}; got {shown(value)}") from error


def chunk_widths(lengths: Iterable[int], chunk: int) -> set[int]:
    """The padded widths of the chunks in which prompts of these lengths are prefilled."""
    pieces = {min(chunk, n - at) for n in lengths for at in range(0, n, chunk)}
    return {bucket(T, chunk) for T in pieces}


def prepare_prefill(runner: Runner, state: State, lengths: Iterable[int]) -> None:
    """Compile in the background what prefills prompts of these lengths, for this state or one of
    its shapes.
    """
    rows = len(state.length)
    for width in chunk_widths(lengths, runner.chunk):
        ids = jax.ShapeDtypeStruct((rows, width), np.int32)
        counts = jax.ShapeDtypeStruct((rows,), np.int32)
        step = runner.program.step_for("prefill", ids.shape)
        step.prepare(runner.params, state.bare(), ids, counts)
