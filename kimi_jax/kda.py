"""Kimi Delta Attention: short convolutions, per-channel decay and the delta rule, recurrent and in chunks.

Per head, with state [K, V] in float32 (Kimi Linear, arXiv 2510.26692):

    state <- diag(exp(log_decay)) state
    state <- state + beta k (v - k^T state)^T         # the delta sees the DECAYED state
    o      = q^T state
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .config import Config
from .layers import HIGHEST, at_least_float32, linear, linear_wide, weight, widen
from .state import KDAState, Step

CHUNK = 64
BLOCK = 16
L2_EPS = 1e-6


def l2_norm(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """x / sqrt(sum x^2 + 1e-6), in at least float32."""
    wide = widen(x)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + L2_EPS)


def log_decay(
    raw: Float[Array, "*rows H K"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "*rows H K"]:
    """The log of the per-channel decay, <= 0.

    Bounded: lower_bound * sigmoid(exp(a_log) (raw + dt_bias)). Without a bound: -exp(a_log) softplus(raw +
    dt_bias), another function and not a clamp of it.
    """
    rate = jnp.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(raw + dt_bias)
    return lower_bound * jax.nn.sigmoid(rate * (raw + dt_bias))


def convolve(
    x: Float[Array, "B T C"], window: Float[Array, "B W1 C"], taps: Float[Array, "C W"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T C"], Float[Array, "B W1 C"]]:
    """silu of the causal depthwise convolution of [window, x], and the last W - 1 inputs of each row.

    The last tap meets the current token. The new window ends at each row's own length, so padding never enters it.
    """
    W, T = taps.shape[1], x.shape[1]
    joined = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    summed = sum(widen(joined[:, i : i + T]) * taps[:, i] for i in range(W))
    kept = lengths[:, None] + jnp.arange(W - 1, dtype=jnp.int32)
    window = jnp.take_along_axis(joined, kept[..., None], axis=1)
    return jax.nn.silu(summed).astype(x.dtype), window


def step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """One token: the three equations of this module's docstring. `decay` is in log space."""
    state = state * jnp.exp(decay)[..., None]
    error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state, precision=HIGHEST))
    state = state + k[..., None] * error[..., None, :]
    return state, jnp.einsum("bhk,bhkv->bhv", q, state, precision=HIGHEST)


