"""The book that the small model is trained and measured on, and how it is split for measuring."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BOOK = HERE / "data" / "alice.txt"
SHIPPED = HERE.parent / "kimi_jax" / "shipped"
WINDOW = 256
BATCH = 8


def split(text: str) -> tuple[str, str]:
    """The first nine tenths, to train on, and the last tenth, to measure on."""
    boundary = len(text) * 9 // 10
    return text[:boundary], text[boundary:]


def windows(ids: Sequence[int], bos: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Windows [rows, WINDOW + 1] over held-out ids, and which targets count [rows, WINDOW].

    Every id is a counted target once, after at least half a window of context where the text has
    that much before it. Rows come in multiples of BATCH; rows that pad have no counted target.
    """
    start = [] if bos is None else [bos]
    text = np.array([*start, *ids], np.int32)
    half = WINDOW // 2
    starts = range(0, len(text) - 1, half)
    count = -(-len(starts) // BATCH) * BATCH
    rows, counted = np.zeros((count, WINDOW + 1), np.int32), np.zeros((count, WINDOW), bool)
    for row, mask, first in zip(rows, counted, starts, strict=False):
        begin = max(0, first - half)
        piece = text[begin : begin + WINDOW + 1]
        row[: len(piece)] = piece
        mask[first - begin : min(first - begin + half, len(piece) - 1)] = True
    assert counted.sum() == len(text) - 1
    return rows, counted
