"""Fixtures for tests of the command line: a small checkpoint, and a way to run commands."""

import dataclasses
import shutil

import numpy as np
import pytest
from trainer import train_ranks

import kimi_jax as kj
from kimi_jax.checkpoint import random_tensors, save_hf
from kimi_jax.cli import main as cli
from kimi_jax.cli import options as cli_options
from kimi_jax.text import tokenizer

SPECIAL = ("[BOS]", "[EOS]", "[PAD]")
RANKS = 260
CONFIG = dataclasses.replace(
    kj.Config.k3_1(),
    **{"hidden": 32, "layers": 3, "vocab": RANKS + 3, "mla_layers": (2,), "residual_block": 2},
    **{"max_positions": 64, "kda_heads": 2, "kda_key_dim": 8, "kda_value_dim": 8, "heads": 2},
    **{"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    **{"dense_ffn": 32, "experts": 4, "active_experts": 2, "latent": 32, "expert_ffn": 32},
    **{"index_heads": 2, "index_dim": 8, "index_topk": 8},
    **{"bos": RANKS, "eos": (RANKS + 1,), "pad": RANKS + 2},
)
LAYER = "language_model.model.layers."
A_LOG = f"{LAYER}0.self_attn.A_log"
NORM = f"{LAYER}1.input_layernorm.weight"
SCALE = f"{LAYER}1.block_sparse_moe.experts.3.w2.weight_scale"


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG, seed=1)


@pytest.fixture(scope="module")
def saved(tensors, tmp_path_factory):
    """A whole checkpoint with a tokenizer, not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "checkpoint"
    save_hf(folder, CONFIG.to_hf(), tensors, shard_bytes=40_000)
    ranks = train_ranks("the cat and the hat and the mat", RANKS)
    tokenizer.write_tokenizer(folder, ranks, {s: RANKS + i for i, s in enumerate(SPECIAL)})
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to plant faults in."""
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture(scope="module")
def model(saved):
    return kj.load(saved)


@pytest.fixture
def loaded(model, saved, monkeypatch):
    """Every command of the test gets the one model, which compiles once."""
    monkeypatch.setattr(cli_options, "SHIPPED", saved)
    monkeypatch.setattr(kj, "load", lambda path, **options: model)


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code, standard output, standard error."""

    def command(*words):
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return command


def assert_refused(result, *parts):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("kimi-jax: error: ") and "Traceback" not in err
    for part in parts:
        assert part in err


def nan_like(array):
    return np.full_like(array, np.nan)
