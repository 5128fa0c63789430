"""Sampling, batches, stopping and streaming."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import AWKWARD, compilations, write

import kimi_jax as kj
from kimi_jax.generation import generate as g
from kimi_jax.generation import prompts
from kimi_jax.generation.options import Options
from kimi_jax.generation.schedule import Schedule
from kimi_jax.runtime.rows import Rows
from kimi_jax.runtime.sampling import allowed, gumbel_noise, sample

SAMPLING = dict(max_new_tokens=6, stop_tokens=[])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with a byte-level tokenizer: 83 ids do for printable text, one byte an id."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    return kj.load(write(AWKWARD, folder), dtype="float32", chunk=16)


def rows(B, s, seeds=None, counts=None, fewest=0, stops=(-1,), bias=None, seen=None, top=0):
    """What `sample` is told of B rows under one strategy."""
    seeds, counts = (jnp.array(given or [0] * B, jnp.int32) for given in (seeds, counts))
    column = lambda value, dtype=jnp.float32: jnp.full(B, value, dtype)  # noqa: E731
    return Rows(
        column(True, bool), column(9, jnp.int32), seeds, counts, column(s.temperature),
        column(s.top_k, jnp.int32), column(s.top_p), column(s.min_p),
        column(s.repetition_penalty), column(fewest, jnp.int32),
        jnp.tile(jnp.array(stops, jnp.int32), (B, 1)), bias, seen, top_logprobs=top,
        draws=s.temperature > 0, masks_stops=fewest > 0, steps_per_call=1,
    )  # fmt: skip


def draw(logits, sampling, **told):
    return jax.jit(sample)(jnp.asarray(logits, jnp.float32), rows(len(logits), sampling, **told))


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


CALLERS = [
    ("jax_default_prng_impl", "rbg"),
    ("jax_default_prng_impl", "unsafe_rbg"),
    ("jax_threefry_partitionable", False),
    ("jax_random_seed_offset", 7),
    ("jax_high_dynamic_range_gumbel", True),
]


@pytest.mark.parametrize("name, value", CALLERS)
def test_the_callers_generator_does_not_matter(name, value):
    """The noise is that of JAX's defaults, for each row whatever rows are beside it."""
    seeds, counts = [2, 0, 7, 2**31 - 1], [0, 5, 3, 2]
    keys = [jax.random.fold_in(jax.random.key(s), c) for s, c in zip(seeds, counts, strict=True)]
    wanted = np.stack([jax.random.gumbel(key, (83,), "float32") for key in keys])
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        noise = jax.jit(gumbel_noise, static_argnums=2)
        said = noise(jnp.array(seeds, jnp.int32), jnp.array(counts, jnp.int32), 83)
        alone = noise(jnp.array(seeds[:1], jnp.int32), jnp.array(counts[:1], jnp.int32), 83)
    finally:
        jax.config.update(name, before)
    np.testing.assert_allclose(said, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(alone[0], said[0])


def test_the_key_is_another_one_at_every_step():
    flat = np.zeros((1, 50))
    drawn = {int(draw(flat, kj.Sample(), counts=[n])[0][0]) for n in range(20)}
    assert len(drawn) > 8


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


LOGITS = np.array([[0.0, 3.0, 2.0, 1.0, 3.0]])


@pytest.mark.parametrize(
    "sampling, may",
    [
        (kj.Greedy(), {1}),
        (kj.Sample(temperature=0.0, top_k=3), {1}),
        (kj.Sample(top_p=0.0), {1}),
        (kj.Sample(top_k=1), {1}),
        (kj.Sample(top_k=2), {1, 4}),
        (kj.Sample(temperature=3.0, top_k=0), {0, 1, 2, 3, 4}),
        (kj.Sample(temperature=3.0, top_k=99), {0, 1, 2, 3, 4}),
        (kj.Sample(temperature=3.0, top_p=1.0), {0, 1, 2, 3, 4}),
        (kj.Sample(top_p=0.6), {1, 4}),
        (kj.Sample(min_p=0.3), {1, 2, 4}),
        (kj.Sample(min_p=1.0), {1, 4}),
        (kj.Sample(temperature=1e-6), {1, 4}),
    ],
    ids=repr,
)
def test_every_cut_leaves_what_it_says(sampling, may):
    ids, usable, *_ = draw(np.repeat(LOGITS, 300, 0), sampling, seeds=list(range(300)))
    assert set(np.asarray(ids).tolist()) == may
    assert np.asarray(usable).all()


def test_draws_follow_the_distribution():
    ids = np.asarray(
        draw(np.repeat(LOGITS, 20000, 0), kj.Sample(temperature=2.0), seeds=list(range(20000)))[0]
    )
    want = np.exp(LOGITS[0] / 2) / np.exp(LOGITS[0] / 2).sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=5) / 20000, want, atol=0.02)


