"""Inventory: each tensor that is missing, unknown or of another form is named, all in one error."""

import dataclasses
import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from checkpoints import BF16, FIXTURES, INDEX, KDA, MLA, MOE, problems
from faults import header
from safetensors.numpy import save_file

from kimi_jax.checkpoint import Checkpoint, hf_shapes, random_tensors
from kimi_jax.errors import CheckpointError
from kimi_jax.model.mxfp4 import PLAIN

config, tensors, saved, folder, write = FIXTURES

INVENTORY_FAULTS = {  # a tensor that is put in, or None to leave it out, and what is said of it
    f"{KDA}o_proj.weight": (None, "missing, shape [36, 84] is expected"),
    f"{MLA}kv_b_proj.weight": (np.zeros((180, 29), BF16), "shape [180, 29], expected [180, 28]"),
    f"{KDA}q_conv1d.weight": (
        np.zeros((60, 4, 1), np.float32),
        "shape [60, 4, 1], expected [60, 1, 4]",
    ),
    f"{KDA}A_log": (np.zeros(5, np.float32), "shape [5], expected [128]"),
    "language_model.model.layers.1.self_attn.A_log": (
        np.zeros((2, 3), np.float32),
        "shape [2, 3], expected [128]",
    ),
    f"{KDA}b_proj.weight": (
        np.zeros((6, 36), np.float64),
        "dtype F64, expected BF16 or F32 or F16",
    ),
    f"{KDA}f_a_proj.weight": (
        np.zeros((10, 36), ml_dtypes.float8_e4m3fn),
        "dtype F8_E4M3, expected BF16",
    ),
    f"{MOE}experts.7.w2.weight_packed": (None, "missing, shape [96, 16] is expected"),
    f"{MOE}experts.7.w3.weight_scale": (np.zeros((32, 3), np.int8), "dtype I8, expected U8"),
    f"{MOE}experts.2.w1.weight_scale": (
        np.zeros((32, 6), np.uint8),
        "shape [32, 6], expected [32, 3]",
    ),
    f"{MOE}experts.10.w1.weight_packed": (
        np.zeros((32, 48), np.uint8),
        "unknown tensor of shape [32, 48]",
    ),
    f"{MOE}experts.1.w1.weight_shape": (np.zeros(2, np.int64), "unknown tensor of shape [2]"),
    "language_model.model.layers.4.input_layernorm.weight": (np.zeros(36, BF16), "unknown tensor"),
    "vision_towers.weight": (np.zeros(36, BF16), "unknown tensor"),
}


@pytest.mark.parametrize("name", INVENTORY_FAULTS)
def test_a_tensor_that_does_not_belong_is_named(name, write, config):
    array, expected = INVENTORY_FAULTS[name]
    (problem,) = problems(write({name: array}), config)
    assert problem.startswith(f"{name}: {expected}")


