"""A small checkpoint of awkward sizes, and what tests of checkpoint folders share."""

import shutil

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint import Checkpoint, random_tensors, save_hf
from kimi_jax.config.config import Config
from kimi_jax.errors import CheckpointError

ROOT = "language_model."
EMBED = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
NORM = "language_model.model.norm.weight"
KDA = "language_model.model.layers.0.self_attn."
MLA = "language_model.model.layers.2.self_attn."
MOE = "language_model.model.layers.3.block_sparse_moe."
INDEX = "model.safetensors.index.json"
BF16 = ml_dtypes.bfloat16

LINEAR = {
    "num_heads": 6, "head_dim": 10, "head_v_dim": 14, "short_conv_kernel_size": 4,
    "use_full_rank_gate": True, "gate_lower_bound": -5.0, "kda_layers": [1, 2, 4],
    "full_attn_layers": [3],
}  # fmt: skip
FILE = {
    "hidden_size": 36, "num_hidden_layers": 4, "vocab_size": 51, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "attn_res_block_size": 2, "num_attention_heads": 6, "q_lora_rank": 20,
    "kv_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 18,
    "mla_use_nope": True, "mla_use_output_gate": True, "intermediate_size": 44,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 10, "num_experts_per_token": 3,
    "num_shared_experts": 1, "moe_intermediate_size": 32, "routed_expert_hidden_size": 96,
    "latent_moe_use_norm": True, "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 2,
    "topk_group": 1, "hidden_act": "situ", "tie_word_embeddings": False,
    "activation_situ_beta": 3.0, "activation_situ_linear_beta": 7.0,
    "dsa_config": {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8},
}  # fmt: skip


def make_config(**changes):
    """Four layers of awkward sizes: 6 heads, 10 experts, K != V, one dense, sparse selection."""
    linear = LINEAR | changes.pop("linear", {})
    return Config.from_hf({**FILE, "linear_attn_config": linear, **changes})


def problems(folder, config):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, config)
    return caught.value.problems


def read_all(checkpoint):
    return {name: checkpoint.read(name) for name in checkpoint.names}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config, seed=3)


@pytest.fixture(scope="module")
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


FIXTURES = (config, tensors, saved, folder, write)  # test files bind them to these names
