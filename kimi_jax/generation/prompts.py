"""Prompts as users give them, text, token ids or parts with images, and the same as token ids."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..config.preprocessor import Preprocessor
from ..errors import ChatError, ImageError, PromptError, RequestError, shown
from ..numerics import is_whole
from ..runtime.images.encoder import ImageEncoder
from ..runtime.runner import Runner
from ..text.images import PromptImages
from ..text.media import MediaMarkup
from ..text.messages import read_part
from ..text.tokenizer import Tokenizer
from ..vision.patches import ImagePatches
from ..vision.pixels import image_patches
from .requests import PlacedImage, PromptIds

if TYPE_CHECKING:
    Ids = Sequence[int] | np.ndarray | jax.Array
    Prompt = str | Ids | Sequence[str | Mapping[str, Any]]
    Prompts = Prompt | Sequence[Prompt]
else:  # checked by `as_list` and `encode`, every problem in one error
    Ids = Prompt = Prompts = Any


@dataclasses.dataclass(frozen=True)
class TextRunner(Runner):
    """A runner with the tokenizer of its checkpoint; None: it takes and gives token ids alone."""

    tokenizer: Tokenizer | None = None
    encoder: ImageEncoder | None = dataclasses.field(default=None, kw_only=True)  # of images
    preprocessor: Preprocessor | None = dataclasses.field(default=None, kw_only=True)

    def encode_images(self, images: Sequence[ImagePatches]) -> list[np.ndarray]:
        """The rows [n, D] of each image, which replace the embeddings of its placeholders. Raises
        `RequestError` where the model has no vision tower.
        """
        if self.encoder is None:
            raise RequestError("the model has no vision tower: it takes text only")
        return self.encoder.encode(images)

    def image_patches(self, image: Any) -> ImagePatches:
        """An image as `kj.image_patches` takes it, with this model's preprocessor; patches that
        were made before stay. Raises `ImageError`.
        """
        if self.encoder is None:
            raise ImageError("the model has no vision tower: it takes text only")
        if not isinstance(image, ImagePatches):
            if self.preprocessor is None:
                raise ImageError("the model's folder has no preprocessor_config.json")
            return image_patches(image, self.preprocessor)
        if problems := self.encoder.problems([image]):
            raise ImageError("; ".join(problems))
        return image

    def new_images(self) -> PromptImages | None:
        """A reader of the images of one prompt; None: the model takes text only."""
        return PromptImages(self.image_patches) if self.encoder else None

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
    """The prompts one by one; a lone string, a flat list of ids and a list of parts are one."""
    if isinstance(prompts, str):
        return [prompts]
    if is_conversation(prompts):
        raise PromptError(USE_CHAT)
    items = items_of(prompts)
    if items is None:
        expected = "strings, lists of token ids, or lists of parts with images"
        raise PromptError(f"prompts must be {expected}; got {shown(prompts)}")
    if is_parts(items):
        return [items]
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


def is_parts(value: Any) -> bool:
    """Whether a value is a prompt given as parts, of which one or more are tables with a type."""
    is_list = isinstance(value, list | tuple)
    return is_list and any(isinstance(part, Mapping) and "type" in part for part in value)


def encode(
    model: TextRunner, prompts: Sequence[Any], before: PromptIds, problems: list[str]
) -> list[PromptIds]:
    """Every prompt as ids, after those `before` it; problems are added to `problems`."""
    bad = [token for token in before.ids if not model.is_id(token)]
    if bad:
        problems.append(f"the session's tokens hold {shown(bad[0])}, which is not a token id")
        return []
    may_be_empty = bool(before.ids)
    encoded = [_encoded(model, i, p, may_be_empty, problems) for i, p in enumerate(prompts)]
    return [prompt.after(before) for prompt in encoded]


def _encoded(
    model: TextRunner, i: int, prompt: Any, may_be_empty: bool, problems: list[str]
) -> PromptIds:
    """One prompt as ids."""
    if isinstance(prompt, PromptIds):
        return prompt
    if isinstance(prompt, str) or is_parts(prompt):
        if model.tokenizer is None:
            problems.append(f"prompt {i} is text, and this folder has no tokenizer: give token ids")
            return PromptIds([])
        return _of_text(model, model.tokenizer, f"prompt {i}", prompt, may_be_empty, problems)
    ids = items_of(prompt)
    if is_conversation(prompt):
        problems.append(f"prompt {i}: {USE_CHAT}")
        return PromptIds([])
    if ids is None:
        problems.append(f"prompt {i} must be text or token ids, got {shown(prompt)}")
        return PromptIds([])
    bad = [token for token in ids if not model.is_id(token)]
    if bad:
        problems.append(
            f"prompt {i}: {shown(bad[0])} is not a token id below the vocabulary of "
            f"{model.config.vocab}"
        )
    elif not ids and not may_be_empty:
        problems.append(f"prompt {i} is empty")
    return PromptIds([] if bad else [int(token) for token in ids])


def _of_text(
    model: TextRunner,
    tokenizer: Tokenizer,
    place: str,
    prompt: str | Iterable[Any],
    may_be_empty: bool,
    problems: list[str],
) -> PromptIds:
    """A text, or texts and images one after another; a text on each side of an image is encoded on
    its own.
    """
    if isinstance(prompt, str):
        encoded = PromptIds(tokenizer.encode(prompt))
    else:
        known, images = len(problems), model.new_images()
        parts = [
            part
            if isinstance(part, str)
            else read_part(part, f"{place}: part {i}", images, problems)
            for i, part in enumerate(prompt)
        ]
        if len(problems) > known:
            return PromptIds([])
        encoded = _of_parts(tokenizer, [part for part in parts if part], place, problems)
    if not encoded.ids and not may_be_empty and not problems:
        problems.append(f"{place} is empty")
    return encoded


def _of_parts(tokenizer: Tokenizer, parts: list[Any], place: str, problems: list[str]) -> PromptIds:
    images = [part for part in parts if isinstance(part, ImagePatches)]
    if not images:
        return PromptIds(tokenizer.encode_segments(parts))
    try:
        media = MediaMarkup.of(tokenizer)
    except ChatError as error:
        problems.append(f"{place}: {error}")
        return PromptIds([])
    segments = [
        segment
        for part in parts
        for segment in ([part] if isinstance(part, str) else media.segments(part))
    ]
    return with_images(tokenizer.encode_segments(segments), images, media)


def with_images(
    ids: Sequence[int], images: Sequence[ImagePatches], media: MediaMarkup
) -> PromptIds:
    """A prompt whose images begin behind each <|media_content|>, which no text becomes."""
    firsts = [at + 1 for at, token in enumerate(ids) if token == media.content]
    placed = (PlacedImage(first, image) for first, image in zip(firsts, images, strict=True))
    return PromptIds(list(ids), tuple(placed))
