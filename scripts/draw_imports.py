"""Draws which folders and top-level files of the package import which, into docs/imports.svg.

    python scripts/draw_imports.py

The picture is drawn from the code. `tests/docs/test_architecture.py` holds it to the code: every
arrow carries the names of its two ends, so the test needs no drawing.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

import house
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE = house.HERE / "docs" / "imports.svg"
ROLES = {
    "cli": "the command kimi-jax",
    "api": "Model and load",
    "analysis": "scores, hidden states, gradients",
    "generation": "requests, engine, sessions, chat",
    "planning": "which mesh and placement to run on",
    "speculation": "drafts, verified and committed",
    "runtime": "compiled programs on a mesh",
    "text": "strings and token ids",
    "checkpoint": "released folders",
    "model": "what is computed, per device",
    "parallel": "where arrays are and how they move",
    "config": "sizes and switches of a model",
    "vision": "from an image to patches",
    "compilation": "compiling ahead, on disk",
    "errors": "errors and quoted values",
    "numerics": "checks of numbers, dtypes",
    "progress": "progress bars",
    "waiting": "telling of waits",
    "files": "reading files safely",
}
WIDTH, HEIGHT, ROW = 3.1, 0.8, 1.5  # of a box, and from one row of boxes to the next


def edges(root: Path = house.HERE, package: str = "kimi_jax") -> set[tuple[str, str]]:
    """Pairs (importer, imported) of folders and top-level files of the package."""
    modules = house.read_package(root, package)
    pairs = {
        (module.room, modules[found.target].room)
        for module in modules.values()
        for found in house.imports(module, modules)
    }
    outside = ("", "__main__")  # the namespace and the entry point, which name everything
    return {
        (importer, imported)
        for importer, imported in pairs
        if importer != imported and importer not in outside and imported not in outside
    }


def rows(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Folders by the longest chain of imports below them, the highest first."""
    imported: dict[str, set[str]] = {}
    for importer, target in pairs:
        imported.setdefault(importer, set()).add(target)
        imported.setdefault(target, set())
    floors: dict[str, int] = {}

    def floor(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError(f"imports go in a circle: {' -> '.join([*above, name])}")
        if name not in floors:
            below = [floor(target, (*above, name)) for target in sorted(imported[name])]
            floors[name] = 1 + max(below, default=0)
        return floors[name]

    for name in imported:
        floor(name)
    return [
        sorted(name for name in floors if floors[name] == level)
        for level in sorted(set(floors.values()), reverse=True)
    ]


def drawn_edges(picture: Path = PICTURE) -> set[tuple[str, str]]:
    """The pairs whose arrows a picture holds."""
    text = picture.read_text(encoding="utf-8")
    return set(re.findall(r'id="import-(\w+)-(\w+)"', text))


def draw(picture: Path = PICTURE) -> None:
    """Write the picture: a row of boxes for each floor, an arrow for each pair."""
    pairs = edges()
    levels = rows(pairs)
    places = {
        name: ((at - (len(level) - 1) / 2) * (WIDTH + 0.5), -row * ROW)
        for row, level in enumerate(levels)
        for at, name in enumerate(level)
    }
    matplotlib.rcParams.update({"svg.hashsalt": "kimi_jax", "svg.fonttype": "none"})
    figure = Figure(figsize=(11, 1.2 * len(levels)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for importer, imported in sorted(pairs):
        _draw_arrow(axes, places[importer], places[imported], f"import-{importer}-{imported}")
    for name, place in places.items():
        _draw_box(axes, place, name)
    axes.set_xlim(-6.2, 6.2)
    axes.set_ylim(-ROW * (len(levels) - 0.5), ROW / 2)
    figure.savefig(picture, format="svg", metadata={"Date": None})


def _draw_arrow(axes, start: tuple[float, float], end: tuple[float, float], name: str) -> None:
    rows_between = round((start[1] - end[1]) / ROW)
    bend = 0.0 if rows_between == 1 else 0.12 + 0.03 * rows_between
    arrow = FancyArrowPatch(
        (start[0], start[1] - HEIGHT / 2),
        (end[0], end[1] + HEIGHT / 2),
        arrowstyle="-|>",
        mutation_scale=10,
        connectionstyle=f"arc3,rad={bend if start[0] >= end[0] else -bend}",
        color="#2a5d84" if rows_between == 1 else "#b4c3cf",
        linewidth=1.2 if rows_between == 1 else 0.8,
        zorder=2 if rows_between == 1 else 1,
    )
    arrow.set_gid(name)
    axes.add_patch(arrow)


def _draw_box(axes, place: tuple[float, float], name: str) -> None:
    corner = (place[0] - WIDTH / 2, place[1] - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch(corner, WIDTH, HEIGHT, style, facecolor="#f3f7fa", edgecolor="#2a5d84")
    box.set_zorder(3)
    axes.add_patch(box)
    options = {"ha": "center", "va": "center", "zorder": 4}
    axes.text(place[0], place[1] + 0.14, name, weight="bold", size=11, **options)
    axes.text(place[0], place[1] - 0.18, ROLES.get(name, ""), size=8, color="#445", **options)


def main() -> None:
    """Draw the picture of this repository."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    draw()


if __name__ == "__main__":
    main()
