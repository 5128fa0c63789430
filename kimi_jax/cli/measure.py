"""What `kimi-jax bench` measures: prefill and decode, steps at the end of long contexts, ways of
running experts and of reducing sums over ranks; and the profile that it records.

Figures are medians of a single run on one machine; only their ratios carry over to others.
"""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ..api import Model
from ..config.config import Config
from ..generation.engine import capacity
from ..model.declared import build, declare
from ..model.mxfp4 import MXFP4, expert_quantization
from ..model.state import STATE_DIMS, State, home_of
from ..parallel.on_mesh import model_ranks
from ..parallel.placement import Placement
from ..parallel.processes import to_device
from ..parallel.reductions import Reduction, traffic
from ..runtime.probes import (
    compile_step,
    key_selection,
    part_times,
    partial_sums,
    parts_of,
    plain_copy,
    plain_product,
    step_work,
    sum_over_ranks,
)
from ..runtime.program import Program, default_dtype, make_program

Row = tuple[str | int | float, ...]
SPEED_COLUMNS = ("step", "batch", "tokens", "compile_s", "step_ms", "tokens_per_s")
CONTEXT_COLUMNS = (
    *("step", "context", "batch", "tokens"),
    *("ms_per_token", "selection_ms", "rest_ms", "rest_by_first"),
)
PROFILE_COLUMNS = ("prompts", "prompt_tokens", "new_tokens", "ms")
COMPILE_COLUMNS = ("trace_s", "lower_s", "compile_s", "argument_bytes", "temporary_bytes")
EXPERTS_COLUMNS = ("rows", "exchange_ms", "local_ms", "exchange_by_local")
ROWS_COLUMNS = ("rows", "sliced_ms", "full_ms", "sliced_by_full")
FLOOR_COLUMNS = (
    *("dtype", "step", "context", "batch", "tokens", "ms", "cpu_ms", "tokens_per_s"),
    *("floor_tokens_per_s", "of_floor", "floor_gflop_per_s", "floor_gb_per_s"),
    *("experts_ms", "kda_ms", "mla_ms", "mlp_ms", "mix_ms", "rest_ms"),
)
FLOOR_PROMPTS = (512, 2048)  # tokens of a prompt
FLOOR_CONTEXTS = (0, 1024, 4096)  # tokens cached before a decode step
FLOOR_BATCH = 8  # rows of the last decode step
PROMPT_REPEATS = 3  # timed runs of a prompt
FLOOR_PRODUCT = 2048  # rows and widths of the plain product
FLOOR_COPY = 2**28  # bytes of the plain copy
# The columns of the parts that a step's operations are named for; other parts are "rest".
_COLUMN_OF_PART = {"experts": "experts", "kda": "kda", "mla": "mla", "indexer": "mla"}
_COLUMN_OF_PART |= {"mlp": "mlp", "router": "mlp", "shared": "mlp", "dense": "mlp", "mix": "mix"}
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REDUCE_COLUMNS = ("rows", "reduce", "pieces", "ms", "by_sum", "sent_bytes")
REDUCE_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
REDUCE_PIECES = (1, 2, 4)
REPEATS = 9  # timed runs of each step
MARGIN = 1.02  # one placement counts as faster than another from 2 % on


def mini(sparse: bool) -> Config:
    """A config for measuring: nine layers that a laptop holds, with every part of K3."""
    index = {"index_heads": 4, "index_dim": 32, "index_topk": 256} if sparse else {}
    return dataclasses.replace(
        Config.k3_1() if sparse else Config.k3(),
        **{"hidden": 1024, "layers": 9, "vocab": 8192, "mla_layers": (3, 7, 8)},
        **{"residual_block": 4, "max_positions": 65536, "dense_ffn": 2048},
        **{"kda_heads": 16, "kda_key_dim": 64, "kda_value_dim": 64},
        **{"heads": 16, "q_rank": 256, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32},
        **{"value_dim": 64, "experts": 64, "active_experts": 8, "latent": 512, "expert_ffn": 256},
        **{"bos": None, "eos": (), "pad": None},
        **index,
    )


def random_model(config: Config, mesh: Mesh, place: Placement, dtype: str | None) -> Model:
    """A model of any shape with random weights."""
    program = make_program(
        config, mesh, place, dtype, quantization=expert_quantization(config.quantized)
    )
    return Model(program, build(program.declared, place, mesh, _random_read(program)))


