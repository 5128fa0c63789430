"""Conversations that are not computed again: what they give, what they cost, what they leave
alone.
"""

import copy
import dataclasses
import inspect

import jax
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from models import MESHED, write, write_talking
from reuse import CHUNK, EVERY, cache_of, cold, ids, load, near, same

import kimi_jax as kj
from kimi_jax.generation import chat as conversation
from kimi_jax.generation import engine, session_state
from kimi_jax.generation import generate as g


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(MESHED, tmp_path_factory.mktemp("sessions") / "model")


@pytest.fixture(scope="module", params=["one", "2x4"])
def model(request, folder):
    return load(folder, request.param)


@pytest.fixture(scope="module")
def one(folder):
    return load(folder)


def test_a_turn_computes_only_what_is_new(model, monkeypatch):
    """Equal ids, and log-probabilities within 1e-4 of a cold run, while the memory grows."""
    monkeypatch.setattr(session_state, "ROOM", 32)
    session, whole, state = model.session(), [], 0
    for turn, count in enumerate((20, 1, 70, 16)):
        whole += ids(count, turn)
        out = session.generate(ids(count, turn), **EVERY)
        near(out, cold(model, whole))
        assert out.usage.cached_tokens == state
        whole += out.tokens
        assert session.tokens == whole
        state = len(whole) - 1  # the last token was not fed back yet
    assert session._state.max_length == 128


def test_a_stop_id_leaves_the_state_where_the_reply_ended(one):
    free = cold(one, ids(9)).tokens
    stop = dict(stop_tokens=[free[3]])
    session = one.session()
    first = session.generate(ids(9), **{**EVERY, **stop})
    assert first.finish_reason == "stop"
    second = session.generate([7, 8], **EVERY)
    near(second, cold(one, [*ids(9), *first.tokens, 7, 8]))
    assert second.usage.cached_tokens == 9 + len(first.tokens)


def test_a_closed_stream_is_gone_on_from_where_it_was_closed(model):
    session, prompt = model.session(), ids(9)
    stream = session.stream(prompt, max_new_tokens=30, stop_tokens=[], trip=8)
    seen = [next(stream).token for _ in range(3)]
    out = session.generate([5, 6], **EVERY)  # ends the turn that runs
    assert next(stream, None) is None
    near(out, cold(model, [*prompt, *seen, 5, 6]))
    assert out.usage.cached_tokens == len(prompt)  # back to where the prompt ended


def test_a_turn_can_be_asked_again(one):
    """The conversation is cut back by its owner: the state returns to a mark, or begins again."""
    session = one.session()
    first = session.generate(ids(9), **EVERY)
    session.generate(ids(5, 1), **EVERY)
    for kept, known in (([*ids(9), *first.tokens], 9), (ids(9), 9), (ids(9)[:4], 0)):
        session.tokens = list(kept)
        again = session.generate([3, 4], **EVERY)
        near(again, cold(one, [*kept, 3, 4]))
        assert again.usage.cached_tokens == known


# Every compiled call that a turn makes, and the nth of its kind: a chunk of the prompt, the copy
# where the prompt ends, the return to that of the prompt before, a multi-step decode.
CALLS = [("step", 1), ("step", 3), ("copy_row", 1), ("restore_row", 1)]
CALLS += [("decode_steps", 1), ("decode_steps", 3)]


def called_through(inner, call):
    """What stands for `inner` and is of its type: its calls go through `call`."""
    if inspect.ismethod(inner) or inspect.isfunction(inner):
        return call
    stand_in = copy.copy(inner)
    stand_in.__class__ = type(
        "StandIn", (type(inner),), {"__call__": lambda self, *inputs: call(*inputs)}
    )
    return stand_in


@pytest.mark.parametrize("is_made", [False, True], ids=["before the call", "its results are lost"])
@pytest.mark.parametrize("name, nth", CALLS)
def test_a_turn_that_was_broken_off_costs_time_and_nothing_else(
    one, monkeypatch, name, nth, is_made
):
    session = one.session()
    session.generate(ids(20), **EVERY)
    kept = session.tokens = session.tokens[:22]  # behind what the state has seen
    inner, calls = getattr(one.program, name), iter(range(1, 99))

    def interrupted(*inputs):
        if next(calls) < nth:
            return inner(*inputs)
        if is_made:
            inner(*inputs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(one.program.__dict__, name, called_through(inner, interrupted))
        session.generate(ids(40, 1), **EVERY | {"max_new_tokens": 30})
    assert session.tokens == kept
    near(session.generate([3], **EVERY), cold(one, [*kept, 3]))


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_trip_that_the_host_was_not_told_of_was_seen_all_the_same(one, monkeypatch, nth):
    """Ctrl-C while the host waits: the state is ahead of what the conversation holds."""
    session = one.session()
    session.generate(ids(20), **EVERY)
    kept, inner, calls = list(session.tokens), engine.to_host, iter(range(1, 99))

    def outer(x):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return inner(x)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "to_host", outer)
        session.generate(ids(10, 1), **EVERY | {"max_new_tokens": 30})
    assert len(session._seen) == int(session._state.length[0])
    near(session.generate([3], **EVERY), cold(one, [*kept, 3]))


