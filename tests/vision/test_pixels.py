"""From pixels to patches, bit for bit, and the faults that others have shipped."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from visions import IMAGES

from kimi_jax.config.preprocessor import Preprocessor
from kimi_jax.vision import pixels
from kimi_jax.vision.pixels import image_patches, normalised_bytes, over_board
from kimi_jax.vision.sizes import sizes_of

RELEASED = Preprocessor.k3()
TABLE = json.loads((GOLDEN / "vision" / "resize.json").read_text())["rows"]


@pytest.fixture(scope="module")
def images(golden):
    folder, expected = golden("vision")
    return Preprocessor.from_hf(folder), expected


def golden_bytes(expected, name):
    return expected["byte_values"][expected[f"{name}.patches"]]


@pytest.mark.parametrize("name", IMAGES)
def test_golden_patches_have_the_same_bits(images, name):
    preprocessor, expected = images
    found = image_patches(expected[f"{name}.pixels"], preprocessor)
    np.testing.assert_array_equal(found.patches, golden_bytes(expected, name), strict=True)
    assert found.grid == tuple(expected[f"{name}.grid_thws"][0])
    height, width = expected[f"{name}.pixels"].shape[:2]
    assert found.size == (width, height) and found.rows == len(found.patches) // 4


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}x{row[1]}")
def test_golden_sizes(row):
    width, height, limit, side, *sizes, tokens = row
    found = sizes_of(
        width, height, dataclasses.replace(RELEASED, patch_limit=limit, side_limit=side)
    )
    assert list(found) == sizes and found.rows(14) == tokens


def test_a_smaller_budget_gives_other_sizes():
    budget = dataclasses.replace(RELEASED, patch_limit=16384)
    assert sizes_of(3840, 2160, RELEASED).rows(14) == 10_764 > sizes_of(3840, 2160, budget).rows(14)


LENGTHS = st.integers(1, 20_000) | st.integers(1, 10**8)


@given(LENGTHS, LENGTHS, st.integers(1, 10**5), st.integers(1, 600).map(lambda half: 2 * half))
def test_sizes_never_grow_and_fit(width, height, limit, side):
    found = sizes_of(
        width, height, dataclasses.replace(RELEASED, patch_limit=limit, side_limit=side)
    )
    rows, columns = found.grid(14)
    assert 1 <= found.width <= width and 1 <= found.height <= height
    assert rows % 2 == columns % 2 == 0 and max(rows, columns) <= side
    assert 0 <= found.pad_right < 28 and 0 <= found.pad_bottom < 28
    if min(width, height) >= 14:  # the budget counts complete patches: sides are under twice theirs
        assert (found.width // 14) * (found.height // 14) <= 4 * limit


# Faults that others have shipped: each changes the patches of an image of the golden set.


def changed(monkeypatch, images, name, **replacements):
    """How many values of a golden image's patches a change moves."""
    preprocessor, expected = images
    for attribute, value in replacements.items():
        monkeypatch.setattr(pixels, attribute, value)
    found = image_patches(expected[f"{name}.pixels"], preprocessor).patches
    return np.sum(found != golden_bytes(expected, name))


def test_dropping_alpha_is_seen(images):
    preprocessor, expected = images
    dropped = dataclasses.replace(preprocessor, board=None)
    found = image_patches(expected["img3.pixels"], dropped).patches
    assert np.any(found != golden_bytes(expected, "img3"))


def test_mixing_with_the_board_in_float64_is_seen(monkeypatch, images):
    def in_float64(rgba, board):
        h, w, _ = rgba.shape
        odd = (np.arange(h)[:, None] // board.square + np.arange(w) // board.square) % 2
        behind = np.where(odd, board.gray, board.white)[..., None]
        alpha = rgba[..., 3:] / 255
        return (alpha * rgba[..., :3] + (1 - alpha) * behind).astype(np.uint8)

    assert 0 < changed(monkeypatch, images, "img3", over_board=in_float64) < 100


def test_a_board_laid_before_resizing_is_seen(images):
    preprocessor, expected = images
    early = dataclasses.replace(preprocessor, fill_stage="before_resize")
    found = image_patches(expected["img4.pixels"], early).patches  # is resized
    assert np.any(found != golden_bytes(expected, "img4"))


def test_padding_with_zero_after_normalising_is_seen(monkeypatch, images):
    def gray(image, sizes):
        pads = ((0, sizes.pad_bottom), (0, sizes.pad_right), (0, 0))
        return np.pad(image, pads, constant_values=128)

    assert changed(monkeypatch, images, "img0", padded=gray)


def test_patches_column_by_column_are_seen(monkeypatch, images):
    def by_column(image, p):
        H, W, _ = image.shape
        return image.reshape(H // p, p, W // p, p, 3).transpose(2, 0, 4, 1, 3).reshape(-1, 3, p, p)

    assert changed(monkeypatch, images, "img1", to_patches=by_column)


# Single steps.


def test_a_board_begins_white_at_the_top_left():
    board = over_board(np.zeros((16, 24, 4), np.uint8), RELEASED.board)[..., 0]
    assert board[0, 0] == board[7, 7] == board[8, 8] == 255 and board[0, 8] == board[8, 0] == 180
    opaque = np.random.default_rng(0).integers(0, 256, (9, 9, 4), np.uint8)
    opaque[..., 3] = 255
    np.testing.assert_array_equal(over_board(opaque, RELEASED.board), opaque[..., :3])


def test_padding_becomes_minus_one(images):
    preprocessor, expected = images
    last = image_patches(expected["img0.pixels"], preprocessor).patches[-1]
    assert np.all(last == -1)  # 45 x 31 pixels: the patch at the right and bottom is padding


def test_each_channel_has_its_mean_and_deviation():
    mean, std = (0.1, 0.5, 0.25), (0.5, 0.2, 2.0)
    table = normalised_bytes(dataclasses.replace(RELEASED, mean=mean, std=std))
    exact = (np.arange(256) / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, exact, rtol=1e-6, atol=1e-6)


def test_digests_tell_images_of_one_size_apart(images):
    preprocessor, expected = images
    image = expected["img0.pixels"]
    other = image.copy()
    other[3, 4, 1] ^= 1
    first, again, second = (image_patches(x, preprocessor).digest for x in (image, image, other))
    assert first == again != second
    brighter = dataclasses.replace(preprocessor, mean=(0.4, 0.5, 0.5))
    assert image_patches(image, brighter).digest != first


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"]


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_resized_as_they_are_and_become_rgb(images, mode):
    _, expected = images
    image = Image.fromarray(expected["img2.pixels"]).convert(mode)  # 181 x 133
    small = dataclasses.replace(RELEASED, patch_limit=16, board=None)
    sizes = sizes_of(*image.size, small)
    resized = image.resize((sizes.width, sizes.height), Image.Resampling.BICUBIC).convert("RGB")
    found = image_patches(image, small)
    want = image_patches(np.asarray(resized), small)
    assert sizes.width < 181 and found.grid == want.grid
    np.testing.assert_array_equal(found.patches, want.patches)


def test_a_transparent_palette_lies_over_the_board():
    image = Image.new("P", (28, 28), 3)
    image.putpalette([9] * 768)
    image.info["transparency"] = 3
    found = image_patches(image, RELEASED).patches
    board = over_board(np.zeros((28, 28, 4), np.uint8), RELEASED.board)
    np.testing.assert_array_equal(found, image_patches(board, RELEASED).patches)
