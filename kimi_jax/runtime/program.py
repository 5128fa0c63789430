"""The compiled functions of one decoder on one mesh; `make_program` checks and shares them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from ..compilation.function import CompiledFunction
from ..config.block_sizes import block_sizes
from ..config.config import Config
from ..model.decoder import Embedded, Kimi, Trace
from ..model.implementations import Implementations, fast_on
from ..model.mxfp4 import MXFP4, Quantization
from ..model.state import STATE_DIMS, State
from ..model.step import Tapped
from ..parallel.collectives import all_gather, rank, ranks
from ..parallel.mesh import DATA, MODEL, as_mesh
from ..parallel.placement import Placement, as_placement
from .by_group import ByGroup
from .memory import DTYPES
from .model_on_mesh import (
    BY_ROW,
    BY_SECOND,
    REPLICATED,
    STATE,
    STATE_ROW,
    WALKS,
    WEIGHTS,
    CallsInTurn,
    ModelOnMesh,
    StatesFunction,
    merged,
)
from .rows import Rows
from .sampling import sample
from .state_rows import row_of, slots_of, with_row, with_slots

SCAN_FROM = 24  # layers from which CPUs scan too: unrolled layers run faster, compile slower


class Program(ModelOnMesh):
    """The steps of one decoder on one mesh, as pure functions of weights."""

    def advance(
        self, weights: dict, state: State, tokens: Any, lengths: Any, kind: str = "prefill",
        *embedded: Embedded,
    ) -> tuple[Array, State]:  # fmt: skip
        """`step` for a state as users hold it; `kind` is "prefill" or "decode"."""
        step = self.step_for(kind, tokens.shape)
        logits, following = step(weights, state.bare(), tokens, lengths, *embedded)
        return logits, dataclasses.replace(following, batch=state.batch, home=self)

    def step_for(self, kind: str, shape: tuple[int, int]) -> CompiledFunction | CallsInTurn:
        """The compiled step for tokens of a shape: both kinds share one with equal reductions."""
        rows = shape[0] // self.sizes[DATA] * shape[1]
        reductions = {self.place.reduction(name, rows, self.sizes) for name in (kind, "prefill")}
        return self.step_of("prefill" if len(reductions) == 1 else kind)

    def step_of(self, kind: str) -> CompiledFunction | CallsInTurn:
        """(weights, state, tokens [B, T], lengths [B], embedded or nothing) -> logits [B, Z] after
        each row's last token, state. Compiled; the state is consumed.
        """
        return self.step if kind == "prefill" else self._decode_step

    @functools.cached_property
    def step(self) -> CompiledFunction | CallsInTurn:
        """`step_of("prefill")`."""
        return self._jitted_step("prefill")

    @functools.cached_property
    def _decode_step(self) -> CompiledFunction | CallsInTurn:
        return self._jitted_step("decode")

    def _jitted_step(self, kind: str) -> CompiledFunction | CallsInTurn:
        if self.walk == "by_group":
            return CallsInTurn(self.by_group(kind).step, self.mesh)

        def device_fn(
            weights: dict, state: State, tokens: Array, lengths: Array, *embedded: Embedded
        ) -> tuple[Array, State]:
            model, _, state, _ = self.run(weights, state, tokens, lengths, kind, None, *embedded)
            return model.head_logits(state.hidden), state

        inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW, BY_ROW)
        name = {"prefill": "prefill", "decode": "a decode step"}[kind]
        return self.compiled(device_fn, inputs, (BY_ROW, STATE), name, donate=1)

    def by_group(self, kind: str, tapped: Tapped | None = None) -> ByGroup:
        """The parts of steps of a kind, where layers are walked by group."""
        return _parts_by_group(self, kind, tapped)

    def merge(self, weights: dict[tuple, Array]) -> Kimi:
        """The module with these arrays, local or global, as its weights."""
        return merged(self.declared, weights)

    def run(
        self, weights: dict, state: State, tokens: Array, lengths: Array, kind: str = "prefill",
        tapped: Tapped | None = None, embedded: Embedded | None = None,
    ) -> tuple[Kimi, Array, State, Trace]:  # fmt: skip
        """The model with its weights, and what it makes of new tokens; called per device."""
        model = self.merge(weights)
        step = self.step_info(state.length, lengths, tokens.shape[1], kind)
        step = dataclasses.replace(step, tapped=tapped)
        tokens = jnp.where(step.valid, tokens, 0)
        return model, *model(tokens, state, lengths, step, embedded)

    @functools.cached_property
    def decode_steps(self) -> StatesFunction:
        """Multi-step decode: (weights, state, rows, n) -> what n steps sampled, arrays
        [rows.steps_per_call, B, ...] of which the first n are filled, and the state. Every step
        samples each row's next token and feeds it back where the row is still active. The state
        is consumed.
        """
        if self.walk == "by_group":
            calls = CallsInTurn(self.by_group("decode").decode_steps, self.mesh)
            return StatesFunction(self, calls, donate=1)

        def device_fn(weights: dict, state: State, rows: Rows, n: Array) -> tuple[tuple, State]:
            model = self.merge(weights)

            def step(i: Array, carry: tuple) -> tuple:
                state, rows, sampled = carry
                logits = model.head_logits(state.hidden)
                with jax.named_scope("sample"):
                    latest = sample(logits, rows)
                sampled = jax.tree.map(lambda all, new: all.at[i].set(new), sampled, latest)
                rows = rows.after(*latest[:2])
                tokens = jnp.where(rows.active, latest[0], 0)[:, None]
                lengths = rows.active.astype(jnp.int32)
                info = self.step_info(state.length, lengths, 1, "decode")
                _, state, _ = model(tokens, state, lengths, info)
                return state, rows, sampled

            shapes = jax.eval_shape(lambda: sample(model.head_logits(state.hidden), rows))
            max_steps = rows.steps_per_call
            sampled = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shapes)
            state, _, sampled = jax.lax.fori_loop(0, n, step, (state, rows, sampled))
            return sampled, state

        inputs, outputs = (WEIGHTS, STATE, BY_ROW, REPLICATED), (BY_SECOND, STATE)
        compiled = self.compiled(device_fn, inputs, outputs, "decode", donate=1)
        return StatesFunction(self, compiled, donate=1)

    # Rows of states: moved from prefill rows to decode slots, copied and restored.

    @functools.cached_property
    def move_row(self) -> StatesFunction:
        """(state, row, other, slot) -> `other` with its row `slot` replaced by a row of `state`."""

        def device_fn(state: State, row: Array, other: State, slot: Array) -> State:
            def put(path: tuple, source: Array, target: Array) -> Array:
                name = path[-1].name
                return with_row(name, target, slot, row_of(name, source, row))

            return jax.tree_util.tree_map_with_path(put, state, other)

        inputs = (STATE, REPLICATED, STATE, REPLICATED)
        compiled = self.compiled(device_fn, inputs, STATE, "moves of a row", donate=2)
        return StatesFunction(self, compiled, donate=2)

    def copy_row(self, state: State, row: int, first: int, width: int) -> State:
        """A copy of one row, a `State` whose caches are `width` slots a rank, from position `first`
        on.
        """
        return _row_copier(self, width)(state, row, first)

    @functools.cached_property
    def restore_row(self) -> StatesFunction:
        """(state, row, copy, first) -> the state with a row restored from a copy that `copy_row`
        made at position `first`; the row's cache must hold the positions before `first` already.
        """

        def device_fn(state: State, row: Array, copy: State, first: Array) -> State:
            key_rank = self.key_rank()
            begin = self.stripes.length(first, key_rank)
            end = self.stripes.length(copy.length[0], key_rank)

            def put(path: tuple, array: Array, new: Array) -> Array:
                name = path[-1].name
                if "S" in STATE_DIMS[name]:
                    return with_slots(array, row, begin, end, new)
                return with_row(name, array, row, new)

            copy = dataclasses.replace(copy, max_length=state.max_length)
            return jax.tree_util.tree_map_with_path(put, state, copy)

        inputs = (STATE, REPLICATED, STATE_ROW, REPLICATED)
        compiled = self.compiled(device_fn, inputs, STATE, "restored rows", donate=0)
        return StatesFunction(self, compiled, donate=0)

    def key_rank(self) -> int | Array:
        """This device's rank among those over which cached keys are striped; called per device."""
        return 0 if self.stripes.ranks == 1 else rank(MODEL)

    # Full prompts, without a state that is kept.

    def logits(self, weights: dict, tokens: Array, lengths: Array, *embedded: Embedded) -> Array:
        """Logits [B, T, Z] of full prompts; no state is kept. Not jitted, so that it can be
        differentiated. `embedded`: rows that replace embeddings.
        """

        def device_fn(weights: dict, tokens: Array, lengths: Array, *embedded: Embedded) -> Array:
            state = self._local(tokens)
            model, out, *_ = self.run(weights, state, tokens, lengths, "prefill", None, *embedded)
            return model.head_logits(out)

        inputs = (WEIGHTS, BY_ROW, BY_ROW, BY_ROW)
        return self.shard(device_fn, inputs, BY_ROW)(weights, tokens, lengths, *embedded)

    def mixtures(self, weights: dict, tokens: Array, lengths: Array) -> list[Array]:
        """The weights of all residual mixtures: two a layer, then the output's."""

        def device_fn(weights: dict, tokens: Array, lengths: Array) -> list[Array]:
            mixed = self.run(weights, self._local(tokens), tokens, lengths)[3].mixtures
            if not self.place.slices_rows(tokens.size):
                return mixed
            return [all_gather(weights, 1)[:, : tokens.size] for weights in mixed]

        return self.shard(device_fn, (WEIGHTS, BY_ROW, BY_ROW), BY_SECOND)(weights, tokens, lengths)

    def _local(self, tokens: Array) -> State:
        return self.empty(tokens.shape[0], tokens.shape[1], ranks(MODEL))

    @functools.cached_property
    def jitted_logits(self) -> CompiledFunction | CallsInTurn:
        """`logits`, compiled; where layers are walked by group, it cannot be differentiated."""
        if self.walk == "by_group":
            return CallsInTurn(self._logits_by_group, self.mesh)
        return self.compiled_ahead(self.logits, (WEIGHTS, BY_ROW, BY_ROW, BY_ROW), "logits")

    def _logits_by_group(self, weights: dict, tokens: Any, *more: Any) -> Array:
        parts = self.by_group("prefill")
        state = state_maker(self, *tokens.shape)()
        out, _ = parts.advance(weights, state, tokens, *more)
        return parts.head(out, parts.end_weights(weights))

    @functools.cached_property
    def jitted_mixtures(self) -> CompiledFunction:
        """`mixtures`, compiled."""
        return self.compiled_ahead(self.mixtures, (WEIGHTS, BY_ROW, BY_ROW), "mixtures")


