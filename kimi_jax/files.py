"""How the package reads files: regular files only, never more bytes than a limit, strict JSON.

Unusual here: a file is opened without blocking and looked at through its descriptor, so that a FIFO
cannot hang the reader and nothing can change between the check and the read. Symbolic links to
regular files are followed: download caches are made of them.
"""

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import FileError, shortened, shown

SHIPPED = Path(__file__).parent / "shipped"  # the small trained model of the package

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
_DIGITS = 4_000  # of an integer; Python itself refuses more than 4,300
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The regular file at `path`, open for reading bytes. Raises FileError for anything else."""
    try:
        descriptor = os.open(path, _FLAGS)
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise FileError(path, "not a name that a file can have") from error
    except OSError as error:
        reason = f"cannot be read, {error.strerror}"
        raise FileError(path, reason, missing=error.errno == errno.ENOENT) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise FileError(path, f"cannot be read, not a regular file but {kind}")
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Raises FileError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = file.read(size + 1) if size <= limit else b""  # a buffer of its size
            if size < len(content) <= limit:  # it has grown, or reports no size (/proc)
                content += file.read(limit + 1 - len(content))
        except OSError as error:
            raise FileError(path, f"cannot be read, {error.strerror}") from error
    if max(size, len(content)) > limit:
        raise FileError(path, f"too large, {max(size, len(content)):,} bytes of at most {limit:,}")
    return content


def read_json(path: str | os.PathLike[str], limit: int) -> Any:
    """The JSON value in a regular file of at most `limit` bytes. Raises FileError."""
    content = read_regular(path, limit)
    try:
        return parse_json(content)
    except ValueError as error:
        raise FileError(path, f"not a JSON file ({error})") from error


def parse_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8 without a byte order mark.

    Raises ValueError with a printable reason for anything else, and for what readers of JSON
    disagree about: a key twice in one table, NaN and infinities, nesting without end.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    hooks = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _refuse_constant}
    try:
        return json.loads(text, object_pairs_hook=_table, **hooks)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(repeated)} appears twice")
    return table


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {shortened(digits, 40)} is too large")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
