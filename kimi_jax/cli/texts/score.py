"""`kimi-jax score`: how probable a text is."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ...errors import CommandError, label
from ...waiting import waiting
from ..devices import check_folder, load_model, use_compilation_cache
from ..options import DTYPES, HELP, add_command, add_mesh, add_model, model_folder, whole
from ..output import print_json, print_table, read_text

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
    add_model(command, has_path=False)
    help_window = "most tokens that are read at once (the model's context)"
    add("--window", type=whole(2), metavar="T", help=help_window)
    help_batch = "windows that run together (8)"
    add("--batch", type=whole(1, 256), default=8, metavar="B", help=help_batch)
    add("--json", action="store_true", help="print a line of JSON for each text")
    add("--dtype", choices=DTYPES, help=f"{HELP['dtype']} (float32 on CPU, else bfloat16)")
    add_mesh(command)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ...text.tokenizer import Tokenizer

    if options.files.count("-") > 1:
        raise CommandError("- stands for standard input, which can be one text only")
    texts = [read_text(name) for name in options.files]
    for name, text in zip(options.files, texts, strict=True):
        if not text:
            raise CommandError(f"{label(name)}: is empty")
    folder = model_folder(options)
    with waiting("loading the model"):
        check_folder(folder)
        if not Tokenizer.is_in(folder):
            raise CommandError(f"{label(folder)}: this folder has no tokenizer")
        use_compilation_cache()
        model = load_model(folder, options)
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
