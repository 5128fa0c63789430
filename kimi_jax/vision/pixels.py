"""From an image to the patches of the tower, bit for bit as the released model was given them."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from ..config.preprocessor import Board, Preprocessor
from ..errors import ImageError
from .patches import ImagePatches
from .sizes import Sizes, sizes_of
from .sources import open_image, pillow


def image_patches(
    image: Any, preprocessor: Preprocessor | str | os.PathLike[str] | Mapping[str, Any]
) -> ImagePatches:
    """An image as the vision tower takes it: resized, laid over a chessboard where it is
    transparent, padded, normalised, and taken apart into patches.

    `image`: a Pillow image, uint8 pixels [H, W], [H, W, 3] or [H, W, 4], a path, the bytes of a
    file, or a `data:` URL. `preprocessor`: a `Preprocessor`, a folder with a
    `preprocessor_config.json`, that file, or what it holds. Raises `ImageError` for an image that
    cannot be used, `ConfigError` for the preprocessor.
    """
    if not isinstance(preprocessor, Preprocessor):
        preprocessor = Preprocessor.from_hf(preprocessor)
    opened = open_image(image)
    width, height = opened.size
    sizes = sizes_of(width, height, preprocessor)
    pixels = padded(_rgb(opened, sizes, preprocessor), sizes)
    grid = (1, *sizes.grid(preprocessor.patch))
    of_bytes = to_patches(pixels, preprocessor.patch)
    table = normalised_bytes(preprocessor)
    channel = np.arange(3)[None, :, None, None]
    return ImagePatches(
        patches=table[channel, of_bytes],
        grid=grid,
        size=(width, height),
        rows=sizes.rows(preprocessor.patch),
        digest=_digest(of_bytes, grid, table),
    )


def normalised_bytes(preprocessor: Preprocessor) -> Float32[np.ndarray, "3 256"]:
    """What each byte becomes: (byte / 255 - mean) / std, all but the first quotient in float32."""
    unit = (np.arange(256) / 255).astype(np.float32)
    mean, std = (np.asarray(x, np.float32)[:, None] for x in (preprocessor.mean, preprocessor.std))
    return (unit - mean) * (np.float32(1) / std)


def padded(pixels: UInt8[np.ndarray, "h w 3"], sizes: Sizes) -> UInt8[np.ndarray, "H W 3"]:
    """Pixels zero-padded at the right and at the bottom: black, so -1 once they are normalised."""
    return np.pad(pixels, ((0, sizes.pad_bottom), (0, sizes.pad_right), (0, 0)))


def to_patches(pixels: UInt8[np.ndarray, "H W 3"], p: int) -> UInt8[np.ndarray, "L 3 p p"]:
    """Patches of p x p pixels, row by row over the grid."""
    H, W, _ = pixels.shape
    grid = pixels.reshape(H // p, p, W // p, p, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, p, p))


def over_board(pixels: UInt8[np.ndarray, "h w 4"], board: Board) -> UInt8[np.ndarray, "h w 3"]:
    """Pixels with alpha over a chessboard: α rgb + (1 - α) board in float32, cut off to bytes.
    Float64 gives other bytes.
    """
    h, w, _ = pixels.shape
    rows, columns = np.arange(h)[:, None] // board.square, np.arange(w)[None] // board.square
    behind = np.where((rows + columns) % 2 == 1, board.gray, board.white).astype(np.float32)
    alpha = pixels[..., 3:].astype(np.float32) / np.float32(255)
    mixed = alpha * pixels[..., :3].astype(np.float32) + (1 - alpha) * behind[..., None]
    return mixed.astype(np.uint8)


def _rgb(image: Any, sizes: Sizes, preprocessor: Preprocessor) -> UInt8[np.ndarray, "h w 3"]:
    """The resized image. Pillow resizes it in its own mode: a palette to its nearest pixels, what
    has alpha weighted by it.
    """
    is_transparent = any(band in "Aa" for band in image.getbands()) or "transparency" in image.info
    board = preprocessor.board if is_transparent else None
    try:
        if board and preprocessor.fill_stage == "before_resize":
            module = pillow()
            image = module.fromarray(over_board(np.asarray(image.convert("RGBA")), board))
            board = None
        if image.size != (sizes.width, sizes.height):
            image = image.resize((sizes.width, sizes.height), pillow().Resampling.BICUBIC)
        if board:
            return over_board(np.asarray(image.convert("RGBA")), board)
        return np.asarray(image.convert("RGB"))
    except (ValueError, OSError) as error:
        raise ImageError(
            f"the image, of mode {image.mode}, does not become RGB: {error}"
        ) from error


def _digest(patches: np.ndarray, grid: tuple[int, ...], table: np.ndarray) -> bytes:
    """What tells patches from others."""
    digest = hashlib.blake2b(repr((grid, patches.shape)).encode(), digest_size=16)
    digest.update(table.tobytes())
    digest.update(patches.tobytes())
    return digest.digest()
