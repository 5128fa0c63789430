"""Rows of images in the decoder: the golden prompts, and rows that are embeddings of ids, which
give the logits of these ids under every placement and in pieces of any length.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from models import SHALLOW_MESHED, prompts, write
from tolerances import EXACT, LOGITS
from visions import entry

import kimi_jax as kj
from kimi_jax.runtime.images.rows import PromptRows

PLACEHOLDER = 7
NAMES = ("two", "one", "again")


# The golden prompts.


@pytest.fixture(scope="module", params=["float64", "float32"])
def golden_run(golden, request):
    folder, expected = golden("vision")
    return kj.load(folder, dtype=request.param), expected, request.param


def test_prompts_with_images_equal_the_golden_ones(golden_run):
    """Logits of every position, and of 8 greedy tokens after it; each is the best of its logits."""
    model, expected, dtype = golden_run
    rows, ids = [], []
    for name in NAMES:
        prompt = expected[f"{name}.expanded_ids"]
        images = [entry(expected, f"img{i}") for i in expected[f"{name}.images"]]
        encoded = np.concatenate(model.encode_images(images))
        rows.append(PromptRows(np.flatnonzero(prompt == PLACEHOLDER), encoded))
        ids.append(np.concatenate([prompt, expected[f"{name}.cont_ids"]]))
    lengths = np.array([len(prompt) for prompt in ids])
    padded = np.array([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in ids])
    logits = np.asarray(model.logits(padded, lengths, rows=rows))
    for name, got, n in zip(NAMES, logits, lengths, strict=True):
        prompt, reply = got[: n - 8], got[n - 9 : n - 1]
        tolerance = {"atol": LOGITS[dtype], "rtol": 0}
        np.testing.assert_allclose(prompt, expected[f"{name}.logits_f64"], **tolerance)
        np.testing.assert_allclose(reply, expected[f"{name}.cont_logits_f64"], **tolerance)
        np.testing.assert_array_equal(reply.argmax(1), expected[f"{name}.cont_ids"])


def test_rows_are_checked_before_anything_runs(golden_run):
    model, _, dtype = golden_run
    if dtype == "float32":
        return
    D = model.config.hidden
    rows = lambda at, n, width=D: PromptRows(np.array(at), np.zeros((n, width)))  # noqa: E731
    bad = [rows([0, 1], 3), rows([3], 1), rows([1, 1], 2), rows([0], 1, D + 1), rows([-1], 1)]
    with pytest.raises(kj.RequestError) as error:
        model.logits(np.ones((5, 3), int), rows=bad)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"rows of prompt {i}" for i in range(5)]
    with pytest.raises(kj.RequestError, match="given for 5 prompts, tokens for 1"):
        model.logits(np.ones((1, 3), int), rows=bad)


def test_a_tower_is_skipped_where_it_is_not_wanted(golden):
    model = kj.load(golden("vision")[0], vision=False)
    assert model.encoder is None
    with pytest.raises(kj.RequestError, match="no vision tower"):
        model.encode_images([])


def test_the_epsilon_of_the_tower_is_a_setting(golden):
    """2^-7 moves rows by 0.03, as the notes of the golden numbers say."""
    folder, expected = golden("vision")
    model = kj.load(folder, vision_norm_eps=2.0**-7)
    images = [entry(expected, f"img{i}") for i in range(5)]
    moved = [
        np.abs(rows - expected[f"img{i}.projected_f64"]).max()
        for i, rows in enumerate(model.encode_images(images))
    ]
    assert max(moved) == pytest.approx(0.0304, abs=1e-4)
    with pytest.raises(kj.ConfigError, match="vision_norm_eps"):
        kj.load(folder, vision_norm_eps=-1.0)
    with pytest.raises(ValueError, match="no vision tower is loaded"):
        kj.load(folder, vision=False, vision_norm_eps=1e-5)


def test_a_folder_without_a_complete_tower_is_refused_unless_it_is_skipped(golden, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(golden("vision")[0], folder)
    file = json.loads((folder / "config.json").read_text())
    file["vision_config"]["pos_emb_interpolation_mode"] = "bicubic"
    (folder / "config.json").write_text(json.dumps(file))
    with pytest.raises(kj.ConfigError, match=r"pos_emb_interpolation_mode.*bicubic"):
        kj.load(folder)
    with pytest.raises(kj.ConfigError, match="vision_config: missing"):
        kj.load(kj.SHIPPED, vision=True)
    with pytest.raises(kj.ConfigError, match="vision must be"):
        kj.load(folder, vision="no")  # pyright: ignore[reportArgumentType]
    assert kj.load(folder, vision=False).encoder is None
    assert kj.load(golden("k31-tiny")[0]).encoder is None


# Rows that are embeddings.

N = 6  # tokens of a prompt
# Rows are given for all of a prompt; for its first tokens, its last, some inside.
GIVEN = ((0, N), (0, 2), (3, N), (2, 4))
PLACES = {
    "one device": (1, 1, {}, None),
    "by group": (1, 1, {}, "by_group"),
    "model 8": (1, 8, {}, None),
    "data 2 x model 4": (2, 4, {}, None),
    "helix and sliced rows": (1, 8, {"keys": "helix", "helix_block": 1, "rows": "sliced"}, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(SHALLOW_MESHED, tmp_path_factory.mktemp("images") / "meshed")


@pytest.fixture(scope="module")
def of_ids(folder):
    """Ids of four prompts, the rows that their embeddings are, and the logits of these ids."""
    model = kj.load(folder, dtype="float64")
    ids, _ = prompts(SHALLOW_MESHED, [N] * len(GIVEN), seed=5)
    table, spans = np.asarray(model.weights["embed"]), [slice(*span) for span in GIVEN]
    rows = [
        PromptRows(np.arange(span.start, span.stop), table[own[span]])
        for span, own in zip(spans, ids, strict=True)
    ]
    return ids, rows, np.asarray(model.logits(ids))


@pytest.mark.parametrize("place", PLACES)
def test_rows_equal_to_embeddings_give_the_logits_of_ids(folder, of_ids, place):
    """In one piece; in n - 1 and then one, which may be the last row of an image; one by one."""
    ids, rows, logits = of_ids
    data, ranks, options, walk = PLACES[place]
    other_ids = ids.copy()  # no id can be looked up where a row is given
    for own, given in zip(other_ids, rows, strict=True):
        own[given.positions] = (own[given.positions] + 1) % SHALLOW_MESHED.vocab
    mesh, placement = kj.make_mesh(data, ranks), kj.Placement(**options)
    model = kj.load(folder, mesh, placement, "float64", walk=walk, chunk=N)
    for chunk, ends in ((N, (N,)), (N, (N - 1, N)), (1, (N,))):
        runner, start = dataclasses.replace(model, chunk=chunk), 0
        state = runner.new_state(len(ids), 2 * N)
        for end in ends:
            given = [own.piece(start, end) for own in rows]
            out, state = runner.prefill(state, other_ids[:, start:end], rows=given)
            np.testing.assert_allclose(out, logits[:, end - 1], atol=EXACT, rtol=0)
            start = end


def test_without_rows_the_program_of_ids_runs(folder, of_ids):
    ids, _, logits = of_ids
    model = kj.load(folder, dtype="float64")
    nothing = [PromptRows(np.arange(0), np.zeros((0, model.config.hidden))), None, None, None]
    np.testing.assert_array_equal(model.logits(ids, rows=nothing), logits)
    assert model.program.jitted_logits.program_count == 1
