"""Where everything lives: the mesh, the table dim -> mesh axis, and the `Placement` that answers
for a run.

One decoder serves every parallel system; a placement is a value given to it, never a second
decoder.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

from .collectives import DATA, MODEL, all_reduce
from .config import Config
from .state import Step

# Leading letter of a dim -> the mesh axis that cuts it. A mesh axis cuts one dim, the leftmost.
AXIS_OF_DIM = {"B": DATA, "H": MODEL, "F": MODEL, "Z": MODEL, "E": MODEL}


class PlacementError(ValueError):
    """A placement that does not fit: every dimension that is in the way, in one message."""


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data` x `model` devices out of those that JAX has, in their order.

    `data` cuts the requests, `model` cuts heads, feed-forward widths, vocabulary and experts.
    """
    for name, size in (("data", data), ("model", model)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlacementError(f"mesh axis {name} must be a positive integer, got {size!r}")
    devices = jax.devices()
    if data * model > len(devices):
        raise PlacementError(
            f"a mesh of data {data} x model {model} needs {data * model} devices, "
            f"JAX has {len(devices)} ({devices[0].platform})"
        )
    return jax.make_mesh(
        (data, model),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[: data * model],
    )


_CHOICES = {
    "rows": ("full", "sliced", "auto"),
    "keys": ("whole", "helix"),
    "exchange": ("latents", "values"),
    "experts": ("exchange", "local", "auto"),
    "latent": ("whole", "sharded"),
    "shared": ("whole", "sliced"),
    "prefill_reduce": ("sum", "two_shot", "ring_fp32", "ring_bf16"),
}
_PAD = ("heads", "experts", "vocab", "dense", "shared")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rows, keys, experts and sums a device holds or completes. Frozen and hashable; lists
    become tuples.

    On one device every answer is the same program. Options beyond the defaults raise
    `NotImplementedError` naming the option when they are checked against a mesh, until they are
    built.
    """

    rows: str = "full"
    sliced_from: int = 0
    keys: str = "whole"
    helix_block: int = 64
    exchange: str = "latents"
    experts: str = "exchange"
    local_below: int = 0
    expert_axes: tuple[str, ...] = (MODEL,)
    latent: str = "whole"
    shared: str = "whole"
    pad: tuple[str, ...] = ()
    prefill_reduce: str = "sum"
    prefill_ring_rows: int = 0
    ring_pieces: int = 1
    ring_fp32_hops: int = 0
    ring_granule_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("expert_axes", "pad"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = [
            f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        problems += [f"pad: unknown dimension {name!r}" for name in self.pad if name not in _PAD]
        problems += [
            f"expert_axes: unknown mesh axis {name!r}"
            for name in self.expert_axes
            if name not in (DATA, MODEL)
        ]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                problems.append(f"{field.name} must be a whole number >= 0, got {value!r}")
        if problems:
            raise PlacementError("\n".join(problems))

    def check(self, config: Config, mesh: Mesh) -> None:
        """Raise unless this placement can run `config` on `mesh`; nothing is allocated before."""
        del config
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        if sizes:
            raise NotImplementedError(f"a mesh of more than one device ({sizes}) is not built yet")
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise NotImplementedError(f"Placement.{field.name}={getattr(self, field.name)!r}")

    def spec(self, dims: Sequence[str]) -> PartitionSpec:
        """The mesh axis of each dim of a weight, from the table and the dims' leading letters."""
        axes: list[str | None] = []
        for dim in dims:
            axis = AXIS_OF_DIM.get(dim[0])
            axes.append(None if axis in axes else axis)
        return PartitionSpec(*axes)


def enter(x: Float[Array, "P D"], step: Step) -> Float[Array, "B T D"]:
    """The residual rows that a rank holds -> all rows of its requests, for attention."""
    return x.reshape(*step.valid.shape, -1)


def leave(partial: Float[Array, "B T D"]) -> Float[Array, "P D"]:
    """Partial sums of all rows -> the complete rows that a rank holds."""
    return all_reduce(partial.reshape(-1, partial.shape[-1]))
