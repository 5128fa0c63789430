"""What one kernel of an optimized program touches and computes.

Bytes are those that a kernel must load or store: of a slice, a gather or an update in place the
part that is used, not the array behind it. Inside a fusion every instruction is asked how many of
its elements the result needs, from the roots back to the parameters.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable

from .hlo import ArrayType, Instruction, Module, attribute

# Opcodes that launch nothing: names, tuples, and the ends of what was started before.
FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("opt-barrier", "add-dependency", "all-reduce-done", "all-gather-done", "copy-done"),
        *("collective-permute-done", "ragged-all-to-all-done", "async-done", "async-update"),
        *("partition-id", "replica-id", "domain", "reduce-scatter-done", "all-to-all-done"),
    }
)
# Opcodes that move elements and compute none.
MOVES = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "transpose"),
        *("reshape", "slice", "dynamic-slice", "gather", "concatenate", "pad", "broadcast"),
        *("dynamic-update-slice", "bitcast-convert", "convert", "copy-start", "reverse", "iota"),
    }
)
# Opcodes of index arithmetic and moves that cost no floating-point lane.
_NO_LANES = MOVES | {"dot", "custom-call", "fusion", "call", "scatter", "compare", "select"}
_TILED = 2048  # elements of a sort that one kernel orders by itself
_CACHE = 25_000_000  # bytes: a gather from a smaller array reads it from memory once


@dataclasses.dataclass
class Kernel:
    """The cost of one instruction that launches work."""

    reads: list[int]  # bytes, by operand
    written: int = 0
    launches: int = 1
    products: dict[str, int] = dataclasses.field(default_factory=dict)  # FLOP, by type
    lanes: int = 0  # elementwise operations, each computed once
    moves_only: bool = False

    @property
    def read(self) -> int:
        """Bytes read, of all operands."""
        return sum(self.reads)


def kernel(module: Module, instruction: Instruction, types: dict[str, Instruction]) -> Kernel:
    """The cost of an instruction in a computation whose instructions are `types` by name."""
    operands = [types[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        called = attribute(instruction, "calls")
        assert called is not None
        return _fusion(module, called)
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, operands)
    # Any other instruction is a fusion of itself alone.
    needs: dict[str, float] = defaultdict(float)
    in_place = instruction.opcode in ("dynamic-update-slice", "scatter")
    for name, count in _needs_of(instruction, instruction.size, types, in_place):
        needs[name] += count
    reads = [_bytes(needs.pop(op.name, 0), op.arrays) for op in operands]
    return _sorted_passes(
        instruction,
        Kernel(
            reads,
            _written(instruction, types),
            products=_products(instruction, types),
            moves_only=instruction.opcode in MOVES,
        ),
    )


def _fusion(module: Module, called: str) -> Kernel:
    """The cost of a fused computation, run once. Counted afresh for each caller: cheap enough."""
    body = module.bodies[called]
    types = {instruction.name: instruction for instruction in body}
    needs, products, lanes, moves_only = _needs(module, called)
    parameters = sorted((op for op in body if op.opcode == "parameter"), key=_parameter_number)
    reads = [_bytes(needs.get(op.name, 0), op.arrays) for op in parameters]
    written = sum(_written(root, types) for root in roots(body))
    cost = Kernel(reads, written, 1, dict(products), int(lanes), moves_only)
    for instruction in body:
        cost = _sorted_passes(instruction, cost)
    return cost


def roots(body: list[Instruction]) -> list[Instruction]:
    """What a fused computation writes: its root, or the elements of a root tuple."""
    types = {instruction.name: instruction for instruction in body}
    root = next(instruction for instruction in body if instruction.is_root)
    return [types[name] for name in root.operands] if root.opcode == "tuple" else [root]


def updated_parameter(root: Instruction, types: dict[str, Instruction]) -> Instruction | None:
    """The parameter that a root updates in place, None where it writes all of its result."""
    while root.opcode in ("bitcast", "reshape") and root.operands:
        root = types[root.operands[0]]
    if root.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    if root.opcode == "scatter" and len(root.operands) != 3:
        return None
    target = types[root.operands[0]]
    while target.opcode in ("bitcast", "reshape", "dynamic-update-slice", "scatter"):
        target = types[target.operands[0]]
    return target if target.opcode == "parameter" else None


def _written(root: Instruction, types: dict[str, Instruction]) -> int:
    """Bytes that a root stores: of an update in place, the update."""
    if root.opcode == "parameter":
        return 0
    if updated_parameter(root, types) is None:
        return root.nbytes
    written = 0
    while root.opcode != "parameter":
        if root.opcode in ("dynamic-update-slice", "scatter"):
            update = types[root.operands[1 if root.opcode == "dynamic-update-slice" else 2]]
            written += update.size * _width(root)
        root = types[root.operands[0]]
    return written


def _width(instruction: Instruction) -> int:
    return max(1, instruction.nbytes // max(1, instruction.size))


def _needs(module: Module, called: str) -> tuple[dict[str, float], dict[str, int], float, bool]:
    """Of a fused computation: the elements that its roots need of every instruction, products by
    type, elementwise operations, and whether it moves elements only.
    """
    body = module.bodies[called]
    types = {instruction.name: instruction for instruction in body}
    needs: dict[str, float] = defaultdict(float)
    in_place = set()
    for root in roots(body):
        needs[root.name] = max(needs[root.name], root.size)
        if updated_parameter(root, types) is not None:
            in_place |= set(_update_chain(root, types))
    products: dict[str, int] = defaultdict(int)
    lanes, moves_only = 0.0, True
    gathered: set[str] = set()  # what rows are gathered from may be needed several times
    for instruction in reversed(body):
        count = needs.get(instruction.name, 0.0)
        if not count or instruction.opcode == "tuple":
            continue
        if instruction.name not in gathered or instruction.nbytes <= _CACHE:
            count = needs[instruction.name] = min(count, instruction.size)
        if instruction.opcode == "gather" or instruction.name in gathered:
            gathered.update(instruction.operands[:1])
        if instruction.opcode == "parameter":
            continue
        if instruction.opcode in ("fusion", "call"):
            nested = _called_computation(instruction)
            inner, inner_products, inner_lanes, inner_moves = _needs(module, nested)
            share = count / max(1, instruction.size)
            numbered = sorted(
                (op for op in module.bodies[nested] if op.opcode == "parameter"),
                key=_parameter_number,
            )
            for name, parameter in zip(instruction.operands, numbered, strict=True):
                needs[name] += inner.get(parameter.name, 0) * share
            for dtype, flop in inner_products.items():
                products[dtype] += int(flop * share)
            lanes, moves_only = lanes + inner_lanes * share, moves_only and inner_moves
            continue
        for name, wanted in _needs_of(instruction, count, types, instruction.name in in_place):
            needs[name] += wanted
        for dtype, flop in _products(instruction, types).items():
            products[dtype] += flop
        if instruction.opcode not in _NO_LANES:
            lanes += _lanes(instruction, count, types)
        moves_only = moves_only and instruction.opcode in MOVES
    return needs, products, lanes, moves_only


def _called_computation(instruction: Instruction) -> str:
    called = attribute(instruction, "calls") or attribute(instruction, "to_apply")
    assert called is not None
    return called


def _update_chain(root: Instruction, types: dict[str, Instruction]) -> Iterable[str]:
    while root.opcode != "parameter":
        yield root.name
        root = types[root.operands[0]]


def _lanes(instruction: Instruction, count: float, types: dict[str, Instruction]) -> float:
    """Floating-point and integer operations of an elementwise instruction or a reduction."""
    if instruction.opcode in ("reduce", "reduce-window"):
        operand = types[instruction.operands[0]]
        return operand.size * count / max(1, instruction.size)
    return count


def _needs_of(
    instruction: Instruction, count: float, types: dict[str, Instruction], in_place: bool
) -> Iterable[tuple[str, float]]:
    """Each operand and the elements of it that `count` elements of the result need."""
    opcode, names = instruction.opcode, instruction.operands
    share = count / max(1, instruction.size)
    sizes = [types[name].size for name in names]
    match opcode:
        case "slice" | "dynamic-slice":
            yield names[0], count
            yield from ((name, 1) for name in names[1:])
        case "gather":
            yield names[0], count
            yield names[1], sizes[1] * share
        case "dynamic-update-slice":
            yield names[0], 0 if in_place else max(0, count - sizes[1])
            yield names[1], sizes[1]
            yield from ((name, 1) for name in names[2:])
        case "scatter":
            targets = len(names) // 2
            for at, name in enumerate(names):
                updates = sizes[targets + 1 + at] if at < targets else 0
                wanted = updates if in_place else count / targets
                yield name, wanted if at < targets else sizes[at]
        case "pad" | "broadcast":
            yield names[0], min(sizes[0], count)
            yield from ((name, 1) for name in names[1:])
        case "concatenate" | "reduce" | "reduce-window" | "sort" | "dot" | "convolution":
            whole = 1.0 if opcode in ("sort", "dot", "convolution") else share
            yield from ((name, size * whole) for name, size in zip(names, sizes, strict=True))
        case _:  # elementwise, or the same elements in another order or type
            for name, size in sorted({*zip(names, sizes, strict=True)}):
                yield name, min(size, size * share)


def _products(instruction: Instruction, types: dict[str, Instruction]) -> dict[str, int]:
    """FLOP of a matrix product by the type of its operands."""
    if instruction.opcode != "dot":
        return {}
    left = types[instruction.operands[0]].arrays[0]
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    dims = [int(dim) for dim in summed[1].split(",") if dim] if summed else []
    return {left.dtype: 2 * instruction.size * math.prod(left.dims[dim] for dim in dims)}


def _custom_call(instruction: Instruction, operands: list[Instruction]) -> Kernel:
    """A library's kernel reads its operands and writes its result, without its workspace."""
    reads = [operand.nbytes for operand in operands]
    arrays = instruction.arrays
    products: dict[str, int] = {}
    if "cublas" in instruction.attributes or "gemm" in instruction.attributes:
        summed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        left = operands[0].arrays[0]
        dims = [int(dim) for dim in re.findall(r"\d+", summed[1])] if summed else []
        products = {left.dtype: 2 * arrays[0].size * math.prod(left.dims[dim] for dim in dims)}
        arrays = arrays[:1]
    written = sum(array.nbytes for array in arrays)
    return Kernel(reads, written, products=products)


