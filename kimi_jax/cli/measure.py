"""What `kimi-jax bench` measures: steps of a model, at the end of long contexts too, ways of
running its experts and of completing sums over ranks, compilation; and the profile that it records.

Figures are medians of one run on one machine; only their ratios mean something elsewhere.
"""

import contextlib
import dataclasses
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ..api import Model
from ..config.config import Config
from ..generation.engine import capacity
from ..model.decoder import Stack, build, declare
from ..model.mla import MLA
from ..model.mxfp4 import MXFP4, expert_quantization
from ..model.state import STATE_DIMS, State, home_of
from ..parallel.collectives import all_reduce
from ..parallel.on_mesh import BY_MODEL_RANK, model_ranks, on_model_ranks
from ..parallel.placement import Placement
from ..parallel.processes import to_device
from ..parallel.reductions import Reduction, traffic
from ..runtime.model_on_mesh import BY_ROW, STATE, WEIGHTS
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
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REDUCE_COLUMNS = ("rows", "reduce", "pieces", "ms", "by_sum", "sent_bytes")
REDUCE_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
REDUCE_PIECES = (1, 2, 4)
REPEATS = 9
MARGIN = 1.02  # a way counts as faster from 2 % on


def mini(sparse: bool) -> Config:
    """The shape for measuring: nine layers that a laptop holds, every part of K3 among them."""
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
    """Random weights that keep the size of what runs through them, made when they are asked for."""
    shapes = {
        name: w.shape[w.dims[0] == "G" :] for w in declare(program.declared) for name in w.names
    }
    rng = np.random.default_rng(0)

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        role = name.rsplit(".", 1)[-1]
        shape = [len(range(size)[cut]) for size, cut in zip(shapes[name], index, strict=True)]
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
    """A row for prefill, of the first batch size, and one for decode of each batch size."""
    slots = capacity(T + steps + 1, model.config.max_positions)
    rng = np.random.default_rng(0)
    for at, B in enumerate(batches):
        prompts = rng.integers(0, model.config.vocab, (B, T))
        new = [model.new_state(B, slots) for _ in range(4 if at == 0 else 1)]
        first, *times = [_timed(model.prefill, state, prompts) for state in new]
        if times:
            yield _speed("prefill", B, T, first[0], [seconds for seconds, _ in times])
        _, state = (times or [first])[-1][1]
        seconds = []
        for token in rng.integers(0, model.config.vocab, (steps + 1, B)):
            took, (_, state) = _timed(model.decode, state, token)
            seconds.append(took)
        yield _speed("decode", B, 1, seconds[0], seconds[1:])


