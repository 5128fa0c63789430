"""The vision tower: blocks of attention over all patches of an entry, and an MLP. Unusual in it:

- attention is narrower or wider than the residual: `qkv_width` is a size of its own;
- it sees in both directions, and one entry only: an image, or all frames of a piece of a video;
- two encodings of positions: a learned table, resized, added once; a rotation in every block;
- no bias; norms round once, after the weight, unlike the decoder's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ...config.vision import VisionConfig
from ...numerics import at_least_float32, widen
from ..declared import lead_with_groups
from ..layers import Term, dot, linear, weight, with_rank
from .positions import angles, frame_table, places, positions, rotate

CHANNELS = 3  # red, green, blue


def vision_weight(dtype: DTypeLike, **dims: int) -> nnx.Param:
    """A replicated weight of the tower or the projector."""
    return weight(dtype, nnx.Param, term=Term.VISION, **dims)


def rms_norm(
    x: Float[Array, "*rows C"], w: Float[Array, " C"], eps: float
) -> Float[Array, "*rows C"]:
    """x / rms(x) * w in at least float32, rounded once: as torch's RMSNorm."""
    wide = widen(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (normed * with_rank(w.astype(wide.dtype), x.ndim)).astype(x.dtype)


def attend(
    q: Float[Array, "T H K"],
    k: Float[Array, "S H K"],
    v: Float[Array, "S H K"],
    valid: Bool[Array, " S"],
) -> Float[Array, "T H K"]:
    """Every query over all valid keys: softmax(q k^T K^-1/2) v, softmax in at least float32. The
    definition, with T x S scores a head.
    """
    scores = dot("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(valid[None, None], scores, -jnp.inf)
    return dot("hts,shk->thk", jax.nn.softmax(scores).astype(v.dtype), v).astype(q.dtype)


def attend_in_blocks(
    q: Float[Array, "T H K"],
    k: Float[Array, "S H K"],
    v: Float[Array, "S H K"],
    valid: Bool[Array, " S"],
    size: int,
) -> Float[Array, "T H K"]:
    """`attend`, `size` queries at a time; T is a multiple of it."""
    if size >= len(q):
        return attend(q, k, v, valid)
    blocks = q.reshape(-1, size, *q.shape[1:])
    return jax.lax.map(lambda block: attend(block, k, v, valid), blocks).reshape(q.shape)


def query_block(S: int, H: int, dtype: DTypeLike, most_bytes: int) -> int:
    """How many of S queries meet S keys at a time: the largest divisor of S whose scores of H heads
    take at most `most_bytes`.
    """
    fitting = most_bytes // (S * H * at_least_float32(dtype).itemsize)
    small = [n for n in range(1, math.isqrt(S) + 1) if S % n == 0]
    return max(n for n in (*small, *(S // n for n in small)) if n <= max(1, fitting))


class Block(nnx.Module):
    """One block: norm, attention; norm, MLP."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        C, X, F = config.width, config.qkv_width, config.ffn
        self.config = config
        self.attention_norm = vision_weight(dtype, C=C)
        self.w_qkv = vision_weight(dtype, X=3 * X, C=C)
        self.w_o = vision_weight(dtype, C=C, X=X)
        self.mlp_norm = vision_weight(dtype, C=C)
        self.w_in = vision_weight(dtype, F=F, C=C)
        self.w_out = vision_weight(dtype, C=C, F=F)

    def __call__(
        self,
        x: Float[Array, "S C"],
        turn: Float[Array, "S half"],
        valid: Bool[Array, " S"],
        block_bytes: int,
    ) -> Float[Array, "S C"]:
        """The residual stream after this block, of one entry whose patches are `valid`."""
        with jax.named_scope("attention"):
            q, k, v = self.qkv(x, turn)
            size = query_block(len(x), self.config.heads, x.dtype, block_bytes)
            out = attend_in_blocks(q, k, v, valid, size)
            x = x + linear(out.reshape(len(x), -1), self.w_o[...])
        with jax.named_scope("mlp"):
            h = linear(rms_norm(x, self.mlp_norm[...], self.config.norm_eps), self.w_in[...])
            h = jax.nn.gelu(widen(h), approximate=True).astype(x.dtype)
            return x + linear(h, self.w_out[...])

    def qkv(
        self, x: Float[Array, "S C"], turn: Float[Array, "S half"]
    ) -> tuple[Float[Array, "S H K"], Float[Array, "S H K"], Float[Array, "S H K"]]:
        """Queries and keys, rotated, and values."""
        normed = rms_norm(x, self.attention_norm[...], self.config.norm_eps)
        heads = linear(normed, self.w_qkv[...]).reshape(len(x), 3, self.config.heads, -1)
        q, k, v = (heads[:, i] for i in range(3))
        return rotate(q, turn), rotate(k, turn), v


class Tower(nnx.Module):
    """Patch embedding, position table, blocks and the last norm."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        C, p = config.width, config.patch
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.w_patch = vision_weight(dtype, C=C, X=CHANNELS, V=p, W=p)
        self.table = vision_weight(dtype, R=config.table_rows, Q=config.table_columns, C=C)
        self.block = Block(config, dtype)  # all of them: its weights lead with their number
        lead_with_groups(self.block, config.blocks)
        self.norm = vision_weight(dtype, C=C)

    def __call__(
        self, patches: Float[Array, "frames L X"], grid: Int[Array, "2"], block_bytes: int
    ) -> Float[Array, "frames L C"]:
        """Patches of one entry in merge order, each (channel, y, x), on a grid (rows, columns) with
        at most L places -> normed rows. Places beyond the grid are padding.
        """
        frames, L = patches.shape[:2]
        row, column = places(L, grid[1])
        x = self.embed(patches, row, column, grid).reshape(frames * L, -1)
        turn = angles(row, column, self.config.head_dim, self.dtype)
        turn = jnp.tile(turn, (frames, 1))  # frames share angles
        valid = jnp.tile(jnp.arange(L, dtype=jnp.int32) < grid[0] * grid[1], frames)
        graph, weights = nnx.split(self.block)

        def run(x: Array, of_block: Any) -> tuple[Array, None]:
            return nnx.merge(graph, of_block)(x, turn, valid, block_bytes), None

        with jax.named_scope("blocks"):
            x, _ = jax.lax.scan(run, x, weights)
        return rms_norm(x, self.norm[...], self.config.norm_eps).reshape(frames, L, -1)

    def embed(
        self,
        patches: Float[Array, "frames L X"],
        row: Int[Array, " L"],
        column: Int[Array, " L"],
        grid: Int[Array, "2"],
    ) -> Float[Array, "frames L C"]:
        """Patches projected, with their positions, and times where there are several frames."""
        w = self.w_patch[...]
        x = linear(patches, w.reshape(len(w), -1))
        return x + self.position(len(patches), row, column, grid)

    def position(
        self, frames: int, row: Int[Array, " L"], column: Int[Array, " L"], grid: Int[Array, "2"]
    ) -> Float[Array, "frames L C"]:
        """What is added to projected patches."""
        place = positions(self.table[...], row, column, grid)[None]
        if frames > 1:
            times = jnp.asarray(frame_table(frames, self.config.width), place.dtype)
            place = place + times[:, None]
        return place.astype(self.dtype)
