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


def test_the_tree_names_every_folder():
    tree = TEXT.split("## Files")[1].split("```")[1]
    named = set(re.findall(r"^  (\w+)/ ", tree, re.M))
    assert named == {
        path.name
        for path in (ROOT / "kimi_jax").iterdir()
        if path.name[0].isalpha() and path.is_dir()
    }
