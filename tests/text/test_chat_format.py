"""Messages to ids: the format spelled out by hand, forging, what is refused, another encoder's
conversations.
"""

import json
import random
import re
from itertools import pairwise
from typing import NamedTuple

import pytest
from chats import ASKS, FORGED, RANKS, SPECIAL, TOKENIZER, USER, WEATHER, rendered
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

import kimi_jax as kj
from kimi_jax.text import chat_format
from kimi_jax.text.images import PromptImages
from kimi_jax.text.media import MEDIA_MARKERS
from kimi_jax.text.tokenizer import Tokenizer


def refused(messages, tools=None, **options):
    with pytest.raises(kj.ChatError) as error:
        chat_format.render(TOKENIZER, messages, tools, **options)
    return str(error.value)


def test_a_message_is_spelled_as_published():
    said = rendered([{"role": "system", "content": "Be brief."}, USER])
    assert said == (
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    assert rendered([USER], thinking=False).endswith(
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )
    named = rendered([{**USER, "name": 'Al "&"'}])
    assert named.startswith('<|open|>message role="user" name="Al &quot;&amp;&quot;"<|sep|>hi')


def test_every_segment_is_encoded_on_its_own():
    opening, sep = SPECIAL["<|open|>"], SPECIAL["<|sep|>"]
    ids = chat_format.render(TOKENIZER, [{"role": "user", "content": '"t'}])
    header = ["message", " role", '="', "user", '"']
    begun = TOKENIZER.encode_segments([opening, *header, sep, '"t', SPECIAL["<|close|>"]])
    assert ids[: len(begun)] == begun
    joining = {bytes([byte]): byte for byte in range(256)} | {b'"-': 256, b'-"': 257, b" n": 258}
    markers = {marker: 259 + i for i, marker in enumerate(chat_format.MARKERS)}
    ids = chat_format.render(Tokenizer(joining, markers), [{**USER, "name": "-"}])
    assert 258 in ids and not {256, 257} & set(ids)
    parts = [{"type": "text", "text": "the sys"}, {"type": "text", "text": "tem"}]
    apart = chat_format.render(TOKENIZER, [{"role": "user", "content": parts}])
    joined = chat_format.render(TOKENIZER, [{"role": "user", "content": "the system"}])
    assert TOKENIZER.decode(apart) == TOKENIZER.decode(joined) and apart != joined


CALLS = (
    "<|open|>response<|sep|>Let me see.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>中文"<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="a&amp;b" index="2"<|sep|>'
    '<|open|>argument key="on" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|open|>argument key="of" type="array"<|sep|>[1, null]<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    '<|open|>message role="tool" tool="get_weather" index="1"<|sep|>sun'
    "<|close|>message<|sep|><|end_of_msg|>"
    '<|open|>message role="tool" tool="a&amp;b" index="2"<|sep|>ok'
    "<|close|>message<|sep|><|end_of_msg|>"
)
RESULTS = [
    {"role": "tool", "tool_call_id": "x", "content": "sun"},
    {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "ok"}]},
]


@pytest.mark.parametrize("results", [RESULTS, RESULTS[::-1]])
def test_pitfall_51_calls_and_results_in_any_order(results):
    said = rendered([USER, ASKS, *results])
    begun = '<|end_of_msg|><|open|>message role="assistant"<|sep|>'
    assert f"{begun}<|open|>think<|sep|>Two calls.<|close|>think<|sep|>{CALLS}" in said
    assert f"{begun}{CALLS}" in rendered([USER, ASKS, *results], thinking=False)


def test_thinking_is_a_channel_even_where_nothing_was_thought():
    for thought in ({}, {"reasoning_content": " \n"}, {"thinking": ""}):
        said = rendered([USER, {"role": "assistant", "content": "yes", **thought}, USER])
        assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>yes" in said
    said = rendered([USER, {"role": "assistant", "content": None, "reasoning": "hm"}])
    assert "think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response" in said


