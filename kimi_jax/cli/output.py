"""What a command reads and prints: standard streams, tables, lines of JSON, notes and errors."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import CommandError, FileError, printable
from ..files import read_regular
from ..waiting import TELLER

_LONGEST = 2**26  # characters read from standard input: far more than any context holds


def prepare_streams() -> None:
    """Make the standard streams safe to use, whatever the caller made of them.

    Characters that the terminal's encoding lacks are replaced by `?`, in error messages by their
    escapes. Standard input is UTF-8. A descriptor that was closed is opened on the null device, so
    that no file takes its number. Raises `CommandError` where standard output was closed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    if sys.stdout is None:
        raise CommandError("standard output is closed: there is nowhere to write")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def read_standard_input() -> str:
    """All of standard input. Raises `CommandError` where it is closed, not UTF-8 or without end."""
    check_standard_input()
    try:
        text = sys.stdin.read(_LONGEST + 1)
    except UnicodeDecodeError as error:
        raise CommandError(
            f"standard input is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"standard input cannot be read: {error}") from error
    if len(text) > _LONGEST:
        raise CommandError(f"standard input holds more than {_LONGEST:,} characters")
    return text


def read_text(name: str) -> str:
    """The text of a UTF-8 file, or of standard input for "-". Raises `FileError` or `CommandError`
    for what cannot be read.
    """
    if name == "-":
        return read_standard_input()
    content = read_regular(name, _LONGEST)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise FileError(name, f"is not UTF-8: byte {byte:#04x} at {error.start}") from error


def check_standard_input() -> None:
    """Raise `CommandError` where nothing can be read."""
    if sys.stdin is None:
        raise CommandError("standard input is closed")


def silence_output() -> None:
    """Send what is still buffered for standard output to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def redirect_output(silent: bool) -> None:
    """Keep standard output for what this command writes, or for nothing where it is to be silent;
    what libraries write there goes to standard error.
    """
    sys.stdout.flush()
    descriptor = os.open(os.devnull, os.O_WRONLY) if silent else os.dup(1)
    os.dup2(descriptor if silent else 2, 1)
    encoding = sys.stdout.encoding
    sys.stdout = open(descriptor, "w", encoding=encoding, errors="replace")  # noqa: SIM115


def write(text: str) -> None:
    """Text on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """A line of JSON; where standard output is not UTF-8, in ASCII."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8))


def note(line: str) -> None:
    """A remark on standard error, from the first of the processes."""
    import jax

    if jax.process_index() == 0:
        TELLER.clear()
        print(f"kimi-jax: {printable(line)}", file=sys.stderr)


def print_error(error: Exception | str) -> None:
    """An error on standard error, escaped and shortened."""
    print(f"kimi-jax: error: {printable(str(error))}", file=sys.stderr)


def console(stderr: bool = False) -> Any:
    """A rich console as wide as the terminal, whatever the environment says of its size."""
    from rich.console import Console

    from ..progress import terminal_size

    width, height = terminal_size()
    return Console(stderr=stderr, markup=False, highlight=False, width=width, height=height)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, numbers aligned to the right, without a header where no column has a name."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(columns))
    table.title_justify = "left"
    table.title_style = "bold"
    for at, column in enumerate(columns):
        is_numeric = all(re.match(r"[-\d.,e+]+( [kMG]?B|%)?$", row[at]) for row in rows)
        table.add_column(column, justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen = console()
    if not screen.is_terminal:
        screen.width = 160  # a file or a pipe has no width to keep to
    with screen.capture() as captured:  # rich would end the program where a pipe is closed
        screen.print(table)
    write(captured.get())
