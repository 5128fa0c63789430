"""Text to ids and back: byte-pair ranks, special tokens, streaming; knows no arrays.

Unusual here: text never turns into a special id unless the caller says `markers=True`, which is for
trusted templates only; and text on the two sides of a special id is encoded apart, never joined.
"""

import codecs
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import tiktoken

from ..errors import TokenizerError, shown
from .strict_json import SURROGATE
from .vocabulary import (
    CONFIG_FILE,
    RANKS_FILE,
    check_vocabulary,
    read_vocabulary,
    write_tokenizer,
)

__all__ = [
    "CONFIG_FILE",
    "PATTERN",
    "RANKS_FILE",
    "StreamDecoder",
    "Tokenizer",
    "write_tokenizer",
]

# One alternative a line, first match wins. `&&` is set intersection, which tiktoken's engine and
# `regex` (V1) read and Python's `re` does not.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# tiktoken's regex engine fails on long input and on long runs of one class. The published tokenizer
# splits at these lengths, and where it splits decides the ids: the numbers belong to the format.
_CHUNK_CHARS = 400_000
_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Byte-pair ranks (bytes to id) and special tokens (content to id).

    `vocab_size` is the largest id plus one; ids below it may be unused. Raises one TokenizerError
    that lists everything wrong with the two tables.
    """

    special_ids: dict[str, int]
    vocab_size: int

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int]):
        check_vocabulary(ranks, special)
        self.special_ids = dict(special)
        self._special_bytes = {token: content.encode() for content, token in special.items()}
        self._bytes = {token: piece for piece, token in ranks.items()} | self._special_bytes
        self.vocab_size = max(self._bytes) + 1
        self._markers = _Markers(special)
        # tiktoken is told of no special token, so that it cannot produce any.
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} ids, {len(self.special_ids):,} of them special)"

    @staticmethod
    def is_in(path: str | os.PathLike[str]) -> bool:
        """Whether a folder holds tokenizer files at all, either of the two being enough to expect
        both.
        """
        return any(os.path.lexists(Path(path) / name) for name in (RANKS_FILE, CONFIG_FILE))

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str], vocab: int | None = None) -> "Tokenizer":
        """Reads `tiktoken.model` and `tokenizer_config.json`; one error lists every problem.

        With a model's `vocab` given, ids that the files do not name become special tokens
        `<|reserved_token_ID|>`, since a model may sample them, and ids outside it are an error.
        """
        return cls(*read_vocabulary(path, vocab))

    def id(self, content: str) -> int:
        """The id of a special token."""
        if content not in self.special_ids:
            raise TokenizerError(f"{shown(content)} is not a special token")
        return self.special_ids[content]

    def encode(self, text: str, markers: bool = False) -> list[int]:
        """Ids of the text, which `decode` turns back into it.

        Without `markers` no special id comes out, whatever the text says. With `markers` the
        special contents become their ids and the text between them is encoded part by part: for
        trusted templates, never for what a user typed. A lone surrogate raises TokenizerError.
        """
        _refuse_surrogates(text)
        if not markers:
            return self._encode_ordinary(text)
        return self.encode_segments(self._markers.split(text))

    def encode_segments(self, segments: Iterable[str | int]) -> list[int]:
        """Each string as ordinary text on its own, each int as the id it is.

        Strings are never joined before they are encoded: `["a", "b"]` need not equal `["ab"]`.
        """
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, str):
                _refuse_surrogates(segment)
                ids += self._encode_ordinary(segment)
            else:
                self._piece(segment)
                ids.append(segment)
        return ids

    def decode(self, ids: Iterable[int], markers: bool = True) -> str:
        """Text of the ids: invalid UTF-8 becomes U+FFFD, special tokens show only with `markers`.

        A special token ends the character before it, shown or not: half a character on each side of
        it does not make a character. An unknown id raises TokenizerError.
        """
        if markers:
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids, special tokens as their content in UTF-8."""
        return b"".join(map(self._piece, ids))

    def stream(self) -> "StreamDecoder":
        """A decoder that takes one id at a time."""
        return StreamDecoder(self)

    def is_special(self, token: int) -> bool:
        """Whether the id belongs to a special token."""
        return token in self._special_bytes

    def _encode_ordinary(self, text: str) -> list[int]:
        return [token for chunk in _chunks(text) for token in self._encoding.encode_ordinary(chunk)]

    def _piece(self, token: int) -> bytes:
        if token not in self._bytes:
            raise TokenizerError(f"id {shown(token)} is not in the vocabulary of {self.vocab_size}")
        return self._bytes[token]


class _Markers:
    """Finds special contents in text: the first, and of those at the same place the longest.

    Unusual here: not a regular expression of all contents, since a vocabulary may reserve
    160,000. Contents are looked up by length at each place where they may begin.
    """

    def __init__(self, ids: dict[str, int]):
        self._ids = ids
        lengths: dict[str, set[int]] = defaultdict(set)
        for content in ids:
            lengths[content[:2]].add(len(content))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        first = "".join(map(re.escape, {content[0] for content in ids}))
        self._candidates = re.compile(f"[{first}]" if first else "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order: ids of the special contents, and the strings between them."""
        end = 0
        place = self._candidates.search(text)
        while place:
            start = place.start()
            if marker := self._longest_at(text, start):
                yield text[end:start]
                yield self._ids[marker]
                end = start + len(marker)
            place = self._candidates.search(text, end if marker else start + 1)
        yield text[end:]

    def _longest_at(self, text: str, start: int) -> str:
        """The longest special content that begins here, or nothing."""
        for prefix in (text[start : start + 2], text[start]):
            for length in self._lengths.get(prefix, ()):
                content = text[start : start + length]
                if content in self._ids:
                    return content
        return ""


class StreamDecoder:
    """Text as ids arrive, in complete characters and without special tokens.

    All pushes and the finish together equal `decode(ids, markers=False)`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this id completes, often empty."""
        if self._tokenizer.is_special(token):
            return self.finish()
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """U+FFFD for an incomplete character, else nothing; resets the decoder."""
        return self._utf8.decode(b"", final=True)


def _chunks(text: str) -> Iterator[str]:
    """The text in chunks, also split within runs of white space, or of other text, that are too
    long.
    """
    for start in range(0, len(text), _CHUNK_CHARS):
        chunk = text[start : start + _CHUNK_CHARS]
        runs = _RUN.finditer(chunk) if len(chunk) > _RUN_CHARS else ()
        inner = [at for run in runs for at in range(run.start(), run.end(), _RUN_CHARS)[1:]]
        for begin, end in pairwise([0, *inner, len(chunk)]):
            yield chunk[begin:end]


def _refuse_surrogates(text: str) -> None:
    if found := SURROGATE.search(text):
        raise TokenizerError(f"lone surrogate {found[0]!r} at position {found.start()} of the text")
