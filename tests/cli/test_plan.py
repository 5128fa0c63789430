"""`kimi-jax plan`: what it prints and refuses."""

import dataclasses
import json
import os
import re

import pytest

from kimi_jax.cli import main as cli
from kimi_jax.config.config import Config


def test_a_plan_is_printed_with_what_fits(capsys):
    options = ["--mesh", "1x8", "--context", "131072", "--batch", "64", "--hbm", "141,600"]
    assert cli.main(["plan", "k3.1", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"routed experts +180\.8 GB", out)
    assert "141 GB a device: does not fit" in out and "600 GB a device: fits" in out
    assert cli.main(["plan", "k3.1", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] == {"141": False, "600": True}
    assert sum(said["terms"].values()) == said["bytes"]["all"]


def test_gpus_are_answered_by_a_command_that_the_parser_reads(capsys):
    words = ["plan", "k3.1", "--users", "64", "--context", "131072", "--gpus"]
    assert cli.main([*words, "2x8x141"]) == 0
    out = capsys.readouterr().out
    (line,) = re.findall("^kimi-jax (generate .*)$", out, re.M)
    options = cli.make_parser().parse_args(line.replace("HOST", "h").split())
    assert options.mesh == (1, 16) and ("keys", "helix") in options.place and options.slots == 64
    assert (options.processes, options.process_id) == (2, 0) and "1x16   keys=helix" in out
    assert cli.main([*words, "16xH200", "--mesh", "1x16", "--place", "rows=full", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["mesh"] == {"data": 1, "model": 16} and first["bytes"]["held"] < 141e9
    assert cli.main([*words, "8xH100", "--mesh", "1x8", "--place", "rows=full"]) == 0
    assert "0 fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["k3", "--mesh", "1x7"], "vocabulary: 163840 over 7 ranks"),
        (["k3", "--gpus", "8xH2000"], "known are A100"),
        (["k3", "--gpus", "8xH200", "--hbm", "80"], "leave --hbm out"),
        (["k3", "--gpus", "8xH200", "--mesh", "1x4"], "--mesh 1x4 is not a mesh of 8 GPUs"),
        (["k3", "--hbm", "much"], "'much' must be sizes in GB"),
        (["k3", "--hbm", "80,1e300"], "'80,1e300' must be sizes in GB"),
        (["k3", "--hbm", "nan"], "'nan' must be sizes in GB"),
        (["k3", "--batch", str(2**31)], "--users: '2147483648' is not a whole number"),
        (["k3", "--batch", "9" * 5000], "--batch"),
        (["k3", "--mesh", "65536x65536"], "has more than 2147483647 devices"),
        (["\x1b[2J" * 2000], r"\x1b[2J"),
        (["a\0b"], "is neither k3, k3.1 nor the path of a config"),
        (["k3", "--context", "2000000"], "--context 2000000 is over the model's 1048576 tokens"),
        (["nothing"], "'nothing' is neither k3, k3.1 nor the path of a config"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(capsys, options, message):
    assert cli.main(["plan", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err) < 3_000
    assert all(line.isprintable() for line in err.split("\n"))


def test_a_config_that_cannot_be_read_is_refused(capsys, tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["plan", str(path)]) == 2
        assert "not a regular file but a FIFO" in capsys.readouterr().err


def test_a_model_of_ten_thousand_layers_is_planned(capsys, tmp_path):
    layers = {"layers": 10_000, "mla_layers": tuple(range(3, 10_000, 4)), "experts": 96}
    config = dataclasses.replace(Config.k3(), **layers)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert cli.main(["plan", str(tmp_path), "--mesh", "1x8", "--hbm", "80"]) == 0
    assert "No mesh of up to 64 devices would hold it." in capsys.readouterr().out


def test_a_vision_tower_is_counted_where_the_folder_has_one(capsys, golden):
    term = "vision tower and projector"
    for words in (["k3"], [str(golden("k3-tiny")[0])]):
        assert cli.main(["plan", *words, "--json"]) == 0
        assert term not in json.loads(capsys.readouterr().out)["terms"]
    assert cli.main(["plan", str(golden("vision")[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["terms"][term] == 174_528
    assert cli.main(["plan", "k3", "--vision"]) == 0
    assert re.search(f"{term} +894.7 MB", capsys.readouterr().out)
