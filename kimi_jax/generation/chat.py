"""A turn of a conversation: its prompt in the chat format, its reply parsed as it streams."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ..errors import ChatError, shown
from ..runtime.sampling import TokenLogprob
from ..text.chat_format import Markup, render
from ..text.media import MediaMarkup
from ..text.reply_parser import ChatEvent, ReplyParser
from ..text.tool_calls import ToolCall
from .engine import prepare
from .generate import start
from .option_checks import RequestKeywords, ids_of, of_one_prompt
from .options import (
    CHAT_MAX_NEW_TOKENS,
    CHAT_TEMPERATURE,
    CHAT_THINKING_EFFORT,
    CHAT_TOP_P,
    Options,
    described,
    make_options,
)
from .prefix_cache import PrefixCache
from .prompts import TextRunner, items_of, with_images
from .requests import PromptIds, Usage
from .session_state import SessionState

if TYPE_CHECKING:
    Messages = Sequence[Mapping[str, Any]]
    Effort = Literal["low", "medium", "high", "max"] | None
    ToolChoice = Literal["auto", "required", "none"] | None
else:  # checked by `render`, every problem in one error
    Messages = Effort = ToolChoice = Any


class ChatKeywords(RequestKeywords, total=False):
    """The options of `chat`, for type checkers."""

    thinking_effort: Effort
    tool_choice: ToolChoice
    response_format: str | Mapping[str, Any] | None
    prefix_cache: PrefixCache | None


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the model answered.

    `finish_reason`: "stop", "tool_calls" (it ended, and waits for results), "length"
    (`max_new_tokens` or the context) or "interrupted" (its stream was closed). `tokens` are all ids
    but the one that ended it. `problems` says what was malformed and therefore left out: a call
    that is incomplete, an argument that is not of its type, text in a tag that has no end.
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
        """The message to append to `messages` for the next turn; it always renders."""
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


class ChatStream(Iterator[ChatEvent]):
    """The events of a reply as they come; then, or when it was closed early, `reply` holds all of
    it.
    """

    def __init__(
        self,
        events: Any,
        parser: ReplyParser,
        prompt_tokens: int,
        end: int,
        prepare: Callable[[], None],
        usage: Callable[[int], Usage],
    ):
        self._events = events
        self._prepare = prepare
        self._usage_after = usage
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

    def prepare(self) -> None:
        """Compile in the background what the reply needs, before it is asked for."""
        self._prepare()

    def close(self) -> None:
        """End the reply where it is, if it has not ended."""
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
        if reason == "interrupted":
            self._usage = self._usage_after(len(self._tokens))
        self._events.close()
        self._ready.extend(self._parser.finish())


@described(max_new_tokens=CHAT_MAX_NEW_TOKENS, temperature=CHAT_TEMPERATURE, top_p=CHAT_TOP_P)
def chat(
    model: TextRunner,
    messages: Messages,
    tools: Any = None,
    thinking: bool = True,
    stream: bool = False,
    *,
    thinking_effort: Effort = CHAT_THINKING_EFFORT,
    tool_choice: ToolChoice = None,
    response_format: Any = None,
    prefix_cache: PrefixCache | None = None,
    session: SessionState | None = None,
    **options: Unpack[RequestKeywords],
) -> Reply | ChatStream:
    """The model's reply to a conversation, or with `stream` its events as they come.

    Messages, tools, `thinking_effort`, `tool_choice` and `response_format` as in
    `kimi_jax.text.chat_format.render`: they tell the model what is wanted, and nothing makes it
    comply. `prefix_cache` and `session` as in `generate`; the prompt is the session's full
    conversation. `stop` is searched for in each channel of the answer; a list with one value
    is that value, as for one prompt. A reply always ends at
    <|end_of_msg|>, whatever `stop_tokens` says. Raises `ChatError` or `PromptError` before anything
    runs.
    """
    given = of_one_prompt(options)
    images = model.new_images()
    ids = render(
        model.tokenizer, messages, tools, thinking, thinking_effort, tool_choice, response_format,
        images=images,
    )  # fmt: skip
    assert model.tokenizer is not None
    prompt = PromptIds(ids)
    if images and images.placed:
        prompt = with_images(ids, images.placed, MediaMarkup.of(model.tokenizer))
    end = Markup.of(model.tokenizer).end
    stops = _stop_strings(given.pop("stop", None))
    request, events = start(
        model, prompt, _with_defaults(model, given, end),
        cache=prefix_cache, session=session, is_conversation=True,
    )  # fmt: skip
    parser = ReplyParser(model.tokenizer, thinking, stops, request.options.min_new_tokens)
    begin = functools.partial(prepare, model, request, session)
    streamed = ChatStream(events, parser, len(ids), end, begin, request.usage)
    if stream:
        return streamed
    for _ in streamed:
        pass
    return streamed.reply


def _with_defaults(model: TextRunner, options: dict[str, Any], end: int) -> Options:
    """The options of a turn: the released defaults, and an end at <|end_of_msg|> in any case."""
    drawn = {"temperature": CHAT_TEMPERATURE, "top_p": CHAT_TOP_P}
    given = {k: v for k, v in options.items() if v is not None or k not in drawn}
    defaults: dict[str, Any] = {"max_new_tokens": CHAT_MAX_NEW_TOKENS}
    if given.get("sampling") is None:
        defaults |= drawn
    stop_tokens = given.get("stop_tokens")
    ids = ids_of(model.config.eos if stop_tokens is None else stop_tokens)
    if ids is not None:
        given["stop_tokens"] = [*ids, end]
    others = {"thinking", "stream", "tools"} | ChatKeywords.__annotations__.keys()
    return make_options(given, "chat", others, **defaults)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else items_of(stop)
    if stops is None or not all(isinstance(text, str) and text for text in stops):
        raise ChatError(f"stop must be strings of at least one character, got {shown(stop)}")
    return tuple(map(str, stops))
