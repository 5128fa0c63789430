"""Drafts of the other form, with grouped-query attention; rotation; a form that is refused. All by
golden numbers of another implementation.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from models import AWKWARD, write
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kimi_jax as kj
from kimi_jax.checkpoint.draft_names import draft_table
from kimi_jax.config.draft import DraftConfig
from kimi_jax.config.rope import read_rope
from kimi_jax.config.section import Section
from kimi_jax.speculation.network import turned

FOLDER = GOLDEN / "speculation"
NESTED = (
    "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
EXACT = 1e-11  # measured 3e-15; 1e-11 at position 131,071


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of the draft's sizes, and the draft as it is released."""
    folder = tmp_path_factory.mktemp("gqa")
    write(dataclasses.replace(AWKWARD, hidden=64, vocab=96), folder / "model")
    with safe_open(FOLDER / "gqa_form.safetensors", "np") as file:
        given = json.loads(file.metadata()["config"])
    config = {key: given[key] for key in given.keys() - {*NESTED, "num_anchors"}}
    config |= {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "num_target_layers": 5}
    config["dflash_config"] = {"attention_mode": "gqa"} | {key: given[key] for key in NESTED}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    arrays = load_file(FOLDER / "gqa_form.safetensors")
    tensors = {name[2:]: x for name, x in arrays.items() if name.startswith("w.")}
    save_file(tensors, folder / "draft" / "model.safetensors")
    return folder / "model", folder / "draft", arrays


def test_grouped_queries_equal_the_golden_ones_with_heads_padded_to_the_ranks(folders):
    """Two key heads over four ranks, requests over two."""
    model_folder, folder, wanted = folders
    placement = kj.Placement(pad=("heads", "experts"))
    model = kj.load(model_folder, kj.make_mesh(2, 4), placement, dtype="float64")
    draft = kj.load_draft(folder, model)
    assert draft.config.stream == "mixture" and not draft.config.causal
    shared = {("embed",): wanted["w.embed_tokens.weight"], ("head",): wanted["w.lm_head.weight"]}
    placed = {
        path: jax.device_put(np.asarray(x, np.float64), draft.params[path].sharding)
        for path, x in shared.items()
    }
    draft = dataclasses.replace(draft, params={**draft.params, **placed})

    anchors = np.pad(wanted["anchors"].astype(np.int32), (0, 1))  # a fourth row: two on each rank
    ids, taps = wanted["ids"].astype(np.int32), wanted["taps"].astype(np.float64)
    B, T = len(anchors), len(ids)
    lengths, starts = np.full(B, T, np.int32), np.zeros(B, np.int32)
    rows = jnp.asarray(np.broadcast_to(taps, (B, *taps.shape)))
    state = draft.extend(draft.begin(B, 64), np.tile(ids, (B, 1)), rows, starts, lengths)
    assert state.sharding.shard_shape(state.shape)[3] == 2 * 16  # a key and a value of one head
    block = draft.block(state, ids[anchors], anchors, 3)
    sure = 1 / (1 + np.exp(-wanted["confidence_logit_f64"]))
    np.testing.assert_allclose(block.base[:3], wanted["base_logits_f64"], rtol=0, atol=EXACT)
    corrected = wanted["corrected_logits_f64"]
    np.testing.assert_allclose(block.corrected[:3], corrected, rtol=0, atol=EXACT)
    assert block.confidences is not None
    np.testing.assert_allclose(block.confidences[:3], sure, rtol=0, atol=EXACT)
    np.testing.assert_array_equal(block.ids[:3], wanted["tokens"])


@pytest.mark.parametrize("name", ["default", "tiny", "published", "mscale_differs"])
def test_rotation_equals_the_golden_one(name):
    arrays = load_file(FOLDER / "rope.safetensors")
    of = lambda what: arrays[f"{name}.{what}"]  # noqa: E731
    dim, nope, theta, factor, original, fast, slow, mscale, every = map(float, of("cfg"))
    table: dict[str, Any] = {"rope_theta": theta}
    if factor != 1:
        yarn = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow,
                "original_max_position_embeddings": int(original), "mscale": mscale,
                "mscale_all_dim": every}  # fmt: skip
        table["rope_parameters"] = yarn
    problems: list[str] = []
    rope = read_rope(Section(table, problems), "mla", int(dim))
    assert rope is not None and not problems
    np.testing.assert_allclose(rope.frequencies, of("inv_freq_f64"), rtol=1e-14)
    scale = (dim + nope) ** -0.5 * rope.score_factor
    np.testing.assert_allclose(scale, of("softmax_scale")[0], rtol=1e-14)
    x = jnp.asarray(of("x"), "float64")[None, :, None]
    y = turned(x, jnp.asarray(of("positions"))[None], rope)[0, :, 0]
    np.testing.assert_allclose(y, of("y_f64"), rtol=0, atol=EXACT * 10)


def test_a_draft_that_is_another_network_is_refused_by_name():
    """No rotation, an output gate, SiTU: the model's own attention in a draft."""
    config = json.loads((FOLDER / "nemo_k3_form.json").read_text())
    with pytest.raises(kj.ConfigError) as caught:
        DraftConfig.from_hf(config)
    for key in ("mla_use_nope", "mla_use_output_gate", "activation_situ_beta"):
        assert f"{key}: " in str(caught.value)


SHARED = {
    "hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5, "rms_norm_eps": 1e-5,
    "num_attention_heads": 64, "vocab_size": 163840,
}  # fmt: skip
HEADS = {
    "markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True
}  # fmt: skip
LATENT = SHARED | HEADS | {
    "model_type": "k3_dspark", "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": False,
    "max_position_embeddings": 1048576, "rope_theta": 50000, "num_target_layers": 5,
    "target_num_hidden_layers": 93, "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "rope_parameters": {"rope_type": "yarn", "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 32768},
}  # fmt: skip
GROUPED = SHARED | {
    "model_type": "qwen3", "num_key_value_heads": 16, "head_dim": 64, "num_target_layers": 93,
    "max_position_embeddings": 65536, "block_size": 7,
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "rope_theta": 10000,
                        "original_max_position_embeddings": 4096},
    "dflash_config": HEADS | {"attention_mode": "gqa", "mask_token_id": 163824,
                              "target_layer_ids": [7, 23, 51, 67, 83]},
}  # fmt: skip


@pytest.mark.parametrize(
    "given, tensors, numbers, token_bytes, scale",
    [
        # 68 tensors and 3,562,312,961 numbers are published, with a copy of the model's embedding
        (LATENT, 67, 3_562_312_961 - 163840 * 7168, 5_760, 0.130861),
        (GROUPED, 62, 2_249_289_601, 20_480, 0.125),
    ],
)
def test_released_drafts_have_the_published_numbers(given, tensors, numbers, token_bytes, scale):
    config = DraftConfig.from_hf(given)
    shapes = {weight.source: weight.file_shape for weight in draft_table(config)}
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes.values())) == numbers
    assert config.cached_row * 2 * config.layers == token_bytes
    assert config.score_scale == pytest.approx(scale, abs=1e-6)