def _timed(step: Callable, *inputs: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    results = jax.block_until_ready(step(*inputs))
    return time.perf_counter() - begun, results


def _speed(what: str, B: int, T: int, first: float, times: Sequence[float]) -> Row:
    usual = statistics.median(times)
    return what, B, T, max(0.0, first - usual), usual * 1000, B * T / usual


def contexts(model: Model, B: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Milliseconds a token of the last prefill chunk, then of the last decode step, of contexts of
    such sizes: in all, of selecting keys, which is timed alone, and of the rest; and that rest by
    the first context's. Contexts take turns; their caches hold noise.
    """
    states = [_noisy(model.new_state(B, capacity(S, model.config.max_positions))) for S in sizes]
    for name, longest in (("prefill", model.chunk), ("decode", 1)):
        widths = [min(longest, S) for S in sizes]
        times = _by_context(model, states, sizes, widths, B)
        first = None
        for S, T, measured in zip(sizes, widths, times, strict=True):
            each = zip(*measured, strict=True)
            whole, alone = (1000 * statistics.median(of) / (B * T) for of in each)
            first = first or whole - alone
            yield name, S, B, T, whole, alone, whole - alone, (whole - alone) / first


def _by_context(
    model: Model, states: list[State], sizes: Sequence[int], widths: Sequence[int], B: int
) -> list[list[tuple[float, float]]]:
    """The seconds of a step of so many tokens at the end of each context, and of its selection, in
    turns.
    """
    config = model.config
    sparse = [config.sparse and config.index_topk < S for S in sizes]
    rows = len(states[0].length)  # completed over the data ranks
    select = {T: _selection(model, rows, T) for T in widths if any(sparse)}
    times: list[list[tuple[float, float]]] = [[] for _ in sizes]
    for _ in range(REPEATS + 1):
        for at, (S, T) in enumerate(zip(sizes, widths, strict=True)):
            seen = to_device(np.full(rows, S - T, np.int32), states[at].length.sharding)
            state = dataclasses.replace(states[at], length=seen)
            alone = _timed(select[T], state)[0] if sparse[at] else 0.0
            took, (_, states[at]) = _timed(model.prefill, state, np.zeros((B, T), np.int32))
            times[at].append((took, alone))
    return [of[1:] for of in times]


def _noisy(state: State) -> State:
    """The state with noise in every cached row."""
    rng, number = np.random.default_rng(0), jnp.dtype(home_of(state).dtype)

    def fill(path: tuple, x: Array) -> Array:
        if "S" not in STATE_DIMS[path[-1].name]:
            return x
        noise = rng.standard_normal(x.shape, np.float32).astype(number).view(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: noise[index])

    return jax.tree_util.tree_map_with_path(fill, state)


def _selection(model: Model, B: int, T: int) -> Callable[[State], list]:
    """What a step of T tokens a row does to select keys, in all its layers, for tokens of noise."""
    program = model.program

    def one(weights: dict, state: State, x: Array, latent: Array) -> list:
        lengths = jnp.full_like(state.length, T)
        step = program.step_info(state.length, lengths, T, kind="decode" if T == 1 else "prefill")
        return [
            layer.select(x, latent, held, dataclasses.replace(step, group=group))
            for stack, states in zip(program.merge(weights).stacks, state.layers, strict=True)
            for layer, held, group in _selecting(stack, states)
        ]

    @jax.jit
    def whole(weights: dict, state: State, x: Array, latent: Array) -> list:
        inputs = (WEIGHTS, STATE, BY_ROW, BY_ROW)
        return program.shard(one, inputs, BY_ROW)(weights, state, x, latent)

    rng = np.random.default_rng(0)
    x, latent = (
        model.place_rows(rng.standard_normal((B, T, width), np.float32).astype(model.dtype))
        for width in (model.config.hidden, model.config.q_rank)
    )
    return lambda state: whole(model.weights, state.bare(), x, latent)


def _selecting(stack: Stack, states: Sequence[Any]) -> Iterator[tuple[MLA, Any, int]]:
    """Every MLA layer of a stack, the state that it finds itself in, and its group there."""
    for layer, held in zip(stack.layers, states, strict=True):
        if isinstance(layer.attention, MLA):
            graph, weights = nnx.split(layer.attention)
            for group in range(stack.span.groups):
                own = jax.tree.map(operator.itemgetter(group), weights)
                yield nnx.merge(graph, own), held, group


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
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
    """Writes a profile of B prompts of T tokens and so many new ones into a folder, after the same
    once without; its times are those under the profiler.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab, (B, T)).tolist()
    generate = lambda: model.generate(prompts, max_new_tokens=steps, stop_tokens=[])  # noqa: E731
    with _own_names():
        generate()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the parts of the model, not the lines of Python around them
    with jax.profiler.trace(folder, profiler_options=options):
        took, _ = _timed(generate)
    return B, B * T, B * steps, 1000 * took


def compile_step(program: Program, B: int, T: int, slots: int) -> tuple[Any, dict[str, float]]:
    """A whole step of B rows, completed over the data ranks, and T tokens, compiled from shapes,
    and the seconds of each stage. No weight exists.
    """
    B = program.padded_rows(B)
    rows = NamedSharding(program.mesh, BY_ROW)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=rows)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32, sharding=rows)
    times = [time.perf_counter()]
    traced = program.step.trace(program.weight_shapes, program.state_shapes(B, slots), ids, lengths)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    seconds = (end - begin for begin, end in itertools.pairwise(times))
    return compiled, dict(zip(("trace", "lower", "compile"), seconds, strict=True))


