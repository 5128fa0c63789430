"""K3.1's sparse selection: a light scorer over all past keys, of which each query keeps the best
`index_topk`.

    score(t, s) = sum_j w[t, j] relu(q[t, j] . k[s] I^-0.5),   w = w_weights x J^-0.5

What is unusual in it, after DeepSeek Sparse Attention (DSA, in the report of DeepSeek-V3.2):
- queries come from MLA's query latent, head weights from the sublayer's input, and nothing is
  rotated;
- a choice is exact: of equal scores the lowest position is kept, on any number of ranks;
- where keys are sharded, ranks agree on what is kept by gathering candidates or by radix selection.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from ..config.config import Config
from ..numerics import at_least_float32
from ..parallel import collectives
from ..parallel.collectives import Axis, of_bits, to_bits
from ..parallel.reductions import SUM, traffic
from .layers import HIGHEST, Term, layer_norm, linear, linear_wide, weight
from .state import read_block
from .step import Step

DIGIT_BITS = 8  # of the search by histograms


def head_scores(q: Float[Array, "B T J I"], keys: Float[Array, "B S I"]) -> Float[Array, "B T J S"]:
    """relu(q . k I^-0.5) of each key for each head of each query, in at least float32."""
    dots = jnp.einsum(
        "btji,bsi->btjs",
        q,
        keys,
        precision=HIGHEST,
        preferred_element_type=at_least_float32(q.dtype),
    )
    return jax.nn.relu(dots * q.shape[-1] ** -0.5)


def score(
    q: Float[Array, "B T J I"], w: Float[Array, "B T J"], keys: Float[Array, "B S I"]
) -> Float[Array, "B T S"]:
    """The indexer's score of each key for each query, in at least float32. -0.0 becomes 0.0, so
    that both tie.
    """
    summed = jnp.einsum("btj,btjs->bts", w, head_scores(q, keys), precision=HIGHEST)
    return positive_zero(summed)


def positive_zero(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """x with 0.0 for -0.0."""
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


def select_sorted(scores: Float[Array, "B T S"], keep: int) -> Bool[Array, "B T S"]:
    """The `keep` best keys of each query as a mask, by a full stable sort: the definition. -inf is
    never kept.
    """
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return (rank < keep) & (scores > -jnp.inf)


def candidates(
    scores: Float[Array, "B T S"], keep: int
) -> tuple[Float[Array, "B T U"], Int[Array, "B T U"]]:
    """The scores and slots of the `keep` best keys of each query, the best first; of equals, the
    one in the lowest slot.
    """
    best, slots = jax.lax.top_k(scores, min(keep, scores.shape[-1]))
    return best, slots.astype(jnp.int32)


def select_mask(scores: Float[Array, "B T S"], keep: int) -> Bool[Array, "B T S"]:
    """`select_sorted` without the sorts: all that ranks no lower than the last of `candidates`."""
    best, positions = candidates(scores, keep)
    last, at = best[..., -1:], positions[..., -1:]
    slots = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    return ((scores > last) | ((scores == last) & (slots <= at))) & (scores > -jnp.inf)


def select_plain(
    scores: Float[Array, "B T S"], allowed: Bool[Array, "B T S"], keep: int
) -> tuple[Bool[Array, "B T S"], float]:
    """The keys that each query attends to, of those allowed, by the definition; and what is added
    to their attention scores: nothing.
    """
    ranked = jax.lax.stop_gradient(jnp.where(allowed, scores, -jnp.inf))
    return allowed & select_sorted(ranked, keep), 0.0


def select_teach(
    scores: Float[Array, "B T S"], allowed: Bool[Array, "B T S"], keep: int
) -> tuple[Bool[Array, "B T S"], Float[Array, "B T S"]]:
    """`select_plain`, adding zeros through which attention's gradient reaches the scores: a choice
    has no gradient of its own.
    """
    ranked = jax.lax.stop_gradient(jnp.where(allowed, scores, -jnp.inf))
    return allowed & select_mask(ranked, keep), scores - jax.lax.stop_gradient(scores)


SELECTIONS = {"plain": select_plain, "teach": select_teach}  # of the definition of attention


# The same selection where each rank holds some of the positions. Scores as `score` gives them:
# float32 or float64, no -0.0.


def keep_best(
    best: Float[Array, "B T U"],
    positions: Int[Array, "B T U"],
    keep: int,
    limit: int,
    axis: Axis,
    method: str = "auto",
) -> Bool[Array, "B T U"]:
    """Which of a rank's candidates, the best first, are among the `keep` best keys of all ranks:
    the first ones. All ranks together keep what `select_sorted` keeps.

    `positions` are below `limit`, and no two ranks hold the same one. `method` is a name of
    `AGREEMENTS`, of the same result, or "auto", the one of fewer `selection_bytes`; ValueError for
    any other. A rank must bring as many candidates as it has keys, or `keep`.
    """
    n = collectives.ranks(axis)
    if method != "auto" and method not in AGREEMENTS:
        known = ", ".join(("auto", *AGREEMENTS))
        raise ValueError(f"method must be one of {known}, got {method!r}")
    if n == 1:
        return best > -jnp.inf
    if method == "auto":
        sent = selection_bytes(n, best.shape[-1], best.dtype, limit)
        method = min(sent, key=lambda name: sent[name])
    return AGREEMENTS[method](best, positions, keep, axis, limit)


def selection_bytes(n: int, count: int, dtype: DTypeLike, limit: int) -> dict[str, int]:
    """The bytes that a rank of n sends for a query by each method of `keep_best`: all its `count`
    candidates to every rank in one message, or one histogram a digit.
    """
    size = jnp.dtype(dtype).itemsize
    digits = _digits(8 * size) + _digits((limit - 1).bit_length())
    histogram = traffic(SUM, n, 1, 2**DIGIT_BITS, jnp.int32).sent
    return {"candidates": (n - 1) * count * 2 * size, "histograms": digits * histogram}


def _digits(width: int) -> int:
    return -(-width // DIGIT_BITS)


def _by_candidates(
    best: Float[Array, "B T u"], positions: Int[Array, "B T u"], keep: int, axis: Axis, limit: int
) -> Bool[Array, "B T u"]:
    """Every rank gathers all candidates and finds the last that is kept."""
    # Gather (score, position) of all ranks.
    messages = collectives.all_gather(to_bits(best[..., None], positions[..., None]), 2, axis)
    columns = of_bits(messages, (1, best.dtype), (1, jnp.int32))
    all_scores, all_positions = (x[..., 0] for x in columns)

    # Order them: falling scores, of equals rising positions.
    negated, all_positions = jax.lax.sort((-all_scores, all_positions), num_keys=2)
    end = min(keep, negated.shape[-1])
    last_score, last_position = -negated[..., end - 1 : end], all_positions[..., end - 1 : end]

    # A candidate is kept that ranks no lower than the last one.
    ties = (best == last_score) & (positions <= last_position)
    return ((best > last_score) | ties) & (best > -jnp.inf)


def _by_histograms(
    best: Float[Array, "B T u"], positions: Int[Array, "B T u"], keep: int, axis: Axis, limit: int
) -> Bool[Array, "B T u"]:
    """Radix selection: digit by digit from the top, the ranks count together how many candidates
    have which digit among those that agree with the last kept one so far.
    """
    # A candidate's key is its score, then its position, the lowest first; both as unsigned numbers.
    score_keys = _sortable(best)
    position_keys = (limit - 1 - positions).astype(jnp.uint32)
    score_width, position_width = 8 * best.dtype.itemsize, (limit - 1).bit_length()

    undecided = best > -jnp.inf  # equal to the last kept key in all digits so far
    kept = jnp.zeros(best.shape, bool)
    left = jnp.full((*best.shape[:2], 1), keep, jnp.int32)  # how many of the undecided to keep
    for keys, width in ((score_keys, score_width), (position_keys, position_width)):
        for i in reversed(range(_digits(width))):
            digit = ((keys >> (i * DIGIT_BITS)) & (2**DIGIT_BITS - 1)).astype(jnp.int32)
            counts = collectives.all_reduce(_histogram(digit, undecided), axis=axis)
            last_digit, above = _digit_of(left, counts)
            kept |= undecided & (digit > last_digit)
            undecided &= digit == last_digit
            left -= above
    return kept | undecided


AGREEMENTS = {"candidates": _by_candidates, "histograms": _by_histograms}


def _sortable(x: Float[Array, "B T u"]) -> UInt[Array, "B T u"]:
    """Unsigned numbers in the order of x: of negative ones all bits turn, of others the sign."""
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, word)
    return jnp.where(x < 0, ~bits, bits | word.type(1 << (8 * word.itemsize - 1)))


def _histogram(digit: Int[Array, "B T u"], counted: Bool[Array, "B T u"]) -> Int[Array, "B T bins"]:
    """How many of each query's counted candidates have each digit."""
    B, T, _ = digit.shape
    b, t = jnp.arange(B, dtype=jnp.int32), jnp.arange(T, dtype=jnp.int32)
    zeros = jnp.zeros((B, T, 2**DIGIT_BITS), jnp.int32)
    return zeros.at[b[:, None, None], t[None, :, None], digit].add(counted.astype(jnp.int32))


