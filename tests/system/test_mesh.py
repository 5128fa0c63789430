"""The decoder over a mesh: equal to one device, with exactly the collectives that
docs/parallelism.md lists; weights read once, slice by slice; several processes.
"""

import dataclasses
import json
import re
import signal
import sys
import time
import tracemalloc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from models import FAMILY, MESHED, ODD, SHALLOW_MESHED, compilations, prompts, write
from oracles import blocks_of
from pairs import results_of, start_pair
from tolerances import EXACT, LOGITS, NEAR

import kimi_jax as kj
from kimi_jax.checkpoint.reader import Checkpoint
from kimi_jax.model.declared import build, declare, slice_sizes
from kimi_jax.model.implementations import Implementations
from kimi_jax.model.step import Step
from kimi_jax.parallel.collectives import local_rows
from kimi_jax.runtime.program import make_program
from kimi_jax.speculation.verify import verify_step

P, BOTH = kj.Placement, ("data", "model")
ALL = ("heads", "experts", "vocab", "dense", "shared")
CONFIGS = {"meshed": MESHED, "odd": ODD, "family": FAMILY}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda name: write(CONFIGS[name], base / name)


# Equal to one device

LENGTHS = (21, 9, 3)
# Sizes that divide by nothing, and the other kinds of layers; test_systems.py has the rest.
RUNS = [
    ("odd", (1, 3), P(pad=ALL)),
    ("odd", (2, 4), P(pad=ALL, expert_axes=BOTH, latent="sharded")),
    ("odd", (1, 6), P(pad=ALL, experts="local")),
    ("odd", (1, 4), P(pad=ALL, keys="helix", helix_block=4, rows="sliced")),
    ("odd", (2, 4), P(pad=ALL, keys="helix", helix_block=2, exchange="values", shared="sliced")),
    ("meshed", (1, 4), P(rows="sliced", prefill_reduce="ring_fp32", prefill_ring_rows=1)),
    # softplus decay, low-rank gate, softmax router, tied head, two shared experts
    ("family", (1, 4), P(pad=ALL, rows="sliced", experts="local")),
    ("family", (2, 3), P(pad=ALL, expert_axes=BOTH, latent="sharded")),
]


def run(model, config):
    """Logits of a ragged prefill and of two decode steps after it."""
    logits, state = model.prefill(model.new_state(3, 64), *prompts(config, LENGTHS))
    results = [logits]
    for step in range(2):
        logits, state = model.decode(state, np.array([5, 6, 7]) + step)
        results.append(logits)
    return np.stack(results)


@pytest.fixture(scope="module")
def one_device(folders):
    wanted = {}

    def get(name, config):
        if name not in wanted:
            wanted[name] = run(kj.load(folders(name), dtype="float64"), config)
        return wanted[name]

    return get


@pytest.mark.parametrize("name, mesh, place", RUNS, ids=str)
def test_every_placement_equals_one_device(folders, one_device, name, mesh, place):
    """Prefill, decode and padded batches in float64; 3 rows over 2 and 4 data ranks."""
    config = CONFIGS[name]
    model = kj.load(folders(name), kj.make_mesh(*mesh), place, dtype="float64")
    got = run(model, config)
    assert got.shape == (3, 3, config.vocab)
    np.testing.assert_allclose(got, one_device(name, config), atol=EXACT, rtol=0)


# What GPUs run, but for the ragged exchange, in blocks of a few queries and among few slots.
ON_GPUS = Implementations(
    kda="transitions",
    mla="static",
    moe="slots",
    chunk=4,
    blocks=blocks_of("gpu", dense_bytes=2**10, select_bytes=2**12, narrowest_slots=8),
)


@pytest.mark.parametrize(
    "mesh, place",
    [
        ((2, 2), P(pad=ALL, keys="helix", helix_block=4, rows="sliced", exchange="values")),
    ],
    ids=str,
)
def test_what_gpus_run_equals_one_device(folders, one_device, mesh, place):
    name, config = "odd" if place.pad else "meshed", ODD if place.pad else MESHED
    mesh = kj.make_mesh(*mesh)
    model = kj.load(folders(name), mesh, place, dtype="float64", implementations=ON_GPUS)
    np.testing.assert_allclose(run(model, config), one_device(name, config), atol=EXACT, rtol=0)


