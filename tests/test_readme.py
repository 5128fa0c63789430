"""The README's Python runs as it stands, from the root of the repository; its table is complete."""

import re

from conftest import ROOT

import kimi_jax as kj

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_first_screen_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    block = re.search(r"```python\n(.*?)```", TEXT, re.S)
    names = {}
    exec(compile(block[1], "README.md", "exec"), names)
    assert len(capsys.readouterr().out) > 20
    assert names["reply"].text and names["logits"].shape[:2] == (1, len(names["reply"].tokens))


def test_the_python_of_generation_and_reuse_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {"kj": kj, "model": kj.load("kimi_jax/shipped")}
    for begin in ("replies = ", "session = "):
        block = re.search(rf"```python\n({begin}.*?)```", TEXT, re.S)
        exec(compile(block[1], "README.md", "exec"), names)
    assert len(names["replies"]) == 3 and not any(one.error for one in names["replies"])
    assert names["reply"].usage.cached_tokens > 20 and names["cache"].stats.lookups == 2


def test_the_first_screen_is_25_lines():
    assert TEXT.split("\n## ")[0].strip().count("\n") < 25


def test_every_file_that_is_named_exists():
    table = TEXT.split("## Files")[1].split("\n## ")[0]
    named = re.findall(r"^\| (`.*?`) \|", table, re.M)
    for name in re.findall(r"`([^`]+)`", " ".join(named)):
        found = [folder / name for folder in (ROOT, ROOT / "kimi_jax") if (folder / name).exists()]
        assert found, name


def test_no_file_of_the_package_is_left_out():
    for path in (ROOT / "kimi_jax").glob("[a-z]*.py"):
        assert f"`{path.name}`" in TEXT, path.name
