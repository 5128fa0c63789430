"""Images of a batch on one device and on eight, in few programs."""

import dataclasses
import hashlib

import numpy as np
import pytest
from tolerances import VISION
from visions import FIXTURES, IMAGES, VIDEOS, entry

import kimi_jax as kj
from kimi_jax.checkpoint.reader import Checkpoint
from kimi_jax.errors import RequestError
from kimi_jax.runtime.images.encoder import bucket, load_encoder
from kimi_jax.vision.patches import ImagePatches

(vision,) = FIXTURES


@pytest.fixture(scope="module")
def encoder_on(golden, vision):
    """mesh -> the golden encoder in float64."""

    def on(mesh):
        with Checkpoint(golden("vision")[0], *vision[:2]) as file:
            return load_encoder(vision[1], mesh, "float64", file.read, progress=False)

    return on


@pytest.fixture(scope="module")
def one(encoder_on):
    return encoder_on(kj.make_mesh())


def noise(rows: int, columns: int) -> ImagePatches:
    """Random patches on a grid."""
    rng = np.random.default_rng(rows * 1000 + columns)
    patches = rng.uniform(-1, 1, (rows * columns, 3, 14, 14)).astype(np.float32)
    digest = hashlib.sha256(patches.tobytes()).digest()
    size = (columns * 14, rows * 14)
    return ImagePatches(patches, (1, rows, columns), size, rows * columns // 4, digest)


def equal(got, want) -> None:
    assert len(got) == len(want)
    for rows, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(rows, expected, atol=VISION["float64"], rtol=0)


def test_rows_are_the_golden_ones_in_the_order_of_the_images(one, vision):
    names = [*reversed(IMAGES), VIDEOS[0], IMAGES[1]]
    images = [entry(vision[3], name) for name in names]
    rows = one.encode(images)
    equal(rows, [vision[3][f"{name}.projected_f64"] for name in names])
    np.testing.assert_array_equal(rows[3], rows[-1])  # the same image, whatever stands beside it
    np.testing.assert_array_equal(rows[3], one.encode([images[3]])[0])
    assert one.encode([]) == []


def test_twenty_images_of_twenty_sizes_share_four_programs(one):
    sizes = [(rows, columns) for rows in (2, 4, 6, 8, 10) for columns in (2, 6, 12, 18)]
    before = one.function.program_count
    rows = one.encode([noise(*size) for size in sizes])
    assert [len(array) for array in rows] == [a * b // 4 for a, b in sizes]
    assert one.function.program_count - before <= 4


def test_eight_devices_equal_one(one, encoder_on, vision):
    eight = encoder_on(kj.make_mesh(data=2, model=4))
    images = [entry(vision[3], name) for name in IMAGES] + [noise(2, 2 * n) for n in range(1, 7)]
    equal(eight.encode(images), one.encode(images))
    assert eight.function.program_count == 2


def test_buckets_are_two_for_each_power_of_two():
    sizes = sorted({bucket(n) for n in range(1, 70_000)})
    assert sizes[:6] == [64, 96, 128, 192, 256, 384] and sizes[-1] == 98_304 and len(sizes) == 22
    assert all(bucket(n) >= n for n in range(1, 70_000, 7))


def test_what_the_tower_does_not_take_is_refused_together(one, vision):
    image = noise(4, 6)
    odd = dataclasses.replace(image, grid=(1, 3, 8))
    other = dataclasses.replace(image, grid=(1, 4, 8))
    long = dataclasses.replace(image, grid=(6, 2, 2), rows=1)
    unmerged = dataclasses.replace(image, rows=24)
    with pytest.raises(RequestError) as error:
        one.encode([image, odd, other, long, unmerged])
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"image {i}" for i in range(1, 5)]
    assert "2 x 2" in lines[0] and "(32, 3, 14, 14)" in lines[1] and "at most 4" in lines[2]
    assert "24 rows, its grid gives 6" in lines[3]


def test_bfloat16_stays_near(golden, vision):
    """Another implementation in bfloat16 has a cosine of 0.99994 with its float64 rows."""
    with Checkpoint(golden("vision")[0], *vision[:2]) as file:
        encoder = load_encoder(vision[1], kj.make_mesh(), "bfloat16", file.read, progress=False)
    rows = encoder.encode([entry(vision[3], name) for name in IMAGES[:2]])
    got = np.concatenate(rows).astype(np.float64).ravel()
    want = np.concatenate([vision[3][f"{name}.projected_f64"] for name in IMAGES[:2]]).ravel()
    assert rows[0].dtype == "bfloat16"
    assert np.dot(got, want) / np.linalg.norm(got) / np.linalg.norm(want) > 0.9998