@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=12),
    st.integers(0, 15),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(max_examples=30, deadline=None)
def test_at_least_one_token_may_always_be_drawn(logits, top_k, top_p, min_p):
    args = (jnp.float32(0.7), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))
    may = np.asarray(allowed(jnp.asarray(logits, jnp.float32), *args))
    assert may[int(np.argmax(np.float32(logits)))]
    assert may.sum() <= (top_k or len(logits))


@pytest.mark.parametrize("bad", [np.nan, np.inf, None], ids=["NaN", "inf", "all -inf"])
def test_logits_that_cannot_be_used_are_an_error_of_their_row_alone(bad):
    two = np.repeat(LOGITS, 2, 0)
    two[0] = -np.inf if bad is None else np.where(np.arange(5) == 2, bad, two[0])
    _, usable, *_ = draw(two, kj.Sample())
    assert np.asarray(usable).tolist() == [False, True]


def test_nan_in_the_model_is_an_error_and_not_a_token(model):
    weights = dict(model.weights)
    weights[("norm",)] = jnp.full_like(weights[("norm",)], jnp.nan)
    broken = dataclasses.replace(model, weights=weights)
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


def test_what_exceeds_the_context_is_refused_everywhere(model):
    small = with_config(model, max_positions=20)
    assert small.logits([[1] * 20]).shape == (1, 20, 83)
    assert small.logits([[1] * 25], [20]).shape == (1, 25, 83)  # padding does not count
    for action in (
        lambda: small.logits([[1] * 21]),
        lambda: small.logits([[1] * 21, [1] * 21], [3, 21]),
        lambda: small.mixtures([1] * 21),
        lambda: small.new_state(1, 21),
        lambda: small.prefill(small.new_state(1, 20), [[1] * 21]),
    ):
        with pytest.raises(kj.RequestError, match=r"2[01]"):
            action()
    _, full = small.prefill(small.new_state(1, 20), [[1] * 20])
    with pytest.raises(kj.RequestError, match="has seen 20 tokens and brings 1"):
        small.decode(full, [1])


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [83]], {}, "prompt 1: 83 is not a token id"),
        (["text"], {}, "no tokenizer"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": float("nan")}, "temperature"),
        ([[1]], {"top_p": 1.5}, "top_p"),
        ([[1]], {"top_k": -1}, "top_k"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"sampling": kj.Greedy(), "top_k": 3}, "excludes"),
        ([[1]], {"seed": [1, 2]}, "one for each of the 1 prompts"),
        ([[1]], {"stop": "x"}, "tokenizer"),
        ([[1]], {"stop_tokens": [99]}, "99 is not a token id"),
        ([[1]], {"logprobs": 1000}, "logprobs"),
        ([[1]], {"slots": 0}, "slots must be"),
        ([[1]], {"trip": 1000}, "trip must be"),
        ([[1]], {"min_new_tokens": 65}, "min_new_tokens must lie in 0..max_new_tokens"),
        ([[1]], {"logit_bias": {99: 1.0}}, "logit_bias: 99: 1.0 is not an id"),
        ([[1]], {"logit_bias": {1: float("nan")}}, "logit_bias: 1: nan"),
        ([-1, 2], {}, "prompt 0: -1 is not a token id"),
        ([1, [2]], {}, "mix token ids"),
    ],
)
def test_bad_requests_are_refused_by_name(model, prompts, options, message):
    with pytest.raises(kj.PromptError, match=message):
        model.generate(prompts, **options)


def checked(model, count=1, **options):
    """The options of so many prompts, below the signatures, whose types the tests enforce and
    users' programs do not.
    """
    slots, trip = options.pop("slots", 1), options.pop("trip", 1)
    prompts = lambda: [[1]] * count  # noqa: E731
    owners = {name: options.pop(name, None) for name in ("cache", "session")}
    requests, _ = g._prepare(model, prompts, Options(**options), slots=slots, trip=trip, **owners)
    return [request.options for request in requests]


