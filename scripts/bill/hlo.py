"""The text of an optimized HLO program as values: computations, instructions, types, scopes."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_TYPE_TOKEN = re.compile(r"[()]|\w+\[[\d,]*\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAMES = re.compile(r"%([\w.-]+)")
_PLUMBING = re.compile(
    r"jit\(.*|jvp\(.*|shard_map|while|body|closed_call|cond|call|branch_\d+_fun|layer_.*|vmap\(.*"
)


class Instruction(NamedTuple):
    """A line of HLO text: the result's name and type, what is done, operands and attributes."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes as they stand
    is_root: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands, in order."""
        return _operands(self.rest)

    @property
    def attributes(self) -> str:
        """What follows the operands."""
        return self.rest[_operands_end(self.rest) :]

    @property
    def arrays(self) -> tuple["ArrayType", ...]:
        """The arrays of the result, in order."""
        return array_types(self.type)

    @property
    def size(self) -> int:
        """The elements of the result, of all its arrays."""
        return sum(array.size for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """The bytes of the result, of all its arrays."""
        return sum(array.nbytes for array in self.arrays)


class ArrayType(NamedTuple):
    """A type such as bf16[8,128]."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Its bytes, rounded up."""
        return -(-self.size * bits(self.dtype) // 8)


class Module(NamedTuple):
    """A program: the instructions of every computation, and which one is run."""

    bodies: dict[str, list[Instruction]]
    entry: str


def parse(hlo: str) -> Module:
    """The computations of a program and the name of the entry."""
    bodies: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            body = bodies[opened[2]] = []
            entry = opened[2] if opened[1] else entry
        elif read := _INSTRUCTION.match(line):
            root, name, type_, opcode, rest = read.groups()
            body.append(Instruction(name, type_, opcode, rest, bool(root)))
    return Module(bodies, entry)


def call_counts(module: Module) -> dict[str, tuple[int, bool]]:
    """How often one run of the entry runs each computation, and whether all loops around it say
    their turns.
    """
    counts: dict[str, tuple[int, bool]] = {}

    def visit(name: str, times: int, bounded: bool) -> None:
        so_far, all_bounded = counts.get(name, (0, True))
        counts[name] = so_far + times, all_bounded and bounded
        for instruction in module.bodies[name]:
            trips = turns(instruction)
            for called in called_by(instruction):
                visit(called, times * (trips or 1), bounded and trips is not None)

    visit(module.entry, 1, True)
    return counts


def called_by(instruction: Instruction) -> Iterator[str]:
    """The computations that an instruction runs; the end of an asynchronous one runs nothing."""
    if not instruction.opcode.endswith(("-done", "-update")):
        for names in _CALLED.findall(instruction.rest):
            yield from re.findall(r"[\w.-]+", names)


def attribute(instruction: Instruction, name: str) -> str | None:
    """What stands behind `name=`: a computation's name, or the text within braces."""
    found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([\w.-]+))", instruction.attributes)
    return None if found is None else found[1] if found[1] is not None else found[2]


def branches(conditional: Instruction) -> list[str]:
    """The computations that a conditional chooses from, in the order of their operands: of a
    predicate, first the one for true.
    """
    if listed := attribute(conditional, "branch_computations"):
        return _NAMES.findall(listed)
    named = [attribute(conditional, f"{which}_computation") for which in ("true", "false")]
    return [name for name in named if name is not None]


def turns(instruction: Instruction) -> int | None:
    """How often an instruction runs what it calls: once unless it is a loop, None if unknown."""
    if instruction.opcode != "while":
        return 1
    known = _TRIPS.search(instruction.rest)
    return int(known[1]) if known else None


def read_type(text: str) -> Any:
    """A type as nested lists of arrays such as "bf16[8,128]"; other types as they are."""
    open_: list[list] = [[]]
    for token in _TYPE_TOKEN.findall(_LAYOUT.sub("", text)):
        if token == "(":
            open_.append([])
        else:
            open_[-1].append(token) if token != ")" else open_[-2].append(open_.pop())
    return open_[0][0]


@functools.lru_cache(maxsize=65536)
def array_types(text: str) -> tuple[ArrayType, ...]:
    """All arrays of a type, in order."""
    tokens = _TYPE_TOKEN.findall(_LAYOUT.sub("", text))
    return tuple(array_type(token) for token in tokens if token not in "()")


def array_type(text: str) -> ArrayType:
    """The type "bf16[8,128]" as a value."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    return ArrayType(dtype, tuple(int(dim) for dim in dims.split(",") if dim))


def bits(dtype: str) -> int:
    """The bits of an element; a predicate takes a byte."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 8


def array_bytes(array: str) -> int:
    """The bytes of "bf16[8,128]"."""
    return array_type(array).nbytes


def op_name(attributes: str) -> str:
    """Where in the traced program an instruction comes from: scopes and a primitive."""
    found = _OP_NAME.search(attributes)
    return found[1] if found else ""


def named_scope(name: str) -> str:
    """The decoder's named scopes in an op name: no layer numbers, loops, branches, primitives."""
    parts = name.split("/")[:-1]
    kept = [part for part in parts if not (_PLUMBING.fullmatch(part) or "->" in part)]
    return "/".join(dict.fromkeys(kept))


@functools.lru_cache(maxsize=65536)
def _operands_end(rest: str) -> int:
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter in "({") - (letter in ")}")
        if depth == 0:
            return at + 1
    return len(rest)


@functools.lru_cache(maxsize=65536)
def _operands(rest: str) -> tuple[str, ...]:
    return tuple(_NAMES.findall(rest[: _operands_end(rest)]))
