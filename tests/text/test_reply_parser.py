"""Replies taken apart as they come: whole, malformed, cut, streamed."""

import json
import random
import re

import pytest
from chats import (
    ARGUMENT,
    CALLED,
    END,
    FORGED,
    JSON,
    REPLY,
    SPECIAL,
    TOKENIZER,
    USER,
    call_of,
    ids,
    parsed,
    said,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_jax as kj
from kimi_jax.text import chat_format, reply_parser, tags

many = settings(max_examples=300)


def test_a_reply_is_taken_apart():
    events, parser = parsed(ids(REPLY))
    assert said(parser) == ("Two calls.", "Let me 😀.", CALLED)
    kinds = [event.kind for event in events]
    assert kinds == sorted(kinds, key=["thinking", "text", "tool_call"].index)
    assert [event.tool_call for event in events if event.tool_call] == CALLED
    assert parser.problems == [] and parser.ended


MARKUP = st.sampled_from(
    [
        *[f"<|close|>{tag}<|sep|>" for tag in ("think", "response", "tools", "call", "argument")],
        *[f"<|open|>{tag}<|sep|>" for tag in ("think", "response", "tools", "other")],
        *['<|open|>call tool="f" index="1"<|sep|>', "<|open|>", "<|close|>", "<|sep|>", "[PAD]"],
        *['<|open|>argument key="k" type="string"<|sep|>', "<|open|>call<|sep|>", "[BOS]"],
        *['<|open|>argument key="k" type="number"<|sep|>', "2", "a b", "中", "😀", " <|sep ", "[1"],
    ]
)


@many
@given(st.lists(MARKUP, max_size=14).map("".join), st.booleans(), st.integers(0, 400))
def test_pitfall_50_streams_equal_wholes_and_no_marker_leaks(text, thinking, cut):
    """At every split: a prefix says a prefix, and the rest completes it. Cut anywhere, nothing of a
    tag shows.
    """
    tokens = ids(text)
    cut = min(cut, len(tokens))
    events, parser = parsed(tokens, thinking)
    thought, answer, calls = said(parser)
    assert "".join(e.text for e in events if e.kind == "thinking") == thought
    assert "".join(e.text for e in events if e.kind == "text") == answer
    assert [e.tool_call for e in events if e.tool_call] == calls
    _, first = parsed(tokens[:cut], thinking)
    assert thought.startswith(first_thought := "".join(first.thinking).rstrip("\ufffd"))
    first_answer = "".join(first.text).rstrip("\ufffd")
    assert any(  # its end may have turned out to be thinking
        answer.startswith(first_answer[:end])
        and thought[len(first_thought) :].startswith(first_answer[end:].strip())
        for end in range(len(first_answer) + 1)
    )
    assert calls[: len(first.tool_calls)] == first.tool_calls
    for shown in (thought, answer):
        assert not re.search("think|response|tools|tool=|key=|index|open|close|PAD", shown)


class Oracle:
    """The definition: the reply as a string, markers as characters that no text has, taken apart by
    one expression. Text that is in no channel, or in the response that the prompt began, is held
    until something decides whether it is thinking.
    """

    def __init__(self, tokens, thinking):
        self.where, self.thought, self.answer, self.held = "think", "", "", ""
        if not thinking:
            self.where = "begun"
        header = r"([^\x01-\x04]*)\x03"
        for piece in re.findall(
            rf"\x01{header}|\x02{header}|([^\x01-\x04]+)|(\x04)", self.string(tokens)
        ):
            opened, closed, body, end = piece
            if end or closed == "message":
                break
            if opened in ("think", "response"):
                self.settle(opened)
            elif closed:
                self.close(closed)
            elif self.where == "think":
                self.thought += body
            elif self.where == "response":
                self.answer += body
            else:
                self.held += body
        self.settle(None, is_closed=True)

    def string(self, tokens):
        marks = zip(chat_format.MARKERS, "\x01\x02\x03\x04", strict=True)
        names = {SPECIAL[marker]: mark for marker, mark in marks}
        runs, text = [[]], ""
        for token in [*tokens, END]:
            if token in names:
                text += TOKENIZER.decode(runs[-1], markers=False) + names[token]
                runs.append([])
            else:
                runs[-1].append(token)
        return text

    def close(self, tag):
        if tag == "think" and self.where in ("begun", None):
            text = self.held.strip() if self.where is None else self.held
            self.thought += text if text.strip() else ""
            self.where, self.held = None, ""
        elif tag == self.where or (tag == "response" and self.where == "begun"):
            self.settle(None, is_closed=True)

    def settle(self, then, is_closed=False):
        text = self.held.strip() if self.where is None else self.held
        self.answer += text if text.strip() or is_closed else ""
        self.where, self.held = then, ""


CHANNELS = st.sampled_from(
    [
        *[f"<|{way}|>{tag}<|sep|>" for way in ("open", "close") for tag in ("think", "response")],
        *["<|close|>message<|sep|>", "a b", "中", "😀", "x<|sep|>y", "<|end_of_msg|>", "é"],
        *[" ", "\n\n", " c ", "<|close|>think<|sep|>"],
    ]
)


@many
@given(st.lists(CHANNELS, max_size=10).map("".join), st.booleans(), st.randoms())
def test_channels_equal_their_definition(text, thinking, chance: random.Random):
    """Also where bytes of a character are missing."""
    tokens = [t for t in ids(text) if t >= 290 or chance.random() < 0.9]
    _, parser = parsed(tokens, thinking)
    oracle = Oracle(tokens, thinking)
    assert said(parser)[:2] == (oracle.thought, oracle.answer)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6) | st.just(FORGED),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)  # fmt: skip
