"""How weights are declared and built: each has its shape, type and dims before any array exists."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ..parallel.mesh import Sizes, mesh_sizes
from ..parallel.placement import Placement
from ..parallel.roles import Role
from ..progress import Progress
from .layers import Term

Read = Callable[[str, tuple[slice, ...]], np.ndarray]


@runtime_checkable
class Named(Protocol):
    """A module that says what its weights are called."""

    def names_of(self, path: tuple) -> tuple[str, ...]:
        """The names of the weight at a path in the module: one for each group, where it leads with
        groups.
        """
        ...


def lead_with_groups(module: nnx.Module, groups: int) -> None:
    """Make every weight of a declared module lead with a dim G of `groups` equal modules."""
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            one, meta = param.get_value(), param.get_metadata()
            param.set_value(jax.ShapeDtypeStruct((groups, *one.shape), one.dtype))
            param.set_metadata(dims=("G", *meta["dims"]))
            param.set_metadata(counts=(groups, *meta["counts"]))
            param.set_metadata(roles=(None, *meta["roles"]))


@dataclasses.dataclass(frozen=True)
class Declared:
    """A declared weight, not yet allocated: its path in the module, shape, type, dims, and the
    names of its released layers.
    """

    path: tuple
    shape: tuple[int, ...]
    dtype: jnp.dtype
    dims: tuple[str, ...]
    counts: tuple[int, ...]  # of things that are never split, dim by dim
    roles: tuple[Role | None, ...]  # what each dim is sharded by
    term: Term  # what a plan counts it to
    names: tuple[str, ...]  # one per group, or a single name for a weight outside the layers

    def placed(self, place: Placement, sizes: Sizes) -> tuple[int, ...]:
        """Its shape on a mesh, with the padding of the placement."""
        return place.padded_shape(self.roles, self.counts, self.shape, sizes)


def declare(model: Named) -> Iterator[Declared]:
    """Every weight of a declared model, in order. Allocates no arrays."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value, meta = param.get_value(), param.get_metadata()
        dtype = jnp.dtype(value.dtype)
        dims, counts, roles = meta["dims"], meta["counts"], meta["roles"]
        names, term = model.names_of(path), meta["term"]
        yield Declared(path, value.shape, dtype, dims, counts, roles, term, names)


def build(
    model: Named,
    place: Placement,
    mesh: Mesh,
    read: Read,
    done: Callable[[int], None] = lambda n: None,
) -> dict:
    """Fill a declared model: path -> array on the mesh. `read(name, index)` is called once for each
    slice that this process' devices hold, however many of them hold it; `done` gets its bytes.

    A slice goes to its devices before the next is read, so that the host holds a single slice.
    """
    weights = {}
    for w in declare(model):
        shape, sharding, parts = w.placed(place, mesh_sizes(mesh)), _sharding(w, place, mesh), []
        for spans, devices in holders(shape, sharding).items():
            part = _slice_of(w, spans, read)
            parts += jax.block_until_ready([jax.device_put(part, device) for device in devices])
            done(part.nbytes)
        weights[w.path] = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    return weights


def read_weights(
    declared: Named,
    place: Placement,
    mesh: Mesh,
    read: Callable[..., Any],
    progress: bool | None = None,
) -> dict[tuple, Array]:
    """The weights of a declared module by path: each process reads the slices of its local devices,
    once.

    `read` gives a slice of a weight, as `Checkpoint.read` does. `progress` as for `Progress`.
    """
    total = sum(
        size * weight.dtype.itemsize
        for weight in declare(declared)
        for size in slice_sizes(weight, place, mesh)
    )
    with Progress("loading", total, "bytes", show=progress) as bar:
        return build(declared, place, mesh, read, bar.advance)


def slice_sizes(w: Declared, place: Placement, mesh: Mesh) -> list[int]:
    """The numbers in each slice of a weight that `build` asks for in this process."""
    held = holders(w.placed(place, mesh_sizes(mesh)), _sharding(w, place, mesh))
    return [math.prod(stop - start for start, stop in spans) for spans in held]


def _sharding(w: Declared, place: Placement, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, place.spec(w.roles))


def holders(shape: tuple[int, ...], sharding: NamedSharding) -> dict[tuple, list]:
    """The slices that this process holds, as (start, stop) of each dim, and the devices of each."""
    held: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        pairs = zip(index or (), shape, strict=True)
        spans = tuple(part.indices(size)[:2] for part, size in pairs)
        held.setdefault(spans, []).append(device)
    return held


def _slice_of(w: Declared, spans: tuple[tuple[int, int], ...], read: Read) -> np.ndarray:
    """A slice of a weight, read group by group and zero-padded beyond the weight's shape."""
    out = np.zeros([stop - start for start, stop in spans], w.dtype)
    real = [slice(min(a, n), min(b, n)) for (a, b), n in zip(spans, w.shape, strict=True)]
    filled = tuple(slice(0, part.stop - part.start) for part in real)
    if w.dims[0] != "G":
        out[filled] = _fit(read(w.names[0], tuple(real)), w, tuple(real))
        return out
    for at, name in enumerate(w.names[real[0]]):
        out[at][filled[1:]] = _fit(read(name, tuple(real[1:])), w, tuple(real[1:]))
    return out


def _fit(array: np.ndarray, w: Declared, index: tuple[slice, ...]) -> np.ndarray:
    shape = tuple(part.stop - part.start for part in index)
    if array.shape != shape:
        raise ValueError(f"{w.names[0]}: read {array.shape}, the model declares {shape}")
    return array
