"""`kimi-jax bench`: what it measures, says and refuses."""

import dataclasses
import json
import os
import re

import pytest
from commands import CONFIG, assert_refused

import kimi_jax as kj
from kimi_jax.cli import main as cli
from kimi_jax.cli import measure as bench
from kimi_jax.runtime.probes import parts_of, step_work
from kimi_jax.runtime.program import make_program

# What cannot be measured.


def test_compile_of_no_config(run, tmp_path):
    assert_refused(run("bench", "--compile", "k4"), "neither k3, k3.1 nor the path")
    assert_refused(
        run("bench", "--compile", tmp_path), f"{tmp_path}: not a checkpoint", "config.json"
    )


def test_contexts_that_cannot_be_measured(run):
    words = ("bench", "--compile", "k3", "--context", "8,16")
    assert_refused(run(*words), "--compile takes one --context, got 8,16")
    result = run("bench", "--context", "128,100000")
    assert_refused(result, "--context 100000 needs", "that of --shape mini is 65536")
    assert_refused(run("bench", "--context", "--rows"), "--rows and --context: one at a time")


def test_compile_takes_no_option_of_a_measurement(run):
    words = ("bench", "--compile", "k3", "--steps", 16, "--shape", "mini")
    assert_refused(run(*words), "--compile runs nothing and takes no --shape, --steps")


