"""Streaming parser: a reply's token ids to thinking, text and tool calls. Knows no arrays.

Unusual here: a model may write anything, so every sequence of ids has a meaning. What is malformed
is left out and reported in `problems`; markers, tags and other special tokens never show as text;
and a call that is returned can be rendered, so that every reply can go back into its conversation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ..errors import shown
from .chat_format import Markup
from .stops import StopStrings
from .tags import ATTRIBUTES, CHANNELS, DAMAGED, TOO_LONG, Header, HeaderText
from .tokenizer import Tokenizer
from .tool_calls import CallBuilder, ToolCall


@dataclasses.dataclass(frozen=True)
class ChatEvent:
    """A piece of a reply: more of its thinking or of its text, or one complete tool call."""

    kind: Literal["thinking", "text", "tool_call"]
    text: str = ""
    tool_call: ToolCall | None = None


class ReplyParser:
    """Parses a reply's ids one by one, from where `render` ends.

    - Everything after the end of the message is ignored.
    - Text outside of every channel belongs to the answer, without the white space around it. Where
      `think` is closed after it without having been opened, it was thinking.
    - So was the text of a reply that was begun without thinking, where `think` is closed before the
      response is: that text is emitted only once its channel ends.
    - A call is emitted once it is closed and valid.
    - `problems`: one line for each thing that was malformed and left out.
    - `stops`: strings that end the reply before themselves where they appear in the answer, except
      for those that are complete before token number `min_tokens`.
    - `ended`: true after a stop string and after the end of the message.
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
        self._header: HeaderText | None = None
        self._call: CallBuilder | None = None
        self._answer = _Answer(stops, is_in_channel=not thinking)
        self._min_tokens = min_tokens
        self._count = 0
        self.thinking: list[str] = []
        self.text: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.ended = False

    def push(self, token: int) -> list[ChatEvent]:
        """The events that one more id completes, often none."""
        if self.ended:
            return []
        self._count += 1
        ids = self._markup
        if token not in (ids.open, ids.close, ids.sep, ids.end):
            if self._tokenizer.is_special(token):
                self._report_special_token()
            return self._add(self._decoder.push(token))
        events = self._add(self._decoder.finish())
        if self.ended:
            return events
        header, self._header = self._header, None
        if token == ids.sep and header:
            return [*events, *self._read_tag(header)]
        if token == ids.sep:
            self._report_special_token()
            return events
        self._report(header.loss if header else None)
        if token == ids.end:
            return [*events, *self._end()]
        self._header = HeaderText(opens=token == ids.open)
        return events

    def finish(self) -> list[ChatEvent]:
        """The events that were held back, once no more ids come."""
        if self.ended:
            return []
        events = self._add(self._decoder.finish())
        if self.ended:
            return events
        header, self._header = self._header, None
        if header and (not header.is_unfinished or str(header).lstrip().startswith("call")):
            self._report(header.loss)
        return [*events, *self._end()]

    def _add(self, text: str) -> list[ChatEvent]:
        """Add text to the tag, channel or argument that is open."""
        where = self._path[-1] if self._path else ""
        if not text:
            return []
        if self._header:
            self._header.add(text)
        elif where == "think":
            return self._emit_thinking(text)
        elif where in ("response", ""):
            events = self._emit_text(self._answer.push(text, self._count >= self._min_tokens))
            self.ended = self._answer.is_stopped
            return events
        elif self._call and where in ("argument", "json"):
            self._call.add(text)
        elif self._call and text.strip():
            self._call.fail("text outside its arguments")
        elif text.strip():
            self._report("text between tool calls was left out")
        return []

    def _read_tag(self, text: HeaderText) -> list[ChatEvent]:
        """Open or close an element, now that its tag is complete."""
        if text.is_long:
            self._report(TOO_LONG)
            return []
        header = Header.of(text)
        if header.name not in ATTRIBUTES or (text.opens and header.name == "message"):
            self._report(f"a tag that is not part of the format was left out: {shown(str(text))}")
            return []
        if header.problem and header.name not in ("call", "argument", "json"):
            self._report(f"text in a tag was left out: {shown(str(text))}")
        return self._open(header) if text.opens else self._close(header.name)

    def _open(self, header: Header) -> list[ChatEvent]:
        name = header.name
        is_nested = name not in CHANNELS and name != "call"
        if is_nested and not self._call:
            self._report(f"{name} outside a tool call was left out")
            return []
        events = self._abandon_inside(2 if is_nested else 0)
        if name in CHANNELS:
            self._path = [name]
            self._answer.begin(is_in_channel=True)
        elif name == "call":
            self._path = ["tools", "call"]
            self._call = CallBuilder(header)
        elif self._call:
            self._path.append(name)
            self._call.begin(header)
        return events

    def _close(self, name: str) -> list[ChatEvent]:
        if name == "message":
            return self._end()
        if name not in self._path:
            may_be_thinking = self._path in ([], ["response"]) and not self._answer.is_certain
            return self._reclassify_as_thinking() if name == "think" and may_be_thinking else []
        events = self._abandon_inside(self._path.index(name) + 1, is_closed=True)
        self._path.pop()
        if self._call and name in ("argument", "json"):
            self._call.end()
        elif self._call and name == "call":
            events += self._end_call()
        if not self._path:
            self._answer.begin(is_in_channel=False)
        return events

    def _reclassify_as_thinking(self) -> list[ChatEvent]:
        """Emit as thinking what was held back as an answer."""
        text = self._answer.take()
        self._path = []
        self._answer.begin(is_in_channel=False)
        return self._emit_thinking(text) if text.strip() else []

    def _abandon_inside(self, depth: int, is_closed: bool = False) -> list[ChatEvent]:
        """Leave the open elements inside the first `depth`; a call among them is incomplete."""
        left, self._path = self._path[depth:], self._path[:depth]
        if self._call and ("argument" in left or "json" in left):
            self._call.abandon()
        if self._call and "call" in left:
            self._call.fail("it has no end")
            self._end_call()
        return self._emit_text(self._answer.take(is_closed))

    def _end_call(self) -> list[ChatEvent]:
        """The event of a call that has ended; a problem where it is not valid."""
        builder, self._call = self._call, None
        assert builder is not None
        call = builder.result(len(self.tool_calls) + 1)
        if call is None:
            problem = f"a call of {shown(builder.name)} was left out: {builder.problem}"
            self.problems.append(problem)
            return []
        self.tool_calls.append(call)
        return [ChatEvent("tool_call", tool_call=call)]

    def _end(self) -> list[ChatEvent]:
        events = self._abandon_inside(0, is_closed=True)
        self.ended = True
        return events

    def _emit_thinking(self, text: str) -> list[ChatEvent]:
        self.thinking.append(text)
        return [ChatEvent("thinking", text)]

    def _emit_text(self, text: str) -> list[ChatEvent]:
        if not text:
            return []
        self.text.append(text)
        return [ChatEvent("text", text)]

    def _report_special_token(self) -> None:
        """Reject the call or the tag that holds a special token."""
        if self._call:
            self._call.fail(DAMAGED)
        if self._header:
            self._header.is_damaged = True

    def _report(self, problem: str | None) -> None:
        """Report something malformed; inside a call, the call is what is left out."""
        if self._call:
            self._call.fail(problem)
        elif problem and problem not in self.problems[-1:]:
            self.problems.append(problem)