def _random_read(program: Program) -> Callable:
    """Random weights, made slice by slice, that preserve the scale of activations."""
    shapes = {
        name: w.shape[w.dims[0] == "G" :] for w in declare(program.declared) for name in w.names
    }
    rng = np.random.default_rng(0)

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        role = name.rsplit(".", 1)[-1]
        shape = [len(range(size)[part]) for size, part in zip(shapes[name], index, strict=True)]
        if ".experts." in name and program.quantization is MXFP4:
            low, high = (118, 123) if role.startswith("s_") else (0, 256)
            return rng.integers(low, high, shape, np.uint8)
        if role.endswith("norm"):
            return np.ones(shape, np.float32)
        if role == "a_log":
            return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(shapes[name][-1] ** -0.5)

    return read


def speed(model: Model, T: int, batches: Sequence[int], steps: int) -> Iterator[Row]:
    """A row for prefill of the first batch size, and a row for decode of each batch size."""
    slots = capacity(T + steps + 1, model.config.max_positions)
    rng = np.random.default_rng(0)
    for at, B in enumerate(batches):
        prompts = rng.integers(0, model.config.vocab, (B, T))
        states = [model.new_state(B, slots) for _ in range(4 if at == 0 else 1)]
        runs = [_timed(model.prefill, state, prompts) for state in states]
        if at == 0:
            first, *later = [seconds for seconds, _ in runs]
            yield _speed_row("prefill", B, T, first, later)
        _, state = runs[-1][1]
        times = []
        for token in rng.integers(0, model.config.vocab, (steps + 1, B)):
            seconds, (_, state) = _timed(model.decode, state, token)
            times.append(seconds)
        yield _speed_row("decode", B, 1, times[0], times[1:])


def _timed(function: Callable, *inputs: Any) -> tuple[float, Any]:
    """Seconds until a function's arrays exist, and what it returns."""
    begin = time.perf_counter()
    results = jax.block_until_ready(function(*inputs))
    return time.perf_counter() - begin, results


def _speed_row(step: str, B: int, T: int, first: float, later: Sequence[float]) -> Row:
    median = statistics.median(later)
    return step, B, T, max(0.0, first - median), median * 1000, B * T / median


