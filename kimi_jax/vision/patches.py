"""What a preprocessed image is: its patches and their grid, and what tells it from others."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """One image as the tower takes it. Two are the same image where their digests are equal."""

    patches: Float32[np.ndarray, "L 3 p p"]  # normalised; row by row over the grid
    grid: tuple[int, int, int]  # frames, rows, columns of patches: L = t h w, h and w even
    size: tuple[int, int]  # width, height of the original in pixels: what a prompt says
    rows: int  # of the decoder that it takes: one for 2 x 2 patches of all frames
    digest: bytes  # of pixels and plan: equal digests are equal patches
