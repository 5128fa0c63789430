"""The conversation of `kimi-jax chat`: reads turns, shows replies as they come, obeys /commands.

On a terminal all goes to standard output, thinking and remarks dimmed. Where standard output is a
file or a pipe it gets the answers alone, and standard error the rest.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from ..errors import ChatError, FileError, PromptError
from ..files import read_json
from ..generation.chat import ChatStream, Reply
from ..generation.requests import Usage
from ..text.chat_format import render
from ..text.reply_parser import ChatEvent
from .output import console

HELP = """\
/reset            begin a new conversation (the system prompt stays)
/system TEXT      begin a new conversation with this system prompt
/undo             take the latest turn and its reply back
/retry            answer the latest turn again
/thinking on|off  whether the model thinks before it answers
/tools FILE       declare more tools from here on: a JSON list of functions
/save FILE        write the conversation to a new file, as JSON
/load FILE        go on with a conversation that was saved
/stats            tokens and speed
/help             this text
/quit             leave, as Ctrl-D does
A line that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn.
Ctrl-C ends a running reply and clears a half-typed line; once more, it leaves."""
_JSON_BYTES = 2**24  # largest file of tools, or of a schema
_BLOCK = '"""'
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Words:
    """Text in pieces, with a line break before a word that would pass the edge of the screen. The
    word at the end of a piece is held back: the next piece may go on with it.
    """

    def __init__(self, width: int) -> None:
        self._width, self._column, self._word = width, 0, ""

    def push(self, text: str) -> str:
        """The text that can be written now."""
        written = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part.isspace():
                written += [self.flush(), part]
                self._column = 0 if part == "\n" else self._column + cell_len(part)
            else:
                self._word += part
        return "".join(written)

    def flush(self) -> str:
        """The word that was held back."""
        word, self._word = self._word, ""
        width = cell_len(word)
        is_broken = self._column > 0 and self._column + width >= self._width > width
        self._column = width if is_broken else (self._column + width) % self._width
        return f"\n{word}" if is_broken else word


class Screen:
    """Where answers and remarks are written."""

    def __init__(self) -> None:
        self._out = console()
        self.is_terminal = self._out.is_terminal
        err = console(stderr=True)
        self._aside = self._out if self.is_terminal else err
        self._words, self._style = Words(self._out.width), None

    def answer(self, text: str) -> None:
        """A piece of an answer."""
        self._write_words(self._out, text, None)

    def aside(self, text: str) -> None:
        """A piece of thinking."""
        self._write_words(self._aside, text, "dim")

    def remark(self, text: str) -> None:
        """A remark of complete lines, if any."""
        self._write(self._out, self._words.flush(), self._style)
        if text:
            self._write(self._aside, f"{text}\n", "dim")

    def end_answer(self) -> None:
        """Ends the line of an answer."""
        self._write_words(self._out, "\n", None)

    def _write_words(self, console: Console, text: str, style: str | None) -> None:
        if not console.is_terminal:
            return self._write(console, text, style)
        if style != self._style:
            self._write(console, self._words.flush(), self._style)
            self._style = style
        self._write(console, self._words.push(text), style)

    def _write(self, console: Console, text: str, style: str | None) -> None:
        if console.is_terminal:
            text = _CONTROLS.sub("\ufffd", text)  # what a model writes must not steer a terminal
        with console.capture() as captured:  # rich would end the program where a pipe is closed
            console.print(text, end="", style=style, soft_wrap=True)
        console.file.write(captured.get())
        console.file.flush()


@dataclasses.dataclass
class Total:
    """Counts over the replies since the last reset."""

    replies: int = 0
    tokens: int = 0
    last: Usage | None = None

    def add(self, usage: Usage) -> None:
        """Count one more reply."""
        self.replies += 1
        self.tokens += usage.generated_tokens
        self.last = usage

    def summary(self, context: int) -> str:
        """The counts, and the speed of the last reply; `context` in tokens."""
        if self.last is None:
            return "no reply yet"
        usage = self.last
        used = usage.prompt_tokens + usage.generated_tokens
        after = max(0, usage.generated_tokens - 1)
        speed = after / usage.decode_seconds if after and usage.decode_seconds else 0.0
        compiled = f", compiling {usage.compile_seconds:.1f} s" if usage.compile_seconds else ""
        lines = (
            f"replies {self.replies}, their tokens {self.tokens:,}",
            f"context {used:,} of {context:,} tokens",
            f"last reply: {usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} of them "
            f"cached, in {usage.prefill_seconds:.2f} s, "
            f"{usage.generated_tokens:,} new tokens at {speed:.1f} tok/s{compiled}",
        )
        return "\n".join(lines)


