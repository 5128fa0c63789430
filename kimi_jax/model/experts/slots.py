"""The routed experts on GPUs: (row, expert) pairs are dealt to slots, and all slots run at once.

A slot is one expert and up to R of its rows; an expert of many rows has several. How many slots a
step needs is known when it runs, how many it computes when it is compiled: `capacities` lists
numbers of slots from what uniform routing needs up to what any routing can need, each is a branch
of the program, and the smallest that holds all pairs runs. Nothing is ever dropped, and no loop has
a number of turns that the compiler does not know.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ...config.config import Config
from ...numerics import at_least_float32, widen
from ..layers import situ
from .gathered import GATHERED, Stacks
from .weights import Experts

# Mean rows of an expert up to which a slot's weights are decoded within the reduction over its
# inputs, in slots of two rows; above, decoding into memory costs less. (Slots of four rows make XLA
# write the decoded numbers out: 26 GB for 100 slots of K3.1.)
FUSED_UP_TO = 4.0
# Decoded weights of one turn of the loop over slots. For K3.1 in bfloat16, 11 to 16 experts.
DECODED_BYTES = 1 << 30
PAIRS_OF_A_BLOCK = 1024  # that are compared with each other when pairs are counted


class Deal(NamedTuple):
    """(row, expert) pairs dealt to slots: each expert's pairs in the order of their rows."""

    place: Int[Array, "P A"]  # R slot + (row of the slot); -1: no expert
    first_slot: Int[Array, " E+1"]  # of each expert; the last is the number of slots in use


def deal(ids: Int[Array, "P A"], E: int, R: int) -> Deal:
    """Deal the pairs of rows and experts 0 to E - 1 to slots of R rows; other ids are no expert.

    No sort: a pair's place follows from how many pairs of its expert stand before it, counted
    within blocks of pairs and over blocks.
    """
    # Blocks of pairs, filled up with pairs of expert E, which is none.
    pairs = jnp.where((ids >= 0) & (ids < E), ids, E).reshape(-1)
    width = min(len(pairs), PAIRS_OF_A_BLOCK)
    pairs = jnp.pad(pairs, (0, -len(pairs) % width), constant_values=E).reshape(-1, width)

    # Pairs of the same expert before each pair: within its block, and in the blocks before.
    within = count(is_before(width)[None] & (pairs[:, None, :] == pairs[:, :, None]))
    in_block = count(pairs[:, None, :] == jnp.arange(E, dtype=jnp.int32)[None, :, None])
    blocks_before = is_before(len(pairs))[:, None, :]
    before = jnp.sum(jnp.where(blocks_before, in_block.T[None], 0), -1, dtype=jnp.int32)

    # Slots of the experts before each expert.
    slots = (in_block.sum(0, dtype=jnp.int32) + R - 1) // R
    first_slot = jnp.sum(jnp.where(is_before(E + 1)[:, :-1], slots[None], 0), -1, dtype=jnp.int32)

    base = R * first_slot[None, :-1] + before
    place = jnp.take_along_axis(base, jnp.minimum(pairs, E - 1), axis=1) + within
    place = jnp.where(pairs < E, place, -1).reshape(-1)[: ids.size]
    return Deal(place.reshape(ids.shape), first_slot)


def count(holds: Bool[Array, "*dims n"]) -> Int[Array, "*dims"]:
    """How many along the last dim hold."""
    return jnp.sum(holds, -1, dtype=jnp.int32)


def is_before(n: int) -> Bool[Array, "n n"]:
    """Whether j stands before i, [i, j]. Sums over it run in one kernel; a cumulative sum takes
    several.
    """
    i = jnp.arange(n, dtype=jnp.int32)
    return i[:, None] > i[None]


class Slots(NamedTuple):
    """The contents of S slots. Slots and rows of them that are not in use hold any."""

    expert: Int[Array, " S"]
    row: Int[Array, "S R"]


