"""The latent mixture of experts: the router and the sublayer, w_up rmsnorm(experts(w_down x)) +
shared(x).

What is unusual in it:
- routed experts work in a latent space of width L; shared experts and the router see the hidden
  width D;
- the router's bias selects experts and never weighs them;
- the norm of the latent sum needs the complete sum of a row, so ranks reduce before it;
- nothing is ever dropped: there is no capacity.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32
from ..parallel import collectives
from ..parallel.reductions import SUM
from ..parallel.roles import Dim, Role
from .experts.dispatch import dispatched, padded_to, real_rows, run_local_experts
from .experts.weights import Experts
from .layers import MLP, Term, linear, linear_wide, rms_norm, weight
from .mxfp4 import Quantization
from .step import Step

Combine = Callable[[Array, Array, Array, Step], Array]  # latents, ids, weights -> latent sums


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


def _softmax(logits: Float[Array, "P E"]) -> Float[Array, "P E"]:
    return jax.nn.softmax(logits, axis=-1)


ROUTERS = {"sigmoid": jax.nn.sigmoid, "softmax": _softmax}  # logits -> scores, by `Config.router`


def route(
    logits: Float[Array, "P E"], bias: Float[Array, " E"], config: Config
) -> tuple[Int[Array, "P A"], Float[Array, "P A"]]:
    """The active experts of each row and their weights. The bias selects, it never weighs; ties:
    lowest expert.
    """
    scores = ROUTERS[config.router](logits)
    choice = limit_groups(scores + bias[None], config.expert_groups, config.groups_kept)
    _, ids = jax.lax.top_k(choice, config.active_experts)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalize and config.active_experts > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * config.routed_scale


class MoE(nnx.Module):
    """The latent MoE sublayer: w_up rmsnorm(sum of experts of w_down x) + shared(x)."""

    def __init__(self, config: Config, dtype: DTypeLike, quantization: Quantization):
        D, E, L = config.hidden, config.experts, config.latent
        self.config = config
        self.w_router = weight(dtype, term=Term.ROUTER, E=Dim(E, role=Role.LATENT), D=D)
        self.router_bias = weight(at_least_float32(dtype), E=E)
        self.w_latent_down = weight(dtype, term=Term.LATENT, L=Dim(L, role=Role.LATENT), D=D)
        self.w_latent_up = weight(dtype, term=Term.LATENT, D=D, L=Dim(L, role=Role.LATENT))
        if config.latent_norm:
            self.latent_norm = weight(dtype, L=L)
        self.experts = Experts(config, dtype, quantization)
        if config.shared_experts:
            self.shared = MLP(config, config.shared_ffn, dtype, Role.SHARED_WIDTH)

    def __call__(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """The complete output for the residual rows x that this rank holds. Padding reaches no
        expert.
        """
        local = step.place.runs_local_experts(step.rows)
        if local and not step.is_sliced:
            return self._on_all_rows(x, step)
        combine = self._gather_and_run if local else self._dispatch
        return self._on_local_rows(x, combine, step)

    def _on_local_rows(
        self, x: Float[Array, "P D"], combine: Combine, step: Step
    ) -> Float[Array, "P D"]:
        """Every rank routes its local rows; `combine` brings the sums of their experts together.
        What is sharded along its width needs all rows.
        """
        needs_all_rows = step.place.latent == "sharded" or self._shards_shared(step)
        local_rows, all_rows = step.local_rows(x), step.all_rows(x) if needs_all_rows else x

        # Route the local rows and sum their experts, wherever those are.
        active = collectives.local_rows(step.valid.reshape(-1))
        z, logits = self._latents_and_logits(local_rows, all_rows, step)
        ids, weights = self._route(logits, active)
        routed = self._norm(combine(z, ids, weights, step).astype(x.dtype))

        # Back to the hidden width, with the shared experts: each part is either complete for the
        # local rows, or a partial sum for all rows.
        partial, complete = [], []
        if step.place.latent == "sharded":
            columns = collectives.rows_to_columns(routed, step.rows)
            partial.append(linear(columns, self.w_latent_up[...]))
        else:
            complete.append(linear(routed, self.w_latent_up[...]))
        if self._shards_shared(step):
            partial.append(self.shared(all_rows))
        elif self.config.shared_experts:
            complete.append(self.shared(local_rows))
        return step.reduce(partial, complete)

    def _on_all_rows(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """Every rank holds all rows, and runs its local experts on them. One all-reduce sums latent
        and shared outputs together; sharded latent projections need the complete latent rows first,
        and take two.
        """
        active = step.valid.reshape(-1)
        shared = self._shared_partial(x, step)
        z, logits = linear(x, self.w_latent_down[...]), self._logits(x)
        if step.place.latent == "whole":
            partial = self._gather_and_run(z, *self._route(logits, active), step)
            both = jnp.concatenate([partial, shared], axis=1)
            sums = collectives.all_reduce(both, step.reduction)
            routed, shared = sums[:, : z.shape[1]], sums[:, z.shape[1] :]
            return linear(self._norm(routed), self.w_latent_up[...]) + shared
        gather = lambda x: collectives.all_gather(x[:, None], 1)  # noqa: E731
        z, logits = self._join_columns(*collectives.as_message(gather, (), z, logits))
        partial = self._gather_and_run(z, *self._route(logits, active), step)
        sums = collectives.all_reduce(partial, step.reduction)
        routed = linear(collectives.local_columns(self._norm(sums)), self.w_latent_up[...])
        return collectives.all_reduce(routed + shared, step.reduction)

    @jax.named_scope("experts")
    def _dispatch(
        self,
        z: Float[Array, "c L"],
        ids: Int[Array, "c A"],
        weights: Float[Array, "c A"],
        step: Step,
    ) -> Float[Array, "c L"]:
        return dispatched(z, ids, weights, self.experts, step)

    @jax.named_scope("experts")
    def _gather_and_run(
        self,
        z: Float[Array, "c L"],
        ids: Int[Array, "c A"],
        weights: Float[Array, "c A"],
        step: Step,
    ) -> Float[Array, "c L"]:
        """The latent sums of the local rows: rows are gathered from all ranks that hold others, run
        through the local experts, and their sums scattered back. Partial where every model rank
        holds all rows, complete where rows are sliced.
        """
        axes = step.row_axes
        gather = lambda x: collectives.all_gather(x, 0, axes)  # noqa: E731
        gathered = collectives.as_message(gather, (), z, ids + 1, weights)
        padded = len(gathered[0])
        real = real_rows(padded, axes, step) if step.is_sliced else padded
        z, numbers, weights = (x[:real] for x in gathered)
        sums = run_local_experts(z, numbers - 1, weights, self.experts, step).astype(z.dtype)
        partial = padded_to(sums, padded)
        over_model_ranks = axes == step.place.axes(Role.HEADS)
        how = step.reduction if over_model_ranks else SUM  # a chosen reduction is for model ranks
        return collectives.reduce_scatter(partial, how, axes)

    def _latents_and_logits(
        self, local_rows: Float[Array, "c D"], all_rows: Float[Array, "P D"], step: Step
    ) -> tuple[Float[Array, "c L"], Float[Array, "c E"]]:
        """Latent rows and router logits of the local rows."""
        x = local_rows if step.place.latent == "whole" else all_rows
        z, logits = linear(x, self.w_latent_down[...]), self._logits(x)
        if step.place.latent == "whole":
            return z, logits
        return self._join_columns(
            *collectives.as_message(collectives.columns_to_rows, (), z, logits)
        )

    def _join_columns(
        self, z: Float[Array, "c n X"], logits: Float[Array, "c n Y"]
    ) -> tuple[Float[Array, "c L"], Float[Array, "c E"]]:
        """Full latent rows and logits out of every rank's columns of both."""
        z, logits = (part.reshape(len(part), -1) for part in (z, logits))
        return z, logits[:, : self.config.experts]  # a padded router ends in experts without a row

    @jax.named_scope("router")
    def _logits(self, x: Float[Array, "P D"]) -> Float[Array, "P E"]:
        return linear_wide(x, self.w_router[...])

    @jax.named_scope("router")
    def _route(
        self, logits: Float[Array, "P E"], active: Bool[Array, " P"]
    ) -> tuple[Int[Array, "P A"], Float[Array, "P A"]]:
        """`route`; inactive rows have no expert."""
        ids, weights = route(logits, self.router_bias[...], self.config)
        return jnp.where(active[:, None], ids, -1), weights

    def _norm(self, sums: Float[Array, "P L"]) -> Float[Array, "P L"]:
        """The latent norm. It must see the complete sum of a row, never a partial one."""
        if not self.config.latent_norm:
            return sums
        return rms_norm(sums, self.latent_norm[...], self.config.norm_eps)

    def _shards_shared(self, step: Step) -> bool:
        """Whether a rank holds a part of the shared experts' width."""
        return bool(self.config.shared_experts and step.place.axes(Role.SHARED_WIDTH))

    def _shared_partial(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """This rank's partial sum of the shared experts for all rows."""
        if not self.config.shared_experts:
            return jnp.zeros_like(x)
        if self._shards_shared(step):
            return self.shared(x)
        return collectives.zero_padded_rows(self.shared(collectives.local_rows(x)), len(x))
