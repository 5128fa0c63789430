"""Verified rows: what they leave, committed up to any row, is the state that a prefill leaves; the
numbers of another implementation.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from conftest import GOLDEN
from models import MESHED, SHALLOW, prompts, write
from oracles import blocks_of
from safetensors.numpy import load_file
from tolerances import EXACT, LOGITS, STATE

import kimi_jax as kj
from kimi_jax.model.implementations import Implementations
from kimi_jax.runtime.probes import compile_parts
from kimi_jax.runtime.program import make_program
from kimi_jax.speculation.verify import VerifyParts

P = kj.Placement
STARTS = np.array([6, 1, 11, 0, 9, 6, 3, 5])  # tokens that each request has seen
ROWS = np.array([4, 4, 4, 4, 3, 4, 2, 0])  # rows that each verifies
ACCEPTED = np.array([0, 1, 2, 3, 1, -1, 1, -1])
S = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(SHALLOW, tmp_path_factory.mktemp("models") / "shallow")


@functools.cache
def model_of(folder, rollback="replay"):
    return kj.load(folder, dtype="float64", implementations=Implementations(rollback=rollback))


def texts(config=SHALLOW):
    """Random ids of each request: what it has seen, then the rows to verify."""
    return prompts(config, (STARTS + ROWS).tolist(), seed=5)[0]


def begun(model):
    """A state that has seen the beginnings of the texts."""
    _, state = model.prefill(model.new_state(len(STARTS), S), texts(), STARTS)
    return state


def rows_of():
    """The ids of the rows to verify [B, T]."""
    ids = np.zeros((len(STARTS), ROWS.max()), np.int32)
    for row, text, start, count in zip(ids, texts(), STARTS, ROWS, strict=True):
        row[:count] = text[start : start + count]
    return ids


def arrays_of(state):
    """The arrays of a state by name on the host; what lies beyond a length is zero."""
    arrays = {"length": np.asarray(state.length), "hidden": np.asarray(state.hidden)}
    for (stack, layer, name), array in state.named().items():
        array = np.array(array)
        if name in ("latents", "index_keys"):
            beyond = np.arange(array.shape[2]) >= arrays["length"][:, None]
            array[:, beyond] = 0
        arrays[f"{name} of {stack}, {layer}"] = array
    return arrays


def close(state, wanted, rows=slice(None), atol=EXACT):
    found, wanted = arrays_of(state), arrays_of(wanted)
    for key, array in found.items():
        at = rows if key in ("length", "hidden") else (slice(None), rows)
        np.testing.assert_allclose(array[at], wanted[key][at], atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("rollback", ["replay", "checkpoints"])
def test_a_commit_of_any_row_equals_a_prefill_of_what_was_committed(folder, rollback):
    """In one batch: every number of accepted drafts, none, rows of another number, an empty state.
    KDA with a dense MLP, and MLA that selects 9 of up to 15 keys.
    """
    model = model_of(folder, rollback)
    verified = model.verify(begun(model), rows_of(), ROWS)
    committed = model.commit(verified, ACCEPTED)
    ids, state = texts(), model.new_state(len(STARTS), S)
    _, wanted = model.prefill(state, ids, STARTS + ACCEPTED + 1)
    close(committed, wanted)
    # Each row's logits are those after a prompt that ends there.
    logits = np.asarray(model.logits(ids))
    for row, start, count in zip(range(len(ids)), STARTS, ROWS, strict=True):
        found = np.asarray(verified.logits)[row, :count]
        np.testing.assert_allclose(found, logits[row, start : start + count], atol=EXACT, rtol=0)


def test_what_is_not_committed_leaves_no_trace(folder):
    """Bit for bit: a request that commits nothing, and the state that a verify step returns."""
    model = model_of(folder)
    before = arrays_of(begun(model))
    verified = model.verify(begun(model), rows_of(), ROWS)
    jax.tree.map(np.testing.assert_array_equal, arrays_of(verified.state), before)
    after = arrays_of(model.commit(verified, np.full(len(STARTS), -1)))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_rejected_rows_are_irrelevant_to_the_next_round(folder):
    """But for rounding: which rows meet in an expert's product depends on all of them."""
    model, ids, states = model_of(folder), rows_of(), []
    for change in (0, 7):
        rows = ids.copy()
        for row, accepted in zip(rows, ACCEPTED, strict=True):
            row[accepted + 1 :] = (row[accepted + 1 :] + change) % SHALLOW.vocab
        states.append(model.commit(model.verify(begun(model), rows, ROWS), ACCEPTED))
    close(*states)
    logits = [np.asarray(model.verify(state, ids, np.minimum(ROWS, 2)).logits) for state in states]
    of_rows = np.arange(ROWS.max()) < np.minimum(ROWS, 2)[:, None]
    np.testing.assert_allclose(*(x[of_rows] for x in logits), atol=EXACT, rtol=0)