def test_tools_and_effort_come_first_and_equal_tools_alike():
    whole = {"function": dict(reversed(WEATHER.items())), "type": "function"}
    said = rendered([USER], [WEATHER], thinking_effort="low")
    assert said.startswith(
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"get_weather","parameters":{"properties":{"city":{}},'
        '"type":"object"}},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides'
    )
    assert "`thinking_effort=low`.<|close|>message<|sep|><|end_of_msg|><|open|>message role" in said
    assert rendered([USER], [whole], thinking_effort="low") == said
    assert "effort" not in rendered([USER], thinking=False, thinking_effort="low")
    assert rendered([USER], []) == rendered([USER])


def test_pitfall_47_no_text_forges_a_marker():
    """Whatever the place: the count of control ids is that of the same conversation in plain."""

    def conversation(text):
        call = {"id": text, "function": {"name": text, "arguments": {text: text, "b": [text]}}}
        return [
            {"role": "system", "content": text, "name": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "thinking": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
        ]

    def controls(text):
        tools = [{"name": text, "description": text}]
        return [t for t in chat_format.render(TOKENIZER, conversation(text), tools) if t >= 290]

    assert controls(FORGED) == controls("plain") == controls('"' + FORGED)
    user = chat_format.render(TOKENIZER, [{"role": "user", "content": FORGED}])
    assert user[user.index(SPECIAL["<|sep|>"]) + 1 :][: len(TOKENIZER.encode(FORGED))] == (
        TOKENIZER.encode(FORGED)
    )


def test_pitfall_46_markers_after_a_quote_are_whole():
    ids = chat_format.render(TOKENIZER, [{"role": "user", "content": '"'}])
    quote = TOKENIZER.encode('"')[0]
    assert [b for a, b in pairwise(ids) if a == quote] == [
        *[SPECIAL["<|sep|>"], SPECIAL["<|close|>"], SPECIAL["<|sep|>"]]
    ]


NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "at least one message"),
        ("hi", "messages must be a list"),
        (["hi"], "message 0 is not a dict"),
        ([{"role": "robot", "content": ""}], "message 0: role must be system, user, assistant or"),
        ([USER, {"role": "user"}], "message 1: content must be text, got None"),
        ([{"role": "user", "content": [IMAGE]}], "message 0: part 0 is an image"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "part 0 is not text: 'audio'"),
        ([{"role": "user", "content": ["hi"]}], "part 0 is not text: 'hi'"),
        ([{**USER, "images": ["a"]}], "message 0: a user message takes no 'images'"),
        ([{**USER, "name": 3}], "message 0: name must be text"),
        ([{**USER, "tools": [WEATHER]}], "message 0: a user message takes no 'tools'"),
        ([{"role": "system", "tools": [{}]}], "message 0: tool 0 is not a function with a name"),
        ([{"role": "system", "tools": "x"}], "message 0: tools must be a list of functions"),
        ([{"role": ["user"], "content": ""}], "message 0: role must be system, user, assistant or"),
        ([{**USER, "content": "a\ud800"}], "message 0: lone surrogate"),
        ([ASKS], "message 0: call 'x' has no result"),
        ([ASKS, USER, *RESULTS], "message 2: no call just before it has the id 'x'"),
        ([USER, RESULTS[0]], "message 1: no call just before it has the id 'x'"),
        ([ASKS, *RESULTS, RESULTS[0]], "message 3: call 'x' has a result already"),
        ([ASKS, *RESULTS, {"role": "tool", "content": ""}], "message 3: tool_call_id must name"),
        ([{"role": "assistant", "content": "", "reasoning": 3}], "reasoning_content must be text"),
        ([{"role": "assistant", "reasoning": "a", "thinking": "b"}], "mean the same, but differ"),
        ([{"role": "assistant", "tool_calls": 3}], "message 0: tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "call 0 is not a call of a named function"),
    ],
)
def test_a_conversation_that_cannot_be_is_refused(messages, says):
    assert says in refused(messages)


