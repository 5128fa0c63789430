"""A reply's token ids to thinking, text and tool calls, as they come. Knows no arrays.

Unusual here: a model may write anything, so every order of ids has a meaning. What is malformed is
left out and said in `problems`; markers, tags and other special ids never show as text; and a call
that is handed out can be rendered again, so that every reply can go back into its conversation.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import shown
from . import strict_json
from .chat_format import Markup, unescape
from .conversation import call_id
from .stops import StopStrings
from .tokenizer import Tokenizer

MAX_HEADER = 8_192  # characters of a tag; longer ones are left out
CHANNELS = ("think", "response", "tools")

_ATTRIBUTES = {  # of every tag that a reply may hold
    "message": (),
    **dict.fromkeys(CHANNELS, ()),
    "call": ("tool", "index"),
    "argument": ("key", "type"),
    "json": ("type",),
}
_NAME = re.compile(r"\w*")
_ATTRIBUTE = re.compile(r'(?<!\s)\s+([\w-]+)="([^"]*)"')
_HEADER = re.compile(r'\w*(?:\s+[\w-]+="[^"]*")*')
_DAMAGED = "a special token stands in it where none belongs"
_TOO_LONG = f"a tag of more than {MAX_HEADER:,} characters was left out"
_BEGUN_ATTRIBUTE = re.compile(r'\s*(?:([\w-]+)(=(?:"[^"]*)?)?)?')


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that a reply asks for. `id` is what a result's `tool_call_id` names."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatEvent:
    """A piece of a reply: more of its thinking or of its text, or a whole tool call."""

    kind: Literal["thinking", "text", "tool_call"]
    text: str = ""
    tool_call: ToolCall | None = None


@dataclasses.dataclass(frozen=True)
class Header:
    """A tag that has been read: its name, its attributes, and whether that is all it says."""

    name: str
    attributes: dict[str, str]
    problem: str | None = None

    @classmethod
    def of(cls, text: str) -> "Header":
        """The header between a marker and <|sep|>."""
        text = text.strip()
        name = _tag_name(text)
        pairs = _ATTRIBUTE.findall(text, len(name))
        attributes = {key: unescape(value) for key, value in pairs}
        if not _HEADER.fullmatch(text):
            return cls(name, attributes, f"a malformed tag: {shown(text)}")
        if len(attributes) < len(pairs):
            return cls(name, attributes, f"a tag with an attribute twice: {shown(text)}")
        return cls(name, attributes)


class _HeaderText:
    """The text since an <|open|> or <|close|>, of bounded length."""

    def __init__(self, opens: bool):
        self.opens = opens
        self.is_long = False
        self._parts: list[str] = []
        self._length = 0

    def add(self, text: str) -> None:
        """More of it, dropped where it is too long."""
        self._length += len(text)
        self.is_long = self._length > MAX_HEADER
        if self.is_long:
            self._parts.clear()
        else:
            self._parts.append(text)

    def __str__(self) -> str:
        return "".join(self._parts)

    @property
    def is_unfinished(self) -> bool:
        """Whether it may be the beginning of a tag and nothing else."""
        text = str(self).lstrip()
        name = _tag_name(text)
        end = len(name)
        if end == len(text):
            return any(tag.startswith(name) for tag in _ATTRIBUTES) and not self.is_long
        while attribute := _ATTRIBUTE.match(text, end):
            end = attribute.end()
        begun = _BEGUN_ATTRIBUTE.fullmatch(text, end)
        keys = _ATTRIBUTES.get(name)
        if begun is None or keys is None:
            return False
        key, value = begun[1] or "", begun[2]
        return key in keys if value else any(known.startswith(key) for known in (*keys, ""))


class _CallBuilder:
    """A call as it comes: its name, the arguments so far, and the first thing wrong with it."""

    def __init__(self, header: Header):
        self.name = header.attributes.get("tool", "")
        self.arguments: dict[str, Any] = {}
        self.problem = None if self.name else "it names no tool"
        self._json: dict[str, Any] | None = None  # arguments that came as one JSON block
        self._element = header
        self._raw: list[str] = []
        self.fail(header.problem)

    def fail(self, problem: str | None) -> None:
        """Note that the call cannot be used."""
        self.problem = self.problem or problem

    def begin(self, header: Header) -> None:
        """An argument or a JSON block opens."""
        self._element = header
        self._raw.clear()

    def add(self, text: str) -> None:
        """More of what is open."""
        self._raw.append(text)

    def abandon(self) -> None:
        """What is open will not be closed."""
        self.fail(f"{self._what()} has no end")

    def end(self) -> None:
        """What is open closes: a string as it stands, anything else as JSON of its type."""
        header, raw = self._element, "".join(self._raw)
        self._raw.clear()
        self.fail(header.problem)
        if header.name == "json":
            self._end_json(raw, header.attributes.get("type", "object"))
        else:
            self._end_argument(raw, header.attributes.get("type", ""))

    def result(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.arguments if self._json is None else self._json

    def _end_json(self, raw: str, kind: str) -> None:
        if self._json is not None or self.arguments:
            self.fail("a JSON block is not its only child")
        value = self._parsed(raw, kind)
        self._json = value if isinstance(value, dict) else {}
        if kind != "object":
            self.fail(f"{self._what()} is not of type 'object' but {shown(kind)}")

    def _end_argument(self, raw: str, kind: str) -> None:
        key = self._element.attributes.get("key")
        if key is None:
            return self.fail("an argument has no key")
        if self._json is not None:
            self.fail("a JSON block is not its only child")
        if key in self.arguments:
            self.fail(f"{self._what()} comes twice")
        self.arguments[key] = raw if kind == "string" else self._parsed(raw, kind)

    def _parsed(self, raw: str, kind: str) -> Any:
        try:
            value = strict_json.parse(raw, unique_keys=True)
        except ValueError as error:
            return self.fail(f"{self._what()} is not usable JSON: {shown(raw)}: {error}")
        if strict_json.type_name(value) != kind:
            self.fail(f"{self._what()} is not of type {shown(kind)}: {shown(raw)}")
        return value

    def _what(self) -> str:
        if self._element.name == "json":
            return "its JSON block"
        return f"argument {shown(self._element.attributes.get('key', ''))}"


class ReplyParser:
    """Takes a reply's ids one by one, from where `render` ends, and gives what each makes certain.

    After the end of the message all is ignored. Text in no channel counts as the answer's, without
    the white space around it; where a close of `think` follows that was never opened, as thinking.
    So does the text of a reply that was begun without thinking, until its channel ends: it is
    certain only then. A call shows once it is closed and sound. `problems` says what was malformed
    and what became of it.

    `stops` end the reply before themselves where they appear in the answer's text, but for those
    that are complete before token number `min_tokens`: then, and at the end of the message, `ended`
    is true.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        self._markup = Markup.of(tokenizer)
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._path = ["think" if thinking else "response"]  # open elements, the outermost first
        self._header: _HeaderText | None = None
        self._call: _CallBuilder | None = None
        self._answer = _Answer(stops, is_in_channel=not thinking)
        self._min_tokens = min_tokens
        self._count = 0
        self.thinking: list[str] = []
        self.text: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.ended = False

    def push(self, token: int) -> list[ChatEvent]:
        """The events that one more id makes certain, often none."""
        if self.ended:
            return []
        self._count += 1
        ids = self._markup
        if token not in (ids.open, ids.close, ids.sep, ids.end):
            if self._call and self._tokenizer.is_special(token):
                self._call.fail(_DAMAGED)
            return self._add(self._decoder.push(token))
        events = self._add(self._decoder.finish())
        if self.ended:
            return events
        header, self._header = self._header, None
        if token == ids.sep and header:
            return [*events, *self._turn_to(header)]
        if token == ids.sep:
            if self._call:
                self._call.fail(_DAMAGED)
            return events
        self._note_lost(header)
        if token == ids.end:
            return [*events, *self._end()]
        self._header = _HeaderText(opens=token == ids.open)
        return events

    def finish(self) -> list[ChatEvent]:
        """What is still held once no more ids come."""
        if self.ended:
            return []
        events = self._add(self._decoder.finish())
        if self.ended:
            return events
        header, self._header = self._header, None
        if header and (not header.is_unfinished or str(header).lstrip().startswith("call")):
            self._note_lost(header)
        return [*events, *self._end()]

    def _add(self, text: str) -> list[ChatEvent]:
        """Text goes to where it stands."""
        where = self._path[-1] if self._path else ""
        if not text:
            return []
        if self._header:
            self._header.add(text)
        elif where == "think":
            return self._thought(text)
        elif where in ("response", ""):
            events = self._said(self._answer.push(text, self._count >= self._min_tokens))
            self.ended = self._answer.is_stopped
            return events
        elif self._call and where in ("argument", "json"):
            self._call.add(text)
        elif self._call and text.strip():
            self._call.fail("text outside its arguments")
        elif text.strip():
            self._note("text between tool calls was left out")
        return []

    def _turn_to(self, text: _HeaderText) -> list[ChatEvent]:
        """An element opens or closes."""
        if text.is_long:
            self._note(_TOO_LONG)
            return []
        header = Header.of(str(text))
        if header.name not in _ATTRIBUTES or (text.opens and header.name == "message"):
            self._note(f"a tag that is not part of the format was left out: {shown(str(text))}")
            return []
        if header.problem and header.name not in ("call", "argument", "json"):
            self._note(f"text in a tag was left out: {shown(str(text))}")
        return self._open(header) if text.opens else self._close(header.name)

    def _open(self, header: Header) -> list[ChatEvent]:
        name = header.name
        if name in CHANNELS:
            events = self._leave(0)
            self._path = [name]
            self._answer.begin(is_in_channel=True)
            return events
        if name == "call":
            events = self._leave(0)
            self._path = ["tools", "call"]
            self._call = _CallBuilder(header)
            return events
        if not self._call:
            self._note(f"{name} outside a tool call was left out")
            return []
        events = self._leave(2)
        self._path.append(name)
        self._call.begin(header)
        return events

    def _close(self, name: str) -> list[ChatEvent]:
        if name == "message":
            return self._end()
        if name not in self._path:
            was_thinking = name == "think" and self._path in ([], ["response"])
            return self._rethink() if was_thinking and not self._answer.is_certain else []
        events = self._leave(self._path.index(name) + 1, is_closed=True)
        self._path.pop()
        if self._call and name in ("argument", "json"):
            self._call.end()
        elif self._call and name == "call":
            events += self._end_call()
        if not self._path:
            self._answer.begin(is_in_channel=False)
        return events

    def _rethink(self) -> list[ChatEvent]:
        """What seemed an answer was thinking."""
        text = self._answer.take()
        self._path = []
        self._answer.begin(is_in_channel=False)
        return self._thought(text) if text.strip() else []

    def _leave(self, depth: int, is_closed: bool = False) -> list[ChatEvent]:
        """Leaves open elements inside the first `depth`, of which the calls are not complete."""
        left, self._path = self._path[depth:], self._path[:depth]
        if self._call and ("argument" in left or "json" in left):
            self._call.abandon()
        if self._call and "call" in left:
            self._call.fail("it has no end")
            self._end_call()
        return self._said(self._answer.take(is_closed))

    def _end_call(self) -> list[ChatEvent]:
        """A call has ended: the event, or a problem where it is not sound."""
        call, self._call = self._call, None
        assert call is not None
        call.fail(strict_json.unwritable(call.result()))
        if call.problem:
            self.problems.append(f"a call of {shown(call.name)} was left out: {call.problem}")
            return []
        given_id = call_id(call.name, len(self.tool_calls) + 1)
        self.tool_calls.append(ToolCall(given_id, call.name, call.result()))
        return [ChatEvent("tool_call", tool_call=self.tool_calls[-1])]

    def _end(self) -> list[ChatEvent]:
        events = self._leave(0, is_closed=True)
        self.ended = True
        return events

    def _thought(self, text: str) -> list[ChatEvent]:
        self.thinking.append(text)
        return [ChatEvent("thinking", text)]

    def _said(self, text: str) -> list[ChatEvent]:
        if not text:
            return []
        self.text.append(text)
        return [ChatEvent("text", text)]

    def _note_lost(self, header: _HeaderText | None) -> None:
        """Say that a tag was left out because no <|sep|> ended it."""
        if header and header.is_long:
            self._note(_TOO_LONG)
        elif header and str(header).strip():
            self._note(f"a tag without end was left out: {shown(str(header))}")

    def _note(self, problem: str) -> None:
        """Say what was left out; inside a call it is the call."""
        if self._call:
            self._call.fail(problem)
        elif problem not in self.problems[-1:]:
            self.problems.append(problem)