def test_options_of_the_wrong_type_are_named_at_once(model):
    with pytest.raises(kj.PromptError) as error:
        checked(
            model, max_new_tokens=2.5, seed=None, stop=5, stop_tokens=5, logprobs=None, cache={}
        )
    names = ("max_new_tokens", "seed", "stop must", "stop_tokens", "logprobs", "prefix_cache must")
    assert all(name in str(error.value) for name in names)
    with pytest.raises(kj.PromptError, match="prompts must be"):
        prompts.as_list(7)
    problems = []
    prompts.encode(model, [b"x"], [], problems)
    assert problems == ["prompt 0 must be text or token ids, got b'x'"]


WHOLE = [0, 1, -1, np.int32(1), np.uint8(1), np.int64(2**40), 2**31 - 1, 2**31, 10**400, -(10**400),
         10**5000]  # fmt: skip
REAL = [0.5, np.float64(0.5), np.float32(-1), float("nan"), float("inf"), float("-inf"), 1e39]
OTHER = [
    "x",
    b"x",
    True,
    np.True_,
    1j,
    np.complex64(1),
    np.array(3),
    np.zeros((2, 2)),
    [0.5, 1],
    {1},
]
PLAIN = {
    "max_new_tokens": 1, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
    "min_p": 0.0, "repetition_penalty": 1.0,
    "seed": 0, "logprobs": False, "slots": 1, "trip": 1, "stop": None, "stop_tokens": None,
    "logit_bias": None,
}  # fmt: skip
SOUND = {  # which of the values above an option takes
    "max_new_tokens": WHOLE[1:2] + WHOLE[3:5] + WHOLE[6:7],
    "min_new_tokens": WHOLE[:2] + WHOLE[3:5],
    "temperature": WHOLE[:2] + WHOLE[3:8] + REAL[:2],
    "top_p": WHOLE[:2] + WHOLE[3:5] + REAL[:2],
    "min_p": WHOLE[:2] + WHOLE[3:5] + REAL[:2],
    "repetition_penalty": WHOLE[1:2] + WHOLE[3:8] + REAL[:2],
    "top_k": WHOLE[:2] + WHOLE[3:5] + WHOLE[6:7],
    "seed": WHOLE[:2] + WHOLE[3:5] + WHOLE[6:7],
    "logprobs": [*WHOLE[:2], *WHOLE[3:5], True],
    "slots": WHOLE[1:2] + WHOLE[3:5],
    "trip": WHOLE[1:2] + WHOLE[3:5],
    "stop": [],
    "stop_tokens": [OTHER[-1]],
    "logit_bias": [],
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_value_of_an_option_runs_or_is_one_error_that_names_it(model, name):
    """Huge, negative, of NumPy, not a number at all: below the signatures, which the tests enforce
    and users' programs do not.
    """
    for value in WHOLE + REAL + OTHER:
        options = PLAIN | {name: value}
        if any(value is sound for sound in SOUND[name]):
            assert len(checked(model, **options)) == 1
        else:
            with pytest.raises(kj.PromptError, match=name) as error:
                checked(model, **options)
            assert len(str(error.value)) < 400


def test_all_bad_prompts_are_named_at_once(model):
    with pytest.raises(kj.PromptError, match=r"(?s)prompt 0 is empty.*prompt 2: -4"):
        model.generate([[], [1], [-4]])


# Bias, penalty, fewest tokens


def test_a_bias_is_added_before_the_choice_and_not_reported():
    bias = jnp.asarray(np.eye(5)[[3]] * 4, jnp.float32)
    ids, _, chosen, *_ = draw(LOGITS, kj.Greedy(), bias=bias)
    assert ids.tolist() == [3]
    want = np.asarray(jax.nn.log_softmax(jnp.asarray(LOGITS[0], jnp.float32)))[3]
    assert float(chosen[0]) == pytest.approx(float(want), abs=1e-6)
    ids, *_ = draw(LOGITS, kj.Greedy(), bias=jnp.asarray([[0, -jnp.inf, 0, 0, 0]], jnp.float32))
    assert ids.tolist() == [4]


def test_a_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    seen = jnp.asarray([[False, True, False, False, True]] * 2)
    logits = np.array([[0.0, 3.0, 2.0, 1.0, 3.0], [-4.0, -1.0, -1.5, -9.0, -1.0]])
    ids, *_ = draw(logits, kj.Sample(temperature=0.0, repetition_penalty=2.0), seen=seen)
    assert ids.tolist() == [2, 2]


def test_stop_ids_wait_for_the_fewest_tokens():
    for count, best in [(0, 4), (2, 4), (3, 1)]:
        ids, *_ = draw(LOGITS, kj.Greedy(), fewest=3, counts=[count], stops=(1, -1))
        assert ids.tolist() == [best]


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
    """Within a trip and between trips: of tokens that all others stand behind, each comes once."""
    bias = {5: 60.0, 6: 55.0, 7: 50.0, 9: 45.0}
    strategy = kj.Sample(temperature=0.0, repetition_penalty=1e6)
    options = dict(sampling=strategy, logit_bias=bias, trip=trip, **SAMPLING)
    assert model.generate([[3, 9]], **options)[0].tokens[:3] == [5, 6, 7]


def test_what_leaves_nothing_to_choose_is_an_error(model):
    """Bias on all ids, or on all but those that must wait."""
    none = {token: float("-inf") for token in range(83)}
    for bias, fewest in ((none, 0), (none | {4: 0.0}, 3)):
        options = dict(logit_bias=bias, min_new_tokens=fewest, max_new_tokens=5, stop_tokens=[4])
        for temperature in (0.0, 1.0):
            out = model.generate([[3]], temperature=temperature, **options)[0]
            assert (out.finish_reason, out.tokens) == ("error", [])


def test_numbers_are_such_as_float32_holds(model):
    for strategy in (dict(temperature=1e39), dict(repetition_penalty=1e-46)):
        with pytest.raises(kj.PromptError, match=f"{next(iter(strategy))} must be"):
            kj.Sample(**strategy)
    with pytest.raises(kj.PromptError, match="logit_bias: 3: 1e"):
        model.generate([[1]], logit_bias={3: 1e300})
    (options,) = checked(model, logit_bias={3: np.float32(99)})
    assert options.logit_bias == ((3, 99.0),)


def test_options_compile_few_programs(model):
    """Whatever the stop ids, the log-probabilities asked for and the trips, up to some size."""
    model.generate([[3, 1, 4]], logprobs=4, **SAMPLING)

    def others():
        model.generate([[5, 4]], max_new_tokens=3, stop_tokens=[1, 2, 3], logprobs=3, trip=5)
        model.generate([[5, 4]], max_new_tokens=3, stop_tokens=range(8), logprobs=4)

    assert compilations(others)[0] == 0


# Slots


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_schedule_loses_no_request_starves_none_and_shares_no_slot(work, slots, stages):
    """Each request takes so many chunks and so many trips."""
    schedule = Schedule.of(range(len(work)), slots, stages)
    chunks, trips, order, ended, rounds = {}, {}, [], [], 0
    while schedule.is_busy:
        rounds += 1
        for stage, who in schedule.admit():
            chunks[stage] = work[who][0]
            order.append(who)
        kept = [slot for _, slot in schedule.prefilling.values()]
        in_place = slots == stages
        free = schedule.free_slots if in_place else schedule.free_prefill_rows
        assert not (schedule.waiting and free and schedule.free_slots)  # beside an empty place
        if in_place:
            assert list(schedule.prefilling) == kept
        else:
            assert sorted([*schedule.prefilling, *free]) == list(range(stages))
        taken = kept + list(schedule.decoding) + schedule.free_slots
        assert sorted(taken) == list(range(slots))
        for stage in list(schedule.prefilling):
            chunks[stage] -= 1
            if not chunks[stage]:
                who = schedule.prefilling[stage][0]
                trips[schedule.begin(stage)] = [who, work[who][1]]
        later = copy.deepcopy(schedule)  # as it will be if nobody ends
        later.admit()
        assert schedule.is_filling == bool(later.prefilling)
        for slot in list(schedule.decoding):
            trips[slot][1] -= 1
            if not trips[slot][1]:
                assert schedule.end(slot) == trips[slot][0]
                ended.append(trips[slot][0])
        assert rounds <= sum(sum(one) for one in work)
    assert order == list(range(len(work)))
    assert sorted(ended) == order


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
    """Whatever the trips: prompts of one bucket, one request."""
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
