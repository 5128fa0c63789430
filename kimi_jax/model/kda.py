"""Kimi Delta Attention: short convolutions, per-channel decay and the delta rule, recurrent and in
chunks.

Per head, with state [K, V] in float32 (Kimi Linear, arXiv 2510.26692):

    state <- diag(exp(log_decay)) state
    state <- state + beta k (v - k^T state)^T         # the delta sees the DECAYED state
    o      = q^T state
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32, widen
from .layers import HIGHEST, linear, linear_wide, weight, with_rank
from .state import KDAState, Step

BLOCK = 16
SAFE = 80.0  # exponents up to here stay finite in float32
L2_EPS = 1e-6


def dot(spec: str, *arrays: Array) -> Array:
    """einsum at full precision: the state and all that decides it is float32 work (GPUs would take
    TF32).
    """
    return jnp.einsum(spec, *arrays, precision=HIGHEST)


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
    window: Float[Array, "B W1 C"],
    taps: Float[Array, "C W"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W1 C"]]:
    """silu of the causal depthwise convolution of [window, x], and the last W - 1 inputs of each
    row.

    The last tap meets the current token. The new window ends at each row's own length, so padding
    never enters it.
    """
    W, T = taps.shape[1], x.shape[1]
    joined = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    summed = sum(widen(joined[:, i : i + T]) * taps[None, None, :, i] for i in range(W))
    kept = lengths[:, None] + jnp.arange(W - 1, dtype=jnp.int32)[None]
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
    error = beta[..., None] * (v - dot("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * error[..., None, :]
    return state, dot("bhk,bhkv->bhv", q, state)


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
    a: Float[Array, "n C K"],
    b: Float[Array, "n C K"],
    total: Float[Array, "n C K"],
    block: int,
    steepest: float,
) -> Float[Array, "n C C"]:
    """sum_k a[i, k] b[j, k] exp(total[i, k] - total[j, k]) for j <= i, zero above; `total` falls
    with i, by at most `steepest` a row.

    A later row meets earlier columns through the sum at its block's start, which lies between the
    two: no exponent is positive. Rows and columns of one block meet through the sum at its middle
    where no exponent can pass `SAFE`, and else through their differences, which costs K times the
    exponentials.
    """
    rows = [
        _decayed_rows(a, b, total, first, block, steepest) for first in range(0, a.shape[-2], block)
    ]
    return jnp.concatenate(rows, axis=-2)


def _decayed_rows(
    a: Array, b: Array, total: Array, first: int, block: int, steepest: float
) -> Array:
    """Rows `first` to `first + block` of `decayed_products`: earlier columns, the diagonal block,
    zeros above it.
    """
    end, C = first + block, a.shape[-2]
    rows, columns, decayed = a[..., first:end, :], b[..., first:end, :], total[..., first:end, :]
    lower = jnp.tril(jnp.ones((block, block), bool))
    if -steepest * block / 2 <= SAFE:
        offset = decayed - decayed[..., block // 2 : block // 2 + 1, :]
        meeting = dot("nik,njk->nij", rows * jnp.exp(offset), columns * jnp.exp(-offset))
        diagonal = jnp.where(lower[None], meeting, 0)
    else:
        gap = jnp.where(
            lower[None, ..., None], decayed[..., :, None, :] - decayed[..., None, :, :], -jnp.inf
        )
        diagonal = jnp.sum(rows[..., :, None, :] * columns[..., None, :, :] * jnp.exp(gap), -1)
    parts = [diagonal]
    if end < C:
        parts.append(jnp.zeros((*a.shape[:-2], block, C - end), a.dtype))
    if first:
        start = total[..., first - 1 : first, :]
        columns = b[..., :first, :] * jnp.exp(start - total[..., :first, :])
        rows = rows * jnp.exp(decayed - start)
        parts.insert(0, dot("nik,njk->nij", rows, columns))
    return jnp.concatenate(parts, axis=-1)


def chunked(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    chunk: int = 64,
    steepest: float = -math.inf,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`recurrent`, a chunk at a time: the tokens of a chunk meet in products, only chunks follow
    each other.

    Within a chunk, with G the running sum of the log decay and A[i, j] = k_i . (k_j exp(G_i -
    G_j)), the errors u solve (I + beta tril(A, -1)) u = beta (v - (k exp(G)) state). Padding to
    whole chunks has no decay and no beta. `steepest`: a bound that no log decay of a token falls
    below.
    """
    T = q.shape[1]
    block = min(BLOCK, chunk)
    chunk = min(-(-chunk // block), -(-T // block)) * block
    parts = [_in_chunks(x, chunk) for x in (q, k, v, decay, beta[..., None])]
    # Chunks, rows and heads as one dim: XLA:CPU of jaxlib 0.10.2 hangs or crashes in reductions of
    # rank 7 (jax #39257).
    terms = _chunk_terms(
        *(x.reshape(-1, *x.shape[3:]) for x in parts), block=block, steepest=steepest
    )
    terms = [x.reshape(*parts[0].shape[:3], *x.shape[1:]) for x in terms]
    state, o = jax.lax.scan(_chunk_step, state, terms)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [n, B, H, C, V] -> [B, n, C, H, V]
    return state, o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T]


def _in_chunks(x: Float[Array, "B T H K"], chunk: int) -> Float[Array, "n B H C K"]:
    pad = -x.shape[1] % chunk
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def unit_lower_inverse(lower: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    """(I + lower)^-1 of strictly lower triangles, by doubling: two inverted blocks and what lies
    below give the next.

    As exact as forward substitution, unlike a Neumann series, whose terms grow without bound. Not a
    library's triangular solve: the one of jaxlib 0.10.2 deadlocks on CPU when two of a program run
    at once.
    """
    n, C = lower.shape[:2]
    size = 1 << (C - 1).bit_length()
    lower = jnp.pad(lower, ((0, 0), (0, size - C), (0, size - C)))
    inverse = jnp.ones((n, size, 1, 1), lower.dtype)
    s = 1
    while s < size:
        pair = jnp.arange(size // (2 * s), dtype=jnp.int32)
        below = lower.reshape(n, len(pair), 2, s, len(pair), 2, s)[:, pair, 1, :, pair, 0]
        top, bottom = inverse[:, 0::2], inverse[:, 1::2]
        corner = -dot("npij,npjk,npkl->npil", bottom, jnp.moveaxis(below, 0, 1), top)
        upper = jnp.concatenate([top, jnp.zeros_like(top)], -1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, bottom], -1)], -2)
        s *= 2
    return inverse[:, 0, :C, :C]


