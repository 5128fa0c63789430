"""Released config files to read whole or damaged, and what a refusal must look like."""

import copy
from typing import Any

import pytest

from kimi_jax.config.config import Config
from kimi_jax.errors import ConfigError

TEXT = {
    "hidden_size": 256,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 512,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_expert_hidden_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "attn_res_block_size": 4,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 6,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8, 9],
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_act": "situ",
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "use_cache": True,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
}
DSA = {
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 16,
    "dsa_layers": [4, 8, 9],
}
WEIGHTS = "quantization_config.config_groups.group_0.weights"
MISSING = object()


def nested(text: dict[str, Any], architecture: str = "KimiK3ForConditionalGeneration") -> dict:
    return {
        "architectures": [architecture],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "kimi_k3_vision", "vt_num_hidden_layers": 1},
    }


def k3() -> dict[str, Any]:
    return nested(copy.deepcopy(TEXT))


def k3_1() -> dict[str, Any]:
    text = {**copy.deepcopy(TEXT), "dsa_config": copy.deepcopy(DSA)}
    return nested(text, "KimiK31ForConditionalGeneration")


def plant(file: dict, path: str, value: Any) -> dict:
    """Sets a dotted key of the decoder's table, or takes it out."""
    *tables, key = path.split(".")
    at = file.get("text_config", file)
    for table in tables:
        at = at[table]
    if value is MISSING:
        del at[key]
    else:
        at[key] = value
    return file


def problems_of(file: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.from_hf(file)
    return caught.value.problems


def refused(file: Any, *words: str) -> None:
    """There is exactly one problem, and its line holds all the words."""
    problems = problems_of(file)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems


def with_lists(kda: list[int], full: list[int], layers: int = 9) -> dict:
    file = plant(k3(), "num_hidden_layers", layers)
    plant(file, "linear_attn_config.kda_layers", kda)
    return plant(file, "linear_attn_config.full_attn_layers", full)