def recurrent(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Token by token: the definition."""
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, decay, beta))
    state, o = jax.lax.scan(lambda carry, token: step(carry, *token), state, inputs)
    return state, jnp.moveaxis(o, 0, 1)


def decayed_products(
    a: Float[Array, "*n C K"], b: Float[Array, "*n C K"], total: Float[Array, "*n C K"], block: int
) -> Float[Array, "*n C C"]:
    """sum_k a[i, k] b[j, k] exp(total[i, k] - total[j, k]) for j <= i, zero above; `total` falls with i.

    No exponent is ever positive, whatever the decay: rows and columns of one block meet through their differences;
    a later row meets earlier columns through the sum at its block's start, which lies between the two.
    """
    C, K = a.shape[-2:]
    shape = (*a.shape[:-2], C // block, block, K)
    a_, b_, t_ = (x.reshape(shape) for x in (a, b, total))
    lower = jnp.tril(jnp.ones((block, block), bool))
    gap = jnp.where(lower[..., None], t_[..., :, None, :] - t_[..., None, :, :], -jnp.inf)
    diagonal = jnp.sum(a_[..., :, None, :] * b_[..., None, :, :] * jnp.exp(gap), -1)
    # total just before each row block: zero decay has gone by before the first.
    start = jnp.concatenate([jnp.zeros_like(t_[..., :1, -1, :]), t_[..., :-1, -1, :]], axis=-2)
    rows = a_ * jnp.exp(t_ - start[..., None, :])
    ahead = jnp.arange(C, dtype=jnp.int32) // block < jnp.arange(C // block, dtype=jnp.int32)[:, None]
    reach = jnp.where(ahead[..., None], start[..., None, :] - total[..., None, :, :], -jnp.inf)
    columns = b[..., None, :, :] * jnp.exp(reach)
    product = jnp.einsum("...rik,...rjk->...rij", rows, columns, precision=HIGHEST)
    eye = jnp.eye(C // block, dtype=a.dtype)
    spread = jnp.einsum("...rij,rs->...risj", diagonal, eye).reshape(*a.shape[:-2], C, C)
    return product.reshape(*a.shape[:-2], C, C) + spread


def chunked(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`recurrent`, a chunk at a time: the tokens of a chunk meet in products, only chunks follow each other.

    Within a chunk, with G the running sum of the log decay and A[i, j] = k_i . (k_j exp(G_i - G_j)), the errors u
    solve (I + beta tril(A, -1)) u = beta (v - (k exp(G)) state). Padding to whole chunks has no decay and no beta.
    """
    T = q.shape[1]
    block = min(BLOCK, chunk)
    chunk = min(-(-chunk // block), -(-T // block)) * block
    parts = [_in_chunks(x, chunk) for x in (q, k, v, decay, beta[..., None])]
    state, o = jax.lax.scan(_chunk_step, state, _chunk_terms(*parts, block=block))
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [n, B, H, C, V] -> [B, n, C, H, V]
    return state, o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T]


def _in_chunks(x: Float[Array, "B T H K"], chunk: int) -> Float[Array, "n B H C K"]:
    pad = -x.shape[1] % chunk
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _chunk_terms(q: Array, k: Array, v: Array, decay: Array, beta: Array, block: int) -> tuple[Array, ...]:
    """What a chunk needs besides the state, for all chunks at once; all [n, B, H, ...]."""
    total = jnp.cumsum(decay, axis=-2)
    grown = jnp.exp(total)
    among_keys = beta * jnp.tril(decayed_products(k, k, total, block), -1)
    right = jnp.concatenate([beta * v, beta * k * grown], -1)
    solved = jax.lax.linalg.triangular_solve(
        among_keys + jnp.eye(k.shape[-2], dtype=k.dtype), right, left_side=True, lower=True, unit_diagonal=True
    )
    errors, seen = jnp.split(solved, [v.shape[-1]], axis=-1)
    among = decayed_products(q, k, total, block)
    last = total[..., -1:, :]
    return errors, seen, q * grown, among, k * jnp.exp(last - total), jnp.exp(last)


def _chunk_step(state: Array, terms: tuple[Array, ...]) -> tuple[Array, Array]:
    errors, seen, reads, among, writes, kept = terms
    dot = lambda spec, *x: jnp.einsum(spec, *x, precision=HIGHEST)  # noqa: E731
    errors = errors - dot("bhck,bhkv->bhcv", seen, state)
    o = dot("bhck,bhkv->bhcv", reads, state) + dot("bhij,bhjv->bhiv", among, errors)
    state = jnp.swapaxes(kept, -1, -2) * state + dot("bhck,bhcv->bhkv", writes, errors)
    return state, o


class KDA(nnx.Module):
    """The KDA sublayer on this rank's heads; its result is a partial sum over heads."""

    def __init__(self, config: Config, dtype: DTypeLike):
        D, H, K, V, W = (
            config.hidden, config.kda_heads, config.kda_key_dim, config.kda_value_dim, config.conv_width
        )  # fmt: skip
        wide = at_least_float32(dtype)
        self.config = config
        self.w_q = weight(dtype, HK=H * K, D=D)
        self.w_k = weight(dtype, HK=H * K, D=D)
        self.w_v = weight(dtype, HV=H * V, D=D)
        self.conv_q = weight(wide, HK=H * K, W=W)
        self.conv_k = weight(wide, HK=H * K, W=W)
        self.conv_v = weight(wide, HV=H * V, W=W)
        self.w_decay_a = weight(dtype, K=K, D=D)
        self.w_decay_b = weight(dtype, HK=H * K, K=K)
        self.a_log = weight(wide, H=H)
        self.dt_bias = weight(wide, HK=H * K)
        self.w_beta = weight(dtype, H=H, D=D)
        self.o_norm = weight(wide, V=V)
        if config.full_rank_gate:
            self.w_gate = weight(dtype, HV=H * V, D=D)
        else:
            self.w_gate_a = weight(dtype, V=V, D=D)
            self.w_gate_b = weight(dtype, HV=H * V, V=V)
        self.w_o = weight(dtype, D=D, HV=H * V)

    def __call__(self, x: Float[Array, "B T D"], state: KDAState, step: Step) -> tuple[Array, KDAState]:
        """x [B, T, D] -> this rank's partial of the output [B, T, D], and the state after each row's last token."""
        carried = state.at(step.group).restarted(step.start)
        q, k, v, windows = self._project(x, carried, step.lengths)
        decay, beta = self._gates(x, step.valid)
        mixed, o = self._mix_tokens(carried.memory, q, k, v, decay, beta, step)
        y = linear(self._gated(o, x), self.w_o[...])
        return y, state.put(step.group, dataclasses.replace(carried, memory=mixed, **windows))

    def _project(self, x: Array, carried: KDAState, lengths: Array) -> tuple[Array, Array, Array, dict[str, Array]]:
        q, window_q = convolve(linear(x, self.w_q[...]), carried.window_q, self.conv_q[...], lengths)
        k, window_k = convolve(linear(x, self.w_k[...]), carried.window_k, self.conv_k[...], lengths)
        v, window_v = convolve(linear(x, self.w_v[...]), carried.window_v, self.conv_v[...], lengths)
        K, V = self.config.kda_key_dim, self.config.kda_value_dim
        heads = lambda y, size: y.reshape(*y.shape[:2], -1, size)  # noqa: E731
        q, k = l2_norm(heads(q, K)) * K**-0.5, l2_norm(heads(k, K))
        windows = dict(window_q=window_q, window_k=window_k, window_v=window_v)
        return q, k, widen(heads(v, V)), windows

    def _gates(self, x: Array, valid: Bool[Array, "B T"]) -> tuple[Array, Array]:
        """Log decay [B, T, H, K] and beta [B, T, H]; a padded token neither decays nor writes."""
        K = self.config.kda_key_dim
        raw = linear_wide(linear(x, self.w_decay_a[...]), self.w_decay_b[...])
        raw = raw.reshape(*raw.shape[:2], -1, K)
        decay = log_decay(raw, self.a_log[...], self.dt_bias[...].reshape(-1, K), self.config.decay_lower_bound)
        beta = jax.nn.sigmoid(linear_wide(x, self.w_beta[...]))
        return jnp.where(valid[..., None, None], decay, 0), jnp.where(valid[..., None], beta, 0)

    def _mix_tokens(self, memory: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, step_: Step):
        masked = [jnp.where(step_.valid[..., None, None], x, 0) for x in (q, k, v)]
        if q.shape[1] == 1:
            memory, o = step(memory, *(x[:, 0] for x in (*masked, decay, beta)))
            return memory, o[:, None]
        form = recurrent if step_.forms.kda == "recurrent" else chunked
        return form(memory, *masked, decay, beta)

    def _gated(self, o: Float[Array, "B T H V"], x: Array) -> Float[Array, "B T HV"]:
        """rmsnorm over each head times sigmoid of the output gate, in at least float32, rounded once."""
        normed = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + self.config.norm_eps) * self.o_norm[...]
        if self.config.full_rank_gate:
            gate = linear(x, self.w_gate[...])
        else:
            gate = linear(linear(x, self.w_gate_a[...]), self.w_gate_b[...])
        flat = normed.reshape(*normed.shape[:2], -1)
        return (flat * jax.nn.sigmoid(widen(gate))).astype(x.dtype)
