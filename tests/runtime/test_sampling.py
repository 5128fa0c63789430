"""Sampling on the device: which tokens may be drawn, how often, and by whose settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_jax as kj
from kimi_jax.runtime.rows import Rows
from kimi_jax.runtime.sampling import adjust, allowed, gumbel_noise, sample


def rows(
    B, s, seeds=None, counts=None, fewest=0, stops=(-1,), bias=None, seen=None, times=None, top=0
):
    """What `sample` is told of B rows under one strategy."""
    seeds, counts = (jnp.array(given or [0] * B, jnp.int32) for given in (seeds, counts))
    column = lambda value, dtype=jnp.float32: jnp.full(B, value, dtype)  # noqa: E731
    return Rows(
        column(True, bool), column(9, jnp.int32), seeds, counts, column(s.temperature),
        column(s.top_k, jnp.int32), column(s.top_p), column(s.min_p),
        column(s.repetition_penalty), column(s.frequency_penalty), column(s.presence_penalty),
        column(fewest, jnp.int32), jnp.tile(jnp.array(stops, jnp.int32), (B, 1)), bias, seen,
        times, top_logprobs=top,
        draws=s.temperature > 0, masks_stops=fewest > 0, steps_per_call=1,
    )  # fmt: skip


def draw(logits, sampling, **told):
    return jax.jit(sample)(jnp.asarray(logits, jnp.float32), rows(len(logits), sampling, **told))


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
@settings(max_examples=30)
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


def test_frequency_and_presence_penalties_equal_their_definition():
    """In NumPy, a token at a time; after bias and repetition penalty, a row by its own settings."""
    rng = np.random.default_rng(0)
    strategies = [
        kj.Sample(),
        kj.Sample(frequency_penalty=0.7),
        kj.Sample(presence_penalty=-1.5),
        kj.Sample(repetition_penalty=2.0, frequency_penalty=-0.3, presence_penalty=2.0),
    ]
    logits, bias = rng.normal(size=(2, 4, 9)) * 3
    replies = [[4, 4, 1], [2, 2, 2, 0], [8], [0, 0, 7, 7, 7, 3]]
    times = np.stack([np.bincount(reply, minlength=9) for reply in replies]).astype(np.int32)
    seen = times > 0
    want = np.empty_like(logits)
    for row, (strategy, reply) in enumerate(zip(strategies, replies, strict=True)):
        for token in range(9):
            value = logits[row, token] + bias[row, token]
            if token in reply:
                p = strategy.repetition_penalty
                value = value / p if value > 0 else value * p
                value -= strategy.presence_penalty
            want[row, token] = value - strategy.frequency_penalty * reply.count(token)
    each = [
        rows(1, s, bias=jnp.asarray(bias[i : i + 1]), seen=jnp.asarray(seen[i : i + 1]),
             times=jnp.asarray(times[i : i + 1]))
        for i, s in enumerate(strategies)
    ]  # fmt: skip
    mixed = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
    np.testing.assert_allclose(adjust(jnp.asarray(logits), mixed), want, atol=1e-6)


def test_a_reply_is_counted_token_by_token_while_its_row_is_active():
    times = jnp.asarray([[0, 1, 0], [0, 0, 5]], jnp.int32)
    before = dataclasses.replace(rows(2, kj.Greedy(), times=times), active=jnp.array([True, False]))
    after = before.after(jnp.array([1, 1], jnp.int32), jnp.array([True, True]))
    assert after.reply_counts.tolist() == [[0, 2, 0], [0, 0, 5]]


def test_draws_follow_the_penalized_distribution():
    times = np.tile(np.array([0, 2, 0, 1, 0], np.int32), (20000, 1))
    strategy = kj.Sample(temperature=2.0, frequency_penalty=0.5, presence_penalty=1.0)
    told = dict(seeds=list(range(20000)), times=jnp.asarray(times))
    ids = np.asarray(draw(np.repeat(LOGITS, 20000, 0), strategy, **told)[0])
    penalized = LOGITS[0] - 0.5 * times[0] - 1.0 * (times[0] > 0)
    want = np.exp(penalized / 2) / np.exp(penalized / 2).sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=5) / 20000, want, atol=0.02)


def test_stop_ids_wait_for_the_fewest_tokens():
    for count, best in [(0, 4), (2, 4), (3, 1)]:
        ids, *_ = draw(LOGITS, kj.Greedy(), fewest=3, counts=[count], stops=(1, -1))
        assert ids.tolist() == [best]


STRATEGIES = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.integers(0, 6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 3.0]),
)


ROWS = st.tuples(STRATEGIES, st.integers(0, 99), st.integers(0, 4))


@given(st.lists(ROWS, min_size=2, max_size=6))
@settings(max_examples=25)
def test_a_row_samples_by_its_own_settings_whatever_stands_beside_it(asked):
    rng = np.random.default_rng(len(asked))
    logits = rng.normal(size=(len(asked), 7)).astype(np.float32) * 3
    seen = jnp.asarray(rng.random((len(asked), 7)) < 0.5)
    each = [
        rows(1, kj.Sample(*s), [seed], [count], fewest=2, stops=(1, 3), seen=seen[i : i + 1], top=2)
        for i, (s, seed, count) in enumerate(asked)
    ]
    static = dict(top_logprobs=2, draws=True, masks_stops=True, steps_per_call=1)
    each = [dataclasses.replace(row, **static) for row in each]
    mixed = sample(jnp.asarray(logits), jax.tree.map(lambda *x: jnp.concatenate(x), *each))
    for i, row in enumerate(each):
        alone = sample(jnp.asarray(logits[i : i + 1]), row)
        assert int(mixed[0][i]) == int(alone[0][0]) and bool(mixed[1][i])
        np.testing.assert_allclose(mixed[4][i], alone[4][0], rtol=1e-6)
