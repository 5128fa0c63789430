"""The routed experts: their weights, every expert on every row (definition), sorted blocks (fast),
and expert-parallel dispatch and combine.

Nothing is ever dropped: there is no capacity. An id of -1 is no expert, so that padding costs
nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel import collectives
from ..parallel.collectives import of_bits, to_bits
from ..parallel.roles import Dim, Role
from .layers import HIGHEST, Expert, Term, linear, situ
from .mxfp4 import PARTS, Quantization
from .step import Step


class Experts(nnx.Module):
    """The routed experts' weights: matrices gate, up [G, E, F, L] and down [G, E, L, F], each
    stored as its quantization says, under the prefixes of its parts (`w_gate`, `s_gate`).
    """

    w_gate: nnx.Param

    def __init__(self, config: Config, dtype: DTypeLike, quantization: Quantization):
        E = Dim(config.experts, role=Role.EXPERTS)
        F, L = config.expert_ffn, config.latent
        self.config, self.quantization = config, quantization
        inward, outward = dict(E=E, F=F, L=L), dict(E=E, L=L, F=F)
        for name, dims in dict(gate=inward, up=inward, down=outward).items():
            for part, param in quantization.declare(dtype, Expert, Term.EXPERTS, **dims).items():
                setattr(self, f"{part}_{name}", param)

    @property
    def count(self) -> int:
        """The experts that this rank holds."""
        return self.w_gate.shape[1]

    def run(
        self, x: Float[Array, "rows L"], group: int | Array, expert: Int[Array, ""]
    ) -> Float[Array, "rows L"]:
        """w_down situ(w_gate x, w_up x) of one expert of one layer."""
        gate, up = self._linear(x, "gate", group, expert), self._linear(x, "up", group, expert)
        hidden = situ(gate, up, self.config).astype(x.dtype)
        return self._linear(hidden, "down", group, expert)

    def _linear(
        self, x: Float[Array, "rows i"], name: str, group: int | Array, expert: Int[Array, ""]
    ) -> Float[Array, "rows o"]:
        """x w^T for one expert, its weights read by index and decoded where they are used; rounded
        to x's type.
        """
        stored = self._parts(name, lambda stack: _read_expert(stack, group, expert))
        return self.quantization.multiply(x, stored)

    def stack(self, name: str, group: int | Array, dtype: DTypeLike) -> Float[Array, "E o i"]:
        """All experts' matrices of one kind of one layer, decoded: for the definition."""
        return self.quantization.decode(self._parts(name, lambda stack: stack[group]), dtype)

    def _parts(self, name: str, read: Callable[[Array], Array]) -> dict[str, Array]:
        """What `read` takes of each weight that a matrix is stored as, by its prefix."""
        params = {part: getattr(self, f"{part}_{name}", None) for part in PARTS}
        return {part: read(param[...]) for part, param in params.items() if param is not None}


def _read_expert(
    stack: Shaped[Array, "G E o i"], group: int | Array, expert: Int[Array, ""]
) -> Shaped[Array, "o i"]:
    """One expert's matrix of one layer, without a copy of the others."""
    start = (jnp.int32(group), expert, jnp.int32(0), jnp.int32(0))
    return jax.lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]