spoken = st.text(max_size=8) | st.just(FORGED)
called = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments},
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
    st.dictionaries(st.text(max_size=4), values, max_size=3),
)


@settings(max_examples=60)
@given(spoken, spoken, st.lists(called, max_size=3), st.booleans())
def test_what_is_rendered_is_parsed_back(thought, answer, calls, thinking):
    """A reply that says exactly what a message says gives that message again."""
    message = {"role": "assistant", "content": answer, "tool_calls": calls, "thinking": thought}
    results = [
        {"role": "tool", "tool_call_id": f"{call['name']}:{i}", "content": ""}
        for i, call in enumerate(calls, start=1)
    ]
    before = chat_format.render(TOKENIZER, [USER], thinking=thinking)
    whole = chat_format.render(TOKENIZER, [USER, message, *results], thinking=thinking)
    tokens = whole[len(before) :]
    assert whole[: len(before)] == before
    _, parser = parsed(tokens, thinking)
    assert parser.ended and parser.problems == []
    kept = thought if thinking and thought.strip() else ""
    assert said(parser)[:2] == (kept, answer)
    assert [(c.name, c.arguments) for c in parser.tool_calls] == [
        (call["name"], call["arguments"]) for call in calls
    ]


@pytest.mark.parametrize(
    "text, thought, answer",
    [
        ("hm", "hm", ""),
        ("hm<|open|>response<|sep|>yes", "hm", "yes"),
        ("hm<|close|>think<|sep|>yes", "hm", "yes"),
        ("hm<|close|>response<|sep|>m", "hmm", ""),
        ("hm<|close|>think<|sep|><|open|>resp", "hm", ""),
        ("h<|sep|>[PAD]m", "hm", ""),
        ("<|close|>think<|sep|>a<|close|>message<|sep|>b<|open|>think<|sep|>c", "", "a"),
        ("<|close|>think<|sep|>a<|end_of_msg|>b", "", "a"),
        ("<|close|>think<|sep|>a<|open|>think<|sep|>b<|open|>response<|sep|>c", "b", "ac"),
        ("hm<|close|>think<|sep|> \n<|open|>response<|sep|>\tc ", "hm", "\tc "),
        ("hm<|close|>think<|sep|>\n a \n b \n<|open|>response<|sep|>c", "hm", "a \n bc"),
        ("<|close|>think<|sep|>a<|close|>think<|sep|>b", "a", "b"),
        ("<|close|>think<|sep|>a<|close|>response<|sep|><|close|>think<|sep|>b", "a", "b"),
        ("<|open|>response<|sep|>a<|close|>think<|sep|>b", "", "ab"),
    ],
)
def test_a_malformed_reply_has_a_meaning(text, thought, answer):
    _, parser = parsed(ids(text))
    assert said(parser) == (thought, answer, []) and parser.problems == []


