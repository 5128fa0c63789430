"""Rejection sampling: the golden cases of another implementation, and the laws by enumeration."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file

from kimi_jax.runtime.rows import Rows
from kimi_jax.runtime.sampling import gumbel_noise, uniform_noise
from kimi_jax.speculation.acceptance import (
    ACCEPTING,
    DRAFTING,
    RESAMPLING,
    RULES,
    accept_drawn,
    adjusted_logits,
    distribution,
    target_distributions,
)

FOLDER = GOLDEN / "speculation"
LAW = 1e-12  # measured 2e-16


@pytest.fixture(scope="module")
def cases():
    arrays = load_file(FOLDER / "accept.safetensors")
    numbers = sorted({int(name[1 : name.index(".")]) for name in arrays})
    return [
        {name.split(".")[1]: x for name, x in arrays.items() if name.startswith(f"c{i}.")}
        for i in numbers
    ]


@pytest.fixture(scope="module")
def tables():
    return json.loads((FOLDER / "accept_exact.json").read_text())


jitted = {name: jax.jit(rule) for name, rule in RULES.items()}


def plain(logits, temperature):
    """Distributions of rows without truncation."""
    t = jnp.float64(temperature)
    return jax.vmap(lambda x: distribution(x, t, jnp.int32(0), jnp.float64(1), jnp.float64(0)))(
        logits
    )


@pytest.mark.parametrize(("rule", "prefix"), [("standard", ""), ("block", "block_")])
def test_verdicts_equal_another_implementation(cases, rule, prefix):
    for case in cases:
        p = plain(case["target_logits"], case["temperature"][0])
        drafts, Z = case["draft_tokens"], p.shape[1]
        q = jax.nn.one_hot(drafts, Z) if case["one_hot_draft"][0] else jnp.asarray(case["q"])
        verdict = jitted[rule](p, q, drafts, jnp.int32(len(drafts)), case["u"])
        np.testing.assert_allclose(p, case["p"], atol=1e-12)
        assert verdict.accepted == case[f"{prefix}accepted"][0]
        np.testing.assert_allclose(verdict.following, case[f"{prefix}residual"], atol=1e-12)
        drawn = np.argmax(np.cumsum(np.asarray(verdict.following)) > case["u_final"][0])
        assert int(drawn) == case[f"{prefix}next"][0]


def draft_chance(tables, path, is_one_hot):
    """The chance that these drafts are drawn, and where drawing ends by the tables' own rule."""
    table = tables["draft"]
    if is_one_hot:
        return float(all(np.argmax(table[path[:i]]) == int(path[i]) for i in range(len(path))))
    return np.prod([table[path[:i]][int(path[i])] for i in range(len(path))])


def intervals(rule, p, q, drafts, count):
    """(chance, accepted, following) of every verdict, by halving noise at the chances themselves:
    each draft's noise is just below or just above what accepts it.
    """
    k = len(drafts)
    if rule == "standard":
        at = np.arange(k)
        chances = np.minimum(p[at, drafts] / q[at, drafts], 1)
    else:
        chances = block_chances(p, q, drafts, count)
    for stands in itertools.product((True, False), repeat=count):
        used = chances[:count]
        chance = np.prod(np.where(stands, used, 1 - used))
        if chance > 0:
            noise = np.ones(k)
            noise[:count] = np.where(stands, used * (1 - 1e-9), used + (1 - used) * 1e-9)
            verdict = jitted[rule](p, q, jnp.asarray(drafts), jnp.int32(count), noise)
            yield chance, int(verdict.accepted), np.asarray(verdict.following)


def block_chances(p, q, drafts, count):
    """Sun et al., algorithm 2, in plain loops."""
    weight, chances = 1.0, np.zeros(len(drafts))
    for i in range(count):
        weight = min(1.0, weight * p[i, drafts[i]] / q[i, drafts[i]])
        if i + 1 == count:
            chances[i] = weight
        else:
            rest = np.maximum(weight * p[i + 1] - q[i + 1], 0).sum()
            chances[i] = rest / (rest + 1 - weight) if rest + 1 - weight > 0 else 1.0
    return chances


def law(tables, rule, is_one_hot, is_truncated):
    """The distribution of the first K + 1 tokens, the model going on by itself after a round, and
    the mean number of accepted drafts.
    """
    Z, K, target = tables["V"], tables["K"], tables["target"]
    text, mean = {}, 0.0
    for drafts in itertools.product(range(Z), repeat=K):
        path = "".join(map(str, drafts))
        drawn = draft_chance(tables, path, is_one_hot)
        if drawn == 0:
            continue
        stops = [i for i in range(K) if is_truncated and tables["stop_before"][path[:i]]]
        count = stops[0] if stops else K
        p = np.array([target[path[:i]] for i in range(K + 1)])
        q = np.array([tables["draft"][path[:i]] for i in range(K)])
        q = np.eye(Z)[list(drafts)] if is_one_hot else q
        for chance, accepted, following in intervals(rule, p, q, np.array(drafts, np.int32), count):
            mean += drawn * chance * accepted
            for token in range(Z):
                begun = path[:accepted] + str(token)
                text[begun] = text.get(begun, 0) + drawn * chance * following[token]
    return whole_texts(text, target, Z, K + 1), mean


