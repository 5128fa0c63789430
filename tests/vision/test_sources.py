"""Images as files, bytes, data URLs and arrays; what cannot be used is one clear error."""

import base64
import builtins
import contextlib
import io

import numpy as np
import pytest
from PIL import Image

from kimi_jax.errors import ImageError, InputError
from kimi_jax.vision import sources
from kimi_jax.vision.sources import open_image

PIXELS = np.random.default_rng(0).integers(0, 256, (31, 45, 3), np.uint8)


def encoded(image=None, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    (image or Image.fromarray(PIXELS)).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind="image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_all_forms_of_an_image_have_the_same_pixels(tmp_path):
    data = encoded()
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    forms = [PIXELS, Image.fromarray(PIXELS), data, bytearray(data), path, str(path)]
    forms += [data_url(data), data_url(data).replace("data:", "DATA:")]
    for form in forms:
        np.testing.assert_array_equal(np.asarray(open_image(form)), PIXELS)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"])
def test_formats(kind):
    assert open_image(encoded(kind=kind)).size == (45, 31)


def test_gray_and_transparent_arrays():
    assert open_image(PIXELS[..., 0]).mode == open_image(PIXELS[..., :1]).mode == "L"
    assert open_image(np.dstack([PIXELS, PIXELS[..., 0]])).mode == "RGBA"


@pytest.mark.parametrize("url", ["http://x/a.png", "https://x/a.png", "ftp://x", "file:///etc/a"])
def test_addresses_are_refused(url):
    with pytest.raises(ImageError, match="is an address"):
        open_image(url)


def test_truncated_files_are_refused_wherever_they_end():
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        data = encoded(kind=kind)
        for end in (0, 1, 7, 30, len(data) // 2):
            with pytest.raises(ImageError):
                open_image(data[:end])


def test_damaged_files_give_an_image_or_one_error():
    random = np.random.default_rng(1)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"):
        good = np.frombuffer(encoded(kind=kind), np.uint8)
        for _ in range(40):
            data = good.copy()
            at = random.integers(0, len(data), 6)
            data[at] = random.integers(0, 256, 6)
            with contextlib.suppress(ImageError):
                open_image(data.tobytes())


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch):
    some, many = (encoded(Image.new("1", (side, side))) for side in (12_000, 20_000))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("was decoded"))
    with pytest.raises(ImageError, match="12000 x 12000 pixels, more than"):
        open_image(some)
    with pytest.raises(ImageError, match="400000000 pixels"):  # Pillow's own limit
        open_image(many)


def test_large_arrays_and_images_are_refused():
    with pytest.raises(ImageError, match="more than"):
        open_image(np.broadcast_to(np.uint8(0), (2**14, 2**14)))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_frames_are_refused(kind):
    other = Image.fromarray(255 - PIXELS)
    data = encoded(kind=kind, save_all=True, append_images=[other])
    with pytest.raises(ImageError, match="has 2 frames"):
        open_image(data)


def test_16_bits_a_channel_are_refused():
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    for data in (encoded(deep), encoded(deep, "TIFF"), deep, encoded(deep.convert("F"), "TIFF")):
        with pytest.raises(ImageError, match="8 bits a channel"):
            open_image(data)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 5, 3), np.uint8),
        np.zeros((5, 0), np.uint8),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4,), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.int64),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_other_arrays_are_refused(array):
    with pytest.raises(ImageError, match=r"uint8|no pixels"):
        open_image(array)


@pytest.mark.parametrize(
    "source, message",
    [
        (None, "got None"),
        (3, "got 3"),
        ([1, 2], "got "),
        ("", "No such file"),
        ("no such file.png", "No such file"),
        (".", "not a regular file but a directory"),
        ("/dev/zero", "not a regular file"),
        ("a\0b", "not a name that a file can have"),
        (b"", "not an image"),
        (b"<svg/>", "not an image"),
        ("data:image/png,abc", "is base64"),
        ("data:image/png;base64,@@@", "not base64"),
        ("data:image/png;base64,", "not an image"),
        (data_url(b"hello"), "not an image"),
    ],
)
def test_what_is_no_image_is_refused(source, message):
    with pytest.raises(ImageError, match=message):
        open_image(source)


def test_one_pixel_is_an_image():
    assert open_image(encoded(Image.new("RGB", (1, 1)))).size == (1, 1)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"kimi-jax\[images\]"):
        sources.open_image(PIXELS)