def contexts(model: Model, B: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Milliseconds a token of the last prefill chunk, then of the last decode step, of contexts of
    these sizes: in all, of selecting keys, which is timed alone, and of the rest; and that rest
    relative to the first context's. Runs take turns over the contexts; caches hold noise.
    """
    states = [_noisy(model.new_state(B, capacity(S, model.config.max_positions))) for S in sizes]
    for name, longest in (("prefill", model.chunk), ("decode", 1)):
        widths = [min(longest, S) for S in sizes]
        first_rest = None
        for S, T, runs in zip(
            sizes, widths, _by_context(model, states, sizes, widths, B), strict=True
        ):
            step_ms, selection_ms = (
                1000 * statistics.median(seconds) / (B * T) for seconds in zip(*runs, strict=True)
            )
            rest_ms = step_ms - selection_ms
            first_rest = first_rest or rest_ms
            yield name, S, B, T, step_ms, selection_ms, rest_ms, rest_ms / first_rest


def _by_context(
    model: Model, states: list[State], sizes: Sequence[int], widths: Sequence[int], B: int
) -> list[list[tuple[float, float]]]:
    """For each context the seconds of a step of that many tokens at its end, and of the selection
    in it, of each run.
    """
    config = model.config
    selects = [config.sparse and config.index_topk < S for S in sizes]
    rows = len(states[0].length)  # padded over the data ranks
    select = {T: key_selection(model, rows, T) for T in widths if any(selects)}
    runs: list[list[tuple[float, float]]] = [[] for _ in sizes]
    for _ in range(REPEATS + 1):
        for at, (S, T) in enumerate(zip(sizes, widths, strict=True)):
            length = to_device(np.full(rows, S - T, np.int32), states[at].length.sharding)
            state = dataclasses.replace(states[at], length=length)
            selection = _timed(select[T], state)[0] if selects[at] else 0.0
            seconds, (_, states[at]) = _timed(model.prefill, state, np.zeros((B, T), np.int32))
            runs[at].append((seconds, selection))
    return [times[1:] for times in runs]


def against_floor(model: Model, steps: int) -> Iterator[Row]:
    """Prompts, decode steps behind contexts and one of several rows, beside the most tokens a
    second that a large plain product, or a plain copy of the weights, allows in the same run; and
    the milliseconds of a chunk or step by part.
    """
    product, operations = plain_product(FLOOR_PRODUCT, FLOOR_PRODUCT, model.dtype)
    copy, size = plain_copy(FLOOR_COPY)
    operations_per_s, bytes_per_s = (
        done / min(_timed(run)[0] for _ in range(REPEATS))
        for run, done in ((product, operations), (copy, size))
    )
    longest = max(*FLOOR_PROMPTS, *FLOOR_CONTEXTS) + 4 * steps
    slots = capacity(longest, model.config.max_positions)
    with _names_in_cache_keys():
        yield from _steps_against(model, slots, steps, operations_per_s, bytes_per_s)


def _steps_against(
    model: Model, slots: int, steps: int, operations_per_s: float, bytes_per_s: float
) -> Iterator[Row]:
    """The rows of `against_floor` at these rates."""
    cases = [("prompt", 0, 1, T) for T in FLOOR_PROMPTS]
    cases += [("decode", S, 1, 1) for S in FLOOR_CONTEXTS] + [("decode", 0, FLOOR_BATCH, 1)]
    for name, S, B, T in cases:
        state = _noisy(model.new_state(B, slots))
        seconds, cpu_s, parts = _measured_step(model, state, S, B, T, steps)
        chunks = [min(model.chunk, T - first) for first in range(0, T, model.chunk)]
        floor = sum(
            step_work(model.program, B, width).floor_s(operations_per_s, bytes_per_s)
            for width in chunks
        )
        took = (1000 * seconds, 1000 * cpu_s, B * T / seconds)
        of_step = (name, S, B, T, *took, B * T / floor, floor / seconds)
        yield (
            model.dtype,
            *of_step,
            operations_per_s / 1e9,
            bytes_per_s / 1e9,
            *parts,
        )


def _measured_step(
    model: Model, state: State, S: int, B: int, T: int, steps: int
) -> tuple[float, float, list[float]]:
    """The median seconds of T tokens a row behind S others, over few runs of a prompt and `steps`
    of decode; those that the process' threads computed, which neighbours on the machine disturb
    less; and the milliseconds of a chunk or step by the columns of parts.
    """
    rng = np.random.default_rng(0)
    advance = model.prefill if T > 1 else lambda state, ids: model.decode(state, ids[:, 0])

    def step(tokens: int) -> tuple[float, float, State]:
        length = to_device(np.full(len(state.length), S, np.int32), state.length.sharding)
        behind = dataclasses.replace(state, length=length)
        ids = rng.integers(0, model.config.vocab, (B, tokens))
        cpu_begin = time.process_time()
        seconds, (_, following) = _timed(advance, behind, ids)
        return seconds, time.process_time() - cpu_begin, following

    times, cpu_times = [], []
    for _ in range(1 + (PROMPT_REPEATS if T > 1 else steps)):
        seconds, cpu_s, state = step(T)
        times.append(seconds)
        cpu_times.append(cpu_s)
    width = min(T, model.chunk)
    compiled, _ = compile_step(model.program, B, width, state.max_length)
    names = ("experts", "kda", "mla", "mlp", "mix", "rest")
    columns: dict[str, float] = {name: 0.0 for name in names}
    for part, ms in part_times(lambda: step(width)[2].length, parts_of(compiled.as_text())).items():
        columns[_COLUMN_OF_PART.get(part, "rest")] += ms
    return statistics.median(times[1:]), statistics.median(cpu_times[1:]), list(columns.values())


def _noisy(state: State) -> State:
    """The state with noise in every cached row."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(home_of(state).dtype)

    def fill(path: tuple, x: Array) -> Array:
        if "S" not in STATE_DIMS[path[-1].name]:
            return x
        noise = rng.standard_normal(x.shape, np.float32).astype(dtype).view(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: noise[index])

    return jax.tree_util.tree_map_with_path(fill, state)


@contextlib.contextmanager
def _names_in_cache_keys() -> Iterator[None]:
    """Programs of the compilation cache count as the same only where their parts have the same
    names: else a profile may show those of another version.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[option]
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def profile(model: Model, B: int, T: int, steps: int, folder: Path) -> Row:
    """Write a profile of B prompts of T tokens and `steps` new ones into a folder, after one run
    without; its times are those under the profiler.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab, (B, T)).tolist()
    generate = lambda: model.generate(prompts, max_new_tokens=steps, stop_tokens=[])  # noqa: E731
    with _names_in_cache_keys():
        generate()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the parts of the model, not the lines of Python around them
    with jax.profiler.trace(folder, profiler_options=options):
        seconds, _ = _timed(generate)
    return B, B * T, B * steps, 1000 * seconds


