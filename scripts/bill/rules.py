"""How often loops run that do not say it, and which branches count: from the shapes of a step."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from kimi_jax.config.block_sizes import BlockSizes
from kimi_jax.model import mla
from kimi_jax.model.experts import slots
from kimi_jax.model.experts.blocks import block_rows
from kimi_jax.runtime.program import Program

from .floor import Load, Shares
from .hlo import Instruction, branches, named_scope, op_name
from .walk import Rule


def loop_rule(program: Program, load: Load) -> Rule:
    """The turns of a loop of unknown length, by its scope: blocks of keys that a rank holds, blocks
    of rows of its experts at uniform routing, or one token of a multi-step decode.
    """
    shares, blocks = Shares(program, load), _blocks(program)

    def turns(scope: str, loop: Instruction) -> tuple[int, str] | None:
        name = op_name(loop.attributes)
        if not named_scope(name) and load.tokens == 1:
            return 1, "billed a token"
        if scope.startswith("mlp/experts"):
            count = expected_blocks(program, shares)
            return (count, "blocks of uniform routing") if count else None
        if scope.startswith("attention/mla"):
            block = blocks.keys
            local = math.ceil(shares.keys / shares.key_ranks)
            return math.ceil(local / block), f"blocks of {block} keys"
        return None

    return turns


def branch_rule(program: Program, load: Load, slots: int) -> Rule:
    """The branch of a choice, counted from the one of the most bytes: by the number of cached keys,
    or by the slots that a rank's experts take at uniform routing. Others are left to the bytes.
    """
    shares = Shares(program, load)

    def branch(scope: str, conditional: Instruction) -> tuple[int, str] | None:
        count = len(branches(conditional))
        if scope.startswith("mlp/experts"):
            return expert_branch(program, shares, count)
        if not scope.startswith("attention/mla"):
            return None
        if program.implementations.mla == "static":
            inside = op_name(conditional.attributes).rpartition("/mla/")[2]
            if "branch_" in inside:  # a choice within a width
                return _choice(gathered_widths(program), spread(program, shares), count)
            return _choice(static_widths(program, load, slots), local_keys(shares), count)
        widths = mla.selection_widths(
            program.stripes.slots(slots),
            program.config.index_topk,
            _blocks(program).narrowest_slots,
        )
        return _choice(widths, local_keys(shares), count) if "indexer" in scope else None

    return branch


def _choice(
    widths: Sequence[int], needed: float, branches: int, what: str = "keys"
) -> tuple[int, str] | None:
    """The narrowest of falling widths that holds what is needed; None if these are not the widths
    of the branches.
    """
    if len(widths) != branches:
        return None
    which = sum(needed <= width for width in widths[1:])
    return which, f"{needed:.0f} {what} in {widths[which]}"


def local_keys(shares: Shares) -> int:
    """Keys of a request that a rank holds."""
    return math.ceil(shares.keys / shares.key_ranks)


def static_widths(program: Program, load: Load, slots: int) -> list[int]:
    """The widths of `MLA.static`, the most first."""
    config, blocks, S = program.config, _blocks(program), program.stripes.slots(slots)
    selects = config.sparse and program.stripes.most(S) > config.index_topk
    widths = mla.selection_widths(
        S,
        config.index_topk // 2 if selects else 1,
        blocks.narrowest_slots // 2,
        4 if load.tokens == 1 else 8,
    )
    if selects:
        return widths
    row_bytes = (
        Shares(program, load).requests * config.latent_row * jnp.dtype(program.dtype).itemsize
    )
    few = [width for width in widths if width * row_bytes <= blocks.dense_bytes]
    return [S, *(width for width in few if width < S)]


def gathered_widths(program: Program) -> list[int]:
    """The widths of gathered keys where keys are dealt to ranks, the most first."""
    keep = program.config.index_topk
    return [width for width in (keep, keep // 2, keep // 4) if width]


def spread(program: Program, shares: Shares) -> float:
    """Selected keys on the rank that holds the most of them for some query: five deviations above
    the mean of a random choice.
    """
    mean = shares.selected / shares.key_ranks
    return mean + 5 * math.sqrt(mean)


def _blocks(program: Program) -> BlockSizes:
    blocks = program.implementations.blocks
    assert blocks is not None
    return blocks


def expert_branch(program: Program, shares: Shares, count: int) -> tuple[int, str] | None:
    """The branch of the experts' slots that uniform routing takes on average; capacities rise."""
    config, rows, active = program.config, shares.routed_rows, program.config.active_experts
    held = config.experts // shares.expert_ranks
    decoded = slots.decoded_bytes(config, program.dtype)
    layout = slots.sizes(_rows_of_slots(program, shares), active, held, config.experts, decoded)
    expected = slots.expected_slots(rows, active, held, config.experts, layout.R)
    return _choice(layout.capacities[::-1], expected, count, "slots of uniform routing")


def _rows_of_slots(program: Program, shares: Shares) -> int:
    """Rows that the experts of a rank are compiled for: each data rank's are padded to equal slices
    where experts are over the ranks of several.
    """
    n = shares.n
    over_data = shares.expert_ranks // n
    return over_data * n * -(-shares.rows // n) if over_data > 1 else shares.routed_rows


def expected_blocks(program: Program, shares: Shares) -> int:
    """Blocks of rows that a rank's experts run, at uniform routing; 0 without such blocks."""
    config, rows = program.config, shares.routed_rows
    held, chance = config.experts // shares.expert_ranks, config.active_experts / config.experts
    block = block_rows(rows)
    return round(held * sum(_tail(rows, chance, first) for first in range(0, rows, block)))


def _tail(rows: int, chance: float, more_than: int) -> float:
    """The probability that more than `more_than` of `rows` rows choose an expert."""
    if rows * chance > 1000 or more_than > 20 * (rows * chance + 10):
        return float(more_than < rows * chance)
    log = [
        math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)
        + k * math.log(chance) + (rows - k) * math.log1p(-chance)
        for k in range(more_than + 1)
    ]  # fmt: skip
    return max(0.0, 1 - sum(map(math.exp, log)))
