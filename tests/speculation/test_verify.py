"""Verified rows: what they leave, committed up to any row, is the state that a prefill leaves; the
numbers of another implementation.
"""

import functools

import jax
import numpy as np
import pytest
from conftest import GOLDEN
from models import SHALLOW, prompts, write
from safetensors.numpy import load_file
from tolerances import EXACT, LOGITS, STATE

import kimi_jax as kj
from kimi_jax.model.implementations import Implementations

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