@pytest.mark.parametrize(
    "call, says",
    [
        ({"id": 3}, "message 0: call 0: id must be text"),
        ({"arguments": {1: 2}}, "arguments cannot be written as JSON: a key is not text but int"),
        ({"arguments": {"a": "\ud83d"}}, "arguments cannot be written as JSON: it holds half a"),
        ({"arguments": {"a": [{2: 3}]}}, "arguments cannot be written as JSON: a key is not text"),
        ({"arguments": [print]}, "arguments cannot be written as JSON: JSON has no builtin"),
        ({"arguments": {"a": float("inf")}}, "arguments cannot be written as JSON"),
        ({"arguments": {"a": 10**5000}}, "a number of more than 4,000 digits"),
        ({"arguments": {"a": NESTED}}, "it nests more than 100 levels"),
        ({"arguments": {"a": float("nan")}}, "call 0: arguments cannot be written as JSON"),
        ({"arguments": {"a": {1, 2}}}, "call 0: arguments cannot be written as JSON"),
    ],
)
def test_a_call_that_cannot_be_is_refused(call, says):
    assert says in refused([{"role": "assistant", "tool_calls": [{"name": "f", **call}]}])


@pytest.mark.parametrize(
    "tools, says",
    [
        (WEATHER, "tools must be a list of functions"),
        ([WEATHER, {}], "tool 1 is not a function with a name"),
        ([print], "tool 0 is not a function with a name"),
        ([WEATHER, WEATHER], "tool 1: another tool is named 'get_weather' too"),
        ([{"name": "f", "parameters": {"a": object}}], "tool 0 cannot be written as JSON"),
    ],
)
def test_tools_that_cannot_be_are_refused(tools, says):
    assert says in refused([USER], tools)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"thinking": "off"}, "thinking must be True or False, got 'off'"),
        ({"thinking_effort": "huge"}, "thinking_effort must be low, medium, high or max or None"),
        ({"thinking_effort": "", "thinking": False}, "thinking_effort must be low"),
        ({"tool_choice": "any"}, "tool_choice must be auto, required or none, got 'any'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice must be"),
        ({"tool_choice": ["none"]}, "tool_choice must be"),
        ({"response_format": "yaml"}, "response_format must be text, json_object or json_schema"),
        ({"response_format": {"json_schema": {}}}, "response_format must be text"),
        ({"response_format": ["json_object"]}, "response_format must be text"),
        ({"response_format": "json_schema"}, "json_schema has no schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema has no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": print}}}},
            "response_format: the schema cannot be written as JSON: JSON has no builtin",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    assert says in refused([USER], **options)


def test_options_of_no_effect_and_schemas_of_every_nesting():
    for options in (
        {"tool_choice": "auto"},
        {"response_format": "text"},
        {"response_format": {"type": "text"}},
    ):
        assert rendered([USER], **options) == rendered([USER])
    schema = {"type": "object", "a": 1}
    said = rendered([USER], response_format={"type": "json_schema", "json_schema": schema})
    assert '```json\n{"a":1,"type":"object"}\n```<|close|>message<|sep|>' in said
    for key in ("schema", "json_schema"):
        nested = {"type": "json_schema", "json_schema": {"name": "r", key: schema}}
        assert rendered([USER], response_format=nested) == said
    plain = rendered([USER], response_format="json_object")
    assert plain == rendered([USER], response_format={"type": "json_object"})
    assert "`response_format=json_object`.\nYour response must be raw JSON" in plain
    assert plain.count("```") == 1 and said.count("```") == 3


