"""Every value that a key refuses, by its name, and what must hold between keys."""

import pytest
from configs import MISSING, WEIGHTS, k3, plant, problems_of, refused, with_lists
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.config.config import Config
from kimi_jax.errors import ConfigError, Problems, shown

BAD_VALUES = [
    ("hidden_size", 0),
    ("hidden_size", -4),
    ("hidden_size", True),
    ("hidden_size", 256.0),
    ("hidden_size", "256"),
    ("q_lora_rank", [64]),
    ("num_shared_experts", 0),
    ("first_k_dense_replace", -1),
    ("first_k_dense_replace", 10),
    ("moe_layer_freq", 0),
    ("rms_norm_eps", 0.0),
    ("rms_norm_eps", float("nan")),
    ("mla_norm_eps", "1e-6"),
    ("activation_situ_beta", float("inf")),
    ("activation_situ_beta", 10**400),
    ("activation_situ_linear_beta", -25.0),
    ("routed_scaling_factor", True),
    ("routed_scaling_factor", 0),
    ("moe_renormalize", 1),
    ("latent_moe_use_norm", "true"),
    ("use_grouped_topk", 0),
    ("moe_router_activation_func", "tanh"),
    ("moe_router_activation_func", ["sigmoid"]),
    ("hidden_act", "silu"),
    ("mla_use_nope", False),
    ("mla_use_nope", 1),
    ("topk_method", "greedy"),
    ("num_key_value_heads", 4),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("num_nextn_predict_layers", 1),
    ("sliding_window", 128),
    ("num_experts_per_token", 17),
    ("num_expert_group", 3),
    ("topk_group", 2),
    ("tie_word_embeddings", 0),
    ("bos_token_id", [1]),
    ("bos_token_id", 512),
    ("eos_token_id", -1),
    ("eos_token_id", [2, True]),
    ("eos_token_id", [2, 512]),
    ("pad_token_id", 512),
    ("mystery", 3),
    ("media_placeholder_token_id", 3),
    ("linear_attn_config", [1, 2]),
    ("linear_attn_config.mystery", 3),
    ("linear_attn_config.num_heads", 6.0),
    ("linear_attn_config.gate_lower_bound", 0.0),
    ("linear_attn_config.gate_lower_bound", 5.0),
    ("linear_attn_config.gate_lower_bound", float("-inf")),
    ("linear_attn_config.use_full_rank_gate", "yes"),
    ("linear_attn_config.kda_layers", "1"),
    ("linear_attn_config.kda_layers", [1, 2, 3, 5, 6, 7.0]),
    ("routed_expert_hidden_size", 72),
    ("moe_intermediate_size", 48),
    ("quantization_config", "mxfp4"),
    ("quantization_config.quant_method", "gptq"),
    ("quantization_config.quant_method", MISSING),
    ("quantization_config.format", "pack-quantized"),
    ("quantization_config.kv_cache_scheme", {"num_bits": 8}),
    ("quantization_config.sparsity_config", {"format": "sparse-24"}),
    ("quantization_config.transform_config", {"config_groups": {}}),
    ("quantization_config.mystery", 3),
    ("quantization_config.config_groups", MISSING),
    ("quantization_config.config_groups", {}),
    ("quantization_config.config_groups.group_1", {"targets": ["Linear"]}),
    ("quantization_config.config_groups.group_0.format", "nvfp4-pack-quantized"),
    ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}),
    (f"{WEIGHTS}.num_bits", 8),
    (f"{WEIGHTS}.num_bits", MISSING),
    (f"{WEIGHTS}.type", "int"),
    (f"{WEIGHTS}.group_size", 64),
    (f"{WEIGHTS}.group_size", MISSING),
    (f"{WEIGHTS}.strategy", "tensor_group"),
    (f"{WEIGHTS}.symmetric", False),
    (f"{WEIGHTS}.dynamic", True),
    (f"{WEIGHTS}.actorder", "weight"),
]


@pytest.mark.parametrize("key, value", BAD_VALUES)
def test_a_bad_value_is_refused_with_its_key(key, value):
    file = plant(k3(), key, value)
    if key == "tie_word_embeddings":
        file.pop("tie_word_embeddings")
    refused(file, key, shown(value) if isinstance(value, int | str) else "")


@pytest.mark.parametrize(
    "key, value, most",
    [
        ("num_hidden_layers", 10**9, 10_000),
        ("num_experts", 10**7, 65_535),
        ("vocab_size", 2**31, 2**31 - 1),
        ("first_k_dense_replace", 2**31, 2**31 - 1),
        ("linear_attn_config.num_heads", 10**12, 2**31 - 1),
    ],
)
def test_an_absurd_count_is_refused_before_anything_is_counted_out(key, value, most):
    refused(plant(k3(), key, value), f"{key}: {value} is more than {most}")


