"""Images as parts of messages and prompts, without their pixels, which the caller reads."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from ..errors import ImageError, shown

KINDS = ("image", "image_url", "input_image")  # of parts of a message


@runtime_checkable
class SizedImage(Protocol):
    """What a prompt says of an image."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the original, in pixels."""
        ...

    @property
    def rows(self) -> int:
        """Rows of the decoder that it takes."""
        ...


class PromptImages:
    """Reads the images of a prompt, and holds them in the order in which they stand in it."""

    def __init__(self, read: Callable[[Any], SizedImage]):
        self.read = read  # raises `ImageError`
        self.placed: list[Any] = []


def is_image_part(part: Any) -> bool:
    """Whether a part of a message or of a prompt is an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in KINDS


def read_image(
    part: Mapping[str, Any], place: str, images: PromptImages | None, problems: list[str]
) -> SizedImage | None:
    """The image of a part; None, and a problem, where it cannot be used.

    `{"type": "image", "image": ...}` takes whatever the reader reads, `{"type": "image_url",
    "image_url": {"url": ...}}` (or the URL itself) a data URL alone: a conversation from elsewhere
    names no files of this machine.
    """
    if images is None:
        problems.append(f"{place} is an image, and this model takes text only")
        return None
    key = "image" if part["type"] == "image" else "image_url"
    source = part.get(key)
    if key == "image_url" and isinstance(source, Mapping):
        problems += [f"{place}: image_url takes no {shown(k)}" for k in source if k != "url"]
        source = source.get("url")
    problems += [f"{place}: an image takes no {shown(k)}" for k in part if k not in ("type", key)]
    if source is None:
        problems.append(f"{place}: the image is missing, {shown(key)} holds it")
        return None
    if key == "image_url" and not (isinstance(source, str) and source[:5].lower() == "data:"):
        problems.append(f"{place}: image_url must be a data URL, got {shown(source)}")
        return None
    try:
        return images.read(source)
    except ImageError as error:
        problems.append(f"{place}: {error}")
        return None
