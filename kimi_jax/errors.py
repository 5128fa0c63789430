"""Every error that the package raises for bad input, and how values are quoted in messages.

All derive from `InputError`, whose text is safe to print: an error often quotes a file that is
not yet checked. Nothing has been computed, allocated or written when one of them is raised.
"""

import difflib
import math
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PRINTED = 40  # problems an error prints
_LINE = 2_000  # characters of a line that an error prints
_VALUE = 120  # characters of a value that a message quotes
_NAME = 400  # characters of a name that a message quotes


class InputError(ValueError):
    """Input that cannot be used. `str()` escapes control characters and shortens lines."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Problems(InputError):
    """Everything that is wrong with one `subject`; printing leaves out what comes after 40."""

    subject = "the input"

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each problem found."""
        return self.args

    def __str__(self) -> str:
        count = len(self.problems)
        title = f"{count} problem{'s' if count != 1 else ''} in {self.subject}:"
        more = [f"and {count - _PRINTED} more"] if count > _PRINTED else []
        lines = [str(problem).replace("\n", "\\n") for problem in self.problems[:_PRINTED]]
        return printable("\n  ".join([title, *lines, *more]))


class ConfigError(Problems):
    """A config that cannot be used, with every problem: each names its key and value."""

    subject = "the model config"


class CheckpointError(Problems):
    """A checkpoint that cannot be used, with all its problems, each naming a file or a tensor."""

    subject = "the checkpoint"


class FileError(InputError):
    """A file that cannot be read or is not what it should be: `path`, `reason`, and whether it is
    `missing`.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, missing: bool = False) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path, self.reason, self.missing = Path(path), reason, missing


class TokenizerError(InputError):
    """Files, text or ids the tokenizer refuses; for files, one line for every problem."""


class PlacementError(InputError):
    """A placement that does not fit: every dimension that is not valid, in one message."""


class RequestError(InputError):
    """Tokens, lengths or a state that a step cannot use."""


class PromptError(InputError):
    """Prompts or options that cannot run: every problem in one message."""


class CommandError(InputError):
    """A command line that cannot run as it was given."""


class ChatError(InputError):
    """A conversation or a tokenizer that chat cannot use: one line for every problem."""


class ImageError(InputError):
    """An image that cannot be used."""


def printable(text: str) -> str:
    """Text that a terminal only shows: control, format and surrogate characters are escaped (line
    breaks stay), and of a line of more than 2,000 characters the middle is left out.
    """
    return "\n".join(shortened(_escaped(line), _LINE) for line in text.split("\n"))


def shown(value: Any) -> str:
    """`repr` of a value for a message: escaped and at most 120 characters long, whatever it holds
    and however deep it is.
    """
    return shortened(_escaped(_QUOTED.repr(value)), _VALUE)


def label(name: Any) -> str:
    """The name of a key, a tensor or a file for a message: on one line, escaped, and shortened
    where it is long.
    """
    return shortened(_escaped(str(name)), _NAME)


def meant(word: Any, names: Iterable[Any]) -> str:
    """The end of a message about an unknown word: which of the names it may have been meant for, or
    nothing where none is near.
    """
    known = [name for name in names if isinstance(name, str)]
    if not isinstance(word, str) or not word.lstrip("-"):
        return ""
    near = [name for name in known if name.startswith(word.lower())]
    near = near or difflib.get_close_matches(word[:_NAME].lower(), known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def bytes_text(count: int) -> str:
    """Bytes for people: four significant digits, or GB without decimals from 1000 on; units are
    powers of 1000.
    """
    power = min(3, int(math.log10(max(1, count))) // 3)
    value = count / 1000**power
    unit = ("B", "kB", "MB", "GB")[power]
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


class _Quoted(reprlib.Repr):
    """`repr` that looks at the first items of a collection alone and never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxother = 10_000
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 30

    def repr_str(self, x: str, level: int) -> str:
        """A text, its middle left out where it is long."""
        return repr(shortened(x, _VALUE))

    def repr_int(self, x: int, level: int) -> str:
        """An integer; its size where it has more than 400 bits."""
        bits = x.bit_length()
        return repr(x) if bits <= 400 else f"a whole number of {bits:,} bits"


_QUOTED = _Quoted()


def shortened(text: str, limit: int) -> str:
    """A text of at most `limit` characters or so, its middle left out where it is longer."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}… ({len(text) - 2 * half:,} characters) …{text[-half:]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table_lines(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Aligned lines of a plan's terms (name, size, bytes, share), a rule before the three sums."""
    rows = [("term", "size", "bytes", "share"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-3], rule, *lines[-3:]]
