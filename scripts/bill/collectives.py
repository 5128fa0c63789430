"""What collectives of an optimized program send.

A collective's payload is the larger of what goes in and what comes out, in the type that the
optimized program gives it: that is what travels.
"""

import dataclasses
import re
from collections import defaultdict
from typing import Any

from .hlo import Instruction, array_bytes, call_counts, op_name, parse, read_type

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-broadcast"),
    *("all-to-all", "ragged-all-to-all", "collective-permute"),
)
_LISTED_RANKS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED_RANKS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_PLUMBING = re.compile(r"jit\(.*\)|shard_map|while|body|closed_call|cond|branch_\d+_fun")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction and the bytes of one call."""

    kind: str
    dtype: str  # what travels; several types are joined by +
    payload: int
    ranks: int  # devices that take part together
    scope: str  # where in the decoder it was written
    calls: int = 1  # in one step
    bounded: bool = True  # or some loop around it has no known number of turns and counts as one

    @property
    def sent(self) -> int:
        """Bytes that a device of a ring sends in one call."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload * (self.ranks - 1) // self.ranks


def collectives(hlo: str, devices: int) -> list[Collective]:
    """Every collective of a program on `devices` devices, equal collectives counted as calls."""
    module = parse(hlo)
    calls: dict[Collective, int] = defaultdict(int)
    for name, (times, bounded) in call_counts(module).items():
        for instruction in module.bodies[name]:
            found = read_collective(instruction, devices)
            if found is not None:
                calls[dataclasses.replace(found, bounded=bounded)] += times
    return [dataclasses.replace(found, calls=times) for found, times in calls.items()]


def read_collective(instruction: Instruction, devices: int) -> Collective | None:
    """The collective that an instruction is or starts, None for any other instruction."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    type_, ranks = read_type(instruction.type), read_ranks(instruction.rest, devices)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        sides = [arrays(side) for side in type_[:2]]  # operands, results; then what XLA works with
    else:
        scattered = kind == "reduce-scatter"
        sides = [arrays(type_) * (ranks if scattered else 1)]
    if kind == "ragged-all-to-all":
        sides = [side[:1] for side in sides]  # the other operands say who gets which rows
    travels = max(sides, key=lambda side: sum(map(array_bytes, side)))
    dtypes = sorted({array.partition("[")[0] for array in travels})
    payload = sum(map(array_bytes, travels))
    return Collective(kind, "+".join(dtypes), payload, ranks, read_scope(instruction.rest))


def arrays(type_: Any) -> list[str]:
    """All arrays in a type, in order."""
    return (
        [type_] if isinstance(type_, str) else [array for part in type_ for array in arrays(part)]
    )


def read_ranks(attributes: str, devices: int) -> int:
    """How many devices take part in a collective together."""
    if listed := _LISTED_RANKS.search(attributes):
        return listed[1].count(",") + 1
    counted = _COUNTED_RANKS.search(attributes)
    return int(counted[1]) if counted else devices


def read_scope(attributes: str) -> str:
    """The named scopes of the decoder that an instruction comes from."""
    parts = op_name(attributes).split("/")
    return "/".join(part for part in parts if not _PLUMBING.fullmatch(part))
