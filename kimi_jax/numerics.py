"""Checks of numbers that users give."""

from typing import Any

import numpy as np


def is_whole(value: Any, low: int, high: int | None = None) -> bool:
    """Whether a value is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return low <= int(value) and (high is None or int(value) <= high)


def is_number(value: Any) -> bool:
    """Whether a value is a number that float32 holds, NaN and infinities among them."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    largest = float(np.finfo(np.float32).max)
    return bool(value != value or abs(value) == np.inf or abs(value) <= largest)
