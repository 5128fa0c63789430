"""The weights of a program, read slice by slice onto its mesh."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from ..model.decoder import build, declare, slice_sizes
from ..progress import Progress
from .program import Program


def load_weights(
    program: Program, read: Callable[..., Any], progress: bool | None = None
) -> dict[tuple, Array]:
    """All weights by path: each process reads the slices of its local devices, once.

    `read` gives a slice of a weight, as `Checkpoint.read` does. `progress` as for `Progress`.
    """
    total = sum(
        size * weight.dtype.itemsize
        for weight in declare(program.declared)
        for size in slice_sizes(weight, program.place, program.mesh)
    )
    with Progress("loading", total, "bytes", show=progress) as bar:
        return build(program.declared, program.place, program.mesh, read, bar.advance)
