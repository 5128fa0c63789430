"""`vision_config`: read as released, written back, and refused key by key."""

import copy
import json

import pytest

from kimi_jax.config.config import Config
from kimi_jax.config.vision import NORM_EPS, VisionConfig
from kimi_jax.errors import ConfigError


@pytest.fixture(scope="module")
def released(golden):
    """The golden file, parsed, and the decoder's config."""
    folder, _ = golden("vision")
    file = json.loads((folder / "config.json").read_text())
    return file, Config.from_hf(file)


def changed(file, key: str, *value) -> dict:
    """The file with another value of a key of `vision_config`, or without it."""
    file = copy.deepcopy(file)
    table = file["vision_config"]
    table = file if key in file and key not in table else table
    table.pop(key, None)
    table.update(dict.fromkeys([key], *value) if value else {})
    return file


def refused(released, file, *words) -> None:
    """There is exactly one problem, and its line holds all the words."""
    with pytest.raises(ConfigError) as caught:
        VisionConfig.from_hf(file, released[1])
    assert len(caught.value.problems) == 1, caught.value.problems
    assert all(word in caught.value.problems[0] for word in words), caught.value.problems


def test_a_released_file_is_read_and_written(released):
    config = VisionConfig.from_hf(*released)
    assert (config.head_dim, config.merged_width, config.hidden) == (16, 128, 128)
    assert config.placeholder == 7 and config.norm_eps == NORM_EPS == 1.1920928955078125e-07
    assert VisionConfig.from_hf({**released[0], **config.to_hf()}, released[1]) == config
    assert config.with_eps(1e-5).norm_eps == 1e-5


def test_the_released_tower_is_read_back():
    config = VisionConfig.k3()
    assert (config.head_dim, config.merged_width) == (128, 4096)
    file = config.to_hf()
    assert file["vision_config"]["merge_kernel_size"] == [2, 2]
    assert VisionConfig.from_hf(file, Config.k3()) == VisionConfig.from_hf(file, Config.k3_1())
    assert VisionConfig.from_hf(file, Config.k3()) == config


WRONG = {
    "patch_size": 0,
    "vt_hidden_size": 33,
    "vt_num_hidden_layers": 2.5,
    "vt_num_attention_heads": 5,
    "qkv_hidden_size": 30,
    "vt_intermediate_size": -1,
    "init_pos_emb_height": "8",
    "init_pos_emb_width": 0,
    "init_pos_emb_time": True,
    "projector_ln_eps": 0.0,
    "text_hidden_size": 256,
    "mm_hidden_size": 64,
    "pos_emb_type": "learned",
    "pos_emb_interpolation_mode": "bicubic",
    "norm_type": "layernorm",
    "mlp_type": "mlp3",
    "activation_func": "gelu",
    "attn_bias": True,
    "linear_bias": True,
    "patch_embed_proj_bias": True,
    "merge_kernel_size": [2, 1],
    "merge_type": "sd2",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu_pytorch_tanh",
    "model_type": "siglip",
    "video_attn_type": "temporal",
    "use_rot_proj": True,
    "num_experts": 3,
    "media_placeholder_token_id": 256,
}


@pytest.mark.parametrize("key", WRONG)
def test_each_wrong_value_is_refused_by_its_key(released, key):
    file = changed(released[0], key, WRONG[key])
    if key == "vt_hidden_size":  # the merged width then differs too
        file["vision_config"]["mm_hidden_size"] = WRONG[key]
    refused(released, file, key, str(WRONG[key]) if WRONG[key] is not True else "rue")


OPTIONAL = ("model_type", "video_attn_type", "_attn_implementation")


def test_each_missing_key_is_refused_by_name(released):
    for key in released[0]["vision_config"]:
        if key not in OPTIONAL:
            refused(released, changed(released[0], key), f"vision_config.{key}: missing")
    refused(released, changed(released[0], "media_placeholder_token_id"), "missing")
    refused(released, changed(released[0], "vision_config"), "vision_config: missing")


def test_all_problems_come_together(released):
    file = changed(changed(released[0], "patch_size", "x"), "mystery", 3)
    with pytest.raises(ConfigError) as caught:
        VisionConfig.from_hf(file, released[1])
    assert len(caught.value.problems) == 2


def test_bookkeeping_is_ignored_and_an_epsilon_checked(released):
    config = VisionConfig.from_hf(*released)
    file = changed(released[0], "_attn_implementation", "eager")
    file["vision_config"] |= {"torch_dtype": "bfloat16", "transformers_version": "5.1"}
    assert VisionConfig.from_hf(file, released[1]) == config
    with pytest.raises(ConfigError, match="vision_norm_eps must be"):
        config.with_eps(0)
