"""What an editor says: right calls pass a type checker, wrong ones are flagged at their line."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

SETTINGS = {"typeCheckingMode": "basic", "pythonVersion": "3.11", "reportUnusedExpression": "none"}


@pytest.fixture(scope="module")
def flagged(tmp_path_factory):
    """Lines with an error in a user's program and in the README's Python, by file."""
    folder = tmp_path_factory.mktemp("types")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (folder / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    (folder / "users.py").write_text((ROOT / "tests" / "users.py").read_text())
    settings = {**SETTINGS, "include": [str(folder)], "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, dict[int, str]] = {"readme.py": {}, "users.py": {}}
    for problem in json.loads(ran.stdout)["generalDiagnostics"]:
        name = problem["file"].rsplit("/", 1)[-1]
        found[name][problem["range"]["start"]["line"] + 1] = problem["message"]
    return found


def test_wrong_calls_are_flagged_and_right_ones_are_not(flagged):
    lines = (ROOT / "tests" / "users.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 10 and flagged["users.py"].keys() == wrong, flagged["users.py"]


def test_the_python_of_the_readme_passes(flagged):
    assert not flagged["readme.py"]
