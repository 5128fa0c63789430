"""Moving a decoding state to another mesh and placement, through host memory or a saved folder: the
same numbers bit for bit, resharded.

Separate meshes for prefill and decode need this, and so does a conversation that is saved.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ..errors import PlacementError, RequestError
from ..model.declared import holders
from ..model.decoder import Span, spans
from ..model.state import STATE_DIMS, State, home_of
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, mesh_sizes
from ..parallel.on_mesh import own_mesh
from ..parallel.placement import Placement
from ..parallel.processes import agree, settle, to_host, together
from .fitting import device_memory
from .model_on_mesh import differences
from .program import Program, make_program
from .runner import Runner
from .state_files import (
    Description,
    array_key,
    config_table,
    read_arrays,
    read_description,
    state_folder,
)

Fetch = Callable[[int, str], np.ndarray]  # (layer, name) -> that array on the host, all rows of it
Slice = tuple[tuple[int, int], ...]  # (start, stop) in each dim


def move(
    state: State,
    placement: Placement | Any,
    mesh: Mesh | Any = None,
    *,
    scan: bool | None = None,
) -> State:
    """The same state for a model of this placement on this mesh (default: the state's mesh). Latent
    rows and index keys are striped as the placement says; recurrent states and the conv states of
    q, k and v are sharded by heads. `scan` groups layers as a model loaded with it does (default:
    unchanged).

    Every number stays what it is, bit for bit. The state given is only read. It travels through
    host memory, a layer at a time. With several processes each must call this with its shards of
    the same state; all get the new one, or none. Raises `RequestError` for what is not a state, and
    what `Placement.check` raises.
    """

    def make_target() -> Program:
        home = home_of(state)
        target = make_program(
            home.config, home.mesh if mesh is None else mesh, placement, home.dtype,
            quantization=home.quantization, scan=home.scan if scan is None else scan,
        )  # fmt: skip
        _check_memory(target, state.batch, state.max_length)
        return target

    target = together("moving the state", make_target)
    agree("the state to move", state.max_length, state.batch, target.place, target.sizes)
    home = home_of(state)
    where = _positions_of_layers(spans(home.config, home.scan))
    arrays = state.named()

    def fetch(layer: int, name: str) -> np.ndarray:
        if name in ("length", "hidden"):
            return to_host(getattr(state, name))
        stack, position, group = where[layer]
        with own_mesh(home.mesh):
            return to_host(arrays[stack, position, name][group])

    source = home.place.stripes(mesh_sizes(home.mesh))
    return Resharding(fetch, source, target, state.batch, state.max_length).run()


def load_state(path: str | os.PathLike, model: Runner) -> State:
    """A saved state for a model on any mesh and placement, resharded as `move` does.

    Raises `RequestError` where the folder holds no state, a state of another model or type, or a
    state whose description and arrays contradict each other: every size that differs is named,
    before an array is read.
    """
    folder = together("reading the state", lambda: state_folder(path))

    def describe() -> Description:
        about = read_description(folder)
        _check_model(str(folder), about, model)
        _check_memory(model.program, about.batch, about.max_length)
        return about

    about = together("reading the state", describe)
    agree("the saved state", about)  # before Orbax reads, which waits for all processes
    arrays = together("reading the state", lambda: read_arrays(folder, about, model.config))
    where = _positions_of_layers(spans(model.config, about.scan))

    def fetch(layer: int, name: str) -> np.ndarray:
        if name in ("length", "hidden"):
            return arrays[name]
        stack, position, group = where[layer]
        return arrays[array_key(stack, position, name)][group]

    source = about.place.stripes(about.sizes)
    return Resharding(fetch, source, model.program, about.batch, about.max_length).run()


def _check_model(folder: str, about: Description, model: Runner) -> None:
    """Refuse a saved state that is not of this model."""
    problems = differences(about.config, config_table(model.config))
    if about.dtype != model.dtype:
        problems.append(f"the state is {about.dtype}, the model {model.dtype}")
    longest = model.config.max_positions
    if not problems and about.max_length > longest:
        problems.append(f"max_length {about.max_length} is over the model's context of {longest}")
    if not problems:
        try:
            about.place.check(model.config, about.sizes)
        except PlacementError as error:
            problems.append(f"its placement does not fit its mesh: {error}")
    if problems:
        raise RequestError("\n".join([f"{folder}:", *problems]))


def _check_memory(target: Program, batch: int, max_length: int) -> None:
    memory = device_memory(target.mesh)
    nbytes = target.plan(batch, max_length).state_bytes
    if memory is not None and nbytes > memory:
        raise PlacementError(f"the state takes {nbytes:,} bytes a device there, of {memory:,}")


def _positions_of_layers(stacks: Sequence[Span]) -> dict[int, tuple[int, int, int]]:
    """Layer -> its stack, its position in the stack's period, and its group."""
    return {
        span.layer(position, group): (stack, position, group)
        for stack, span in enumerate(stacks)
        for position in range(span.period)
        for group in range(span.groups)
    }


@dataclasses.dataclass
class Resharding:
    """Copies the arrays of a source state to the devices of a target.

    Where a copy fails on this process, the remaining arrays are still fetched, so that no other
    process waits for a shard of them; the first error is kept and raised on all at the end.
    """

    fetch: Fetch
    source: Stripes  # where the source keeps the key of each position
    target: Program
    batch: int
    max_length: int
    error: Exception | None = None

    def run(self) -> State:
        """The state of the target, on all processes or on none."""
        data = self.target.sizes[DATA]
        rows = -(-self.batch // data) * data
        shapes = self.target.state_shapes(rows, self.max_length)
        layers = [
            [self._layer(layer, span, position) for position, layer in enumerate(stack)]
            for span, stack in zip(self.target.stacks, shapes.layers, strict=True)
        ]
        length = self._array([-1], "length", shapes.length)
        hidden = self._array([-1], "hidden", shapes.hidden)
        error, self.error = self.error, None
        settle("resharding the state", error)
        return State(layers, length, hidden, self.max_length, self.batch, self.target)

    def _layer(self, shapes: Any, span: Span, position: int) -> Any:
        """The state of the layers at one position of a span's period, stacked by group."""
        layers = [span.layer(position, group) for group in range(span.groups)]
        fields = {field.name: getattr(shapes, field.name) for field in dataclasses.fields(shapes)}
        arrays = {
            name: self._array(layers, name, shape)
            for name, shape in fields.items()
            if shape is not None
        }
        return dataclasses.replace(shapes, **arrays)

    def _array(self, layers: Sequence[int], name: str, shape: jax.ShapeDtypeStruct) -> Any:
        """An array of the target on its devices, with a group for each of `layers`."""
        devices = holders(shape.shape, shape.sharding)
        shards = {
            index: np.zeros([stop - start for start, stop in index], shape.dtype)
            for index in devices
        }
        for group, layer in enumerate(layers):
            full = self.fetch(layer, name)
            self._guarded(
                lambda full=full, group=group: self._fill(shards, full, name, shape, group)
            )
        return self._guarded(lambda: _on_devices(shards, devices, shape))

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """What `action` returns; None once an action has failed, whose error is kept."""
        if self.error is None:
            try:
                return action()
            except Exception as error:
                self.error = error
        return None

    def _fill(
        self,
        shards: dict[Slice, np.ndarray],
        full: np.ndarray,
        name: str,
        shape: jax.ShapeDtypeStruct,
        group: int,
    ) -> None:
        """Copy one group of a full source array into the shards of this process."""
        grouped = STATE_DIMS[name][0] == "G"
        dims = STATE_DIMS[name][grouped:]
        sizes = shape.shape[grouped:]
        full = full.view(shape.dtype)  # bfloat16 may be stored as its bits
        indices = [self._source_index(*dim) for dim in zip(dims, sizes, full.shape, strict=True)]
        for index, shard in shards.items():
            local = [
                source[start:stop]
                for source, (start, stop) in zip(indices, index[grouped:], strict=True)
            ]
            copy_indices(shard[group] if grouped else shard, full, local)

    def _source_index(self, dim: str, size: int, source_size: int) -> np.ndarray:
        """For each index of a dim of the target its index in the source, -1 where zero-padded."""
        index = np.arange(size)
        config = self.target.config
        if dim == "B":
            return np.where(index < self.batch, index, -1)
        if dim[0] == "H":
            width = {"H": 1, "HK": config.kda_key_dim, "HV": config.kda_value_dim}[dim]
            return np.where(index < config.kda_heads * width, index, -1)
        if dim != "S":
            return index
        slots = size // self.target.stripes.ranks
        positions = self.target.stripes.position(index % slots, index // slots)
        first = self.source.owner(positions) * (source_size // self.source.ranks)
        return np.where(positions < self.max_length, first + self.source.slot(positions), -1)


def _on_devices(
    shards: dict[Slice, np.ndarray], devices: dict[Slice, list], shape: jax.ShapeDtypeStruct
) -> Array:
    pairs = ((shards[index], device) for index, held in devices.items() for device in held)
    arrays = [jax.device_put(shard, device) for shard, device in pairs]
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, arrays)


def copy_indices(target: np.ndarray, source: np.ndarray, indices: Sequence[np.ndarray]) -> None:
    """target[i, j, ...] = source[indices[0][i], indices[1][j], ...] where none of these is -1."""
    filled = [np.flatnonzero(index >= 0) for index in indices]
    for axis, (index, places) in enumerate(zip(indices, filled, strict=True)):
        source = np.take(source, index[places], axis)
    target[np.ix_(*filled)] = source