def _sorted_passes(instruction: Instruction, cost: Kernel) -> Kernel:
    """A sort by comparisons runs its network in passes over the array, each a kernel."""
    if instruction.opcode != "sort":
        return cost
    found = re.search(r"dimensions=\{(\d+)\}", instruction.attributes)
    length = instruction.arrays[0].dims[int(found[1]) if found else -1]
    passes = sort_passes(length)
    again = (passes - 1) * instruction.nbytes
    reads = [size * (1 + again / max(1, sum(cost.reads))) for size in cost.reads]
    return dataclasses.replace(
        cost,
        reads=[int(size) for size in reads],
        written=cost.written + again,
        launches=cost.launches + passes - 1,
    )


def sort_passes(length: int, tiled: int = _TILED) -> int:
    """Kernels of XLA's bitonic sort: steps over distances within a tile share one, each longer step
    is one of its own.
    """
    stages = max(1, math.ceil(math.log2(max(2, length))))
    passes, is_tiled = 0, False
    for stage in range(stages):
        for distance in range(stage, -1, -1):
            is_short = 2 << distance <= tiled
            passes += not (is_short and is_tiled)
            is_tiled = is_short
    return passes


def _bytes(count: float, arrays: tuple[ArrayType, ...]) -> int:
    nbytes, size = sum(a.nbytes for a in arrays), sum(a.size for a in arrays)
    return math.ceil(count * nbytes / size) if size else 0


def _parameter_number(parameter: Instruction) -> int:
    return int(re.match(r"\d+", parameter.rest)[0])  # type: ignore[index]
