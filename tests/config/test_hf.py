"""Released files: where a value may stand, what is honoured, what is missing."""

import json

import pytest
from configs import DSA, MISSING, TEXT, WEIGHTS, k3, k3_1, plant, refused

from kimi_jax.config.config import Config
from kimi_jax.errors import ConfigError, shown


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
    refused(k3() | {key: value}, f"{key}: unknown beside text_config", shown(value))


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
