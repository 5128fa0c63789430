"""Decoding state from one placement and mesh to another, in memory or through a file: the same
numbers, laid out anew.

Separate machines for prefill and decode need this, and so does a conversation that is put aside.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ..config.config import Config
from ..errors import PlacementError, RequestError
from ..model.decoder import Span, holders
from ..model.state import STATE_DIMS, State
from ..parallel.collectives import DATA
from ..parallel.helix import Stripes
from ..parallel.placement import Placement, agree, mesh_sizes, settle, to_host, together
from .memory import device_memory, plan
from .program import Program, differences, make_program
from .runner import Model, refuse_what_is_no_state

FORMAT = 1
Fetch = Callable[[int, str], np.ndarray]  # (layer, name) -> an array of it, all rows, on the host


def move(
    state: State, placement: Placement, mesh: Mesh | None = None, *, scan: bool | None = None
) -> State:
    """The same state for a model of this placement on this mesh (default: its own): latent rows and
    index keys striped anew, KDA memories and the three parts of convolution windows cut by heads.
    `scan` groups layers as a model that was loaded with it does (default: as they are).

    Every number stays what it is, bit for bit. The state given is only read. It travels through the
    memory of the host, a layer at a time. Where there are several processes, each must call this
    with its part of the same state; all get the new one, or none. Raises `RequestError` for what is
    no state, and what `Placement.check` raises.
    """

    def checked() -> Program:
        refuse_what_is_no_state(state)
        home = state.home
        target = make_program(
            home.config, mesh or home.mesh, placement, home.dtype,
            packed=home.packed, scan=home.scan if scan is None else scan,
        )  # fmt: skip
        _refuse_what_exceeds(target, state.batch, state.max_length)
        return target

    target, home = together("moving the state", checked), state.home
    agree("the state to move", state.max_length, state.batch, placement, target.sizes)
    at, arrays = _where(home.stacks), state.named()

    def fetch(layer: int, name: str) -> np.ndarray:
        if name in ("length", "hidden"):
            return to_host(getattr(state, name))
        stack, position, group = at[layer]
        return to_host(arrays[stack, position, name][group])

    return _Layout(fetch, home.stripes, target, state.batch, state.max_length).state()


def save(state: State, path: str | os.PathLike) -> None:
    """Write a state to a folder that does not exist yet: Orbax arrays as they lie on the devices,
    each process its own, and `about`, what they are. It appears whole or not at all. Arrays carry
    no checksum: a disk that changes a number is not found out.
    """
    refuse_what_is_no_state(state)
    folder = Path(path).absolute()
    if folder.exists():
        raise FileExistsError(f"{folder} exists: a state is written to a new folder")
    import orbax.checkpoint as ocp

    home = state.home
    about = {
        "format": FORMAT,
        "max_length": state.max_length,
        "batch": state.batch,
        "dtype": home.dtype,
        "scan": home.scan,
        "mesh": home.sizes,
        "placement": dataclasses.asdict(home.place),
        "config": _plain(home.config),
    }
    arrays = {_key(*where): array for where, array in state.named().items()}
    arrays |= {"length": state.length, "hidden": state.hidden}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(
            folder,
            ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays),  # pyright: ignore[reportCallIssue]
                about=ocp.args.JsonSave(about),  # pyright: ignore[reportCallIssue]
            ),
        )


def load_state(path: str | os.PathLike, model: Model) -> State:
    """A saved state for a model on any mesh and placement, as `move` would bring it there.

    Raises `RequestError` where the folder holds no state, or one of another model or type, naming
    every size that differs.
    """
    folder = Path(path).absolute()
    about = together("reading the state", lambda: _about(folder, model))
    agree("the saved state", about)  # before Orbax reads, which waits for all processes
    stripes = Placement(**about["placement"]).stripes(about["mesh"])
    arrays = together("reading the state", lambda: _arrays(folder, about, stripes, model.program))
    at = _where(dataclasses.replace(model.program, scan=about["scan"]).stacks)

    def fetch(layer: int, name: str) -> np.ndarray:
        if name in ("length", "hidden"):
            return arrays[name]
        stack, position, group = at[layer]
        return arrays[_key(stack, position, name)][group]

    return _Layout(fetch, stripes, model.program, about["batch"], about["max_length"]).state()


def _arrays(
    folder: Path, about: dict[str, Any], stripes: Stripes, program: Program
) -> dict[str, np.ndarray]:
    """All arrays of a folder; they are of the sizes that it says."""
    import orbax.checkpoint as ocp

    shapes = dataclasses.replace(program, scan=about["scan"]).state_shapes(1, 1).named()
    names = {_key(*where): where[2] for where in shapes} | {"length": "length", "hidden": "hidden"}
    whole = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            want = ocp.args.PyTreeRestore(restore_args=whole)  # pyright: ignore[reportCallIssue]
            arrays = reader.restore(folder, ocp.args.Composite(arrays=want))["arrays"]
    except Exception as error:
        raise RequestError(f"{folder}: its arrays cannot be read: {error}") from error
    batch, most = about["batch"], about["max_length"]
    slots = stripes.slots(most) * stripes.ranks
    for key, name in names.items():
        sizes = dict(zip(STATE_DIMS[name], arrays[key].shape, strict=True))
        if sizes["B"] < batch or sizes.get("S", slots) != slots:
            raise RequestError(
                f"{folder}: {key} is {arrays[key].shape}, not of {batch} requests of {most} tokens"
            )
    if arrays["length"][:batch].max() > most:
        raise RequestError(f"{folder}: a request has seen more than its {most} tokens")
    return arrays


_ABOUT = {
    **{"format": int, "max_length": int, "batch": int, "dtype": str},
    **{"scan": bool, "mesh": dict, "placement": dict, "config": dict},
}


def _about(folder: Path, model: Model) -> dict[str, Any]:
    """What a folder says of the state in it, which fits the model."""
    file = folder / "about" / "metadata"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{folder} holds no state: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise RequestError(f"{folder} holds no state that this version reads")
    bad = [name for name, kind in _ABOUT.items() if not isinstance(about.get(name), kind)]
    bad += [name for name in ("batch", "max_length") if name not in bad and about[name] < 1]
    if not bad:
        try:
            Placement(**about["placement"])
            mesh_sizes(about["mesh"])
        except (TypeError, PlacementError) as error:
            bad.append(f"placement and mesh ({error})")
    if bad:
        raise RequestError(f"{folder}: what it says of itself is damaged: {', '.join(bad)}")
    problems = differences(about["config"], _plain(model.config))
    if about["dtype"] != model.dtype:
        problems.append(f"the state is {about['dtype']}, the model {model.dtype}")
    if problems:
        raise RequestError("\n".join([f"{folder}:", *problems]))
    _refuse_what_exceeds(model.program, about["batch"], about["max_length"])
    return about


def _plain(config: Config) -> dict[str, Any]:
    """A config as JSON brings it back: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _key(stack: int, position: int, name: str) -> str:
    return f"{stack}.{position}.{name}"