def _chunk_terms(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, block: int, steepest: float
) -> tuple[Array, ...]:
    """What a chunk needs besides the state, for all chunks at once."""
    C = k.shape[-2]
    # A running sum as a product: XLA's scan would be fused into, and computed again by, everything
    # that reads it.
    total = dot("ij,njk->nik", jnp.tril(jnp.ones((C, C), k.dtype)), decay)
    grown = jnp.exp(total)
    among_keys = beta * jnp.tril(decayed_products(k, k, total, block, steepest), -1)
    solve = beta[..., 0][..., None, :] * unit_lower_inverse(among_keys)
    errors, seen = dot("nij,njv->niv", solve, v), dot("nij,njk->nik", solve, k * grown)
    among = decayed_products(q, k, total, block, steepest)
    last = total[..., -1:, :]
    return errors, seen, q * grown, among, k * jnp.exp(last - total), jnp.exp(last)


def _chunk_step(state: Array, terms: list[Array]) -> tuple[Array, Array]:
    errors, seen, reads, among, writes, kept = terms
    errors = errors - dot("bhck,bhkv->bhcv", seen, state)
    o = dot("bhck,bhkv->bhcv", reads, state) + dot("bhij,bhjv->bhiv", among, errors)
    state = jnp.swapaxes(kept, -1, -2) * state + dot("bhck,bhcv->bhkv", writes, errors)
    return state, o