def dense(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """The definition, slow and plainly right: every expert on every row, then a mask. Ids outside
    the experts held weigh nothing.
    """
    w_gate, w_up, w_down = (experts.stack(name, group, z.dtype) for name in ("gate", "up", "down"))
    E = w_gate.shape[0]
    of_each_expert = jax.vmap(linear)
    rows = jnp.broadcast_to(z, (E, *z.shape))
    gate, up = of_each_expert(rows, w_gate), of_each_expert(rows, w_up)
    hidden = situ(gate, up, experts.config).astype(z.dtype)
    outputs = widen(of_each_expert(hidden, w_down))
    chosen = jax.nn.one_hot(ids, E, dtype=weights.dtype)
    return jnp.einsum("pae,pa,epl->pl", chosen, weights, outputs, precision=HIGHEST)


def block_rows(rows: int) -> int:
    """Rows of one expert that are multiplied together: one for a lone row, else 8 to 32.

    For 256 rows, 8 of 64 experts each, a layer took 95 ms in blocks of 16, 82 of 32, 100 of 64.
    """
    return 1 if rows == 1 else 8 if rows < 64 else 16 if rows < 256 else 32


class SortedPairs(NamedTuple):
    """(row, expert) pairs in the order of their experts, dealt to blocks of one expert each."""

    pair: Int[Array, " X"]  # the pair in each place of that order; pair p is row p // A
    count: Int[Array, " E"]  # pairs of each expert
    end: Int[Array, " E"]  # the place behind each expert's last pair
    block_end: Int[Array, " E"]  # the block behind each expert's last block


def sort_pairs(ids: Int[Array, "P A"], E: int, block: int) -> SortedPairs:
    """The pairs of rows and experts 0 to E - 1 by expert, within one by row; pairs of other ids
    stand last and belong to no block.
    """
    expert_of_pair = jnp.where((ids >= 0) & (ids < E), ids, E).reshape(-1)
    pair = jnp.argsort(expert_of_pair, stable=True).astype(jnp.int32)
    count = jnp.zeros(E, jnp.int32).at[expert_of_pair].add(1, mode="drop")
    end = jnp.cumsum(count, dtype=jnp.int32)
    block_end = jnp.cumsum((count + block - 1) // block, dtype=jnp.int32)
    return SortedPairs(pair, count, end, block_end)


def pairs_of_block(
    pairs: SortedPairs, i: Int[Array, ""], block: int
) -> tuple[Int[Array, ""], Int[Array, " block"], Bool[Array, " block"]]:
    """The expert of block i, its pairs, and which of them exist: the last block of an expert may
    have fewer than `block`.
    """
    expert = jnp.sum(pairs.block_end <= i, dtype=jnp.int32)
    count, end = pairs.count[expert], pairs.end[expert]
    first_block = pairs.block_end[expert] - (count + block - 1) // block
    first_place = end - count + (i - first_block) * block
    places = first_place + jnp.arange(block, dtype=jnp.int32)
    exists = places < end
    return expert, pairs.pair[jnp.where(exists, places, 0)], exists


def grouped(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """`dense` at the cost of the active experts: (row, expert) pairs are sorted by expert, and a
    loop runs the blocks of rows that exist, one expert a block.

    A row's sum runs in the order of its experts, whatever its neighbours are.
    """
    P, A = ids.shape
    block = block_rows(P)
    pairs = sort_pairs(ids, experts.count, block)
    weight_of_pair = weights.reshape(-1)

    def add_block(i: Array, total: Array) -> Array:
        # Gather the block's rows, run its expert, weigh, and add to the rows' sums.
        expert, pair, exists = pairs_of_block(pairs, i, block)
        row = pair // A
        output = widen(experts.run(z[row], group, expert)) * weight_of_pair[pair][:, None]
        return total.at[jnp.where(exists, row, P)].add(output, mode="drop")

    blocks = pairs.block_end[-1]
    return jax.lax.fori_loop(0, blocks, add_block, jnp.zeros(z.shape, at_least_float32(z.dtype)))


IMPLEMENTATIONS = {"dense": dense, "grouped": grouped}


def run_local_experts(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    step: Step,
) -> Float[Array, "P L"]:
    """The weighted sum over those experts of each row that this rank holds; ids number all experts,
    -1 is none.
    """
    first = collectives.rank(step.place.expert_axes) * experts.count
    local_ids = jnp.where(ids >= 0, ids - first, -1)
    return IMPLEMENTATIONS[step.implementations.moe](z, local_ids, weights, experts, step.group)


class Address(NamedTuple):
    """Where rows are sent: row i goes to rank j in row `slot[i, j]` of a block, if it asks for any
    of that rank's experts.
    """

    rank_of_expert: Int[Array, "c A"]  # -1: no expert
    is_sent: Bool[Array, "c n"]
    slot: Int[Array, "c n"]


def address_rows(ids: Int[Array, "c A"], held: int, n: int) -> Address:
    """The addresses of rows on n ranks that hold `held` experts each, in order."""
    rank_of_expert = jnp.where(ids >= 0, ids // held, -1)
    ranks = jnp.arange(n, dtype=jnp.int32)
    is_sent = jnp.any(rank_of_expert[..., None] == ranks[None, None], axis=1)
    slot = jnp.cumsum(is_sent, 0, dtype=jnp.int32) - 1
    return Address(rank_of_expert, is_sent, slot)


def dispatch_messages(
    z: Float[Array, "c L"],
    ids: Int[Array, "c A"],
    weights: Float[Array, "c A"],
    address: Address,
    held: int,
) -> UInt[Array, "n c X"]:
    """The block of rows for every rank, as bits: of each row the latent, then the local numbers of
    that rank's experts, from 1 on, and their weights. A number 0 is no expert, so a row of zeros
    asks for nothing.
    """
    (c, n), ranks = address.is_sent.shape, jnp.arange(address.is_sent.shape[1], dtype=jnp.int32)
    local_rows = jnp.arange(c, dtype=jnp.int32)[:, None]
    slots = jnp.where(address.is_sent, address.slot, c)
    row_in_slot = jnp.full((n, c), c, jnp.int32)  # row c does not exist: zeros are sent
    row_in_slot = row_in_slot.at[ranks[None], slots].set(local_rows, mode="drop")
    gather = lambda x, fill: x.at[row_in_slot].get(mode="fill", fill_value=fill)  # noqa: E731
    is_theirs = gather(address.rank_of_expert, -1) == ranks[:, None, None]
    numbers = jnp.where(is_theirs, gather(ids, 0) % held + 1, 0)
    return to_bits(gather(z, 0), numbers, jnp.where(is_theirs, gather(weights, 0), 0))


def dispatched(
    z: Float[Array, "c L"],
    ids: Int[Array, "c A"],
    weights: Float[Array, "c A"],
    experts: Experts,
    step: Step,
) -> Float[Array, "c L"]:
    """Expert-parallel dispatch and combine: each local row is sent once to every rank that holds
    one of its experts, which runs them and returns their weighted sum. The sums of the local rows,
    complete.

    At most c rows go to a rank: none is ever dropped. What returns is rounded to the type of z and
    summed in at least float32, in rank order.
    """
    axes, (c, L), A = step.place.expert_axes, z.shape, ids.shape[1]
    n, held = collectives.ranks(axes), experts.count
    if n == 1:
        return run_local_experts(z, ids, weights, experts, step)

    # Address: which ranks get which rows.
    address = address_rows(ids, held, n)
    counts = TRANSPORTS[step.implementations.transport](address, axes)

    # Dispatch: one block of rows to every rank, one from every rank.
    messages = dispatch_messages(z, ids, weights, address, held)
    received = collectives.all_to_all_blocks(messages, counts, axes).reshape(n * c, -1)
    rows, numbers, row_weights = of_bits(received, (L, z.dtype), (A, jnp.int32), (A, weights.dtype))

    # Run the local experts on the rows of all ranks.
    run = IMPLEMENTATIONS[step.implementations.moe]
    sums = run(rows, numbers - 1, row_weights, experts, step.group)

    # Return: the same exchange backwards.
    blocks = sums.astype(z.dtype).reshape(n, c, L)
    returned = collectives.all_to_all_blocks(blocks, None if counts is None else counts.T, axes)

    # Combine: add what each rank made of a row, in rank order.
    total = jnp.zeros((c, L), at_least_float32(z.dtype))
    for j in range(n):
        from_rank = widen(returned[j, address.slot[:, j]])
        total += jnp.where(address.is_sent[:, j, None], from_rank, 0)
    return total


def padded_counts(address: Address, axes: tuple[str, ...]) -> None:
    """Full blocks travel: no rank needs to know how many of their rows are sent."""


def ragged_counts(address: Address, axes: tuple[str, ...]) -> Int[Array, "n n"]:
    """Only the rows that are sent travel: counts[i, j] from rank i to rank j, on every rank."""
    return collectives.gather_counts(address.is_sent.sum(0, dtype=jnp.int32), axes)


TRANSPORTS = {"padded": padded_counts, "ragged": ragged_counts}
