"""Config files: what is read, what is refused, and that every refusal names its key."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.config.config import Config
from kimi_jax.errors import ConfigError, Problems

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


def test_every_field_of_a_released_config():
    assert Config.from_hf(k3_1()) == Config(
        hidden=256,
        layers=9,
        vocab=512,
        mla_layers=(3, 7, 8),
        residual_block=4,
        norm_eps=1e-5,
        max_positions=4096,
        tie_embeddings=False,
        kda_heads=6,
        kda_key_dim=32,
        kda_value_dim=32,
        conv_width=4,
        decay_lower_bound=-5.0,
        full_rank_gate=True,
        heads=8,
        q_rank=64,
        kv_rank=32,
        nope_dim=16,
        rope_dim=8,
        value_dim=24,
        mla_output_gate=True,
        mla_norm_eps=1e-6,
        dense_ffn=512,
        dense_layers=1,
        moe_layer_freq=1,
        experts=16,
        active_experts=4,
        shared_experts=2,
        expert_ffn=64,
        latent=128,
        latent_norm=True,
        router="sigmoid",
        renormalize=True,
        routed_scale=1.0,
        expert_groups=1,
        groups_kept=1,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        index_heads=3,
        index_dim=20,
        index_topk=16,
        quantized=True,
        bos=1,
        eos=(2,),
        pad=0,
    )


def test_without_dsa_config_there_is_no_index():
    config = Config.from_hf(k3())
    assert (config.index_heads, config.index_dim, config.index_topk) == (0, 0, 0)
    assert not config.sparse and Config.from_hf(k3_1()).sparse


def test_layers_are_counted_from_0():
    config = Config.from_hf(k3())
    assert [i for i in range(9) if config.is_mla(i)] == [3, 7, 8]
    assert config.kda_layers == (0, 1, 2, 4, 5, 6)
    assert [i for i in range(9) if config.is_dense(i)] == [0]
    assert config.moe_layers == (1, 2, 3, 4, 5, 6, 7, 8)


def test_moe_layer_freq_counts_from_layer_0():
    file = plant(plant(k3(), "moe_layer_freq", 3), "first_k_dense_replace", 4)
    assert Config.from_hf(file).moe_layers == (6,)


def test_derived_sizes():
    config = Config.from_hf(k3())
    assert config.latent_row == 32 + 8
    assert config.shared_ffn == 2 * 64
    assert config.bank_rows == 3  # blocks start at 0, 4 and 8


def test_a_config_is_hashable():
    assert {Config.from_hf(k3()): "found"}[Config.from_hf(k3())] == "found"


@pytest.mark.parametrize("config", [Config.k3(), Config.k3_1()], ids=["k3", "k3.1"])
def test_full_size(config):
    assert config.layers == 93 and config.hidden == 7168 and config.vocab == 163840
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert config.mla_layers[-2:] == (91, 92)
    assert len(config.kda_layers) == 69 and len(config.mla_layers) == 24
    assert config.bank_rows == 8
    assert config.dense_ffn == 33792
    assert config.moe_layers == tuple(range(1, 93))
    assert (config.experts, config.active_experts, config.shared_ffn) == (896, 16, 6144)
    assert (config.latent, config.expert_ffn, config.latent_row) == (3584, 3072, 576)
    assert (config.bos, config.eos, config.pad) == (163584, (163586,), 163839)
    assert config.norm_eps == 1e-5 and config.mla_norm_eps == 1e-6
    assert config.quantized and not config.tie_embeddings


def test_k3_1_is_k3_with_an_index():
    index = {"index_heads": 32, "index_dim": 128, "index_topk": 2048}
    assert Config.k3_1() == dataclasses.replace(Config.k3(), **index)


@pytest.mark.parametrize("file", [k3(), k3_1()], ids=["k3", "k3.1"])
def test_flat_form_equals_nested_form(file):
    bookkeeping = {"vision_config": {}, "media_placeholder_token_id": 3}
    assert Config.from_hf({**file["text_config"], **bookkeeping}) == Config.from_hf(file)


def test_a_file_its_folder_and_its_content_read_alike(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(k3_1()))
    assert Config.from_hf(path) == Config.from_hf(str(tmp_path)) == Config.from_hf(k3_1())


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "null", *(pytest.param(c * 100_000, id=f"deep {c}") for c in ("[", '{"a":'))],
)
def test_a_file_that_holds_no_table_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(path, str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Config.from_hf(tmp_path)


ROUND_TRIPS = {
    "k3": Config.k3(),
    "k3.1": Config.k3_1(),
    "small": Config.from_hf(k3_1()),
    "changed": dataclasses.replace(
        Config.from_hf(k3()),
        kda_value_dim=48,
        decay_lower_bound=None,
        full_rank_gate=False,
        mla_norm_eps=1e-5,
        moe_layer_freq=2,
        router="softmax",
        renormalize=False,
        routed_scale=2.5,
        expert_groups=4,
        groups_kept=2,
        tie_embeddings=True,
        quantized=False,
        latent=40,
        bos=None,
        eos=(5, 7),
        pad=None,
    ),
    "no end": dataclasses.replace(Config.from_hf(k3()), eos=()),
}


@pytest.mark.parametrize("config", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_to_hf_reads_back_equal(config):
    written = json.loads(json.dumps(config.to_hf()))
    assert Config.from_hf(written) == config
    assert Config.from_hf(written["text_config"]) == config


def test_to_hf_has_the_released_form():
    written = Config.k3_1().to_hf()
    assert written["architectures"] == ["KimiK31ForConditionalGeneration"]
    assert Config.k3().to_hf()["architectures"] == ["KimiK3ForConditionalGeneration"]
    full = written["text_config"]["linear_attn_config"]["full_attn_layers"]
    assert full == [*range(4, 93, 4), 93] == written["text_config"]["dsa_config"]["dsa_layers"]
    assert "quantization_config" in written["text_config"]
    assert "dsa_config" not in Config.k3().to_hf()["text_config"]


REQUIRED = sorted(
    {
        *(TEXT.keys() - {"head_dim", "model_type", "architectures", "dtype", "initializer_range"}),
        *(f"linear_attn_config.{key}" for key in TEXT["linear_attn_config"]),
    }
    - {"use_cache", "num_key_value_heads", "tie_word_embeddings", "rope_theta", "rope_scaling"}
    - {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "topk_method"}
    - {"num_nextn_predict_layers", "quantization_config", "linear_attn_config.gate_lower_bound"}
)


@pytest.mark.parametrize("value", [MISSING, None], ids=["missing", "null"])
@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named_and_never_guessed(key, value):
    refused(plant(k3(), key, value), f"{key}: missing")


@pytest.mark.parametrize(
    "key, field, value",
    [
        ("linear_attn_config.gate_lower_bound", "decay_lower_bound", None),
        ("quantization_config", "quantized", False),
        ("bos_token_id", "bos", None),
        ("eos_token_id", "eos", ()),
    ],
)
def test_a_key_whose_absence_means_something(key, field, value):
    assert getattr(Config.from_hf(plant(k3(), key, MISSING)), field) == value
    assert getattr(Config.from_hf(plant(k3(), key, None)), field) == value


@pytest.mark.parametrize(
    "key, value, field, expected",
    [
        ("eos_token_id", [2, 5], "eos", (2, 5)),
        ("mla_norm_eps", 1e-5, "mla_norm_eps", 1e-5),
        ("mla_layernorm_eps", 1e-5, "mla_norm_eps", 1e-5),
        ("mla_use_output_gate", False, "mla_output_gate", False),
        ("latent_moe_use_norm", False, "latent_norm", False),
        ("moe_renormalize", False, "renormalize", False),
        ("routed_scaling_factor", 2, "routed_scale", 2.0),
        ("moe_router_activation_func", "softmax", "router", "softmax"),
        ("first_k_dense_replace", 0, "dense_layers", 0),
        ("linear_attn_config.use_full_rank_gate", False, "full_rank_gate", False),
        ("linear_attn_config.head_v_dim", 48, "kda_value_dim", 48),
        ("linear_attn_config.gate_lower_bound", -3, "decay_lower_bound", -3.0),
    ],
)
def test_what_the_file_says_is_used(key, value, field, expected):
    config = Config.from_hf(plant(k3(), key, value))
    assert getattr(config, field) == expected
    assert type(getattr(config, field)) is type(expected)


def test_groups_count_only_where_grouped_topk_is_used():
    file = plant(plant(k3(), "num_expert_group", 4), "topk_group", 2)
    config = Config.from_hf(file)
    assert (config.expert_groups, config.groups_kept) == (4, 2)
    config = Config.from_hf(plant(file, "use_grouped_topk", False))
    assert (config.expert_groups, config.groups_kept) == (1, 1)


def test_special_tokens_are_found_at_the_top_level_where_the_decoder_has_none():
    file = plant(k3(), "eos_token_id", MISSING) | {"eos_token_id": [7], "bos_token_id": 9}
    config = Config.from_hf(file)
    assert config.eos == (7,) and config.bos == 1


def test_tied_embeddings_are_found_at_either_level():
    file = plant(k3(), "tie_word_embeddings", MISSING)
    assert Config.from_hf({**file, "tie_word_embeddings": True}).tie_embeddings
    del file["tie_word_embeddings"]
    assert not Config.from_hf(file).tie_embeddings
    assert Config.from_hf(plant(file, "tie_word_embeddings", True)).tie_embeddings


def test_tied_embeddings_that_disagree_are_refused():
    refused(k3() | {"tie_word_embeddings": True}, "tie_word_embeddings", "True", "False")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", 1),
        ("moe_renormalize", 1),
        ("num_key_value_heads", 4),
        ("linear_attn_config", {**TEXT["linear_attn_config"], "head_dim": 64}),
        ("sliding_window", 128),
        ("attention_bias", True),
        ("use_grouped_topk", False),
        ("rotary_scaling", 2),
    ],
)
def test_a_key_beside_a_text_config_that_may_matter_is_refused(key, value):
    refused(k3() | {key: value}, f"{key}: unknown beside text_config", repr(value))


@pytest.mark.parametrize(
    "key", ["hidden_size", "linear_attn_config", "attention_bias", "sliding_window", "hidden_act"]
)
def test_a_key_beside_a_text_config_may_repeat_what_holds(key):
    held = {**TEXT, "attention_bias": False}.get(key)
    assert Config.from_hf(k3() | {key: held}) == Config.from_hf(k3())


def test_the_top_level_of_a_released_file_passes():
    """Of the model that sees, of its tokens, and what a library adds when it saves the file."""
    released = {
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "video_placeholder": "<|video|>",
        "use_unified_vision_chunk": True,
        "transformers_version": "5.12.1",
        "quantization_config": TEXT["quantization_config"],
    }
    assert Config.from_hf(k3() | released) == Config.from_hf(k3())


@pytest.mark.parametrize("key", ["dsa_config", "quantization_config"])
def test_a_table_at_the_top_level_is_found(key):
    file = k3_1()
    moved = file | {key: file["text_config"].pop(key)}
    assert Config.from_hf(moved) == Config.from_hf(k3_1())


def test_tables_at_both_levels_must_agree():
    file = k3_1()
    both = file | {"dsa_config": file["text_config"]["dsa_config"]}
    assert Config.from_hf(both) == Config.from_hf(k3_1())
    refused(file | {"dsa_config": {**DSA, "index_topk": 8}}, "dsa_config", "'index_topk': 8")


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
    shown = repr(value) if isinstance(value, int | str) else ""
    refused(file, key, shown)


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


def with_lists(kda: list[int], full: list[int], layers: int = 9) -> dict:
    file = plant(k3(), "num_hidden_layers", layers)
    plant(file, "linear_attn_config.kda_layers", kda)
    return plant(file, "linear_attn_config.full_attn_layers", full)


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


@pytest.mark.parametrize("heads", ["index_n_heads", "n_heads", "num_heads", "index_num_heads"])
@pytest.mark.parametrize("dim", ["index_head_dim", "head_dim"])
@pytest.mark.parametrize("topk", ["index_topk", "topk", "top_k"])
@pytest.mark.parametrize("layers", ["dsa_layers", "layers", "full_attn_layers", "index_layers"])
def test_every_spelling_of_a_dsa_config(heads, dim, topk, layers):
    dsa = {heads: 3, dim: 20, topk: 16, layers: [4, 8, 9]}
    assert Config.from_hf(plant(k3_1(), "dsa_config", dsa)) == Config.from_hf(k3_1())


def test_a_dsa_config_without_a_list_means_the_full_attention_layers():
    assert Config.from_hf(plant(k3_1(), "dsa_config.dsa_layers", MISSING)).sparse


@pytest.mark.parametrize(
    "key, value",
    [
        ("dsa_layers", [4, 8]),
        ("dsa_layers", [3, 7, 8]),
        ("dsa_layers", [4, 8, 9, 9]),
        ("dsa_layers", []),
        ("layers", [1, 2, 3]),
        ("dsa_layers", "all"),
        ("dsa_layers", [4, 8, 9.0]),
        ("topk", 8),
        ("index_topk", 0),
        ("index_topk", MISSING),
        ("index_n_heads", True),
        ("mystery", 3),
        ("rope_head_dim", 8),
        ("rope_dims", [4, 8, 9]),
        ("use_rope", False),
    ],
)
def test_a_bad_dsa_config_is_refused_with_its_key(key, value):
    refused(plant(k3_1(), f"dsa_config.{key}", value), "dsa_config", key)


def test_k3_1_without_a_dsa_config_is_refused():
    refused(plant(k3_1(), "dsa_config", MISSING), "dsa_config", "KimiK31ForConditionalGeneration")


def test_all_problems_come_in_one_error():
    file = k3_1()
    planted = {
        "hidden_size": MISSING,
        "vocab_size": "512",
        "mystery": 3,
        "dsa_config.rope_theta": 1e4,
        f"{WEIGHTS}.group_size": 64,
    }
    for key, value in planted.items():
        plant(file, key, value)
    with pytest.raises(ConfigError) as caught:
        Config.from_hf(file)
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.problems) == 5
    for key in planted:
        assert sum(line.startswith(f"{key}: ") for line in caught.value.problems) == 1
    message = str(caught.value)
    assert message.startswith("5 problems") and len(message.splitlines()) == 6


@pytest.mark.parametrize("value", [None, 3, [TEXT]])
def test_a_text_config_that_is_no_table_is_refused(value):
    refused(k3() | {"text_config": value}, "text_config")


def test_reading_leaves_the_file_as_it_was():
    file = k3_1()
    Config.from_hf(file)
    assert file == k3_1()
