"""Taps: the model's hidden states after chosen layers, which a drafter reads."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..compilation.function import CompiledFunction
from ..config.config import Config
from ..errors import RequestError, shown
from ..model.decoder import Embedded
from ..model.state import State
from ..model.step import Tapped
from ..numerics import is_whole
from ..runtime.images.rows import GivenRows, embedded_piece
from ..runtime.model_on_mesh import BY_ROW, BY_SECOND, STATE, WEIGHTS, CallsInTurn, StatesFunction
from ..runtime.program import Program
from ..runtime.runner import Runner

STREAMS = ("sum", "mixture")


def tapped_of(config: Config, layers: Sequence[int], stream: str) -> Tapped:
    """The layers and the stream of taps. Raises one `RequestError` for layers that are not
    ascending numbers of layers before the last one, and for an unknown stream.
    """
    numbers, last = list(layers) if isinstance(layers, Sequence) else [], config.layers - 2
    problems = []
    are_layers = bool(numbers) and all(is_whole(layer, 0, last) for layer in numbers)
    if not are_layers or numbers != sorted(set(numbers)):
        problems.append(f"layers must be ascending numbers in 0..{last}, got {shown(layers)}")
    if not isinstance(stream, str) or stream not in STREAMS:
        problems.append(f"stream must be one of {', '.join(STREAMS)}, got {shown(stream)}")
    if problems:
        raise RequestError("\n".join(problems))
    return Tapped(tuple(map(int, numbers)), stream)


def side_by_side(taps: Float[Array, "M B T D"] | None) -> Float[Array, "B T MD"] | None:
    """The hidden states of several layers in one row, in their order."""
    if taps is None:
        return None
    return jnp.moveaxis(taps, 0, 2).reshape(*taps.shape[1:3], -1)


@functools.lru_cache(maxsize=32)
def tapped_step(program: Program, tapped: Tapped) -> StatesFunction:
    """(weights, state, tokens [B, T], lengths [B], embedded or nothing) -> the residual stream
    after the tapped layers [M, B, T, D], state. Compiled; the state is consumed.
    """
    if program.walk == "by_group":
        parts = program.by_group("prefill", tapped)
        calls = CallsInTurn(lambda *arguments: parts.run(*arguments)[1:], program.mesh)
        return StatesFunction(program, calls, 1)

    def device_fn(
        weights: dict, state: State, tokens: Array, lengths: Array, *embedded: Embedded
    ) -> tuple[Array | None, State]:
        _, _, state, trace = program.run(
            weights, state, tokens, lengths, "prefill", tapped, *embedded
        )
        return trace.taps, state

    inputs, outputs = (WEIGHTS, STATE, BY_ROW, BY_ROW, BY_ROW), (BY_SECOND, STATE)
    name = f"the {tapped.stream} after layers {', '.join(map(str, tapped.layers))}"
    return StatesFunction(program, program.compiled(device_fn, inputs, outputs, name, donate=1), 1)


def prefill_tapped(
    runner: Runner,
    state: State,
    ids: np.ndarray,
    lengths: np.ndarray,
    tapped: Tapped,
    given: GivenRows = (),
) -> tuple[Float[Array, "rows T MD"], State]:
    """Prefill checked ids [B, T] of at most a chunk, and rows in place of embeddings: the taps of
    their positions, padded as the program is, and the next state. The state is consumed.
    """
    placed = runner.placed(ids, lengths)
    embedded = embedded_piece(runner.program, given, 0, placed[0].shape)
    step = tapped_step(runner.program, tapped)
    taps, state = step(runner.params, state, *placed, *embedded)
    return joined_taps(runner.program)(taps), state


@functools.lru_cache(maxsize=32)
def joined_taps(program: Program) -> CompiledFunction:
    """Taps [M, B, T, D] -> [B, T, M D]. Compiled."""
    return program.compiled(side_by_side, (BY_SECOND,), BY_ROW, "taps side by side")
