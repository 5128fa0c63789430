"""Parts of a step as programs of their own, for `kimi-jax bench`: a step compiled from shapes, the
selection of keys alone, a sum over ranks alone; what a step must compute and read at least, and the
time that its named parts take.
"""

import dataclasses
import math
import operator
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ..model.declared import Declared, declare
from ..model.decoder import Stack
from ..model.layers import Term
from ..model.mla import MLA
from ..model.state import State
from ..parallel.collectives import all_reduce
from ..parallel.on_mesh import BY_MODEL_RANK, model_ranks, on_model_ranks
from ..parallel.reductions import Reduction
from .by_group import ByGroup, Part
from .model_on_mesh import BY_ROW, REPLICATED, STATE, WEIGHTS
from .program import Program
from .rows import Rows
from .runner import Runner


def compile_step(
    program: Program, B: int, T: int, slots: int, compiler_options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, float]]:
    """A step of at least B rows, T tokens each, compiled from shapes, and the seconds of tracing,
    lowering and compiling. No weight exists. Raises ValueError for a program that walks by group:
    `compile_parts` compiles what that calls.
    """
    _check_is_one(program)
    B = program.padded_rows(B)
    by_row = NamedSharding(program.mesh, BY_ROW)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=by_row)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=by_row)
    step = program.step_of("decode" if T == 1 else "prefill")
    arguments = (program.weight_shapes, program.state_shapes(B, slots), ids, lengths)
    return _compile(step, arguments, compiler_options)


def compile_decode_steps(
    program: Program, B: int, slots: int, compiler_options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, float]]:
    """`compile_step` for the multi-step decode of at least B rows, 8 steps a call, greedy."""
    _check_is_one(program)
    B = program.padded_rows(B)
    rows = _greedy_rows(program, B)
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(program.mesh, REPLICATED))
    steps = jax.jit(program.decode_steps, donate_argnums=1)
    arguments = (program.weight_shapes, program.state_shapes(B, slots), rows, n)
    return _compile(steps, arguments, compiler_options)


def _check_is_one(program: Program) -> None:
    if program.walk == "by_group":
        raise ValueError("a step that walks by group is several programs: use compile_parts")


def _greedy_rows(program: Program, B: int) -> Rows:
    """Rows that decode greedily, 8 steps a call, as shapes with their shardings."""
    by_row = NamedSharding(program.mesh, BY_ROW)
    numbers = ("remaining", "seeds", "counts", "top_k", "min_new_tokens")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    factors = ("temperature", "top_p", "min_p", *penalties)
    types = dict.fromkeys(numbers, jnp.int32) | dict.fromkeys(factors, jnp.float32)
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((B,), dtype, sharding=by_row)
        for name, dtype in {**types, "active": jnp.bool_}.items()
    }
    arrays["stop_ids"] = jax.ShapeDtypeStruct((B, 1), jnp.int32, sharding=by_row)
    greedy = {"top_logprobs": 0, "draws": False, "masks_stops": False, "steps_per_call": 8}
    return Rows(bias=None, seen=None, reply_counts=None, **arrays, **greedy)


def _compile(
    jitted: Any, arguments: tuple, compiler_options: dict[str, Any] | None
) -> tuple[Any, dict[str, float]]:
    begin = time.perf_counter()
    traced = jitted.trace(*arguments)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options)
    seconds = {
        "trace": traced_at - begin,
        "lower": lowered_at - traced_at,
        "compile": time.perf_counter() - lowered_at,
    }
    return compiled, seconds


class CompiledPart(NamedTuple):
    """A program of a step, and how often one step calls it."""

    name: str
    calls: int
    compiled: Any


