"""Parts of a step as programs of their own, for `kimi-jax bench`: a step compiled from shapes, the
selection of keys alone, a sum over ranks alone.
"""

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ..model.decoder import Stack
from ..model.mla import MLA
from ..model.state import State
from ..parallel.collectives import all_reduce
from ..parallel.on_mesh import BY_MODEL_RANK, model_ranks, on_model_ranks
from ..parallel.reductions import Reduction
from .model_on_mesh import BY_ROW, STATE, WEIGHTS
from .program import Program
from .runner import Runner


def compile_step(program: Program, B: int, T: int, slots: int) -> tuple[Any, dict[str, float]]:
    """A step of at least B rows, T tokens each, compiled from shapes, and the seconds of tracing,
    lowering and compiling. No weight exists.
    """
    B = program.padded_rows(B)
    by_row = NamedSharding(program.mesh, BY_ROW)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=by_row)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=by_row)
    begin = time.perf_counter()
    step = program.step_of("decode" if T == 1 else "prefill")
    traced = step.trace(program.weight_shapes, program.state_shapes(B, slots), ids, lengths)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    seconds = {
        "trace": traced_at - begin,
        "lower": lowered_at - traced_at,
        "compile": time.perf_counter() - lowered_at,
    }
    return compiled, seconds


def key_selection(model: Runner, B: int, T: int) -> Callable[[State], list]:
    """A program that selects keys as a step of B rows and T random tokens a row does, in all layers
    that select.
    """
    program = model.program

    def select(weights: dict, state: State, x: Array, latent: Array) -> list:
        lengths = jnp.full_like(state.length, T)
        step = program.step_info(state.length, lengths, T, kind="decode" if T == 1 else "prefill")
        return [
            layer.select(x, latent, layer_state, dataclasses.replace(step, group=group))
            for stack, states in zip(program.merge(weights).stacks, state.layers, strict=True)
            for layer, layer_state, group in _mla_layers(stack, states)
        ]

    @jax.jit
    def select_on_mesh(weights: dict, state: State, x: Array, latent: Array) -> list:
        inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW)
        return program.shard(select, inputs, BY_ROW)(weights, state, x, latent)

    rng = np.random.default_rng(0)
    x, latent = (
        model.place_rows(rng.standard_normal((B, T, width), np.float32).astype(model.dtype))
        for width in (model.config.hidden, model.config.q_rank)
    )
    return lambda state: select_on_mesh(model.weights, state.bare(), x, latent)


def _mla_layers(stack: Stack, states: Sequence[Any]) -> Iterator[tuple[MLA, Any, int]]:
    """Every MLA layer of a stack, the stacked state that holds its own, and its group there."""
    for layer, state in zip(stack.layers, states, strict=True):
        if isinstance(layer.attention, MLA):
            graph, weights = nnx.split(layer.attention)
            for group in range(stack.span.groups):
                of_group = jax.tree.map(operator.itemgetter(group), weights)
                yield nnx.merge(graph, of_group), state, group


def partial_sums(mesh: Mesh, rows: int, width: int, dtype: str) -> Array:
    """Random partial sums [rows, width] of every model rank, one below the other."""
    partials = jax.random.normal(jax.random.key(0), (model_ranks(mesh) * rows, width), dtype)
    return jax.device_put(partials, NamedSharding(mesh, BY_MODEL_RANK))


def sum_over_ranks(how: Reduction, mesh: Mesh) -> Callable[[Array], Array]:
    """A program from the partial sums of all model ranks to their sum, on every one of them."""
    return on_model_ranks(mesh, lambda partial: all_reduce(partial, how))
