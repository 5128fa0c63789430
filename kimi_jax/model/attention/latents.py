"""Attention to cached latent rows: expanded (the definition), absorbed in blocks that end with the
data, and over selected rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...numerics import at_least_float32, widen
from ...parallel.helix import Partial
from ..layers import dot, multiply_rows
from ..state import from_cache, read_block
from ..step import Step


def per_head(x: Float[Array, "B T H i"], w: Float[Array, "H i o"]) -> Float[Array, "B T H o"]:
    """x_h w_h for every head, rounded once. Heads lead both operands: CPUs run no other batched
    bfloat16 product.
    """
    B, T, H, _ = x.shape
    rows = jnp.moveaxis(x, 2, 0).reshape(H, B * T, -1)
    y = multiply_rows(partial(dot, "hpi,hio->hpo"), rows, w).astype(x.dtype)
    return jnp.moveaxis(y.reshape(H, B, T, -1), 0, 2)


def expanded(
    q: Float[Array, "B T H K"],
    latents: Float[Array, "B S R"],
    w_k_b: Float[Array, "H N C"],
    w_v_b: Float[Array, "H V C"],
    allowed: Bool[Array, "B T S"],
    scale: float,
    bias: Float[Array, "B T S"] | float = 0.0,
) -> Float[Array, "B T H V"]:
    """softmax(q k^T scale + bias) v with every key and value written out: the definition."""
    q, latents = widen(q), widen(latents)
    c, k_rope = latents[..., : w_k_b.shape[-1]], latents[..., w_k_b.shape[-1] :]
    k_nope = dot("bsc,hnc->bshn", c, widen(w_k_b))
    v = dot("bsc,hvc->bshv", c, widen(w_v_b))
    q_nope, q_rope = q[..., : w_k_b.shape[1]], q[..., w_k_b.shape[1] :]
    scores = dot("bthn,bshn->bhts", q_nope, k_nope) + dot("bthr,bsr->bhts", q_rope, k_rope)
    scores = scores * scale + jnp.expand_dims(bias, -3) if jnp.ndim(bias) else scores * scale
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
    return dot("bhts,bshv->bthv", weights, v)


def attend_rows(
    q: Float[Array, "B T H R"],
    cache: Shaped[Array, "G B S R"],
    positions: Int[Array, "B T"],
    step: Step,
    value_width: int,
    scale: float,
    slots: int,
) -> Partial:
    """Every query over all latent rows up to its position that this rank holds, a block of keys at
    a time (online softmax). The first `value_width` numbers of a row are its values.

    Only the first `slots` slots can hold keys, and only blocks that hold some are read. A block
    comes straight out of the stack of caches, so that no layer's cache is copied.
    """
    B, T, H, _ = q.shape
    block = min(step.blocks.keys, slots)

    def add_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, acc = carry

        # Read. The last block begins early, to end with the slots: its overlap is not seen twice.
        first = jnp.minimum(i * block, slots - block)
        rows, key_positions = read_block(cache, first, block, q.dtype, step)
        slot = first + jnp.arange(block, dtype=jnp.int32)
        is_new = slot >= i * block
        is_seen = (key_positions[None, None] <= positions[..., None]) & is_new[None, None]

        # Score; unseen keys weigh exp(-inf) = 0.
        products = dot("bthr,bsr->bhts", q, rows)
        scores = jnp.where(is_seen[:, None], products * scale, -jnp.inf)

        # Rescale what was summed so far to the new largest score, and add this block.
        new_top = jnp.maximum(top, scores.max(-1))
        reference = jnp.where(new_top == -jnp.inf, 0, new_top)  # no key yet: -inf - -inf is NaN
        weights = jnp.exp(scores - reference[..., None])
        rescale = jnp.exp(top - reference)
        added = dot("bhts,bsc->bhtc", weights.astype(q.dtype), rows[..., :value_width])
        return new_top, mass * rescale + weights.sum(-1), acc * rescale[..., None] + added

    wide = at_least_float32(q.dtype)
    empty = (
        jnp.full((B, H, T), -jnp.inf, wide),
        jnp.zeros((B, H, T), wide),
        jnp.zeros((B, H, T, value_width), wide),
    )
    blocks = (jnp.minimum(step.max_local_keys, slots) + block - 1) // block
    top, mass, acc = jax.lax.fori_loop(0, blocks, add_block, empty)
    o = (acc / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype)
    return Partial(*(jnp.moveaxis(x, 1, 2) for x in (o, top, mass)))


def attend_selected(
    q: Float[Array, "B T H R"],
    cache: Shaped[Array, "G B S R"],
    group: int | Array,
    slots: Int[Array, "B T U"],
    kept: Bool[Array, "B T U"],
    value_width: int,
    scale: float,
) -> Partial:
    """Every query over those of its `slots` that are kept, gathered from the stack of caches."""
    batch = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    rows = from_cache(cache[group, batch, slots], q.dtype)
    rows = jnp.where(kept[..., None], rows, jnp.zeros((), q.dtype))
    scores = jnp.where(kept[..., None, :], dot("bthr,btur->bthu", q, rows) * scale, -jnp.inf)
    top = scores.max(-1)
    weights = jnp.exp(scores - jnp.maximum(top, jnp.finfo(scores.dtype).min)[..., None])
    mass = weights.sum(-1)
    out = dot("bthu,btuc->bthc", weights.astype(q.dtype), rows[..., :value_width])
    return Partial((out / jnp.maximum(mass, 1e-30)[..., None]).astype(q.dtype), top, mass)


def over_queries(
    function: Callable[[Any], Any], arrays: tuple[Array, ...], valid: Bool[Array, "B T"], size: int
) -> Any:
    """`function` of arrays [B, T, ...], applied to blocks of at most `size` queries in turn. Blocks
    of padding alone are skipped: their results are zero.
    """
    B, T = valid.shape
    if size >= T:
        return function(arrays)
    size = -(-T // -(-T // size))  # blocks of equal size: 256 queries by 204 are two of 128

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -T % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, -1, size, *x.shape[2:]), 1, 0)

    def join(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(B, -1, *parts.shape[3:])[:, :T]

    blocks = tuple(split(x) for x in arrays)
    shapes = jax.eval_shape(function, tuple(x[0] for x in blocks))
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731

    def of_block(block: tuple[Array, tuple[Array, ...]]) -> Any:
        valid, arrays = block
        return jax.lax.cond(jnp.any(valid), lambda: function(arrays), zeros)

    return jax.tree.map(join, jax.lax.map(of_block, (split(valid), blocks)))
