"""Exit codes, help, and what ends a command."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from commands import assert_refused

from kimi_jax.cli import generate
from kimi_jax.cli import main as cli


def test_no_command(run):
    """Alone the command prints its help."""
    code, out, err = run()
    assert (code, err) == (0, "") and out.startswith("usage: kimi-jax") and "generate" in out
    assert_refused(run("dance"), "no such command 'dance'", "kimi-jax --help")


def test_ctrl_c(run, loaded, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_stream", interrupted)
    assert run("generate", "the cat") == (130, "", "\n")


@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--all"), ("--help",)])
def test_a_closed_pipe_is_no_error(monkeypatch, capsys, words):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed)
        code = cli.main(words)
    assert code == 0 and capsys.readouterr().err == ""


def test_unforeseen_errors_keep_their_traceback(run, loaded, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(generate, "_stream", broken)
    with pytest.raises(ZeroDivisionError):
        run("generate", "the cat")


@pytest.mark.parametrize(
    "command", ["generate", "chat", "score", "tokens", "plan", "inspect", "bench", "cache"]
)
def test_help_teaches_by_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert (
        ended.value.code == 0 and f"examples:\n  kimi-jax {command}" in out and "--devices" in out
    )


def test_help_says_what_an_option_does(capsys):
    for command, says in {
        "generate": (
            "this many times as probable as the most probable one",
            "seed of the random",
        ),
        "bench": ("type of weights and activations", "with --compile bfloat16"),
    }.items():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert all(part in out for part in says)


def test_options_are_parsed_without_jax():
    """Which reads the number of devices when it starts; and help is there at once."""
    code = (
        "import sys; from kimi_jax.cli.main import main\n"
        "for words in (['--help'], ['--version'], ['generate', '--temprature', '1']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "print({'jax', 'flax', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("\nset()\n") and "--temprature" in done.stderr
    assert f"kimi-jax {version('kimi-jax')}\n" in done.stdout


def test_module_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kimi_jax", "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    commands = {"generate", "chat", "inspect", "bench"}
    assert set(re.findall(r"^    ?(\w+) ", done.stdout, re.M)) >= commands
    assert "convert" not in done.stdout.split()
