"""The picture of the imports shows those of the code, and the documents name files that exist."""

import importlib
import re

import pytest
from conftest import ROOT


@pytest.fixture
def draw_imports(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("draw_imports")


def test_the_picture_shows_the_imports_of_the_code(draw_imports):
    """After a change of imports: python scripts/draw_imports.py."""
    assert draw_imports.drawn_edges() == draw_imports.edges()


def test_the_picture_names_every_folder_and_says_what_it_is(draw_imports):
    names = {name for pair in draw_imports.edges() for name in pair}
    assert names <= set(draw_imports.ROLES)
    text = draw_imports.PICTURE.read_text(encoding="utf-8")
    for name in names:
        assert f">{name}</text>" in text and f">{draw_imports.ROLES[name]}</text>" in text


def test_imports_point_down(draw_imports):
    rows = draw_imports.rows(draw_imports.edges())
    floor = {name: at for at, row in enumerate(rows) for name in row}
    assert all(floor[importer] < floor[imported] for importer, imported in draw_imports.edges())


def test_a_circle_is_found(draw_imports):
    with pytest.raises(ValueError, match="circle: a -> b -> a"):
        draw_imports.rows([("a", "b"), ("b", "a")])


def test_drawing_again_gives_the_same_file(draw_imports, tmp_path):
    draw_imports.draw(tmp_path / "first.svg")
    draw_imports.draw(tmp_path / "second.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert draw_imports.drawn_edges(tmp_path / "first.svg") == draw_imports.edges()


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/parallelism.md"])
def test_files_that_a_document_names_exist(name):
    """In backticks and with a folder: as from the root, or from the package."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    paths = re.findall(r"`([\w./]+/[\w.]*\w)`", text)
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "kimi_jax" / path).exists(), path
    assert name != "CONTRIBUTING.md" or len(paths) > 20


def test_names_that_the_guide_mentions_are_in_the_files_before_them():
    """Of each numbered step: a word in backticks stands in one of the files that the step names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## How to add")[1]
    for step in re.split(r"\n\d\. |\n### ", text)[1:]:
        quoted = re.findall(r"`([^`]+)`", step)
        paths = [ROOT / part / name for name in quoted for part in ("", "kimi_jax") if "/" in name]
        files = [path for path in paths if path.is_file()]
        for name in quoted:
            if re.fullmatch(r"\w+", name) and files:
                assert any(name in file.read_text(encoding="utf-8") for file in files), (name, step)