def by_turns(config: Config, models: Sequence[Model]) -> Iterator[Row]:
    """Rows a data rank holds, the time of a decode step under each of two placements, in turns, and
    the ratio of both.
    """
    for rows in STEP_ROWS:
        B = rows * models[0].data_ranks
        token = np.arange(B) % config.vocab
        states = [model.new_state(B, 128) for model in models]
        seconds: list[list[float]] = [[], []]
        for _ in range(REPEATS + 1):
            for at, model in enumerate(models):
                took, (_, states[at]) = _timed(model.decode, states[at], token)
                seconds[at].append(took)
        first, second = (1000 * statistics.median(times[1:]) for times in seconds)
        yield rows, first, second, first / second


def one_layer(config: Config) -> Config:
    """A KDA layer with the model's experts, between a small embedding and head."""
    return dataclasses.replace(
        config, layers=1, mla_layers=(), dense_layers=0, vocab=1024, bos=None, eos=(), pad=None
    )


def experts(config: Config, mesh: Mesh, place: Placement, dtype: str | None) -> Iterator[Row]:
    """`by_turns` of one layer that exchanges its rows and of one that runs its own experts on all
    of them.
    """
    one = one_layer(config)
    ways = [dataclasses.replace(place, experts=way) for way in ("exchange", "local")]
    yield from by_turns(one, [random_model(one, mesh, way, dtype) for way in ways])


def rows(config: Config, mesh: Mesh, place: Placement, dtype: str | None) -> Iterator[Row]:
    """`by_turns` of one KDA layer whose rows are sliced over the model ranks and of one that keeps
    them all on each.
    """
    one = one_layer(config)
    ways = [dataclasses.replace(place, rows=way) for way in ("sliced", "full")]
    yield from by_turns(one, [random_model(one, mesh, way, dtype) for way in ways])


def crossover(measured: Sequence[Row]) -> int | None:
    """The row count from which the first of two ways is faster, twice in a row and by 2 %; 0 where
    it always is, None where it never is.
    """
    wins = [(int(count), float(ratio) * MARGIN < 1) for count, *_, ratio in measured]
    for at, ((count, once), (_, twice)) in enumerate(itertools.pairwise(wins)):
        if once and twice:
            return count if at else 0
    return None


def local_below(measured: Sequence[Row]) -> int:
    """The row count from which exchanging is faster; one more than the largest that was measured
    where it never is.
    """
    found = crossover(measured)
    return int(measured[-1][0]) + 1 if found is None else found


def reductions(width: int, mesh: Mesh, dtype: str | None) -> Iterator[Row]:
    """The time of each way to complete partial sums [rows, width] over the model ranks, in turns,
    beside that of `sum`, and the bytes that a rank sends for it.
    """
    n = model_ranks(mesh)
    number = dtype or default_dtype()
    ways = [Reduction(name) for name in ("sum", "two_shot", "ring_fp32")]
    ways += [Reduction("ring_bf16", pieces) for pieces in REDUCE_PIECES]
    reduce = [_reduction(how, mesh) for how in ways]
    for rows in REDUCE_ROWS:
        partials = jax.random.normal(jax.random.key(0), (n * rows, width), number)
        partials = jax.device_put(partials, NamedSharding(mesh, BY_MODEL_RANK))
        rounds = [[_timed(one, partials)[0] for one in reduce] for _ in range(REPEATS + 1)]
        times = [1000 * statistics.median(of) for of in zip(*rounds[1:], strict=True)]
        for how, ms in zip(ways, times, strict=True):
            sent = traffic(how, n, rows, width, number).sent
            yield rows, how.algorithm, how.pieces, ms, ms / times[0], sent


def _reduction(how: Reduction, mesh: Mesh) -> Callable:
    """The partials of all ranks, one below the other -> the sums of all ranks alike."""
    return on_model_ranks(mesh, lambda partial: all_reduce(partial, how))


def ring_from(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The row count from which ring_bf16 is faster than sum, twice in a row and by 2 %, and its
    pieces: the smallest such count, with the fewest pieces; None where it never is.
    """
    found = []
    for pieces in REDUCE_PIECES:
        ring = [row for row in rows if row[1:3] == ("ring_bf16", pieces)]
        wins = [(int(row[0]), float(row[4]) * MARGIN < 1) for row in ring]
        pairs = itertools.pairwise(wins)
        found += [(count, pieces) for (count, once), (_, twice) in pairs if once and twice]
    return min(found, default=None)