@pytest.mark.parametrize(
    "place",
    [
        P(experts="local", latent="sharded"),
        P(rows="sliced", shared="sliced", keys="helix", helix_block=4),
    ],
    ids=["full", "sliced"],
)
def test_nan_in_padding_reaches_no_other_row(folders, place):
    """Padding is computed as token 0. With NaN for its embedding, all rows of padding are NaN from
    the first layer on, and the rest keep their bits: 3 rows of 21 tokens over four ranks.
    """
    model = kj.load(folders("meshed"), kj.make_mesh(model=4), place, dtype="float32")
    ids, lengths = prompts(MESHED, LENGTHS)
    ids = np.maximum(ids, 1)

    def results(embedding):
        weights = model.params | {("embed",): embedding}
        changed = dataclasses.replace(model, params=weights)
        logits, state = changed.prefill(changed.new_state(3, 64), ids, lengths)
        after, _ = changed.decode(state, [5, 6, 7])
        whole = np.asarray(changed.logits(ids, lengths))
        tokens = [row[:n] for row, n in zip(whole, lengths, strict=True)]
        return [np.asarray(logits), np.asarray(after), np.concatenate(tokens)]

    embedding = model.params["embed",]
    poisoned = embedding.at[0].set(jnp.nan)
    for found, expected in zip(results(poisoned), results(embedding), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


def test_any_number_of_rows_over_four_ranks_equals_one_device(folders):
    """One, n - 1, n + 1 and 5 n + 3 rows in a decode step."""
    tokens = np.arange(23) % MESHED.vocab
    one, four = (
        kj.load(folders("meshed"), mesh, dtype="float32") for mesh in (None, kj.make_mesh(model=4))
    )
    want, _ = one.decode(one.new_state(23, 16), tokens)
    for rows in (1, 3, 5, 23):
        got, _ = four.decode(four.new_state(rows, 16), tokens[:rows])
        worst = np.abs(np.asarray(got) - np.asarray(want)[:rows]).max(-1)
        assert worst.max() < LOGITS["float32"], rows
        assert np.quantile(worst, 0.99) < NEAR["float32"], rows


def test_logits_and_mixtures_of_whole_prompts_are_those_of_one_device(folders):
    """Sliced rows and cut keys where no state is kept; 2 rows of 11 tokens, 13 of one."""
    place = P(keys="helix", helix_block=2, rows="sliced", shared="sliced")
    one, four = (
        kj.load(folders("meshed"), *where, dtype="float64")
        for where in ((), (kj.make_mesh(model=4), place))
    )
    ids, lengths = prompts(MESHED, (11, 7))
    for row, want, n in zip(
        four.logits(ids, lengths), one.logits(ids, lengths), lengths, strict=True
    ):
        np.testing.assert_allclose(row[:n], want[:n], atol=EXACT, rtol=0)
    tokens = prompts(MESHED, (13,))[0][0].tolist()
    np.testing.assert_allclose(four.mixtures(tokens), one.mixtures(tokens), atol=EXACT, rtol=0)


def test_auto_rows_compile_each_form_once(folders):
    """Decode steps of 2 rows keep all rows, prefill steps of 32 slice them: two programs."""
    place = P(rows="auto", sliced_from=9, keys="helix", helix_block=4)
    model = kj.load(folders("meshed"), kj.make_mesh(model=2), place, dtype="float32")

    def steps(state):
        for length in (5, 16, 9):
            _, state = model.prefill(state, *prompts(MESHED, (length, 3)))
            for _ in range(3):
                _, state = model.decode(state, np.array([5, 6]))

    state = model.new_state(2, 128)
    assert compilations(lambda: steps(state))[0] == 2


def test_generated_ids_are_those_of_one_device(folders):
    """Greedy and sampled, three prompts over two data ranks; twice through the same buffers."""
    ids = [row[:n].tolist() for row, n in zip(*prompts(MESHED, LENGTHS), strict=True)]
    place = P(expert_axes=BOTH)
    models = [
        kj.load(folders("meshed"), mesh, place, dtype="float64")
        for mesh in (None, kj.make_mesh(2, 4))
    ]
    for options in (dict(), dict(temperature=1.0, seed=[3, 4, 5])):
        options |= dict(max_new_tokens=6, stop_tokens=[])
        want, got, again = (
            [reply.tokens for reply in model.generate(ids, **options)]
            for model in (models[0], models[1], models[1])
        )
        assert got == want == again


def test_two_requests_through_donated_buffers_equal_fresh_ones_on_eight_devices(folders):
    model = kj.load(folders("meshed"), kj.make_mesh(2, 4), dtype="float64")
    ids, lengths = prompts(MESHED, (12, 5), seed=1)
    want, _ = model.prefill(model.new_state(2, 64), ids, lengths)
    _, state = model.prefill(model.new_state(2, 64), *prompts(MESHED, (16, 9)))
    clean = dict(length=jnp.zeros_like(state.length))
    got, _ = model.prefill(dataclasses.replace(state, **clean), ids, lengths)
    np.testing.assert_allclose(got, want, atol=EXACT, rtol=0)


def test_a_state_that_is_not_the_models_own_is_refused(folders):
    one, two = (
        kj.load(folders("meshed"), mesh, dtype="float32") for mesh in (None, kj.make_mesh(model=2))
    )
    state, tokens = one.new_state(1, 16), np.array([5])
    _, following = one.decode(state, tokens)
    with pytest.raises(kj.RequestError, match="consumed by a step"):
        one.decode(state, tokens)
    with pytest.raises(kj.RequestError, match="lives on another mesh"):
        two.decode(following, tokens)
    wide = kj.load(folders("meshed"), dtype="float64")
    with pytest.raises(kj.RequestError, match="the state is float32, the model float64"):
        wide.decode(following, tokens)


# The collectives

KINDS = ("all-reduce", "all-to-all", "all-gather", "reduce-scatter")
PRIMITIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "neighbour copy",
    "ragged_all_to_all": "ragged all-to-all",
}


