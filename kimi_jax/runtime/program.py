"""The compiled functions of one decoder on one mesh; `make_program` checks and shares them."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from ..config.config import Config
from ..model.decoder import Kimi, declare, new_state, spans
from ..model.mxfp4 import MXFP4, Quantization
from ..model.state import (
    STATE_DIMS,
    STATE_ROLES,
    Forms,
    State,
    Step,
    row_of,
    slots_of,
    with_row,
    with_slots,
)
from ..parallel.collectives import all_gather, rank, ranks
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, MODEL, as_mesh, mesh_sizes, sizes_text
from ..parallel.placement import Placement, as_placement
from ..parallel.roles import Role
from .fitting import device_memory, refuse_what_exceeds
from .memory import DTYPES, Plan, plan
from .on_mesh import within
from .rows import Rows
from .sampling import sample
from .state_files import save_state

SCAN_FROM = 24  # layers from which a scan pays on CPU too: unrolled runs faster, compiles slower


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps of one decoder on one mesh, as pure functions of weights; hashable, so programs are
    shared.
    """

    config: Config
    mesh: Mesh
    place: Placement
    dtype: str
    scan: bool
    quantization: Quantization
    forms: Forms

    @functools.cached_property
    def declared(self) -> Kimi:
        """The module with its weights declared, none allocated."""
        return Kimi(self.config, self.dtype, self.stacks, quantization=self.quantization)

    @property
    def stacks(self) -> tuple:
        """Spans of the layers, in order."""
        return spans(self.config, self.scan)

    @functools.cached_property
    def weight_specs(self) -> dict[tuple, PartitionSpec]:
        """The mesh axes of every weight, by path."""
        return {w.path: self.place.spec(w.roles) for w in declare(self.declared)}

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The ranks of both mesh axes."""
        return mesh_sizes(self.mesh)

    @functools.cached_property
    def weight_shapes(self) -> dict[tuple, jax.ShapeDtypeStruct]:
        """Shape, type and sharding of every weight, by path: what a step is compiled for."""
        return {
            w.path: jax.ShapeDtypeStruct(
                w.placed(self.place, self.sizes),
                w.dtype,
                sharding=NamedSharding(self.mesh, self.weight_specs[w.path]),
            )
            for w in declare(self.declared)
        }

    @property
    def stripes(self) -> Stripes:
        """Where cached keys live."""
        return self.place.stripes(self.sizes)

    def empty(self, B: int, S: int, ranks: int = 1) -> State:
        """An empty state of B rows for S tokens each: of the mesh, or of one of its model ranks."""
        n = self.stripes.ranks
        H = self.place.padded(Role.HEADS, self.config.kda_heads, self.sizes)
        slots = self.stripes.slots(S) * (n // ranks if n > 1 else 1)
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        state = new_state(self.config, self.dtype, self.stacks, B, slots, H // ranks, on_cpu)
        return dataclasses.replace(state, max_length=S)

    def state_shapes(self, B: int, S: int) -> State:
        """`empty` as shapes with their shardings."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            jax.eval_shape(lambda: self.empty(B, S)),
            self.state_specs(S),
        )

    def other_states_than(self, other: "Program") -> list[str]:
        """In what the states of this program differ from those of another, in words."""
        if self is other:
            return []
        mine, theirs = self.place, other.place
        problems = differences(vars(self.config), vars(other.config))
        if self.dtype != other.dtype:
            problems.append(f"the state is {self.dtype}, the model {other.dtype}")
        moved = []
        if self.mesh != other.mesh:
            moved.append(f"lives on another mesh than this model: {sizes_text(self.sizes)}")
        if mine.keys != theirs.keys:
            moved.append(f"has {mine.keys} keys, the model {theirs.keys} keys")
        elif self.stripes != other.stripes:
            moved.append(
                f"has helix_block {mine.helix_block}, the model helix_block {theirs.helix_block}"
            )
        if self.stacks != other.stacks:
            moved.append(f"has layers grouped by scan={self.scan}, the model by {other.scan}")
        hint = f": kimi_jax.move(state, placement, mesh, scan={other.scan}) brings it over"
        return [*problems, *(f"the state {what}{hint}" for what in moved)]

    def refuse_what_exceeds(self, batch: int, context: int) -> None:
        """Raise `PlacementError`, with the plan, where a device cannot hold the weights and such a
        state.
        """
        refuse_what_exceeds(self.plan(batch, context), device_memory(self.mesh))

    def plan(self, batch: int, context: int) -> Plan:
        """What each device holds with a state of such size."""
        return plan(
            self.config, self.mesh, self.place,
            batch=batch, context=context, dtype=self.dtype, 
            packed=self.quantization is MXFP4,
        )  # fmt: skip

    def save(self, state: State, path: str | os.PathLike) -> None:
        """Write a state of this program to a new folder."""
        save_state(state, path)

    def state_specs(self, S: int = 1) -> Any:
        """The mesh axes of every array of a state for S tokens, by name."""
        shapes = dataclasses.replace(jax.eval_shape(lambda: self.empty(1, 1)), max_length=S)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self.place.spec(STATE_ROLES[path[-1].name]), shapes
        )

    def advance(
        self, weights: dict, state: State, tokens: Any, lengths: Any
    ) -> tuple[Array, State]:
        """`step` for a state as users hold it."""
        step = within(self.mesh, self.step)
        logits, following = step(weights, state.bare(), tokens, lengths)
        return logits, dataclasses.replace(following, batch=state.batch, home=self)

    def _merge(self, weights: dict[tuple, Array]) -> Kimi:
        graph, params = nnx.split(self.declared)
        flat = {path: param.replace(weights[path]) for path, param in nnx.to_flat_state(params)}
        return nnx.merge(graph, nnx.from_flat_state(flat))

    def _run(
        self, weights: dict, state: State, tokens: Array, lengths: Array
    ) -> tuple[Kimi, Array, State, list]:
        model = self._merge(weights)
        T = tokens.shape[1]
        step = Step.of(state.length, lengths, T, self.forms, self.place, self.sizes)
        tokens = jnp.where(step.valid, tokens, 0)
        return model, *model(tokens, state, lengths, step)

    def _shard(self, step: Callable, inputs: tuple, outputs: Any) -> Callable:
        return self._on_mesh(step, (self.weight_specs, *inputs), outputs)

    def _on_mesh(self, step: Callable, inputs: tuple, outputs: Any) -> Callable:
        return jax.shard_map(
            step, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )

    @functools.cached_property
    def step(self) -> Callable:
        """(weights, state, tokens [B, T], lengths [B]) -> logits [B, Z] after each row's last
        token, state.
        """

        def one(weights: dict, state: State, tokens: Array, lengths: Array) -> tuple[Array, State]:
            model, _, state, _ = self._run(weights, state, tokens, lengths)
            return model.head_logits(state.hidden), state

        rows = PartitionSpec(DATA)

        # A state's slot count is part of its tree, and so of its specs: they are made where it is
        # known.
        def whole(
            weights: dict, state: State, tokens: Array, lengths: Array
        ) -> tuple[Array, State]:
            specs = self.state_specs(state.max_length)
            return self._shard(one, (specs, rows, rows), (rows, specs))(
                weights, state, tokens, lengths
            )

        return jax.jit(whole, donate_argnums=1)

    @functools.cached_property
    def trip(self) -> Callable:
        """(weights, state, rows, n) -> what n steps sampled, [n of rows.steps_per_call, B] each,
        and the state: every step samples a token of each row, and brings it where the row goes on.
        """

        def one(weights: dict, state: State, rows: Rows, n: Array) -> tuple[tuple, State]:
            model = self._merge(weights)

            def step(i: Array, carry: tuple) -> tuple:
                state, rows, made = carry
                logits = model.head_logits(state.hidden)
                with jax.named_scope("sample"):
                    chosen = sample(logits, rows)
                made = jax.tree.map(lambda all, new: all.at[i].set(new), made, chosen)
                rows = rows.after(*chosen[:2])
                tokens = jnp.where(rows.active, chosen[0], 0)[:, None]
                lengths = rows.active.astype(jnp.int32)
                step = Step.of(state.length, lengths, 1, self.forms, self.place, self.sizes)
                _, state, _ = model(tokens, state, lengths, step)
                return state, rows, made

            shapes = jax.eval_shape(lambda: sample(model.head_logits(state.hidden), rows))
            most = rows.steps_per_call
            made = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)
            state, _, made = jax.lax.fori_loop(0, n, step, (state, rows, made))
            return made, state

        by_row = PartitionSpec(DATA)

        def whole(weights: dict, state: State, rows: Rows, n: Array) -> tuple[tuple, State]:
            specs = self.state_specs(state.max_length)
            inputs = (specs, by_row, PartitionSpec())
            outputs = ((PartitionSpec(None, DATA),) * 5, specs)
            return self._shard(one, inputs, outputs)(weights, state, rows, n)

        compiled = within(self.mesh, jax.jit(whole, donate_argnums=1))

        def run(weights: dict, state: State, rows: Rows, n: int) -> tuple[tuple, State]:
            made, following = compiled(weights, state.bare(), rows, np.int32(n))
            return made, dataclasses.replace(following, batch=state.batch, home=self)

        return run

    @functools.cached_property
    def transfer(self) -> Callable:
        """(state, row, other, slot) -> the other state with one row of the first one in a slot."""

        def one(state: State, row: Array, other: State, slot: Array) -> State:
            def put(path: tuple, source: Array, target: Array) -> Array:
                name = path[-1].name
                return with_row(name, target, slot, row_of(name, source, row))

            return jax.tree_util.tree_map_with_path(put, state, other)

        def whole(state: State, row: Array, other: State, slot: Array) -> State:
            specs = self.state_specs(state.max_length)
            inputs = (specs, PartitionSpec(), specs, PartitionSpec())
            return self._on_mesh(one, inputs, specs)(state, row, other, slot)

        compiled = within(self.mesh, jax.jit(whole, donate_argnums=2))

        def run(state: State, row: int, other: State, slot: int) -> State:
            moved = compiled(state.bare(), np.int32(row), other.bare(), np.int32(slot))
            return dataclasses.replace(moved, batch=other.batch, home=self)

        return run

    @functools.cached_property
    def take(self) -> Callable:
        """(state, row, first, width) -> a copy of one row, a `State` whose caches are `width` slots
        a rank, from position `first` on.
        """

        def one(width: int, state: State, row: Array, first: Array) -> State:
            first = self.stripes.length(first, self._key_rank())

            def of(path: tuple, array: Array) -> Array:
                name = path[-1].name
                if "S" in STATE_DIMS[name]:
                    return slots_of(name, array, row, first, width)
                return row_of(name, array, row)

            return dataclasses.replace(jax.tree_util.tree_map_with_path(of, state), max_length=0)

        def whole(state: State, row: Array, first: Array, width: int) -> State:
            specs = self.state_specs(state.max_length)
            inputs = (specs, PartitionSpec(), PartitionSpec())
            step = functools.partial(one, width)
            return self._on_mesh(step, inputs, self.row_specs())(state, row, first)

        compiled = within(self.mesh, jax.jit(whole, static_argnums=3))
        return lambda state, row, first, width: compiled(
            state.bare(), np.int32(row), np.int32(first), width
        )

    @functools.cached_property
    def put(self) -> Callable:
        """(state, row, copy, first) -> the state with a row as it was when `take` copied it, of
        which the positions before `first` must be there already.
        """

        def one(state: State, row: Array, copy: State, first: Array) -> State:
            me = self._key_rank()
            begin, end = (self.stripes.length(at, me) for at in (first, copy.length[0]))

            def into(path: tuple, array: Array, new: Array) -> Array:
                name = path[-1].name
                if "S" in STATE_DIMS[name]:
                    return with_slots(array, row, begin, end, new)
                return with_row(name, array, row, new)

            copy = dataclasses.replace(copy, max_length=state.max_length)
            return jax.tree_util.tree_map_with_path(into, state, copy)

        def whole(state: State, row: Array, copy: State, first: Array) -> State:
            specs = self.state_specs(state.max_length)
            inputs = (specs, PartitionSpec(), self.row_specs(), PartitionSpec())
            return self._on_mesh(one, inputs, specs)(state, row, copy, first)

        compiled = within(self.mesh, jax.jit(whole, donate_argnums=0))

        def run(state: State, row: int, copy: State, first: int) -> State:
            following = compiled(state.bare(), np.int32(row), copy, np.int32(first))
            return dataclasses.replace(following, batch=state.batch, home=self)

        return run

    def _key_rank(self) -> int | Array:
        return 0 if self.stripes.ranks == 1 else rank(MODEL)

    def row_specs(self) -> Any:
        """The mesh axes of a row that `take` copied: every data rank has it."""
        return jax.tree.map(
            lambda spec: PartitionSpec(*(None if axis == DATA else axis for axis in spec)),
            self.state_specs(0),
        )

    def row_bytes(self, width: int) -> int:
        """What a row that `take` copied with so many slots takes of each device."""

        def of(path: tuple, x: Any, spec: PartitionSpec) -> int:
            slots = width * self.stripes.ranks
            dims = zip(STATE_DIMS[path[-1].name], x.shape, strict=True)
            shape = [slots if dim == "S" else size for dim, size in dims]
            local = NamedSharding(self.mesh, spec).shard_shape(tuple(shape))
            return math.prod(local) * x.dtype.itemsize

        shapes = dataclasses.replace(jax.eval_shape(lambda: self.empty(1, 1)), max_length=0)
        return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(of, shapes, self.row_specs())))

    def logits(self, weights: dict, tokens: Array, lengths: Array) -> Array:
        """Logits [B, T, Z] of whole prompts, nothing kept; not jitted, so that it can be
        differentiated.
        """

        def one(weights: dict, tokens: Array, lengths: Array) -> Array:
            model, out, _, _ = self._run(weights, self._local(tokens), tokens, lengths)
            return model.head_logits(out)

        rows = PartitionSpec(DATA)
        return self._shard(one, (rows, rows), rows)(weights, tokens, lengths)

    def mixtures(self, weights: dict, tokens: Array, lengths: Array) -> list[Array]:
        """The weights of every residual mixture, attention's and the MLP's layer by layer, then the
        output's.
        """

        def one(weights: dict, tokens: Array, lengths: Array) -> list[Array]:
            mixed = self._run(weights, self._local(tokens), tokens, lengths)[3]
            if not self.place.slices_rows(tokens.size):
                return mixed
            return [all_gather(one, 1)[:, : tokens.size] for one in mixed]

        rows = PartitionSpec(DATA)
        return self._shard(one, (rows, rows), PartitionSpec(None, DATA))(weights, tokens, lengths)

    def _local(self, tokens: Array) -> State:
        return self.empty(tokens.shape[0], tokens.shape[1], ranks(MODEL))

    @functools.cached_property
    def jitted_logits(self) -> Callable:
        """`logits`, compiled."""
        return within(self.mesh, jax.jit(self.logits))

    @functools.cached_property
    def jitted_mixtures(self) -> Callable:
        """`mixtures`, compiled."""
        return within(self.mesh, jax.jit(self.mixtures))


