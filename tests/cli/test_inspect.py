"""`kimi-jax inspect`: what it says of a checkpoint folder."""

import dataclasses
import json
import os
import re
import tracemalloc

import numpy as np
import pytest
from commands import CONFIG, NORM, assert_refused, nan_like

from kimi_jax.checkpoint import hf_shapes, save_hf
from kimi_jax.cli import inspect
from kimi_jax.model.mxfp4 import PLAIN


def test_inspect_groups_tensors_and_totals_them(run, saved, tensors):
    code, out, err = run("inspect", saved)
    assert (code, err) == (0, "")
    nbytes = sum(array.nbytes for array in tensors.values())
    assert f"{len(tensors):,} tensors, {nbytes:,} bytes" in out
    for part in ("K K M", "d e e", "MXFP4", "263 ids of which 3 special", "8 keys by 2 heads"):
        assert part in out
    packed = re.search(r"experts\.\*\.w1\.weight_packed +(\d+) +(\S+ x \S+) +U8", out)
    assert packed and packed.groups() == ("8", "32 x 16")
    shards = len(list(saved.glob("*.safetensors")))
    assert f"shards: {shards}" in out


def test_inspect_counts_parameters(run, saved):
    plain = hf_shapes(CONFIG, quantization=PLAIN)
    count = sum(int(np.prod(shape)) for shape, _ in plain.values())
    padding = sum(shape[0] - CONFIG.kda_heads for n, (shape, _) in plain.items() if "A_log" in n)
    assert f"{count - padding:,} parameters" in run("inspect", saved)[1]


def test_inspect_lists_every_tensor(run, saved, tensors):
    code, out, _ = run("inspect", saved, "--all")
    assert code == 0 and {line.split()[0] for line in out.splitlines()} == set(tensors)


def test_inspect_of_a_broken_value_does_not_read_it(run, tensors, tmp_path):
    changed = {**tensors, NORM: nan_like(tensors[NORM])}
    save_hf(tmp_path / "changed", CONFIG.to_hf(), changed)
    code, out, _ = run("inspect", tmp_path / "changed")
    assert code == 0 and "none, prompts must be token ids" in out


ESCAPES = "\x1b[2J\x1b]0;title\x07\u202e\x9b"


def vision(count: int, name: str) -> dict[str, np.ndarray]:
    return {f"vision_tower.{name}.{i:x}th.weight": np.zeros(1, np.float32) for i in range(count)}


@pytest.mark.parametrize("words", [(), ("--all",)], ids=str)
def test_names_are_shown_and_not_obeyed_by_a_terminal(run, tensors, tmp_path, words):
    added = vision(2, f"a\n{ESCAPES}") | vision(1, "x" * 3_000_000)
    save_hf(tmp_path / "vision", CONFIG.to_hf(), tensors | added)
    code, out, err = run("inspect", tmp_path / "vision", *words)
    assert (code, err) == (0, "")
    assert all(line.isprintable() for line in out.split("\n"))
    unfolded = re.sub(r"\s", "", out)
    assert r"vision_tower.a\n\x1b[2J\x1b]0;title\x07\u202e\x9b." in unfolded
    assert "xxx…" in unfolded and len(out) < 60_000


@pytest.mark.parametrize("name", [f"unknown{ESCAPES}\n  x", "u" * 3_000_000])
def test_an_error_shows_such_names_as_well(run, tensors, tmp_path, name):
    save_hf(tmp_path / "unknown", CONFIG.to_hf(), tensors | {name: np.zeros(1, np.float32)})
    code, out, err = run("inspect", tmp_path / "unknown")
    assert (code, out) == (2, "") and "unknown tensor of shape [1]" in err
    assert len(err.split("\n")) == 3 and max(map(len, err.split("\n"))) < 2_100
    assert all(line.isprintable() for line in err.split("\n"))


def test_many_names_are_counted(run, tensors, tmp_path):
    save_hf(tmp_path / "many", CONFIG.to_hf(), tensors | vision(700, "layer"))
    out = run("inspect", tmp_path / "many")[1]
    assert (
        re.search(r"^ +… others +600 +2.4 kB", out, re.MULTILINE) and out.count("th.weight") == 100
    )


def test_a_model_of_ten_thousand_layers_is_described_on_few_lines():
    config = dataclasses.replace(CONFIG, layers=10_000)
    sizes = dict(inspect._sizes(config))
    assert sizes["layers"].startswith("10000, ") and len(sizes["attention"]) < 500


def test_a_million_experts_that_are_missing_are_counted(run, folder):
    config = dataclasses.replace(CONFIG, layers=16, experts=62_500)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    tracemalloc.start()
    code, _, err = run("inspect", folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 2 and "problems in the checkpoint" in err
    assert peak < 50e6


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_what_is_not_a_config_is_refused(run, tmp_path, make):
    make(tmp_path / "config.json")
    assert_refused(run("inspect", tmp_path), "config.json: cannot be read, not a regular file")


def test_a_folder_that_cannot_be(run, tmp_path):
    assert_refused(run("inspect", "a" * 5000), "no such folder")
    assert_refused(run("inspect", "\x1b[2J"), r"\x1b[2J: no such folder")
    assert_refused(run("inspect", tmp_path), "not a checkpoint, it has no config.json")


FILES = (
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-{shards:05}.safetensors",
    "tiktoken.model",
    "tokenizer_config.json",
)
NOT_FILES = {
    "FIFO": (os.mkfifo, "not a regular file but a FIFO"),
    "link to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "but a character device"),
}


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", FILES)
def test_only_regular_files_are_read(run, folder, name, kind):
    name = name.format(shards=len(list(folder.glob("*.safetensors"))))
    make, expected = NOT_FILES[kind]
    (folder / name).unlink()
    make(folder / name)
    assert_refused(run("inspect", folder), name, expected)


def test_inspect_checks_and_shows_a_vision_tower(run, saved, golden):
    out = run("inspect", golden("vision")[0])[1]
    assert "3 blocks, 3 heads of 16, width 32, patches of 14, table 8 x 6" in out
    assert "takes text only" in run("inspect", saved)[1]
