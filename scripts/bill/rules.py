"""How often loops run that do not say it, and which branches count: from the shapes of a step."""

import math
from collections.abc import Callable

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
    shares, blocks = Shares(program, load), program.implementations.blocks
    assert blocks is not None

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
    """The branch of a choice by the number of cached keys, or by the slots that a rank's experts
    take at uniform routing; others are left to the bytes.
    """
    shares, config = Shares(program, load), program.config
    blocks = program.implementations.blocks
    assert blocks is not None

    def branch(scope: str, conditional: Instruction) -> tuple[int, str] | None:
        if scope.startswith("mlp/experts"):
            return expert_branch(program, shares)
        widths: Callable | None = getattr(mla, "selection_widths", None)
        if "indexer" not in scope or widths is None:
            return None
        local_slots = program.stripes.slots(slots)
        choices = widths(local_slots, config.index_topk, blocks.narrowest_slots)
        if len(choices) != len(branches(conditional)):
            return None
        local = math.ceil(shares.keys / shares.key_ranks)
        return sum(local <= width for width in choices[1:]), f"{local} keys"

    return branch


def expert_branch(program: Program, shares: Shares) -> tuple[int, str] | None:
    """The branch of the experts' slots that uniform routing takes on average."""
    config, rows, active = program.config, shares.routed_rows, program.config.active_experts
    held = config.experts // shares.expert_ranks
    decoded = slots.decoded_bytes(config, program.dtype)
    layout = slots.sizes(rows, active, held, config.experts, decoded)
    expected = slots.expected_slots(rows, active, held, config.experts, layout.R)
    branch = sum(expected > capacity for capacity in layout.capacities[:-1])
    return branch, f"{expected:.0f} slots of uniform routing in {layout.capacities[branch]}"


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
