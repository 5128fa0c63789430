"""`kimi-jax plan`: what it prints and refuses."""

import json
import re

import pytest

from kimi_jax.cli import main as cli


def test_a_plan_is_printed_with_what_fits(capsys):
    options = ["--model", "8", "--context", "131072", "--batch", "64", "--hbm", "141,600"]
    assert cli.main(["plan", "k3.1", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"routed experts +180\.807", out)
    assert "141 GB a device: does not fit" in out and "600 GB a device: fits" in out
    assert cli.main(["plan", "k3.1", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] == {"141": False, "600": True}
    assert sum(said["terms"].values()) == said["bytes"]["all"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["k3", "--model", "7"], "vocabulary: 163840 over 7 ranks"),
        (["k3", "--hbm", "much"], "'much' are no sizes in GB"),
        (["k3", "--context", "2000000"], "--context 2000000 is over the model's 1048576 tokens"),
        (["nothing"], "'nothing' is neither k3, k3.1 nor the path of a config"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(capsys, options, message):
    assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err
