"""Accumulation types, what this CPU multiplies in hardware, checks of numbers that users give."""

import functools
from pathlib import Path
from typing import Any

import numpy as np


def at_least_float32(dtype: Any) -> np.dtype:
    """The accumulation type of a float type: float32, or float64 for float64."""
    return np.promote_types(dtype, np.float32)


def widen(x: Any) -> Any:
    """A float array, of JAX or numpy, in its accumulation type."""
    return x.astype(at_least_float32(x.dtype))


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has bfloat16 matrix instructions (AMX), by what Linux says."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def is_whole(value: Any, low: int, high: int | None = None) -> bool:
    """Whether a value is an integer in low..high; bools are not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return low <= int(value) and (high is None or int(value) <= high)


def is_number(value: Any) -> bool:
    """Whether a value is a number in the range of float32, or NaN or an infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    largest = float(np.finfo(np.float32).max)
    return bool(value != value or abs(value) == np.inf or abs(value) <= largest)
