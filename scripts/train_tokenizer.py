"""Train the byte-pair ranks of a tokenizer on a text, and write its files.

python scripts/train_tokenizer.py book.txt --size 448 --out /path/to/folder
"""

import argparse
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import regex

from kimi_jax.errors import TokenizerError
from kimi_jax.text.strict_json import SURROGATE
from kimi_jax.text.tokenizer import PATTERN, write_tokenizer


def train_ranks(text: str, size: int) -> dict[bytes, int]:
    """`size` byte-pair ranks: the 256 bytes, then each time the most frequent pair of neighbours.

    A pair is known by its joined bytes, as tiktoken knows it; among equals the smallest bytes come
    first, so the same text gives the same ranks.
    """
    if found := SURROGATE.search(text):
        raise TokenizerError(f"lone surrogate {found[0]!r} at position {found.start()} of the text")
    if size < 256:
        raise TokenizerError(f"size {size} leaves no room for the 256 single bytes")
    pairs = _Pairs(text)
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < size:
        if not (joined := pairs.most_frequent()):
            raise TokenizerError(f"the text yields {len(ranks)} ranks, not {size}")
        ranks.setdefault(joined, len(ranks))
        pairs.merge(joined)
    return ranks


class _Pairs:
    """Counts of neighbours in the distinct words of a text, kept current while pairs are merged."""

    def __init__(self, text: str):
        words = Counter(regex.findall(PATTERN, text, flags=regex.V1))
        self._words = [[bytes([byte]) for byte in word.encode()] for word in words]
        self._times = list(words.values())
        self._counts: dict[bytes, int] = defaultdict(int)
        self._where: dict[bytes, set[int]] = defaultdict(set)
        for index in range(len(self._words)):
            self._count(index, self._times[index])

    def most_frequent(self) -> bytes:
        """Joined bytes of the most frequent pair, the smallest among equals; empty if none."""
        most = max(self._counts.values(), default=0)
        return min((pair for pair, count in self._counts.items() if count == most > 0), default=b"")

    def merge(self, joined: bytes) -> None:
        """Merges each pair that joins to these bytes."""
        for index in self._where.pop(joined):
            self._count(index, -self._times[index])
            self._words[index] = _merged(self._words[index], joined)
            self._count(index, self._times[index])
        self._counts.pop(joined)

    def _count(self, index: int, times: int) -> None:
        for left, right in pairwise(self._words[index]):
            self._counts[left + right] += times
            self._where[left + right].add(index)


def _merged(word: list[bytes], joined: bytes) -> list[bytes]:
    """The word with each pair that makes `joined` merged, from left to right."""
    merged: list[bytes] = []
    for part in word:
        if merged and merged[-1] + part == joined:
            merged[-1] = joined
        else:
            merged.append(part)
    return merged


def main() -> None:
    """Train on a file and write `tiktoken.model` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(description="Train byte-pair ranks on a UTF-8 text.")
    parser.add_argument("text", type=Path)
    parser.add_argument("--size", type=int, required=True, help="ranks, 256 single bytes included")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer's files")
    parser.add_argument("--special", nargs="*", default=["[BOS]", "[EOS]", "[PAD]"])
    options = parser.parse_args()
    ranks = train_ranks(options.text.read_text(encoding="utf-8"), options.size)
    special = {name: options.size + at for at, name in enumerate(options.special)}
    options.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(options.out, ranks, special)
    print(f"{options.out}: {len(ranks)} ranks, {len(special)} special ids")


if __name__ == "__main__":
    main()
