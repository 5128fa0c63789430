"""Numbers that users give, and the types that sums are made in."""

import ml_dtypes  # noqa: F401 - gives numpy its bfloat16
import numpy as np
import pytest

from kimi_jax.numerics import at_least_float32, is_number, is_whole

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [0, 5, np.int64(5), np.uint8(0), 2**31])
def test_whole_numbers(value):
    assert is_whole(value, 0) and is_whole(value, 0, 2**31)
    assert not is_whole(value, 2**31 + 1) and not is_whole(value, -9, -1)


@pytest.mark.parametrize("value", [True, np.True_, 5.0, "5", None, [5], np.array(5), np.float32(5)])
def test_what_is_not_a_whole_number(value):
    assert not is_whole(value, 0)


@pytest.mark.parametrize("value", [0, -1.5, 10**38, LARGEST, np.float32(1), np.int8(1), 1e-320])
def test_numbers_that_float32_holds(value):
    assert is_number(value) is True and is_number(-value) is True


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float64("-inf"), np.float32("nan")]
)
def test_nan_and_infinities_are_numbers(value):
    assert is_number(value) is True


@pytest.mark.parametrize("value", [True, 10**400, 2 * LARGEST, "1", None, 1j, np.complex64(1), [1]])
def test_what_float32_does_not_hold(value):
    assert is_number(value) is False


def test_sums_are_made_in_at_least_float32():
    types = {"float16": "float32", "bfloat16": "float32", "float32": "float32"}
    types["float64"] = "float64"
    for given, expected in types.items():
        assert at_least_float32(np.dtype(given)) == np.dtype(expected)
