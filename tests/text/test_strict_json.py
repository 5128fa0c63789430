"""JSON that every reader accepts: what passes can be written, read and encoded again."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.text import strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(VALUES)
def test_what_is_writable_is_read_back(value):
    if strict_json.unwritable(value):
        with pytest.raises(ValueError, match="it holds"):
            strict_json.parse(
                json.dumps(value).replace("NaN", "1e999").replace("Infinity", "1e999")
            )
        return
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    assert strict_json.parse(text.encode().decode(), unique_keys=True) == value


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "text, says",
    [
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "a number that is not finite"),
        ('{"a": "\\ud83d"}', "half a surrogate pair"),
        ('{"\\udc00": 1}', "half a surrogate pair"),
        ("9" * 4_001, "more than 4,000 digits"),
        ("9" * 5_000, "limit"),
        (nested(102), "more than 100 levels"),
        (nested(100_000), "more than 100 levels"),
        ('{"a": {"b": 1, "b": 1}}', "a key twice"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_what_readers_disagree_about_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        strict_json.parse(text, unique_keys=True)


def test_the_bounds_themselves_are_accepted():
    assert strict_json.parse("9" * 4_000) == int("9" * 4_000)
    assert json.dumps(strict_json.parse(nested(101))) == nested(101)
    assert strict_json.parse('{"a": 1, "a": 2}') == {"a": 2}
    assert strict_json.parse('"\\ud83d\\ude00"') == "😀"


def test_values_that_are_not_json_are_named():
    loop: list = []
    loop.append(loop)
    assert strict_json.unwritable(loop) == "it nests more than 100 levels"
    assert strict_json.unwritable([{1: 2}]) == "a key is not text but int"
    assert strict_json.unwritable({"a": {1}}) == "JSON has no set"
    assert strict_json.unwritable((1, "a", None, True)) is None


@pytest.mark.parametrize(
    "value, name",
    [(None, "null"), (True, "boolean"), (1, "number"), (1.5, "number"), ("", "string")],
)
def test_names_of_types(value, name):
    assert strict_json.type_name(value) == name
    assert strict_json.type_name([value]) == "array"
    assert strict_json.type_name({"a": value}) == "object"
