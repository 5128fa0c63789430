"""Images as users give them, opened and decoded by Pillow. What cannot be used is refused."""

import base64
import binascii
import io
import os
import re
import warnings
from typing import Any

import numpy as np

from ..errors import FileError, ImageError, InputError, shown
from ..files import read_regular

MOST_BYTES = 2**28  # of a file
MOST_PIXELS = 2**27  # of an image before it is resized; more is taken for a decompression bomb
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_MODES = frozenset("1 L LA La P PA RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV".split())
_DATA_URL = re.compile(r"data:[^,]*,", re.ASCII | re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII | re.IGNORECASE)

Image = Any  # a Pillow image, which is not imported before one is needed


def pillow() -> Any:
    """Pillow's `Image` module, or an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("images need Pillow: pip install 'kimi-jax[images]'") from error
    return Image


def open_image(source: Any) -> Image:
    """A decoded Pillow image, of a Pillow image, an array of bytes [H, W], [H, W, 3] or [H, W, 4],
    a path, the bytes of a file, or a `data:` URL. Nothing is fetched over a network.
    """
    module = pillow()
    if isinstance(source, module.Image):
        return _checked(source, "the image")
    if hasattr(source, "__array__"):
        return _of_array(module, np.asarray(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _decoded(module, bytes(source), "the image")
    if isinstance(source, str) and (head := _DATA_URL.match(source)):
        return _decoded(module, _of_data_url(head[0], source[head.end() :]), "the data URL")
    if isinstance(source, str) and _ADDRESS.match(source):
        raise ImageError(
            f"{shown(source)} is an address: an image is a file, its bytes, a data URL, an array "
            "or a Pillow image, and nothing is fetched over a network"
        )
    if isinstance(source, str | os.PathLike):
        return _decoded(module, _of_file(source), os.fspath(source))
    raise ImageError(
        f"an image is a Pillow image, an array of bytes, a path, bytes or a data URL; "
        f"got {shown(source)}"
    )


def _of_array(module: Any, array: np.ndarray) -> Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise ImageError(
            f"an array of an image is uint8 [H, W], [H, W, 3] or [H, W, 4]; "
            f"got {array.dtype} {list(array.shape)}"
        )
    if 0 in array.shape:
        raise ImageError(f"the image has no pixels: {list(array.shape)}")
    if array.shape[0] * array.shape[1] > MOST_PIXELS:
        raise _bomb("the image", array.shape[1], array.shape[0])
    return module.fromarray(
        np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array)
    )


def _of_data_url(head: str, body: str) -> bytes:
    if not head[:-1].lower().endswith(";base64"):
        raise ImageError(f"a data URL of an image is base64, this one begins with {shown(head)}")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URL is not base64: {error}") from error


def _of_file(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except FileError as error:
        raise ImageError(f"{shown(os.fspath(path))}: {error.reason}") from error


def _decoded(module: Any, data: bytes, name: str) -> Image:
    """A file, decoded. A damaged one makes Pillow's decoders raise errors of many types."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images: they are refused below
            image = module.open(io.BytesIO(data), formats=FORMATS)
            _checked(image, name)
            image.load()
    except InputError:
        raise
    except module.UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise ImageError(f"{name}: not an image of a known format ({known})") from error
    except Exception as error:
        raise ImageError(f"{name} cannot be decoded: {error}") from error
    return image


def _checked(image: Image, name: str) -> Image:
    """An image that is not yet decoded: its size, frames and mode are known."""
    width, height = image.size
    if not width or not height:
        raise ImageError(f"{name} has no pixels: {width} x {height}")
    if width * height > MOST_PIXELS:
        raise _bomb(name, width, height)
    # A photograph with a preview beside it is a file of two frames, in Pillow's format MPO.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ImageError(f"{name} has {image.n_frames} frames: give one of them")
    if image.mode not in _MODES:
        raise ImageError(
            f"{name} has pixels of mode {image.mode}: convert them to 8 bits a channel, RGB or gray"
        )
    return image


def _bomb(name: str, width: int, height: int) -> ImageError:
    return ImageError(f"{name} has {width} x {height} pixels, more than {MOST_PIXELS:,}")