def test_wrong_rows_layers_and_numbers_are_refused(folder):
    model = model_of(folder)
    state, refused = begun(model), functools.partial(pytest.raises, kj.RequestError)
    with refused(match="layers must be ascending numbers in 0..0, got .1.\nstream must be one of"):
        model.verify(state, rows_of(), ROWS, layers=[1], stream="prefix")
    with refused(match="layers must be ascending"):
        model.verify(state, rows_of(), ROWS, layers=[0, 0])
    with refused(match="row 2 has seen 11 tokens and brings 22: more than"):
        model.verify(state, np.zeros((8, 22), np.int32))
    verified = model.verify(state, rows_of(), ROWS)
    for wrong in (ROWS, np.full(8, -2), [0] * 7, np.zeros(8)):
        with refused(match="accepted must be 8 whole numbers, each from -1 .* less one, .3, 3"):
            model.commit(verified, wrong)
    with refused(match="consumed"):
        model.verify(state, rows_of(), ROWS)
    model.commit(verified, ACCEPTED)
    with refused(match="consumed"):
        model.commit(verified, ACCEPTED)


@pytest.fixture(scope="module")
def tiny(golden):
    """k3-tiny, whose taps and rounds are known."""
    folder, _ = golden("k3-tiny")
    return kj.load(folder, dtype="float64", walk="scanned", chunk=16)


def test_a_round_equals_the_golden_one(tiny):
    """Logits of all rows, taps of those that are committed, and the state after them."""
    wanted = load_file(GOLDEN / "dspark-tiny" / "verify.safetensors")
    _, state = tiny.prefill(tiny.new_state(1, 64), [wanted["committed_ids"].tolist()])
    verified = tiny.verify(state, [wanted["verify_ids"].tolist()], layers=[1, 3, 6])
    logits, taps = np.asarray(verified.logits)[0], np.asarray(verified.taps)[0]
    near = functools.partial(np.testing.assert_allclose, rtol=0)
    near(logits, wanted["verify_logits_f64"], atol=LOGITS["float64"])
    (accepted,) = wanted["accepted"]
    near(taps[: accepted + 1], wanted["new_taps_f64"], atol=EXACT)
    drafts = wanted["verify_ids"][1:].tolist()
    assert logits[:accepted].argmax(-1).tolist() == drafts[:accepted]
    assert logits[accepted].argmax() == wanted["bonus"] != drafts[accepted]
    state, compared = tiny.commit(verified, [accepted]), 0
    for (stack, j, name), array in state.named().items():
        part = "kda_state" if name == "memory" else f"{name[-1]}_conv_tail"
        for g, group in enumerate(np.asarray(array)):
            key = f"after.layers.{tiny.program.stacks[stack].layer(j, g):02d}.{part}"
            if key in wanted:
                near(group[0], wanted[key], atol=STATE["float64"])
                compared += 1
    assert compared == 8


def test_taps_of_a_prompt_equal_the_golden_ones(tiny):
    """The mixture that the next layer reads, of a prompt in two chunks."""
    wanted = load_file(GOLDEN / "dspark-tiny-attnres" / "taps.safetensors")
    found = tiny.hidden([wanted["ids"].tolist()], [2, 3, 7], stream="mixture")
    taps = np.moveaxis(np.asarray(found)[:, 0], 0, 1).reshape(len(wanted["ids"]), -1)
    np.testing.assert_allclose(taps, wanted["taps_f64"], atol=EXACT, rtol=0)