def compile_parts(
    program: Program,
    B: int,
    T: int,
    slots: int,
    options_of: Callable[[str], dict[str, Any] | None] = lambda name: None,
    *,
    samples: bool = False,
    alike: bool = False,
    by_group: ByGroup | None = None,
) -> tuple[list[CompiledPart], dict[str, float]]:
    """`compile_step` for a program that walks by group: every program of a step, and the seconds of
    tracing and lowering and of compiling all of them. `options_of` gives the compiler's options for
    a part by its name. With `samples`, a step of the multi-step decode, of 8 steps a call, greedy.
    With `alike`, programs that take equal arguments, and so differ in where residual blocks start
    alone, are compiled once: the first stands for all of them. `by_group`: the parts of a step of
    another kind.
    """
    B = program.padded_rows(B)
    by_row = NamedSharding(program.mesh, BY_ROW)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=by_row)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=by_row)
    by_group = by_group or program.by_group("decode" if T == 1 else "prefill")
    begin = time.perf_counter()
    arguments = (program.weight_shapes, program.state_shapes(B, slots), ids, lengths)
    parts = list(by_group.parts(*arguments, _greedy_rows(program, B) if samples else None))
    parts = _first_of_alike(parts) if alike else parts
    lowered_at = time.perf_counter()
    compiled = [
        CompiledPart(part.name, part.calls, part.lowered.compile(options_of(part.name)))
        for part in parts
    ]
    seconds = {"lower": lowered_at - begin, "compile": time.perf_counter() - lowered_at}
    return compiled, seconds


def _first_of_alike(parts: Sequence[Part]) -> list[Part]:
    """One part for all that take arguments of equal shapes by equal names, called as often."""
    first: dict[Any, Part] = {}
    for part in parts:
        leaves, tree = jax.tree.flatten(part.lowered.args_info)
        key = tree, tuple((leaf.shape, leaf.dtype, leaf.donated) for leaf in leaves)
        same = first.get(key)
        first[key] = same._replace(calls=same.calls + part.calls) if same else part
    return list(first.values())


def key_selection(model: Runner, B: int, T: int) -> Callable[[State], list]:
    """A program that selects keys as a step of B rows and T random tokens a row does, in all layers
    that select.
    """
    program = model.program

    def select(weights: dict, state: State, x: Array, latent: Array) -> list:
        lengths = jnp.full_like(state.length, T)
        step = program.step_info(state.length, lengths, T, kind="decode" if T == 1 else "prefill")
        return [
            layer.select(x, latent, layer_state, dataclasses.replace(step, group=group))
            for stack, states in zip(program.merge(weights).stacks, state.layers, strict=True)
            for layer, layer_state, group in _mla_layers(stack, states)
        ]

    @jax.jit
    def select_on_mesh(weights: dict, state: State, x: Array, latent: Array) -> list:
        inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW)
        return program.shard(select, inputs, BY_ROW)(weights, state, x, latent)

    rng = np.random.default_rng(0)
    x, latent = (
        model.place_rows(rng.standard_normal((B, T, width), np.float32).astype(model.dtype))
        for width in (model.config.hidden, model.config.q_rank)
    )
    return lambda state: select_on_mesh(model.params, state.bare(), x, latent)


def _mla_layers(stack: Stack, states: Sequence[Any]) -> Iterator[tuple[MLA, Any, int]]:
    """Every MLA layer of a stack, the stacked state that holds its own, and its group there."""
    for layer, state in zip(stack.layers, states, strict=True):
        if isinstance(layer.attention, MLA):
            graph, weights = nnx.split(layer.attention)
            for group in range(stack.span.groups):
                of_group = jax.tree.map(operator.itemgetter(group), weights)
                yield nnx.merge(graph, of_group), state, group


def partial_sums(mesh: Mesh, rows: int, width: int, dtype: str) -> Array:
    """Random partial sums [rows, width] of every model rank, one below the other."""
    partials = jax.random.normal(jax.random.key(0), (model_ranks(mesh) * rows, width), dtype)
    return jax.device_put(partials, NamedSharding(mesh, BY_MODEL_RANK))


def sum_over_ranks(how: Reduction, mesh: Mesh) -> Callable[[Array], Array]:
    """A program from the partial sums of all model ranks to their sum, on every one of them."""
    return on_model_ranks(mesh, lambda partial: all_reduce(partial, how))


class Work(NamedTuple):
    """What the weights of a step cost at least."""

    operations: float  # multiplications and additions
    bytes: float  # of weights that are read

    def floor_s(self, operations_per_s: float, bytes_per_s: float) -> float:
        """The seconds that it takes at least at these rates."""
        return max(self.operations / operations_per_s, self.bytes / bytes_per_s)


