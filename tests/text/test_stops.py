"""Stop strings: the earliest end in the text decides, however the text comes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import train_ranks

from kimi_jax.text import tokenizer
from kimi_jax.text.stops import StopStrings, TextBuilder


@pytest.fixture(scope="module")
def words():
    special = {"<|end_of_msg|>": 300}
    return tokenizer.Tokenizer(train_ranks("ab abc é 漢字 " * 9, 266), special)


def first_stop(text, stops, ignored=0):
    """Where the stop string that ends first, behind `ignored` characters, begins; else None."""
    for end in range(ignored + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def split(text, places):
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(edges)]


def result(pieces, stops, unarmed=0):
    found = StopStrings(stops)
    out = [found.push(piece, armed=i >= unarmed) for i, piece in enumerate(pieces)]
    return "".join([*out, found.finish()]), found.found


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)
PLACES = st.lists(st.integers(0, 20), max_size=6)


@given(st.text("abc", max_size=20), STOPS, PLACES, PLACES)
@settings(max_examples=300)
def test_the_earliest_end_decides_however_the_text_is_split(text, stops, first, second):
    cut = first_stop(text, stops)
    wanted = (text[:cut], cut is not None)
    for pieces in (split(text, first), split(text, second), list(text), [text]):
        assert result(pieces, stops) == wanted


@given(st.text("ab", max_size=20), STOPS, PLACES, st.integers(0, 6))
@settings(max_examples=300)
def test_stop_strings_that_are_complete_too_early_do_not_count(text, stops, places, unarmed):
    pieces = split(text, places)
    cut = first_stop(text, stops, ignored=len("".join(pieces[:unarmed])))
    assert result(pieces, stops, unarmed) == (text[:cut], cut is not None)


@pytest.mark.parametrize(
    "pieces, stops, wanted",
    [
        (["lice"], ("lic", "i"), "l"),
        (list("lice"), ("lic", "i"), "l"),
        (["abcd"], ("bcd", "c"), "ab"),
        (["xab"], ("ab", "b"), "x"),  # complete at once: the one that begins first
        (["aab"], ("aaab", "ab"), "a"),
        (["aa", "ab"], ("aaab", "b"), ""),
    ],
)
def test_stops_that_overlap(pieces, stops, wanted):
    assert result(pieces, stops) == (wanted, True)


def pushed(words, text, stops, min_tokens=0):
    builder = TextBuilder(words, stops, min_tokens)
    out = []
    for token in words.encode(text):
        out.append(builder.push(token))
        if builder.stopped:
            break
    return [*out, builder.finish()], builder.stopped


@given(
    st.text("abc é漢", max_size=30), st.lists(st.text("abc 漢", min_size=1, max_size=3), max_size=3)
)
@settings(max_examples=100)
def test_text_of_tokens_ends_where_the_text_says(words, text, stops):
    """Also across tokens and within characters of several tokens; nothing else is lost."""
    pieces, stopped = pushed(words, text, stops)
    cut = first_stop(text, stops)
    assert ("".join(pieces), stopped) == (text[:cut], cut is not None)


def test_stop_strings_reach_across_tokens(words):
    pieces, stopped = pushed(words, "ab abc x", ["b a"])
    assert ("".join(pieces), stopped) == ("a", True)


@given(st.text("abc ", max_size=20), st.integers(0, 9))
@settings(max_examples=100)
def test_stop_strings_wait_for_the_fewest_tokens(words, text, fewest):
    early = words.decode(words.encode(text)[: max(0, fewest - 1)])
    cut = first_stop(text, ["b", "ab "], ignored=len(early))
    pieces, stopped = pushed(words, text, ["b", "ab "], fewest)
    assert ("".join(pieces), stopped) == (text[:cut], cut is not None)
    assert not stopped or len(pieces) - 1 >= fewest


def test_a_character_that_never_became_whole_may_end_a_text(words):
    builder = TextBuilder(words, ["\ufffd"])
    token = next(t for t in range(266) if words.decode_bytes([t]) == b"\xe6")
    assert builder.push(token) + builder.finish() == "" and builder.stopped