def test_all_faults_stand_in_one_error(write, config):
    folder = write({name: array for name, (array, _) in INVENTORY_FAULTS.items()})
    shard = sorted(folder.glob("model-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    lost = {
        name
        for name, at in json.loads((folder / INDEX).read_text())["weight_map"].items()
        if at == shard.name
    }
    found = problems(folder, config)
    assert len(found) == 1 + len(INVENTORY_FAULTS.keys() - lost) > 5
    assert found[0].startswith(shard.name)
    for name, (_, expected) in INVENTORY_FAULTS.items():
        assert name in lost or any(problem.startswith(f"{name}: {expected}") for problem in found)


def test_experts_packed_and_plain_are_not_mixed(write, config, tensors):
    odd = f"{MOE}experts.5.w1"
    plain = {
        f"{odd}.weight_packed": None,
        f"{odd}.weight_scale": None,
        f"{odd}.weight": np.zeros((32, 96), BF16),
    }
    assert problems(write(plain), config) == (f"{odd}: plain, unlike most experts",)


def test_a_packed_expert_among_plain_ones_is_named(write, config, tensors):
    odd = f"{MOE}experts.5.w1"
    packed = {f"{odd}.weight": None} | {
        f"{odd}.{f}": tensors[f"{odd}.{f}"] for f in ("weight_packed", "weight_scale")
    }
    folder = write(packed, base=random_tensors(config, seed=3, quantization=PLAIN))
    assert problems(folder, config) == (f"{odd}: packed, unlike most experts",)


def test_an_expert_with_both_forms_is_named(write, config):
    both = f"{MOE}experts.5.w1"
    found = problems(write({f"{both}.weight": np.zeros((32, 96), BF16)}), config)
    assert found == (f"{both}: plain, unlike most experts",)


def test_experts_of_one_weight_have_one_dtype(write, config):
    plain = random_tensors(config, seed=3, quantization=PLAIN)
    name = f"{MOE}experts.5.w1.weight"
    found = problems(write({name: plain[name].astype(np.float32)}, base=plain), config)
    assert found == ("layers.3.mlp.experts.w_gate: experts differ in dtype, BF16 and F32",)


def test_long_lists_of_problems_are_cut_when_printed(tmp_path, config):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path, config)
    count = len(hf_shapes(config, quantization=PLAIN))  # the bias may be absent, x may not be there
    assert len(caught.value.problems) == count
    text = str(caught.value).splitlines()
    assert (
        len(text) == 42
        and text[0].startswith(f"{count} problems")
        and text[-1].endswith(f"and {count - 40} more")
    )


def add_dims(path, name, count):
    """Gives a tensor `count` more dims of size 1, which numpy could not save."""
    header(lambda h: h[name].update(shape=[1] * count + h[name]["shape"]))(path)


def test_a_shape_of_more_dims_than_numpy_has_is_a_problem(config, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    for count, fits in [(1, True), (3, True), (63, True), (64, False), (70, False), (5_000, False)]:
        save_file(tensors, path)
        add_dims(path, f"{KDA}A_log", count)
        if fits:
            with Checkpoint(tmp_path, config) as checkpoint:
                values = checkpoint.read("layers.0.attention.a_log")
            np.testing.assert_array_equal(values, tensors[f"{KDA}A_log"][:6])
        else:
            (problem,) = problems(tmp_path, config)
            assert problem.startswith(f"{KDA}A_log: shape [1, 1, 1") and len(problem) < 300
    save_file({**tensors, "vision_tower.x": np.ones(3, BF16)}, path)
    add_dims(path, "vision_tower.x", 100)  # is never read
    Checkpoint(tmp_path, config).close()


def test_missing_experts_are_counted_where_they_are_many(write, config, tensors):
    claimed = dataclasses.replace(config, experts=62_500)
    tracemalloc.start()
    found = problems(write({}), claimed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    expected = (
        f"{MOE}experts.*.w2.weight_packed: missing for 62,490 of 62,500 experts (10, 11, 12, …), "
        "shape [96, 16] is expected"
    )
    assert expected in found
    assert len(found) == 3 * 8  # a router, its bias and six expert matrices in three layers


@pytest.mark.parametrize("number", ["03", "1e0", "٣", "-1", "{}", "3.0"])
def test_an_expert_number_that_is_not_canonical_is_unknown(number, write, config, tensors):
    array = tensors[f"{MOE}experts.3.w1.weight_scale"]
    name = f"{MOE}experts.{number}.w1.weight_scale"
    (problem,) = problems(write({name: array}), config)
    assert problem.startswith(f"{name}: unknown tensor")


def test_messages_show_no_escape_sequences(write, config):
    name = "language_model.\x1b[2Jmodel\u202e" + "x" * 100_000
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(write({name: np.zeros(1, BF16)}), config)
    text = str(caught.value)
    assert "\\x1b[2Jmodel\\u202e" in text and len(text) < 5_000
    assert all(line.isprintable() for line in text.splitlines())