@functools.lru_cache(maxsize=128)
def _row_copier(program: Program, width: int) -> StatesFunction:
    """(state, row, first) -> a copy of one row with `width` slots a rank."""

    def device_fn(state: State, row: Array, first: Array) -> State:
        first = program.stripes.length(first, program.key_rank())

        def copy(path: tuple, array: Array) -> Array:
            name = path[-1].name
            if "S" in STATE_DIMS[name]:
                return slots_of(name, array, row, first, width)
            return row_of(name, array, row)

        return dataclasses.replace(jax.tree_util.tree_map_with_path(copy, state), max_length=0)

    inputs, name = (STATE, REPLICATED, REPLICATED), f"copies of a row, {width} slots"
    return StatesFunction(program, program.compiled(device_fn, inputs, STATE_ROW, name))


@functools.lru_cache(maxsize=128)
def state_maker(program: Program, batch: int, max_length: int) -> CompiledFunction:
    """A compiled function that makes an empty state; cached, so that requests share it."""
    specs = program.state_specs(max_length)
    shardings = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), specs)
    return program.compiled_ahead(
        lambda: program.empty(batch, max_length),
        (),
        f"a state of {batch} x {max_length} tokens",
        out_shardings=shardings,
    )


@functools.lru_cache(maxsize=64)
def _parts_by_group(program: Program, kind: str, tapped: Tapped | None) -> ByGroup:
    return ByGroup(program, kind, tapped)


