"""Where everything lives: the mesh, the table dim -> mesh axis, and the `Placement` that answers
for a run.

One decoder serves every parallel system; a placement is a value given to it, never a second
decoder.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..config.config import Config
from ..errors import PlacementError
from .collectives import DATA, MODEL
from .helix import Stripes
from .reductions import Reduction, acting, choose

# Leading letter of a dim -> the mesh axis that cuts it. `Placement.axes` says what cuts E
# (experts), Y (latent projections, router), S (cached keys), M (heads of queries), O (heads of
# values) and X (shared width); other letters are whole. An axis cuts one dim, the leftmost.
AXIS_OF_DIM = {"B": DATA, "H": MODEL, "F": MODEL, "Z": MODEL}

Done = TypeVar("Done")

Sizes = Mapping[str, int]  # mesh axis -> ranks: all that shapes and checks need of a mesh


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data` x `model` devices out of those that JAX has, in their order.

    `data` cuts the requests, `model` cuts heads, feed-forward widths, vocabulary and experts.
    """
    sizes = mesh_sizes({DATA: data, MODEL: model})
    devices = jax.devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        raise PlacementError(
            f"a mesh of {say_mesh(sizes)} needs {count} devices, "
            f"JAX has {len(devices)} ({devices[0].platform})"
        )
    return jax.make_mesh(
        (data, model),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices[:count],
    )


def mesh_sizes(mesh: Mesh | Sizes) -> dict[str, int]:
    """The ranks of both axes, of a mesh or of a table of sizes; an axis left out has one rank."""
    if isinstance(mesh, Mesh) and set(mesh.axis_names) != {DATA, MODEL}:
        raise PlacementError(f"a mesh needs the axes data and model, got {mesh.axis_names}")
    given = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh)
    problems = [f"unknown mesh axis {name!r}" for name in given if name not in (DATA, MODEL)]
    problems += [
        f"mesh axis {name} must be a positive integer, got {size!r}"
        for name, size in given.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]
    if problems:
        raise PlacementError("\n".join(problems))
    return {DATA: 1, MODEL: 1, **given}


def say_mesh(sizes: Sizes) -> str:
    """A mesh in words."""
    return f"data {sizes[DATA]} x model {sizes[MODEL]}"


