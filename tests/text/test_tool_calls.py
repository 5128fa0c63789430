"""Tool calls of a reply: those that are handed out, and what is wrong with the others."""

import pytest
from chats import ARGUMENT, JSON, call_of, ids, parsed

import kimi_jax as kj


@pytest.mark.parametrize(
    "body, arguments",
    [
        (JSON.format("object", '{"a":1}'), {"a": 1}),
        (
            JSON.format("object", ' {"a": {"b": [null, "\\ud83d\\ude00"]}}\n'),
            {"a": {"b": [None, "😀"]}},
        ),
        (JSON.replace(' type="{}"', "").format("{}"), {}),
        (JSON.format("object", '{"": "<|sep|>"}'.replace("<|sep|>", "é")), {"": "é"}),
        (ARGUMENT.replace('"k"', '""').format("string", "v"), {"": "v"}),
        (
            ARGUMENT.replace('key="k" type="{}"', 'type="{}"\n key="k" ').format("null", "null"),
            {"k": None},
        ),
        ("\n" + ARGUMENT.format("number", " 1.50 ") + "\n", {"k": 1.5}),
    ],
)
def test_a_call_is_handed_out_and_streamed_alike(body, arguments):
    events, parser = parsed(ids("<|close|>think<|sep|>" + call_of(body)))
    call = kj.ToolCall("f:1", "f", arguments)
    assert parser.tool_calls == [call] and parser.problems == []
    assert [event.tool_call for event in events] == [call]


@pytest.mark.parametrize(
    "text, problem",
    [
        (call_of(ARGUMENT.format("number", "2x")), "argument 'k' is not usable JSON: '2x'"),
        (call_of(ARGUMENT.format("object", '{"a":"\\ud83d"}')), "it holds half a surrogate pair"),
        (call_of(ARGUMENT.format("object", '{"\\udc00":1}')), "it holds half a surrogate pair"),
        (call_of(ARGUMENT.format("string", "v")[:-25]), "argument 'k' has no end"),
        (
            call_of(ARGUMENT.format("null", "null").split("<|sep|>")[0]),
            "a tag without end was left",
        ),
        (
            call_of(ARGUMENT.format("string", "a<|open|>b<|sep|>c")),
            "not part of the format was left",
        ),
        (call_of(ARGUMENT.format("string", "a<|sep|>c")), "a special token stands in it"),
        (call_of(ARGUMENT.format("string", "a[PAD]c")), "a special token stands in it"),
        (call_of("<|close|>x<|sep|>"), "not part of the format was left out"),
        (call_of("<|open|>" + "a" * 9000 + "<|sep|>"), "a tag of more than 8,192 characters"),
        (call_of(ARGUMENT.format("number", "1e999")), "it holds a number that is not finite"),
        (call_of(ARGUMENT.format("array", "[-1e999]")), "it holds a number that is not finite"),
        (call_of(ARGUMENT.format("number", "9" * 4100)), "a number of more than 4,000 digits"),
        (call_of(ARGUMENT.format("number", "9" * 9999)), "argument 'k' is not usable JSON"),
        (call_of(ARGUMENT.format("array", "[" * 101 + "]" * 101)), "nests more than 100 levels"),
        (call_of(ARGUMENT.format("array", "[" * 9999)), "nests more than 100 levels"),
        (call_of(ARGUMENT.format("object", '{"a":1,"a":1}')), "it names a key twice"),
        (call_of(ARGUMENT.format("null", "")), "argument 'k' is not usable JSON: ''"),
        (call_of(ARGUMENT.format("integer", "1")), "argument 'k' is not of type 'integer': '1'"),
        (call_of(ARGUMENT.replace(' key="k"', "").format("string", "v")), "an argument has no key"),
        (call_of(ARGUMENT.replace('"k"', "k").format("string", "v")), "a malformed tag: 'argument"),
        (call_of(ARGUMENT.replace('"k"', "'k'").format("string", "v")), "a malformed tag"),
        (call_of(ARGUMENT.replace('"k"', '"k').format("string", "v")), "a malformed tag"),
        (call_of(ARGUMENT.replace('key="k"', 'key="k" key="j"').format("null", "null")), "twice"),
        (call_of(JSON.format("object", "[1]")), "its JSON block is not of type 'object': '[1]'"),
        (call_of(JSON.format("array", "[1]")), "its JSON block is not of type 'object' but 'array"),
        (call_of(JSON.format("object", '{"a":1')), "its JSON block is not usable JSON"),
        (call_of(JSON.format("object", "")), "its JSON block is not usable JSON: ''"),
        (call_of(JSON.format("object", '{"a":"\\ud83d"}')), "it holds half a surrogate pair"),
        (call_of(JSON.format("object", '{"a":1,"a":2}')), "it names a key twice"),
        (call_of(JSON.format("object", "{}") * 2), "a JSON block is not its only child"),
        (call_of(JSON.format("object", "{}") + ARGUMENT.format("null", "null")), "only child"),
        (call_of(ARGUMENT.format("null", "null") + JSON.format("object", "{}")), "only child"),
        (call_of(JSON.format("object", "{}") + "x"), "text outside its arguments"),
        (call_of('<|open|>json type="object"<|sep|>{"a":1}'), "its JSON block has no end"),
        (call_of("", "call tool='f'"), "it names no tool"),
        (call_of("", 'call tool=""'), "it names no tool"),
        (call_of("", 'call tool="f" tool="g"'), "a tag with an attribute twice"),
        (call_of("", 'call tool="f" x'), "a malformed tag"),
        (call_of(ARGUMENT.format("number", "NaN")), "argument 'k' is not usable JSON: 'NaN'"),
        (
            call_of(ARGUMENT.format("number", "true")),
            "argument 'k' is not of type 'number': 'true'",
        ),
        (call_of(ARGUMENT.format("array", "{}")), "argument 'k' is not of type 'array'"),
        (call_of(ARGUMENT.format("", '"a"')), "argument 'k' is not of type ''"),
        (call_of(ARGUMENT.format("string", "a") * 2), "argument 'k' comes twice"),
        (call_of("loose"), "text outside its arguments"),
        (call_of("", "call index"), "it names no tool"),
        (call_of("", 'call tool="f[PAD]"'), "a special token stands in it"),
        (call_of('<|open|>argument key="k" type="string"<|sep|>a'), "argument 'k' has no end"),
        (call_of("").removesuffix("<|close|>call<|sep|>"), "it has no end"),
        (call_of("").replace("<|close|>call", "<|close|>tools"), "it has no end"),
        (call_of("").replace("<|close|>call", "<|open|>response"), "it has no end"),
    ],
)
def test_a_malformed_call_is_left_out_and_said(text, problem):
    _, parser = parsed(ids(text), thinking=False)
    assert parser.tool_calls == [] and len(parser.problems) == 1
    assert problem in parser.problems[0]
