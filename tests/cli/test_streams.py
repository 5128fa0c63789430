"""Whatever the standard streams, the environment and the terminal are, a command runs or says why
it cannot.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import assert_refused

from kimi_jax.cli import main as cli
from kimi_jax.cli import output


def stream(content=b"", encoding="utf-8"):
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors="strict")


@pytest.fixture
def encoded(monkeypatch):
    """Runs a command whose streams have an encoding: exit code, standard output and error."""

    def run(*words, encoding="ascii", given=b""):
        streams = {"stdin": given, "stdout": b"", "stderr": b""}
        files = {name: stream(content, encoding) for name, content in streams.items()}
        with monkeypatch.context() as patch:
            for name, file in files.items():
                patch.setattr(sys, name, file)
            try:
                code = cli.main([str(word) for word in words])
            except SystemExit as ended:
                code = ended.code
            for name in ("stdout", "stderr"):
                files[name].flush()
        written = [files[name].buffer.getvalue().decode(encoding) for name in ("stdout", "stderr")]
        return code, *written

    return run


# Encodings.


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_characters_that_the_terminal_lacks_are_replaced(encoded, loaded, encoding):
    code, out, err = encoded("generate", "a—\u4e2d", "--max-new-tokens", 2, encoding=encoding)
    assert code == 0 and out.startswith("a??") and "new tokens" in err
    code, out, _ = encoded("generate", "a\u4e2d", "b", "--logprobs", 2, "--max-new-tokens", 2)
    assert code == 0 and out.startswith("a?") and "log-probabilities" in out


def test_json_is_complete_in_any_encoding(encoded, loaded):
    words = ("generate", "é\u4e2d", "--json", "--max-new-tokens", 2)
    code, out, _ = encoded(*words)
    assert code == 0 and out.startswith('{"prompt": "\\u00e9\\u4e2d"')
    code, out, _ = encoded(*words, encoding="utf-8")
    assert code == 0 and out.startswith('{"prompt": "é\u4e2d"')


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        *((command, "--help") for command in ("generate", "chat", "plan", "inspect", "bench")),
        ("inspect",),
        ("inspect", "--all"),
        ("plan", "k3"),
        ("plan", "k3", "--hbm", "80", "--json"),
    ],
    ids=" ".join,
)
def test_every_command_writes_to_an_ascii_terminal(encoded, words):
    code, out, err = encoded(*words)
    assert code == 0 and len(out) > 100 and err == ""


def test_error_messages_are_escaped(encoded):
    code, out, err = encoded("inspect", "/no/\u4e2d\x1b[2J")
    assert (code, out) == (2, "")
    assert err == "kimi-jax: error: /no/\\u4e2d\\x1b[2J: no such folder\n"


def test_tables_draw_with_characters_of_the_terminal(encoded):
    assert "━" not in encoded("inspect")[1] and "─" in encoded("inspect", encoding="utf-8")[1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_standard_input_is_utf_8(encoded, loaded, encoding):
    words = ("generate", "-", "--max-new-tokens", 2, "--json")
    code, out, _ = encoded(*words, encoding=encoding, given="é\n".encode())
    assert code == 0 and out.startswith(('{"prompt": "é"', '{"prompt": "\\u00e9"'))
    for given, said in ((b"caf\xff", "byte 0xff at 3"), (b"\xc3", "byte 0xc3 at 0")):
        code, out, err = encoded(*words, encoding=encoding, given=given)
        assert (code, out) == (2, "") and f"standard input is not UTF-8: {said}" in err


def test_arguments_that_the_locale_did_not_decode_are_utf_8(run, loaded):
    """In the C locale Python hands bytes over as halves of surrogates."""
    words = ("--json", "--max-new-tokens", 1)
    code, out, _ = run("generate", os.fsencode("é").decode("ascii", "surrogateescape"), *words)
    assert code == 0 and out.startswith('{"prompt": "é"')
    for text, shown in (("\udcff", "\\udcff"), ("\ud800", "\\ud800"), ("a\udcc3", "a\\udcc3")):
        assert_refused(run("generate", text), f"PROMPT: '{shown}' is not UTF-8")
        assert_refused(run("generate", "a", "--stop", text), f"--stop: '{shown}' is not UTF-8")
        assert_refused(run("chat", "--system", text), f"--system: '{shown}' is not UTF-8")


def test_a_nul_is_a_character_of_a_prompt_and_not_of_a_path(run, loaded, tmp_path):
    assert run("generate", "a\0b", "--json", "--max-new-tokens", 1)[0] == 0
    assert_refused(run("generate", "a", "--model", "a\0b"), "no such folder")
    assert_refused(run("inspect", "a\0b"), "no such folder")
    assert_refused(run("plan", "a\0b"), "neither k3, k3.1 nor")
    assert_refused(run("bench", "--profile", f"{tmp_path}/a\0b"), "not a name")


# Streams that are closed, or cannot be read.


@pytest.mark.parametrize("words", [("generate", "-"), ("chat",)])
def test_a_closed_standard_input_is_refused(run, monkeypatch, words):
    monkeypatch.setattr(sys, "stdin", None)
    assert_refused(run(*words), "standard input is closed")


def test_a_standard_input_that_cannot_be_read_is_refused(run, monkeypatch, tmp_path):
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert_refused(run("generate", "-"), "standard input cannot be read: not readable")


def test_a_standard_input_without_end_is_refused(run, monkeypatch):
    monkeypatch.setattr(output, "_LONGEST", 1000)
    monkeypatch.setattr(sys, "stdin", stream(b"a" * 2000))
    assert_refused(run("generate", "-"), "standard input holds more than 1,000 characters")


def shell(command, **environment):
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kimi_jax {command}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_closed_descriptors():
    done = shell("inspect <&- 2>&-")
    assert done.returncode == 0 and "parameters" in done.stdout
    done = shell("plan <&- >&-")
    assert done.returncode == 2 and done.stderr.endswith(
        "error: standard output is closed: there is nowhere to write\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_an_error(monkeypatch, capsys):
    with open("/dev/full", "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        code = cli.main(["inspect"])
    said = "kimi-jax: error: output cannot be written: No space left on device\n"
    assert (code, capsys.readouterr().err) == (1, said)


# Sizes of the terminal.


@pytest.mark.parametrize("columns", ["0", "1", "-3", "²", "x", "", "99999999999", None])
def test_any_width_of_the_terminal(run, monkeypatch, columns):
    with monkeypatch.context() as patch:  # only for the command: pytest reads the width too
        for name in ("COLUMNS", "LINES"):
            patch.setenv(name, columns or "") if columns is not None else patch.delenv(
                name, raising=False
            )
        patch.delenv("TERM", raising=False)
        patch.setenv("FORCE_COLOR", "1")  # a terminal, as far as tables know
        results = [run(*words) for words in (("inspect",), ("plan", "k3"))]
    for code, out, err in results:
        assert code == 0 and err == "" and len(out) > 300
        assert max(map(len, out.splitlines())) < 600