@pytest.mark.parametrize("shape, context", [("shipped", 65536), ("mini", 64)])
def test_bench_of_more_than_the_context(run, monkeypatch, shape, context):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    result = run("bench", "--prompt", 100_000, "--shape", shape)
    assert_refused(result, "--prompt 100000", f"that of --shape {shape} is {context}")


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_built(
    run, monkeypatch, tmp_path
):
    monkeypatch.setattr(bench, "random_model", lambda *_: pytest.fail("built"))
    (tmp_path / "file").touch()
    for name, message in (("file", "a file and not a folder"), ("file/new", "Not a directory")):
        result = run("bench", "--profile", tmp_path / name)
        assert_refused(result, f"--profile {tmp_path / name}: {message}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_refused(run("bench", "--profile", tmp_path), "no permission to write there")


def test_bench_measures_random_weights(run, monkeypatch):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    code, out, _ = run("bench", "--prompt", 8, "--batch", 1, "--steps", 2, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["step"] for row in rows] == ["prefill", "decode"]
    assert all(row["tokens_per_s"] > 0 and row["compile_s"] >= 0 for row in rows)


def test_bench_measures_the_ends_of_contexts(run, monkeypatch):
    """8 tokens attend to all keys, 40 to 8 of them: selection takes time there alone."""
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    monkeypatch.setattr(bench, "REPEATS", 1)
    place = [f"--place={one}" for one in ("keys=helix", "helix_block=4", "pad=vocab")]
    code, out, _ = run(
        "bench", "--context", "8,40", "--chunk", 8, "--mesh", "1x2", *place, "--json"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    steps = [(row["step"], row["context"], row["tokens"]) for row in rows]
    assert steps == [("prefill", 8, 8), ("prefill", 40, 8), ("decode", 8, 1), ("decode", 40, 1)]
    assert [row["selection_ms"] > 0 for row in rows] == [False, True] * 2
    for row in rows:
        assert row["ms_per_token"] == pytest.approx(row["selection_ms"] + row["rest_ms"])
    assert rows[0]["rest_by_first"] == rows[2]["rest_by_first"] == 1


def test_bench_measures_beside_a_floor(run, monkeypatch):
    """A prompt, a step and two rows: how far each is from what its weights cost, and its parts."""
    sizes = dict(PROMPTS=(8,), CONTEXTS=(4,), BATCH=2, PRODUCT=64, COPY=2**16)
    for name, value in sizes.items():
        monkeypatch.setattr(bench, f"FLOOR_{name}", value)
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    monkeypatch.setattr(bench, "REPEATS", 1)
    words = ("bench", "--floor", "--dtype", "float32", "--chunk", 8, "--steps", 1, "--json")
    code, out, err = run(*words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    steps = [(row["step"], row["context"], row["batch"], row["tokens"]) for row in rows]
    assert steps == [("prompt", 0, 1, 8), ("decode", 4, 1, 1), ("decode", 0, 2, 1)]
    for row in rows:
        assert row["of_floor"] == pytest.approx(row["tokens_per_s"] / row["floor_tokens_per_s"])
        assert all(row[f"{part}_ms"] > 0 for part in ("experts", "kda", "mla", "mlp", "mix"))
    refused = run("bench", "--floor", "--prompt", 8)
    assert_refused(refused, "--floor has rows of its own and takes no --prompt")


def test_the_work_of_a_step_is_that_of_its_weights():
    """Of a row: a product with every matrix, with the experts it asks for alone, once with the
    head; every weight is read once, of the embedding the row's.
    """
    program = make_program(CONFIG, dtype="float32")
    one, three, batch = (step_work(program, *sizes) for sizes in ((1, 1), (1, 3), (3, 1)))
    head = 2 * CONFIG.vocab * CONFIG.hidden
    assert three.operations == 3 * (one.operations - head) + head
    assert batch.operations == 3 * one.operations
    expert, layers = 3 * CONFIG.latent * CONFIG.expert_ffn, CONFIG.layers - CONFIG.dense_layers
    fewer = step_work(make_program(dataclasses.replace(CONFIG, active_experts=1)), 1, 1)
    assert one.operations - fewer.operations == pytest.approx(2 * expert * layers)
    packed = expert // 2 + expert // 32
    assert one.bytes - fewer.bytes == pytest.approx(packed * layers)
    assert three.bytes - one.bytes == pytest.approx(2 * packed * layers + 2 * 4 * CONFIG.hidden)


def test_instructions_belong_to_the_inner_part_and_loops_to_none():
    hlo = """HloModule step

%fused (p: f32[8]) -> f32[8] {
  ROOT %tanh.1 = f32[8] tanh(%p), metadata={op_name="jit(step)/layer_0/attention/kda/tanh"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %fusion.2 = f32[8] fusion(%x), kind=kLoop, calls=%fused
  %while.3 = (s32[], f32[8]) while(%t), body=%b, metadata={op_name="jit(step)/mlp/experts/while"}
  %dot.4 = f32[8] dot(%a, %b), metadata={op_name="jit(step)/layer_0/mlp/experts/dot"}
  %dot.5 = f32[8] dot(%dot.4, %b)
  %add.6 = f32[8] add(%dot.5, %x), metadata={op_name="jit(step)/layer_0/mlp/shared/add"}
  ROOT %copy.7 = f32[8] copy(%add.6)
}
"""
    assert parts_of(hlo) == {
        "tanh.1": "kda",
        "fusion.2": "kda",
        "dot.4": "experts",
        "dot.5": "shared",
        "add.6": "shared",
        "copy.7": "",
    }


def test_a_profile_names_the_parts_and_says_how_it_is_opened(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    code, out, _ = run("bench", "--profile", tmp_path / "new", "--prompt", 8, "--steps", 2)
    assert code == 0 and f"tensorboard --logdir {tmp_path / 'new'}" in out
    (trace,) = (tmp_path / "new").rglob("*.trace.json.gz")
    assert f"open {trace} at https://ui.perfetto.dev" in out
    (recorded,) = (tmp_path / "new").rglob("*.xplane.pb")
    names = recorded.read_bytes()
    for part in (b"embedding", b"layer_0/attention/kda", b"layer_2/attention/mla", b"sample"):
        assert part in names


def test_bench_compiles_a_step_from_shapes(run, saved):
    code, out, _ = run("bench", "--compile", saved, "--dtype", "float32")
    assert code == 0 and "argument bytes" in out and "a step of" in out


@pytest.mark.parametrize("sparse", [False, True])
def test_the_shape_for_measuring_is_a_valid_config(sparse):
    config = bench.mini(sparse)
    assert kj.Config.from_hf(config.to_hf()) == config
    assert (config.layers, config.sparse, config.index_topk) == (9, sparse, 256 if sparse else 0)


def test_experts_are_measured_and_the_crossover_is_said(capsys, monkeypatch):
    monkeypatch.setattr(bench, "STEP_ROWS", (1, 2))
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert cli.main(["bench", "--experts", "--shape", "shipped", "--mesh", "1x2"]) == 0
    out = capsys.readouterr().out
    assert "exchange ms" in out and re.search(r'Placement\(experts="auto", local_below=\d+\)', out)


def test_sliced_rows_are_measured_and_the_crossover_is_said(capsys, monkeypatch):
    monkeypatch.setattr(bench, "STEP_ROWS", (1, 2))
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert cli.main(["bench", "--rows", "--shape", "shipped", "--mesh", "1x2"]) == 0
    out = capsys.readouterr().out
    assert "sliced by full" in out and re.search(r'Placement\(rows="(full|sliced)"', out)
    assert cli.main(["bench", "--rows", "--mesh", "2x1"]) == 2
    assert "over several model ranks" in capsys.readouterr().err


def test_the_crossover_takes_two_wins_by_two_per_cent():
    rows = [(1, 2, 1, 2.0), (2, 1, 1, 0.97), (4, 1, 1, 1.01), (8, 1, 1, 0.9), (16, 1, 1, 0.9)]
    assert bench.local_below(rows) == 8
    assert bench.local_below(rows[:3]) == 5
    assert bench.local_below(rows[3:]) == 0
    found = [bench.crossover(some) for some in (rows, rows[:3], rows[3:])]
    assert found == [8, None, 0]
