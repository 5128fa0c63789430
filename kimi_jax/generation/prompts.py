"""Prompts as users give them, text or token ids, and the same as token ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..errors import PromptError, RequestError, shown
from ..numerics import is_whole
from ..runtime.images.encoder import ImageEncoder
from ..runtime.runner import Runner
from ..text.tokenizer import Tokenizer
from ..vision.patches import ImagePatches

if TYPE_CHECKING:
    Ids = Sequence[int] | np.ndarray | jax.Array
    Prompt = str | Ids
    Prompts = Prompt | Sequence[Prompt]
else:  # checked by `as_list` and `encode`, every problem in one error
    Ids = Prompt = Prompts = Any


@dataclasses.dataclass(frozen=True)
class TextRunner(Runner):
    """A runner with the tokenizer of its checkpoint; None: it takes and gives token ids alone."""

    tokenizer: Tokenizer | None = None
    encoder: ImageEncoder | None = dataclasses.field(default=None, kw_only=True)  # of images

    def encode_images(self, images: Sequence[ImagePatches]) -> list[np.ndarray]:
        """The rows [n, D] of each image, which replace the embeddings of its placeholders. Raises
        `RequestError` where the model has no vision tower.
        """
        if self.encoder is None:
            raise RequestError("the model has no vision tower: it takes text only")
        return self.encoder.encode(images)

    def is_id(self, token: Any) -> bool:
        """Whether a value is a token id of the vocabulary."""
        return is_whole(token, 0, self.config.vocab - 1)


def items_of(value: Any) -> list | None:
    """The items of a list or an array; None for text and for all that has no items in order."""
    if isinstance(value, np.ndarray | jax.Array):
        return list(np.asarray(value)) if value.ndim else None
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return list(value) if is_list else None


def as_list(prompts: Any) -> list:
    """The prompts one by one; a lone string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if is_conversation(prompts):
        raise PromptError(USE_CHAT)
    items = items_of(prompts)
    if items is None:
        raise PromptError(f"prompts must be strings or lists of token ids, got {shown(prompts)}")
    is_flat = [not isinstance(item, str | Sequence) and not np.ndim(item) for item in items]
    if any(is_flat) and not all(is_flat):
        raise PromptError("prompts mix token ids with complete prompts: give [[ids], [ids], ...]")
    return [items] if any(is_flat) else items


USE_CHAT = (
    "this is a conversation, messages with a role: use chat(messages) for the model's reply, or "
    "give text or token ids to continue"
)


def is_conversation(value: Any) -> bool:
    """Whether a value is a message of a conversation, or a list that begins with one."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Mapping) and "role" in first


def encode(
    model: TextRunner, prompts: Sequence[Any], before: Sequence[int], problems: list[str]
) -> list[list[int]]:
    """The ids of every prompt, after the ids `before` it; problems are added to `problems`."""
    bad = [token for token in before if not model.is_id(token)]
    if bad:
        problems.append(f"the session's tokens hold {shown(bad[0])}, which is not a token id")
        return []
    may_be_empty = bool(before)
    encoded = [_ids(model, i, p, may_be_empty, problems) for i, p in enumerate(prompts)]
    return [[*map(int, before), *ids] for ids in encoded]


def _ids(
    model: TextRunner, i: int, prompt: Any, may_be_empty: bool, problems: list[str]
) -> list[int]:
    """One prompt as ids."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            problems.append(f"prompt {i} is text, and this folder has no tokenizer: give token ids")
            return []
        ids = model.tokenizer.encode(prompt)
    else:
        ids = items_of(prompt)
    if is_conversation(prompt):
        problems.append(f"prompt {i}: {USE_CHAT}")
        return []
    if ids is None:
        problems.append(f"prompt {i} must be text or token ids, got {shown(prompt)}")
        return []
    bad = [token for token in ids if not model.is_id(token)]
    if bad:
        problems.append(
            f"prompt {i}: {shown(bad[0])} is not a token id below the vocabulary of "
            f"{model.config.vocab}"
        )
    elif not ids and not may_be_empty:
        problems.append(f"prompt {i} is empty")
    return [] if bad else [int(token) for token in ids]
