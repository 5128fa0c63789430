"""`kimi-jax tokens`: ids of a text, and back."""

import pytest
from commands import assert_refused

from kimi_jax.cli.options import SHIPPED
from kimi_jax.text.tokenizer import Tokenizer

TEXT = "The Queen said, “Off with her head!”\n"


def test_ids_and_back(run, tmp_path):
    path, ids = tmp_path / "letter.txt", tmp_path / "ids.txt"
    path.write_text(TEXT, encoding="utf-8")
    expected = Tokenizer.from_folder(SHIPPED).encode(TEXT)
    code, out, _ = run("tokens", path)
    assert code == 0 and out == ",".join(map(str, expected)) + "\n"
    assert run("tokens", path, "--count") == (0, f"{len(expected)}\n", "")
    ids.write_text(out)
    assert run("tokens", ids, "--decode") == (0, TEXT, "")
    code, out, _ = run("tokens", path, "--pieces")
    assert code == 0 and all(str(token) in out for token in expected)


@pytest.mark.parametrize(
    "words, content, message",
    [
        (("--count", "--pieces"), "a", "one at a time"),
        (("--decode",), "5,x", "x is not a token id below"),
        (("--decode",), "99999", "99999 is not a token id below"),
        (("--model", "nowhere"), "a", "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_read_is_refused(run, tmp_path, words, content, message):
    path = tmp_path / "letter.txt"
    path.write_text(content)
    assert_refused(run("tokens", path, *words), message)
    path.write_bytes(b"a\xff")
    assert_refused(run("tokens", path), "is not UTF-8: byte 0xff at 1")
