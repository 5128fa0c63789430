"""The gated delta rule over a run of tokens: token by token (the definition), chunk by chunk,
and as maps of the state that are composed by doubling.

What is unusual in it: the decay is per key channel, not per head: a chunk needs K exponentials a
pair of tokens or reference sums that keep every exponent small (`decayed_products`). The rule and
its chunks are those of Kimi Linear (arXiv 2510.26692).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layers import HIGHEST

BLOCK = 16  # tokens of a block of `decayed_products`
WIDE_BLOCK = 32  # the same, of fewer and larger products: overflow stays above the diagonal
LARGEST_EXPONENT = 80.0  # exp up to here is finite in float32


def dot(spec: str, *arrays: Array) -> Array:
    """einsum at full precision: the state and all that decides it is float32 work (GPUs would take
    TF32).
    """
    return jnp.einsum(spec, *arrays, precision=HIGHEST)


def recurrent_step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """One token: the three equations of `model.kda`. `decay` is in log space."""
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
    if _meets_in_middle(block, steepest):
        offset = cumulative - cumulative[:, block // 2 : block // 2 + 1]
        products = dot("nik,njk->nij", rows * jnp.exp(offset), columns * jnp.exp(-offset))
        return jnp.where(lower, products, 0)
    differences = cumulative[:, :, None] - cumulative[:, None]
    decay = jnp.exp(jnp.where(lower[..., None], differences, -jnp.inf))
    return jnp.sum(rows[:, :, None] * columns[:, None] * decay, -1)


def _meets_in_middle(block: int, steepest: float) -> bool:
    """Whether no exponent passes `LARGEST_EXPONENT` with the middle of a block as the reference."""
    return -steepest * block / 2 <= LARGEST_EXPONENT


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
    terms = _terms_of_chunks(q, k, v, decay, beta, chunk, steepest)
    state, o = jax.lax.scan(_chunk_step, state, terms)
    return state, _of_tokens(o, q.shape[1])


def chunk_of(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    steepest: float = -math.inf,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H K"], Float[Array, "B T H V"]]:
    """Few tokens as one chunk of `chunked`, without the state after it: the errors that they write,
    the running sum of their log decay, and their outputs.
    """
    T = q.shape[1]
    terms = _terms_of_chunks(q, k, v, decay, beta, T, steepest)
    terms = jax.tree.map(lambda x: x[0], terms)
    errors, o = _errors_and_outputs(state, terms)
    running_sum = jnp.tril(jnp.ones((T, T), decay.dtype))
    cumulative = dot("ts,bshk->bthk", running_sum, decay)
    errors, o = (jnp.swapaxes(x, 1, 2)[:, :T] for x in (errors, o))
    return errors, cumulative, o


def transitions(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    chunk: int = 64,
    steepest: float = -math.inf,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`chunked` without a loop: a chunk maps the state S to transition S + written. The maps of all
    chunks are composed by doubling, in log2 of their number products of all chunks at once, and the
    outputs follow from the states before all chunks. More products in few kernels: for GPUs.

    No map grows: transition = diag(decay) - (keys decayed to the end)^T (keys decayed since the
    start, through the inverse) is a product of contractions.
    """
    block = WIDE_BLOCK if _meets_in_middle(WIDE_BLOCK, steepest) else BLOCK
    terms = _terms_of_chunks(q, k, v, decay, beta, chunk, steepest, block)

    # The map of each chunk. errors = free_errors - state_to_error S in `_chunk_step`.
    K = q.shape[-1]
    kept = terms.state_decay[..., 0, :, None] * jnp.eye(K, dtype=state.dtype)[None, None, None]
    removed = dot("nbhck,nbhcl->nbhkl", terms.error_to_state, terms.state_to_error)
    written = dot("nbhck,nbhcv->nbhkv", terms.error_to_state, terms.free_errors)
    after = _states_after(state, kept - removed, written)

    # The outputs, from the state before each chunk.
    before = jnp.concatenate([state[None], after[:-1]])
    corrected = dot("nbhij,nbhjk->nbhik", terms.error_to_output, terms.state_to_error)
    o = dot("nbhck,nbhkv->nbhcv", terms.state_to_output - corrected, before)
    o = o + dot("nbhij,nbhjv->nbhiv", terms.error_to_output, terms.free_errors)
    return after[-1], _of_tokens(o, q.shape[1])


def _states_after(
    state: Float[Array, "B H K V"],
    transition: Float[Array, "n B H K K"],
    written: Float[Array, "n B H K V"],
) -> Float[Array, "n B H K V"]:
    """The state after each of n maps S <- transition S + written, from `state` on."""
    n, K = transition.shape[0], transition.shape[-1]
    first = dot("bhkl,bhlv->bhkv", transition[0], state) + written[0]
    maps = jnp.concatenate([transition, written.at[0].set(first)], -1)
    reach = 1  # maps that each one has been composed of, the first ones of all before them
    while reach < n:
        later, earlier = maps[reach:], maps[:-reach]
        composed = dot("nbhkl,nbhlx->nbhkx", later[..., :K], earlier)
        composed = composed + later.at[..., :K].set(0)
        maps = jnp.concatenate([maps[:reach], composed])
        reach *= 2
    return maps[..., K:]


def _terms_of_chunks(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    chunk: int,
    steepest: float,
    block: int = BLOCK,
) -> ChunkTerms:
    """`ChunkTerms` with dims [n, B, H] of zero-padded chunks of at most `chunk` tokens."""
    B, T, H, _ = q.shape
    block = min(block, chunk)
    chunk = min(-(-chunk // block), -(-T // block)) * block

    # Pad to full chunks. Padding neither decays nor writes: its log decay and beta are zero.
    parts = [_in_chunks(x, chunk) for x in (q, k, v, decay, beta[..., None])]

    # Everything that needs no state, for all chunks at once. Chunks, rows and heads are one dim:
    # XLA:CPU of jaxlib 0.10.2 hangs or crashes in reductions of rank 7 (jax #39257).
    flat = [x.reshape(-1, *x.shape[3:]) for x in parts]
    terms = _chunk_terms(*flat, block=block, steepest=steepest)
    return jax.tree.map(lambda x: x.reshape(-1, B, H, *x.shape[1:]), terms)


def _of_tokens(o: Float[Array, "n B H C V"], T: int) -> Float[Array, "B T H V"]:
    """Outputs of chunks as those of the first T tokens, without the padding."""
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [n, B, H, C, V] -> [B, n, C, H, V]
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T]


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
    errors, o = _errors_and_outputs(state, terms)
    written = dot("bhck,bhcv->bhkv", terms.error_to_state, errors)
    return jnp.swapaxes(terms.state_decay, -1, -2) * state + written, o


def _errors_and_outputs(
    state: Float[Array, "B H K V"], terms: ChunkTerms
) -> tuple[Float[Array, "B H C V"], Float[Array, "B H C V"]]:
    """The errors that the tokens of a chunk write, and their outputs."""
    errors = terms.free_errors - dot("bhck,bhkv->bhcv", terms.state_to_error, state)
    from_state = dot("bhck,bhkv->bhcv", terms.state_to_output, state)
    return errors, from_state + dot("bhij,bhjv->bhiv", terms.error_to_output, errors)


IMPLEMENTATIONS = {"chunked": chunked, "transitions": transitions, "recurrent": recurrent}