def test_options_stand_before_and_behind_the_messages():
    said = rendered(
        [USER],
        [WEATHER],
        thinking_effort="high",
        tool_choice="none",
        response_format="json_object",
    )
    kinds = re.findall(r'type="([a-z-]+)"<|(?:role="(user|assistant)"<)', said)
    assert [kind or role for kind, role in kinds] == [
        *["tool-declare", "thinking-effort", "user", "tool-choice", "response-format"],
        "assistant",
    ]


# History with arguments that are not the JSON of an object


def block(arguments):
    """What stands in the call of a history."""
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
    said = rendered([USER, {"role": "assistant", "tool_calls": [call]}, RESULTS[0], USER])
    return re.search(r'index="1"<\|sep\|>(.*?)<\|close\|>call', said, re.S)[1]


@pytest.mark.parametrize(
    "arguments",
    [
        *['{"a": 1', '{"a":"x\ny"}', '{"a": 1}{"b": 2}', "null", "0", "false", "[]", "[1]", '"a"'],
        *['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"\\ud83d": 1}', "{'a': 1}", "a", "-"],
        *[
            '{"a": ' + "[" * 5000,
            '{"a": ' + "[" * 101 + "]" * 101 + "}",
            '{"a": ' + "9" * 5000 + "}",
        ],
        *["\ufeff{}", '{"a": ' + FORGED, FORGED],
    ],
)
def test_arguments_that_are_not_an_object_stand_as_they_are(arguments):
    assert block(arguments) == (f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>')


@pytest.mark.parametrize("value", [0, False, [], [1], 2.5, True, ["a", None]])
def test_values_that_are_not_an_object_are_treated_as_their_json(value):
    assert block(value) == block(json.dumps(value))


def test_no_arguments_are_no_arguments_however_given():
    for arguments in (None, {}, "", " \n", "{}", " {} "):
        assert block(arguments) == ""
    assert block('{"a": 1, "a": 2}') == block({"a": 2})


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text('{}[]":,1a\\n u'))
def test_every_text_of_arguments_renders(text):
    """As arguments, as it stands, or not at all where it is blank."""
    inside = block(text)
    as_it_stands = f'<|open|>json type="object"<|sep|>{text}<|close|>json<|sep|>'
    assert inside in ("", as_it_stands) or inside.startswith("<|open|>argument key=")
    assert (inside == "") == (text.strip() == "" or text.replace(" ", "") == "{}")


# Conversations of another encoder


class Recorder(Tokenizer):
    """Keeps the segments that it encodes."""

    segments = ()

    def encode_segments(self, segments):
        segments = list(segments)
        Recorder.segments = (*Recorder.segments, *segments)
        return super().encode_segments(segments)


