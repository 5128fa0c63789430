"""The golden vision model: its weights, and its images and pieces of videos as patches."""

import numpy as np
import pytest

from kimi_jax.checkpoint.reader import Checkpoint
from kimi_jax.checkpoint.vision_names import vision_table
from kimi_jax.config.config import Config
from kimi_jax.config.vision import VisionConfig
from kimi_jax.vision.patches import ImagePatches

IMAGES = tuple(f"img{i}" for i in range(5))
VIDEOS = tuple(f"video{i}" for i in range(3))


def entry(expected, name: str) -> ImagePatches:
    """An image, or a piece of a video, of the golden numbers."""
    frames, rows, columns = map(int, expected[f"{name}.grid_thws"][0])
    patches = expected["byte_values"][expected[f"{name}.patches"]]
    pixels = expected.get(f"{name}.pixels", np.empty((0, 0)))
    size = (pixels.shape[1], pixels.shape[0])
    count = rows * columns // 4
    return ImagePatches(patches, (frames, rows, columns), size, count, name.encode())


@pytest.fixture(scope="module")
def vision(golden):
    """Decoder config, vision config, weights by name, and expected arrays."""
    folder, expected = golden("vision")
    config = Config.from_hf(folder)
    tower = VisionConfig.from_hf(folder, config)
    with Checkpoint(folder, config, tower) as file:
        weights = {weight.name: file.read(weight.name) for weight in vision_table(tower)}
    return config, tower, weights, expected


FIXTURES = (vision,)  # test files bind them to these names