class _Answer:
    """The answer's text, held back where it may still become a stop string or thinking."""

    def __init__(self, stops: Sequence[str], is_in_channel: bool):
        self._stops = StopStrings(stops)
        self._is_in_channel = is_in_channel
        self.is_certain = False  # it cannot become thinking any more
        self._held: list[str] = []
        self._has_text = False  # outside of channels: text came already
        self._spaces: list[str] = []  # white space that counts only where more text follows

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.found

    def begin(self, is_in_channel: bool) -> None:
        """Begin a response channel, or the text outside of channels."""
        self.is_certain = self._is_in_channel = is_in_channel
        self._has_text = False

    def push(self, text: str, armed: bool) -> str:
        """The text that is certain after one more piece; stop strings count if `armed`."""
        if not self._is_in_channel:
            text = self._without_outer_space(text)
        ready = self._stops.push(text, armed)
        if self.is_certain:
            return ready
        self._held.append(ready)
        return self.take(is_closed=True) if self.is_stopped else ""

    def take(self, is_closed: bool = False) -> str:
        """The text that was held back; white space alone counts only if its channel was closed."""
        text = "".join(self._held) + self._stops.finish()
        self._held.clear()
        self._spaces.clear()
        return "" if text.isspace() and not (self.is_certain or is_closed) else text

    def _without_outer_space(self, text: str) -> str:
        """The next piece of the text outside of channels, without white space at either end."""
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