# Every kind of placement, and every walk over the layers

BOTH, ALL = ("data", "model"), ("heads", "experts", "vocab", "dense", "shared")
# Two groups of KDA and MLA, both with experts; each group starts a residual block.
GROUPS = dataclasses.replace(MESHED, layers=4, mla_layers=(1, 3), dense_layers=0)
ON_GPUS = Implementations(
    kda="transitions",
    mla="static",
    moe="slots",
    blocks=blocks_of("gpu", dense_bytes=2**10, select_bytes=2**12, narrowest_slots=8),
)
PLACES = [
    ("by_group", (1, 4), P(), None, "mixture"),
    (
        "scanned",
        (2, 4),
        P(keys="helix", helix_block=2, exchange="values", expert_axes=BOTH),
        None,
        "sum",
    ),
    ("scanned", (1, 4), P(keys="helix", helix_block=2, rows="sliced"), ON_GPUS, "mixture"),
    ("by_group", (2, 2), P(rows="sliced", experts="local", latent="sharded"), ON_GPUS, "sum"),
    (
        "by_group",
        (1, 3),
        P(pad=ALL, keys="helix", helix_block=4),
        Implementations(kda="recurrent", moe="dense", rollback="checkpoints"),
        "sum",
    ),
]


def rounds(model, stream):
    """Three rounds of three requests, whose rows straddle the blocks of striped keys: logits, taps
    and the state on one device.
    """
    ids, _ = prompts(GROUPS, (4, 4, 4))
    state, results = model.new_state(3, 16), []
    for lengths, accepted in (
        ((4, 3, 1), (3, 2, 0)),
        ((4, 4, 4), (1, -1, 3)),
        ((3, 4, 0), (2, 3, -1)),
    ):
        verified = model.verify(state, ids, lengths, layers=[0, 2], stream=stream)
        is_row = np.arange(4) < np.array(lengths)[:, None]
        results += [np.asarray(x)[is_row] for x in (verified.logits, verified.taps)]
        state = model.commit(verified, accepted)
    return results, kj.move(state, P(), kj.make_mesh(1, 1), scan=False)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = write(GROUPS, tmp_path_factory.mktemp("models") / "groups")
    model = kj.load(folder, dtype="float64", walk="scanned")
    return folder, functools.cache(functools.partial(rounds, model))


@pytest.mark.parametrize(
    "walk, mesh, place, implementations, stream",
    PLACES,
    ids=lambda x: str(x).partition("(keys")[0][:9],
)
def test_every_placement_and_walk_equals_one_device(
    one_device, walk, mesh, place, implementations, stream
):
    folder, get = one_device
    options = dict(dtype="float64", walk=walk, implementations=implementations)
    model = kj.load(folder, kj.make_mesh(*mesh), place, **options)
    (found, state), (wanted, wanted_state) = rounds(model, stream), get(stream)
    for array, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, right, atol=EXACT, rtol=0)
    close(state, wanted_state)


def test_hidden_states_of_prompts_by_group_equal_scanned_ones(one_device):
    ids, lengths = prompts(GROUPS, (5, 3))
    walks = [kj.load(one_device[0], dtype="float64", walk=walk) for walk in ("scanned", "by_group")]
    found = [
        np.asarray(m.hidden(ids, [0, 3], lengths, stream="mixture"))[..., :3, :] for m in walks
    ]
    np.testing.assert_allclose(*found, atol=EXACT, rtol=0)


def test_the_programs_of_a_verify_step_compile_from_shapes_alone():
    program = make_program(GROUPS, kj.make_mesh(1, 2), dtype="float32", walk="by_group")
    parts, _ = compile_parts(program, 2, 4, 32, by_group=VerifyParts(program, None))
    names = [part.name for part in parts]
    assert (names[0], names[-3:]) == ("begin", ["end", "commit", "head"])
    memory = parts[-2].compiled.memory_analysis()
    state = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(program.state_shapes(2, 32))
    )
    assert memory.alias_size_in_bytes == state  # a commit changes the state in place
