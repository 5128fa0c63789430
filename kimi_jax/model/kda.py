"""Kimi Delta Attention (KDA): linear attention with a state of constant size. Per head, with a
state [K, V] (Kimi Linear, arXiv 2510.26692):

    state <- diag(exp(log_decay)) state
    state <- state + beta k (v - k^T state)^T         # the delta sees the DECAYED state
    o      = q^T state

What is unusual in it:
- the decay is per key channel, not per head: a chunk needs K exponentials a pair of tokens or
  reference sums that keep every exponent small (`decayed_products`);
- q, k and v each pass a short causal convolution with a SiLU, so a layer keeps the last inputs of
  each (conv state) beside the recurrent state;
- q and k have unit length; the state and all that decides it is at least float32, whatever the
  model's type;
- K and V may differ.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel.roles import Dim, Role
from .layers import HIGHEST, Term, linear, linear_wide, weight, with_rank
from .state import KDAState
from .step import Step

BLOCK = 16  # tokens of a block of `decayed_products`
LARGEST_EXPONENT = 80.0  # exp up to here is finite in float32
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


def recurrent_step(
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
    chunk: int = 1,
    steepest: float = -math.inf,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Token by token: the definition. `chunk` and `steepest`, of `chunked`, change nothing."""
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, decay, beta))
    state, o = jax.lax.scan(lambda carry, token: recurrent_step(carry, *token), state, inputs)
    return state, jnp.moveaxis(o, 0, 1)


def decayed_products(
    rows: Float[Array, "n C K"],
    columns: Float[Array, "n C K"],
    cumulative: Float[Array, "n C K"],
    block: int,
    steepest: float,
) -> Float[Array, "n C C"]:
    """sum_k rows[i, k] columns[j, k] exp(cumulative[i, k] - cumulative[j, k]) for j <= i, zero
    above. `cumulative` is the running sum of the log decay: it falls with i, by at most `steepest`
    (<= 0) a token.

    No exponent may be large: exp(cumulative[i]) and exp(-cumulative[j]) alone overflow within a
    chunk. Blocks below the diagonal take the sum at the start of the row's block as the reference
    of both factors; it lies between the two, so no exponent is positive. Blocks on the diagonal:
    see `_diagonal_block`.
    """
    C = rows.shape[-2]
    block_rows = [
        _decayed_block_row(rows, columns, cumulative, first, block, steepest)
        for first in range(0, C, block)
    ]
    return jnp.concatenate(block_rows, axis=-2)


def _decayed_block_row(
    rows: Array, columns: Array, cumulative: Array, first: int, block: int, steepest: float
) -> Float[Array, "n block C"]:
    """Rows `first` to `first + block` of `decayed_products`: what lies left of the diagonal block,
    that block, and zeros right of it.
    """
    n, C, _ = rows.shape
    end = first + block
    rows_here, sums_here = rows[:, first:end], cumulative[:, first:end]
    parts = []
    if first:
        reference = cumulative[:, first - 1 : first]
        earlier = columns[:, :first] * jnp.exp(reference - cumulative[:, :first])
        parts.append(dot("nik,njk->nij", rows_here * jnp.exp(sums_here - reference), earlier))
    parts.append(_diagonal_block(rows_here, columns[:, first:end], sums_here, steepest))
    if end < C:
        parts.append(jnp.zeros((n, block, C - end), rows.dtype))
    return jnp.concatenate(parts, axis=-1)


