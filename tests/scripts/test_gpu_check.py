"""scripts/gpu_check.py runs to its end on a CPU, in tiny shapes, and finds every number right."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the command writes as JSON."""
    path = tmp_path_factory.mktemp("check") / "check.json"
    command = [sys.executable, "scripts/gpu_check.py", "--tiny", "--json", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "part " in run.stdout
    return json.loads(path.read_text())


def test_every_number_is_right(found):
    assert found["right"]
    assert found["checks"]["MXFP4 bits"]["weights"] == 200 * 256 * 2
    assert found["checks"]["ties of top-k"]["wrong"] == 0
    assert 0 < found["checks"]["bfloat16 forward"]["largest_error"] < 0.05


def test_a_decode_step_and_a_prefill_are_timed_part_by_part(found):
    assert set(found["times"]) == {"decode, 1 of 8 ranks", "prefill, 1 of 8 ranks"}
    for step in found["times"].values():
        measured = {scope for scope, part in step["parts"].items() if part["measured_ms"] > 0}
        assert {"attention/kda", "attention/mla", "mlp/experts", "head"} <= measured
        assert step["kernels_ms"] > 0
        assert step["estimated_ms"] == pytest.approx(
            sum(part["estimated_ms"] for part in step["parts"].values())
        )