def fill(dealt: Deal, S: int, R: int) -> Slots:
    """The first S slots."""
    P, A = dealt.place.shape
    slot = jnp.arange(S, dtype=jnp.int32)
    expert = count(dealt.first_slot[None, 1:] <= slot[:, None])
    rows = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32)[:, None], (P, A))
    place = jnp.where(dealt.place >= 0, dealt.place, S * R)
    row = jnp.zeros(S * R, jnp.int32).at[place].set(rows, mode="drop", unique_indices=True)
    return Slots(jnp.minimum(expert, len(dealt.first_slot) - 2), row.reshape(S, R))


def combine(
    outputs: Float[Array, "S R L"],
    place: Int[Array, "P A"],
    weights: Float[Array, "P A"],
) -> Float[Array, "P L"]:
    """The weighted sum of each row's outputs, in the order of its ids."""
    of_pair = outputs.reshape(-1, outputs.shape[-1])
    of_pair = of_pair.at[jnp.maximum(place, 0)].get(mode="promise_in_bounds")
    weighed = jnp.where((place >= 0)[..., None], weights[..., None] * widen(of_pair), 0)
    return weighed.sum(1)


# Sizes, known when compiling.


class Sizes(NamedTuple):
    """How slots are laid out: R rows each, and the numbers of slots that are compiled, the last for
    any routing.
    """

    R: int
    capacities: tuple[int, ...]
    slots_a_turn: int = 0  # of the loop over slots; 0: no loop


@functools.cache
def sizes(P: int, A: int, held: int, E: int, expert_bytes: int) -> Sizes:
    """The layout for P rows of A ids among E experts, `held` of them here, whose decoded matrices
    take `expert_bytes` each.
    """
    mean = P * A / E
    if mean <= FUSED_UP_TO:
        R = 1 if P == 1 else 2
        return Sizes(R, fused_capacities(P, A, held, E, R))
    R = min(128, 16 * math.ceil((mean + 2.5 * math.sqrt(mean)) / 16))
    expected, worst = expected_slots(P, A, held, E, R), most_slots(P * A, held, R)
    most = max(1, DECODED_BYTES // expert_bytes)
    turns = math.ceil((expected + 1) / most)
    slots = math.ceil((expected + 1) / turns)
    last = math.ceil(worst / slots)
    steps = {min(last, math.ceil(turns * growth)) for growth in (0.5, 1, 1.25, 2, 4)} | {last}
    return Sizes(R, tuple(slots * step for step in sorted(steps)), slots)


def fused_capacities(P: int, A: int, held: int, E: int, R: int) -> tuple[int, ...]:
    """Around what uniform routing needs in close steps, then in doubling steps up to the most."""
    expected, worst = expected_slots(P, A, held, E, R), most_slots(P * A, held, R)
    spread = math.sqrt(expected)
    found = {expected + step * spread for step in (-1, 0, 1, 2)}
    while max(found) < worst:
        found.add(2 * max(found))
    # XLA writes the gathered weights of a lone slot out before it reduces them.
    return tuple(sorted({min(worst, max(2, math.ceil(capacity))) for capacity in found}))


def expected_slots(P: int, A: int, held: int, E: int, R: int) -> float:
    """Slots of R rows that `held` experts take on average if P rows choose A of E uniformly."""
    mean = P * A / E
    highest = math.ceil(mean + 10 * math.sqrt(mean) + 10)
    log_odds = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(highest)]
    return held * sum(math.exp(odds) * math.ceil(n / R) for n, odds in enumerate(log_odds))


def most_slots(pairs: int, held: int, R: int) -> int:
    """Slots that any routing of so many pairs needs at most: every expert's last slot holds one."""
    return pairs if pairs <= held else held + (pairs - held) // R


def decoded_bytes(config: Config, dtype: DTypeLike) -> int:
    """The matrices of one expert, decoded."""
    return 3 * config.expert_ffn * config.latent * jnp.dtype(dtype).itemsize


# The implementation.


