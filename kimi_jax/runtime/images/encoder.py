"""The vision tower on a mesh: every device holds all of it and encodes an image of its own.

A program is compiled for a number of places, two for each power of two, never for an image's size:
the rows of an image do not depend on the images beside it.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ...compilation.function import CompiledFunction
from ...config.block_sizes import block_sizes
from ...config.vision import MERGE, VisionConfig
from ...errors import RequestError, shown
from ...model.declared import declare, read_weights
from ...model.vision.encoder import Encoder
from ...model.vision.positions import merge_order
from ...parallel.on_mesh import BY_DEVICE, own_mesh
from ...parallel.placement import Placement
from ...parallel.processes import agree, to_host, to_mesh
from ...vision.patches import ImagePatches
from ..model_on_mesh import merged

FEWEST_PLACES = 64  # of a program


def bucket(patches: int) -> int:
    """The places of the program that takes a frame of this many patches: 64, 96, 128, 192, ..."""
    power = max(FEWEST_PLACES, 1 << (patches - 1).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if FEWEST_PLACES <= patches <= three_quarters else power


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """A vision tower and projector ready to run."""

    config: VisionConfig
    mesh: Mesh
    dtype: str
    params: dict[tuple, Array] = dataclasses.field(compare=False, repr=False)

    def __repr__(self) -> str:
        return f"ImageEncoder({self.config.blocks} blocks, {self.dtype})"

    def encode(self, images: Sequence[ImagePatches]) -> list[np.ndarray]:
        """The rows [n, D] of each image, in the model's type, n = h w / 4: what replaces the
        embeddings of its n placeholders. Images are spread over the devices.

        Raises one `RequestError` with every entry that the tower does not take.
        """
        if problems := self.problems(images):
            raise RequestError("\n".join(problems))
        agree("images", *(image.digest for image in images))
        alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for i, image in enumerate(images):
            frames, rows, columns = image.grid
            alike[frames, bucket(rows * columns)].append(i)
        encoded: dict[int, np.ndarray] = {}
        for (frames, L), numbers in alike.items():
            for first in range(0, len(numbers), self.mesh.size):
                group = numbers[first : first + self.mesh.size]
                rows = self._encode([images[i] for i in group], frames, L)
                encoded |= {
                    i: rows[at, : images[i].grid[1] * images[i].grid[2] // MERGE**2]
                    for at, i in enumerate(group)
                }
        return [encoded[i] for i in range(len(images))]

    def problems(self, images: Sequence[ImagePatches]) -> list[str]:
        """Why the tower does not take images, a line each."""
        return [p for i, image in enumerate(images) for p in _problems(self.config, i, image)]

    def _encode(self, images: Sequence[ImagePatches], frames: int, L: int) -> np.ndarray:
        """The rows [devices, L / 4, D] of at most as many images as there are devices, which share
        a program.
        """
        n, p = self.mesh.size, self.config.patch
        patches = np.zeros((n, frames, L, 3 * p * p), jnp.dtype(self.dtype))
        grids = np.zeros((n, 2), np.int32)  # no patch: nothing is computed
        for at, image in enumerate(images):
            _, rows, columns = image.grid
            by_grid = image.patches.reshape(frames, rows * columns, -1)
            patches[at, :, : rows * columns] = by_grid[:, merge_order(rows, columns)]
            grids[at] = rows, columns
        sharding = NamedSharding(self.mesh, BY_DEVICE)
        placed = (to_mesh(array, sharding) for array in (patches, grids))
        with own_mesh(self.mesh):
            return to_host(self.function(self.params, *placed))

    @property
    def function(self) -> CompiledFunction:
        """(weights, patches [devices, frames, L, X], grids [devices, 2]) -> rows [devices, L / 4,
        D], compiled for every shape.
        """
        return encode_function(self.config, self.mesh, self.dtype)


def load_encoder(
    config: VisionConfig,
    mesh: Mesh,
    dtype: str,
    read: Callable[..., Any],
    progress: bool | None = None,
) -> ImageEncoder:
    """The encoder with its weights, each read once, on every device."""
    declared = Encoder(config, dtype)
    params = read_weights(declared, Placement(), mesh, read, progress)
    return ImageEncoder(config, mesh, dtype, params)


@functools.lru_cache(maxsize=32)
def encode_function(config: VisionConfig, mesh: Mesh, dtype: str) -> CompiledFunction:
    """The function of every encoder of this config, mesh and type."""
    encoder = Encoder(config, dtype)
    most_bytes = block_sizes(mesh.devices.flat[0].platform).dense_bytes

    def device_fn(weights: dict, patches: Array, grids: Array) -> Array:
        model, grid = merged(encoder, weights), grids[0]
        run = lambda: model(patches[0], grid, most_bytes)  # noqa: E731
        shape = jax.eval_shape(run)
        nothing = lambda: jnp.zeros(shape.shape, shape.dtype)  # noqa: E731
        return jax.lax.cond(grid[0] > 0, run, nothing)[None]

    function = jax.shard_map(
        device_fn,
        mesh=mesh,
        in_specs=(PartitionSpec(), BY_DEVICE, BY_DEVICE),
        out_specs=BY_DEVICE,
        check_vma=False,
    )
    identity = repr((config, dict(mesh.shape), dtype))
    abstract = lambda _, *arrays: encoder_shapes(config, mesh, dtype, *arrays)  # noqa: E731
    return CompiledFunction(function, "the vision tower", identity, mesh, abstract, fixed=1)


def encoder_shapes(config: VisionConfig, mesh: Mesh, dtype: str, *arrays: Any) -> tuple:
    """Shapes, types and shardings of the weights, and of arrays with one entry a device."""
    replicated, each = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, BY_DEVICE)
    shape = jax.ShapeDtypeStruct
    weights = declare(Encoder(config, dtype))
    return (
        {w.path: shape(w.shape, w.dtype, sharding=replicated) for w in weights},
        *(shape(x.shape, x.dtype, sharding=each) for x in arrays),
    )


def _problems(config: VisionConfig, number: int, image: ImagePatches) -> Iterable[str]:
    """Why the tower does not take an entry, if so."""
    frames, rows, columns = image.grid
    p, given = config.patch, image.patches.shape
    if min(image.grid) < 1 or rows % MERGE or columns % MERGE:
        yield f"image {number}: a grid of {shown(image.grid)} has no whole groups of 2 x 2 patches"
    elif given != (frames * rows * columns, 3, p, p):
        expected = (frames * rows * columns, 3, p, p)
        yield f"image {number}: patches of shape {given}, the grid and the tower say {expected}"
    elif image.rows != rows * columns // MERGE**2:
        yield f"image {number}: {image.rows} rows, its grid gives {rows * columns // MERGE**2}"
    if frames > config.most_frames:
        yield f"image {number}: {frames} frames, the tower takes at most {config.most_frames}"
