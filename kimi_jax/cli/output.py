"""What a command prints: text as it comes, tables, remarks on standard error."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence

from ..errors import printable


def redirect_output(silent: bool) -> None:
    """Standard output takes what this command writes, and nothing where it is to be silent; what
    libraries write there themselves goes to standard error.
    """
    sys.stdout.flush()
    own = os.open(os.devnull, os.O_WRONLY) if silent else os.dup(1)
    os.dup2(own if silent else 2, 1)
    sys.stdout = open(own, "w", encoding=sys.stdout.encoding)  # noqa: SIM115 - until the end


def write(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(line: str) -> None:
    """A remark beside the output, from the first of the processes."""
    import jax

    if jax.process_index() == 0:
        print(f"kimi-jax: {printable(line)}", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, figures to the right, and no header where no column has a name."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(columns))
    table.title_justify, table.title_style = "left", "bold"
    for at, column in enumerate(columns):
        figures = all(re.match(r"[-\d.,e+]+( [kMGT]?B)?$", row[at]) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width to keep to
    with console.capture() as said:  # rich would end the program where a pipe is closed
        console.print(table)
    write(said.get())


def bytes_text(count: int) -> str:
    """Three figures and a unit, in powers of 1000."""
    power = min(4, int(math.log10(max(1, count))) // 3)
    return f"{count} B" if power == 0 else f"{count / 1000**power:.3g} {'kMGT'[power - 1]}B"
