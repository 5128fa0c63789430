"""`kimi-jax inspect`: what it says of a checkpoint folder."""

import re

import numpy as np
from commands import CONFIG, NORM, nan_like

from kimi_jax.checkpoint import hf_shapes, save_hf


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
    plain = hf_shapes(CONFIG, packed=False)
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