def documented():
    """(part, placement) -> counts by kind, as the table in docs/parallelism.md has them."""
    section = (
        (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8").split("## Collectives")[1]
    )
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", section.split("\n## ")[0], re.M)
    counted = [row for row in rows if row[0] != "part" and set(row[0]) != {"-"}]
    return {
        (part, place): dict(zip(KINDS, map(int, numbers.split(" | ")), strict=True))
        for part, place, numbers in counted
    }


def collectives(jaxpr, outside=""):
    """(where, kind, result) of every collective, nested programs included."""
    for eqn in jaxpr.eqns:
        where = f"{outside}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in PRIMITIVES:
            for out in eqn.outvars:
                yield where, PRIMITIVES[eqn.primitive.name], out.aval
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from collectives(getattr(inner, "jaxpr", inner), where)


def shapes(jaxpr):
    """The shape of everything that a program makes."""
    for eqn in jaxpr.eqns:
        yield from (out.aval.shape for out in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from shapes(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def traced(*where, **options):
    """The collectives of a step of the three-layer model, by shapes alone."""
    return list(collectives(jaxpr_of(*where, **options)))


def jaxpr_of(place, mesh, B, T, dtype="bfloat16", forms=None, slots=64, verify=False):
    program = make_program(MESHED, mesh, place, dtype, implementations=forms)
    ints = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, T), (B,)))
    step = verify_step(program) if verify else program.step_of("decode" if T == 1 else "prefill")
    return step.trace(program.weight_shapes, program.state_shapes(B, slots), *ints).jaxpr.jaxpr


def part_of(where):
    for scope, part in {"selection": "selection", "heads": "heads of MLA"}.items():
        if re.search(rf"attention/(.*/)?{scope}", where):
            return part
    layer = re.search(r"layer_(\d)/(attention|mlp)", where)
    if not layer:
        return re.search("embedding|output|head", where)[0]
    if layer[2] == "attention":
        return "attention"
    return "dense MLP" if layer[1] == "0" else "MoE"


