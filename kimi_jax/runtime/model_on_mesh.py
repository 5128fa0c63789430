"""A model on a mesh before any array exists: shapes and shardings of its weights and states, and
how a per-device function becomes one of global arrays.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..compilation.function import CompiledFunction
from ..config.config import Config
from ..config.vision import VisionConfig
from ..model.declared import declare
from ..model.decoder import Kimi, new_state, spans
from ..model.implementations import Implementations
from ..model.mxfp4 import MXFP4, Quantization
from ..model.state import STATE_DIMS, STATE_ROLES, State
from ..model.step import Step
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, mesh_sizes, sizes_text
from ..parallel.on_mesh import within
from ..parallel.placement import Placement
from ..parallel.roles import Role
from .fitting import device_memory, refuse_what_exceeds
from .memory import Plan, plan
from .state_files import save_state

# How programs walk the layers: one program of all of them in turn; a scan over stacks of equal
# groups; or a program of each kind of group, called in turn (`by_group`).
WALKS = ("unrolled", "scanned", "by_group")

# How an argument or a result of a per-device function is sharded: a `PartitionSpec` or one of these
# names of many specs.
WEIGHTS = "weights"
STATE = "state"  # of the requests, rows split over `data`
STATE_ROW = "state row"  # a copy of one row, on every data rank
BY_ROW = PartitionSpec(DATA)
BY_SECOND = PartitionSpec(None, DATA)  # arrays [..., B, ...] whose second dim is the rows
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class ModelOnMesh:
    """A decoder's config, mesh, placement and types; hashable, so that programs are shared."""

    config: Config
    mesh: Mesh
    place: Placement
    dtype: str
    walk: str  # over the layers: one of WALKS
    quantization: Quantization
    implementations: Implementations

    @functools.cached_property
    def declared(self) -> Kimi:
        """The module with its weights declared, none allocated."""
        return Kimi(self.config, self.dtype, self.stacks, quantization=self.quantization)

    @property
    def scan(self) -> bool:
        """Whether equal groups of layers are stacked and scanned; else each layer is held apart."""
        return self.walk == "scanned"

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

    def step_info(self, start: Array, lengths: Array, T: int, kind: str = "prefill") -> Step:
        """What the layers of a step are told, per device."""
        return Step.of(start, lengths, T, self.implementations, self.place, self.sizes, kind)

    @property
    def stripes(self) -> Stripes:
        """Where cached keys live."""
        return self.place.stripes(self.sizes)

    def padded_rows(self, batch: int) -> int:
        """The size of a batch padded with inactive rows to a multiple of the data ranks."""
        return -(-batch // self.sizes[DATA]) * self.sizes[DATA]

    def empty(self, B: int, S: int, ranks: int = 1) -> State:
        """An empty state of B rows for S tokens each: global, or with `ranks` model ranks the shard
        of one of them.
        """
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

    def other_states_than(self, other: "ModelOnMesh") -> list[str]:
        """How states of this program differ from those of another, a line for each difference."""
        if self is other:
            return []
        state_place = self.place
        model_place = other.place
        problems = differences(vars(self.config), vars(other.config))
        if self.dtype != other.dtype:
            problems.append(f"the state is {self.dtype}, the model {other.dtype}")
        moved = []
        if self.mesh != other.mesh:
            moved.append(f"lives on another mesh than this model: {sizes_text(self.sizes)}")
        if state_place.keys != model_place.keys:
            moved.append(f"has {state_place.keys} keys, the model {model_place.keys} keys")
        elif self.stripes != other.stripes:
            moved.append(
                f"has helix_block {state_place.helix_block}, "
                f"the model helix_block {model_place.helix_block}"
            )
        if self.stacks != other.stacks:
            moved.append(f"has layers grouped by scan={self.scan}, the model by {other.scan}")
        hint = f": kimi_jax.move(state, placement, mesh, scan={other.scan}) brings it over"
        return [*problems, *(f"the state {what}{hint}" for what in moved)]

    def refuse_what_exceeds(
        self, batch: int, context: int, vision: VisionConfig | None = None
    ) -> None:
        """Raise `PlacementError`, with the plan, where a device cannot hold weights and state."""
        refuse_what_exceeds(self.plan(batch, context, vision), device_memory(self.mesh))

    def plan(self, batch: int, context: int, vision: VisionConfig | None = None) -> Plan:
        """The bytes that each device holds with a state of this batch and context."""
        sizes = {"batch": batch, "context": context, "packed": self.quantization is MXFP4}
        return plan(self.config, self.mesh, self.place, **sizes, dtype=self.dtype, vision=vision)

    def save(self, state: State, path: str | os.PathLike) -> None:
        """Write a state of this program to a new folder."""
        save_state(state, path)

    def state_specs(self, S: int = 1) -> Any:
        """The mesh axes of every array of a state for S tokens, by name."""
        shapes = dataclasses.replace(jax.eval_shape(lambda: self.empty(1, 1)), max_length=S)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self.place.spec(STATE_ROLES[path[-1].name]), shapes
        )

    def row_specs(self) -> Any:
        """The mesh axes of a row that `copy_row` copied: replicated over data ranks."""
        return jax.tree.map(
            lambda spec: PartitionSpec(*(None if axis == DATA else axis for axis in spec)),
            self.state_specs(0),
        )

    def row_bytes(self, width: int) -> int:
        """Bytes on each device of a row that `copy_row` copied with `width` slots a rank."""

        def of(path: tuple, x: Any, spec: PartitionSpec) -> int:
            slots = width * self.stripes.ranks
            dims = zip(STATE_DIMS[path[-1].name], x.shape, strict=True)
            shape = [slots if dim == "S" else size for dim, size in dims]
            local = NamedSharding(self.mesh, spec).shard_shape(tuple(shape))
            return math.prod(local) * x.dtype.itemsize

        shapes = dataclasses.replace(jax.eval_shape(lambda: self.empty(1, 1)), max_length=0)
        return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(of, shapes, self.row_specs())))

    def shard(self, device_fn: Callable, inputs: Sequence[Any], outputs: Any) -> Callable:
        """`device_fn`, written for one device, as a function of global arrays on the mesh.

        `inputs` and `outputs` (a spec, or a tuple of specs) say how each argument and result is
        sharded; the last inputs may be left out of a call. The slots of a state are part of its
        tree and so of its specs: these are made for the first state among the arguments.
        """

        def global_fn(*arguments: Any) -> Any:
            lengths = [x.max_length for x in arguments if isinstance(x, State)]
            specs = lambda kind: self.specs(kind, lengths[0] if lengths else 0)  # noqa: E731
            out = tuple(map(specs, outputs)) if type(outputs) is tuple else specs(outputs)
            return jax.shard_map(
                device_fn,
                mesh=self.mesh,
                in_specs=tuple(map(specs, inputs[: len(arguments)])),
                out_specs=out,
                check_vma=False,
            )(*arguments)

        return global_fn

    def compiled(
        self,
        device_fn: Callable,
        inputs: Sequence[Any],
        outputs: Any,
        name: str,
        donate: int | None = None,
        beside: Any = None,
    ) -> CompiledFunction:
        """`shard`, compiled; `name` identifies it, with what it depends on `beside` the program."""
        function = self.shard(device_fn, inputs, outputs)
        return self.compiled_ahead(function, inputs, name, beside, donate_argnums=donate)

    def compiled_ahead(
        self, function: Callable, inputs: Sequence[Any], name: str, beside: Any = None,
        **options: Any,
    ) -> CompiledFunction:  # fmt: skip
        """`jax.jit` of a function of global arrays; other arguments as in `compiled`."""
        fixed = 1 if WEIGHTS in inputs[:1] else 0
        abstract = functools.partial(_abstract, self, inputs)
        identity = _identity(self, beside)
        return CompiledFunction(function, name, identity, self.mesh, abstract, fixed, **options)

    def specs(self, kind: Any, max_length: int) -> Any:
        """The mesh axes of an argument or result of a kind, a tree for weights and states."""
        if kind is WEIGHTS:
            return self.weight_specs
        if kind is STATE:
            return self.state_specs(max_length)
        return self.row_specs() if kind is STATE_ROW else kind


