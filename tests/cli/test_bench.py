"""`kimi-jax bench`: what it measures, says and refuses."""

import json
import os
import re

import pytest
from commands import CONFIG, assert_refused

import kimi_jax as kj
from kimi_jax.cli import main as cli
from kimi_jax.cli import measure as bench

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
