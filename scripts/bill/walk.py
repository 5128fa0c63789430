"""The bill of a program: kernels as they run, loops by their turns, of branches the chosen one."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from .collectives import read_collective
from .hlo import Instruction, Module, attribute, branches, named_scope, op_name, turns
from .kernels import FREE, Kernel, kernel

CONTROL = frozenset({"while", "conditional", "call", "async-start"})
LARGE = 65536  # bytes of a weight or state from which moving it is listed


@dataclasses.dataclass
class Part:
    """What the kernels of one named scope cost in a run of the program."""

    read: int = 0
    written: int = 0
    launches: int = 0
    in_buffers: int = 0  # of the launches, those in a command buffer
    waits: int = 0  # of the host, for a condition on the device
    products: dict[str, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    lanes: int = 0
    collectives: int = 0
    sent: int = 0  # bytes that one device sends in them

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def add(self, other: "Part", times: int = 1) -> None:
        """Add another part, run `times` times."""
        for field in dataclasses.fields(self):
            if field.name != "products":
                total = getattr(self, field.name) + times * getattr(other, field.name)
                setattr(self, field.name, total)
        for dtype, flop in other.products.items():
            self.products[dtype] += times * flop


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that does not say its turns, with the number that counts for it, or a choice."""

    kind: str  # "loop" or "branch"
    scope: str
    name: str
    count: int  # turns of one run, or the branch that counts: 0 is that of the most bytes
    reason: str
    runs: int = 1  # of the loop or conditional, in a run of the program


@dataclasses.dataclass(frozen=True)
class Move:
    """A kernel that copies, transposes or cuts a weight or a state and computes nothing."""

    scope: str
    opcode: str
    origin: str
    nbytes: int  # read and written by one run
    times: int = 1


@dataclasses.dataclass
class Bill:
    """The whole account."""

    parts: dict[str, Part]
    known_turns: dict[str, int]  # of loops that say them, by scope
    choices: list[Loop]
    moves: list[Move]

    @property
    def total(self) -> Part:
        """All parts together."""
        total = Part()
        for part in self.parts.values():
            total.add(part)
        return total

    @property
    def is_lower_bound(self) -> bool:
        """Whether some loop without a known number of turns counted as one."""
        return any(loop.kind == "loop" and loop.reason == UNKNOWN for loop in self.choices)


def joined(bills: list[tuple[Bill, int]]) -> Bill:
    """The bill of a step that runs each of these programs so many times."""
    parts: dict[str, Part] = defaultdict(Part)
    known_turns: dict[str, int] = defaultdict(int)
    choices, moves = [], []
    for bill, calls in bills:
        for scope, part in bill.parts.items():
            parts[scope].add(part, calls)
        for scope, turns_ in bill.known_turns.items():
            known_turns[scope] += calls * turns_
        choices += [dataclasses.replace(one, runs=one.runs * calls) for one in bill.choices]
        moves += [dataclasses.replace(one, times=one.times * calls) for one in bill.moves]
    return Bill(dict(parts), dict(known_turns), choices, moves)


UNKNOWN = "unknown"
# Turns of an unknown loop, or a branch counted from that of the most bytes, for a scope: None where
# no rule says.
Rule = Callable[[str, Instruction], tuple[int, str] | None]


def no_rule(scope: str, instruction: Instruction) -> tuple[int, str] | None:
    """The rule that knows nothing."""
    return None