PLACES = {
    "exchange": P(),
    'exchange, `latent="sharded"`': P(latent="sharded"),
    "local": P(experts="local"),
    'local, `latent="sharded"`': P(experts="local", latent="sharded"),
    "exchange, over data and model": P(expert_axes=BOTH),
    "local, over data and model": P(experts="local", expert_axes=BOTH),
    'local, over data and model, `latent="sharded"`': P(
        experts="local", expert_axes=BOTH, latent="sharded"
    ),
    "sliced rows, exchange": P(rows="sliced"),
    "sliced rows, exchange, over data and model": P(
        rows="sliced", keys="helix", exchange="values", helix_block=4, expert_axes=BOTH
    ),
    'sliced rows, exchange, `shared="sliced"`': P(rows="sliced", shared="sliced", keys="helix"),
    'sliced rows, exchange, `latent="sharded"`': P(rows="sliced", latent="sharded"),
    "sliced rows, local": P(rows="sliced", experts="local", keys="helix"),
}
HELIX = P(keys="helix", helix_block=4)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("name", PLACES)
def test_a_step_holds_the_collectives_of_the_table_and_no_other(name, T):
    """A dense, a KDA and an MLA layer with experts: layers 0, 1 and 2; a step of decoding and one
    of more tokens. What cut keys need to be selected is listed apart.
    """
    place = PLACES[name]
    found = traced(place, kj.make_mesh(2, 4), 4, T)
    counts = Counter((part_of(where), kind) for where, kind, _ in found)
    times = {"attention": 3, "MoE": 2}
    rows = "sliced rows" if place.rows == "sliced" else "any"
    wanted = {"embedding": rows, "attention": rows, "dense MLP": rows, "MoE": name, "head": "any"}
    wanted |= {"output": rows} if rows != "any" else {}
    wanted |= {"heads of MLA": "helix keys"} if place.keys == "helix" else {}
    for part, how in wanted.items():
        for kind, number in documented()[part, how].items():
            assert counts.pop((part, kind), 0) == number * times.get(part, 1), (part, kind)
    apart = {("selection", "all-gather"): 1} if place.keys == "helix" else {}
    assert counts == apart


VERIFIED = ("exchange", "sliced rows, local", "sliced rows, exchange, over data and model")


@pytest.mark.parametrize("name", VERIFIED)
def test_a_verify_step_holds_the_collectives_of_a_decode_step(name):
    """Of three rows a request instead of one; the plain sum, whatever prefill reduces with."""
    place = dataclasses.replace(PLACES[name], prefill_reduce="ring_fp32", prefill_ring_rows=1)
    verified = traced(place, kj.make_mesh(2, 4), 4, 3, verify=True)
    decoded = traced(place, kj.make_mesh(2, 4), 4, 1)
    counts = [Counter((part_of(w), kind) for w, kind, _ in found) for found in (verified, decoded)]
    assert counts[0] == counts[1]
    (logits,) = (out.shape for where, _, out in verified if part_of(where) == "head")
    assert logits == (2, 3, MESHED.vocab)


def test_helix_keys_under_full_rows_add_one_exchange_of_heads():
    counts = Counter(
        (part_of(where), kind) for where, kind, _ in traced(HELIX, kj.make_mesh(1, 4), 4, 1)
    )
    assert counts["attention", "all-reduce"] == 3 and counts["heads of MLA", "all-to-all"] == 1
    plain = Counter((part_of(w), kind) for w, kind, _ in traced(P(), kj.make_mesh(1, 4), 4, 1))
    assert counts - plain == {("heads of MLA", "all-to-all"): 1, ("selection", "all-gather"): 1}