def slots(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """`dense` at the cost of the active experts, without a loop of unknown length. A row's sum runs
    in the order of its ids, whatever its neighbours are.
    """
    (P, A), E = ids.shape, experts.count
    if P * A == 0:
        return jnp.zeros(z.shape, at_least_float32(z.dtype))
    config = experts.config
    layout = sizes(P, A, E, config.experts, decoded_bytes(config, z.dtype))
    dealt = deal(ids, E, layout.R)

    def branch(S: int):
        def run(z: Array, weights: Array, dealt: Deal) -> Array:
            filled = fill(dealt, S, layout.R)
            if layout.slots_a_turn:
                outputs = run_in_turns(z, filled, experts, group, layout.slots_a_turn)
            else:
                outputs = run_fused(z, filled, experts, group)
            return combine(outputs, dealt.place, weights)

        return run

    capacities = jnp.array(layout.capacities[:-1], jnp.int32)
    chosen = jnp.sum(dealt.first_slot[-1] > capacities, dtype=jnp.int32)
    return jax.lax.switch(chosen, [branch(S) for S in layout.capacities], z, weights, dealt)


def run_fused(
    z: Float[Array, "P L"], filled: Slots, experts: Experts, group: int | Array
) -> Float[Array, "S R L"]:
    """The outputs of all slots. Gate and up are one reduction, down is another; each reads the
    packed weights of a slot once and decodes them on the way.
    """
    x = z.at[filled.row].get(mode="promise_in_bounds")
    gate, up = fused_products(x, experts, ("gate", "up"), group, filled.expert)
    hidden = situ(gate, up, experts.config).astype(z.dtype)
    return fused_products(hidden, experts, ("down",), group, filled.expert)[0]


def fused_products(
    x: Float[Array, "S R i"],
    experts: Experts,
    names: tuple[str, ...],
    group: int | Array,
    expert: Int[Array, " S"],
) -> list[Float[Array, "S R o"]]:
    """x w^T for each named matrix of each slot's expert, rounded to x's type: a single reduction
    over several operands, which no compiler takes apart, so that x and w are read once.
    """
    terms, R = [], x.shape[1]
    scale = 1.0
    for name in names:
        of_rows, scale = GATHERED[experts.quantization.name].terms(
            x, experts.stacks(name), group, expert
        )
        terms += of_rows
    zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
    sums = jax.lax.reduce(tuple(terms), zeros, _add_each, (2,))
    sums = [(jnp.asarray(scale, total.dtype) * total).astype(x.dtype) for total in sums]
    return [jnp.stack(sums[first : first + R], 1) for first in range(0, len(sums), R)]


def _add_each(left: tuple, right: tuple) -> tuple:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def run_in_turns(
    z: Float[Array, "P L"], filled: Slots, experts: Experts, group: int | Array, slots_a_turn: int
) -> Float[Array, "S R L"]:
    """The outputs of all slots, some slots at a time: their matrices are decoded into memory and
    multiplied.
    """
    S, R = filled.row.shape
    gathered = GATHERED[experts.quantization.name]
    reordered = gathered.reorder(z)

    def product(x: Array, name: str, expert: Array) -> Array:
        stacks: Stacks = experts.stacks(name)
        w = gathered.matrices(stacks, group, expert, z.dtype)
        wide = at_least_float32(z.dtype)
        y = jnp.einsum(
            "sri,soi->sro", x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide
        )
        return y.astype(z.dtype)

    def run_turn(turn: Array, outputs: Array) -> Array:
        first = turn * slots_a_turn
        row = jax.lax.dynamic_slice_in_dim(filled.row, first, slots_a_turn)
        expert = jax.lax.dynamic_slice_in_dim(filled.expert, first, slots_a_turn)
        x = reordered.at[row].get(mode="promise_in_bounds")
        gate, up = (product(x, name, expert) for name in ("gate", "up"))
        hidden = gathered.reorder(situ(gate, up, experts.config).astype(z.dtype))
        # Down is decoded when gate and up are done with: their memory serves it.
        hidden, expert = jax.lax.optimization_barrier((hidden, expert))
        output = product(hidden, "down", expert)
        return jax.lax.dynamic_update_slice_in_dim(outputs, output, first, 0)

    outputs = jnp.zeros((S, R, z.shape[1]), z.dtype)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(S // slots_a_turn), run_turn, outputs)