def _identity(program: ModelOnMesh, beside: Any) -> str:
    """All that the programs of a model depend on, but for its devices and its functions."""
    parts = (beside, program.config, program.sizes, program.place, program.dtype, program.walk)
    return repr((*parts, program.quantization.name, program.implementations))


def _abstract(program: ModelOnMesh, inputs: Sequence[Any], *arguments: Any) -> tuple:
    """Shapes, types and shardings of arguments: what a function of `inputs` is compiled for."""
    lengths = [x.max_length for x in arguments if isinstance(x, State)]

    def of(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(program.mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return tuple(
        program.weight_shapes
        if kind is WEIGHTS
        else jax.tree.map(of, program.specs(kind, lengths[0] if lengths else 0), argument)
        for kind, argument in zip(inputs[: len(arguments)], arguments, strict=True)
    )


class CallsInTurn:
    """A function that calls compiled ones, to be used like a `CompiledFunction`."""

    def __init__(self, function: Callable, mesh: Mesh):
        self._call = within(mesh, function)

    def __call__(self, *arguments: Any) -> Any:
        """Run the function."""
        return self._call(*arguments)

    def prepare(self, *arguments: Any) -> None:
        """Nothing: its programs are compiled, or read from JAX's cache, when they are called."""


class StatesFunction:
    """A function that `ModelOnMesh.compiled` compiled, for states as users hold them: a state among
    the results has the batch size of the donated argument.
    """

    def __init__(
        self,
        program: ModelOnMesh,
        function: CompiledFunction | CallsInTurn,
        donate: int | None = None,
    ):
        self._program, self._function, self._donate = program, function, donate

    def __call__(self, *arguments: Any) -> Any:
        """Run the function; states among the results are as users hold them."""
        results = self._function(*map(_argument, arguments))
        if self._donate is None:
            return results
        batch = arguments[self._donate].batch
        if isinstance(results, State):
            return self._with_home(results, batch)
        return tuple(self._with_home(x, batch) if isinstance(x, State) else x for x in results)

    def prepare(self, *arguments: Any) -> None:
        """Compile for these arguments, or for arrays of their shapes, in the background."""
        self._function.prepare(*map(_argument, arguments))

    def _with_home(self, state: State, batch: int) -> State:
        return dataclasses.replace(state, batch=batch, home=self._program)


def merged(declared: nnx.Module, weights: dict[tuple, Array]) -> Any:
    """A declared module with these arrays, local or global, as its weights by path."""
    graph, params = nnx.split(declared)
    flat = {path: param.replace(weights[path]) for path, param in nnx.to_flat_state(params)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def differences(state_config: dict[str, Any], model_config: dict[str, Any]) -> list[str]:
    """A line for each config value of a state's model that differs in another model; special token
    ids (begin, end, padding) are ignored.
    """
    names = [n for n in {**model_config, **state_config} if n not in ("bos", "eos", "pad")]
    values = [(name, state_config.get(name), model_config.get(name)) for name in names]
    return [
        f"the state is of a model with {name} {state_value!r}, not {model_value!r}"
        for name, state_value, model_value in values
        if state_value != model_value
    ]


def _argument(value: Any) -> Any:
    """An argument of a compiled function: a state without its home, an int as int32."""
    if isinstance(value, State):
        return value.bare()
    return np.int32(value) if isinstance(value, int) else value
