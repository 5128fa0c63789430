"""The mesh of devices: its two axes, how one is made, and what is accepted as one."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ..errors import PlacementError, shown
from ..numerics import is_whole
from .watch import watch_processes

DATA = "data"
MODEL = "model"

Sizes = Mapping[str, int]  # mesh axis -> ranks: all that shapes and checks need of a mesh
ONE_DEVICE: Sizes = {DATA: 1, MODEL: 1}

_MAKE_ONE = "kj.make_mesh(data=1, model=8) makes one"


def make_mesh(data: int | Any = 1, model: int | Any = 1) -> Mesh:
    """A mesh of `data` x `model` devices out of those that JAX has, in their order.

    `data` splits the requests; `model` splits heads, feed-forward widths, vocabulary and experts.
    Raises `PlacementError` for sizes that are not positive, and for more devices than there are.
    """
    sizes = mesh_sizes({DATA: data, MODEL: model})
    watch_processes()
    devices = jax.devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        raise PlacementError(
            f"a mesh of {sizes_text(sizes)} needs {shown(count)} devices, "
            f"JAX has {len(devices)} ({devices[0].platform})"
        )
    return jax.make_mesh(
        (sizes[DATA], sizes[MODEL]),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[:count],
    )


def as_mesh(mesh: Any = None) -> Mesh:
    """The mesh that was given, with axes in the order (data, model) that XLA shards automatically;
    one device where none was given.

    Meshes of explicit or manual axis types, which `jax.make_mesh` makes, become automatic ones on
    the same devices. Raises `PlacementError` for anything but a mesh of these two axes with real,
    distinct devices of one platform, some of them of this process.
    """
    if mesh is None:
        return make_mesh()
    if not isinstance(mesh, Mesh):
        raise PlacementError(f"mesh must come from make_mesh, got {shown(mesh)}; {_MAKE_ONE}")
    mesh_sizes(mesh)
    watch_processes()
    devices = mesh.devices if mesh.axis_names == (DATA, MODEL) else mesh.devices.T
    platforms = sorted({device.platform for device in devices.flat})
    problems = []
    if len(set(devices.flat)) < devices.size:
        problems.append("a mesh needs distinct devices, one of them is in it twice")
    if len(platforms) > 1:
        problems.append(f"a mesh needs devices of one platform, got {', '.join(platforms)}")
    if not any(device.process_index == jax.process_index() for device in devices.flat):
        problems.append(f"no device of the mesh belongs to process {jax.process_index()}")
    if problems:
        raise PlacementError("\n".join(f"{problem}; {_MAKE_ONE}" for problem in problems))
    return Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def meshes_of(devices: int) -> Iterator[Sizes]:
    """The sizes of every mesh of this many devices, the fewest data ranks first."""
    for data in range(1, devices + 1):
        if devices % data == 0:
            yield {DATA: data, MODEL: devices // data}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """The ranks of both axes, of a mesh (an abstract one too) or of a table of sizes, where an axis
    left out has one rank. Raises `PlacementError` for anything else.
    """
    is_mesh = isinstance(mesh, Mesh | AbstractMesh)
    if is_mesh and sorted(map(str, mesh.axis_names)) != [DATA, MODEL]:
        raise PlacementError(
            f"a mesh needs the axes data and model, got {shown(mesh.axis_names)}; {_MAKE_ONE}"
        )
    if not is_mesh and not isinstance(mesh, Mapping):
        raise PlacementError(
            f"mesh must be a mesh or sizes such as {{'data': 1, 'model': 8}}, got {shown(mesh)}; "
            f"{_MAKE_ONE}"
        )
    given = dict(mesh.shape) if is_mesh else dict(mesh)
    problems = [
        f"unknown mesh axis {shown(name)}, the axes are data and model; {_MAKE_ONE}"
        for name in given
        if name not in (DATA, MODEL)
    ]
    problems += [
        f"mesh axis {name} must be a positive integer, got {shown(size)}; {_MAKE_ONE}"
        for name, size in given.items()
        if name in (DATA, MODEL) and not is_whole(size, 1)
    ]
    if problems:
        raise PlacementError("\n".join(problems))
    return {**ONE_DEVICE, **{name: int(size) for name, size in given.items()}}


def sizes_text(sizes: Sizes) -> str:
    """A mesh as text: "data 1 x model 8"."""
    return f"data {shown(sizes[DATA])} x model {shown(sizes[MODEL])}"


def shard_counts(spec: PartitionSpec, sizes: Sizes) -> tuple[int, ...]:
    """The number of shards along each dim of an array."""
    axes_of_dims = (
        () if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec
    )
    return tuple(math.prod(sizes[axis] for axis in axes) for axes in axes_of_dims)
