"""Conversations: messages to token ids in the released chat format, and a reply's ids to thinking,
text and tool calls as they come.

Unusual here: the format is markup whose brackets are special ids and not characters. Only this
module writes those ids; all that a user, a tool or a model wrote is encoded as ordinary text, each
segment on its own, so that no text can end a message or begin one. The definition of the format:

    <|open|>message role="user"<|sep|>TEXT<|close|>message<|sep|><|end_of_msg|>

    An assistant's message has channels: think (left out without thinking, empty where nothing was
    thought), response, and tools where it calls some:
    <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

    A tool's result is <|open|>message role="tool" tool="NAME" index="1"<|sep|>TEXT ..., in the
    order of the calls. The tools come first, as a message role="system" type="tool-declare".
"""

import dataclasses
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..errors import ChatError, TokenizerError
from ..runtime.sampling import Sample, TokenLogprob
from ..text.stops import StopStrings
from ..text.tokenizer import Tokenizer
from .generate import Usage, start
from .prefix_cache import PrefixCache
from .prompts import TextRunner
from .session_state import SessionState

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
TEMPERATURE, TOP_P = 1.0, 0.95  # the model card's
MAX_NEW_TOKENS = 2048

Segment = str | int  # text to encode on its own, or a marker's id
_THINKING = ("reasoning_content", "reasoning", "thinking")  # names in use for one thing
_KEYS = {
    "system": ("name",),
    "user": ("name",),
    "assistant": (*_THINKING, "tool_calls"),
    "tool": ("tool_call_id", "name"),
}
_IMAGES = ("image", "image_url", "input_image")


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
class Reply:
    """What the model answered.

    `finish_reason`: "stop", "tool_calls" (it ended, and waits for results), "length"
    (`max_new_tokens` or the context) or "interrupted" (its stream was closed). `tokens` are all ids
    but the one that ended it. `problems` says what was malformed and therefore left out: a call
    that was cut off, an argument that is not of its type.
    """

    thinking: str
    text: str
    tool_calls: list[ToolCall]
    finish_reason: str
    usage: Usage
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    problems: tuple[str, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The message to append to `messages` for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


# Messages to ids


@dataclasses.dataclass(frozen=True)
class Markup:
    """The ids of the markers, and elements written with them."""

    open: int
    close: int
    sep: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "Markup":
        """The markers of a tokenizer, or a `ChatError` that says which it has not."""
        if tokenizer is None:
            raise ChatError("chat needs a tokenizer, and this folder has none")
        if missing := [marker for marker in MARKERS if marker not in tokenizer.special_ids]:
            raise ChatError(f"chat needs markers that the tokenizer has not: {', '.join(missing)}")
        return cls(*map(tokenizer.id, MARKERS))

    def opening(self, tag: str, **attributes: str) -> list[Segment]:
        """<|open|>tag name="value"<|sep|>; each part of an attribute is a segment of its own."""
        parts = (
            part
            for name, value in attributes.items()
            for part in (f" {name}", '="', _escape(value), '"')
        )
        return [self.open, tag, *parts, self.sep]

    def closing(self, tag: str) -> list[Segment]:
        """<|close|>tag<|sep|>."""
        return [self.close, tag, self.sep]

    def element(self, tag: str, body: Iterable[Segment], **attributes: str) -> list[Segment]:
        """An opening, a body and a closing."""
        return [*self.opening(tag, **attributes), *body, *self.closing(tag)]

    def message(self, body: Iterable[Segment], **attributes: str) -> list[Segment]:
        """A whole message."""
        return [*self.element("message", body, **attributes), self.end]


def render(
    tokenizer: Tokenizer | None,
    messages: Any,
    tools: Any = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
) -> list[int]:
    """The ids of a conversation, up to where the assistant's next message begins.

    `messages`: dicts with `role` and `content` (text, or a list of `{"type": "text", "text": ...}`
    parts), for an assistant also `reasoning_content` and `tool_calls`, for a tool `tool_call_id`.
    Results may come in any order. `tools`: functions with `name`, `description` and `parameters`,
    bare or as `{"type": "function", "function": {...}}`. `thinking_effort`: tell the model "low",
    "high" or "max" (None: nothing). Raises one `ChatError` that lists everything wrong.
    """
    markup = Markup.of(tokenizer)
    assert tokenizer is not None
    problems: list[str] = []
    declared = _declared(tools, problems)
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        problems.append(
            f"thinking_effort must be {_either(EFFORTS)} or None, got {thinking_effort!r}"
        )
    turns = _ordered(_turns(messages, problems), problems)
    ids = []
    for place, segments in _messages(markup, turns, declared, thinking, thinking_effort):
        try:
            ids += tokenizer.encode_segments(segments)
        except TokenizerError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ChatError("\n  ".join(["conversation:", *problems]))
    begin = markup.opening("message", role="assistant")
    channel = markup.opening("think" if thinking else "response")
    return ids + tokenizer.encode_segments([*begin, *channel])


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A message that has been read: its place among the messages, and what is rendered of it."""

    place: str
    role: str
    parts: list[str]
    name: str | None = None
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None  # the id of the call whose result this is
    index: int = 0  # of that call


def _messages(
    markup: Markup, turns: list[_Turn], declared: str, thinking: bool, effort: str | None
) -> Iterator[tuple[str, list[Segment]]]:
    """Each message with its place: options first, then the conversation."""
    if declared:
        body = (
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
            f"```json\n{declared}\n```"
        )
        yield "tools", markup.message([body], role="system", type="tool-declare")
    if thinking and effort:
        body = (
            "`thinking_effort` guides on how much to think in your thinking channel (not including "
            "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
            f"Now the system is invoked with `thinking_effort={effort}`."
        )
        yield "thinking_effort", markup.message([body], role="system", type="thinking-effort")
    for turn in turns:
        attributes = {"role": turn.role}
        if turn.role == "tool":
            attributes |= {"tool": turn.name or "", "index": str(turn.index)}
        elif turn.name:
            attributes["name"] = turn.name
        is_reply = turn.role == "assistant"
        body = _channels(markup, turn, thinking) if is_reply else turn.parts
        yield turn.place, markup.message(body, **attributes)


def _channels(markup: Markup, turn: _Turn, thinking: bool) -> list[Segment]:
    """The body of an assistant's message."""
    body: list[Segment] = []
    if thinking:
        body += markup.element("think", [turn.thinking] if turn.thinking.strip() else [])
    body += markup.element("response", turn.parts)
    calls: list[Segment] = []
    for index, call in enumerate(turn.calls, start=1):
        arguments: list[Segment] = []
        for key, value in call.arguments.items():
            raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            arguments += markup.element("argument", [raw], key=key, type=_type(value))
        calls += markup.element("call", arguments, tool=call.name, index=str(index))
    return body + (markup.element("tools", calls) if calls else [])


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _type(value: Any) -> str:
    """How the format calls the type of a JSON value."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


# What is given, read and checked


def _declared(tools: Any, problems: list[str]) -> str:
    """The tools as JSON, keys sorted so that equal tools give equal ids; empty without tools."""
    if tools is None or tools == []:
        return ""
    if not isinstance(tools, list | tuple):
        problems.append(f"tools must be a list of functions, got {tools!r:.60}")
        return ""
    functions, names = [], []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            problems.append(f"tool {i} is no function with a name: {tool!r:.60}")
        elif name in names:
            problems.append(f"tool {i}: another tool is named {name!r} too")
        elif _is_json(tool, f"tool {i}", problems):
            whole = tool if "function" in tool else {"function": tool}
            functions.append({"type": "function", **whole})
        names.append(name)
    return json.dumps(functions, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _is_json(value: Any, place: str, problems: list[str]) -> bool:
    """Whether a value can be written as JSON, with text for keys throughout."""
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"{place} cannot be written as JSON: {error}")
        return False
    return True


def _turns(messages: Any, problems: list[str]) -> list[_Turn]:
    if not isinstance(messages, list | tuple) or not messages:
        problems.append(f"messages must be a list of at least one message, got {messages!r:.60}")
        return []
    return [turn for i, m in enumerate(messages) if (turn := _turn(f"message {i}", m, problems))]


def _turn(place: str, message: Any, problems: list[str]) -> _Turn | None:
    """A message read, or None where not even its role can be."""
    if not isinstance(message, dict):
        problems.append(f"{place} is no dict with role and content: {message!r:.60}")
        return None
    role = message.get("role")
    if role not in ROLES:
        problems.append(f"{place}: role must be {_either(ROLES)}, got {role!r:.60}")
        return None
    known = ("role", "content", *_KEYS[role])
    for key, value in message.items():
        if key not in known and value not in (None, "", [], {}):
            problems.append(f"{place}: a {role} message takes no {key!r}")
    parts = _parts(place, message, problems)
    if role == "assistant":
        calls = _calls(place, message.get("tool_calls") or [], problems)
        return _Turn(place, role, parts, None, _thinking(place, message, problems), calls)
    if role == "tool":
        answers = message.get("tool_call_id")
        if not isinstance(answers, str) or not answers:
            problems.append(f"{place}: tool_call_id must name the call, got {answers!r:.60}")
        return _Turn(place, role, parts, answers=answers if isinstance(answers, str) else "")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        problems.append(f"{place}: name must be text, got {name!r:.60}")
    return _Turn(place, role, parts, name if isinstance(name, str) else None)


def _parts(place: str, message: dict, problems: list[str]) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if content is None and message["role"] == "assistant":
        return []
    if not isinstance(content, list | tuple):
        problems.append(f"{place}: content must be text, got {content!r:.60}")
        return []
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _IMAGES:
            problems.append(f"{place}: part {i} is an image, and this text decoder takes text only")
        else:
            said = repr(kind) if isinstance(kind, str) else f"{part!r:.60}"
            problems.append(f"{place}: part {i} is no text: {said}")
    return texts


def _thinking(place: str, message: dict, problems: list[str]) -> str:
    given = [message[key] for key in _THINKING if message.get(key)]
    if not all(isinstance(one, str) for one in given):
        problems.append(f"{place}: {_THINKING[0]} must be text, got {given[0]!r:.60}")
        return ""
    if len(set(given)) > 1:
        problems.append(f"{place}: {' and '.join(_THINKING)} are one thing, and differ")
    return given[0] if given else ""


def _calls(place: str, calls: Any, problems: list[str]) -> tuple[ToolCall, ...]:
    """An assistant's tool calls; one without an id gets the id that a reply would give it."""
    if not isinstance(calls, list | tuple):
        problems.append(f"{place}: tool_calls must be a list, got {calls!r:.60}")
        return ()
    read = []
    for i, call in enumerate(calls):
        at = f"{place}: call {i}"
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            problems.append(f"{at} is no call of a named function: {call!r:.60}")
            continue
        own = call.get("id") or _call_id(name, i + 1)
        if not isinstance(own, str):
            problems.append(f"{at}: id must be text, got {own!r:.60}")
        elif own in [other.id for other in read]:
            problems.append(f"{at}: another call has the id {own!r} too")
        else:
            read.append(ToolCall(own, name, _arguments(at, function.get("arguments"), problems)))
    return tuple(read)


def _call_id(name: str, index: int) -> str:
    return f"{name}:{index}"


def _arguments(place: str, arguments: Any, problems: list[str]) -> dict[str, Any]:
    """Arguments by name, given as such or as the JSON of an object."""
    given = arguments
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            problems.append(f"{place}: arguments are no JSON of an object: {arguments!r:.60}")
            return {}
    given = given or {}
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        problems.append(f"{place}: arguments must have names, got {arguments!r:.60}")
        return {}
    return given if _is_json(given, f"{place}: arguments", problems) else {}


def _ordered(turns: list[_Turn], problems: list[str]) -> list[_Turn]:
    """The turns with each run of results in the order of the calls before it, every call answered
    once.
    """
    ordered: list[_Turn] = []
    asked: dict[str, tuple[int, ToolCall]] = {}
    waiting: dict[str, str] = {}  # id of a call to the place of its message
    results: list[_Turn] = []

    def settle() -> None:
        ordered.extend(sorted(results, key=lambda turn: turn.index))
        problems.extend(f"{place}: call {own!r} has no result" for own, place in waiting.items())
        results.clear()
        waiting.clear()

    for turn in turns:
        if turn.role != "tool":
            settle()
            ordered.append(turn)
            asked = {call.id: (i, call) for i, call in enumerate(turn.calls, start=1)}
            waiting = dict.fromkeys(asked, turn.place)
        elif turn.answers in waiting:
            index, call = asked[turn.answers]
            del waiting[turn.answers]
            results.append(dataclasses.replace(turn, name=call.name, index=index))
        elif turn.answers in asked:
            problems.append(f"{turn.place}: call {turn.answers!r} has a result already")
        elif turn.answers:
            problems.append(f"{turn.place}: no call just before it has the id {turn.answers!r}")
    settle()
    return ordered


# A reply's ids to events


_TAG = re.compile(r"\s*(\w*)")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_CHANNELS = ("think", "response", "tools")


@dataclasses.dataclass
class _OpenCall:
    """A call on its way: what has been read of it, and what is wrong with it."""

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    key: str = ""
    type: str = ""
    raw: list[str] = dataclasses.field(default_factory=list)
    problem: str | None = None

    def begin(self, key: str, type: str) -> None:
        """An argument opens."""
        self.key, self.type = key, type
        self.raw.clear()

    def end(self) -> None:
        """The open argument closes: text as it stands, anything else as JSON of its type."""
        raw = "".join(self.raw)
        value: Any = raw
        if self.type != "string":
            try:
                value = json.loads(raw, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                self.problem = f"argument {self.key!r} is no JSON: {raw!r:.60}"
                return
            if _type(value) != self.type:
                self.problem = f"argument {self.key!r} is not of type {self.type!r}: {raw!r:.60}"
        if self.key in self.arguments:
            self.problem = f"argument {self.key!r} comes twice"
        self.arguments[self.key] = value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class ReplyParser:
    """Takes a reply's ids one by one, from where `render` ends, and gives what each makes certain.

    Markers, their tags and all other special ids never show, be they whole, half or out of place.
    Text that stands in no channel counts as the answer's; after the end of the message all is
    ignored. A call shows once it is closed and sound; `problems` says what became of others.
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
        self._decoder = tokenizer.stream()
        self._path = ["think" if thinking else "response"]  # open elements, the outermost first
        self._header: list[str] | None = None  # the text since an <|open|> or <|close|>
        self._opens = False  # which of the two
        self._call: _OpenCall | None = None
        self._stops = StopStrings(stops)
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
            return self._take(self._decoder.push(token))
        events = self._take(self._decoder.finish())
        if token == ids.end:
            return [*events, *self._end()]
        if token == ids.sep:
            header, self._header = self._header, None
            return events if header is None else [*events, *self._turn_to("".join(header))]
        self._header, self._opens = [], token == ids.open
        return events

    def finish(self) -> list[ChatEvent]:
        """What is still held once no more ids come."""
        return [] if self.ended else [*self._take(self._decoder.finish()), *self._end()]

    def _take(self, text: str) -> list[ChatEvent]:
        """Text goes to where it stands."""
        if not text or self.ended:
            return []
        where = self._path[-1] if self._path else "response"
        if self._header is not None:
            self._header.append(text)
        elif where == "think":
            self.thinking.append(text)
            return [ChatEvent("thinking", text)]
        elif where == "response":
            return self._answer(text)
        elif self._call and where == "argument":
            self._call.raw.append(text)
        elif self._call and text.strip():
            self._call.problem = "text outside its arguments"
        return []

    def _answer(self, text: str) -> list[ChatEvent]:
        """More of the answer, up to a stop string or what may become one."""
        events = self._answered(self._stops.push(text, self._count >= self._min_tokens))
        self.ended = self._stops.found
        return events

    def _release(self) -> list[ChatEvent]:
        """The answer's text that was held back."""
        return self._answered(self._stops.finish())

    def _answered(self, text: str) -> list[ChatEvent]:
        if not text:
            return []
        self.text.append(text)
        return [ChatEvent("text", text)]

    def _turn_to(self, header: str) -> list[ChatEvent]:
        """An element opens or closes."""
        tag = _TAG.match(header)
        name = tag[1] if tag else ""
        if not self._opens:
            return self._close(name)
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(header)}
        if name in _CHANNELS:
            events = self._leave(0)
            self._path = [name]
            return events
        if name == "call":
            events = self._leave(0)
            self._path = ["tools", "call"]
            self._call = _OpenCall(attributes.get("tool", ""))
            return events
        if name == "argument" and self._call:
            events = self._leave(2)
            self._path.append(name)
            self._call.begin(attributes.get("key", ""), attributes.get("type", ""))
            return events
        return []  # of an element that the format has not, only the body counts

    def _close(self, name: str) -> list[ChatEvent]:
        if name == "message":
            return self._end()
        if name not in self._path:
            return []
        at = self._path.index(name)
        events = self._leave(at + 1)
        self._path.pop()
        call = self._call
        if call and name == "argument":
            call.end()
        elif call and name == "call":
            self._call = None
            events += self._called(call)
        return events

    def _leave(self, depth: int) -> list[ChatEvent]:
        """Leaves open elements inside the first `depth`; what they held is not whole."""
        left, self._path = self._path[depth:], self._path[:depth]
        if self._call and "argument" in left:
            self._call.problem = f"argument {self._call.key!r} has no end"
        if self._call and "call" in left:
            self._call.problem = self._call.problem or "it has no end"
            self._called(self._call)
            self._call = None
        return self._release()

    def _called(self, call: _OpenCall) -> list[ChatEvent]:
        """A call has ended: the event, or a problem where it is not sound."""
        problem = call.problem or (None if call.name else "it names no tool")
        if problem:
            self.problems.append(f"a call of {call.name!r} was left out: {problem}")
            return []
        own = _call_id(call.name, len(self.tool_calls) + 1)
        self.tool_calls.append(ToolCall(own, call.name, call.arguments))
        return [ChatEvent("tool_call", tool_call=self.tool_calls[-1])]

    def _end(self) -> list[ChatEvent]:
        events = self._leave(0)
        self.ended = True
        return events


# One turn


class ChatStream(Iterator[ChatEvent]):
    """The events of a reply as they are made; then, or when it was closed early, `reply` holds the
    whole of it.
    """

    def __init__(self, events: Any, parser: ReplyParser, prompt_tokens: int, end: int):
        self._events = events
        self._parser = parser
        self._end = end
        self._ready: deque[ChatEvent] = deque()
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: str | None = None
        self._usage = Usage(prompt_tokens, 0, 0.0, 0.0)

    def __next__(self) -> ChatEvent:
        while not self._ready:
            if self._reason:
                raise StopIteration
            self._step()
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the reply where it is, if it has not ended."""
        if not self._reason:
            self._finish("interrupted")

    @property
    def reply(self) -> Reply:
        """The reply as far as it has come, "interrupted" where it has not ended."""
        parser, reason = self._parser, self._reason or "interrupted"
        if reason == "stop" and parser.tool_calls:
            reason = "tool_calls"
        return Reply(
            thinking="".join(parser.thinking),
            text="".join(parser.text),
            tool_calls=list(parser.tool_calls),
            finish_reason=reason,
            usage=dataclasses.replace(self._usage, generated_tokens=len(self._tokens)),
            tokens=list(self._tokens),
            logprobs=list(self._logprobs) if self._logprobs else None,
            problems=tuple(parser.problems),
        )

    def _step(self) -> None:
        """One more token of the model."""
        event = next(self._events, None)
        if event is None:  # it was closed, or failed before: its last event has a reason
            return self._finish("interrupted")
        self._usage = event.usage
        if event.token == self._end:
            return self._finish("stop")
        if event.token is not None:
            self._tokens.append(event.token)
            self._ready.extend(self._parser.push(event.token))
        if event.logprob is not None:
            self._logprobs.append(event.logprob)
        if event.finish_reason or self._parser.ended:
            self._finish(event.finish_reason or "stop")

    def _finish(self, reason: str) -> None:
        self._reason = reason
        self._events.close()
        self._ready.extend(self._parser.finish())


def chat(
    model: TextRunner,
    messages: Any,
    tools: Any = None,
    thinking: bool = True,
    stream: bool = False,
    *,
    thinking_effort: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int = 0,
    sampling: Sample | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    stop_tokens: Sequence[int] | None = None,
    logprobs: bool | int = False,
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
) -> Reply | ChatStream:
    """The model's reply to a conversation, or with `stream` its events as they are made.

    Messages, tools and `thinking_effort` as in `render`; the other options as in
    `kimi_jax.generate.generate`, but for the defaults of the model card, temperature 1.0 and top_p
    0.95, and for `stop`, which is looked for in the answer's text alone. A reply always ends at
    <|end_of_msg|>. Raises `ChatError` or `PromptError` before anything runs.
    """
    prompt = render(model.tokenizer, messages, tools, thinking, thinking_effort)
    assert model.tokenizer is not None
    end = Markup.of(model.tokenizer).end
    chosen: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    if sampling is None:
        chosen = {
            "temperature": TEMPERATURE if temperature is None else temperature,
            "top_p": TOP_P if top_p is None else top_p,
        }
    stops = _stop_strings(stop)
    events = start(
        model,
        prompt,
        prefix_cache,
        session,
        whole=True,
        stop=None,
        trip=4,
        max_new_tokens=max_new_tokens,
        **{"temperature": 0.0, "top_p": 1.0}
        | {name: value for name, value in chosen.items() if value is not None},
        top_k=top_k,
        sampling=sampling,
        seed=seed,
        stop_tokens=[*model.config.eos, end] if stop_tokens is None else stop_tokens,
        logprobs=logprobs,
        logit_bias=logit_bias,
        min_new_tokens=min_new_tokens,
    )
    parser = ReplyParser(model.tokenizer, thinking, stops, min_new_tokens)
    streamed = ChatStream(events, parser, len(prompt), end)
    if stream:
        return streamed
    for _ in streamed:
        pass
    return streamed.reply


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    whole = isinstance(stops, list | tuple) and all(isinstance(one, str) for one in stops)
    if not whole or "" in stops:
        raise ChatError(f"stop must be strings of at least one character, got {stop!r:.60}")
    return tuple(stops)
