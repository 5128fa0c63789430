"""Kimi Delta Attention (KDA): linear attention with a state of constant size. Per head, with a
state [K, V] (Kimi Linear, arXiv 2510.26692):

    state <- diag(exp(log_decay)) state
    state <- state + beta k (v - k^T state)^T         # the delta sees the DECAYED state
    o      = q^T state

What is unusual in it:
- the decay is per key channel, not per head (`attention.delta_rule`);
- q, k and v each pass a short causal convolution with a SiLU, so a layer keeps the last inputs of
  each (conv state) beside the recurrent state;
- q and k have unit length; the state and all that decides it is at least float32, whatever the
  model's type;
- K and V may differ.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel.roles import Dim, Role
from .attention.delta_rule import IMPLEMENTATIONS, recurrent_step
from .layers import Term, linear, linear_wide, weight, with_rank
from .state import KDAState
from .step import Step

L2_EPS = 1e-6


def l2_norm(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """x / sqrt(sum x^2 + 1e-6), in at least float32."""
    wide = widen(x)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + L2_EPS)


def split_heads(x: Float[Array, "B T HK"], width: int) -> Float[Array, "B T H K"]:
    """Heads of `width` channels each, side by side in x, as a dim."""
    return x.reshape(*x.shape[:2], -1, width)


def log_decay(
    raw: Float[Array, "*rows H K"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "*rows H K"]:
    """The log of the per-channel decay, <= 0.

    Bounded: lower_bound * sigmoid(exp(a_log) (raw + dt_bias)). Without a bound: -exp(a_log)
    softplus(raw + dt_bias), another function and not a clamp of it.
    """
    rate = with_rank(jnp.exp(a_log)[:, None], raw.ndim)
    shifted = raw + with_rank(dt_bias, raw.ndim)
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def convolve(
    x: Float[Array, "B T C"],
    conv_state: Float[Array, "B W1 C"],
    taps: Float[Array, "C W"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W1 C"]]:
    """silu of the causal depthwise convolution of [conv_state, x], and the next conv state: the
    last W - 1 inputs of each row.

    The last tap multiplies the current token. The next conv state ends at each row's length, so
    padding never enters it.
    """
    W, T = taps.shape[1], x.shape[1]
    inputs = jnp.concatenate([conv_state.astype(x.dtype), x], axis=1)
    summed = sum(widen(inputs[:, i : i + T]) * taps[None, None, :, i] for i in range(W))
    last_inputs = lengths[:, None] + jnp.arange(W - 1, dtype=jnp.int32)[None]
    conv_state = jnp.take_along_axis(inputs, last_inputs[..., None], axis=1)
    return jax.nn.silu(summed).astype(x.dtype), conv_state


class KDA(nnx.Module):
    """The KDA sublayer on this rank's heads; its result is a partial sum over heads."""

    def __init__(self, config: Config, dtype: DTypeLike):
        D, W = config.hidden, config.conv_width
        K, V = config.kda_key_dim, config.kda_value_dim
        H = Dim(config.kda_heads, role=Role.HEADS)
        HK = Dim(config.kda_heads, K, Role.HEADS)
        HV = Dim(config.kda_heads, V, Role.HEADS)
        wide = at_least_float32(dtype)
        self.config = config
        self.w_q = weight(dtype, term=Term.KDA, HK=HK, D=D)
        self.w_k = weight(dtype, term=Term.KDA, HK=HK, D=D)
        self.w_v = weight(dtype, term=Term.KDA, HV=HV, D=D)
        self.conv_q = weight(wide, HK=HK, W=W)
        self.conv_k = weight(wide, HK=HK, W=W)
        self.conv_v = weight(wide, HV=HV, W=W)
        self.w_decay_a = weight(dtype, K=K, D=D)
        self.w_decay_b = weight(dtype, term=Term.KDA, HK=HK, K=K)
        self.a_log = weight(wide, H=H)
        self.dt_bias = weight(wide, HK=HK)
        self.w_beta = weight(dtype, term=Term.KDA, H=H, D=D)
        self.o_norm = weight(wide, V=V)
        if config.full_rank_gate:
            self.w_gate = weight(dtype, term=Term.KDA, HV=HV, D=D)
        else:
            self.w_gate_a = weight(dtype, V=V, D=D)
            self.w_gate_b = weight(dtype, term=Term.KDA, HV=HV, V=V)
        self.w_o = weight(dtype, term=Term.KDA, D=D, HV=HV)

    @jax.named_scope("kda")
    def __call__(
        self, x: Float[Array, "B T D"], state: KDAState, step: Step
    ) -> tuple[Float[Array, "B T D"], KDAState]:
        """The partial sum over this rank's heads of the output for x, and the stack's state with
        this layer after each row's last token.
        """
        before = state.at(step.group).restarted(step.start)
        q, k, v, conv_states = self._project(x, before, step.lengths)
        decay, beta = self._gates(x)
        recurrent_state, o = self._mix_tokens(before.memory, q, k, v, decay, beta, step)
        out = linear(self._gated(o, x), self.w_o[...])
        after = dataclasses.replace(before, memory=recurrent_state, **conv_states)
        return out, state.put(step.group, after)

    def _project(
        self, x: Float[Array, "B T D"], before: KDAState, lengths: Int[Array, " B"]
    ) -> tuple[
        Float[Array, "B T H K"],
        Float[Array, "B T H K"],
        Float[Array, "B T H V"],
        dict[str, Array],
    ]:
        """Queries, keys and values after their convolutions, in at least float32, and the next
        conv states by their names.
        """
        q, window_q = convolve(linear(x, self.w_q[...]), before.window_q, self.conv_q[...], lengths)
        k, window_k = convolve(linear(x, self.w_k[...]), before.window_k, self.conv_k[...], lengths)
        v, window_v = convolve(linear(x, self.w_v[...]), before.window_v, self.conv_v[...], lengths)
        K, V = self.config.kda_key_dim, self.config.kda_value_dim
        q, k, v = split_heads(q, K), split_heads(k, K), split_heads(v, V)
        conv_states = dict(window_q=window_q, window_k=window_k, window_v=window_v)
        return l2_norm(q) * K**-0.5, l2_norm(k), widen(v), conv_states

    def _gates(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
        """The log decay of every key channel, and how strongly a token writes (beta, 0 to 1)."""
        K = self.config.kda_key_dim
        # XLA for GPUs joins products of the same rows: those of up to four weights read them where
        # they lie, those of more, or of a few columns, copy all of them first. Barriers keep these
        # two products apart from each other and from those of q, k, v and the output gate.
        x_decay = jax.lax.optimization_barrier(x)
        x_beta = jax.lax.optimization_barrier(x_decay)
        raw = linear_wide(linear(x_decay, self.w_decay_a[...]), self.w_decay_b[...])
        dt_bias = self.dt_bias[...].reshape(-1, K)
        bound = self.config.decay_lower_bound
        decay = log_decay(split_heads(raw, K), self.a_log[...], dt_bias, bound)
        return decay, jax.nn.sigmoid(linear_wide(x_beta, self.w_beta[...]))

    def _mix_tokens(
        self,
        state: Float[Array, "B H K V"],
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        decay: Float[Array, "B T H K"],
        beta: Float[Array, "B T H"],
        step: Step,
    ) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
        """The delta rule over the valid tokens; a padded token neither decays nor writes."""
        q, k, v, decay = (jnp.where(step.valid[..., None, None], x, 0) for x in (q, k, v, decay))
        beta = jnp.where(step.valid[..., None], beta, 0)
        if q.shape[1] == 1:
            token = (x[:, 0] for x in (q, k, v, decay, beta))
            state, o = recurrent_step(state, *token)
            return state, o[:, None]
        bound = self.config.decay_lower_bound
        steepest = -math.inf if bound is None else bound
        run = IMPLEMENTATIONS[step.implementations.kda]
        return run(state, q, k, v, decay, beta, step.kda_chunk, steepest)

    def _gated(
        self, o: Float[Array, "B T H V"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T HV"]:
        """The RMS norm of each head's output times the sigmoid of its gate, in at least float32,
        rounded once.
        """
        scale = jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + self.config.norm_eps)
        normed = o * scale * with_rank(self.o_norm[...], o.ndim)
        if self.config.full_rank_gate:
            gate = linear(x, self.w_gate[...])
        else:
            gate = linear(linear(x, self.w_gate_a[...]), self.w_gate_b[...])
        flat = normed.reshape(*normed.shape[:2], -1)
        return (flat * jax.nn.sigmoid(widen(gate))).astype(x.dtype)