@pytest.mark.parametrize("exchange, width", [("latents", "kv_rank"), ("values", "value_dim")])
def test_what_helix_sends_does_not_depend_on_the_context(exchange, width):
    """[n, B, T, own heads, width and two float32 statistics], whatever the cache holds."""
    place = dataclasses.replace(HELIX, exchange=exchange)
    sizes = set()
    for slots in (64, 512):
        found = traced(place, kj.make_mesh(1, 4), 4, 3, slots=slots)
        sizes |= {out.shape for where, _, out in found if part_of(where) == "heads of MLA"}
    assert sizes == {(4, 4, 3, MESHED.heads // 4, getattr(MESHED, width) + 4)}


def test_sliced_rows_have_the_sizes_of_the_formulas():
    """12 rows a data rank, 3 own ones of 4 ranks; the shared experts are gathered for apart."""
    rows, own, D, L, A = 12, 3, MESHED.hidden, MESHED.latent, MESHED.active_experts
    found = Counter()
    for where, kind, out in traced(P(rows="sliced"), kj.make_mesh(2, 4), 8, 3):
        found[part_of(where), kind, out.shape, out.dtype.name] += 1
    assert found == {
        ("embedding", "reduce-scatter", (own, D), "bfloat16"): 1,
        ("attention", "all-gather", (rows, D), "bfloat16"): 3,
        ("attention", "reduce-scatter", (own, D), "bfloat16"): 3,
        ("dense MLP", "all-gather", (rows, D), "bfloat16"): 1,
        ("dense MLP", "reduce-scatter", (own, D), "bfloat16"): 1,
        ("MoE", "all-to-all", (4, own, L + 3 * A), "uint16"): 2,
        ("MoE", "all-to-all", (4, own, L), "bfloat16"): 2,
        ("output", "all-gather", (rows, D), "bfloat16"): 1,
        ("head", "all-gather", (4, MESHED.vocab), "float32"): 1,
    }


@pytest.mark.parametrize("rows", ["full", "sliced"])
def test_the_residual_bank_holds_the_rows_that_a_rank_holds(rows):
    """Nothing else is as large: 16 rows on four ranks, a bank of two."""
    made = set(shapes(jaxpr_of(P(rows=rows), kj.make_mesh(model=4), 4, 4)))
    N, D = MESHED.bank_rows, MESHED.hidden
    held = {"full": 16, "sliced": 4}[rows]
    assert {shape[1] for shape in made if len(shape) == 3 and shape[::2] == (N, D)} == {held}


@pytest.mark.parametrize("P_rows, own", [(8, 2), (7, 2), (1, 1), (5, 2)])
def test_slices_on_four_ranks_join_to_the_whole(P_rows, own):
    """Of rows and of a bank of three: ceil(P / 4) rows each, zeros behind the last one."""
    step = Step.of(
        jnp.zeros(P_rows, jnp.int32), jnp.ones(P_rows, jnp.int32), 1, Implementations(),
        P(rows="sliced"),
        {"data": 1, "model": 4},
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(P_rows, 6))

    def slices(x):
        own = local_rows(x)
        return own, step.all_rows(own), local_rows(step.valid.reshape(-1))

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        slices, mesh=kj.make_mesh(model=4), in_specs=spec(), check_vma=False,
        out_specs=(spec("model"), spec(), spec("model")),
    )  # fmt: skip
    parts, joined, active = jax.jit(run)(x)
    assert parts.shape == (4 * own, 6)
    np.testing.assert_array_equal(parts[:P_rows], x)
    np.testing.assert_array_equal(parts[P_rows:], 0)
    np.testing.assert_array_equal(joined, x)
    assert active.tolist() == [True] * P_rows + [False] * (4 * own - P_rows)


def test_row_collectives_have_the_sizes_of_the_formulas():
    """P rows a data rank, c own rows of 4 ranks: messages hold 2 L + 6 A bytes a row and rank."""
    rows, own, D, L, A = 6, 2, MESHED.hidden, MESHED.latent, MESHED.active_experts
    found = Counter()
    for where, kind, out in traced(P(), kj.make_mesh(2, 4), 4, 3):
        found[part_of(where), kind, out.shape, out.dtype.name] += 1
    assert found == {
        ("embedding", "all-reduce", (rows, D), "bfloat16"): 1,
        ("attention", "all-reduce", (rows, D), "bfloat16"): 3,
        ("dense MLP", "all-reduce", (rows, D), "bfloat16"): 1,
        ("MoE", "all-reduce", (rows, D), "bfloat16"): 2,
        ("MoE", "all-to-all", (4, own, L + 3 * A), "uint16"): 2,
        ("MoE", "all-to-all", (4, own, L), "bfloat16"): 2,
        ("head", "all-gather", (2, MESHED.vocab), "float32"): 1,
    }


def test_one_device_holds_no_collective():
    for place in PLACES.values():
        assert not traced(place, kj.make_mesh(), 2, 3)


# The released size


def test_the_released_model_compiles_by_shapes_and_its_arguments_are_the_plan_to_the_byte():
    """93 layers of K3.1 over 8 devices, 2 requests of 8,192 tokens; nothing is allocated."""
    config, mesh = kj.Config.k3_1(), kj.make_mesh(model=8)
    program = make_program(config, mesh, dtype="bfloat16", scan=True)
    ints = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1), (2,)))
    before = len(jax.live_arrays())
    step = program.step.lower(program.weight_shapes, program.state_shapes(2, 8192), *ints)
    found = step.compile().memory_analysis().argument_size_in_bytes
    plan = kj.plan(config, mesh, batch=2, context=8192)
    assert found == plan.weight_bytes + plan.state_bytes + plan.input_bytes == plan.total_bytes
    assert len(jax.live_arrays()) == before


# Loading