class Walk:
    """One pass over a program; every computation is billed once for each place that runs it."""

    def __init__(
        self,
        module: Module,
        loop_rule: Rule = no_rule,
        branch_rule: Rule = no_rule,
        buffered: frozenset[str] = frozenset(),
        devices: int = 1,
    ):
        self.module, self.loop_rule, self.branch_rule = module, loop_rule, branch_rule
        self.buffered, self.devices = buffered, devices
        entry = (op for op in module.bodies[module.entry] if op.opcode == "parameter")
        self.kinds = {_argument(op): op.type.partition("{")[0] for op in entry}
        self.parts: dict[str, Part] = defaultdict(Part)
        self.known: dict[str, int] = defaultdict(int)
        self.choices: dict[Loop, int] = defaultdict(int)
        self.moves: dict[Move, int] = defaultdict(int)

    def bill(self) -> Bill:
        """The account of one run of the entry."""
        entry = self.module.bodies[self.module.entry]
        origins = {op.name: _argument(op) for op in entry if op.opcode == "parameter"}
        self._run(self.module.entry, 1, origins)
        choices = [dataclasses.replace(c, runs=runs) for c, runs in self.choices.items()]
        moves = [dataclasses.replace(move, times=times) for move, times in self.moves.items()]
        return Bill(dict(self.parts), dict(self.known), choices, moves)

    def _run(self, name: str, times: int, origins: dict[str, Any]) -> Any:
        """Bill a computation; the origin of its result. `origins` starts with its parameters'."""
        body = self.module.bodies[name]
        types = {op.name: op for op in body}
        scopes = self._scopes(body)
        root: Any = None
        for op in body:
            found = self._origin(op, origins)
            if op.opcode == "while":
                self._loop(op, scopes[op.name], times, origins)
            elif op.opcode == "conditional":
                self._conditional(op, scopes[op.name], times, origins)
            elif op.opcode in ("call", "async-start"):
                called = attribute(op, "to_apply") or attribute(op, "calls") or ""
                found = self._run(called, times, self._arguments(called, op.operands, origins))
            elif op.opcode not in FREE:
                self._kernel(op, scopes[op.name], times, types, origins)
            origins[op.name] = found
            root = found if op.is_root else root
        return root

    def _arguments(self, called: str, operands: tuple[str, ...], origins: dict) -> dict[str, Any]:
        parameters = [op for op in self.module.bodies[called] if op.opcode == "parameter"]
        by_number = {int(op.rest.partition(")")[0]): op.name for op in parameters}
        return {
            by_number[i]: origins.get(name) for i, name in enumerate(operands) if i in by_number
        }

    def _origin(self, op: Instruction, origins: dict[str, Any]) -> Any:
        """The argument of the program whose bytes a value holds, a tuple of these, or None."""
        if op.opcode == "parameter":
            return origins.get(op.name)
        of = [origins.get(name) for name in op.operands]
        match op.opcode:
            case "tuple":
                return tuple(of)
            case "get-tuple-element":
                index = int(attribute(op, "index") or 0)
                return of[0][index] if isinstance(of[0], tuple) else None
            case "while" | "bitcast" | "copy" | "opt-barrier" | "transpose" | "copy-start":
                return of[0]
            case "copy-done":
                return of[0]
            case "fusion" | "dynamic-update-slice" if of:
                same = [o for o, n in zip(of, op.operands, strict=True) if isinstance(o, str)]
                kept = [o for o in same if self.kinds.get(o) == op.type.partition("{")[0]]
                return kept[0] if len(kept) == 1 else None
        return None

    def _kernel(
        self, op: Instruction, scope: str, times: int, types: dict[str, Instruction], origins: dict
    ) -> None:
        cost = kernel(self.module, op, types)
        part = _part_of(op, cost, op.name in self.buffered, self.devices)
        self.parts[scope].add(part, times)
        if cost.moves_only:
            for name, nbytes in zip(op.operands, cost.reads, strict=True):
                origin = origins.get(name)
                if isinstance(origin, str) and nbytes >= LARGE:
                    self.moves[Move(scope, _how(op), origin, 2 * nbytes)] += times

    def _loop(self, op: Instruction, scope: str, times: int, origins: dict) -> None:
        body, condition = attribute(op, "body"), attribute(op, "condition")
        assert body and condition
        count = turns(op)
        if count is None:
            count, reason = self.loop_rule(scope, op) or (1, UNKNOWN)
            self.choices[Loop("loop", scope, op.name, count, reason)] += times
            self.parts[scope].waits += times * (count + 1)
            self._run(
                condition, times * (count + 1), self._arguments(condition, op.operands, origins)
            )
        else:
            self.known[scope] += times * count
        self._run(body, times * count, self._arguments(body, op.operands, origins))

    def _conditional(self, op: Instruction, scope: str, times: int, origins: dict) -> None:
        named = branches(op)
        self.parts[scope].waits += times
        costs = [self._branch_cost(op, i, origins) for i in range(len(named))]
        by_cost = sorted(range(len(named)), key=lambda i: -costs[i])
        which, reason = self.branch_rule(scope, op) or (0, "the most bytes")
        branch = by_cost[which]
        self.choices[Loop("branch", scope, op.name, which, f"{reason} of {len(named)}")] += times
        arguments = self._arguments(named[branch], (op.operands[1 + branch],), origins)
        self._run(named[branch], times, arguments)

    def _branch_cost(self, op: Instruction, branch: int, origins: dict) -> int:
        trial = Walk(self.module, self.loop_rule, self.branch_rule, devices=self.devices)
        name = branches(op)[branch]
        trial._run(name, 1, trial._arguments(name, (op.operands[1 + branch],), origins))
        return sum(part.moved for part in trial.parts.values())

    def scope_of_instruction(self) -> dict[str, str]:
        """The named scope of every instruction that launches work, in any computation that runs."""
        fused = {attribute(op, "calls") for b in self.module.bodies.values() for op in b}
        found = {}
        for name, body in self.module.bodies.items():
            if name not in fused:
                scopes = self._scopes(body)
                launching = (op for op in body if op.opcode not in FREE | CONTROL)
                found |= {op.name: scopes[op.name] for op in launching}
        return found

    def _scopes(self, body: list[Instruction]) -> dict[str, str]:
        """The named scope of each instruction; one without any has that of its fused instructions,
        else that of the first instruction that uses it.
        """
        scopes = {op.name: self._own_scope(op) for op in body}
        for op in reversed(body):  # users stand behind
            for name in op.operands:
                if not scopes.get(name) and op.opcode not in ("tuple", "while", "conditional"):
                    scopes[name] = scopes[op.name]
        return {name: scope or "(no scope)" for name, scope in scopes.items()}

    def _own_scope(self, op: Instruction) -> str:
        if scope := named_scope(op_name(op.attributes)):
            return scope
        if op.opcode == "fusion":
            fused = self.module.bodies[attribute(op, "calls") or ""]
            named = [scope for inner in fused if (scope := named_scope(op_name(inner.rest)))]
            return max(named, key=len) if named else ""
        return ""


def _part_of(op: Instruction, cost: Kernel, is_buffered: bool, devices: int) -> Part:
    collective = read_collective(op, devices)
    return Part(
        cost.read,
        cost.written,
        cost.launches,
        cost.launches * is_buffered,
        products=defaultdict(int, cost.products),
        lanes=cost.lanes,
        collectives=int(collective is not None),
        sent=collective.sent if collective else 0,
    )


def _argument(parameter: Instruction) -> str:
    """An argument's name as the program was called with it, such as stacks.1.layers.0.mlp.w_up."""
    name = op_name(parameter.attributes).replace("\\'", "'")
    for mark in ("arguments[0][", "arguments[1].", "'", "(", ")", "]"):
        name = name.replace(mark, "")
    return name.replace(", ", ".").replace("[", ".") or parameter.name


def _how(op: Instruction) -> str:
    return op.opcode if op.opcode != "fusion" else op.name.rpartition(".")[0] or op.name