class _Answer:
    """The answer's text as it comes, held back where it may still turn into a stop string or turn
    out to be thinking.
    """

    def __init__(self, stops: Sequence[str], is_in_channel: bool):
        self._stops = StopStrings(stops)
        self._is_in_channel = is_in_channel
        self.is_certain = False  # whether it can no longer turn out to be thinking
        self._held: list[str] = []
        self._has_text = False  # since the stretch between channels began
        self._spaces: list[str] = []  # that only count where more text follows

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.found

    def begin(self, is_in_channel: bool) -> None:
        """Another stretch begins, in a response or between channels."""
        self.is_certain = self._is_in_channel = is_in_channel
        self._has_text = False

    def push(self, text: str, armed: bool) -> str:
        """The text that is certain after another piece; stop strings count where `armed`."""
        if not self._is_in_channel:
            text = self._without_outer_space(text)
        ready = self._stops.push(text, armed)
        if self.is_certain:
            return ready
        self._held.append(ready)
        return self.take(is_closed=True) if self.is_stopped else ""

    def take(self, is_closed: bool = False) -> str:
        """All that was held back; mere white space counts where its channel was closed."""
        text = "".join(self._held) + self._stops.finish()
        self._held.clear()
        self._spaces.clear()
        return "" if text.isspace() and not (self.is_certain or is_closed) else text

    def _without_outer_space(self, text: str) -> str:
        """The text so far without the white space at both ends of its stretch."""
        if text.isspace():
            self._spaces.append(text)
            return ""
        text = "".join(self._spaces) + text
        body = text.rstrip()
        self._spaces = [text[len(body) :]]
        if not self._has_text:
            body = body.lstrip()
        self._has_text = True
        return body


def _tag_name(text: str) -> str:
    name = _NAME.match(text)
    return name[0] if name else ""
