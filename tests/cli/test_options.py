"""Values of options: each is read as it is written, or refused before a model is loaded."""

import re

import pytest
from commands import assert_refused
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kimi_jax as kj
from kimi_jax.cli import main as cli
from kimi_jax.errors import CommandError

HUGE = "1" + "0" * 400
WHOLE = ["max-new-tokens", "min-new-tokens", "seed", "top-k", "slots", "logprobs", "chunk"]
NUMBERS = ["temperature", "top-p", "min-p", "repetition-penalty"]


@pytest.fixture
def refused(run, monkeypatch):
    """Asserts that a command is refused without loading a model."""
    monkeypatch.setattr(kj, "load", lambda *a, **k: pytest.fail("loaded"))

    def check(words, *parts):
        assert_refused(run(*words), *parts)

    return check


@pytest.mark.parametrize("option", [*WHOLE, "devices", "processes", "process-id"])
@pytest.mark.parametrize(
    "text", ["-1", HUGE, "9" * 5000, "1e3", "1e400", "１２", "²", "1_0", " 1", "1.0", "", "x", "∞"]
)
def test_whole_numbers(refused, option, text):
    refused(("generate", "a", f"--{option}", text), f"--{option}: ", "is not a whole number from")


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize(
    "text", ["-1", "1e400", "-1e400", "nan", "１.５", "1_0", " 1", "", "x", "1,5"]
)
def test_numbers(refused, option, text):
    refused(("generate", "a", f"--{option}", text))


@pytest.mark.parametrize("option", ["batch", "users", "context"])
def test_sizes_of_a_plan(refused, option):
    for text in ("0", "-1", HUGE, "１２", "2.5"):
        refused(("plan", f"--{option}", text), f"--{option}", "is not a whole number from 1")


@given(text=st.text(max_size=8) | st.integers().map(str))
@example(text="--")
@settings(max_examples=300)
def test_a_whole_number_is_read_as_it_is_written_or_refused(text):
    if re.fullmatch("[+-]?[0-9]+", text) and 0 <= int(text) < 2**31:
        options = cli.make_parser().parse_args(["generate", "a", f"--seed={text}"])
        assert options.seed == int(text)
    else:
        with pytest.raises(CommandError):
            cli.make_parser().parse_args(["generate", "a", f"--seed={text}"])


@pytest.mark.parametrize(
    "words, message",
    [
        (("generate", "a", "--seed", 1, "--seed", 1), "--seed: is given twice"),
        (("generate", "a", "--json", "--json"), "--json: is given twice"),
        (("generate", "a", "--model", "x", "--model=y"), "--model: is given twice"),
        (("generate", "a", "--mesh", "1x1", "--mesh", "1x2"), "--mesh: is given twice"),
        (("chat", "--thinking", "--no-thinking"), "--thinking/--no-thinking: is given twice"),
        (("chat", "--system", "a", "--system", "b"), "--system: is given twice"),
        (("plan", "--hbm", "1", "--hbm", "2"), "--hbm: is given twice"),
        (("inspect", "--devices", 2, "--devices", 2), "--devices: is given twice"),
    ],
)
def test_an_option_is_given_once(refused, words, message):
    refused(words, message)


def test_options_that_may_be_repeated():
    words = ["generate", "a", "b", "--stop", "x", "--stop", "y"]
    words += ["--place", "keys=helix", "--place", "pad=heads,vocab", "--place", "ring_pieces=2"]
    options = cli.make_parser().parse_args(words)
    assert options.stop == ["x", "y"] and options.place == [
        ("keys", "helix"), ("pad", ("heads", "vocab")), ("ring_pieces", 2),
    ]  # fmt: skip
    assert options.prompts == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "x", "8", "2x", "x4", "2x4x1", "0x1", "-1x1", "１x2", f"{HUGE}x1", "1 x 2", "1x2.0"],
)
def test_meshes(refused, text):
    refused(("generate", "a", f"--mesh={text}"), "--mesh: ")


@pytest.mark.parametrize("text", ["2147483647x2147483647", "1x2147483647"])
def test_meshes_larger_than_the_machine(refused, text):
    refused(("generate", "a", "--mesh", text), "devices, JAX has 8")


