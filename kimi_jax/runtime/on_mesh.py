"""Functions that are written for one device, run on all devices of a mesh."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh


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
