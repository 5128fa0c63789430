"""The golden vision model: its weights, and its images and pieces of videos as patches."""

import dataclasses
import json

import chats
import numpy as np
import pytest

from kimi_jax.checkpoint import random_tensors, save_hf
from kimi_jax.checkpoint.reader import Checkpoint
from kimi_jax.checkpoint.vision_names import vision_table
from kimi_jax.config.config import Config
from kimi_jax.config.vision import VisionConfig
from kimi_jax.text.media import MEDIA_MARKERS
from kimi_jax.text.tokenizer import write_tokenizer
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


# A model that sees and talks: random weights, the tokenizer of the conversations.

MEDIA = dict(zip(MEDIA_MARKERS, range(300, 304), strict=True))
SEEING = dataclasses.replace(chats.CONFIG, vocab=304)
TOWER = VisionConfig(
    patch=14, width=16, blocks=1, heads=2, qkv_width=16, ffn=24, table_rows=4, table_columns=4,
    most_frames=4, projector_eps=1e-5, hidden=SEEING.hidden, placeholder=302,
)  # fmt: skip
PREPROCESSOR = {
    "media_proc_cfg": {
        **{"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 256},
        **{"patch_limit_on_one_side": 32, "fixed_output_tokens": None},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "transparent_bg_config": None},
        **{"in_patch_limit_each_frame": 64, "in_patch_limit_video": 256, "sample_fps": 8.0},
        **{"temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff"},
    }
}


def write_seeing(folder) -> str:
    """A checkpoint folder of SEEING and its tower."""
    tensors = random_tensors(SEEING, seed=3, vision=TOWER)
    save_hf(folder, SEEING.to_hf() | TOWER.to_hf(), tensors)
    write_tokenizer(folder, chats.RANKS, chats.SPECIAL | MEDIA)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return str(folder)


def picture(seed: int, width: int = 140, height: int = 112) -> np.ndarray:
    """Random pixels: 20 rows of the decoder."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def part(image) -> dict:
    """An image as a part of a prompt or a message."""
    return {"type": "image", "image": image}