def test_layers_and_experts_are_limited_together():
    file = with_lists([*range(1, 9_999)], [9_999, 10_000], 10_000)
    assert Config.from_hf(plant(file, "num_experts", 100)).layers == 10_000
    refused(plant(file, "num_experts", 101), "num_experts=101 in num_hidden_layers=10000 layers")


def test_a_long_list_of_wrong_layers_is_found_at_once_and_cut():
    problems = problems_of(with_lists([*range(1, 9), *range(10, 20_010)] * 2, [9], 9))
    assert ["and 19960 more are outside 1..9" in line for line in problems] == [True, False]
    refused(with_lists([1], [2], 10_000), "[3, 4, 5,", "42] and 9958 more are neither")


def test_a_long_list_of_problems_is_cut_when_printed():
    with pytest.raises(ConfigError) as caught:
        Config.from_hf(k3() | {f"mystery_{i}": i for i in range(100)})
    assert isinstance(caught.value, Problems) and len(caught.value.problems) == 100
    first, *lines, last = str(caught.value).splitlines()
    assert first == "100 problems in the model config:" and len(lines) == 40
    assert last == "  and 60 more"


def test_a_format_in_each_group_is_enough():
    file = plant(k3(), "quantization_config.format", MISSING)
    assert Config.from_hf(file).quantized
    refused(plant(file, "quantization_config.config_groups.group_0.format", MISSING), "format")


def test_widths_of_any_size_pass_without_packing():
    file = plant(plant(k3(), "routed_expert_hidden_size", 72), "quantization_config", MISSING)
    assert Config.from_hf(file).latent == 72


def test_the_chosen_groups_must_hold_the_active_experts():
    file = plant(plant(k3(), "num_expert_group", 8), "num_experts_per_token", 3)
    refused(file, "num_experts_per_token=3", "topk_group=1")


def test_a_sigmoid_router_needs_two_experts_in_a_group():
    file = plant(plant(k3(), "num_expert_group", 16), "topk_group", 8)
    refused(file, "num_expert_group=16")
    assert Config.from_hf(plant(file, "moe_router_activation_func", "softmax")).groups_kept == 8


def test_spellings_that_disagree_are_refused():
    file = plant(plant(k3(), "mla_norm_eps", 1e-6), "mla_layernorm_eps", 1e-5)
    refused(file, "mla_norm_eps", "mla_layernorm_eps", "1e-05")


@pytest.mark.parametrize(
    "kda, full, words",
    [
        ([1, 2, 3, 6, 7], [4, 8, 9], ("[5]", "neither")),
        ([1, 2, 3, 4, 5, 6, 7], [4, 8, 9], ("[4]", "full_attn_layers too")),
        ([1, 2, 3, 5, 6, 7, 7], [4, 8, 9], ("kda_layers", "[7]", "more than once")),
        ([1, 2, 3, 5, 6, 7], [4, 8, 9, 9], ("full_attn_layers", "[9]", "more than once")),
        ([0, 1, 2, 3, 5, 6, 7], [4, 8, 9], ("kda_layers", "[0]", "1..9")),
        ([1, 2, 3, 5, 6, 7], [4, 8, 9, 10], ("full_attn_layers", "[10]", "1..9")),
    ],
)
def test_layer_lists_that_are_no_partition_are_refused(kda, full, words):
    refused(with_lists(kda, full), "linear_attn_config", *words)


def test_layer_lists_counted_from_0_are_refused():
    problems = problems_of(with_lists([0, 1, 2, 4, 5, 6], [3, 7, 8]))
    assert any("[0]" in line for line in problems) and any("[9]" in line for line in problems)


split = st.lists(st.booleans(), min_size=1, max_size=40)


@given(split, st.randoms(use_true_random=False))
def test_any_partition_reads_back(is_full, random):
    full = [i for i, flag in enumerate(is_full, 1) if flag]
    kda = [i for i, flag in enumerate(is_full, 1) if not flag]
    random.shuffle(full)
    random.shuffle(kda)
    config = Config.from_hf(with_lists(kda, full, len(is_full)))
    assert config.mla_layers == tuple(sorted(i - 1 for i in full))
    assert config.kda_layers == tuple(sorted(i - 1 for i in kda))
    assert Config.from_hf(config.to_hf()) == config


@given(split, st.data())
def test_any_overlap_is_refused(is_full, data):
    full = [i for i, flag in enumerate(is_full, 1) if flag]
    kda = [i for i, flag in enumerate(is_full, 1) if not flag]
    layer = data.draw(st.integers(1, len(is_full)))
    (kda if is_full[layer - 1] else full).append(layer)
    refused(with_lists(kda, full, len(is_full)), f"layers [{layer}] are in full_attn_layers too")