# Equal arguments give the same program, compiled once.
_shared_program = functools.lru_cache(maxsize=32)(Program)


def default_dtype() -> str:
    """float32 on CPU, where it is fastest; bfloat16 on accelerators."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


_WALK_OF_SCAN = {True: "scanned", False: "unrolled"}


def default_walk(platform: str, layers: int) -> str:
    """How programs walk the layers where the user does not say: by group on accelerators, where a
    scan copies weights; CPUs unroll few layers, which run faster, and scan many, which compile
    faster.
    """
    if platform != "cpu":
        return "by_group"
    return "scanned" if layers >= SCAN_FROM else "unrolled"


def make_program(
    config: Config,
    mesh: Mesh | Any = None,
    placement: Placement | Any = None,
    dtype: DTypeLike | None = None,
    *,
    quantization: Quantization = MXFP4,
    scan: bool | None = None,
    walk: str | None = None,
    implementations: Implementations | None = None,
) -> Program:
    """A decoder's steps on a mesh, checked against the placement, before any weight exists.

    `walk`, one of `WALKS`, says how programs walk the layers (default: `default_walk`); `scan`
    chooses between a scan and one unrolled program.
    """
    try:
        name = default_dtype() if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name}")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype float64 needs 64-bit types: "
            "jax.config.update('jax_enable_x64', True) before loading"
        )
    mesh = as_mesh(mesh)
    placement = as_placement(placement)
    placement.check(config, mesh)
    platform = mesh.devices.flat[0].platform
    if walk is None:
        walk = default_walk(platform, config.layers) if scan is None else _WALK_OF_SCAN[scan]
    if walk not in WALKS or (scan is not None and scan != (walk == "scanned")):
        raise ValueError(f"walk must be one of {', '.join(WALKS)}, got {walk!r} and scan={scan}")
    if implementations is None:
        implementations = fast_on(platform)
    if implementations.blocks is None:
        blocks = block_sizes(platform)
        implementations = dataclasses.replace(implementations, blocks=blocks)
    if placement.keys == "helix" and implementations.mla == "expanded":
        raise NotImplementedError("mla='expanded', the definition, runs on unsharded keys")
    if implementations.transport == "ragged" and platform == "cpu":
        raise NotImplementedError("transport='ragged': CPUs have no ragged_all_to_all")
    return _shared_program(config, mesh, placement, name, walk, quantization, implementations)
