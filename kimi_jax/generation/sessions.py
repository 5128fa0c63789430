"""A conversation as users hold it."""

from collections.abc import Iterator, Sequence
from typing import Any

from .chat import ChatStream, Reply, chat
from .generate import Completion, Event, generate, stream
from .options import method_of
from .prompts import TextRunner
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

    @method_of(generate, without=("session",))
    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Continue the conversation with more text or ids, and a reply."""
        return generate(self.model, [prompt], session=self, **options)[0]

    @method_of(stream, without=("session",))
    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Event]:
        """`generate` as a stream; what was yielded is what the conversation goes on from."""
        return stream(self.model, prompt, session=self, **options)

    @method_of(chat, without=("session",))
    def chat(self, messages: Any, *more: Any, **options: Any) -> Reply | ChatStream:
        """`Model.chat` of a full conversation; what the state has seen is not computed again."""
        return chat(self.model, messages, *more, session=self, **options)
