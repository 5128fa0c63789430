"""A few rows a request that may be taken back: verified in one step, then committed up to a row."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from ..compilation.function import CompiledFunction
from ..errors import RequestError, shown
from ..model.attention.rollback import Pending, Verifying, pending_tree, row_at
from ..model.state import KDAState, MLAState, State
from ..model.step import Tapped
from ..parallel.on_mesh import own_mesh
from ..runtime.by_group import ByGroup, Part
from ..runtime.model_on_mesh import (
    BY_ROW,
    STATE,
    WEIGHTS,
    CallsInTurn,
    StatesFunction,
)
from ..runtime.program import Program
from ..runtime.rows import Rows
from ..runtime.runner import Ids, Runner, checked
from .taps import joined_taps, side_by_side, tapped_of


@dataclasses.dataclass(frozen=True)
class Verified:
    """What the model makes of rows that are not committed. `state` is the state as it was before
    them: to go on from it is to drop the rows. `commit` makes the state after some of them.
    """

    logits: Float[Array, "B T Z"]  # after each row, in at least float32; padding is undefined
    taps: Float[Array, "B T MD"] | None  # hidden states of the tapped layers, side by side
    state: State
    lengths: Int[np.ndarray, " B"]  # rows of each request
    # Of the batch padded to the data ranks: what rows leave of each KDA layer, normed output rows.
    pending: Any = dataclasses.field(repr=False)
    hidden: Float[Array, "rows T D"] = dataclasses.field(repr=False)


def verify(
    runner: Runner,
    state: State,
    tokens: Ids,
    lengths: Ids | None = None,
    *,
    layers: Sequence[int] | None = None,
    stream: str = "sum",
) -> Verified:
    """Run right-padded new tokens [B, T] after what the state has seen, in one step, without
    committing them: logits after every row, and what `commit` needs.

    Row b brings `lengths[b]` tokens, 0 to T (default T): the newest token of its text, and drafts.
    `layers`: 0-based numbers, ascending, of layers before the last one after which the hidden
    states of every row are returned too, of a `stream` as `hidden` names them. The state passed in
    is consumed: `Verified.state` equals it. A step of few rows sums over ranks as decode steps do.
    Raises `RequestError`.
    """
    tapped = None if layers is None else tapped_of(runner.config, layers, stream)
    ids, counts = checked(tokens, lengths, runner.config.vocab)
    runner.check_fits(state, counts)
    return verify_rows(runner, state, ids, counts, tapped)


def verify_rows(
    runner: Runner, state: State, ids: np.ndarray, lengths: np.ndarray, tapped: Tapped | None
) -> Verified:
    """`verify` of checked ids [B, T]."""
    B = len(ids)
    pads = (0, runner.program.padded_rows(B) - B)
    placed = [
        runner.place_rows(np.pad(x, (pads, *[(0, 0)] * (x.ndim - 1)))) for x in (ids, lengths)
    ]
    step = StatesFunction(runner.program, verify_step(runner.program, tapped), 1)
    logits, taps, state, pending, hidden = step(runner.params, state, *placed)
    if len(logits) > B:
        with own_mesh(runner.mesh):
            logits, taps = logits[:B], None if taps is None else taps[:B]
    return Verified(logits, taps, state, lengths, pending, hidden)


def commit(runner: Runner, verified: Verified, accepted: Ids) -> State:
    """The state after the first `accepted[b]` + 1 rows of each request: its newest token, and that
    many drafts. -1 commits nothing of a request, which stays as it was, bit for bit.

    The state of `verified` is consumed; the result equals the state after a prefill of these tokens
    (in exact arithmetic). Raises `RequestError` for numbers outside -1 to the request's rows - 1.
    """
    state, lengths = verified.state, verified.lengths
    runner.check_fits(state, lengths)
    numbers = np.asarray(accepted)
    if (
        numbers.shape != lengths.shape
        or numbers.dtype.kind not in "iu"
        or (numbers < -1).any()
        or (numbers >= lengths).any()
    ):
        raise RequestError(
            f"accepted must be {len(lengths)} whole numbers, each from -1 (commit nothing) to the "
            f"rows of its request less one, {shown((lengths - 1).tolist())}; got {shown(accepted)}"
        )
    return commit_rows(runner, verified, numbers + 1)


def commit_rows(runner: Runner, verified: Verified, count: np.ndarray) -> State:
    """The state after the first `count[b]` rows of each request, 0 for none. That of `verified` is
    consumed.
    """
    counts = np.zeros(len(verified.state.length), np.int32)
    counts[: len(count)] = count
    step = StatesFunction(runner.program, commit_step(runner.program), 0)
    return step(verified.state, verified.pending, verified.hidden, runner.place_rows(counts))


@functools.lru_cache(maxsize=32)
def verify_step(program: Program, tapped: Tapped | None = None) -> CompiledFunction | CallsInTurn:
    """(weights, state, tokens [B, T], lengths [B]) -> logits [B, T, Z], taps [B, T, M D] or None,
    the state with new rows in its caches beyond its lengths, pending, output rows [B, T, D].
    Compiled; the state is consumed.
    """
    if program.walk == "by_group":
        return CallsInTurn(VerifyParts(program, tapped), program.mesh)
    rollback = program.implementations.rollback

    def device_fn(weights: dict, state: State, tokens: Array, lengths: Array) -> tuple:
        begun = with_layers(state, lambda x: entering(x, tokens.shape[1], rollback))
        model, out, after, trace = program.run(weights, begun, tokens, lengths, "verify", tapped)
        state = dataclasses.replace(state, layers=with_layers(after, untouched).layers)
        pending = with_layers(after, left_of).layers
        return model.head_logits(out), side_by_side(trace.taps), state, pending, out

    inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW)
    outputs = (BY_ROW, BY_ROW, STATE, pending_specs(program), BY_ROW)
    taps = f", the {tapped.stream} after layers {tapped.layers}" if tapped else ""
    return program.compiled(device_fn, inputs, outputs, f"a verify step{taps}", donate=1)


class VerifyParts(ByGroup):
    """A verify step as calls of a program of each kind of group of layers."""

    commits = False

    def __init__(self, program: Program, tapped: Tapped | None):
        super().__init__(program, "verify", tapped)
        self.program = program

    def __call__(self, weights: dict, state: State, tokens: Any, lengths: Any) -> tuple:
        """As `verify_step`."""
        out, taps, after = self.run(weights, state, tokens, lengths)
        logits = self.head(out, self.end_weights(weights))
        pairs = zip(state.layers[0], after.layers[0], strict=True)
        layers = [new if isinstance(new, MLAState) else old for old, new in pairs]
        pending = with_layers(after, left_of).layers
        taps = None if taps is None else joined_taps(self.program)(taps)
        return logits, taps, dataclasses.replace(after, layers=[layers]), pending, out

    def parts(
        self, weights: dict, state: State, tokens: Any, lengths: Any, rows: Rows | None = None
    ) -> Iterator[Part]:
        """Every program of a step and of its commit, lowered for arrays or their shapes."""
        program, ends = self.program, self.end_weights(weights)
        *parts, _ = super().parts(weights, state, tokens, lengths)
        yield from parts
        (B, T), D = tokens.shape, program.config.hidden
        by_row = NamedSharding(program.mesh, BY_ROW)
        out = jax.ShapeDtypeStruct((B, T, D), program.dtype, sharding=by_row)
        left = jax.eval_shape(lambda state: self.left_of_rows(state, T), state)
        pending = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(program.mesh, spec)
            ),
            left,
            pending_specs(program),
        )
        yield Part("commit", 1, commit_step(program).lower(state, pending, out, lengths))
        yield Part("head", 1, self.head.lower(out, ends))

    def left_of_rows(self, state: State, T: int) -> list[list[Pending | None]]:
        """Room for what T rows a request leave of each layer."""
        rollback = self.program.implementations.rollback
        return with_layers(state, lambda x: left_of(entering(x, T, rollback))).layers

    def entering(self, recurrent: list[KDAState], T: int) -> list:
        """With room for what rows leave."""
        return [entering(x, T, self.model.implementations.rollback) for x in recurrent]

    def leaving(self, recurrent: list) -> list:
        """What rows leave."""
        return [left_of(x) for x in recurrent]

    def leaving_specs(self, recurrent: list) -> list:
        """How that is sharded."""
        leaf = self.model.place.spec
        return [pending_tree(self.model.implementations.rollback, leaf) for _ in recurrent]


def with_layers(state: State, function: Callable) -> State:
    """A state with `function` applied to every layer's."""
    return dataclasses.replace(state, layers=[list(map(function, x)) for x in state.layers])