@pytest.mark.parametrize(
    "text, message",
    [
        ("experts", "is not of the form NAME=VALUE"),
        ("=x", "no such option"),
        ("\x1b[2J=x", "no such option"),
        ("experts=", "experts"),
        ("experts=\x1b[2J", "experts"),
        ("keys=HELIX", "keys"),
        ("pad=heads,wheels", "wheels"),
        ("pad=\ud800", "pad"),
        ("expert_axes=model,model,rows", "rows"),
        ("helix_block=0", "helix_block"),
        ("helix_block=-1", "takes a whole number, got '-1'"),
        ("helix_block=１２", "takes a whole number, got '１２'"),
        ("helix_block=1e3", "takes a whole number, got '1e3'"),
        (f"helix_block={'9' * 5000}", "takes a whole number"),
        ("sliced_from=", "takes a whole number, got ''"),
        ("ring_pieces=0", "ring_pieces"),
        ("key=helix", "did you mean keys?"),
        ("keys=hellix", "keys takes whole|helix, got 'hellix'; did you mean helix?"),
        ("pad=head", "did you mean heads?"),
        ("expert_axes=data", "expert_axes takes model|data,model, got 'data'"),
    ],
)
def test_placements(refused, text, message):
    for words in (("generate", "a"), ("plan", "k3"), ("bench",)):
        refused((*words, f"--place={text}"), message)


@pytest.mark.parametrize("text", [f"helix_block={HUGE}", f"sliced_from={HUGE}"])
def test_placements_with_numbers_beyond_any_size(run, text):
    """Runs or is refused in words."""
    code, _, err = run("plan", "k3", "--mesh", "1x2", "--place=keys=helix", f"--place={text}")
    assert code in (0, 2) and "Traceback" not in err


@pytest.mark.parametrize(
    "address", ["", "here", ":1", "h:", "h:0", "h:65536", "h:１", "a b:1", "a\0:1", "h:1:2", "é:1"]
)
def test_coordinators(refused, address):
    words = ("generate", "a", f"--coordinator={address}", "--processes", 2, "--process-id", 0)
    refused(words, "--coordinator takes HOST:PORT, got ")


@pytest.mark.parametrize("text", ["", "0", "-1", "1e400", "nan", "80,", "８０", "80 GB", "1_0"])
def test_device_memories(refused, text):
    refused(("plan", "k3", f"--hbm={text}"), "--hbm: ")


@pytest.mark.parametrize(
    "words, message",
    [
        (("1,600", "--tokens"), "prompt 0: 600 is not a token id below the vocabulary of 512"),
        (
            ("1", f"7,{HUGE}", "--tokens"),
            "prompt 1: a whole number of 1,329 bits is not a token id",
        ),
        (("a " * 70_000,), "the context of 65536 leaves no room for a reply"),
        (("", "a"), "prompt 0 is empty"),
        (("-",), "standard input"),
    ],
    ids=["id", "huge id", "long", "empty", "closed"],
)
def test_prompts_are_checked_before_weights_are_read(refused, monkeypatch, words, message):
    monkeypatch.setattr("sys.stdin", None)
    refused(("generate", *words), message)


def test_more_tokens_at_least_than_at_most(refused):
    words = ("generate", "a", "--min-new-tokens", 9, "--max-new-tokens", 8)
    refused(words, "--min-new-tokens 9 is more than --max-new-tokens 8")


@pytest.mark.parametrize(
    "words, message, program",
    [
        (("gen",), "no such command 'gen'", "kimi-jax"),
        (("generate", "a", "--temprature", 1), "--temprature 1; did you mean --temperature?", 0),
        (("generate", "a", "--max-tokens=3"), "--max-tokens=3; it is --max-new-tokens here", 0),
        (("chat", "a", "b"), "unrecognized arguments: b", 0),
        (("plan", "--data", 8), "--data; it is --mesh DxM", 0),
        (("generate", "a", "--dtype", "bf16"), "'bf16', there are float32, bfloat16, float64", 0),
    ],
)
def test_near_misses_are_named_with_the_help_that_explains_them(refused, words, message, program):
    refused(words, message, f"(see {program or f'kimi-jax {words[0]}'} --help)")


@pytest.mark.parametrize("words", [("plan", "k3", "--model", 8), ("plan", "--model", 8)])
def test_model_is_a_folder_and_ranks_are_a_mesh(refused, words):
    refused(words, "ranks are --mesh 1x8")
    refused(("chat", "x", "--model", "y"), "the model is given twice, 'x' and --model")
    refused(("inspect", "--model", "nowhere"), "nowhere: no such folder")


@pytest.mark.parametrize(
    "text, stop", [(r"\n\n", "\n\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\d\r", "\\d\r")]
)
def test_stop_strings_name_line_breaks(text, stop):
    assert cli.make_parser().parse_args(["generate", "a", "--stop", text]).stop == [stop]


@pytest.mark.parametrize(
    "words",
    [
        ("generate",),
        ("plan", "k3", "--model", "k3"),
        ("tokens", "a", "--count", "--pieces"),
        ("bench", "--rows", "--reduce"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_found_once_options_are_parsed_names_the_help_too(refused, words):
    refused(words, f"(see kimi-jax {words[0]} --help)")


def test_what_the_model_refuses_names_the_help_too(run, loaded):
    assert_refused(run("generate", "a", "--top-p", 3), "top_p must lie in 0..1", "generate --help)")
