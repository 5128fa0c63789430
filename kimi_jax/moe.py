"""The latent mixture of experts: router, every expert on every token (definition), sorted blocks
(fast), the sublayer.

Nothing is ever dropped: there is no capacity. Routed experts work in a latent space of width L,
shared experts on D.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from . import mxfp4
from .config import Config
from .layers import (
    MLP,
    Expert,
    at_least_float32,
    linear,
    linear_wide,
    rms_norm,
    situ,
    weight,
    widen,
)
from .state import Step


def limit_groups(choice: Float[Array, "P E"], groups: int, keep: int) -> Float[Array, "P E"]:
    """-inf outside the `keep` groups whose two best experts sum highest (DeepSeek-V3's group
    limiting).
    """
    if groups <= keep:
        return choice
    grouped = choice.reshape(choice.shape[0], groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    _, kept = jax.lax.top_k(best_two, keep)
    allowed = jax.nn.one_hot(kept, groups, dtype=jnp.bool_).any(1)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def route(
    logits: Float[Array, "P E"], bias: Float[Array, " E"], config: Config
) -> tuple[Int[Array, "P A"], Float[Array, "P A"]]:
    """The active experts of each row and their weights. The bias selects, it never weighs; ties:
    lowest expert.
    """
    scores = (
        jax.nn.sigmoid(logits) if config.router == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    )
    choice = limit_groups(scores + bias, config.expert_groups, config.groups_kept)
    _, ids = jax.lax.top_k(choice, config.active_experts)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalize and config.active_experts > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * config.routed_scale


class Experts(nnx.Module):
    """The routed experts' weights [G, E, out, in], MXFP4-packed (two inputs a byte, a scale byte
    per 32) or plain.
    """

    def __init__(self, config: Config, dtype: DTypeLike, packed: bool):
        E, F, L = config.experts, config.expert_ffn, config.latent
        self.config, self.packed = config, packed
        if packed:
            self.w_gate = weight(jnp.uint8, Expert, E=E, F=F, L2=L // 2)
            self.w_up = weight(jnp.uint8, Expert, E=E, F=F, L2=L // 2)
            self.w_down = weight(jnp.uint8, Expert, E=E, L=L, F2=F // 2)
            self.s_gate = weight(jnp.uint8, Expert, E=E, F=F, L32=L // mxfp4.GROUP)
            self.s_up = weight(jnp.uint8, Expert, E=E, F=F, L32=L // mxfp4.GROUP)
            self.s_down = weight(jnp.uint8, Expert, E=E, L=L, F32=F // mxfp4.GROUP)
        else:
            self.w_gate = weight(dtype, Expert, E=E, F=F, L=L)
            self.w_up = weight(dtype, Expert, E=E, F=F, L=L)
            self.w_down = weight(dtype, Expert, E=E, L=L, F=F)

    def _times(
        self, x: Float[Array, "rows i"], name: str, group: int | Array, expert: Array
    ) -> Array:
        """x w^T for one expert, its weights taken by index and decoded where they are used; rounded
        to x's type.
        """
        take = lambda kind: _take(getattr(self, f"{kind}_{name}")[...], group, expert)  # noqa: E731
        if self.packed:
            return mxfp4.matmul(x, take("w"), take("s")).astype(x.dtype)
        return linear(x, take("w"))

    def one(
        self, x: Float[Array, "rows L"], group: int | Array, expert: Array
    ) -> Float[Array, "rows L"]:
        """w_down situ(w_gate x, w_up x) of one expert."""
        hidden = situ(
            self._times(x, "gate", group, expert), self._times(x, "up", group, expert), self.config
        )
        return self._times(hidden.astype(x.dtype), "down", group, expert)

    def whole(self, name: str, group: int | Array, dtype: DTypeLike) -> Array:
        """All experts' matrices of one kind [E, out, in], decoded: for the definition."""
        take = lambda kind: getattr(self, f"{kind}_{name}")[...][group]  # noqa: E731
        return mxfp4.unpack(take("w"), take("s"), dtype) if self.packed else take("w")


def _take(stack: Array, group: int | Array, expert: Array) -> Array:
    start = (jnp.int32(group), expert, jnp.int32(0), jnp.int32(0))
    return jax.lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]