def entering(layer: Any, T: int, rollback: str) -> Any:
    """A layer's state as a verify step of T rows takes it."""
    return Verifying.of(layer, T, rollback) if isinstance(layer, KDAState) else layer


def untouched(layer: Any) -> Any:
    """A layer's state after a verify step, its rows not committed."""
    return layer.state if isinstance(layer, Verifying) else layer


def left_of(layer: Any) -> Pending | None:
    """What the rows of a verify step leave of a layer."""
    pending = layer.pending if isinstance(layer, Verifying) else layer
    return pending if isinstance(pending, Pending) else None


def pending_specs(program: Program) -> list[list[Pending | None]]:
    """The mesh axes of every array that rows leave, by stack and layer."""
    kda = pending_tree(program.implementations.rollback, program.place.spec)
    is_mla = program.config.is_mla
    return [
        [None if is_mla(span.layer(j, 0)) else kda for j in range(span.period)]
        for span in program.stacks
    ]


@functools.lru_cache(maxsize=32)
def commit_step(program: Program) -> CompiledFunction:
    """(state, pending, output rows [B, T, D], count [B]) -> the state after the first `count` rows.
    Compiled; the state is consumed.
    """

    def device_fn(state: State, pending: list, out: Array, count: Array) -> State:
        left = chain.from_iterable(pending)
        after = with_layers(state, lambda x: committed(x, next(left), state.length, count))
        hidden = jnp.where((count > 0)[:, None], row_at(out, count - 1), state.hidden)
        return dataclasses.replace(after, length=state.length + count, hidden=hidden)

    inputs = (STATE, pending_specs(program), BY_ROW, BY_ROW)
    return program.compiled(device_fn, inputs, STATE, "a commit", donate=0)


def committed(layer: Any, left: Pending | None, start: Array, count: Array) -> Any:
    """A layer's state after the first `count` of its rows."""
    return layer if left is None else left.commit(layer, start, count)