def _where(stacks: Sequence[Span]) -> dict[int, tuple[int, int, int]]:
    """Layer -> its stack, position and group."""
    return {
        span.layer(j, g): (i, j, g)
        for i, span in enumerate(stacks)
        for j in range(span.period)
        for g in range(span.groups)
    }


@dataclasses.dataclass
class _Layout:
    """Arrays of a source on their way to a target's devices.

    Where one fails on this process, the others are still fetched, so that no other process waits
    for its part, and the error is kept.
    """

    fetch: Fetch
    stripes: Stripes  # of the source
    target: Program
    batch: int
    max_length: int
    errors: list[Exception] = dataclasses.field(default_factory=list)  # one at most

    def state(self) -> State:
        """The state of the target, on all processes or on none."""
        rows = -(-self.batch // self.target.sizes[DATA]) * self.target.sizes[DATA]
        shapes = self.target.state_shapes(rows, self.max_length)
        spans = self.target.stacks
        layers = [
            [self._layer(layer, spans[i], j) for j, layer in enumerate(stack)]
            for i, stack in enumerate(shapes.layers)
        ]
        ends = {n: self._array([-1], n, getattr(shapes, n)) for n in ("length", "hidden")}
        settle("laying out the state", self.errors.pop() if self.errors else None)
        return State(layers, **ends, max_length=self.max_length, batch=self.batch, home=self.target)

    def _layer(self, shapes: Any, span: Span, position: int) -> Any:
        layers = [span.layer(position, group) for group in range(span.groups)]
        names = [f.name for f in dataclasses.fields(shapes) if getattr(shapes, f.name) is not None]
        arrays = {name: self._array(layers, name, getattr(shapes, name)) for name in names}
        return dataclasses.replace(shapes, **arrays)

    def _array(self, layers: Sequence[int], name: str, shape: jax.ShapeDtypeStruct) -> Any:
        """One array of the target, whose groups are these layers, on its devices."""
        held = holders(shape.shape, shape.sharding)
        parts = {
            spans: np.zeros([stop - start for start, stop in spans], shape.dtype) for spans in held
        }
        for group, layer in enumerate(layers):
            source = self.fetch(layer, name)
            self._try(lambda s=source, g=group: self._fill(parts, s, name, shape, g))
        return self._try(lambda: _on_devices(parts, held, shape))

    def _try(self, action: Callable[[], Any]) -> Any:
        if not self.errors:
            try:
                return action()
            except Exception as error:
                self.errors.append(error)
        return None

    def _fill(
        self, parts: dict, source: np.ndarray, name: str, shape: jax.ShapeDtypeStruct, group: int
    ) -> None:
        """The slices of this process of one group of an array."""
        grouped = STATE_DIMS[name][0] == "G"
        dims, sizes = STATE_DIMS[name][grouped:], shape.shape[grouped:]
        source = source.view(shape.dtype)  # bfloat16 and its bits
        maps = [self._places(*of) for of in zip(dims, sizes, source.shape, strict=True)]
        for spans, part in parts.items():
            into = part[group] if grouped else part
            inner = [slice(*span) for span in spans[grouped:]]
            copy_places(into, source, [m[cut] for m, cut in zip(maps, inner, strict=True)])

    def _places(self, dim: str, size: int, source_size: int) -> np.ndarray:
        """Where each place of a dim of the target lies in the source, -1 where nowhere."""
        places, config = np.arange(size), self.target.config
        if dim == "B":
            return np.where(places < self.batch, places, -1)
        if dim[0] == "H":  # those beyond complete the ranks
            width = {"H": 1, "HK": config.kda_key_dim, "HV": config.kda_value_dim}[dim]
            return np.where(places < config.kda_heads * width, places, -1)
        if dim != "S":
            return places
        slots = size // self.target.stripes.ranks
        positions = self.target.stripes.position(places % slots, places // slots)
        first = self.stripes.owner(positions) * (source_size // self.stripes.ranks)
        there = first + self.stripes.slot(positions)
        return np.where(positions < self.max_length, there, -1)


def _on_devices(parts: dict, held: dict, shape: jax.ShapeDtypeStruct) -> Array:
    pairs = ((parts[spans], device) for spans, devices in held.items() for device in devices)
    arrays = [jax.device_put(part, device) for part, device in pairs]
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, arrays)


def copy_places(into: np.ndarray, source: np.ndarray, places: Sequence[np.ndarray]) -> None:
    """into[i, j, ...] = source[places[0][i], places[1][j], ...] where none of them is -1."""
    real = [np.flatnonzero(wanted >= 0) for wanted in places]
    for axis, (wanted, filled) in enumerate(zip(places, real, strict=True)):
        source = np.take(source, wanted[filled], axis)
    into[np.ix_(*real)] = source


def _refuse_what_exceeds(target: Program, batch: int, max_length: int) -> None:
    memory = device_memory(target.mesh)
    planned = plan(
        target.config, target.mesh, target.place,
        batch=batch, context=max_length, dtype=target.dtype, packed=target.packed,
    )  # fmt: skip
    if memory is not None and planned.state_bytes > memory:
        raise PlacementError(
            f"the state takes {planned.state_bytes:,} bytes a device there, of {memory:,}"
        )
