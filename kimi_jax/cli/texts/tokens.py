"""`kimi-jax tokens`: the token ids of a text, and the text of token ids."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ...errors import CommandError, label
from ..devices import check_folder
from ..options import add_command, add_model, model_folder
from ..output import print_table, read_text, write

EXAMPLES = """\
  kimi-jax tokens letter.txt
  kimi-jax tokens letter.txt --count --model /path/to/checkpoint
  echo "The Queen" | kimi-jax tokens - --pieces
  kimi-jax tokens letter.txt > ids.txt; kimi-jax tokens ids.txt --decode

Ids have commas between them, as --tokens of generate takes them."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "show the token ids of a text, or the text of token ids"
    command = add_command(commands, "tokens", run, about, EXAMPLES)
    add = command.add_argument
    add("file", metavar="FILE", help="UTF-8 text; - reads it from standard input")
    add_model(command, has_path=False)
    add("--count", action="store_true", help="print the number of tokens alone")
    add("--pieces", action="store_true", help="print each id with its text")
    add("--decode", action="store_true", help="the file holds ids; print their text")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ...text.tokenizer import Tokenizer

    if options.count + options.pieces + options.decode > 1:
        raise CommandError("--count, --pieces and --decode: one at a time")
    folder = model_folder(options)
    check_folder(folder)
    if not Tokenizer.is_in(folder):
        raise CommandError(f"{label(folder)}: this folder has no tokenizer")
    tokenizer = Tokenizer.from_folder(folder)
    text = read_text(options.file)
    if options.decode:
        write(tokenizer.decode(_ids(text, tokenizer.vocab_size)))
        return 0
    ids = tokenizer.encode(text)
    if options.count:
        write(f"{len(ids)}\n")
    elif options.pieces:
        rows = [
            (str(at), str(token), repr(tokenizer.decode([token]))) for at, token in enumerate(ids)
        ]
        print_table("", ("position", "id", "text"), rows)
    else:
        write(",".join(map(str, ids)) + "\n")
    return 0


def _ids(text: str, count: int) -> list[int]:
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    wrong = next((p for p in parts if not re.fullmatch("[0-9]{1,9}", p) or int(p) >= count), None)
    if wrong is not None:
        raise CommandError(f"{label(wrong)} is not a token id below {count}")
    return [int(part) for part in parts]
