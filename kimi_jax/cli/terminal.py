"""The conversation of `kimi-jax chat`: reads turns, shows replies as they come, obeys /commands.

On a terminal all goes to standard output, thinking and remarks dimmed. Where standard output is a
file or a pipe it gets the answers alone, and standard error the rest.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..errors import ChatError, FileError, PromptError
from ..files import read_json
from ..generation.chat import ChatStream, Reply
from ..generation.requests import Usage
from ..text.chat_format import render
from ..text.reply_parser import ChatEvent
from .output import console

HELP = """\
/reset        begin a new conversation (the system prompt stays)
/tools FILE   declare more tools from here on: a JSON list of functions
/stats        tokens and speed
/help         this text
/quit         leave, as Ctrl-D does
A line that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn.
Ctrl-C ends a running reply; at the prompt it leaves."""
_JSON_BYTES = 2**24  # largest file of tools, or of a schema
_BLOCK = '"""'
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """Where answers and remarks are written."""

    def __init__(self) -> None:
        self._out = console()
        self.is_terminal = self._out.is_terminal
        err = console(stderr=True)
        self._aside = self._out if self.is_terminal else err

    def answer(self, text: str) -> None:
        """A piece of an answer."""
        self._write(self._out, text, None)

    def aside(self, text: str) -> None:
        """A piece of thinking or of a remark."""
        self._write(self._aside, text, "dim")

    def remark(self, text: str) -> None:
        """A remark of complete lines."""
        self.aside(f"{text}\n")

    def end_answer(self) -> None:
        """Ends the line of an answer."""
        self._write(self._out, "\n", None)

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


class Conversation:
    """Turns typed or piped in, and the model's replies to them, until the input ends or /quit.

    `options` are those of `session.chat`. Ctrl-C ends a reply, which stays in the conversation as
    far as it came; at the prompt it raises KeyboardInterrupt. On a terminal a turn that cannot run
    is reported and left out; without one it raises, so that a script notices.
    """

    def __init__(self, model: Any, system: str | None = None, seed: int = 0, **options: Any):
        self._model = model
        self._seed = seed
        self._system = system
        self._options = options
        self._screen = Screen()
        self._is_typed = sys.stdin.isatty()
        self._session = model.session()
        self.reset()
        if self._is_typed:
            with contextlib.suppress(ImportError):  # not on every system; with it, input() has
                import readline  # noqa: F401 - a history and can be edited

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self.total = Total()
        self._session.reset()

    def run(self) -> None:
        """Run turns until the end."""
        if self._is_typed:
            self._screen.remark("/help lists what can be typed here")
            self._warm_up()
        while (turn := self._read()) is not None:
            text, is_block = turn
            if not is_block and text.startswith("/"):
                if not self._obey(text.strip()):
                    return
            elif text.strip():
                self._run_turn(text)

    def _warm_up(self) -> None:
        """Compile while the first turn is typed: for one of a few words."""
        turn = [*self.messages, {"role": "user", "content": "Who are you?"}]
        with contextlib.suppress(ChatError, PromptError):  # the turn itself will say it
            self._session.chat(turn, stream=True, **self._options, seed=self._seed).prepare()

    def _read(self) -> tuple[str, bool] | None:
        """The next turn and whether it was a block of lines; None at the end of the input."""
        line = self._line("> ")
        if line is None:
            if self._is_typed:
                self._screen.end_answer()
            return None
        is_block = line.strip() == _BLOCK
        lines = [] if is_block else [line.removesuffix("\\")]
        while is_block or line.endswith("\\"):
            line = self._line("... ")
            if line is None or (is_block and line.strip() == _BLOCK):
                break
            lines.append(line if is_block else line.removesuffix("\\"))
        return "\n".join(lines), is_block or len(lines) > 1

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self._is_typed else "")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise ChatError(f"the input is not text: {error}") from error

    def _obey(self, command: str) -> bool:
        """Run a command; false when it is to leave."""
        name, _, argument = command.partition(" ")
        if name == "/tools":
            self._declare(argument.strip())
        elif command == "/reset":
            self.reset()
            self._screen.remark("a new conversation")
        elif command == "/stats":
            self._screen.remark(self.total.summary(self._model.config.max_positions))
        elif command == "/help":
            self._screen.remark(HELP)
        elif command != "/quit":
            self._screen.remark(f"no such command: {command} (/help lists them)")
        return command != "/quit"

    def _declare(self, path: str) -> None:
        """Declare the tools in a file from here on."""
        try:
            if not path:
                raise ChatError("/tools needs the name of a file")
            message = {"role": "system", "tools": read_json_file(path)}
            render(self._model.tokenizer, [message])
        except (ChatError, FileError) as error:
            if not self._is_typed:
                raise
            return self._screen.remark(f"error: {error}")
        self.messages.append(message)
        self._screen.remark("declared")

    def _run_turn(self, text: str) -> None:
        """One turn and its reply."""
        messages = [*self.messages, {"role": "user", "content": text}]
        seed, replies = self._seed, self.total.replies
        if replies:  # the same seed would draw the same way in each reply
            seed = (seed + replies) % 2**31
        try:
            reply = self._show(
                self._session.chat(messages, stream=True, **self._options, seed=seed)
            )
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
