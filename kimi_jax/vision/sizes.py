"""To which size an image is resized and padded, and how many rows of the decoder it takes."""

import math
from typing import NamedTuple

from ..config.preprocessor import Preprocessor
from ..config.vision import MERGE


class Sizes(NamedTuple):
    """Pixels."""

    width: int  # after resizing
    height: int
    pad_right: int
    pad_bottom: int

    def grid(self, patch: int) -> tuple[int, int]:
        """Rows and columns of patches, padding included; both are even."""
        return (self.height + self.pad_bottom) // patch, (self.width + self.pad_right) // patch

    def rows(self, patch: int) -> int:
        """Rows of the decoder: one for 2 x 2 patches."""
        rows, columns = self.grid(patch)
        return rows * columns // MERGE**2


def sizes_of(width: int, height: int, preprocessor: Preprocessor) -> Sizes:
    """The sizes of an image of `width` x `height` pixels.

    It shrinks, and never grows, by s = min(1, sqrt(limit / (⌊W/p⌋ ⌊H/p⌋)), side p / W, side p / H)
    in float64, where a side of no complete patch counts as one; sizes are cut off to whole pixels,
    then padded to whole pairs of patches. So the number of patches may exceed the limit.
    """
    patch, side = preprocessor.patch, preprocessor.side_limit * preprocessor.patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(preprocessor.patch_limit / patches), side / width, side / height)
    new_width, new_height = (min(max(1, int(length * scale)), side) for length in (width, height))
    pair = MERGE * patch
    return Sizes(new_width, new_height, -new_width % pair, -new_height % pair)
