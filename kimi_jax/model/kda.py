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
from .attention.rollback import ROLLBACKS, Pending, Verifying
from .layers import Term, linear, linear_wide, weight, with_rank
from .state import KDAState, next_conv_state
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
    return jax.nn.silu(summed).astype(x.dtype), next_conv_state(conv_state, x, lengths)


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
        self, x: Float[Array, "B T D"], state: KDAState | Verifying, step: Step
    ) -> tuple[Float[Array, "B T D"], KDAState | Verifying]:
        """The partial sum over this rank's heads of the output for x, and the stack's state with
        this layer after each row's last token; of rows that may be taken back, what they leave.
        """
        before = state.at(step.group).restarted(step.start)
        inputs = self._conv_inputs(x)
        q, k, v, conv_states = self._convolved(inputs, before, step.lengths)
        tokens = self._valid_tokens((q, k, v, *self._gates(x)), step)
        if isinstance(state, Verifying):
            run = ROLLBACKS[step.implementations.rollback].of_rows
            record, o = run(before.memory, *tokens, steepest=self._steepest)
            state = state.put(step.group, Pending(record, **inputs))
        else:
            recurrent_state, o = self._mix_tokens(before.memory, *tokens, step=step)
            after = dataclasses.replace(before, memory=recurrent_state, **conv_states)
            state = state.put(step.group, after)
        return linear(self._gated(o, x), self.w_o[...]), state

    def _conv_inputs(self, x: Float[Array, "B T D"]) -> dict[str, Array]:
        """The inputs of the three convolutions, by the names of the conv states that keep them."""
        weights = dict(window_q=self.w_q, window_k=self.w_k, window_v=self.w_v)
        return {name: linear(x, w[...]) for name, w in weights.items()}

    def _convolved(
        self, inputs: dict[str, Array], before: KDAState, lengths: Int[Array, " B"]
    ) -> tuple[
        Float[Array, "B T H K"],
        Float[Array, "B T H K"],
        Float[Array, "B T H V"],
        dict[str, Array],
    ]:
        """Queries, keys and values after their convolutions, in at least float32, and the next
        conv states by their names.
        """
        taps = dict(window_q=self.conv_q, window_k=self.conv_k, window_v=self.conv_v)
        pairs = {
            name: convolve(x, getattr(before, name), taps[name][...], lengths)
            for name, x in inputs.items()
        }
        q, k, v = (y for y, _ in pairs.values())
        K, V = self.config.kda_key_dim, self.config.kda_value_dim
        q, k, v = split_heads(q, K), split_heads(k, K), split_heads(v, V)
        conv_states = {name: conv_state for name, (_, conv_state) in pairs.items()}
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

    def _valid_tokens(self, tokens: tuple[Array, ...], step: Step) -> tuple[Array, ...]:
        """q, k, v, log decay and beta: a padded token neither decays nor writes."""
        valid = step.valid[..., None]
        return tuple(jnp.where(valid[..., None] if x.ndim == 4 else valid, x, 0) for x in tokens)

    @property
    def _steepest(self) -> float:
        """No log decay of a token is below it."""
        bound = self.config.decay_lower_bound
        return -math.inf if bound is None else bound

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
        """The delta rule over the tokens."""
        if q.shape[1] == 1:
            token = (x[:, 0] for x in (q, k, v, decay, beta))
            state, o = recurrent_step(state, *token)
            return state, o[:, None]
        run = IMPLEMENTATIONS[step.implementations.kda]
        return run(state, q, k, v, decay, beta, step.kda_chunk, self._steepest)

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
