"""Messages to token ids in the released chat format. Knows no arrays.

Unusual here: the format is markup whose brackets are special ids and not characters. Only this
module writes those ids; all that a user, a tool or a model wrote is encoded as ordinary text, each
segment on its own, so that no text can end a message or begin one. The definition of the format:

    <|open|>message role="user"<|sep|>TEXT<|close|>message<|sep|><|end_of_msg|>

    An assistant's message has channels: think (left out without thinking, empty where nothing was
    thought), response, and tools where it calls some:
    <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

    Arguments that are not the JSON of an object stand in a call as they are, as one
    <|open|>json type="object"<|sep|>TEXT<|close|>json<|sep|>

    A tool's result is <|open|>message role="tool" tool="NAME" index="1"<|sep|>TEXT ..., in the
    order of the calls. Options are messages role="system" with a type: tool-declare and
    thinking-effort come first, tool-choice and response-format last. A system message that declares
    more tools is a tool-declare where it stands. An image in a content is
    <|media_begin|>image WxH<|media_content|>, a <|media_pad|> for each of its rows, <|media_end|>.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ChatError, TokenizerError, shown
from . import strict_json
from .images import PromptImages, SizedImage
from .media import MediaMarkup
from .messages import (
    Call,
    Turn,
    read_effort,
    read_response_format,
    read_tool_choice,
    read_tools,
    read_turns,
)
from .tokenizer import Tokenizer

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

Segment = str | int  # text to encode on its own, or a marker's id

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including "
    "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)


@dataclasses.dataclass(frozen=True)
class Markup:
    """The ids of the markers, and elements written with them."""

    open: int
    close: int
    sep: int
    end: int
    media: MediaMarkup | None = None  # where the conversation has images

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "Markup":
        """The markers of a tokenizer, or a `ChatError` that says which it lacks."""
        if tokenizer is None:
            raise ChatError("chat needs a tokenizer, and this folder has none")
        if missing := [marker for marker in MARKERS if marker not in tokenizer.special_ids]:
            raise ChatError(f"chat needs markers that the tokenizer lacks: {', '.join(missing)}")
        opening, close, sep, end = map(tokenizer.id, MARKERS)
        return cls(opening, close, sep, end)

    def with_media(
        self, tokenizer: Tokenizer, turns: list[Turn], images: PromptImages | None
    ) -> "Markup":
        """The same with the markers of images, if turns have any; `images` gets them in order."""
        found = [part for turn in turns for part in turn.parts if not isinstance(part, str)]
        if images is None or not found:
            return self
        images.placed += found
        return dataclasses.replace(self, media=MediaMarkup.of(tokenizer))

    def content(self, parts: Iterable[str | SizedImage]) -> list[Segment]:
        """Texts and images as they stand in a message."""
        segments: list[Segment] = []
        for part in parts:
            if isinstance(part, str):
                segments.append(part)
            else:
                assert self.media is not None
                segments += self.media.segments(part)
        return segments

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
        """One complete message."""
        return [*self.element("message", body, **attributes), self.end]

    def option(self, kind: str, body: str) -> list[Segment]:
        """A system message that states an option."""
        return self.message([body], role="system", type=kind)


def render(
    tokenizer: Tokenizer | None,
    messages: Any,
    tools: Any = None,
    thinking: Any = True,
    thinking_effort: Any = None,
    tool_choice: Any = None,
    response_format: Any = None,
    add_generation_prompt: bool = True,
    images: PromptImages | None = None,
) -> list[int]:
    """The ids of a conversation, up to where the assistant's next message begins.

    - `messages`: dicts with `role` and `content` (text, or a list of parts: `{"type": "text",
      "text": ...}`, `{"type": "image", "image": ...}` and `{"type": "image_url", "image_url":
      {"url": "data:..."}}`), for an assistant also `reasoning_content` and `tool_calls`, for a tool
      `tool_call_id`. Results may come in any order. A system message with `tools` declares more of
      them from there on; the format has no place for its `content`. `arguments` of a call are a
      dict or its JSON; anything else is rendered as it stands.
    - `tools`: functions with `name`, `description` and `parameters`, bare or as
      `{"type": "function", "function": {...}}`.
    - `thinking_effort`: tell the model "low", "medium", "high" or "max" (None: nothing).
    - `tool_choice`: tell it that it must ("required") or must not ("none") call tools ("auto" and
      None: nothing).
    - `response_format`: tell it to answer in JSON: "json_object", or a schema as `{"type":
      "json_schema", "json_schema": {"schema": {...}}}` ("text" and None: nothing). The answer is
      not checked.
    - `add_generation_prompt`: begin the assistant's next message. Without it the last message may
      hold calls that have no results yet.
    - `images`: reads images, and gets those of the prompt in order; without it they are refused.

    Raises one `ChatError` that lists everything wrong.
    """
    markup = Markup.of(tokenizer)
    assert tokenizer is not None
    problems: list[str] = []
    if not isinstance(thinking, bool):
        problems.append(f"thinking must be True or False, got {shown(thinking)}")
    options = _Options(
        bool(thinking),
        read_tools(tools, "tools", problems),
        read_effort(thinking_effort, problems),
        read_tool_choice(tool_choice, problems),
        read_response_format(response_format, problems),
        add_generation_prompt,
    )
    turns = read_turns(messages, problems, not add_generation_prompt, images)
    try:
        markup = markup.with_media(tokenizer, turns, images)
    except ChatError as error:
        raise _refusal([*problems, str(error)]) from error
    ids = []
    for place, segments in _segments(markup, turns, options):
        try:
            ids += tokenizer.encode_segments(part for part in segments if part != "")
        except TokenizerError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise _refusal(problems)
    return ids


def _refusal(problems: list[str]) -> ChatError:
    return ChatError("\n  ".join(["conversation:", *problems]))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the model is told beside the messages, read and checked."""

    thinking: bool
    tools: str  # as JSON, empty without tools
    effort: str | None
    tool_choice: str | None
    response_format: tuple[str, str] | None  # kind, schema as JSON
    add_generation_prompt: bool


