"""The encoder of images: tower, merge and projector."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ...config.vision import MERGE, VisionConfig
from ...numerics import at_least_float32, widen
from ..declared import declare
from ..layers import linear
from .tower import Tower, query_block, rms_norm, vision_weight


def merge(x: Float[Array, "frames L C"]) -> Float[Array, "n X"]:
    """The mean over frames, then the four patches of each 2 x 2 group side by side: (0, 0), (0, 1),
    (1, 0), (1, 1). Not averaged over space. Patches are in merge order.
    """
    mean = widen(x).mean(0).astype(x.dtype)
    return mean.reshape(x.shape[1] // MERGE**2, -1)


class Projector(nnx.Module):
    """y = rms(W_out gelu(W_in m)), with the exact GELU: the tower has the one with tanh."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        M, D = config.merged_width, config.hidden
        self.config = config
        self.w_in = vision_weight(dtype, F=M, M=M)
        self.w_out = vision_weight(dtype, D=D, F=M)
        self.norm = vision_weight(dtype, D=D)

    def __call__(self, merged: Float[Array, "n X"]) -> Float[Array, "n D"]:
        """Merged patches -> rows of the decoder."""
        h = jax.nn.gelu(widen(linear(merged, self.w_in[...])), approximate=False)
        y = linear(h.astype(merged.dtype), self.w_out[...])
        return rms_norm(y, self.norm[...], self.config.projector_eps)


class Encoder(nnx.Module):
    """Patches of one entry -> the rows that stand for it in the decoder."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.tower = Tower(config, dtype)
        self.projector = Projector(config, dtype)

    def __call__(
        self, patches: Float[Array, "frames L X"], grid: Int[Array, "2"], block_bytes: int
    ) -> Float[Array, "n D"]:
        """As `Tower` takes them -> L / 4 rows, those beyond the grid's undefined."""
        with jax.named_scope("tower"):
            x = self.tower(patches.astype(self.dtype), grid, block_bytes)
        with jax.named_scope("projector"):
            return self.projector(merge(x))

    def names_of(self, path: tuple) -> tuple[str, ...]:
        """The names of the weight at a path: one for each block, where it is in the blocks."""
        name = ".".join(map(str, path))
        inside = name.removeprefix("tower.block.")
        if inside == name:
            return (name,)
        return tuple(f"tower.blocks.{i}.{inside}" for i in range(self.config.blocks))


@functools.lru_cache(maxsize=32)
def weight_bytes(config: VisionConfig, dtype: DTypeLike) -> int:
    """Bytes of all weights."""
    return sum(math.prod(w.shape) * w.dtype.itemsize for w in declare(Encoder(config, dtype)))


def activation_bytes(config: VisionConfig, places: int, dtype: DTypeLike, block_bytes: int) -> int:
    """About what one image of this many places takes beside the weights: in attention the residual
    stream, queries, keys and values, and scores and weights of a block of queries; in the MLP its
    hidden rows. Compiled for an H200 at the released size the first is right to a percent.
    """
    size, wide = jnp.dtype(dtype).itemsize, at_least_float32(dtype).itemsize
    queries = query_block(places, config.heads, dtype, block_bytes)
    scores = queries * places * config.heads * (wide + size)
    attention = places * (config.width + 3 * config.qkv_width) * size + scores
    mlp = places * (config.width * size + config.ffn * (wide + size))
    return max(attention, mlp)
