"""A reply's token ids to thinking, text and tool calls, as they come. Knows no arrays.

Unusual here: a model may write anything, so every order of ids has a meaning. What is malformed is
left out and said in `problems`; markers, tags and other special ids never show as text; and a call
that is handed out can be rendered again, so that every reply can go back into its conversation.
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
    """A piece of a reply: more of its thinking or of its text, or a whole tool call."""

    kind: Literal["thinking", "text", "tool_call"]
    text: str = ""
    tool_call: ToolCall | None = None


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
        """The events that one more id makes certain, often none."""
        if self.ended:
            return []
        self._count += 1
        ids = self._markup
        if token not in (ids.open, ids.close, ids.sep, ids.end):
            if self._tokenizer.is_special(token):
                self._damage()
            return self._add(self._decoder.push(token))
        events = self._add(self._decoder.finish())
        if self.ended:
            return events
        header, self._header = self._header, None
        if token == ids.sep and header:
            return [*events, *self._turn_to(header)]
        if token == ids.sep:
            self._damage()
            return events
        self._note(header.loss if header else None)
        if token == ids.end:
            return [*events, *self._end()]
        self._header = HeaderText(opens=token == ids.open)
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
            self._note(header.loss)
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

    def _turn_to(self, text: HeaderText) -> list[ChatEvent]:
        """An element opens or closes."""
        if text.is_long:
            self._note(TOO_LONG)
            return []
        header = Header.of(text)
        if header.name not in ATTRIBUTES or (text.opens and header.name == "message"):
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
            self._call = CallBuilder(header)
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

    def _damage(self) -> None:
        """A special token where none belongs: it costs the call or the tag that it stands in."""
        if self._call:
            self._call.fail(DAMAGED)
        if self._header:
            self._header.is_damaged = True

    def _note(self, problem: str | None) -> None:
        """Say what was left out; inside a call it is the call."""
        if self._call:
            self._call.fail(problem)
        elif problem and problem not in self.problems[-1:]:
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