@functools.lru_cache(maxsize=128)
def state_maker(program: Program, batch: int, max_length: int) -> Callable[[], State]:
    """A compiled maker of empty states, kept: a request should not compile one anew."""
    specs = program.state_specs(max_length)
    shardings = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), specs)
    made = jax.jit(lambda: program.empty(batch, max_length), out_shardings=shardings)
    return within(program.mesh, made)


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The sizes and switches of a state's model that another does not share, or does not know; the
    ids of marks (begin, end, padding) do not count.
    """
    names = [name for name in {**theirs, **mine} if name not in ("bos", "eos", "pad")]
    return [
        f"the state is of a model with {name} {mine.get(name)!r}, not {theirs.get(name)!r}"
        for name in names
        if mine.get(name) != theirs.get(name)
    ]


_shared_program = functools.lru_cache(maxsize=32)(Program)  # equal programs are one, compiled once


def default_dtype() -> str:
    """float32 on CPU, where it is fastest; bfloat16 on accelerators."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def make_program(
    config: Config,
    mesh: Mesh | Any = None,
    placement: Placement | Any = None,
    dtype: DTypeLike | None = None,
    *,
    quantization: Quantization = MXFP4,
    scan: bool | None = None,
    forms: Forms | None = None,
) -> Program:
    """A decoder's steps on a mesh, checked against the placement, before any weight exists."""
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
    if scan is None:
        scan = platform != "cpu" or config.layers >= SCAN_FROM
    if forms is None:
        forms = Forms(transport="padded" if platform == "cpu" else "ragged")
    if placement.keys == "helix" and forms.mla == "expanded":
        raise NotImplementedError("Forms.mla='expanded', the definition, runs on whole keys")
    if forms.transport == "ragged" and platform == "cpu":
        raise NotImplementedError("Forms.transport='ragged': CPUs have no ragged_all_to_all")
    return _shared_program(config, mesh, placement, name, scan, quantization, forms)
