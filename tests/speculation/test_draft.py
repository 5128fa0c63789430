"""DSpark drafts: arrays and whole rounds of another implementation, and what is refused."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file, save_file

import kimi_jax as kj
from kimi_jax.config.draft import DraftConfig

NAMES = ("dspark-tiny", "dspark-tiny-attnres")


@pytest.fixture(scope="module")
def target(golden):
    return kj.load(golden("k3-tiny")[0], dtype="float64", walk="scanned", chunk=64)


@pytest.fixture(scope="module", params=NAMES)
def draft(request, golden, target):
    folder, expected = golden(request.param)
    traces = json.loads((GOLDEN / request.param / "traces.json").read_text())
    return kj.load_draft(folder, target), expected, traces


def test_a_block_equals_the_golden_one(draft):
    """Cached rows, logits, drafts and confidences behind several anchors of a text."""
    own, wanted, _ = draft
    anchors, ids = wanted["anchors"].astype(np.int32), wanted["ids"].astype(np.int32)
    B, T = len(anchors), len(ids)
    taps = np.broadcast_to(wanted["taps_f64"], (B, *wanted["taps_f64"].shape))
    starts, lengths = np.zeros(B, np.int32), np.full(B, T, np.int32)
    state = own.begin(B, 64)
    state = own.extend(state, np.tile(ids, (B, 1)), jnp.asarray(taps), starts, lengths)
    rows = np.asarray(state)[1, 0, :T]
    np.testing.assert_allclose(rows, wanted["cache_row.1"], rtol=0, atol=1e-9)
    block = own.block(state, ids[anchors], anchors, wanted["tokens"].shape[1])
    logits = np.asarray(block.corrected)
    np.testing.assert_allclose(logits, wanted["corrected_logits_f64"], rtol=0, atol=1e-8)
    np.testing.assert_array_equal(block.ids, wanted["tokens"])
    sure = 1 / (1 + np.exp(-wanted["confidence_logit_f64"]))
    np.testing.assert_allclose(block.confidences, sure, rtol=0, atol=1e-8)


def same_rounds(target, own, traces, **options):
    """The golden tokens, and the golden number of accepted drafts in each round; the last round may
    be shorter here: drafts end where the reply does.
    """
    stops = [[trace["stop_id"]] if "stop_id" in trace else [] for trace in traces]
    found = target.generate(
        [trace["prompt"] for trace in traces],
        draft=own,
        max_new_tokens=[len(trace["final_ids"]) for trace in traces],
        stop_tokens=stops,
        **options,
    )
    for trace, stop, reply in zip(traces, stops, found, strict=True):
        end = stop if reply.finish_reason == "stop" else []
        assert reply.tokens + end == trace["final_ids"], trace["tag"]
        accepted = list(reply.acceptance.accepted)
        assert accepted[:-1] == trace["accepted"][: len(accepted) - 1], trace["tag"]
        assert len(accepted) == len(trace["accepted"])


def test_rounds_equal_the_golden_ones(draft, target):
    own, _, traces = draft
    plain = [trace for trace in traces if "confidence_threshold" not in trace]
    assert {"seen0", "unseen_len1", "stop"} <= {trace["tag"] for trace in plain}
    same_rounds(target, own, plain)


def test_rounds_of_drafts_that_are_sure_equal_the_golden_ones(draft, target):
    own, _, traces = draft
    (trace,) = (trace for trace in traces if "confidence_threshold" in trace)
    same_rounds(target, own, [trace], draft_threshold=trace["confidence_threshold"])


# What is refused.


def config_of(golden):
    return json.loads((golden("dspark-tiny")[0] / "config.json").read_text())


@pytest.mark.parametrize(
    "key, value",
    [
        ("mla_use_nope", True),
        ("mla_use_output_gate", True),
        ("mla_use_qk_norm", True),
        ("dspark_bonus_anchor", True),
        ("sample_from_anchor", False),
        ("markov_head_type", "rnn"),
        ("aux_hidden_stream", "output"),
        ("hidden_act", "situ"),
        ("target_layer_ids", [3, 1, 6]),
        ("target_layer_ids", [1, 3, 8]),
        ("target_num_hidden_layers", 5),
        ("hidden_size", 64),
        ("num_key_value_heads", 2),
        ("mask_token_id", 10**6),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("activation_situ_beta", 4.0),
        ("colour", 1),
    ],
)
def test_a_bad_key_is_refused_by_name(golden, target, key, value):
    with pytest.raises(kj.ConfigError, match=key):
        DraftConfig.from_hf(config_of(golden) | {key: value}, target.config)


@pytest.mark.parametrize("key", ["q_lora_rank", "target_layer_ids", "markov_rank", "mask_token_id"])
def test_a_missing_key_is_refused_by_name(golden, target, key):
    config = config_of(golden)
    del config[key]
    with pytest.raises(kj.ConfigError, match=f"{key}: missing"):
        DraftConfig.from_hf(config, target.config)


def test_tensors_are_checked_together(golden, target, tmp_path):
    folder = shutil.copytree(golden("dspark-tiny")[0], tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["context_norm.weight"] = tensors["context_norm.weight"][:-1]
    tensors["layers.9.mlp.up_proj.weight"] = tensors["final_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(kj.CheckpointError) as caught:
        kj.load_draft(folder, target)
    said = str(caught.value)
    for name in ("layers.1.mlp.up_proj", "context_norm", "layers.9.mlp.up_proj"):
        assert name in said


def test_copies_of_the_models_embedding_are_not_read(golden, target, tmp_path):
    folder = shutil.copytree(golden("dspark-tiny")[0], tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = np.zeros_like(tensors["embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors")
    trace = json.loads((GOLDEN / "dspark-tiny" / "traces.json").read_text())[0]
    same_rounds(target, kj.load_draft(folder, target), [trace])
