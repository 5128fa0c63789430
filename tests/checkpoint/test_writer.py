"""Writing: a folder appears complete or not at all; random weights depend on their seed alone."""

import json

import numpy as np
import pytest
from checkpoints import BF16, FIXTURES, INDEX, KDA, MOE, NORM, assert_same
from safetensors import SafetensorError
from safetensors.numpy import load_file

from kimi_jax.checkpoint import random_tensors, save_hf, to_hf

config, tensors, saved, folder, write = FIXTURES


def test_to_hf_refuses_what_it_cannot_place(config):
    with pytest.raises(ValueError) as caught:
        to_hf(
            config,
            {
                "layers.2.attention.w_k_b": np.zeros((6, 12, 28), BF16),
                "norm": np.zeros(35, BF16),
                "nothing": np.zeros(1),
            },
        )
    assert str(caught.value).splitlines() == [
        "nothing: no such weight",
        "norm: shape (35,), expected (36,)",
        "layers.2.attention.w_v_b: missing, it shares a tensor with a weight that is given",
    ]


def test_to_hf_takes_a_few_weights_and_keeps_their_dtype(config):
    bias = np.ones(10, BF16)
    tensors = to_hf(config, {"norm": np.ones(36, np.float32), "layers.3.mlp.router_bias": bias})
    assert tensors[NORM].dtype == np.float32
    assert tensors[f"{MOE}gate.e_score_correction_bias"].dtype == np.float32
    assert len(tensors) == 2


def test_saving_is_all_or_nothing_and_overwrites_only_when_asked(config, tensors, tmp_path):
    target = tmp_path / "deep" / "checkpoint"
    save_hf(target, {"a": 1}, tensors)
    assert [path.name for path in target.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    assert json.loads((target / INDEX).read_text())["metadata"]["total_size"] == sum(
        a.nbytes for a in tensors.values()
    )
    with pytest.raises(FileExistsError, match="exists"):
        save_hf(target, {"a": 2}, tensors)
    with pytest.raises(SafetensorError, match="object"):
        save_hf(target, {"a": 2}, {"x": np.zeros(3), "y": object()}, shard_bytes=1, overwrite=True)
    assert json.loads((target / "config.json").read_text()) == {"a": 1}
    save_hf(target, {"a": 3}, {"x": np.zeros(3)}, overwrite=True)
    assert json.loads((target / "config.json").read_text()) == {"a": 3}
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]
    assert load_file(target / "model-00001-of-00001.safetensors")["x"].shape == (3,)


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        save_hf(tmp_path / "mine", {}, {"x": np.zeros(3)}, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_random_weights_depend_on_the_seed_and_are_of_sane_sizes(config, tensors):
    assert_same(random_tensors(config, seed=3), tensors)
    other = random_tensors(config, seed=4)
    for name, array in tensors.items():
        assert np.isfinite(array.astype(np.float32)).all()
        assert name.endswith("_scale") or not np.array_equal(array, other[name]), name
    q = tensors[f"{KDA}q_proj.weight"].astype(np.float32)
    assert abs(q.std() * 6 - 1) < 0.1
    a_log = tensors[f"{KDA}A_log"]
    assert (
        a_log.shape == (128,)
        and (a_log[:6] > 0).all()
        and (a_log[:6] < np.log(16)).all()
        and not a_log[6:].any()
    )
    assert abs(tensors[NORM].astype(np.float32).mean() - 1) < 0.1