def test_a_turn_of_generate_ends_a_stream_too(one):
    session = one.session()
    stream = session.stream(ids(9), max_new_tokens=30, stop_tokens=[])
    next(stream)
    before = list(session.tokens)
    assert len(before) == 10
    out = one.generate(ids(7, 1), session=session, **EVERY)[0]
    assert list(stream) == [] and session.tokens == [*before, *ids(7, 1), *out.tokens]
    near(out, cold(one, [*before, *ids(7, 1)]))


def test_a_session_that_was_reset_knows_nothing(one):
    """Not even where a prompt of the conversation before it ended."""
    session = one.session()
    session.generate(ids(4), **EVERY)
    session.reset()
    first = session.generate(ids(20, 1), **EVERY)
    near(first, cold(one, ids(20, 1)))
    session.tokens = ids(20, 1)[:10]
    near(session.generate([3], **EVERY), cold(one, [*ids(20, 1)[:10], 3]))


def test_a_stream_that_fails_leaves_the_conversation_as_it_was(one):
    embed = np.array(one.params[("embed",)])
    embed[7] = np.nan
    broken = dataclasses.replace(one, params=one.params | {("embed",): jax.numpy.asarray(embed)})
    session = broken.session()
    first = session.generate([9, 8], max_new_tokens=1, stop_tokens=[])
    with pytest.raises(FloatingPointError):
        list(session.stream([7], stop_tokens=[]))
    assert session.tokens == [9, 8, *first.tokens]
    assert session.generate([9], max_new_tokens=1).error is None


def test_a_turn_that_was_left_before_its_first_chunk_has_seen_nothing_new(one, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    session = one.session()
    session.generate(ids(20), **EVERY)
    kept, session.tokens = session.tokens, []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._Engine, "_prefill", interrupt)
        session.generate(ids(40, 1), **EVERY)
    assert session._seen == []
    session.tokens = kept
    near(session.generate([3], **EVERY), cold(one, [*kept[:25], 3]))


def test_a_session_of_a_fixed_length_ends_there(one):
    session = one.session(max_length=40)
    assert session.generate(ids(20), **EVERY).finish_reason == "length"
    out = session.generate(ids(10, 1), **EVERY | {"max_new_tokens": 20})
    assert (len(out.tokens), out.finish_reason, session._state.max_length) == (5, "length", 40)
    full = session.generate([1], **EVERY)
    assert full.finish_reason == "error" and "the context of 40 leaves no room" in full.error
    session.reset()
    near(session.generate(ids(4), **EVERY), cold(one, ids(4)))