def _digit_of(
    nth: Int[Array, "B T 1"], counts: Int[Array, "B T bins"]
) -> tuple[Int[Array, "B T 1"], Int[Array, "B T 1"]]:
    """The digit of the nth candidate from the top, -1 where there are fewer, and how many have a
    greater one.
    """
    from_top = jnp.cumsum(counts[..., ::-1], -1, dtype=jnp.int32)[..., ::-1]
    reached = from_top >= nth
    above = jnp.where(reached, 0, from_top).max(-1, keepdims=True)
    return reached.sum(-1, keepdims=True, dtype=jnp.int32) - 1, above


class Indexer(nnx.Module):
    """Projects index keys and queries. Replicated, so that all ranks select the same keys."""

    def __init__(self, config: Config, dtype: DTypeLike):
        J, I, D, Q = config.index_heads, config.index_dim, config.hidden, config.q_rank  # noqa: E741
        self.config = config
        self.w_q = weight(dtype, term=Term.INDEXER, JI=J * I, Q=Q)
        self.w_k = weight(dtype, term=Term.INDEXER, I=I, D=D)
        self.w_weights = weight(dtype, term=Term.INDEXER, J=J, D=D)
        self.k_norm = weight(dtype, I=I)
        self.k_bias = weight(dtype, I=I)

    @jax.named_scope("indexer")
    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T I"]:
        """The keys that the cache holds for new tokens."""
        return layer_norm(
            linear(x, self.w_k[...]), self.k_norm[...], self.k_bias[...], self.config.norm_eps
        )

    def queries(
        self, x: Float[Array, "B T D"], latent: Float[Array, "B T Q"]
    ) -> tuple[Array, Array]:
        """Index queries [B, T, J, I] out of the normed query latent, and head weights [B, T, J] out
        of x.
        """
        J, I = self.config.index_heads, self.config.index_dim  # noqa: E741
        q = linear(latent, self.w_q[...])
        return q.reshape(*q.shape[:2], J, I), linear_wide(x, self.w_weights[...]) * J**-0.5


def score_cache(
    q: Float[Array, "B T J I"],
    w: Float[Array, "B T J"],
    cache: Shaped[Array, "G B S0 I"],
    positions: Int[Array, "B T"],
    step: Step,
    block: int,
    slots: int | None = None,
) -> Float[Array, "B T S"]:
    """Scores of the first `slots` slots (default: all) of this rank's cache of index keys, -inf
    beyond each query's position. Only blocks that hold keys are read.
    """
    B, T = positions.shape
    S = slots or cache.shape[2]

    def score_block(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, S - block)
        keys, key_positions = read_block(cache, first, block, q.dtype, step)
        is_seen = key_positions[None, None] <= positions[..., None]
        block_scores = jnp.where(is_seen, score(q, w, keys), -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, block_scores, first, 2)

    blocks = (step.max_local_keys + block - 1) // block
    nothing = jnp.full((B, T, S), -jnp.inf, at_least_float32(q.dtype))
    return jax.lax.fori_loop(0, blocks, score_block, nothing)
