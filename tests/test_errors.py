"""What messages quote: any value, any name, on lines that a terminal only shows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.errors import CheckpointError, InputError, label, printable, shown


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


LOOP: list = []
LOOP.append(LOOP)
VALUES = [
    *(None, True, 0, -(10**5000), 10**100, float("nan"), 1e-320, "", "x" * 10**6, b"\xff" * 10**6),
    *("\x1b[2J\r\n\u202e\u200b\x9b\ud83d\0", [10**5000] * 9, deep(10_000), LOOP, {"a": deep(99)}),
    *({1: 2, None: 3, (): 4}, {i: i for i in range(10**5)}, {frozenset({1}), 2}, Unprintable()),
    *(np.zeros((99, 99)), np.float32(1), object, [Unprintable()], list(range(10**6))),
]


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_any_value_is_shown_on_one_short_line(value):
    text = shown(value)
    assert text.isprintable() and 0 < len(text) < 180


@pytest.mark.parametrize("value", [None, True, 5, -0.5, "it's", [1, "a"], (1,), {"a": [2]}, set()])
def test_small_values_are_shown_as_they_are(value):
    assert shown(value) == repr(value)


@settings(max_examples=200)
@given(st.text(max_size=3000))
def test_any_text_is_safe_to_print(text):
    assert all(line.isprintable() and len(line) < 2_100 for line in printable(text).split("\n"))
    assert label(text).isprintable() and len(label(text)) < 500
    assert str(InputError(text)) == printable(text)
    assert len(str(CheckpointError(text, text)).split("\n")) == 3


def test_lines_of_a_message_stay():
    assert str(InputError("a\nb\tc")) == "a\nb\\tc"
    assert str(CheckpointError("a\n  b")) == "1 problem in the checkpoint:\n  a\\n  b"