def _diagonal_block(
    rows: Float[Array, "n block K"],
    columns: Float[Array, "n block K"],
    cumulative: Float[Array, "n block K"],
    steepest: float,
) -> Float[Array, "n block block"]:
    """`decayed_products` within one block. The sum at the middle of the block is the reference
    where no exponent can then pass `LARGEST_EXPONENT`; else every pair takes its own difference,
    which costs K times the exponentials.
    """
    block = rows.shape[1]
    lower = jnp.tril(jnp.ones((block, block), bool))[None]
    if -steepest * block / 2 <= LARGEST_EXPONENT:
        offset = cumulative - cumulative[:, block // 2 : block // 2 + 1]
        products = dot("nik,njk->nij", rows * jnp.exp(offset), columns * jnp.exp(-offset))
        return jnp.where(lower, products, 0)
    differences = cumulative[:, :, None] - cumulative[:, None]
    decay = jnp.exp(jnp.where(lower[..., None], differences, -jnp.inf))
    return jnp.sum(rows[:, :, None] * columns[:, None] * decay, -1)


class ChunkTerms(NamedTuple):
    """What a chunk of C tokens contributes besides the state S that it starts from."""

    free_errors: Float[Array, "*dims C V"]  # errors of the delta rule if S were zero
    state_to_error: Float[Array, "*dims C K"]  # errors = free_errors - state_to_error S
    state_to_output: Float[Array, "*dims C K"]  # queries, decayed since the start of the chunk
    error_to_output: Float[Array, "*dims C C"]  # queries on keys of the chunk, lower triangle
    error_to_state: Float[Array, "*dims C K"]  # keys, decayed until the end of the chunk
    state_decay: Float[Array, "*dims 1 K"]  # of the whole chunk


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
    """`recurrent` in its chunkwise-parallel form: matrix products within a chunk, a scan over
    chunks. `chunk`: tokens of a chunk; `steepest`: no log decay of a token is below it.

    With G the running sum of the log decay within a chunk and A[i, j] = k_i . (k_j exp(G_i - G_j)),
    the errors u solve (I + beta tril(A, -1)) u = beta (v - (k exp(G)) state).
    """
    B, T, H, _ = q.shape
    block = min(BLOCK, chunk)
    chunk = min(-(-chunk // block), -(-T // block)) * block

    # Pad to full chunks. Padding neither decays nor writes: its log decay and beta are zero.
    parts = [_in_chunks(x, chunk) for x in (q, k, v, decay, beta[..., None])]
    chunks = parts[0].shape[0]

    # Everything that needs no state, for all chunks at once. Chunks, rows and heads are one dim:
    # XLA:CPU of jaxlib 0.10.2 hangs or crashes in reductions of rank 7 (jax #39257).
    flat = [x.reshape(-1, *x.shape[3:]) for x in parts]
    terms = _chunk_terms(*flat, block=block, steepest=steepest)
    terms = jax.tree.map(lambda x: x.reshape(chunks, B, H, *x.shape[1:]), terms)

    # The state passes from chunk to chunk.
    state, o = jax.lax.scan(_chunk_step, state, terms)

    # Chunks back to tokens, without the padding.
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [n, B, H, C, V] -> [B, n, C, H, V]
    return state, o.reshape(B, -1, *o.shape[3:])[:, :T]


def _in_chunks(x: Float[Array, "B T H K"], chunk: int) -> Float[Array, "n B H C K"]:
    """Zero-padded to a multiple of `chunk` tokens and split into chunks."""
    B, T, H, _ = x.shape
    x = jnp.pad(x, ((0, 0), (0, -T % chunk), (0, 0), (0, 0)))
    return jnp.moveaxis(x.reshape(B, -1, chunk, H, x.shape[-1]), (1, 3), (0, 2))


def unit_lower_inverse(lower: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    """(I + lower)^-1 of strictly lower triangles, by doubling: two inverted blocks and what lies
    below give the next.

    As exact as forward substitution, unlike a Neumann series, whose terms grow without bound. Not a
    library's triangular solve: the one of jaxlib 0.10.2 deadlocks on CPU when two of a program run
    at once.
    """
    n, C = lower.shape[:2]
    full = 1 << (C - 1).bit_length()  # the next power of two
    lower = jnp.pad(lower, ((0, 0), (0, full - C), (0, full - C)))
    inverses = jnp.ones((n, full, 1, 1), lower.dtype)  # of the diagonal blocks of `size`
    size = 1
    while size < full:
        pair = jnp.arange(full // (2 * size), dtype=jnp.int32)
        blocks = lower.reshape(n, len(pair), 2, size, len(pair), 2, size)
        below = jnp.moveaxis(blocks[:, pair, 1, :, pair, 0], 0, 1)  # under each pair's upper block
        top, bottom = inverses[:, 0::2], inverses[:, 1::2]
        corner = -dot("npij,npjk,npkl->npil", bottom, below, top)
        upper = jnp.concatenate([top, jnp.zeros_like(top)], -1)
        inverses = jnp.concatenate([upper, jnp.concatenate([corner, bottom], -1)], -2)
        size *= 2
    return inverses[:, 0, :C, :C]


def _chunk_terms(
    q: Float[Array, "n C K"],
    k: Float[Array, "n C K"],
    v: Float[Array, "n C V"],
    decay: Float[Array, "n C K"],
    beta: Float[Array, "n C 1"],
    block: int,
    steepest: float,
) -> ChunkTerms:
    """What chunks contribute besides their states."""
    C = k.shape[1]

    # Running sum of the log decay, as a product: XLA's scan would be fused into, and computed again
    # by, everything that reads it.
    running_sum = jnp.tril(jnp.ones((C, C), k.dtype))
    cumulative = dot("ij,njk->nik", running_sum, decay)
    since_start = jnp.exp(cumulative)
    at_end = cumulative[:, -1:]

    # Solve for the errors: each token sees what earlier tokens of the chunk wrote.
    key_products = beta * jnp.tril(decayed_products(k, k, cumulative, block, steepest), -1)
    solve = beta.swapaxes(1, 2) * unit_lower_inverse(key_products)

    return ChunkTerms(
        free_errors=dot("nij,njv->niv", solve, v),
        state_to_error=dot("nij,njk->nik", solve, k * since_start),
        state_to_output=q * since_start,
        error_to_output=decayed_products(q, k, cumulative, block, steepest),
        error_to_state=k * jnp.exp(at_end - cumulative),
        state_decay=jnp.exp(at_end),
    )


def _chunk_step(
    state: Float[Array, "B H K V"], terms: ChunkTerms
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H C V"]]:
    """The state after a chunk, and the outputs of its tokens."""
    errors = terms.free_errors - dot("bhck,bhkv->bhcv", terms.state_to_error, state)
    from_state = dot("bhck,bhkv->bhcv", terms.state_to_output, state)
    o = from_state + dot("bhij,bhjv->bhiv", terms.error_to_output, errors)
    written = dot("bhck,bhcv->bhkv", terms.error_to_state, errors)
    return jnp.swapaxes(terms.state_decay, -1, -2) * state + written, o


IMPLEMENTATIONS = {"chunked": chunked, "recurrent": recurrent}


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
        raw = linear_wide(linear(x, self.w_decay_a[...]), self.w_decay_b[...])
        dt_bias = self.dt_bias[...].reshape(-1, K)
        bound = self.config.decay_lower_bound
        decay = log_decay(split_heads(raw, K), self.a_log[...], dt_bias, bound)
        return decay, jax.nn.sigmoid(linear_wide(x, self.w_beta[...]))

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
