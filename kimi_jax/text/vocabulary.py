"""The two files of a tokenizer, read, checked and written: byte-pair ranks and special tokens.

`tiktoken.model` has a line `base64 rank` for each token; `tokenizer_config.json` names the special
tokens by id in `added_tokens_decoder`. Special ids begin where the ranks end, so a rank file that
was truncated is noticed.
"""

import base64
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileError, TokenizerError, shown
from ..files import parse_json, read_regular
from ..numerics import is_whole
from .strict_json import SURROGATE

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
_FILE_BYTES = 64 << 20  # ten times the files of the largest release
_LISTED = 40  # problems that an error lists
_RANK_LINE = re.compile(rb"\s*(\S+)\s+(0|[1-9][0-9]{0,8})\s*")
_MAX_ID = 999_999_999
_ID = re.compile(r"0|[1-9][0-9]{0,8}")


class Vocabulary(NamedTuple):
    """Byte-pair ranks (bytes to id) and special tokens (content to id)."""

    ranks: dict[bytes, int]
    special: dict[str, int]


def read_vocabulary(folder: str | os.PathLike[str], vocab: int | None = None) -> Vocabulary:
    """The vocabulary of a folder; one TokenizerError lists every problem.

    With a model's `vocab` given, ids that the files do not name become special tokens
    `<|reserved_token_ID|>`, since a model may sample them, and ids outside it are a problem.
    """
    problems: list[str] = []
    ranks = _read_ranks(Path(folder) / RANKS_FILE, problems)
    special = _read_special(Path(folder) / CONFIG_FILE, problems)
    if ranks:
        problems += [*_rank_problems(ranks), *_gap_problems(ranks, special)]
    problems += _special_problems(ranks, special)
    if vocab is not None:
        used = {*ranks.values(), *special.values()}
        if outside := sorted(token for token in used if token >= vocab):
            problems.append(f"ids {_some(outside)} are outside the model's vocabulary of {vocab}")
        reserved = {f"<|reserved_token_{i}|>": i for i in range(vocab) if i not in used}
        problems += [
            f"special {content!r} has id {special[content]}, and no token has the id it names"
            for content in reserved.keys() & special.keys()
        ]
        special |= reserved
    _raise_all(f"tokenizer in {folder}", problems)
    return Vocabulary(ranks, special)


def check_vocabulary(ranks: dict[bytes, int], special: dict[str, int]) -> None:
    """Raises one TokenizerError that lists everything wrong with the two tables."""
    _raise_all("tokenizer tables", [*_rank_problems(ranks), *_special_problems(ranks, special)])


def write_tokenizer(
    folder: str | os.PathLike[str], ranks: dict[bytes, int], special: dict[str, int]
) -> None:
    """Writes the two files `Tokenizer.from_folder` reads, each under a temporary name first.

    Tables that it would refuse raise TokenizerError before anything is written.
    """
    check_vocabulary(ranks, special)
    _raise_all("tokenizer tables", _gap_problems(ranks, special))
    lines = [
        b"%s %d\n" % (base64.b64encode(piece), rank)
        for piece, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    added = {
        str(token): {"content": content, "special": True}
        for content, token in sorted(special.items(), key=lambda item: item[1])
    }
    config = json.dumps({"added_tokens_decoder": added}, indent=2, ensure_ascii=False)
    Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Path(folder) / RANKS_FILE, b"".join(lines))
    _write(Path(folder) / CONFIG_FILE, config.encode() + b"\n")


# Reading the two files.


def _read_ranks(path: Path, problems: list[str]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(_read(path, problems).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, rank = _parse_rank(line)
        except ValueError:
            problems.append(f"{path.name} line {number}: {line[:40]!r} is not 'base64 rank'")
            continue
        if rank in seen:
            problems.append(f"{path.name} line {number}: rank {rank} appears twice")
        if piece in ranks:
            problems.append(f"{path.name} line {number}: token {shown(piece)} appears twice")
        seen.add(rank)
        ranks.setdefault(piece, rank)
    return ranks


def _parse_rank(line: bytes) -> tuple[bytes, int]:
    """Token and rank of a line. Raises ValueError, for base64 that is not canonical too."""
    parts = _RANK_LINE.fullmatch(line)
    if parts is None:
        raise ValueError
    piece = base64.b64decode(parts[1], validate=True)
    if base64.b64encode(piece) != parts[1]:
        raise ValueError
    return piece, int(parts[2])


def _read_special(path: Path, problems: list[str]) -> dict[str, int]:
    content = _read(path, problems)
    if not content:
        return {}
    try:
        config = parse_json(content)
        reason = ""
    except ValueError as error:
        config = None
        reason = f" ({error})"
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        problems.append(f"{path.name}: not JSON with an added_tokens_decoder table{reason}")
        return {}
    special: dict[str, int] = {}
    for key, entry in added.items():
        _add_special(special, key, entry, path.name, problems)
    return special


def _add_special(
    special: dict[str, int], key: str, entry: Any, name: str, problems: list[str]
) -> None:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not _ID.fullmatch(key):
        problems.append(f"{name}: added token id {shown(key)} is not a number below 10^9")
    elif not isinstance(content, str):
        problems.append(f"{name}: added token {key} has no content")
    elif content in special:
        problems.append(f"{name}: {shown(content)} is both {special[content]} and {key}")
    else:
        special[content] = int(key)


def _read(path: Path, problems: list[str]) -> bytes:
    try:
        content = read_regular(path, _FILE_BYTES)
    except FileError as error:
        missing = error.missing and not path.is_symlink()
        problems.append(f"{path.name} is missing" if missing else f"{path.name}: {error.reason}")
        return b""
    if not content.strip():
        problems.append(f"{path.name} is empty")
        return b""
    return content


# Checking the two tables.


def _rank_problems(ranks: dict[bytes, int]) -> list[str]:
    problems: list[str] = []
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        problems.append(f"no rank for the single bytes {_some(missing)}")
    present = set(ranks.values())
    if len(present) < len(ranks):
        problems.append(f"{len(ranks)} tokens share {len(present)} ranks")
    if gaps := [rank for rank in range(len(present)) if rank not in present]:
        problems.append(f"ranks are not 0 to {len(present) - 1}: {_some(gaps)} missing")
    return problems


def _gap_problems(ranks: dict[bytes, int], special: dict[str, int]) -> list[str]:
    """Ids between the last rank and the first special token: a truncated rank file."""
    last = max(ranks.values())
    content, first = min(special.items(), key=lambda item: item[1], default=("", last + 1))
    if first <= last + 1:
        return []
    return [
        f"{RANKS_FILE} ends with rank {last}, and the first special token, {shown(content)}, has "
        f"id {first}: {first - last - 1} ranks are missing"
    ]


def _special_problems(ranks: dict[bytes, int], special: dict[str, int]) -> list[str]:
    problems: list[str] = []
    owners: dict[int, bytes | str] = {rank: piece for piece, rank in ranks.items()}
    for content, token in special.items():
        if not is_whole(token, 0, _MAX_ID):
            problems.append(
                f"special {shown(content)} has the id {shown(token)}, not 0 to {_MAX_ID}"
            )
            continue
        if not content or SURROGATE.search(content):
            problems.append(
                f"special id {token} has the content {shown(content)}, which is not text"
            )
        if token in owners:
            problems.append(
                f"special {shown(content)} has id {token}, which {shown(owners[token])} has too"
            )
        owners[token] = content
    return problems


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


def _raise_all(subject: str, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise TokenizerError("\n  ".join([f"{subject}:", *problems[:_LISTED], *more]))


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