def dense(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """Every expert on every row, then a mask: slow, and plainly right. Ids outside the experts held
    weigh nothing.
    """
    w_gate, w_up, w_down = (experts.whole(name, group, z.dtype) for name in ("gate", "up", "down"))
    every = jax.vmap(linear)
    rows = jnp.broadcast_to(z, (w_gate.shape[0], *z.shape))
    hidden = situ(every(rows, w_gate), every(rows, w_up), experts.config).astype(z.dtype)
    outputs = widen(every(hidden, w_down))
    chosen = jax.nn.one_hot(ids, w_gate.shape[0], dtype=weights.dtype)
    return jnp.einsum("pae,pa,epl->pl", chosen, weights, outputs)


def block_rows(rows: int) -> int:
    """Rows of one expert that are multiplied together: one for a lone row, else 8 to 32.

    For 256 rows, 8 of 64 experts each, a layer took 95 ms in blocks of 16, 82 of 32, 100 of 64.
    """
    return 1 if rows == 1 else 8 if rows < 64 else 16 if rows < 256 else 32


def grouped(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """`dense` by sorting (row, expert) pairs by expert and running the blocks that exist, one
    expert a block.

    Cost follows the active experts. A row's sum runs in the order of its experts, whatever its
    neighbours are.
    """
    P, A = ids.shape
    E, block = experts.w_gate.shape[1], block_rows(P)
    pair_expert = jnp.where((ids >= 0) & (ids < E), ids, E).reshape(-1)
    order = jnp.argsort(pair_expert, stable=True).astype(jnp.int32)
    counts = jnp.zeros(E, jnp.int32).at[pair_expert].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    block_ends = jnp.cumsum((counts + block - 1) // block, dtype=jnp.int32)
    flat_weights = weights.reshape(-1)

    def one(i: Array, total: Array) -> Array:
        expert = jnp.sum(block_ends <= i, dtype=jnp.int32)
        last = block_ends[expert] - (counts[expert] + block - 1) // block
        pairs = (
            ends[expert] - counts[expert] + (i - last) * block + jnp.arange(block, dtype=jnp.int32)
        )
        real = pairs < ends[expert]
        pair = order[jnp.where(real, pairs, 0)]
        row = pair // A
        output = widen(experts.one(z[row], group, expert)) * flat_weights[pair][:, None]
        return total.at[jnp.where(real, row, P)].add(output, mode="drop")

    return jax.lax.fori_loop(0, block_ends[-1], one, jnp.zeros(z.shape, at_least_float32(z.dtype)))


class MoE(nnx.Module):
    """The latent MoE sublayer: w_up rmsnorm(sum of experts of w_down x) + shared(x)."""

    def __init__(self, config: Config, dtype: DTypeLike, packed: bool):
        D, E, L = config.hidden, config.experts, config.latent
        self.config = config
        self.w_router = weight(dtype, NE=E, D=D)
        self.router_bias = weight(at_least_float32(dtype), NE=E)
        self.w_latent_down = weight(dtype, L=L, D=D)
        self.w_latent_up = weight(dtype, D=D, L=L)
        if config.latent_norm:
            self.latent_norm = weight(dtype, L=L)
        self.experts = Experts(config, dtype, packed)
        if config.shared_experts:
            self.shared = MLP(config, config.shared_ffn, dtype)

    def __call__(
        self, x: Float[Array, "P D"], active: Bool[Array, " P"], step: Step
    ) -> Float[Array, "P D"]:
        """x [P, D] -> [P, D]. Inactive rows (padding) reach no expert."""
        ids, weights = route(linear_wide(x, self.w_router[...]), self.router_bias[...], self.config)
        ids = jnp.where(active[:, None], ids, self.config.experts)
        form = dense if step.forms.moe == "dense" else grouped
        routed = form(
            linear(x, self.w_latent_down[...]), ids, weights, self.experts, step.group
        ).astype(x.dtype)
        if self.config.latent_norm:  # the norm sees the complete sum
            routed = rms_norm(routed, self.latent_norm[...], self.config.norm_eps)
        y = linear(routed, self.w_latent_up[...])
        return y + self.shared(x) if self.config.shared_experts else y
