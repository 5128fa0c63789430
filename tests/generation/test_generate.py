"""Sampling, batches, stopping and streaming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import SHALLOW, compilations, write

import kimi_jax as kj

SAMPLING = dict(max_new_tokens=6, stop_tokens=[])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with a byte-level tokenizer: 83 ids do for printable text, one byte an id."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    return kj.load(write(SHALLOW, folder), dtype="float32", chunk=16)


def test_greedy_generation_is_the_argmax_of_fresh_forwards(model):
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6] * 9]
    for prompt, out in zip(prompts, model.generate(prompts, **SAMPLING), strict=True):
        ids = list(prompt)
        for token in out.tokens:
            logits = np.asarray(model.logits([ids + [0] * (32 - len(ids))], [len(ids)]))
            assert token == logits[0, len(ids) - 1].argmax()
            ids.append(token)
        assert (out.finish_reason, out.usage.prompt_tokens, out.usage.generated_tokens) == (
            "length",
            len(prompt),
            6,
        )


def test_a_result_depends_on_its_own_prompt_and_seed_alone(model):
    """Not on its place in the batch or its neighbours; another seed gives another draw."""
    options = dict(temperature=1.0, **SAMPLING)
    prompts = [[1, 2, 3], [4], [5, 6], [1, 2, 3]]
    together = model.generate(prompts, seed=[7, 8, 9, 10], **options)
    turned = model.generate(prompts[::-1], seed=[10, 9, 8, 7], **options)
    assert [c.tokens for c in together] == [c.tokens for c in turned][::-1]
    assert together[0].tokens != together[3].tokens
    assert model.generate([1, 2, 3], seed=7, **options)[0].tokens == together[0].tokens
    assert [e.token for e in model.stream([1, 2, 3], seed=7, **options)] == together[0].tokens


def test_more_prompts_than_a_batch_holds_keep_their_order(model):
    prompts = [[n % 83, (3 * n) % 83] for n in range(11)]
    out = model.generate(prompts, max_new_tokens=2, stop_tokens=[])
    assert [c.tokens for c in out] == [
        model.generate(p, max_new_tokens=2, stop_tokens=[])[0].tokens for p in prompts
    ]


def test_stop_ids_end_a_row_and_are_not_in_it(model):
    free = model.generate([[3, 1, 4]], **SAMPLING)[0].tokens
    out = model.generate([[3, 1, 4]], max_new_tokens=6, stop_tokens=[free[2], free[4]])[0]
    assert out.tokens == free[: free.index(free[2])]
    assert out.finish_reason == "stop"
    events = list(model.stream([3, 1, 4], max_new_tokens=6, stop_tokens=[free[2]]))
    assert [e.token for e in events if e.token is not None] == out.tokens
    assert events[-1].finish_reason == "stop"


def with_config(model, **changes):
    config = dataclasses.replace(model.config, **changes)
    return dataclasses.replace(model, program=dataclasses.replace(model.program, config=config))


def test_the_configs_end_ids_stop_by_default(model):
    free = model.generate([[3, 1, 4]], **SAMPLING)[0].tokens
    out = with_config(model, eos=(free[1], 82)).generate([[3, 1, 4]], max_new_tokens=6)[0]
    assert (out.tokens, out.finish_reason) == (free[: free.index(free[1])], "stop")


def test_log_probabilities_are_those_of_the_logits(model):
    out = model.generate([[3, 1, 4]], logprobs=3, temperature=0.7, top_k=5, **SAMPLING)[0]
    logits = jnp.asarray(model.logits([[3, 1, 4]]))[0, -1]
    want = np.asarray(jax.nn.log_softmax(logits))
    first = out.logprobs[0]
    assert first.logprob == pytest.approx(want[first.token], abs=1e-4)
    assert [token for token, _ in first.top] == np.argsort(-want)[:3].tolist()
    assert model.generate([[3]], logprobs=True, **SAMPLING)[0].logprobs[0].top == ()
    assert model.generate([[3]], **SAMPLING)[0].logprobs is None


def test_nan_in_the_model_is_an_error_and_not_a_token(model):
    weights = dict(model.params)
    weights[("norm",)] = jnp.full_like(weights[("norm",)], jnp.nan)
    broken = dataclasses.replace(model, params=weights)
    out = broken.generate([[3, 1, 4]], **SAMPLING)[0]
    assert (out.finish_reason, out.tokens) == ("error", [])
    assert "NaN" in out.error
    with pytest.raises(FloatingPointError, match="NaN"):
        list(broken.stream([3, 1, 4], **SAMPLING))


def test_the_context_bounds_a_reply_and_never_cuts_a_prompt(model):
    limit = 20
    small = with_config(model, max_positions=limit)
    out = small.generate([[1] * (limit - 2)], **SAMPLING)[0]
    assert (len(out.tokens), out.finish_reason) == (2, "length")
    long, short = small.generate([[1] * limit, [2]], **SAMPLING)
    assert (long.finish_reason, long.tokens) == ("error", [])
    assert (
        long.error
        == f"prompt 0 has {limit} tokens: the context of {limit} leaves no room for a reply"
    )
    assert short.finish_reason == "length" and len(short.tokens) == 6
    with pytest.raises(kj.PromptError, match=f"prompt 0 has {limit} tokens"):
        small.stream([1] * limit, **SAMPLING)


def test_options_reach_the_model(model):
    plain = model.generate([[3, 1, 4]], **SAMPLING)[0].tokens
    barred = model.generate([[3, 1, 4]], logit_bias={plain[0]: float("-inf")}, **SAMPLING)[0].tokens
    assert barred[0] != plain[0] and plain[0] not in barred
    stop = dict(max_new_tokens=6, stop_tokens=[plain[0]])
    assert model.generate([[3, 1, 4]], **stop)[0].tokens == []
    held = model.generate([[3, 1, 4]], min_new_tokens=2, **stop)[0]
    assert len(held.tokens) >= 2 and plain[0] not in held.tokens
    strategy = kj.Sample(temperature=0.0, repetition_penalty=1e6)
    once = model.generate([[3, 1, 4]], sampling=strategy, **SAMPLING)[0].tokens
    assert len({*once, 3, 1, 4}) == len(once) + 3


@pytest.mark.parametrize("trip", [1, 8])
def test_a_penalty_counts_what_the_reply_holds(model, trip):
    """Within a call and between calls: of tokens that all others stand behind, each comes once."""
    bias = {5: 60.0, 6: 55.0, 7: 50.0, 9: 45.0}
    strategy = kj.Sample(temperature=0.0, repetition_penalty=1e6)
    options = dict(sampling=strategy, logit_bias=bias, trip=trip, **SAMPLING)
    assert model.generate([[3, 9]], **options)[0].tokens[:3] == [5, 6, 7]


@pytest.mark.parametrize("trip", [1, 8])
def test_penalties_of_a_reply_are_those_of_its_own_tokens(model, trip):
    """Greedy decoding beside a row without penalties, against fresh forwards and NumPy counts."""
    penalties = dict(frequency_penalty=[1.9, 0.0], presence_penalty=[1.1, 0.0])
    options = dict(stop_tokens=[], max_new_tokens=10, trip=trip, logit_bias={5: 9.0, 6: 8.5})
    penalized, plain = model.generate([[5, 5, 6], [5, 5, 6]], **penalties, **options)
    reply = []
    for token in penalized.tokens:
        ids = [5, 5, 6, *reply]
        logits = np.asarray(model.logits([ids + [0] * (16 - len(ids))], [len(ids)]), np.float64)
        scores = logits[0, len(ids) - 1]
        scores[5] += 9.0
        scores[6] += 8.5
        times = np.bincount(reply, minlength=len(scores))
        assert token == (scores - 1.9 * times - 1.1 * (times > 0)).argmax()
        reply.append(token)
    assert len(set(penalized.tokens)) > len(set(plain.tokens))


def test_n_completions_of_a_prompt_are_those_of_seeds_in_a_row(model):
    """In order, prompt by prompt; their prompt is prefilled once."""
    prompts, options = [[1, 2, 3], [4, 5]], dict(temperature=1.0, **SAMPLING)
    outs = model.generate(prompts, n=[3, 2], seed=[7, 2**31 - 1], **options)
    seeds = [(0, 7), (0, 8), (0, 9), (1, 2**31 - 1), (1, 0)]
    for out, (prompt, seed) in zip(outs, seeds, strict=True):
        assert out.tokens == model.generate(prompts[prompt], seed=seed, **options)[0].tokens
    assert [out.usage.cached_tokens for out in outs] == [0, 3, 3, 0, 2]
    assert len({tuple(out.tokens) for out in outs[:3]}) == 3
    one_slot = model.generate(prompts, n=[3, 2], seed=[7, 2**31 - 1], slots=1, **options)
    assert [out.tokens for out in one_slot] == [out.tokens for out in outs]
    with pytest.raises(kj.PromptError, match="n must be 1"):
        model.generate([3], n=2, session=model.session())


def test_arrays_are_prompts(model):
    ids = [[3, 1, 4], [1, 5, 9]]
    want = [out.tokens for out in model.generate(ids, **SAMPLING)]
    for given in (np.array(ids), jnp.asarray(ids, jnp.int32), [jnp.asarray(row) for row in ids]):
        assert [out.tokens for out in model.generate(given, **SAMPLING)] == want
    (alone,) = model.generate(jnp.asarray(ids[0]), **SAMPLING)
    assert alone.tokens == want[0]
    assert [event.token for event in model.stream(jnp.asarray(ids[1]), **SAMPLING)] == want[1]


def test_a_conversation_is_sent_to_chat(model):
    message = {"role": "user", "content": "Hello"}
    for call in (model.generate, model.stream, model.session().generate):
        with pytest.raises(kj.PromptError, match=r"use chat\(messages\)"):
            call([message])
    with pytest.raises(kj.PromptError, match=r"prompt 1: .*use chat\(messages\)"):
        model.generate([[1], [message]])


def test_what_leaves_nothing_to_choose_is_an_error(model):
    """Bias on all ids, or on all but those that must wait."""
    none = {token: float("-inf") for token in range(83)}
    for bias, fewest in ((none, 0), (none | {4: 0.0}, 3)):
        options = dict(logit_bias=bias, min_new_tokens=fewest, max_new_tokens=5, stop_tokens=[4])
        for temperature in (0.0, 1.0):
            out = model.generate([[3]], temperature=temperature, **options)[0]
            assert (out.finish_reason, out.tokens) == ("error", [])


@pytest.mark.parametrize("slots, trip", [(1, 1), (2, 3), (4, 8), (3, 2)])
def test_results_do_not_depend_on_slots_and_trips(model, slots, trip):
    """Prompts of many lengths in mixed order, more than there are slots, some ending early."""
    prompts = [[(7 * n + k) % 83 for k in range(1 + 11 * n % 37)] for n in range(9)]
    options = dict(max_new_tokens=7, stop_tokens=list(range(0, 83, 9)), logprobs=2)
    wanted = [model.generate([p], trip=1, **options)[0] for p in prompts]
    options |= dict(slots=slots, trip=trip)
    mixed = model.generate(prompts, **options)
    for got, want in zip(mixed, wanted, strict=True):
        assert (got.tokens, got.finish_reason) == (want.tokens, want.finish_reason)
        said = [[x.logprob for x in one.logprobs] for one in (got, want)]
        assert said[0] == pytest.approx(said[1], abs=1e-4)
    drawn = model.generate(prompts, temperature=1.0, seed=list(range(9)), **options)
    (alone,) = model.generate(prompts[4], temperature=1.0, seed=4, **options)
    assert alone.tokens == drawn[4].tokens


def test_streaming_and_generating_share_their_programs(model):
    """Whatever the steps a call: prompts of one bucket, one request."""
    model.generate([[3, 1, 4]], **SAMPLING)

    def others():
        list(model.stream([5, 6], max_new_tokens=9, stop_tokens=[]))
        model.generate([[5, 6]], max_new_tokens=9, stop_tokens=[], trip=3)

    assert compilations(others)[0] == 0


def test_a_closed_stream_leaves_the_model_usable(model):
    wanted = model.generate([[3, 1, 4]], **SAMPLING)[0].tokens
    stream = model.stream([3, 1, 4], max_new_tokens=50, stop_tokens=[], trip=2)
    assert next(stream).token == wanted[0]
    stream.close()
    assert model.generate([[3, 1, 4]], **SAMPLING)[0].tokens == wanted


def test_events_and_counts_are_said(model, capsys):
    one, two = model.generate([[3] * 20, [4]], verbose=True, **SAMPLING)
    said = capsys.readouterr().err
    assert "request 0: 20 prompt tokens" in said and "request 1: length after 6 tokens" in said
    for out, length in ((one, 20), (two, 1)):
        usage = out.usage
        assert (usage.prompt_tokens, usage.generated_tokens, usage.cached_tokens) == (length, 6, 0)
        assert usage.prefill_seconds > 0 and usage.decode_seconds > 0
