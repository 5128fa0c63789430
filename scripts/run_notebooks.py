"""Run notebooks from top to bottom and store their outputs, which a test compares.

python scripts/run_notebooks.py                                  # all of them
python scripts/run_notebooks.py notebooks/02_kda_by_hand.ipynb
"""

import argparse
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def run(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a new run on CPU."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources)
    done = client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu"})
    for cell in done.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # notes of what is waited for are those of a machine
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    done.metadata.pop("language_info", None)
    return done


def main() -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    for path in parser.parse_args().paths:
        begun = time.perf_counter()
        nbformat.write(run(path), path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
