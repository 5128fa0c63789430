"""The floor of a step against the memory plan, and the ratios of a compiled program to it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import kimi_jax as kj
from kimi_jax.runtime.program import make_program


@pytest.fixture
def floor(monkeypatch):
    """The module scripts/bill/floor.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from bill import floor

    return floor


def least(floor, config, batch, tokens, cached, mesh=(1, 1), **place):
    program = make_program(config, kj.make_mesh(*mesh), kj.Placement(**place), "bfloat16")
    return floor.floor(program, floor.Load(batch, tokens, cached))


def test_many_rows_touch_every_weight_that_the_plan_counts_but_the_embedding(floor):
    config = kj.Config.k3_1()
    found = least(floor, config, 64, 4096, 0)
    embedding = config.vocab * config.hidden * 2
    weights = sum(found.bytes[part] for part in ("head", "attention", "mlp", "mlp/experts"))
    planned = kj.plan(config, {"data": 1, "model": 1}, batch=1).weight_bytes
    assert weights == planned - embedding


def test_a_row_touches_its_own_experts_and_a_share_of_the_keys(floor):
    config = kj.Config.k3_1()
    one, two = (least(floor, config, rows, 1, 131071) for rows in (1, 2))
    layers, matrices = len(config.moe_layers), 3 * config.latent * config.expert_ffn
    assert one.bytes["mlp/experts"] == layers * 16 * matrices * 17 // 32  # 4.25 bits a weight
    assert one.bytes["mlp/experts"] < two.bytes["mlp/experts"] < 2 * one.bytes["mlp/experts"]
    keys = 2048 * config.latent_row + 131072 * config.index_dim
    new = config.latent_row + config.index_dim
    assert one.bytes["attention/caches"] == len(config.mla_layers) * 2 * (keys + new)
    helix = least(floor, config, 1, 1, 131071, (1, 8), keys="helix")
    assert helix.bytes["attention/caches"] == one.bytes["attention/caches"] // 8


def test_states_are_read_and_written_once(floor):
    config = kj.Config.k3_1()
    found = least(floor, config, 3, 1, 9)
    H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
    conv = (config.conv_width - 1) * H * (2 * K + V) * 2
    assert found.bytes["attention/state"] == 2 * 3 * len(config.kda_layers) * (H * K * V * 4 + conv)


@pytest.mark.parametrize(
    ("step", "most_bytes", "most_launches"),
    [(("--batch", "4"), 5.0, 520), (("--step", "prefill", "--rows", "256"), 100.0, 930)],
    ids=["decode", "prefill"],
)
def test_a_small_model_stays_near_its_floor_when_it_is_compiled_for_gpus(
    step, most_bytes, most_launches
):
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("XLA's compiler for CUDA is not installed (jax-cuda12-plugin, jax-cuda12-pjrt)")
    command = [sys.executable, "scripts/aot.py", "kimi_jax/shipped", "--mesh", "1x2"]
    command += ["--context", "1024", "--bill", "--json", *step]
    plain = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, env={**os.environ, **plain}, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    ((cached, bill),) = json.loads(run.stdout)["bills"].items()
    assert int(cached) == 1024 - (1 if "--batch" in step else 256)
    assert 1.0 <= bill["bytes_over_floor"] <= most_bytes
    assert 0 < bill["total"]["in_buffers"] <= bill["total"]["launches"] <= most_launches
    assert not bill["lower_bound"]