def test_a_process_reads_each_slice_of_its_devices_once(folders):
    """What is replicated over 2 data ranks, or whole on all 8 devices, is read once."""
    mesh, place = kj.make_mesh(2, 4), P()
    with Checkpoint(folders("meshed"), MESHED) as file:
        program = make_program(MESHED, mesh, place, "bfloat16", quantization=file.quantization)
        asked = Counter()

        def read(name, index):
            asked[name, str(index)] += 1
            return file.read(name, index)

        build(program.declared, place, mesh, read)
        assert set(asked.values()) == {1}
        tensors = [t for n, t in file.tensors.items()]
        assert file.bytes_read == sum(tensor.nbytes for tensor in tensors)


def test_a_device_alone_reads_its_share(folders):
    """The slices of one of 4 ranks: a quarter of what is cut and all of what is whole."""
    mesh, place = kj.make_mesh(model=4), P()
    program = make_program(MESHED, mesh, place, "bfloat16")
    for w in declare(program.declared):
        cut = "model" in program.weight_specs[w.path]
        sizes = slice_sizes(w, place, mesh)
        assert len(sizes) == (4 if cut else 1)
        assert sum(sizes) == np.prod(w.shape), w.path


def test_the_host_holds_few_slices_at_a_time(folders):
    """Reading into devices that keep no host memory: the peak is a few times the largest slice."""
    mesh, place = kj.make_mesh(model=8), P()
    with Checkpoint(folders("meshed"), MESHED) as file:
        program = make_program(MESHED, mesh, place, "float32", quantization=file.quantization)
        largest = max(
            size * w.dtype.itemsize
            for w in declare(program.declared)
            for size in slice_sizes(w, place, mesh)
        )
        file.read("embed")  # opens what a first read opens
        tracemalloc.start()
        weights = build(program.declared, place, mesh, file.read)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert weights and peak - kept < 4 * largest + 100_000


def test_a_failure_half_way_leaves_nothing_behind(folders):
    mesh, place = kj.make_mesh(model=2), P()
    program = make_program(MESHED, mesh, place, "float32")
    before = len(jax.live_arrays())
    with Checkpoint(folders("meshed"), MESHED) as file:

        def read(name, index):
            if name.startswith("layers.2"):
                raise OSError("the disk is gone")
            return file.read(name, index)

        try:
            build(program.declared, place, mesh, read)
        except OSError as error:
            assert "the disk is gone" in str(error)
        else:
            raise AssertionError("a failed read was not raised")
    assert len(jax.live_arrays()) == before


# Several processes


def processes(folder, *prompts, options=("--json", "--max-new-tokens", "6")):
    """The command in two processes of four devices, one prompt of ids each or the same for both."""

    def command(address, me):
        words = [sys.executable, "-m", "kimi_jax", "generate", prompts[me % len(prompts)]]
        words += ["--tokens", "--model", folder, *options, "--devices", "4", "--mesh", "2x4"]
        return [*words, "--coordinator", address, "--processes", "2", "--process-id", str(me)]

    return start_pair(command)


def test_two_processes_write_what_one_writes_and_only_the_first_prints(folders):
    ids = [5, 6, 7, 8]
    first, second = results_of(processes(folders("meshed"), ",".join(map(str, ids))))
    assert first[0] == second[0] == 0, (first, second)
    assert second[1] == ""
    one = kj.load(folders("meshed"), kj.make_mesh(2, 4), dtype="float32")
    (wanted,) = one.generate([ids], max_new_tokens=6)
    assert json.loads(first[1])["tokens"] == wanted.tokens


def test_processes_that_bring_different_prompts_are_told_so(folders):
    """Before a step whose shapes differ could wait for ever."""
    both = processes(folders("meshed"), "5,6,7", "5,6,7,8,9")
    for code, _, errors in results_of(both):
        assert code == 2, errors
        assert "the processes disagree on prompts and options" in errors


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("number, code", [(signal.SIGKILL, 1), (signal.SIGINT, 130)], ids=str)
def test_a_command_that_is_stopped_ends_the_other_within_seconds(tmp_path, number, code):
    """Of a reply so long that it cannot end by itself meanwhile."""
    folder = write(dataclasses.replace(SHALLOW_MESHED, max_positions=2**15), tmp_path / "long")
    long = ("--max-new-tokens", "30000")
    first, second = processes(folder, "5,6,7", options=long)
    first.stdout.read(20)  # both are at work
    second.send_signal(number)
    stopped = time.monotonic()
    _, errors = first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert time.monotonic() - stopped < 20
    assert first.returncode == code and "kimi_jax: process 1 of 2" in errors
    assert second.returncode == (code if number == signal.SIGINT else -number)