@pytest.mark.parametrize(
    "text, thought, answer",
    [
        (
            "15% is 36.<|close|>think<|sep|>\n<|open|>response<|sep|>It is 36.<|close|>response",
            *("15% is 36.", "It is 36."),
        ),
        ("a<|close|>think<|sep|>b", "a", "b"),
        ("a<|close|>response<|sep|> \n<|close|>message<|sep|>", "", "a"),
        ("a<|close|>response<|sep|>b<|close|>think<|sep|>c", "b", "ac"),
        ("a<|open|>response<|sep|>b<|close|>think<|sep|>c", "", "abc"),
        ("\n<|open|>think<|sep|>a<|close|>think<|sep|>\n<|open|>response<|sep|>b", "a", "b"),
        ("\n<|close|>think<|sep|> b ", "", "b"),
        (" \n<|close|>response<|sep|>", "", " \n"),
        (" a\n", "", " a\n"),
    ],
)
def test_a_close_of_thinking_that_was_never_opened(text, thought, answer):
    """Begun without thinking: what stands before the close was thinking all the same."""
    events, parser = parsed(ids(text), thinking=False)
    assert said(parser) == (thought, answer, []) and parser.problems == []
    for kind, whole in (("thinking", thought), ("text", answer)):
        assert "".join(event.text for event in events if event.kind == kind) == whole


@pytest.mark.parametrize(
    "text, answer, problem",
    [
        ("hm<|close|>think Hello there", "", "a tag without end was left out: 'think Hello there'"),
        ("hm<|close|>thinkHello<|end_of_msg|>", "", "a tag without end was left out: 'thinkHello'"),
        ("hm<|open|>response Hello", "", "a tag without end was left out: 'response Hello'"),
        ("<|close|>think<|open|>response<|sep|>a", "a", "a tag without end was left out: 'think'"),
        ("<|close|>think Hi<|sep|>a", "a", "text in a tag was left out: 'think Hi'"),
        ("<|close|>think<|sep|><|close|>Hi<|sep|>a", "a", "not part of the format was left out"),
        ('<|open|>message role="user"<|sep|>a', "", "not part of the format was left out"),
        ('<|open|>call tool="f"', "", "a tag without end was left out: 'call tool=\"f\"'"),
        ('<|open|>call tool="f"<|close|>call<|sep|>', "", "a tag without end was left out"),
        ('<|open|>argument key="k" type="string"<|sep|>', "", "argument outside a tool call"),
        ("<|open|>tools<|sep|>a<|close|>tools<|sep|>", "", "text between tool calls was left out"),
        ("<|open|>" + "a" * 8193 + "<|sep|>", "", "a tag of more than 8,192 characters"),
        ("<|open|>" + "a" * 8193, "", "a tag of more than 8,192 characters"),
        ('x<|close|>argument key="The answer is 42. It is long', "", "a tag without end"),
        ('x<|close|>json type="I would like', "", "a tag without end"),
        ('x<|open|>argument key="The answer is 42.', "", "a tag without end"),
    ],
)
def test_what_a_broken_tag_costs_is_said(text, answer, problem):
    _, parser = parsed(ids(text))
    assert said(parser)[1:] == (answer, [])
    assert len(parser.problems) == 1 and problem in parser.problems[0]


@pytest.mark.parametrize(
    "tag", ["", "th", "think", 'response x="', "tools ", "argument k", 'json type="obj', "message"]
)
def test_a_tag_that_the_end_cut_is_no_problem(tag):
    _, parser = parsed(ids("hm<|open|>" + tag))
    assert said(parser) == ("hm", "", [])
    assert (parser.problems == []) == ("=" not in tag)


@pytest.mark.parametrize(
    "header",
    [*["a" * 32_000, " " * 32_000, "a=" * 16_000, "call " + 'a="b" ' * 5000, "call" + " " * 8_000]],
)
def test_a_header_is_read_up_to_a_bound(header):
    """A long one is left out, and what follows is read as if it were not there. (One expression
    read 32,000 letters in quadratic time, which made this test wait for ten seconds.)
    """
    _, parser = parsed(ids(f"<|open|>{header}<|sep|>x"), thinking=False)
    is_call = len(header) < tags.MAX_HEADER
    assert "".join(parser.text) == ("" if is_call else "x")
    assert len(parser.problems) == 1


def test_text_that_looks_like_a_marker_is_text():
    tokens = [*TOKENIZER.encode(FORGED), *ids("<|close|>response<|sep|>")]
    assert said(parsed(tokens, thinking=False)[1])[1] == FORGED