class Keyboard:
    """Lines of standard input. Where they are typed and prompt_toolkit is installed (the extra
    `chat`) they can be edited, have a history, and a paste of several lines is one turn; otherwise
    `input` reads them, with readline where Python has it.
    """

    def __init__(self, is_typed: bool) -> None:
        self._is_typed = is_typed
        self._was_interrupted = False
        self._editor: Any = None
        if is_typed and sys.stdin is sys.__stdin__ and find_spec("prompt_toolkit"):
            self._editor = _editor()
        elif is_typed and find_spec("readline"):
            importlib.import_module("readline")  # with it, input() has a history

    def line(self, prompt: str) -> str | None:
        """The next line; None at the end of the input. Ctrl-C clears a line, and raises
        KeyboardInterrupt where nothing was typed since the one before.
        """
        while True:
            try:
                read = self._editor.prompt if self._editor else input
                line = read(prompt if self._is_typed else "")
                self._was_interrupted = False
                return line
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                raise ChatError(f"the input is not text: {error}") from error
            except KeyboardInterrupt:
                if self._was_interrupted or self._editor:
                    raise
                self._was_interrupted = True
                print()


def _editor() -> Any:
    """prompt_toolkit's line editor, its history kept in the user's state folder."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c")
    def clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "kimi_jax" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
    except OSError:
        return PromptSession(history=InMemoryHistory(), key_bindings=keys)
    return PromptSession(history=FileHistory(str(file)), key_bindings=keys)


class Conversation:
    """Turns typed or piped in, and the model's replies to them, until the input ends or /quit.

    `options` are those of `session.chat`. Ctrl-C ends a reply, which stays in the conversation as
    far as it came; twice at the prompt it raises KeyboardInterrupt. Without a seed one is drawn and
    told where turns are typed, and is 0 elsewhere. On a terminal a turn that cannot run
    is reported and left out; without one it raises, so that a script notices.
    """

    def __init__(
        self, model: Any, system: str | None = None, seed: int | None = None, **options: Any
    ):
        self.model = model
        self.system = system
        self.options = options
        self._screen = Screen()
        self._is_typed = sys.stdin.isatty()
        self._keyboard = Keyboard(self._is_typed)
        self._session = model.session()
        self._is_drawn = seed is None and self._is_typed
        self._seed = secrets.randbelow(2**31) if self._is_drawn else seed or 0
        self.reset()

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.total = Total()
        self._session.reset()

    def run(self) -> None:
        """Run turns until the end."""
        if self._is_typed:
            self._screen.remark("/help lists what can be typed here")
            if self._is_drawn:
                self._screen.remark(f"seed {self._seed}: --seed {self._seed} draws the same again")
            self._warm_up()
        while (turn := self._read()) is not None:
            text, is_block = turn
            if not is_block and text.startswith("/"):
                if not self._obey(text.strip()):
                    return
            elif text.strip():
                self.run_turn(text)

    def _warm_up(self) -> None:
        """Compile while the first turn is typed: for one of a few words."""
        turn = [*self.messages, {"role": "user", "content": "Who are you?"}]
        with contextlib.suppress(ChatError, PromptError):  # the turn itself will say it
            self._session.chat(turn, stream=True, **self.options, seed=self._seed).prepare()

    def _read(self) -> tuple[str, bool] | None:
        """The next turn and whether it was a block of lines; None at the end of the input."""
        line = self._keyboard.line("> ")
        if line is None:
            if self._is_typed:
                self._screen.end_answer()
            return None
        if "\n" in line:  # pasted
            return line, True
        is_block = line.strip() == _BLOCK
        lines = [] if is_block else [line.removesuffix("\\")]
        while is_block or line.endswith("\\"):
            line = self._keyboard.line("... ")
            if line is None or (is_block and line.strip() == _BLOCK):
                break
            lines.append(line if is_block else line.removesuffix("\\"))
        return "\n".join(lines), is_block or len(lines) > 1

    def _obey(self, command: str) -> bool:
        """Run a command; false when it is to leave."""
        name, _, argument = command.partition(" ")
        if name == "/quit":
            return False
        if name not in _COMMANDS:
            self._screen.remark(f"no such command: {command} (/help lists them)")
            return True
        try:
            self._screen.remark(_COMMANDS[name](self, argument.strip()))
        except (ChatError, FileError) as error:
            if not self._is_typed:
                raise
            self._screen.remark(f"error: {error}")
        return True

    def run_turn(self, text: str) -> None:
        """One turn and its reply."""
        messages = [*self.messages, {"role": "user", "content": text}]
        seed, replies = self._seed, self.total.replies
        if replies:  # the same seed would draw the same way in each reply
            seed = (seed + replies) % 2**31
        try:
            reply = self._show(self._session.chat(messages, stream=True, **self.options, seed=seed))
        except (ChatError, PromptError, FloatingPointError) as error:
            if not self._is_typed:
                raise
            return self._screen.remark(f"error: {error}")
        message = reply.message
        message.pop("tool_calls", None)  # no tool runs here, and a call must have a result
        self.messages = [*messages, message]
        self.total.add(reply.usage)

    def _show(self, stream: ChatStream) -> Reply:
        """Write a reply as it comes."""
        kind = None
        for event in _until_interrupted(stream):
            if kind == "thinking" and event.kind != kind:
                self._screen.aside("\n")
            kind = event.kind
            if event.tool_call:
                self._screen.remark(f"\n[calls {event.tool_call}]")
            elif kind == "thinking":
                self._screen.aside(event.text)
            else:
                self._screen.answer(event.text)
        if kind == "thinking":
            self._screen.aside("\n")
        if kind != "thinking" or not self._screen.is_terminal:
            self._screen.end_answer()
        reply = stream.reply
        remarks = {"length": "cut off: no more tokens allowed", "interrupted": "interrupted"}
        if reply.finish_reason in remarks:
            self._screen.remark(f"[{remarks[reply.finish_reason]}]")
        for problem in reply.problems:
            self._screen.remark(f"[{problem}]")
        return reply


# Commands: each takes the conversation and its argument, and returns what it remarks.


def _reset(chat: Conversation, argument: str) -> str:
    chat.reset()
    return "a new conversation"


def _set_system(chat: Conversation, argument: str) -> str:
    render(chat.model.tokenizer, [{"role": "system", "content": argument}])
    chat.system = argument or None
    return _reset(chat, "")


def _undo(chat: Conversation, argument: str) -> str:
    _take_back(chat)
    return "taken back"


def _retry(chat: Conversation, argument: str) -> str:
    chat.run_turn(_take_back(chat))
    return ""


def _take_back(chat: Conversation) -> str:
    """The text of the latest turn, which is taken out with all that follows."""
    turns = [at for at, message in enumerate(chat.messages) if message["role"] == "user"]
    if not turns:
        raise ChatError("there is no turn yet")
    text = chat.messages[turns[-1]]["content"]
    chat.messages = chat.messages[: turns[-1]]
    return text


def _think(chat: Conversation, argument: str) -> str:
    if argument not in ("on", "off"):
        raise ChatError("/thinking takes on or off")
    chat.options["thinking"] = argument == "on"
    return f"thinking is {argument}"


def _declare(chat: Conversation, argument: str) -> str:
    message = {"role": "system", "tools": read_json_file(_file(argument, "/tools"))}
    render(chat.model.tokenizer, [message])
    chat.messages.append(message)
    return "declared"


def _save(chat: Conversation, argument: str) -> str:
    text = json.dumps(chat.messages, ensure_ascii=False, indent=1)
    path = _file(argument, "/save")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise FileError(path, error.strerror or "cannot be written") from error
    return f"{len(chat.messages)} messages written"


def _load(chat: Conversation, argument: str) -> str:
    messages = read_json_file(_file(argument, "/load"))
    render(chat.model.tokenizer, messages)
    chat.reset()
    chat.messages = messages
    return f"{len(messages)} messages read"


def _file(name: str, command: str) -> str:
    if not name:
        raise ChatError(f"{command} needs the name of a file")
    return os.path.expanduser(name)


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/system": _set_system,
    "/undo": _undo,
    "/retry": _retry,
    "/thinking": _think,
    "/tools": _declare,
    "/save": _save,
    "/load": _load,
    "/stats": lambda chat, argument: chat.total.summary(chat.model.config.max_positions),
    "/help": lambda chat, argument: HELP,
}


def _until_interrupted(stream: ChatStream) -> Iterator[ChatEvent]:
    """The events of a reply; Ctrl-C ends it, and what was held back then follows."""
    try:
        yield from stream
    except KeyboardInterrupt:
        stream.close()
        yield from stream


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """The JSON in a file that the user named, of at most 16 MiB. Raises `FileError`."""
    return read_json(path, _JSON_BYTES)
