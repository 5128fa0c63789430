"""`kimi-jax chat`: turns typed and piped in, commands, Ctrl-C, what a terminal shows."""

import io
import json
import re
import subprocess
import sys

import pytest
from chats import RANKS, TOKENIZER, WEATHER, Script, call_of, ids, write_model
from conftest import ROOT

import kimi_jax as kj
from kimi_jax.cli import main as cli
from kimi_jax.cli.chat.screen import Words
from kimi_jax.cli.chat.terminal import Conversation
from kimi_jax.text.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return kj.load(folder)


class Typed(io.StringIO):
    """Lines typed at a terminal; a line ^C is Ctrl-C."""

    def isatty(self):
        return True

    def readline(self, *size):
        line = super().readline(*size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


ANSWERS = [
    f"hm {i}<|close|>think<|sep|><|open|>response<|sep|>answer {i}<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
    for i in range(4)
]


@pytest.fixture
def talk(model, folder, monkeypatch, capsys):
    """Runs `kimi-jax chat` on lines: exit code, standard output, standard error."""

    def run(lines, *words, replies=ANSWERS, typed=False):
        run.script = Script(model, monkeypatch, *replies)
        monkeypatch.setattr(kj, "load", lambda path, **options: model)
        monkeypatch.setattr(Conversation, "_warm_up", lambda self: None)
        monkeypatch.setattr("sys.stdin", (Typed if typed else io.StringIO)(lines))
        code = cli.main(["chat", str(folder), *words])
        return code, *capsys.readouterr()

    return run


def asked(talk):
    """The prompts of the latest conversation."""
    return [TOKENIZER.decode(prompt) for prompt in talk.script.prompts]


def turns(talk):
    """What was asked, each time: the texts of all messages."""
    text = r"(?:message role=\"\w+\"|response)<\|sep\|>([^<]+)"
    return [re.findall(text, prompt) for prompt in asked(talk)]


def test_each_piped_line_is_a_turn(talk):
    code, out, err = talk("one\ntwo", "--system", "Be brief.")
    assert (code, out) == (0, "answer 0\nanswer 1\n")
    assert err == "hm 0\nhm 1\n"
    assert turns(talk) == [["Be brief.", "one"], ["Be brief.", "one", "answer 0", "two"]]
    assert "<|open|>think<|sep|>hm 0<|close|>think" in asked(talk)[1]


def test_lines_and_commands(talk):
    lines = 'a \\\nb\n\n"""\n/c\n\nd\n"""\n/stats\n/reset\n/stats\n/what\n/help\ne\n/quit\nf\n'
    code, out, err = talk(lines, "--no-thinking", replies=["x<|end_of_msg|>"])
    assert (code, out) == (0, "x\nx\nx\n")
    assert turns(talk) == [["a \nb"], ["a \nb", "x", "/c\n\nd"], ["e"]]
    assert "replies 2, their tokens 2" in err and "of 1,024 tokens" in err and "tok/s" in err
    assert "no reply yet" in err and "no such command: /what" in err and "/reset " in err


def test_a_terminal_shows_thinking_dimmed_and_no_controls(talk, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reply = ["why\x1b[2J<|close|>think<|sep|><|open|>response<|sep|>so\x07\x9b<|end_of_msg|>"]
    code, out, err = talk("one\n", typed=True, replies=reply)
    assert code == 0 and err == "" and out.startswith("\x1b[2m/help")
    dimmed = "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", out.partition("> ")[2], re.S))
    assert dimmed.startswith("why\ufffd[2J") and "so" not in dimmed
    assert "so\ufffd\ufffd" in re.sub("\x1b\\[\\d+m", "", out) and "\x1b[2J" not in out


def test_ctrl_c_ends_a_reply_and_then_the_conversation(talk):
    cut = [*ids("half<|close|>think<|sep|>an"), KeyboardInterrupt()]
    code, out, err = talk("one\n^C\ntwo\n^C\n^C\nthree\n", typed=True, replies=[cut, *ANSWERS[:1]])
    assert code == 130
    assert "an\n" in out and "[interrupted]" in err and "answer 0\n" in out
    assert turns(talk)[1] == ["one", "an", "two"] and len(turns(talk)) == 2


def test_a_turn_that_cannot_run_is_said_on_a_terminal_and_ends_a_pipe(talk):
    broken = [[FloatingPointError("the logits hold NaN")], *ANSWERS[:1]]
    code, out, err = talk("one\ntwo\n", typed=True, replies=broken)
    assert code == 0 and "answer 0\n" in out and "error: the logits hold NaN" in err
    assert turns(talk)[1] == ["two"]
    code, out, err = talk("one\ntwo\n", replies=broken)
    assert code == 1 and "answer" not in out and "NaN" in err
    code, out, err = talk("a\n", "--temperature", "1e39")
    assert code == 2 and "float32" in err


def test_what_is_left_out_of_a_reply_is_said(talk):
    replies = [call_of("") + call_of("x") + "<|end_of_msg|>"]
    code, _, err = talk("one\ntwo\n", "--no-thinking", replies=replies)
    assert code == 0 and "[calls ToolCall(id='f:1'" in err and "text outside its arguments" in err
    code, out, err = talk("one\n", "--max-new-tokens", "2")
    assert code == 0 and out == "\n" and "[cut off: no more tokens allowed]" in err


