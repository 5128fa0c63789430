"""Folders, devices, meshes and placements that a command is given."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from commands import A_LOG, CONFIG, NORM, SCALE, assert_refused, nan_like

from kimi_jax.checkpoint import save_hf
from kimi_jax.cli import main as cli

# Folders that cannot be used.


def test_missing_folder(run, tmp_path):
    assert_refused(run("generate", "a", "--model", tmp_path / "gone"), "gone", "no such folder")
    assert_refused(run("inspect", tmp_path / "gone"), "no such folder")


def test_file_for_a_folder(run, saved):
    file = saved / "config.json"
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, file), f"{file}: a file and not a folder")


@pytest.mark.parametrize("name", ["config.json", "tiktoken.model", "tokenizer_config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_files_that_are_not_regular(run, folder, name, make):
    """A FIFO would wait for ever, a folder is not a file."""
    (folder / name).unlink()
    make(folder / name)
    assert_refused(run("generate", "a", "--model", folder), name)
    if name != "config.json":  # what a conversation needs is looked at first
        assert_refused(run("chat", folder), name)
    make(folder / "kind")
    assert_refused(run("plan", folder / "kind"), "kind")


def test_folder_without_config(run, folder):
    (folder / "config.json").unlink()
    assert_refused(run("generate", "a", "--model", folder), "copy", "no config.json")
    assert_refused(run("inspect", folder), "no config.json")


def test_config_that_is_no_json(run, folder):
    (folder / "config.json").write_text("{")
    assert_refused(run("inspect", folder), "config.json", "not a JSON file")


def test_config_without_a_key(run, folder):
    config = CONFIG.to_hf()
    del config["text_config"]["hidden_size"], config["text_config"]["q_lora_rank"]
    (folder / "config.json").write_text(json.dumps(config))
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), "2 problems", "hidden_size", "q_lora_rank")


def test_missing_shard(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "No such file")


def test_truncated_shard(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "truncated")


def test_corrupt_header(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[8:12] = b"????"
    shard.write_bytes(content)
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "corrupt header")


def tail(array):
    return np.concatenate([array[:-1], np.ones_like(array[-1:])])


def scale_255(array):
    return np.full_like(array, 255)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (NORM, lambda a: None, f"missing, shape [{CONFIG.hidden}] is expected"),
        (NORM, lambda a: a[:-1], f"shape [{CONFIG.hidden - 1}], expected [{CONFIG.hidden}]"),
        (NORM, lambda a: a.astype(np.int8), "dtype I8, expected BF16"),
        (A_LOG, tail, "values other than zero after the 2 heads"),
        (SCALE, scale_255, "scale byte 255"),
        (NORM, nan_like, "NaN"),
    ],
)
def test_tensors_that_cannot_be_used(run, tensors, tmp_path, name, change, message):
    changed = {**tensors, name: change(tensors[name])}
    kept = {key: array for key, array in changed.items() if array is not None}
    save_hf(tmp_path / "changed", CONFIG.to_hf(), kept)
    assert_refused(run("generate", "1", "--tokens", "--model", tmp_path / "changed"), name, message)


def test_broken_tokenizer(run, folder):
    (folder / "tokenizer_config.json").unlink()
    assert_refused(run("generate", "a", "--model", folder), "tokenizer_config.json")


def subprocess_run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


COUNT = (
    "from kimi_jax.cli.main import main; code = main({}); "
    "import jax; print(code, jax.device_count())"
)


def test_devices(saved):
    """JAX has as many devices as the command asks for, whatever other flags are set."""
    words = ["inspect", str(saved), "--all", "--devices", "3"]
    done = subprocess_run(COUNT.format(words), XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert done.stdout.splitlines()[-1] == "0 3", done.stderr


def test_devices_of_the_environment_stand(saved):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = ["inspect", str(saved), "--all"]
    assert subprocess_run(COUNT.format(words), **flags).stdout.splitlines()[-1] == "0 2"


def test_devices_that_contradict_the_environment(run, saved, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert_refused(run("inspect", saved, "--devices", 4), "--devices 4", "asks for 2")


def test_devices_after_jax_has_started(run, saved, model, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert_refused(run("inspect", saved, "--devices", 5), "too late")


def test_a_mesh_and_a_placement_of_the_command_line_write_the_same_text(capsys, saved):
    words = ["generate", "the cat", "--model", str(saved), "--max-new-tokens", "4", "--json"]
    assert cli.main([*words, "--mesh", "1x1"]) == 0
    one = json.loads(capsys.readouterr().out)
    place = ["--place", "experts=auto", "--place", "local_below=2", "--place", "latent=sharded"]
    place += ["--place", "pad=vocab"]
    assert cli.main([*words, "--mesh", "4x2", *place]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one["tokens"]


BAD_MESHES = [
    (["--mesh", "8"], "'8' is not of the form 2x4"),
    (["--mesh", "4x4"], "needs 16 devices, JAX has 8"),
    (["--mesh", "1x3"], "heads: 8 over 3 ranks"),
    (["--place", "expert=local"], "no such option 'expert', there are keys, helix_block"),
    (["--place", "experts"], "'experts' is not of the form NAME=VALUE"),
    (["--place", "pad=vocab", "--place", "pad=heads"], "--place pad=... is given twice"),
    (
        ["--coordinator", "here", "--processes", "2", "--process-id", "0"],
        "--coordinator takes HOST:PORT, got 'here'",
    ),
    (["--place", "local_below=few"], "--place: local_below takes a whole number, got 'few'"),
    (["--processes", "2"], "--coordinator, --processes and --process-id belong together"),
    (
        ["--coordinator", "h:1", "--processes", "2", "--process-id", "2"],
        "--process-id 2 is not among the 2 processes, 0 to 1",
    ),
]


@pytest.mark.parametrize("options, message", BAD_MESHES, ids=str)
def test_a_bad_mesh_or_placement_is_refused(capsys, options, message):
    assert cli.main(["generate", "The Queen", *options]) == 2
    assert message in capsys.readouterr().err