def compare(config: Config, models: Sequence[Model]) -> Iterator[Row]:
    """Rows a data rank holds, milliseconds of a decode step under each of two placements, runs
    taking turns, and their ratio.
    """
    for rows in STEP_ROWS:
        B = rows * models[0].data_ranks
        token = np.arange(B) % config.vocab
        states = [model.new_state(B, 128) for model in models]
        times: list[list[float]] = [[], []]
        for _ in range(REPEATS + 1):
            for at, model in enumerate(models):
                seconds, (_, states[at]) = _timed(model.decode, states[at], token)
                times[at].append(seconds)
        first, second = (1000 * statistics.median(of_model[1:]) for of_model in times)
        yield rows, first, second, first / second


def one_layer(config: Config) -> Config:
    """A KDA layer with the model's experts, between a small embedding and head."""
    return dataclasses.replace(
        config, layers=1, mla_layers=(), dense_layers=0, vocab=1024, bos=None, eos=(), pad=None
    )


def experts(config: Config, mesh: Mesh, place: Placement, dtype: str | None) -> Iterator[Row]:
    """`compare` one layer that exchanges rows with one that runs local experts on all of them."""
    layer = one_layer(config)
    places = [dataclasses.replace(place, experts=name) for name in ("exchange", "local")]
    yield from compare(layer, [random_model(layer, mesh, each, dtype) for each in places])


def rows(config: Config, mesh: Mesh, place: Placement, dtype: str | None) -> Iterator[Row]:
    """`compare` one KDA layer whose rows are sliced over the model ranks with one that keeps them
    all on each.
    """
    layer = one_layer(config)
    places = [dataclasses.replace(place, rows=name) for name in ("sliced", "full")]
    yield from compare(layer, [random_model(layer, mesh, each, dtype) for each in places])


def crossover(measured: Sequence[Row]) -> int | None:
    """The row count from which the first of two placements is faster, twice in a row and by 2 %; 0
    where it always is, None where it never is.
    """
    wins = [(int(count), float(ratio) * MARGIN < 1) for count, *_, ratio in measured]
    for at, ((count, wins_once), (_, wins_twice)) in enumerate(itertools.pairwise(wins)):
        if wins_once and wins_twice:
            return count if at else 0
    return None


def local_below(measured: Sequence[Row]) -> int:
    """The row count from which exchanging is faster; where it never is, the largest measured
    row count plus 1.
    """
    first = crossover(measured)
    return int(measured[-1][0]) + 1 if first is None else first


def reductions(width: int, mesh: Mesh, dtype: str | None) -> Iterator[Row]:
    """Milliseconds of each algorithm that sums partial rows [rows, width] over the model ranks,
    runs taking turns, that time relative to `sum`'s, and the bytes that a rank sends.
    """
    dtype = dtype or default_dtype()
    ranks = model_ranks(mesh)
    algorithms = [Reduction(name) for name in ("sum", "two_shot", "ring_fp32")]
    algorithms += [Reduction("ring_bf16", pieces) for pieces in REDUCE_PIECES]
    programs = [sum_over_ranks(how, mesh) for how in algorithms]
    for rows in REDUCE_ROWS:
        partials = partial_sums(mesh, rows, width, dtype)
        runs = [[_timed(program, partials)[0] for program in programs] for _ in range(REPEATS + 1)]
        times = [1000 * statistics.median(seconds) for seconds in zip(*runs[1:], strict=True)]
        for how, ms in zip(algorithms, times, strict=True):
            sent = traffic(how, ranks, rows, width, dtype).sent
            yield rows, how.algorithm, how.pieces, ms, ms / times[0], sent


def ring_from(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The row count from which ring_bf16 is faster than sum, twice in a row and by 2 %, and its
    pieces: the smallest of these counts, then the fewer pieces; None where it never is.
    """
    found = []
    for pieces in REDUCE_PIECES:
        ring = [row for row in rows if row[1:3] == ("ring_bf16", pieces)]
        wins = [(int(row[0]), float(row[4]) * MARGIN < 1) for row in ring]
        for (count, wins_once), (_, wins_twice) in itertools.pairwise(wins):
            if wins_once and wins_twice:
                found.append((count, pieces))
    return min(found, default=None)
