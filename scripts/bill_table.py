"""Bills of K3.1 and K3 at released size, a row each: compiled for GPUs that are not there.

    python scripts/bill_table.py bills                        # all programs; some minutes each
    python scripts/bill_table.py bills --only 'k3.1 decode*'  # some of them
    python scripts/bill_table.py bills --print                # what is there, nothing compiled

Each program is compiled by a process of its own and kept as JSON in the folder: a table that was
broken off goes on where it was. `--again` compiles what is there once more; rows of other code than
this are marked (older). Groups of layers that differ in where residual blocks start alone are
compiled once. Columns:

- bytes, floor: GB that kernels read and write, and that must be touched; `larger`: the larger of
  the seconds of bytes and of products, over that of the floor
- launches and those among them in CUDA graphs; a layer: launches over layers; loops: of unknown
  length; waits: of the host, in one step
- moved: GB of weights and states that kernels only copy; temp: GB of temporaries
- ms: estimated; rest: without scoring and selecting keys; share: of the memory floor in ms
"""

import argparse
import fnmatch
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

AOT = Path(__file__).with_name("aot.py")
HELIX = {"keys": "helix", "rows": "sliced"}
PLACES = {"tensor": {}, "helix sliced": HELIX, "helix sliced local": {**HELIX, "experts": "local"}}
CONTEXT, CHUNK = 131072, 4096
LAYERS = 93  # of both models


class Row(NamedTuple):
    """A program and the options of aot.py that compile it."""

    name: str
    options: tuple[str, ...]


def programs() -> Iterator[Row]:
    """Every program of the table."""
    for model in ("k3.1", "k3"):
        for batch, ranks in itertools.product((1, 12, 64), (8, 16)):
            for place, fields in PLACES.items():
                yield _decode(model, f"1x{ranks}", batch, place, fields)
        for mesh in ("4x8", "1x32"):
            yield _decode(model, mesh, 64, "helix sliced", HELIX)
        yield _decode(model, "1x8", 12, "helix sliced", HELIX, "decode_steps")
        for ranks in (8, 16):
            for place, fields in list(PLACES.items())[:2]:
                options = ("--step", "prefill", "--rows", str(CHUNK), "--batch", "1")
                slots = ("--context", str(CONTEXT + CHUNK), "--cached", "0", "32768", str(CONTEXT))
                yield _row(f"{model} prefill {CHUNK} 1x{ranks} {place}", model, f"1x{ranks}",
                           fields, (*options, *slots))  # fmt: skip


def _decode(
    model: str, mesh: str, batch: int, place: str, fields: dict, step: str = "decode"
) -> Row:
    options = ("--step", step, "--batch", str(batch), "--context", str(CONTEXT))
    return _row(f"{model} {step} {batch} {mesh} {place}", model, mesh, fields, options)


def _row(name: str, model: str, mesh: str, fields: dict, options: tuple[str, ...]) -> Row:
    place = ("--mesh", mesh, "--placement", json.dumps(fields))
    return Row(name, (model, *place, *options, "--alike", "--bill", "--json"))


def code_digest() -> str:
    """A digest of the package's files: which code a bill is of."""
    digest = hashlib.sha256()
    for path in sorted((AOT.parents[1] / "kimi_jax").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def compiled(row: Row, folder: Path) -> dict[str, Any] | None:
    """What aot.py reports of a program, which is written to the folder; None where it failed."""
    run = subprocess.run(
        [sys.executable, str(AOT), *row.options], capture_output=True, text=True, check=False
    )
    if run.returncode:
        print(f"{row.name}: failed\n{run.stderr[-2000:]}", file=sys.stderr)
        return None
    found = json.loads(run.stdout) | {"code": code_digest()}
    kept = folder / f"{row.name.replace(' ', '_')}.json.part"
    kept.write_text(json.dumps(found, indent=1))
    kept.rename(kept.with_suffix(""))  # only a complete file has the name
    return found


COLUMNS = (
    *("bytes", "floor", "ratio", "larger", "launches", "graph", "a layer", "loops", "waits"),
    *("moved", "temp", "ms", "rest", "share", "compile s"),
)


def cells(found: dict[str, Any], bill: dict[str, Any]) -> list[str]:
    """The columns of one bill."""
    total = bill["total"]
    unknown = [
        c for c in bill["choices"] if c["kind"] == "loop" and c["reason"] != "billed a token"
    ]
    moved = sum(move["nbytes"] * move["times"] for move in bill["moves"])
    selection = sum(p["seconds"] for s, p in bill["parts"].items() if "indexer" in s)
    mark = ">=" if bill["lower_bound"] else ""
    return [
        f"{(total['read'] + total['written']) / 1e9:,.1f}",
        f"{bill['floor']['total_bytes'] / 1e9:,.1f}",
        f"{mark}{bill['bytes_over_floor']:.2f}",
        f"{mark}{bill['larger_over_floor']:.2f}",
        f"{total['launches']:,}",
        f"{total['in_buffers']:,}",
        f"{total['launches'] / LAYERS:,.0f}",
        f"{sum(loop['runs'] for loop in unknown):,}",
        f"{total['waits']:,}",
        f"{moved / 1e9:,.1f}",
        f"{found['bytes']['temporaries'] / 1e9:.2f}",
        f"{bill['seconds'] * 1e3:,.1f}",
        f"{(bill['seconds'] - selection) * 1e3:,.1f}",
        f"{bill['share_of_floor']:.0%}",
        f"{found['seconds']['compile']:.0f}",
    ]


def print_table(rows: list[tuple[str, list[str]]]) -> None:
    """Aligned columns under their names."""
    lines = [("program", list(COLUMNS)), *rows]
    first = max(len(name) for name, _ in lines)
    widths = [max(map(len, column)) for column in zip(*(c for _, c in lines), strict=True)]
    for name, row in lines:
        columns = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(name.ljust(first), *columns, sep="  ")


def main() -> None:
    """Compile what is missing, then print the table."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, help="where the bills are kept")
    p.add_argument("--only", default="*", metavar="PATTERN", help="programs by name, such as *64*")
    p.add_argument("--print", action="store_true", help="print what is there, compile nothing")
    p.add_argument("--again", action="store_true", help="compile what is there once more")
    p.add_argument("--json", action="store_true", help="print one JSON object of all bills")
    p.add_argument("--list", action="store_true", help="print the names of the programs")
    options = p.parse_args()
    chosen = [row for row in programs() if fnmatch.fnmatch(row.name, options.only)]
    if options.list:
        print(*(row.name for row in chosen), sep="\n")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    current = code_digest()
    failed = 0
    for row in chosen:
        path = options.folder / f"{row.name.replace(' ', '_')}.json"
        if path.exists() and not options.again:
            reports[row.name] = json.loads(path.read_text())
        elif not options.print:
            found = compiled(row, options.folder)
            failed += found is None
            if found is not None:
                reports[row.name] = found
    if options.json:
        print(json.dumps(reports))
    else:
        age = {
            name: "" if found["code"] == current else "(older) " for name, found in reports.items()
        }
        print_table(
            [
                (f"{age[name]}{name}, {int(cached):,} cached", cells(found, bill))
                for name, found in reports.items()
                for cached, bill in found["bills"].items()
            ]
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
