"""A saved checkpoint, a copy of it to plant faults in, and a way to write it with changes."""

import shutil

import numpy as np
import pytest
from checkpoints import BF16, make_config

from kimi_jax.checkpoint import random_tensors, save_hf


@pytest.fixture(scope="session")
def config():
    return make_config()


@pytest.fixture(scope="session")
def tensors(config):
    return random_tensors(config, seed=3)


@pytest.fixture(scope="session")
def saved(config, tensors, tmp_path_factory):
    """A sharded checkpoint with vision tensors, not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    vision = {
        "vision_tower.blocks.0.weight": np.ones((3, 2), BF16),
        "mm_projector.bias": np.ones(2, BF16),
    }
    save_hf(folder, config.to_hf(), {**tensors, **vision}, shard_bytes=60_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 4
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to plant faults in."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.fixture
def write(config, tensors, tmp_path):
    """Writes the tensors with changes, None to leave one out, and returns the folder."""

    def written(changes, base=tensors):
        changed = {name: array for name, array in {**base, **changes}.items() if array is not None}
        save_hf(tmp_path / "changed", config.to_hf(), changed, shard_bytes=100_000)
        return tmp_path / "changed"

    return written