def test_sessions_refuse_by_name(one):
    session = one.session()
    with pytest.raises(kj.PromptError, match="no tokenizer"):
        session.generate("text")
    with pytest.raises(kj.PromptError, match="one prompt, got 2"):
        one.generate([[1], [2]], session=session)
    with pytest.raises(kj.PromptError, match="another model"):
        dataclasses.replace(one, params={}).generate([1], session=session)
    for length in (1, 10**9):
        with pytest.raises(ValueError, match=r"max_length must be.*512"):
            one.session(length)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A model that reads and writes text."""
    return kj.load(write_talking(tmp_path_factory.mktemp("talking") / "model"), chunk=CHUNK)


def begun(model):
    """A session in the middle of a stream, all that it holds, and its stream."""
    session = model.session()
    session.generate([1, 2, 3], max_new_tokens=2, stop_tokens=[])
    stream = session.stream([4], max_new_tokens=9, stop_tokens=[], temperature=1.0)
    next(stream)
    return session, {**vars(session), "tokens": list(session.tokens)}, stream


USER = [{"role": "user", "content": "Alice"}]


def test_what_is_refused_leaves_a_session_as_it_was(talking):
    """The stream that runs among it."""
    session, before, stream = begun(talking)
    other = dataclasses.replace(talking, params=dict(talking.params))
    long = [1] * talking.config.max_positions
    for refused in (
        lambda: session.chat(USER, max_new_tokens=0),
        lambda: session.chat(USER, stream=True, max_new_tokens=0),
        lambda: session.chat([]),
        lambda: session.chat(USER, stop=""),
        lambda: session.chat([{"role": "user", "content": "a " * len(long)}]),
        lambda: session.generate([1], max_new_tokens=0),
        lambda: session.generate([10**9]),
        lambda: session.stream([1], temperature=-1.0),
        lambda: session.stream(long),
        lambda: other.chat(USER, session=session),
        lambda: other.generate([1], session=session),
        lambda: other.stream([1], session=session),
        lambda: talking.generate([[1], [2]], session=session),
    ):
        with pytest.raises((kj.PromptError, kj.ChatError)):
            refused()
        assert vars(session) == before
    assert session.generate(long).finish_reason == "error"
    assert vars(session) == before
    for call in (conversation.chat, g.generate, g.stream):
        prompt = USER if call is conversation.chat else [1]
        with pytest.raises((kj.PromptError, TypeCheckError), match="session"):
            call(talking, prompt, session="x")
    assert next(stream).token is not None


def test_a_state_that_the_devices_cannot_hold_leaves_a_session_as_it_was(one, monkeypatch):
    session = one.session()
    session.generate(ids(9), **EVERY)
    before = {**vars(session), "tokens": list(session.tokens)}

    def refuse(self, *sizes):
        raise kj.PlacementError("too large")

    longer = ids(60, 1)
    monkeypatch.setattr(session_state, "ROOM", 16)
    session._state = dataclasses.replace(session._state, max_length=16)
    before["_state"] = session._state
    with monkeypatch.context() as patch:
        patch.setattr(type(one.program), "refuse_what_exceeds", refuse)
        for call in (session.generate, lambda *a, **o: next(session.stream(*a, **o))):
            with pytest.raises(kj.PlacementError):
                call(longer, max_new_tokens=2)
            assert {**vars(session), "_turn": None} == before


def test_tokens_of_a_session_that_are_no_ids_are_refused(one):
    session = one.session()
    session.tokens = [3, MESHED.vocab]
    with pytest.raises(kj.PromptError, match="session's tokens hold 80"):
        session.generate([1])


@pytest.mark.parametrize("seed", range(2))
def test_a_reply_ends_at_its_first_stop_string_on_every_way(talking, seed):
    """Stop strings cut out of what the model writes: generate, stream, sessions and chat alike."""
    rng = np.random.default_rng(seed)
    options = dict(max_new_tokens=40, stop_tokens=[], temperature=1.0, seed=seed)
    prompt = "Alice was beginning to"
    text = talking.generate(prompt, **options)[0].text
    answer = talking.chat(USER, thinking=False, **options | dict(stop_tokens=None))
    for count in (1, 3):
        for whole in (text, answer.text):
            places = [int(rng.integers(0, max(1, len(whole) - 3))) for _ in range(count)]
            stops = [whole[at : at + int(rng.integers(1, 8))] for at in places] + ["\0"]
            ends = sorted((whole.find(stop) + len(stop), whole.find(stop)) for stop in stops[:-1])
            if whole is text:
                (reply,) = talking.generate(prompt, stop=stops, **options)
                events = list(talking.stream(prompt, stop=stops, trip=3, **options))
                turn = talking.session().generate(prompt, stop=stops, **options)
                assert reply.text == turn.text == "".join(event.text for event in events)
                assert reply.finish_reason == events[-1].finish_reason == "stop"
            else:
                reply = talking.chat(
                    USER, thinking=False, stop=stops, **options | dict(stop_tokens=None)
                )
            assert reply.text == whole[: ends[0][1]]


def test_stop_strings_wait_for_min_new_tokens_on_every_way(talking):
    options = dict(max_new_tokens=40, min_new_tokens=25, stop=["e", " "], stop_tokens=[])
    (reply,) = talking.generate("Alice was", **options)
    stream = [event for event in talking.stream("Alice was", **options) if event.token is not None]
    turn = talking.session().generate("Alice was", **options)
    answer = talking.chat(USER, thinking=False, temperature=0.0, **options)
    assert len(reply.tokens) == len(stream) == len(turn.tokens) >= 25
    assert reply.finish_reason == "stop" and "e" in reply.text
    assert len(answer.tokens) >= 25


def test_a_session_begins_with_a_prefix_of_others(one):
    cache, long = cache_of(one, 9), ids(40)
    one.generate([long], prefix_cache=cache, **EVERY)
    out = one.session().generate(long, prefix_cache=cache, **EVERY)
    same(out, cold(one, long))
    assert out.usage.cached_tokens == 32


def test_a_session_leaves_no_prefix_that_a_cold_run_would_not(one):
    """The chunks of its later turns begin where the state was."""
    cache, session = cache_of(one, 9), one.session()
    session.generate(ids(20), prefix_cache=cache, **EVERY)
    session.generate(ids(40, 1), prefix_cache=cache, **EVERY)
    assert cache.stats.entries == 1
    whole = session.tokens[:60]
    same(one.generate([whole], prefix_cache=cache, **EVERY)[0], cold(one, whole))


def test_a_chat_of_a_session_equals_one_without(talking):
    """Turn by turn, the whole conversation given; what is written as it was made is known."""
    model = talking
    words = model.tokenizer.encode(" Alice the and")  # read again, these are the same tokens
    session, messages, before = model.session(max_length=512), [], 0
    for text in ("Alice", "and the Queen?", "why"):
        messages.append({"role": "user", "content": text})
        options = dict(max_new_tokens=12, temperature=0.0)
        options |= dict(logit_bias={word: 100.0 for word in words})
        reply, wanted = session.chat(messages, **options), model.chat(messages, **options)
        assert (reply.tokens, reply.finish_reason) == (wanted.tokens, "length")
        assert reply.usage.cached_tokens == before
        before = reply.usage.prompt_tokens + 11  # the last token was not fed back yet
        messages.append(reply.message)
    stream = session.chat(messages[:-1], stream=True, max_new_tokens=90)
    next(stream)
    session.reset()
    assert list(stream) == [] and stream.reply.finish_reason == "interrupted"