def whole_texts(begun, target, Z, length):
    """Beginnings of texts, continued by the model to a length."""
    for size in range(1, length):
        for path in [path for path in begun if len(path) == size]:
            chance = begun.pop(path)
            for token in range(Z):
                longer = path + str(token)
                begun[longer] = begun.get(longer, 0) + chance * target[path][token]
    return begun


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_models_own_law(tables, rule, is_one_hot, is_truncated):
    found, mean = law(tables, rule, is_one_hot, is_truncated)
    first = {str(token): chance for token, chance in enumerate(tables["target"][""])}
    expected = whole_texts(first, tables["target"], tables["V"], tables["K"] + 1)
    assert max(abs(found[path] - expected[path]) for path in expected) < LAW
    name = f"{rule}.{'greedy' if is_one_hot else 'probabilistic'}"
    result = tables["result"][name + (".truncated" if is_truncated else "")]
    assert mean == pytest.approx(result["expected_accepted"], abs=1e-8)


def rows_of(B, **changed):
    values = {
        "active": np.ones(B, bool), "remaining": np.full(B, 99), "seeds": np.arange(B),
        "counts": np.full(B, 3), "temperature": np.ones(B), "top_k": np.zeros(B, int),
        "top_p": np.ones(B), "min_p": np.zeros(B), "repetition_penalty": np.ones(B),
        "frequency_penalty": np.zeros(B), "presence_penalty": np.zeros(B),
        "min_new_tokens": np.zeros(B, int), "stop_ids": np.full((B, 1), -1),
    } | changed  # fmt: skip
    small = {np.dtype(int): np.int32, np.dtype(float): np.float32}
    arrays = {
        name: jnp.asarray(x, small.get(np.asarray(x).dtype, x.dtype)) for name, x in values.items()
    }
    settings = {"top_logprobs": 0, "draws": True, "masks_stops": False, "steps_per_call": 1}
    return Rows(**{"bias": None, "seen": None, "reply_counts": None, **arrays}, **settings)


def test_penalties_count_the_drafts_before_and_top_k_leaves_few():
    B, k, Z = 2, 3, 7
    logits = np.random.default_rng(2).normal(size=(B, k + 1, Z))
    drafts = jnp.array([[4, 4, 1], [0, 2, 2]], jnp.int32)
    counts = np.zeros((B, Z), int)
    rows = rows_of(B, frequency_penalty=np.array([5.0, 0]), reply_counts=counts,
                   top_k=np.array([0, 2]))  # fmt: skip
    p = target_distributions(adjusted_logits(jnp.asarray(logits), drafts, rows), rows)
    expected = logits[0].copy()
    for i, token in enumerate(np.asarray(drafts[0])):
        expected[i + 1 :, token] -= 5
    np.testing.assert_allclose(p[0], jax.nn.softmax(expected), atol=1e-12)
    assert ((np.asarray(p[1]) > 0).sum(1) == 2).all()


def test_greedy_rows_accept_the_best_tokens_and_end_at_a_stop_id():
    B, Z = 4, 5
    best = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    logits = jnp.asarray(3 * np.eye(Z)[best])
    drafts = jnp.array([[1, 2, 3], [1, 0, 3], [1, 2, 3], [1, 2, 3]], jnp.int32)
    rows = rows_of(
        B, temperature=np.zeros(B), stop_ids=np.array([[-1], [-1], [2], [-1]]),
        active=np.array([True, True, True, False]),
    )  # fmt: skip
    for rule in RULES:
        counts = jnp.array([3, 3, 3, 3], jnp.int32)
        adjusted = adjusted_logits(logits, drafts, rows)
        tokens, lengths = accept_drawn(adjusted, drafts, None, counts, rows, rule)
        assert lengths.tolist() == [4, 2, 2, 0]
        assert tokens[0].tolist() == [1, 2, 3, 4] and tokens[1, :2].tolist() == [1, 2]
        _, lengths = accept_drawn(adjusted, drafts, None, counts * 0, rows, rule)
        assert lengths.tolist() == [1, 1, 1, 0]


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(3)
    logits, q = (
        jnp.asarray(rng.normal(size=(3, 4, 7))),
        jnp.asarray(rng.dirichlet(np.ones(7), (3, 3))),
    )
    drafts, counts = (
        jnp.array(rng.integers(0, 7, (3, 3)), jnp.int32),
        jnp.array([3, 1, 2], jnp.int32),
    )
    tokens, lengths = accept_drawn(logits, drafts, q, counts, rows_of(3))
    alone = accept_drawn(
        logits[1:2], drafts[1:2], q[1:2], counts[1:2], rows_of(1, seeds=np.ones(1, int))
    )
    assert lengths[1] == alone[1][0]
    assert tokens[1, : lengths[1]].tolist() == alone[0][0, : lengths[1]].tolist()


def test_streams_of_noise_are_independent():
    seeds, counts = jnp.arange(64, dtype=jnp.int32), jnp.full(64, 5, jnp.int32)
    streams = [uniform_noise(seeds, counts, 64, s) for s in (0, DRAFTING, ACCEPTING, RESAMPLING)]
    correlations = np.corrcoef([np.ravel(x) for x in streams]) - np.eye(4)
    assert np.abs(correlations).max() < 0.06
    assert gumbel_noise(seeds, counts, 64).shape == (64, 64)
