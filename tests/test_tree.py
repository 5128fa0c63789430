"""The tree itself: imports point one way, mesh axes have their folders, files and classes stay
short. What is read is the code, with ast; nothing is imported.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load_house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


house = load_house()
MODULES = house.read_package(ROOT, "kimi_jax")

# From the top down; a room imports itself and the rooms below its line.
LEVELS = (
    ("cli",),
    ("api",),
    ("analysis",),
    ("generation", "planning"),
    ("speculation",),
    ("runtime", "text", "checkpoint"),
    ("model", "compilation"),
    ("parallel", "vision"),
    ("config",),
    ("files", "progress"),
    ("numerics", "errors", "waiting"),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ENTRANCES = ("", "__main__")  # the package's namespace and `python -m`: they import anything


def upward(modules) -> set[tuple[str, str]]:
    """(module, what it imports) where that stands in another room and not below."""
    return {
        (name, found.target)
        for name, module in modules.items()
        if module.room not in ENTRANCES
        for found in house.imports(module, modules)
        if modules[found.target].room != module.room
        and not (module.room == "cli" and found.target == "kimi_jax")
        and LEVEL_OF.get(modules[found.target].room, -1) <= LEVEL_OF[module.room]
    }


def late(modules) -> set[tuple[str, str]]:
    """(module, what it imports in a function or for type checkers alone), the command excepted."""
    return {
        (name, found.target)
        for name, module in modules.items()
        if module.room != "cli"
        for found in house.imports(module, modules)
        if found.place != "top"
    }


def test_every_file_stands_in_a_room():
    assert {module.room for module in MODULES.values()} <= {*LEVEL_OF, *ENTRANCES}


def test_imports_point_down():
    assert upward(MODULES) == set()


def test_no_import_hides_in_a_function_or_from_the_program():
    assert late(MODULES) == set()


def test_imports_form_no_circle():
    assert house.largest_circle(house.import_graph(MODULES)) == []


def test_mesh_axes_are_named_in_parallel_and_runtime_alone():
    assert set(house.axis_lines(MODULES)) == set()


def test_files_are_short():
    assert {name for name, module in MODULES.items() if module.lines > 450} == set()


def test_classes_are_short():
    lengths = house.class_lengths(MODULES)
    assert {name for name, lines in lengths.items() if lines > 200} == set()


def test_folders_are_small():
    assert {name for name, files in house.folder_sizes(MODULES).items() if files > 12} == set()


# The reader itself, on a tree with every fault.

FAULTY = {
    "__init__.py": "from .cli.main import main",
    "errors.py": "",
    "config/__init__.py": "",
    "config/config.py": "from ..errors import Error\nfrom ..model import decoder",
    "model/__init__.py": "",
    "model/decoder.py": "from ..parallel.mesh import MODEL\n# MODEL\nAXES = ('x', MODEL)\nDATA = 1",
    "model/state.py": "def f():\n    def g():\n        from . import decoder",
    "parallel/__init__.py": "",
    "parallel/mesh.py": (
        "import typing\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from kimi_jax.model.state import State\nif typing.TYPE_CHECKING:\n"
        "    import kimi_jax.config.config\nMODEL = 'model'"
    ),
    "cli/__init__.py": "",
    "cli/main.py": "def main():\n    from ..model.decoder import DATA",
}


@pytest.fixture
def faulty(tmp_path):
    for name, text in FAULTY.items():
        path = tmp_path / "kimi_jax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return house.read_package(tmp_path, "kimi_jax")


def test_the_reader_finds_imports_that_point_up(faulty):
    found = {(name.split(".")[-1], target.split(".")[-1]) for name, target in upward(faulty)}
    assert found == {("config", "decoder"), ("mesh", "state")}


def test_the_reader_finds_imports_that_hide(faulty):
    assert late(faulty) == {
        ("kimi_jax.model.state", "kimi_jax.model.decoder"),
        ("kimi_jax.parallel.mesh", "kimi_jax.model.state"),
        ("kimi_jax.parallel.mesh", "kimi_jax.config.config"),
    }


def test_the_reader_finds_circles_and_floors(faulty):
    circle = ["config.config", "model.decoder", "model.state", "parallel.mesh"]
    graph = house.import_graph(faulty)
    assert house.largest_circle(graph) == [f"kimi_jax.{name}" for name in circle]
    assert house.floors(graph) == 2
    graph = house.import_graph(faulty, ("top",))
    assert house.largest_circle(graph) == [] and house.floors(graph) == 3


def test_the_reader_counts_lines_that_name_axes(faulty):
    assert house.axis_lines(faulty) == {"kimi_jax.model.decoder": 2}
    assert house.folder_sizes(faulty) == {
        "kimi_jax": 1, "config": 1, "model": 2, "parallel": 1, "cli": 1
    }  # fmt: skip


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["house.py"])
    house.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| | kimi_jax |", "|---|---|"] and len(lines) > 12
    assert all(line.count("|") == 3 for line in lines[2:])