_CHOICES = {
    "rows": ("full", "sliced", "auto"),
    "keys": ("whole", "helix"),
    "exchange": ("latents", "values"),
    "experts": ("exchange", "local", "auto"),
    "latent": ("whole", "sharded"),
    "shared": ("whole", "sliced"),
    "prefill_reduce": ("sum", "two_shot", "ring_fp32", "ring_bf16"),
    "expert_axes": ((MODEL,), (DATA, MODEL)),
}
_PAD = ("heads", "experts", "vocab", "dense", "shared")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rows, keys, experts and sums a device holds or completes. Frozen and hashable; lists
    become tuples.

    `rows`: "full" keeps all rows of the residual stream on every model rank; "sliced" gives rank r
    of n the rows r c to (r + 1) c, c = ceil(rows / n): attention sees all of them (all-gather,
    reduce-scatter), all else runs on own rows. Better for many rows; "auto" slices steps of at
    least `sliced_from` rows a data rank (`kimi-jax bench --rows` measures it).
    `keys`: "whole" caches every latent row and index key on every model rank; "helix" cuts them in
    blocks of `helix_block` positions, dealt to the ranks in turn: 1/n of the memory. Every rank
    then attends for all heads over its own keys, and `exchange` says what it sends of each head:
    "latents", or "values", which is fewer bytes and more work.
    `shared`: under "sliced" or "auto" rows, "whole" keeps the shared experts on every rank,
    "sliced" cuts their width for one more gather and scatter; under "full" rows they are always
    cut.
    `experts`: "exchange" sends each row's latent to the ranks that own its experts; "local" runs
    every rank's experts on all rows and closes with one all-reduce, better for few rows; "auto" is
    local in steps of fewer than `local_below` rows a data rank (`kimi-jax bench --experts` measures
    it; 0: never). `expert_axes`: experts over ("model",) or over ("data", "model") together.
    `latent`: "sharded" cuts the latent projections and the router too. `pad`: of "heads",
    "experts", "vocab", "dense" and "shared", those completed with zeros where they do not divide.
    `prefill_reduce`: how prefill steps of at least `prefill_ring_rows` rows a data rank complete
    their partial sums (0: as all others, by the backend's sum); smaller ones then take "two_shot".
    A number above the chunk of `load` does nothing, which a warning says.
    The `ring_` options are those of `reductions.Reduction`, for "ring_bf16".
    On one device every answer is the same program.
    """

    rows: str = "full"
    sliced_from: int = 0
    keys: str = "whole"
    helix_block: int = 64
    exchange: str = "latents"
    experts: str = "exchange"
    local_below: int = 0
    expert_axes: Sequence[str] = (MODEL,)
    latent: str = "whole"
    shared: str = "whole"
    pad: Sequence[str] = ()
    prefill_reduce: str = "sum"
    prefill_ring_rows: int = 0
    ring_pieces: int = 1
    ring_fp32_hops: int = 0
    ring_granule_rows: int = 0

    def __post_init__(self) -> None:
        problems = list(self._tuples())
        problems += [
            f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}"
            for name, known in _CHOICES.items()
            if getattr(self, name) not in known
        ]
        problems += [
            f"pad: unknown dimension {name!r}, known are {', '.join(_PAD)}"
            for name in self.pad
            if name not in _PAD
        ]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                problems.append(f"{field.name} must be a whole number >= 0, got {value!r}")
        problems += [
            f"{name} must be at least 1, got 0"
            for name in ("ring_pieces", "helix_block")
            if getattr(self, name) == 0
        ]
        if problems:
            raise PlacementError("\n".join(problems))

    def _tuples(self) -> Iterator[str]:
        for name in ("expert_axes", "pad"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                yield f"{name} must be a list of names, got {value!r}"
                value = dict(expert_axes=(MODEL,), pad=())[name]
            object.__setattr__(self, name, tuple(dict.fromkeys(value)))

    def check(self, config: Config, mesh: Mesh | Sizes) -> None:
        """Raise unless this placement can run `config` on `mesh`; nothing is allocated before.

        One `PlacementError` names every dimension that does not divide, with its size and the rank
        count.
        """
        sizes = mesh_sizes(mesh)
        problems = [
            f"  {name}: {size} over {ranks} ranks"
            + (f" (pad={(pad,)!r} would complete it to {-(-size // ranks) * ranks})" if pad else "")
            for name, size, ranks, pad in self._cuts(config, sizes)
            if size % ranks and pad not in self.pad
        ]
        title = f"a mesh of {say_mesh(sizes)} does not divide:"
        lines = [title, *problems] if problems else []
        hops, most = self._reduction.fp32_hops, max(0, sizes[MODEL] - 2)
        if sizes[MODEL] > 1 and hops > most:
            lines.append(
                f"ring_fp32_hops must lie in 0..{most} at {sizes[MODEL]} ranks, got {hops}"
            )
        lap = self.helix_block * sizes[MODEL]
        if self.keys == "helix" and lap >= 2**31:
            lines.append(f"helix_block: {self.helix_block} over {sizes[MODEL]} ranks is {lap} "
                         "positions, more than 32 bits count")  # fmt: skip
        dense = [i for i in range(config.layers) if config.is_dense(i)]
        if self.rows != "full" and dense[-1:] > [len(dense) - 1]:
            late = ", ".join(str(i) for at, i in enumerate(dense) if i > at)
            lines.append(f"rows={self.rows!r}: no layer after the first with experts may be dense, "
                         f"and layers {late} are")  # fmt: skip
        if lines:
            raise PlacementError("\n".join(lines))

    def _cuts(self, config: Config, sizes: Sizes) -> Iterator[tuple[str, int, int, str | None]]:
        """Every dimension that is cut: its name, size, ranks, and what `pad` calls it."""
        model, spread = sizes[MODEL], math.prod(sizes[axis] for axis in self.expert_axes)
        dense = [config.is_dense(i) for i in range(config.layers)]
        if config.mla_layers:
            yield "heads", config.heads, model, "heads"
        if config.kda_layers:
            yield "KDA heads", config.kda_heads, model, "heads"
        yield "vocabulary", config.vocab, model, "vocab"
        if not all(dense):
            yield "experts", config.experts, spread, "experts"
        if any(dense):
            yield "dense intermediate", config.dense_ffn, model, "dense"
        if not all(dense) and config.shared_experts and self.axes("X"):
            yield "shared intermediate", config.shared_ffn, model, "shared"
        if not all(dense) and self.latent == "sharded":
            yield "latent width", config.latent, model, None
            if spread != model:
                yield "router", config.experts, model, "experts"

    def axes(self, dim: str) -> tuple[str, ...]:
        """The mesh axes that cut a dim, by its leading letter; none where it is whole."""
        letter, helix = dim[0], self.keys == "helix"
        if letter == "E":
            return tuple(self.expert_axes)
        by_choice = {
            "Y": self.latent == "sharded",
            "S": helix,
            "M": not helix,
            "O": not (helix and self.exchange == "values"),
            "X": self.rows == "full" or self.shared == "sliced",
        }
        if letter in by_choice:
            return (MODEL,) if by_choice[letter] else ()
        return (AXIS_OF_DIM[letter],) if letter in AXIS_OF_DIM else ()

    def spec(self, dims: Sequence[str]) -> PartitionSpec:
        """The mesh axes of each dim of an array, from the table and the dims' leading letters."""
        taken: set[str] = set()
        spec: list[str | tuple[str, ...] | None] = []
        for dim in dims:
            axes = self.axes(dim)
            free = axes if taken.isdisjoint(axes) else ()
            taken |= set(free)
            spec.append(free[0] if len(free) == 1 else free or None)
        return PartitionSpec(*spec)

    def whole(
        self, dims: Sequence[str], counts: Sequence[int], shape: Sequence[int], sizes: Sizes
    ) -> tuple[int, ...]:
        """The shape that a weight takes on a mesh: cut dims completed to a multiple of their ranks.

        `counts` says how many things a dim counts, where each (a head) takes several places.
        """
        cut = cut_ranks(self.spec(dims), sizes)
        return tuple(
            -(-count // n) * n * (size // count)
            for size, count, n in zip(shape, counts, cut, strict=True)
        )

    def runs_local_experts(self, rows: int) -> bool:
        """Whether a step of so many rows a data rank runs local experts."""
        return self.experts == "local" or (self.experts == "auto" and rows < self.local_below)

    def slices_rows(self, rows: int) -> bool:
        """Whether a step of so many rows a data rank slices them over the model ranks."""
        return self.rows == "sliced" or (self.rows == "auto" and rows >= self.sliced_from)

    def stripes(self, sizes: Sizes) -> Stripes:
        """Where cached keys live."""
        return Stripes(self.helix_block, sizes[MODEL]) if self.keys == "helix" else Stripes()

    def within(self, chunk: int) -> "Placement":
        """This placement for prefill steps of at most `chunk` tokens a row: a threshold above it
        does nothing, which a warning says.
        """
        acts = acting(self.prefill_ring_rows, chunk)
        same = acts == self.prefill_ring_rows
        return self if same else dataclasses.replace(self, prefill_ring_rows=acts)

    def reduction(self, step: str, rows: int, ranks: int) -> Reduction:
        """How a step of so many rows a data rank completes its partial sums; `reductions.choose`
        says when.
        """
        threshold = self.prefill_ring_rows
        return choose(
            self._reduction, step, capacity=rows, chunk=threshold, threshold=threshold, n=ranks
        )

    @property
    def _reduction(self) -> Reduction:
        if self.prefill_reduce != "ring_bf16":
            return Reduction(self.prefill_reduce)
        return Reduction(
            self.prefill_reduce, self.ring_pieces, self.ring_fp32_hops, self.ring_granule_rows
        )


def cut_ranks(spec: PartitionSpec, sizes: Sizes) -> tuple[int, ...]:
    """In how many parts each dim is cut."""
    every = (() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec)
    return tuple(math.prod(sizes[axis] for axis in axes) for axes in every)


def to_host(x: Array) -> np.ndarray:
    """All of an array, wherever its parts are; every process must ask for it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_mesh(x: np.ndarray, sharding: NamedSharding) -> Array | np.ndarray:
    """What a step takes for an array that every process holds alike.

    One process gives the array itself, which the step places: a decode step of the shipped model
    takes 3.2 ms so, and 3.6 where the array is made first.
    """
    if jax.process_count() == 1:
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def to_device(x: np.ndarray, sharding: NamedSharding) -> Array:
    """An array on the mesh, of one that every process holds alike."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def settle(what: str, error: BaseException | None) -> None:
    """Raise on every process if any of them failed, so that all end alike."""
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(error is not None))
        if error is None and failed.any():
            others = ", ".join(map(str, np.flatnonzero(failed)))
            raise PlacementError(f"{what} failed on process {others}, and so on none succeeded")
    if error is not None:
        try:
            raise error
        finally:
            del error  # its frames would hold it, and it them, and they arrays


def together(what: str, action: Callable[[], Done]) -> Done:
    """What `action` returns, on every process, or an error on every process."""
    error, done = None, None
    try:
        done = action()
    except Exception as problem:
        error = problem
    settle(what, error)
    return cast(Done, done)


def agree(what: str, *values: object) -> None:
    """Raise `PlacementError` unless every process brings the same values: a step whose shapes
    differ between processes would wait for ever. Costs nothing where there is one process.
    """
    if jax.process_count() == 1:
        return
    parts = [
        v.tobytes() + repr(v.shape).encode() if isinstance(v, np.ndarray) else repr(v).encode()
        for v in values
    ]
    digest = np.frombuffer(hashlib.sha256(b"|".join(parts)).digest(), np.int32)
    every = multihost_utils.process_allgather(digest)
    if (every != every[0]).any():
        raise PlacementError(f"the processes disagree on {what}")
