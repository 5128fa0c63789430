"""The conversation of `kimi-jax chat`: reads turns, shows replies as they come, obeys /commands.

On a terminal all goes to standard output, thinking and remarks dimmed. Where standard output is a
file or a pipe it gets the answers alone, and standard error the rest.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import ChatError, FileError, ImageError, PromptError
from ...files import read_json
from ...generation.chat import ChatStream, Reply
from ...generation.requests import Usage
from ...text.chat_format import render
from ...text.reply_parser import ChatEvent
from .keyboard import Keyboard
from .screen import Screen

HELP = """\
/reset            begin a new conversation (the system prompt stays)
/system TEXT      begin a new conversation with this system prompt
/undo             take the latest turn and its reply back
/retry            answer the latest turn again
/thinking on|off  whether the model thinks before it answers
/image FILE       show the model an image with the next turn
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
        self.images: list[dict[str, Any]] = []  # parts that go with the next turn
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
                content = [*self.images, {"type": "text", "text": text}] if self.images else text
                self.images = []
                self.run_turn(content)

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
        except (ChatError, FileError, ImageError) as error:
            if not self._is_typed:
                raise
            self._screen.remark(f"error: {error}")
        return True

    def run_turn(self, content: str | list[dict[str, Any]]) -> None:
        """One turn, text or parts with images, and its reply."""
        messages = [*self.messages, {"role": "user", "content": content}]
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


def _take_back(chat: Conversation) -> str | list[dict[str, Any]]:
    """The content of the latest turn, which is taken out with all that follows."""
    turns = [at for at, message in enumerate(chat.messages) if message["role"] == "user"]
    if not turns:
        raise ChatError("there is no turn yet")
    content = chat.messages[turns[-1]]["content"]
    chat.messages = chat.messages[: turns[-1]]
    return content


def _show_image(chat: Conversation, argument: str) -> str:
    path = os.path.abspath(_file(argument, "/image"))
    image = chat.model.image_patches(path)
    chat.images.append({"type": "image", "image": path})
    width, height = image.size
    return f"{width} x {height} pixels, {image.rows:,} tokens, with the next turn"


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
    render(chat.model.tokenizer, messages, images=chat.model.new_images())
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
    "/image": _show_image,
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
