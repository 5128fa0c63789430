"""Bits per byte of model folders on the last tenth of the book, which the small model never saw.

    python scripts/eval_small.py                       # the shipped model
    python scripts/eval_small.py FOLDER FOLDER --dtype bfloat16
    python scripts/eval_small.py --plain --json        # the plain definitions beside the fast ones
    python scripts/eval_small.py --devices 8           # tensor and expert parallel

A folder is loaded as a user loads it. Text is read in windows of 256 tokens, half of each context.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from book import BATCH, BOOK, SHIPPED, WINDOW, split, windows
from jax.sharding import Mesh

import kimi_jax as kj
from kimi_jax.model.implementations import DEFINITIONS, Implementations


def nats(model: kj.Model, ids: list[int]) -> float:
    """-log P of the ids, each after the text before it."""
    total = 0.0
    rows, counted = windows(ids, model.config.bos)
    for at in range(0, len(rows), BATCH):
        piece, mask = rows[at : at + BATCH], counted[at : at + BATCH]
        logprobs = jax.nn.log_softmax(model.logits(piece[:, :-1]), axis=-1)
        chosen = np.take_along_axis(np.asarray(logprobs, np.float64), piece[:, 1:, None], axis=-1)
        total -= float(chosen[mask].sum())
    return total


def evaluate(
    folder: Path,
    dtype: str | None,
    implementations: Implementations,
    text: str,
    mesh: Mesh | None = None,
    placement: kj.Placement | None = None,
) -> dict:
    """The dtype that ran, bits per byte of the text, its tokens, and the bytes of a token."""
    model = kj.load(
        folder, mesh, placement, dtype=dtype, implementations=implementations, chunk=WINDOW
    )
    if model.tokenizer is None:
        raise SystemExit(f"{folder}: has no tokenizer, so its bits per byte are not defined")
    ids, size = model.tokenizer.encode(text), len(text.encode())
    return {
        "dtype": model.dtype,
        "bits_per_byte": nats(model, ids) / math.log(2) / size,
        "tokens": len(ids),
        "bytes_per_token": size / len(ids),
    }


def parse() -> argparse.Namespace:
    """The options of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folders", nargs="*", type=Path, default=[SHIPPED], metavar="FOLDER")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float64"))
    p.add_argument("--plain", action="store_true", help="measure the plain definitions as well")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="CPU devices to spread over")
    p.add_argument("--json", action="store_true", help="a line of JSON for each measurement")
    return p.parse_args()


def measurements(options: argparse.Namespace) -> Iterator[dict]:
    """A measurement for each folder and choice of implementations."""
    _, held_out = split(BOOK.read_text(encoding="utf-8"))
    forms = {"fast": Implementations()} | ({"plain": DEFINITIONS} if options.plain else {})
    for folder in options.folders:
        for name, implementations in forms.items():
            mesh = kj.make_mesh(model=options.devices)
            found = evaluate(folder, options.dtype, implementations, held_out, mesh)
            yield {"folder": str(folder), "forms": name, **found}


def main() -> None:
    """Print a line for each measurement as soon as it is taken."""
    options = parse()
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if options.devices > 1:
        jax.config.update("jax_num_cpu_devices", options.devices)
    for m in measurements(options):
        how = f"{m['dtype']}, {m['forms']} forms, {m['tokens']} tokens"
        line = f"{m['folder']}: {m['bits_per_byte']:.4f} bits per byte"
        line += f" ({how} of {m['bytes_per_token']:.2f} bytes)"
        print(json.dumps(m) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
