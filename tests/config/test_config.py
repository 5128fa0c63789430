"""`Config`: its fields, what follows from them, the released sizes, and the way back to a file."""

import dataclasses
import json

import pytest
from configs import k3, k3_1, plant

from kimi_jax.config.config import Config


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
