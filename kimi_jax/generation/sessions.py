"""A conversation as users hold it."""

from collections.abc import Iterator
from typing import Any, Literal, Unpack, overload

from .chat import ChatKeywords, ChatStream, Messages, Reply
from .chat import chat as chat_turn
from .generate import Completion, Event, GenerateKeywords, StreamKeywords, generate, stream
from .options import method_of
from .prompts import Prompt, TextRunner
from .session_state import SessionState


class Session(SessionState):
    """A conversation with a model that keeps its state: each turn computes only what is new.

    `generate` and `stream` continue what the session has seen, `chat` takes the full conversation
    as `Model.chat` does. Turns give what the same ids give without a session. Where a turn does not
    continue what the state has seen (a reply ended within a multi-step decode by a stop string or
    by closing its stream, was written otherwise by its chat message, or is another one now) the
    state goes back to where the latest prompt ended that both share, or to an empty one. A new turn
    ends one that runs.
    """

    def __init__(self, model: TextRunner, max_length: int | None = None):
        super().__init__(model, max_length)
        self.model: TextRunner = model

    def __repr__(self) -> str:
        return f"Session({len(self.tokens):,} tokens of at most {self.max_length:,})"

    @method_of(generate, without=("session", "n"))
    def generate(self, prompt: Prompt, **options: Unpack[GenerateKeywords]) -> Completion:
        """Continue the conversation with more text or ids, and a reply."""
        return generate(self.model, [prompt], session=self, **options)[0]

    @method_of(stream, without=("session",))
    def stream(self, prompt: Prompt, **options: Unpack[StreamKeywords]) -> Iterator[Event]:
        """`generate` as a stream; what was yielded is what the conversation goes on from."""
        return stream(self.model, prompt, session=self, **options)

    @overload
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        stream: Literal[False] = False,
        **options: Unpack[ChatKeywords],
    ) -> Reply: ...

    @overload
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        *,
        stream: Literal[True],
        **options: Unpack[ChatKeywords],
    ) -> ChatStream: ...

    @method_of(chat_turn, without=("session",))
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        stream: bool = False,
        **options: Unpack[ChatKeywords],
    ) -> Reply | ChatStream:
        """`Model.chat` of a full conversation; what the state has seen is not computed again."""
        return chat_turn(self.model, messages, tools, thinking, stream, session=self, **options)