def test_the_command_refuses_what_cannot_chat(folder, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert cli.main(["chat", str(bare)]) == 2
    assert "chat needs a tokenizer" in capsys.readouterr().err
    write_tokenizer(bare, RANKS, {"[BOS]": 290})
    assert cli.main(["chat", str(bare)]) == 2
    assert "markers that the tokenizer lacks" in capsys.readouterr().err


def test_the_command_runs_on_a_folder(folder):
    done = subprocess.run(
        [sys.executable, "-m", "kimi_jax", "chat", str(folder), "--max-new-tokens", "4"],
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "[cut off" in done.stderr, done.stderr


def test_tools_and_options_are_told_to_the_model(talk, tmp_path):
    tools, schema = tmp_path / "tools.json", tmp_path / "schema.json"
    tools.write_text(json.dumps([WEATHER]))
    schema.write_text('{"type": "object"}')
    code, _, err = talk(
        f"one\n/tools {tools}\ntwo\n",
        *("--tools", str(tools), "--tool-choice", "none", "--response-format", str(schema)),
    )
    assert code == 0 and "declared" in err
    first, second = asked(talk)
    assert "thinking_effort=max" in first and first.count('type="tool-declare"') == 1
    assert "tool_choice=none" in first and '```json\n{"type":"object"}\n```' in first
    assert second.count('type="tool-declare"') == 2
    assert second.index("New Tools Available") > second.index("answer 0")
    code, *_ = talk("one\n", "--thinking-effort", "unsaid", "--response-format", "json_object")
    (prompt,) = asked(talk)
    assert code == 0 and "thinking_effort" not in prompt and "response_format=json_obj" in prompt


@pytest.mark.parametrize(
    "words, content, says",
    [
        (("--tools",), None, "No such file"),
        (("--tools",), "[", "not a JSON file"),
        (("--tools",), "{}", "tools must be a list of functions"),
        (("--tools",), "[{}]", "tool 0 is not a function with a name"),
        (("--response-format",), None, "No such file"),
        (("--response-format",), '{"a": NaN}', "not a JSON file"),
        (("--response-format", "json_schema"), "", "json_schema has no schema"),
    ],
)
def test_files_of_tools_and_formats_that_cannot_be_used(talk, tmp_path, words, content, says):
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content)
    code, out, err = talk("one\n", *words, *([str(path)] if len(words) == 1 else []))
    assert code == 2 and out == "" and says in err and talk.script.prompts == []


def test_a_conversation_is_changed_and_asked_again(talk):
    lines = "one\n/undo\ntwo\n/retry\n/thinking off\n/system Be brief.\nthree\n"
    code, out, err = talk(lines, "--thinking-effort", "unsaid")
    assert (code, out) == (0, "answer 0\nanswer 1\nanswer 2\nanswer 3\n")
    assert turns(talk) == [["one"], ["two"], ["two"], ["Be brief.", "three"]]
    assert "taken back" in err and "thinking is off" in err
    for line, says in (("/undo", "there is no turn yet"), ("/thinking what", "takes on or off")):
        assert says in talk(f"{line}\none\n", typed=True)[2]
        code, out, err = talk(f"{line}\none\n")
        assert code == 2 and says in err and out == ""


def test_a_conversation_is_saved_and_read(talk, tmp_path):
    file = tmp_path / "talk.json"
    code, _, err = talk(f"one\n/save {file}\n/reset\n/load {file}\ntwo\n/save {file}\n", typed=True)
    assert code == 0 and "2 messages written" in err and "2 messages read" in err
    assert turns(talk)[1] == ["one", "answer 0", "two"] and "File exists" in err
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    file.write_text('[{"role": "nobody"}]')
    assert "nobody" in talk(f"/load {file}\n/save\n", typed=True)[2]


def test_a_seed_is_drawn_and_told_where_turns_are_typed(talk):
    seed = re.search(r"seed (\d+): --seed \1 draws", talk("one\n", typed=True)[2])
    assert seed and "seed" not in talk("one\n")[2]
    assert "seed" not in talk("one\n", "--seed", "3", typed=True)[2]


def test_words_are_not_broken_at_the_edge():
    words = Words(10)
    pieces = [words.push(text) for text in ("one tw", "o three", " a", "bcdefghijklmn o\npq")]
    assert "".join([*pieces, words.flush()]) == "one two \nthree abcdefghijklmn o\npq"
    assert pieces[0] == "one "


def test_tools_that_cannot_be_declared_later(talk, tmp_path):
    code, out, err = talk(f"/tools\n/tools {tmp_path / 'none'}\none\n", typed=True)
    assert code == 0 and "needs the name of a file" in err and "No such file" in err
    assert "answer 0" in out and "tool-declare" not in asked(talk)[0]
    code, out, err = talk(f"/tools {tmp_path / 'none'}\none\n")
    assert code == 2 and "No such file" in err and talk.script.prompts == []
