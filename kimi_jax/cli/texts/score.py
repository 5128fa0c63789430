"""`kimi-jax score`: how probable a text is."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ...errors import CommandError, label
from ...waiting import waiting
from ..devices import check_folder, load_model, use_compilation_cache
from ..options import DTYPES, HELP, SHIPPED, SHIPPED_MODEL, add_command, add_mesh, whole
from ..output import print_json, print_table, read_standard_input

EXAMPLES = """\
  kimi-jax score letter.txt
  kimi-jax score one.txt two.txt --window 256 --json
  cat letter.txt | kimi-jax score - --model /path/to/checkpoint

A text that is longer than the window is read in windows that overlap by half. The first token of a
text has nothing before it and is not counted. --json adds every token's id and log-probability."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "score texts: log-probabilities, bits per byte, perplexity"
    command = add_command(commands, "score", run, about, EXAMPLES)
    add = command.add_argument
    help_files = "UTF-8 text to score; - reads it from standard input"
    add("files", nargs="+", metavar="FILE", help=help_files)
    help_model = f"checkpoint folder ({SHIPPED_MODEL})"
    add("--model", type=Path, default=SHIPPED, metavar="PATH", help=help_model)
    help_window = "most tokens that are read at once (the model's context)"
    add("--window", type=whole(2), metavar="T", help=help_window)
    help_batch = "windows that run together (8)"
    add("--batch", type=whole(1, 256), default=8, metavar="B", help=help_batch)
    add("--json", action="store_true", help="print a line of JSON for each text")
    add("--dtype", choices=DTYPES, help=f"{HELP['dtype']} (float32 on CPU, else bfloat16)")
    add_mesh(command)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.files.count("-") > 1:
        raise CommandError("- stands for standard input, which can be one text only")
    texts = [read_standard_input() if name == "-" else _text(name) for name in options.files]
    for name, text in zip(options.files, texts, strict=True):
        if not text:
            raise CommandError(f"{label(name)}: is empty")
    with waiting("loading the model"):
        check_folder(options.model)
        use_compilation_cache()
        model = load_model(options.model, options)
    if model.tokenizer is None:
        raise CommandError("texts need a tokenizer, and this folder has no tokenizer")
    scores = model.score(texts, window=options.window, batch=options.batch)
    if options.json:
        for name, score in zip(options.files, scores, strict=True):
            print_json({"file": name, **_figures(score), **_tokens(score)})
        return 0
    columns = ("text", "tokens", "bytes", "bits per byte", "nats per token", "perplexity")
    rows = [
        (label(name), *(_shown(value) for value in _figures(score).values()))
        for name, score in zip(options.files, scores, strict=True)
    ]
    print_table("", columns, rows)
    return 0


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        message = f"{label(name)}: is not UTF-8: byte {byte:#04x} at {error.start}"
        raise CommandError(message) from error
    except ValueError as error:  # a NUL in the name
        raise CommandError(f"{label(name)}: {error}") from error


def _figures(score: Any) -> dict[str, Any]:
    """What a text takes, of its tokens after the first; None where there are none."""
    count = len(score.tokens) - 1
    values = {
        "tokens": count,
        "bytes": score.byte_count,
        "bits_per_byte": score.bits_per_byte,
        "nats_per_token": score.nats / count if count else None,
        "perplexity": score.perplexity,
    }
    return {n: None if value is None or math.isnan(value) else value for n, value in values.items()}


def _tokens(score: Any) -> dict[str, Any]:
    return {"token_ids": score.tokens, "logprobs": [None, *score.logprobs[1:].tolist()]}


def _shown(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
