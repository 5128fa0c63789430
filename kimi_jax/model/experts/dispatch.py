"""Expert parallelism: a rank's experts on all of its rows, or rows dispatched to the ranks that
hold their experts, and combined.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...numerics import at_least_float32, widen
from ...parallel import collectives
from ...parallel.collectives import Axis
from ..step import Step
from .blocks import dense, grouped
from .slots import count, is_before, slots
from .weights import Experts

IMPLEMENTATIONS = {"dense": dense, "grouped": grouped, "slots": slots}


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
    earlier = is_before(len(ids))[:, None, :]
    return Address(rank_of_expert, is_sent, slot=count(earlier & is_sent.T[None]))


def dispatch_blocks(
    z: Float[Array, "c L"],
    ids: Int[Array, "c A"],
    weights: Float[Array, "c A"],
    address: Address,
    held: int,
) -> tuple[Float[Array, "n c L"], Int[Array, "n c A"], Float[Array, "n c A"]]:
    """The block of rows for every rank: of each row the latent, the local numbers of that rank's
    experts, from 1 on, and their weights. A number 0 is no expert, so a row of zeros asks for
    nothing.
    """
    c, n = address.is_sent.shape
    ranks, local_rows = jnp.arange(n, dtype=jnp.int32), jnp.arange(c, dtype=jnp.int32)

    # The row in each slot of each block; row c does not exist: zeros are sent.
    slot = jnp.where(address.is_sent, address.slot, -1).T
    is_in_slot = slot[:, None, :] == local_rows[None, :, None]
    rows = jnp.where(is_in_slot, local_rows[None, None] - c, 0)
    row_in_slot = c + rows.sum(-1, dtype=jnp.int32)
    gather = lambda x, fill: x.at[row_in_slot].get(mode="fill", fill_value=fill)  # noqa: E731
    is_theirs = gather(address.rank_of_expert, -1) == ranks[:, None, None]
    numbers = jnp.where(is_theirs, gather(ids, 0) % held + 1, 0)
    return gather(z, 0), numbers, jnp.where(is_theirs, gather(weights, 0), 0)


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
    axes, (c, L) = step.place.expert_axes, z.shape
    n, held = collectives.ranks(axes), experts.count
    if n == 1:
        return run_local_experts(z, ids, weights, experts, step)

    # Address: which ranks get which rows.
    address = address_rows(ids, held, n)
    counts = TRANSPORTS[step.implementations.transport](address, axes)

    # Dispatch: one block of rows to every rank, one from every rank.
    blocks = dispatch_blocks(z, ids, weights, address, held)
    exchange = lambda x, counts: collectives.all_to_all_blocks(x, counts, axes)  # noqa: E731
    received = collectives.as_message(exchange, (counts,), *blocks)
    real = real_rows(n * c, axes, step)
    rows, numbers, row_weights = (x.reshape(n * c, -1)[:real] for x in received)

    # Run the local experts on the rows of all ranks.
    run = IMPLEMENTATIONS[step.implementations.moe]
    sums = run(rows, numbers - 1, row_weights, experts, step.group)

    # Return: the same exchange backwards.
    sent_back = padded_to(sums.astype(z.dtype), n * c).reshape(n, c, L)
    returned = collectives.all_to_all_blocks(sent_back, None if counts is None else counts.T, axes)

    # Combine: add what each rank made of a row, in rank order.
    total = jnp.zeros((c, L), at_least_float32(z.dtype))
    for j in range(n):
        from_rank = widen(returned[j, address.slot[:, j]])
        total += jnp.where(address.is_sent[:, j, None], from_rank, 0)
    return total


def real_rows(rows: int, axes: Axis, step: Step) -> int:
    """Of rows in the order of the ranks along `axes`, those that can hold one: the last slices of
    the rows of a step are zero-padded to equal lengths.
    """
    return min(rows, step.rows) if collectives.ranks(axes) == collectives.ranks() else rows


def padded_to(rows: Float[Array, "p L"], count: int) -> Float[Array, "P L"]:
    """Rows with zeros behind them."""
    return jnp.pad(rows, ((0, count - len(rows)), (0, 0))) if len(rows) < count else rows


def padded_counts(address: Address, axes: tuple[str, ...]) -> None:
    """Full blocks travel: no rank needs to know how many of their rows are sent."""


def ragged_counts(address: Address, axes: tuple[str, ...]) -> Int[Array, "n n"]:
    """Only the rows that are sent travel: counts[i, j] from rank i to rank j, on every rank."""
    return collectives.gather_counts(address.is_sent.sum(0, dtype=jnp.int32), axes)


TRANSPORTS = {"padded": padded_counts, "ragged": ragged_counts}