class KDA(nnx.Module):
    """The KDA sublayer on this rank's heads; its result is a partial sum over heads."""

    def __init__(self, config: Config, dtype: DTypeLike):
        D, W = config.hidden, config.conv_width
        H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
        wide = at_least_float32(dtype)
        self.config = config
        self.w_q = weight(dtype, HK=(H, K), D=D)
        self.w_k = weight(dtype, HK=(H, K), D=D)
        self.w_v = weight(dtype, HV=(H, V), D=D)
        self.conv_q = weight(wide, HK=(H, K), W=W)
        self.conv_k = weight(wide, HK=(H, K), W=W)
        self.conv_v = weight(wide, HV=(H, V), W=W)
        self.w_decay_a = weight(dtype, K=K, D=D)
        self.w_decay_b = weight(dtype, HK=(H, K), K=K)
        self.a_log = weight(wide, H=H)
        self.dt_bias = weight(wide, HK=(H, K))
        self.w_beta = weight(dtype, H=H, D=D)
        self.o_norm = weight(wide, V=V)
        if config.full_rank_gate:
            self.w_gate = weight(dtype, HV=(H, V), D=D)
        else:
            self.w_gate_a = weight(dtype, V=V, D=D)
            self.w_gate_b = weight(dtype, HV=(H, V), V=V)
        self.w_o = weight(dtype, D=D, HV=(H, V))

    @jax.named_scope("kda")
    def __call__(
        self, x: Float[Array, "B T D"], state: KDAState, step: Step
    ) -> tuple[Array, KDAState]:
        """x [B, T, D] -> this rank's partial of the output [B, T, D], and the state after each
        row's last token.
        """
        carried = state.at(step.group).restarted(step.start)
        q, k, v, windows = self._project(x, carried, step.lengths)
        decay, beta = self._gates(x, step.valid)
        mixed, o = self._mix_tokens(carried.memory, q, k, v, decay, beta, step)
        y = linear(self._gated(o, x), self.w_o[...])
        return y, state.put(step.group, dataclasses.replace(carried, memory=mixed, **windows))

    def _project(
        self, x: Array, carried: KDAState, lengths: Array
    ) -> tuple[Array, Array, Array, dict[str, Array]]:
        q, window_q = convolve(
            linear(x, self.w_q[...]), carried.window_q, self.conv_q[...], lengths
        )
        k, window_k = convolve(
            linear(x, self.w_k[...]), carried.window_k, self.conv_k[...], lengths
        )
        v, window_v = convolve(
            linear(x, self.w_v[...]), carried.window_v, self.conv_v[...], lengths
        )
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
        decay = log_decay(
            raw, self.a_log[...], self.dt_bias[...].reshape(-1, K), self.config.decay_lower_bound
        )
        beta = jax.nn.sigmoid(linear_wide(x, self.w_beta[...]))
        return jnp.where(valid[..., None, None], decay, 0), jnp.where(valid[..., None], beta, 0)

    def _mix_tokens(
        self, memory: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, step_: Step
    ) -> tuple[Array, Array]:
        q, k, v = (jnp.where(step_.valid[..., None, None], x, 0) for x in (q, k, v))
        if q.shape[1] == 1:
            memory, o = step(memory, q[:, 0], k[:, 0], v[:, 0], decay[:, 0], beta[:, 0])
            return memory, o[:, None]
        if step_.forms.kda == "recurrent":
            return recurrent(memory, q, k, v, decay, beta)
        bound = self.config.decay_lower_bound
        steepest = -math.inf if bound is None else bound
        return chunked(memory, q, k, v, decay, beta, step_.forms.chunk, steepest)

    def _gated(self, o: Float[Array, "B T H V"], x: Array) -> Float[Array, "B T HV"]:
        """rmsnorm over each head times sigmoid of the output gate, in at least float32, rounded
        once.
        """
        scale = jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + self.config.norm_eps)
        normed = o * scale * with_rank(self.o_norm[...], o.ndim)
        if self.config.full_rank_gate:
            gate = linear(x, self.w_gate[...])
        else:
            gate = linear(linear(x, self.w_gate_a[...]), self.w_gate_b[...])
        flat = normed.reshape(*normed.shape[:2], -1)
        return (flat * jax.nn.sigmoid(widen(gate))).astype(x.dtype)