def step_work(program: Program, B: int, T: int) -> Work:
    """The work of a step of B rows, T tokens each: the products of every weight with the rows that
    meet it, each weight read once. Attention to cached keys and the recurrence are not in it.
    """
    config, rows = program.config, B * T
    operations = read = 0.0
    for w in declare(program.declared):
        meets, share = rows, 1.0  # rows a number of the weight is multiplied with; share that is
        if w.term is Term.EXPERTS:
            active = min(config.experts, rows * config.active_experts)
            meets, share = rows * config.active_experts / active, active / config.experts
        elif w.names == ("embed",) and not config.tie_embeddings:
            meets, share = 0, rows / config.vocab
        elif w.term is Term.EMBEDDING:
            meets = B
        count = math.prod(w.shape)
        operations += 2 * meets * share * _products(program, w)
        read += share * count * w.dtype.itemsize
    return Work(operations, read)


def _products(program: Program, w: Declared) -> int:
    """The numbers of a matrix; none of a vector, or of the scales of a quantized matrix."""
    count = math.prod(w.shape)
    if w.term is Term.EXPERTS and w.dtype == jnp.uint8:
        return 2 * count if w.path[-1].startswith("w_") else 0
    return count if len(w.shape) > 2 or (w.dims[0] != "G" and len(w.shape) == 2) else 0


def plain_product(rows: int, width: int, dtype: str) -> tuple[Callable[[], Array], int]:
    """A program that multiplies [rows, width] by [width, width], and its operations."""
    x, w = jnp.ones((rows, width), dtype), jnp.ones((width, width), dtype)
    multiply = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    return lambda: multiply(x, w), 2 * rows * width * width


def plain_copy(size: int) -> tuple[Callable[[], Array], int]:
    """A program that passes over an array of `size` bytes in place, and the bytes that it reads and
    writes. A copy to new memory would time the system that hands it out.
    """
    latest = [jnp.ones(size // 4, jnp.float32)]
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> Array:
        latest[0] = add_one(latest[0])
        return latest[0]

    return run, 2 * size


# What a part of a step is called in a profile, the inner of two names that are nested.
PARTS = ("embedding", "mix", "attention", "kda", "mla", "indexer", "mlp", "router", "experts")
PARTS += ("shared", "dense", "output", "head")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\s([a-z][\w-]*)\((.*)")
_NAMED = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_HOLDS_OTHERS = ("while", "conditional", "call")


def parts_of(hlo: str) -> Mapping[str, str]:
    """Instruction -> part of the step that it belongs to, of all instructions of a compiled program
    that compute: loops and calls, which hold others, are left out. One without a name of its own
    is counted to what it calls, or to the part that uses its result.
    """
    lines = [(line, _INSTRUCTION.match(line)) for line in hlo.splitlines()]

    # The part of a computation is that of its first instruction with a name.
    part_of_computation: dict[str, str] = {}
    computation = ""
    for line, found in lines:
        if not found and line.rstrip().endswith("{"):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        elif part := _named_part(line):
            part_of_computation.setdefault(computation, part)

    # Users follow what they use: backwards, their parts are known.
    parts: dict[str, str] = {}
    part_of_user: dict[str, str] = {}
    for line, found in reversed(lines):
        if not found:
            continue
        name, opcode, rest = found.groups()
        called = _CALLED.search(line)
        part = _named_part(line) or part_of_computation.get(called[1] if called else "", "")
        part = part or part_of_user.get(name, "")
        for operand in re.findall(r"%([\w.-]+)", rest.split(", metadata=")[0]):
            part_of_user[operand] = part or part_of_user.get(operand, "")
        if opcode not in _HOLDS_OTHERS:
            parts[name] = part
    return parts


def _named_part(line: str) -> str:
    """The innermost part in an instruction's name, "" for none."""
    found = _NAMED.search(line)
    segments = found[1].split("/") if found else []
    return next((segment for segment in reversed(segments) if segment in PARTS), "")


def part_times(run: Callable[[], Any], parts: Mapping[str, str]) -> Mapping[str, float]:
    """Part -> milliseconds of its operations in one call of `run`, under the profiler; an operation
    that several threads share counts once. Operations without a name are "".
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    times: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (recorded,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(recorded)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name in parts:
                        times[parts[event.name]] += event.duration_ns / 1e6
    return times
