"""Chat with a model: turns, streams, ends, refusals."""

import dataclasses
import json

import pytest
from chats import (
    CALLED,
    REPLY,
    TOKENIZER,
    USER,
    WEATHER,
    Script,
    ids,
    parsed,
    rendered,
    said,
    write_model,
)

import kimi_jax as kj
from kimi_jax.text import chat_format


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return kj.load(write_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture
def scripted(model, monkeypatch):
    """Writes the next replies of the model."""
    return lambda *replies: Script(model, monkeypatch, *replies)


def test_a_reply_goes_back_into_the_conversation(scripted):
    model = scripted(REPLY + "<|end_of_msg|>", "<|close|>think<|sep|>Sun.<|end_of_msg|>")
    messages = [USER]
    reply = model.chat(messages, [WEATHER])
    assert (reply.thinking, reply.text, reply.tool_calls) == ("Two calls.", "Let me 😀.", CALLED)
    assert reply.finish_reason == "tool_calls" and reply.tokens == ids(REPLY)
    assert reply.usage.generated_tokens == len(reply.tokens)
    assert json.loads(json.dumps(reply.message)) == reply.message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": call.name} for call in CALLED[::-1]
    ]
    messages += [reply.message, *results]
    second = model.chat(messages, [WEATHER])
    assert (second.text, second.finish_reason) == ("Sun.", "stop")
    first, prompt = model.prompts
    assert prompt[: len(first)] == first and '"<|sep|>get_weather' in TOKENIZER.decode(prompt)
    assert TOKENIZER.decode(prompt[len(first) :]).startswith(REPLY + "<|end_of_msg|>")


@pytest.mark.parametrize("limit", [3, 40, 75, 120])
def test_a_reply_that_is_cut_says_so(scripted, limit):
    reply = scripted(REPLY).chat([USER], max_new_tokens=limit)
    assert reply.finish_reason == "length" and len(reply.tokens) == limit
    _, parser = parsed(ids(REPLY)[:limit])
    assert (reply.thinking, reply.text, reply.tool_calls) == said(parser)
    assert reply.problems == tuple(parser.problems)
    assert rendered([USER, {**reply.message, "tool_calls": []}])


def test_a_stop_string_ends_the_model(scripted):
    reply = scripted(REPLY).chat([USER], stop="😀")
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("Let me ", [], "stop")
    assert len(reply.tokens) < len(ids(REPLY))
    for stop in ("", [""], ["a", ""]):
        with pytest.raises(kj.ChatError, match="stop must be strings"):
            scripted(REPLY).chat([USER], stop=stop)


def test_a_stream_that_is_closed_keeps_what_came(scripted):
    stream = scripted(REPLY).chat([USER], stream=True)
    event = next(stream)
    assert event.kind == "thinking"
    stream.close()
    assert stream.reply.finish_reason == "interrupted" and stream.reply.text == ""
    assert stream.reply.thinking == event.text and list(stream) == []
    assert stream.reply.message["reasoning_content"] == event.text


def test_the_end_of_a_message_ends_a_reply_whatever_else_does(scripted):
    reply = scripted("a<|end_of_msg|>b").chat([USER], stop_tokens=[])
    assert (reply.thinking, reply.finish_reason) == ("a", "stop")
    assert reply.tokens == TOKENIZER.encode("a")


@pytest.mark.parametrize("thinking", [False, True])
def test_streamed_equals_unstreamed(model, thinking):
    """With real weights, random and so without sense, drawn as the model card says."""
    options = dict(thinking=thinking, max_new_tokens=24, seed=5, logprobs=1)
    reply = model.chat([USER], **options)
    stream = model.chat([USER], stream=True, **options)
    events = list(stream)
    again = dataclasses.replace(stream.reply, usage=reply.usage)
    assert again == reply and len(reply.logprobs) == len(reply.tokens)
    assert "".join(e.text for e in events if e.kind == "text") == reply.text
    assert "".join(e.text for e in events if e.kind == "thinking") == reply.thinking
    sampling = kj.Sample(1.0, top_p=0.95)
    prompt = chat_format.render(TOKENIZER, [USER], thinking=thinking, thinking_effort="max")
    (plain,) = model.generate([prompt], sampling=sampling, seed=5, max_new_tokens=24)
    assert plain.tokens == reply.tokens and reply.usage.prompt_tokens == len(prompt)
    assert model.chat([USER], sampling=sampling, **options).tokens == reply.tokens
    cold = model.chat([USER], temperature=0.0, thinking=thinking, max_new_tokens=8).tokens
    assert cold == model.generate([prompt], max_new_tokens=8)[0].tokens


def test_the_model_is_told_what_the_options_say(model, monkeypatch):
    """In `model.chat` and `session.chat` alike; effort is "max" unless another is named."""
    script = Script(model, monkeypatch, "<|end_of_msg|>")
    later = [USER, {"role": "system", "content": "", "tools": [WEATHER]}, USER]
    for chat in (model.chat, model.session().chat):
        for options in (
            {},
            {"thinking_effort": "low"},
            {"thinking_effort": None},
            {"tool_choice": "required", "response_format": "json_object"},
        ):
            assert chat(later, [WEATHER], **options).finish_reason == "stop"
            expected = rendered(later, [WEATHER], **{"thinking_effort": "max", **options})
            assert TOKENIZER.decode(script.prompts[-1]) == expected
    with pytest.raises(kj.ChatError, match="tool_choice must be"):
        model.chat([USER], tool_choice={"function": {}})


def test_what_cannot_run_is_refused_at_once(model):
    for options, says in (
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"sampling": kj.Greedy(), "top_p": 0.5}, "sampling= excludes"),
    ):
        with pytest.raises(kj.PromptError, match=says):
            model.chat([USER], stream=True, **options)
    with pytest.raises(kj.PromptError, match="the context of 1024 leaves no room"):
        model.chat([{"role": "user", "content": "a b" * 600}])
    with pytest.raises(kj.ChatError, match="needs a tokenizer"):
        dataclasses.replace(model, tokenizer=None).chat([USER])
