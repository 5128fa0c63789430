"""The decoder as a whole: fast forms, scan, state, pieces, placement of weights, and what compiles
how often.
"""

import dataclasses
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import AWKWARD, DEEP, FAMILY, MESHED, prompts, write
from tolerances import EXACT

import kimi_jax as kj
from kimi_jax import checkpoint
from kimi_jax.model.declared import declare
from kimi_jax.model.decoder import kind_spans, spans
from kimi_jax.model.implementations import DEFINITIONS, Implementations
from kimi_jax.model.mxfp4 import MXFP4
from kimi_jax.runtime.program import make_program

LENGTHS = (70, 41, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    named = {"awkward": AWKWARD, "family": FAMILY, "deep": DEEP}
    return lambda name: write(named[name], base / name)


@pytest.fixture(scope="module")
def awkward(folders):
    return kj.load(folders("awkward"), dtype="float64", chunk=64)


@pytest.fixture(scope="module")
def whole(awkward):
    """Logits and state after the ragged prompts given whole."""
    ids, lengths = prompts(AWKWARD, LENGTHS)
    return awkward.prefill(awkward.new_state(3, 128), ids, lengths)


def in_pieces(model, pieces, ids, lengths, state):
    """Feed the prompts `pieces` tokens at a time (the last size repeats); rows that have ended
    bring none.
    """
    first, logits = 0, None
    sizes = list(pieces)
    while first < lengths.max():
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = np.clip(lengths - first, 0, size)
        piece = np.zeros((len(ids), size), np.int32)
        piece[:, : ids[:, first : first + size].shape[1]] = ids[:, first : first + size]
        logits, state = model.prefill(state, piece, part)
        first += size
    return logits, state


def used(state):
    """What a state means: memories, windows, lengths, and only those cache slots that were
    written.
    """
    seen = np.arange(state.max_length) < np.asarray(state.length)[:, None]

    def meaning(x):
        x = np.asarray(x)
        cut = x.ndim == 4 and x.shape[2] == state.max_length
        return np.where(seen[None, :, :, None], x, 0) if cut else x

    return jax.tree.map(meaning, dataclasses.replace(state, home=None))


@pytest.mark.parametrize("name", ["awkward", "family"])
def test_fast_forms_equal_the_definitions(folders, name):
    """Chunked, absorbed, gathered and grouped against recurrent, expanded, sorted and dense, with
    selection that bites.
    """
    fast = kj.load(folders(name), dtype="float64", chunk=64)
    plain = kj.load(folders(name), dtype="float64", chunk=64, implementations=DEFINITIONS)
    ids, lengths = prompts(fast.config, LENGTHS)
    states = [m.prefill(m.new_state(3, 128), ids, lengths) for m in (fast, plain)]
    (got, fast_state), (want, plain_state) = states
    np.testing.assert_allclose(got, want, atol=EXACT, rtol=0)
    for step in range(2):
        tokens = np.array([5, 6, 7]) + step
        (got, fast_state), (want, plain_state) = (
            fast.decode(fast_state, tokens),
            plain.decode(plain_state, tokens),
        )
        np.testing.assert_allclose(got, want, atol=EXACT, rtol=0)
    chex.assert_trees_all_close(used(fast_state), used(plain_state), atol=EXACT, rtol=0)


def test_scanned_layers_equal_unrolled_ones(folders):
    """17 layers, period 4, residual block 3, two expert groups, K != V, head width 12: in two
    pieces each.
    """
    ids, lengths = prompts(DEEP, (16, 9))
    results = []
    for scan in (True, False):
        model = kj.load(folders("deep"), dtype="float64", scan=scan)
        state = model.new_state(2, 32)
        for _ in range(2):
            logits, state = model.prefill(state, ids, lengths)
        results.append(np.asarray(logits))
    np.testing.assert_allclose(*results, atol=EXACT, rtol=0)


def test_layers_fall_into_a_head_equal_groups_and_a_tail():
    assert [(s.first, s.period, s.groups) for s in spans(kj.Config.k3(), scan=True)] == [
        (0, 1, 1),
        (1, 4, 22),
        (89, 4, 1),
    ]
    assert [(s.first, s.period, s.groups) for s in spans(kj.Config.k3(), scan=False)] == [
        (0, 93, 1)
    ]
    for mla in [(0, 1, 2), (16,), (1, 4, 5, 9, 16), tuple(range(17))]:
        config = dataclasses.replace(DEEP, mla_layers=mla)
        covered = [
            s.layer(j, g)
            for s in spans(config, scan=True)
            for g in range(s.groups)
            for j in range(s.period)
        ]
        assert covered == list(range(17))


def runs_by_definition(config: kj.Config) -> tuple[int, int, int]:
    """(traced, period, first) of the best run: every period, every first layer, layer by layer."""
    N = config.layers
    kinds = [(config.is_mla(i), config.is_dense(i)) for i in range(N)]
    best = (N, 0, 0)
    for period in range(1, N // 2 + 1):
        for first in range(N - 2 * period + 1):
            stop = first + period
            while stop < N and kinds[stop] == kinds[stop - period]:
                stop += 1
            groups = (stop - first) // period
            if groups > 1:
                best = min(best, (N - (groups - 1) * period, period, first))
    return best


@settings(max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(0, 24), st.integers(1, 3))
def test_the_run_that_is_scanned_is_the_best_of_all(is_mla, dense_layers, freq):
    config = dataclasses.replace(
        DEEP,
        layers=len(is_mla),
        mla_layers=tuple(i for i, mla in enumerate(is_mla) if mla),
        dense_layers=dense_layers,
        moe_layer_freq=freq,
    )
    found = spans(config, scan=True)
    assert [i for s in found for g in range(s.groups) for j in range(s.period)
            for i in [s.layer(j, g)]] == list(range(config.layers))  # fmt: skip
    run = max(found, key=lambda s: (s.groups - 1) * s.period)
    traced, period, first = runs_by_definition(config)
    assert config.layers - (run.groups - 1) * run.period == traced
    if traced < config.layers:
        assert (run.period, run.first) == (period, first)


@pytest.mark.parametrize("mla", [range(10_000), range(3, 10_000, 4), [i * i for i in range(99)]])
def test_ten_thousand_layers_fall_into_few_spans(mla):
    """The search is quadratic at worst: a cubic one would not end today."""
    config = dataclasses.replace(DEEP, layers=10_000, mla_layers=tuple(mla))
    assert sum(s.period * s.groups for s in spans(config, scan=True)) == 10_000
    kinds = kind_spans(config)
    assert len(kinds) <= 4 and sum(s.groups for s in kinds) == 10_000
    for span in kinds:
        kind = config.is_mla(span.first), config.is_dense(span.first)
        same = [(config.is_mla(i), config.is_dense(i)) == kind for i in range(10_000)]
        assert sum(same) == span.groups and same.index(True) == span.first


@pytest.mark.parametrize("pieces", [(1,), (2, 3, 7, 64), (7,), (64,)], ids=str)
def test_a_prompt_in_pieces_equals_the_prompt_whole(awkward, whole, pieces):
    """Rows of length 0, 1 and more continue a state that is not empty; a row that brings nothing
    keeps its logits.
    """
    ids, lengths = prompts(AWKWARD, LENGTHS)
    logits, state = in_pieces(awkward, pieces, ids, lengths, awkward.new_state(3, 128))
    np.testing.assert_allclose(logits, whole[0], atol=EXACT, rtol=0)
    chex.assert_trees_all_close(used(state), used(whole[1]), atol=EXACT, rtol=0)


def test_prefill_then_decode_equals_fresh_forwards(awkward):
    """Each decode step's logits are those of a fresh forward without state; the choice is its
    argmax.
    """
    ids, lengths = prompts(AWKWARD, (37, 1, 1))
    logits, state = awkward.prefill(awkward.new_state(3, 128), ids, lengths)
    for _ in range(3):
        fresh = np.asarray(awkward.logits(ids, lengths))[np.arange(3), lengths - 1]
        np.testing.assert_allclose(logits, fresh, atol=EXACT, rtol=0)
        chosen = np.asarray(logits).argmax(-1)
        ids = np.pad(ids, ((0, 0), (0, 1)))
        ids[np.arange(3), lengths] = chosen
        lengths = lengths + 1
        logits, state = awkward.decode(state, chosen)


def test_rows_of_a_ragged_batch_equal_the_prompts_alone(awkward):
    """Lengths [1, 1, 37]."""
    ids, lengths = prompts(AWKWARD, (1, 1, 37))
    together, _ = awkward.prefill(awkward.new_state(3, 128), ids, lengths)
    for row in range(3):
        alone = np.where(np.arange(3) == row, lengths, 0)
        logits, _ = awkward.prefill(awkward.new_state(3, 128), ids, alone)
        np.testing.assert_allclose(logits[row], together[row], atol=EXACT, rtol=0)


def test_a_slot_full_of_garbage_equals_an_empty_one(awkward):
    """For a prompt of one token too: what an earlier request left, NaN included, is never seen."""
    ids, lengths = prompts(AWKWARD, (1, 30, 5))
    want, _ = awkward.prefill(awkward.new_state(3, 128), ids, lengths)
    state = awkward.new_state(3, 128)
    nan = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    got, _ = awkward.prefill(
        dataclasses.replace(state, layers=jax.tree.map(nan, state.layers)), ids, lengths
    )
    np.testing.assert_array_equal(got, want)


def test_a_snapshot_of_a_state_continues_as_the_state_does(awkward, whole):
    """Copies of one state, continued twice and in another order, give the same logits."""
    copy = lambda state: jax.tree.map(jnp.copy, state)  # noqa: E731
    snapshot = copy(whole[1])
    first, _ = awkward.decode(copy(snapshot), np.array([3, 4, 5]))
    awkward.decode(copy(snapshot), np.array([6, 7, 8]))
    again, _ = awkward.decode(copy(snapshot), np.array([3, 4, 5]))
    np.testing.assert_array_equal(first, again)


def test_requests_in_turn_through_donated_buffers_equal_fresh_ones(awkward):
    """The same slots serve one request after the other; a row restarts when its length is set to
    zero.
    """
    ids, lengths = prompts(AWKWARD, (20, 3, 11), seed=1)
    want, _ = awkward.prefill(awkward.new_state(3, 128), ids, lengths)
    _, state = awkward.prefill(awkward.new_state(3, 128), *prompts(AWKWARD, LENGTHS))
    got, _ = awkward.prefill(
        dataclasses.replace(state, length=jnp.zeros(3, jnp.int32)), ids, lengths
    )
    np.testing.assert_allclose(got, want, atol=EXACT, rtol=0)


def test_lengths_within_a_bucket_and_decode_steps_compile_once(awkward):
    ids, lengths = prompts(AWKWARD, LENGTHS)
    _, state = awkward.prefill(awkward.new_state(3, 128), ids[:, :20], np.minimum(lengths, 20))
    _, state = awkward.decode(state, np.array([1, 1, 1]))
    compiled = awkward.program.step.program_count
    for T in range(17, 37):
        awkward.prefill(awkward.new_state(3, 128), ids[:, :T], np.minimum(lengths, T))
    for token in range(20):
        _, state = awkward.decode(state, np.full(3, token))
    assert awkward.program.step.program_count == compiled


@pytest.mark.parametrize("config, scan", [(MESHED, False), (DEEP, True)], ids=["plain", "scan"])
def test_every_part_of_a_step_is_named_in_its_operations(config, scan):
    """By the layer's number, or its place in a scanned group, as profiles show them."""
    program = make_program(
        config, kj.make_mesh(1, 1), kj.Placement(), quantization=MXFP4, scan=scan
    )
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 4), (1,)))
    traced = program.step.trace(program.weight_shapes, program.state_shapes(1, 64), ids, lengths)
    text = traced.lower().as_text(debug_info=True)
    kda, mla = ("layer_0_of_group", "layer_2_of_group") if scan else ("layer_1", "layer_2")
    parts = ["embedding", "output/mix", "head", "layer_0/mlp/dense", f"{kda}/attention/kda"]
    parts += [f"{mla}/attention/{name}" for name in ("mix", "mla", "mla/indexer")]
    parts += [f"{mla}/mlp/{name}" for name in ("mix", "router", "experts", "shared")]
    assert [part for part in parts if not re.search(rf'["/]{part}[/"]', text)] == []


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_the_kda_chunk_does_not_change_logits(folders, awkward, chunk):
    ids, lengths = prompts(AWKWARD, (16, 9, 1))
    model = kj.load(
        folders("awkward"), dtype="float64", implementations=Implementations(chunk=chunk)
    )
    np.testing.assert_allclose(
        np.asarray(model.logits(ids, lengths))[0],
        np.asarray(awkward.logits(ids, lengths))[0],
        atol=EXACT,
        rtol=0,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_writes_its_tokens_and_not_the_cache(dtype):
    """The compiled decode step aliases its whole state, and its temporaries stay far below the
    caches it updates.
    """
    program = make_program(AWKWARD, dtype=dtype)
    state = program.state_shapes(1, 65536)
    ints = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = program.step.lower(program.weight_shapes, state, *ints).compile()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size(state)
    # Scores and their sort take a few float32 per slot, the caches 34 + 8 numbers per slot and
    # layer.
    assert memory.temp_size_in_bytes < size(state) / 3
    for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {name}(" not in compiled.as_text()


def test_declared_specs_types_and_shapes_are_those_of_the_loaded_arrays(folders):
    model = kj.load(folders("awkward"), dtype="bfloat16")
    fp32 = {"a_log", "dt_bias", "conv_q", "conv_k", "conv_v", "o_norm", "router_bias"}
    for w in declare(model.program.declared):
        array = model.params[w.path]
        assert array.sharding.spec == model.placement.spec(w.roles), w.names[0]
        assert array.shape == w.shape
        packed = "experts" in w.path
        assert array.dtype == (
            "uint8" if packed else "float32" if w.path[-1] in fp32 else "bfloat16"
        ), w.names[0]


def test_loaded_weights_are_the_ones_in_the_file(folders):
    model = kj.load(folders("awkward"), dtype="float32")
    with checkpoint.Checkpoint(folders("awkward"), AWKWARD) as file:
        for w in declare(model.program.declared):
            stacked = np.stack([np.asarray(file.read(name)) for name in w.names])
            value = stacked if w.dims[0] == "G" else stacked[0]
            np.testing.assert_array_equal(
                model.params[w.path], value.astype(w.dtype), err_msg=w.names[0]
            )


def test_a_tied_head_is_the_embedding(folders):
    model = kj.load(folders("family"), dtype="float64")
    assert ("head",) not in model.params


def test_plain_experts_equal_packed_ones(folders, tmp_path, awkward):
    """The same numbers stored as bfloat16 instead of MXFP4: exactly the same model."""
    with checkpoint.Checkpoint(folders("awkward"), AWKWARD) as file:
        tensors = {name: file.read(name) for name in file.names}
    from kimi_jax.model import mxfp4

    for name in [n for n in tensors if ".experts.w_" in n]:
        scale = tensors.pop(name.replace(".w_", ".s_"))
        tensors[name] = mxfp4.unpack_numpy(tensors[name], scale).astype(jnp.bfloat16)
    plain = dataclasses.replace(AWKWARD, quantized=False)
    checkpoint.save_hf(tmp_path / "plain", plain.to_hf(), checkpoint.to_hf(plain, tensors))
    ids, lengths = prompts(AWKWARD, (16, 9, 1))
    got = np.asarray(kj.load(tmp_path / "plain", dtype="float64").logits(ids, lengths))
    np.testing.assert_allclose(
        got[0], np.asarray(awkward.logits(ids, lengths))[0], atol=EXACT, rtol=0
    )


def test_full_size_models_are_declared_by_shapes_alone():
    """K3: 2.78 T parameters; expert bytes and the rest as the published layout has them."""
    for config in (kj.Config.k3(), kj.Config.k3_1()):
        program = make_program(config, dtype="bfloat16", scan=True)
        declared = list(declare(program.declared))
        experts = sum(math.prod(w.shape) for w in declared if "experts" in w.path)
        rest = sum(math.prod(w.shape) for w in declared if "experts" not in w.path)
        assert experts == 92 * 896 * 17_547_264
        parameters = 92 * 896 * 33_030_144 + rest
        assert parameters == pytest.approx(2.780e12, rel=1e-3)
        names = [name for w in declared for name in w.names]
        assert sorted(names) == sorted(checkpoint.shapes(config, quantization=MXFP4))


BAD_TOKENS = [
    ([[83]], None, "token id 83 at row 0, position 0"),
    ([[1, -1]], None, "token id -1 at row 0, position 1"),
    ([[1.5]], None, "whole numbers"),
    ([[1], [2, 3]], None, "pad rows to one length"),
    ([1, 2], None, r"\[B, T\]"),
    ([[1, 2]], [3], "from 0 to 2"),
    ([[1, 2]], [1, 1], "1 whole numbers"),
]


@pytest.mark.parametrize("tokens, lengths, message", BAD_TOKENS)
def test_bad_tokens_are_refused_by_name(awkward, tokens, lengths, message):
    with pytest.raises(kj.RequestError, match=message):
        awkward.logits(tokens, lengths)


def test_a_state_that_is_full_or_of_other_rows_is_refused(awkward):
    state = awkward.new_state(1, 4)
    with pytest.raises(kj.RequestError, match="brings 5: more than the state's max_length 4"):
        awkward.prefill(state, [[1, 2, 3, 4, 5]])
    with pytest.raises(kj.RequestError, match="the state holds 1 rows, the tokens 2"):
        awkward.prefill(state, [[1], [2]])
    with pytest.raises(kj.RequestError, match="context of 4096"):
        awkward.new_state(1, 4097)


def test_options_of_loading_are_checked(folders):
    for options, message in [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": "float7"}, "dtype must be one of"),
        ({"chunk": 0}, "chunk must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            kj.load(folders("awkward"), **options)
    with pytest.raises(ValueError, match=r"kda must be one of .*got .recurent."):
        Implementations(kda="recurent")


def test_float64_without_64_bit_types_is_refused(folders):
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="jax_enable_x64"):
            kj.load(folders("awkward"), dtype="float64")
    finally:
        jax.config.update("jax_enable_x64", True)