@many
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    st.sampled_from(["thinking", "no thinking", "no channel"]),
)
def test_stop_strings_end_the_answer_alone(pieces, stops, begin):
    """However it is split into tokens, and whether or not it may still turn out to be thinking."""
    answer = "".join(pieces)
    before = {
        "thinking": f"{answer}<|close|>think<|sep|><|open|>response<|sep|>",
        "no channel": f"{answer}<|close|>think<|sep|>",
    }.get(begin, "")
    split = [token for piece in pieces for token in TOKENIZER.encode(piece)]
    tokens = [*ids(before), *split, *ids("<|close|>response<|sep|>")]
    events, parser = parsed(tokens, begin != "no thinking", stops)
    found = [(answer.find(stop) + len(stop), answer.find(stop)) for stop in stops if stop in answer]
    _, at = min(found, default=(0, len(answer)))  # the one that is complete first
    assert said(parser)[:2] == (answer if before else "", answer[:at])
    assert "".join(event.text for event in events if event.kind == "text") == answer[:at]


def test_tags_are_not_searched_for_stop_strings():
    assert said(parsed(ids(REPLY), True, ("response", "tool"))[1])[2] == CALLED


# Whatever the ids


JUNK = st.sampled_from(
    [
        *[
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "<|end_of_msg|>",
            "[BOS]",
            "[PAD]",
            " ",
            "\n",
            "é",
            "😀",
        ],
        *[
            "think",
            "response",
            "tools",
            "message",
            "call",
            "argument",
            "json",
            ' tool="f"',
            ' index="1"',
        ],
        *[
            ' key="k"',
            ' key="j"',
            ' type="string"',
            ' type="object"',
            ' type="array"',
            ' type="number"',
        ],
        *[
            '{"a":"\\ud83d"}',
            '{"a":1}',
            "{}",
            "[1e999]",
            "1",
            "NaN",
            "[[",
            "a b",
            ' key=""',
            ' tool="&quot;"',
        ],
        *[f"<|{way}|>{tag}<|sep|>" for way in ("open", "close") for tag in tags.CHANNELS],
        *[
            '<|open|>call tool="f" index="1"<|sep|>',
            "<|close|>call<|sep|>",
            "<|close|>argument<|sep|>",
        ],
        *[
            '<|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|>",
            JSON.format("object", '{"b":[]}'),
        ],
        *[
            ARGUMENT.format("string", "x"),
            ARGUMENT.format("object", '{"a":"\\ud83d"}'),
            call_of(""),
        ],
        *[
            call_of(ARGUMENT.format("number", "1e999")),
            call_of(JSON.format("object", '{"c":"\\udead"}')),
        ],
    ]
)
NOISE = st.lists(JUNK, max_size=25).map("".join) | st.lists(st.integers(0, 296), max_size=60)


def reply_of(parser):
    usage = kj.Usage(0, 0, 0.0, 0.0)
    thought, answer, calls = said(parser)
    return kj.Reply(thought, answer, calls, "stop", usage, [])


@many
@given(NOISE, st.booleans())
def test_every_reply_can_go_back_into_its_conversation(noise, thinking):
    tokens = ids(noise) if isinstance(noise, str) else noise
    events, parser = parsed(tokens, thinking)
    reply = reply_of(parser)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": ""} for call in reply.tool_calls
    ]
    messages = [USER, reply.message, *results, USER]
    assert chat_format.render(TOKENIZER, messages, thinking=thinking)
    assert json.loads(json.dumps(reply.message, allow_nan=False)) == reply.message
    assert "".join(e.text for e in events if e.kind == "text") == reply.text
    assert "".join(e.text for e in events if e.kind == "thinking") == reply.thinking
    assert [e.tool_call for e in events if e.tool_call] == reply.tool_calls


@many
@given(NOISE, st.booleans())
def test_what_a_parser_has_said_it_never_takes_back(noise, thinking):
    """Events, calls and problems only grow, and nothing follows the end."""
    tokens = ids(noise) if isinstance(noise, str) else noise
    parser = reply_parser.ReplyParser(TOKENIZER, thinking)
    before: tuple[list, list, list] = ([], [], [])
    for token in tokens:
        had_ended = parser.ended
        events = parser.push(token)
        assert not (had_ended and events) and all(e.text or e.tool_call for e in events)
        now = (parser.thinking + parser.text, list(parser.tool_calls), list(parser.problems))
        for old, new in zip(before[1:], now[1:], strict=True):
            assert new[: len(old)] == old
        before = now
    parser.finish()
    assert parser.ended and parser.finish() == [] and parser.push(65) == []
