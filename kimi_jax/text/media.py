"""How an image stands in a prompt: its size as text, and a placeholder for each of its rows."""

import dataclasses

from ..errors import ChatError, ConfigError
from .images import SizedImage
from .tokenizer import Tokenizer

MEDIA_MARKERS = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")


@dataclasses.dataclass(frozen=True)
class MediaMarkup:
    """The ids of the markers of an image."""

    begin: int
    content: int
    pad: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MediaMarkup":
        """The markers of a tokenizer, or a `ChatError` that says which it lacks."""
        if missing := [name for name in MEDIA_MARKERS if name not in tokenizer.special_ids]:
            raise ChatError(f"images need markers that the tokenizer lacks: {', '.join(missing)}")
        return cls(*map(tokenizer.id, MEDIA_MARKERS))

    def segments(self, image: SizedImage) -> list[str | int]:
        """<|media_begin|>image WxH<|media_content|>, a <|media_pad|> for each row, and
        <|media_end|>; the text is encoded on its own.
        """
        width, height = image.size
        pads = [self.pad] * image.rows
        return [self.begin, f"image {width}x{height}", self.content, *pads, self.end]


def check_placeholder(placeholder: int, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` where a config's id of placeholders is not the tokenizer's."""
    pad = MEDIA_MARKERS[2]
    if tokenizer.special_ids.get(pad, placeholder) != placeholder:
        raise ConfigError(
            f"media_placeholder_token_id: {placeholder} is not the id of {pad}, "
            f"{tokenizer.id(pad)} in the tokenizer"
        )
