"""Every notebook is short, and runs from top to bottom with the outputs that it is stored with."""

import base64
import io
import re
import sys

import jax
import matplotlib.image
import nbformat
import numpy as np
import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
VARIES = "varies"  # the tag of a cell whose numbers are those of a machine


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """What a cell printed and showed as text, without its pictures."""
    printed = "".join(out.text for out in cell.outputs if out.output_type == "stream")
    shown = [
        out.data["text/plain"]
        for out in cell.outputs
        if "data" in out and "image/png" not in out.data
    ]
    return printed + "\n".join(shown)


def pictures(cell):
    """The pictures that a cell showed [height, width, 4]."""
    pngs = [out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(png))) for png in pngs]


def assert_alike(now, stored):
    """Equal words, numbers within 2 %, pictures of one size that differ little."""
    got, want = texts(now), texts(stored)
    assert NUMBER.sub("#", got) == NUMBER.sub("#", want)
    if VARIES not in stored.metadata.get("tags", []):
        found, wanted = (np.array(NUMBER.findall(text), float) for text in (got, want))
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=1e-6)
    drawn, expected = pictures(now), pictures(stored)
    assert [x.shape for x in drawn] == [x.shape for x in expected]
    for x, y in zip(drawn, expected, strict=True):
        assert np.abs(x - y).mean() < 0.01


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_tells_its_results(path):
    notebook = nbformat.read(path, as_version=4)
    code = code_cells(notebook)
    assert len(code) <= 12
    assert all(len(cell.source.splitlines()) <= 17 for cell in code)
    assert sum(map(len, map(pictures, code))) > 1
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("markdown") >= len(code) / 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_the_outputs_it_is_stored_with(path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from run_notebooks import run

    stored = nbformat.read(path, as_version=4)
    for now, before in zip(code_cells(run(path)), code_cells(stored), strict=True):
        assert_alike(now, before)


def test_other_outputs_are_told_apart():
    """What the comparison refuses, and what it lets pass."""

    def cell(text, tags=()):
        output = nbformat.v4.new_output("stream", name="stdout", text=text)
        return nbformat.v4.new_code_cell(outputs=[output], metadata={"tags": list(tags)})

    assert_alike(cell("loss 1.001 after 3"), cell("loss 1.000 after 3"))
    assert_alike(cell("3 seconds"), cell("9 seconds", [VARIES]))
    for now in ("loss 1.1 after 3", "losses 1.0 after 3", "loss 1.0", "loss -1.0 after 3"):
        with pytest.raises(AssertionError):
            assert_alike(cell(now), cell("loss 1.0 after 3"))
