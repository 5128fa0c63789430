"""`kimi-jax score`: what it prints, and the texts that it refuses."""

import io
import json

import numpy as np
import pytest
from commands import assert_refused


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat and the hat and the mat " * 4, encoding="utf-8")
    return path


def test_a_text_has_its_figures_and_tokens(run, loaded, saved, model, text, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a hat"))
    words = ("score", text, "-", "--model", saved, "--window", 16)
    code, out, _ = run(*words, "--json")
    first, second = map(json.loads, out.splitlines())
    (want,) = model.score(text.read_text(), window=16)
    assert (code, first["file"], second["file"]) == (0, str(text), "-")
    assert first["token_ids"] == want.tokens and first["tokens"] == len(want.tokens) - 1
    assert first["logprobs"][0] is None
    np.testing.assert_allclose(first["logprobs"][1:], want.logprobs[1:], rtol=1e-5)
    assert first["bits_per_byte"] == pytest.approx(want.bits_per_byte, rel=1e-5)
    code, out, _ = run("score", text, "--model", saved, "--window", 16)
    assert code == 0 and f"{want.bits_per_byte:.4g}" in out and "perplexity" in out


def test_texts_that_cannot_be_scored(run, loaded, saved, text, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for words, message in (
        ((tmp_path / "none",), "none"),
        ((tmp_path / "empty",), "is empty"),
        ((tmp_path / "latin",), "is not UTF-8: byte 0xe9 at 3"),
        (("-", "-"), "one text only"),
        ((text, "--window", 1), "--window: '1' is not a whole number from 2"),
        ((text, "--window", 999), "window must be a whole number in 2..64"),
    ):
        assert_refused(run("score", *words, "--model", saved), message)
