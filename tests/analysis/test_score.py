"""Log-probabilities of given text: against forward passes in float64, whatever the chunk, the
window, the batch and the mesh.
"""

import numpy as np
import pytest
from models import SHALLOW_MESHED, write

import kimi_jax as kj
from kimi_jax.analysis.score import _windows

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [7, 7], [5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(SHALLOW_MESHED, tmp_path_factory.mktemp("score") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return kj.load(folder, dtype="float64", chunk=16)


def by_definition(model, ids):
    """log P of every token after the first, from the logits of one forward pass, in NumPy."""
    logits = np.asarray(model.logits([ids]))[0, :-1]
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


def test_scores_equal_a_full_forward_pass(model):
    """Two chunks of one text beside texts of one chunk and of no scored token."""
    scores = model.score(TEXTS)
    for score, ids in zip(scores, TEXTS, strict=True):
        assert score.tokens == ids and np.isnan(score.logprobs[0]) and score.byte_count is None
        np.testing.assert_allclose(score.logprobs[1:], by_definition(model, ids), atol=1e-9)
    want = by_definition(model, TEXTS[0])
    assert scores[0].nats == pytest.approx(-want.sum(), abs=1e-9)
    assert scores[0].perplexity == pytest.approx(np.exp(-want.mean()), abs=1e-9)
    assert scores[2].nats == 0 and np.isnan(scores[2].perplexity)
    assert scores[0].bits_per_byte is None


@pytest.mark.parametrize(
    "data, model_ranks, place",
    [
        (2, 4, kj.Placement(keys="helix")),
        (1, 8, kj.Placement(rows="sliced")),
    ],
    ids=str,
)
def test_a_mesh_scores_as_one_device(folder, model, data, model_ranks, place):
    mesh = kj.make_mesh(data, model_ranks)
    sharded = kj.load(folder, mesh=mesh, placement=place, dtype="float64", chunk=16)
    for got, want in zip(sharded.score(TEXTS), model.score(TEXTS), strict=True):
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-9)


def test_neither_the_chunk_nor_the_walk_over_layers_changes_scores(folder, model):
    other = kj.load(folder, dtype="float64", chunk=64, walk="by_group")
    (want,), (got,) = model.score(TEXTS[0]), other.score(np.array(TEXTS[0]))
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-9)


def test_windows_overlap_by_half_and_score_every_token_once(model):
    ids = TEXTS[0]
    (score,) = model.score(ids, window=8, batch=2)
    want = [by_definition(model, ids[:8])]
    want += [by_definition(model, ids[at : at + 8])[3:] for at in (4, 8, 12)]
    np.testing.assert_allclose(score.logprobs[1:], np.concatenate(want), atol=1e-9)


@pytest.mark.parametrize("length, window", [(1, 4), (4, 4), (5, 4), (23, 6), (100, 7), (9, 2)])
def test_windows_cover_a_text(length, window):
    scored = []
    for w in _windows(0, length, window):
        assert 0 <= w.begin < w.first < w.end <= length and w.end - w.begin <= window
        assert w.begin == 0 or w.first - w.begin >= window // 2
        scored += range(w.first, w.end)
    assert scored == list(range(1, length))


def test_what_cannot_be_scored_is_one_error(model):
    with pytest.raises(
        kj.PromptError, match=r"(?s)window must be.*batch must be.*prompt 1 is empty"
    ):
        model.score([[1], []], window=1, batch=0)
    with pytest.raises(kj.PromptError, match="no tokenizer"):
        model.score("text")
    broken = model.with_weights({"norm": model.weights["norm"] * np.nan})
    with pytest.raises(FloatingPointError, match="NaN"):
        broken.score([[1, 2]])
