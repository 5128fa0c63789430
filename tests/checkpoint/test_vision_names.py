"""Tensors of the vision tower: read, or refused by name."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from visions import FIXTURES

from kimi_jax.checkpoint import random_tensors, save_hf
from kimi_jax.checkpoint.reader import Checkpoint, reads_tower
from kimi_jax.errors import CheckpointError

(vision,) = FIXTURES
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def tensors(golden):
    """Every released tensor of the golden folder."""
    folder, _ = golden("vision")
    return {
        name: array
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


@pytest.fixture
def write(golden, tensors, tmp_path):
    """Writes the tensors with changes, None to leave one out, as a folder of one file."""

    def written(changes):
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        shutil.copy(golden("vision")[0] / "config.json", folder)
        changed = {
            name: array for name, array in {**tensors, **changes}.items() if array is not None
        }
        save_file(changed, folder / "model.safetensors")
        return folder

    return written


def problems(folder, vision) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, *vision[:2])
    return sorted(caught.value.problems)


def names_of(tensors) -> list[str]:
    return [name for name in tensors if name.startswith(("vision_tower.", "mm_projector."))]


def test_there_are_as_many_tensors_as_released(tensors, vision):
    """165 and 3 in K3 of 27 blocks; 21 and 3 here, of 3."""
    assert len(names_of(tensors)) == 21 + 3 and vision[1].blocks == 3
    assert len(vision[2]) == 24


def test_each_missing_tensor_is_named(tensors, vision, write):
    names = names_of(tensors)
    found = problems(write(dict.fromkeys(names)), vision)
    assert [line.split(": ")[0] for line in found] == sorted(names)
    assert all("missing, shape [" in line for line in found)


def test_each_wrong_shape_is_named(tensors, vision, write):
    names = names_of(tensors)
    found = problems(write({name: tensors[name][:-1] for name in names}), vision)
    assert [line.split(": ")[0] for line in found] == sorted(names)
    assert all(": shape [" in line and ", expected [" in line for line in found)


def test_each_wrong_dtype_is_named(tensors, vision, write):
    names = names_of(tensors)
    found = problems(write({name: tensors[name].astype(np.float32) for name in names}), vision)
    assert found == sorted(f"{name}: dtype F32, expected BF16" for name in names)


def test_extra_tensors_are_named_and_both_parts_are_checked_together(vision, write):
    extra = {f"{name}.bias": np.ones(2, BF16) for name in ("vision_tower.a", "mm_projector.b")}
    found = problems(write({**extra, "language_model.lm_head.weight": None}), vision)
    assert [line.split(": ")[0] for line in found] == [
        "language_model.lm_head.weight", "mm_projector.b.bias", "vision_tower.a.bias"
    ]  # fmt: skip
    assert "unknown tensor" in found[1]


def test_both_spellings_of_the_projector_are_read(tensors, vision, write):
    renamed = {"mm_projector.proj.0.weight": None, "mm_projector.proj.2.weight": None}
    for old, new in (("proj.0", "linear_1"), ("proj.2", "linear_2")):
        renamed[f"mm_projector.{new}.weight"] = tensors[f"mm_projector.{old}.weight"]
    with Checkpoint(write(renamed), *vision[:2]) as file:
        for name in ("projector.w_in", "projector.w_out"):
            np.testing.assert_array_equal(file.read(name), vision[2][name])
    found = problems(write({**renamed, "mm_projector.linear_2.weight": None}), vision)
    assert found == ["mm_projector.linear_2.weight: missing, shape [128, 128] is expected"]


def test_a_folder_has_a_tower_if_config_and_tensors_say_so(golden, tensors, write):
    folder, _ = golden("vision")
    assert reads_tower(folder) and not reads_tower(folder, False)
    assert not reads_tower(golden("k31-tiny")[0]) and reads_tower(golden("k31-tiny")[0], True)
    assert not reads_tower(write(dict.fromkeys(names_of(tensors))))


def test_without_the_tower_its_tensors_are_not_looked_at(tensors, vision, write):
    changes = {name: tensors[name][:-1] for name in names_of(tensors)}
    with Checkpoint(write(changes), vision[0]) as file:
        assert not any(name.startswith("tower") for name in file.names)


def test_random_weights_are_written_and_read(vision, tmp_path):
    config, tower, *_ = vision
    tensors = random_tensors(config, seed=1, vision=tower)
    save_hf(tmp_path / "random", {**config.to_hf(), **tower.to_hf()}, tensors)
    assert reads_tower(tmp_path / "random")
    with Checkpoint(tmp_path / "random", config, tower) as file:
        patch = np.asarray(file.read("tower.w_patch"), np.float32)
    assert patch.std() == pytest.approx((3 * 14 * 14) ** -0.5, rel=0.05)