GOLDEN_CHATS = json.loads((GOLDEN / "chat" / "chat.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(GOLDEN_CHATS)))
def test_golden_conversations_are_equal_segment_for_segment(number, monkeypatch):
    expected = GOLDEN_CHATS[number]
    monkeypatch.setattr(Recorder, "segments", ())
    ids = chat_format.render(
        Recorder(RANKS, SPECIAL), expected["messages"], expected["tools"], **expected["options"]
    )
    contents = {token: content for content, token in SPECIAL.items()}
    segments = [[contents.get(s, s), isinstance(s, int)] for s in Recorder.segments]
    assert segments == expected["segments"]
    assert TOKENIZER.decode(ids) == expected["text"]


MEDIA = dict(zip(MEDIA_MARKERS, range(300, 304), strict=True))
IMAGE_CHATS = json.loads((GOLDEN / "chat" / "images.json").read_text(encoding="utf-8"))


class Sized(NamedTuple):
    size: tuple[int, int]
    rows: int = 1


def of_sizes(sizes):
    """A reader that finds images of these sizes, one after another."""
    left = iter(sizes)
    return PromptImages(lambda source: Sized(tuple(next(left))))


def joined(segments, contents):
    """Segments as the golden file has them: what stands for an image is one."""
    found, image = [], ""
    for part in segments:
        text = contents.get(part, part)
        image = text if text == MEDIA_MARKERS[0] else image and image + text
        if not image or text == MEDIA_MARKERS[-1]:
            found.append([image or text, bool(image) or isinstance(part, int)])
            image = ""
    return found


@pytest.mark.parametrize("number", range(len(IMAGE_CHATS)))
def test_golden_conversations_with_images_are_equal_segment_for_segment(number, monkeypatch):
    expected, special = IMAGE_CHATS[number], SPECIAL | MEDIA
    messages = json.loads(json.dumps(expected["messages"]).replace("\\u2026", "data:"))
    monkeypatch.setattr(Recorder, "segments", ())
    images = of_sizes(expected["image_sizes"])
    chat_format.render(Recorder(RANKS, special), messages, images=images, **expected["options"])
    contents = {token: content for content, token in special.items()}
    assert joined(Recorder.segments, contents) == expected["segments"]
    assert [list(image.size) for image in images.placed] == expected["image_sizes"]


def with_images(messages, *images):
    left = iter(images)
    placed = PromptImages(lambda source: next(left))
    tokenizer = Tokenizer(RANKS, SPECIAL | MEDIA)
    return tokenizer.decode(chat_format.render(tokenizer, messages, images=placed)), placed.placed


def test_an_image_stands_as_its_original_size_and_a_pad_a_row():
    content = [{"type": "text", "text": "a"}, IMAGE]
    said, placed = with_images([{"role": "user", "content": content}], Sized((640, 480), 3))
    pads = 3 * "<|media_pad|>"
    assert (
        f"<|sep|>a<|media_begin|>image 640x480<|media_content|>{pads}<|media_end|><|close|>" in said
    )
    assert placed == [Sized((640, 480), 3)]


def test_images_of_results_stand_in_the_order_of_the_calls():
    first, second = Sized((1, 1)), Sized((2, 2))
    calls = [{"id": key, "function": {"name": key}} for key in "xy"]
    results = [{"role": "tool", "tool_call_id": key, "content": [IMAGE]} for key in "yx"]
    asked = [USER, {"role": "assistant", "tool_calls": calls}, *results]
    said, placed = with_images(asked, second, first)
    assert placed == [first, second] and said.index("image 1x1") < said.index("image 2x2")


def test_images_need_markers_that_the_tokenizer_has():
    with pytest.raises(kj.ChatError, match=r"lacks: <\|media_begin\|>, <\|media_content\|>"):
        content = [{"role": "user", "content": [IMAGE]}]
        chat_format.render(TOKENIZER, content, images=of_sizes([(1, 1)]))


@pytest.mark.parametrize(
    "part, message",
    [
        ({"type": "image"}, "part 0: the image is missing, 'image' holds it"),
        ({"type": "image_url"}, "part 0: the image is missing, 'image_url' holds it"),
        ({"type": "image_url", "image_url": {}}, "the image is missing"),
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "must be a data URL"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "must be a data URL"),
        ({"type": "image_url", "image_url": 3}, "must be a data URL"),
        ({**IMAGE, "image_url": {"url": "data:", "detail": "low"}}, "takes no 'detail'"),
        ({"type": "image", "image": "a.png", "size": 3}, "takes no 'size'"),
        ({"type": "video", "video": "a.mp4"}, "part 0 is not text: 'video'"),
    ],
)
def test_image_parts_that_are_refused(part, message):
    assert message in refused([{"role": "user", "content": [part]}], images=of_sizes([(1, 1)] * 9))


def test_what_the_reader_refuses_is_told_with_its_place():
    def read(source):
        raise kj.ImageError(f"no {source}")

    parts = [{"type": "image", "image": name} for name in "ab"]
    said = refused([{"role": "user", "content": parts}], images=PromptImages(read))
    assert "message 0: part 0: no a" in said and "message 0: part 1: no b" in said


def test_all_problems_come_in_one_error():
    said = refused(
        [{"role": "user", "content": [IMAGE]}, {"role": "x"}, {**USER, "content": "\ud800"}, ASKS],
        [{}],
        thinking_effort="much",
    )
    for part in (
        "tool 0",
        "thinking_effort must be low, medium, high or max or None",
        "message 0",
        "message 1",
    ):
        assert part in said
    assert "message 2" in said and "message 3: call 'y' has no result" in said


def test_calls_without_ids_get_those_that_a_reply_gives():
    call = {"type": "function", "function": {"name": "f"}}
    results = [{"role": "tool", "tool_call_id": f"f:{i}", "content": str(i)} for i in (2, 1)]
    said = rendered([{"role": "assistant", "tool_calls": [call, call]}, *results])
    assert '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|>' in said
    assert said.index('index="1"<|sep|>1') < said.index('index="2"<|sep|>2')


def test_a_conversation_may_end_in_calls_where_no_reply_follows():
    ended = rendered([USER, ASKS], add_generation_prompt=False)
    assert ended.endswith("<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>")
    assert rendered([USER, ASKS, *RESULTS], add_generation_prompt=False).startswith(ended)
    for messages in ([USER, ASKS, USER], [USER, ASKS, RESULTS[0]]):
        assert "call 'y' has no result" in refused(messages, add_generation_prompt=False)
    named = rendered([USER, {"role": "assistant", "name": 'Al "&"', "content": "x"}])
    assert '<|open|>message role="assistant" name="Al &quot;&amp;&quot;"<|sep|>' in named


ODD: list = [
    *[
        None,
        0,
        False,
        True,
        1,
        -1.5,
        "",
        " ",
        "x",
        "\ud83d",
        "<|open|>",
        b"x",
        10**6000,
        {1},
        print,
    ],
    *[[], ["a"], [[]], [None], {}, {"a": 1}, {1: 2}, {"a": "\ud83d"}, float("nan"), (1, 2)],
    *["user", "assistant", "tool", '{"a":1}', '{"a"', "null", "max", "required", "json_schema"],
    *[[{"type": "text"}], [{"type": ["image"]}], {"type": {}}, {"type": "json_schema"}],
    *[{"function": None}, {"function": {"name": "f"}}, [{"function": {"name": "f"}}]],
    *[[{"name": "f", "arguments": []}], [{"id": {}, "name": "f"}], [{"id": ["a"], "name": "f"}]],
]
KEYS = ("role", "content", "name", "tools", "tool_calls", "tool_call_id", "reasoning", "x", 3, None)


def odd_message(chance):
    role = chance.choice(("user", "assistant", "tool", "system"))
    message = {"role": role, "content": "c"}
    if role == "tool":
        message["tool_call_id"] = "f:1"
    for _ in range(chance.randrange(3)):
        message[chance.choice(KEYS)] = chance.choice(ODD)
    return message if chance.random() < 0.95 else chance.choice(ODD)


def test_whatever_is_given_is_rendered_or_refused():
    """Nothing but a `ChatError`, which prints."""
    chance, rendered_count = random.Random(1), 0
    options = ("tools", "thinking", "thinking_effort", "tool_choice", "response_format")
    for _ in range(4000):
        messages = [odd_message(chance) for _ in range(chance.randrange(1, 4))]
        given = {name: chance.choice(ODD) for name in options if chance.random() < 0.1}
        try:
            assert chat_format.render(TOKENIZER, messages, **given)
            rendered_count += 1
        except kj.ChatError as error:
            assert str(error).startswith("conversation:\n")
    assert rendered_count > 100


def test_a_tokenizer_without_markers_is_refused():
    with pytest.raises(kj.ChatError, match="this folder has none"):
        chat_format.render(None, [USER])
    with pytest.raises(kj.ChatError, match=r"lacks: <\|open\|>, <\|sep\|>"):
        chat_format.render(Tokenizer(RANKS, {"<|close|>": 290, "<|end_of_msg|>": 291}), [USER])
