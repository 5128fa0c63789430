"""Functions that are written for one device, run on all devices of a mesh."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from .mesh import DATA, MODEL

BY_MODEL_RANK = PartitionSpec(MODEL)
BY_DEVICE = PartitionSpec((DATA, MODEL))  # arrays whose first dim is split over all devices


def within(mesh: Mesh, function: Callable) -> Callable:
    """`function` called on `mesh`, whatever mesh the caller has set with `jax.set_mesh`."""

    @functools.wraps(function)
    def call(*inputs: Any) -> Any:
        with own_mesh(mesh):
            return function(*inputs)

    return call


def own_mesh(mesh: Mesh) -> contextlib.AbstractContextManager:
    """A context in which `mesh` is set, where the caller has set another."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty or current == mesh.abstract_mesh:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def model_ranks(mesh: Mesh) -> int:
    """The devices along the axis `model`."""
    return mesh.shape[MODEL]


def on_model_ranks(mesh: Mesh, device_fn: Callable) -> Callable:
    """A function of each model rank's share of an array's first dim, compiled for whole arrays."""
    return jax.jit(
        jax.shard_map(
            device_fn, mesh=mesh, in_specs=BY_MODEL_RANK, out_specs=BY_MODEL_RANK, check_vma=False
        )
    )
