"""Prompts as users give them, text or token ids, and the same as token ids."""

import dataclasses

from ..runtime.runner import Runner
from ..text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TextRunner(Runner):
    """A runner with the tokenizer of its checkpoint; None: it takes and gives token ids alone."""

    tokenizer: Tokenizer | None = None