def _segments(
    markup: Markup, turns: list[Turn], options: _Options
) -> Iterator[tuple[str, list[Segment]]]:
    """Each message with its place."""
    if options.tools:
        yield "tools", markup.option("tool-declare", _TOOLS + _json_block(options.tools))
    if options.thinking and options.effort:
        body = _EFFORT.format(options.effort)
        yield "thinking_effort", markup.option("thinking-effort", body)
    for turn in turns:
        yield turn.place, _message(markup, turn, options.thinking)
    if options.tool_choice:
        yield "tool_choice", markup.option("tool-choice", _TOOL_CHOICE[options.tool_choice])
    if options.response_format:
        body = _response_format(*options.response_format)
        yield "response_format", markup.option("response-format", body)
    if options.add_generation_prompt:
        channel = markup.opening("think" if options.thinking else "response")
        yield "the reply", [*markup.opening("message", role="assistant"), *channel]


def _message(markup: Markup, turn: Turn, thinking: bool) -> list[Segment]:
    if turn.tools:
        return markup.option("tool-declare", _MORE_TOOLS + _json_block(turn.tools))
    attributes = {"role": turn.role}
    if turn.role == "tool":
        attributes |= {"tool": turn.name or "", "index": str(turn.index)}
    elif turn.name:
        attributes["name"] = turn.name
    is_reply = turn.role == "assistant"
    body = _channels(markup, turn, thinking) if is_reply else markup.content(turn.parts)
    return markup.message(body, **attributes)


def _channels(markup: Markup, turn: Turn, thinking: bool) -> list[Segment]:
    """The body of an assistant's message."""
    body: list[Segment] = []
    if thinking:
        body += markup.element("think", [turn.thinking] if turn.thinking.strip() else [])
    body += markup.element("response", markup.content(turn.parts))
    if not turn.calls:
        return body
    calls = [
        segment
        for index, call in enumerate(turn.calls, start=1)
        for segment in markup.element(
            "call", _arguments(markup, call), tool=call.name, index=str(index)
        )
    ]
    return body + markup.element("tools", calls)


def _arguments(markup: Markup, call: Call) -> list[Segment]:
    """The body of a call."""
    if isinstance(call.arguments, str):
        return markup.element("json", [call.arguments], type="object")
    segments: list[Segment] = []
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        segments += markup.element("argument", [text], key=key, type=strict_json.type_name(value))
    return segments


def _response_format(kind: str, schema: str) -> str:
    body = _RESPONSE_FORMAT.format(kind)
    if not schema:
        return body
    return f"{body}\nThe JSON data must match the following schema:\n{_json_block(schema)}"


def _json_block(text: str) -> str:
    return f"```json\n{text}\n```"


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """An attribute's value as it was before it was written into a tag."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
