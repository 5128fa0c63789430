"""MLA and its indexer: absorbed = expanded = oracle, no rotation, exact selection, a used cache."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    SPARSE,
    as_float64,
    bits,
    blocks_of,
    close,
    filled,
    fresh_mla,
    mla_pair,
    of_type,
    quick_jit,
    small_config,
    step_of,
    weights_of,
)
from tolerances import ATTENTION, ATTENTION_BF16, DRIFT, INDEX_SCORE, MLA_LAYER

from kimi_jax.model.attention.latents import (
    attend_rows,
    attend_selected,
    expanded,
    over_queries,
    per_head,
)
from kimi_jax.model.attention.selection import best_slots
from kimi_jax.model.indexer import (
    Indexer,
    candidates,
    score,
    score_cache,
    select_mask,
    select_sorted,
)
from kimi_jax.model.layers import rms_norm
from kimi_jax.model.mla import MLA, selection_widths
from kimi_jax.model.state import cache_dtype, read_block, write_rows

WIDE = ("float32", "float64")
FORMS = ("absorbed", "static", "expanded")
B, S, H, N, ROPE, V, C = 2, 11, 3, 6, 4, 5, 8
SCALE = (N + ROPE) ** -0.5
NOWHERE = -math.inf


# Blocks of 4 keys, so that 11 slots take three of them and the last one overlaps; few queries, and
# one request, at a time.
SMALL = dict(blocks=blocks_of(keys=4, dense_bytes=2**11))


def arrays(dtype, seed=0):
    """q [B, S, H, N + rope], a cache of rows [1, B, S, R] and the heads' matrices."""
    rng = np.random.default_rng(seed)
    shapes = (B, S, H, N + ROPE), (1, B, S, C + ROPE), (H, N, C), (H, V, C)
    return [of_type(rng.normal(size=s), dtype) for s in shapes]


@quick_jit
def absorb(q, w_k_b):
    return jnp.concatenate([per_head(q[..., :N], w_k_b), q[..., N:]], -1)


@quick_jit
def bring_out(o, w_v_b):
    return per_head(o, jnp.swapaxes(w_v_b, 1, 2))


def in_blocks(q, cache, step, slots=S):
    """`attend_rows` of the first slots of a cache."""
    call = quick_jit(lambda *a: attend_rows(*a, step.positions, step, C, SCALE, slots))
    return call(q, cache).o


@quick_jit
def select_and_attend(q, cache, chosen, kept):
    return attend_selected(q, cache, 0, chosen, kept, C, SCALE).o


@quick_jit
def run_expanded(q, latents, w_k_b, w_v_b, allowed):
    return expanded(q, latents, w_k_b, w_v_b, allowed, SCALE)


run_score = quick_jit(score)


def select_top_k(scores, keep):
    best, slots = candidates(scores, keep)
    return slots, best > -jnp.inf


def select_radix(scores, keep):
    slots = best_slots(scores, keep)
    return jnp.maximum(slots, 0), slots >= 0


by_sort, by_mask, by_top_k, by_radix = (
    quick_jit(f, static_argnums=1) for f in (select_sorted, select_mask, select_top_k, select_radix)
)


# Attention


@pytest.mark.parametrize("dtype", WIDE)
def test_expanded_equals_oracle(dtype):
    q, cache, w_k_b, w_v_b = arrays(dtype)
    causal = np.tril(np.ones((S, S), bool))
    actual = run_expanded(q, cache[0], w_k_b, w_v_b, np.stack([causal] * B))
    for b in range(B):
        latents = as_float64(cache[0, b])
        expected = oracles.attention(
            as_float64(q[b]), latents, as_float64(w_k_b), as_float64(w_v_b), causal, SCALE
        )
        close(actual[b], expected, ATTENTION)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("slots", [S, 9])
def test_attend_rows_in_blocks_equals_expanded(dtype, slots):
    """Rows of 9 and 3 tokens: the last blocks overlap, and some are empty for one row."""
    q, cache, w_k_b, w_v_b = arrays(dtype)
    step = step_of([0, 0], [9, 3], S, **SMALL)
    actual = bring_out(in_blocks(absorb(q, w_k_b), cache, step, slots), w_v_b)
    allowed = np.arange(S) <= np.asarray(step.positions)[..., None]
    expected = run_expanded(q, cache[0], w_k_b, w_v_b, allowed)
    for b, n in enumerate([9, 3]):
        close(actual[b, :n], expected[b, :n], ATTENTION)


def test_attend_rows_starts_where_each_row_is():
    """New tokens after 0 and 7 seen ones meet all before them and none after."""
    q, cache, w_k_b, w_v_b = arrays("float64")
    step = step_of([0, 7], [2, 2], 2, **SMALL)
    actual = bring_out(in_blocks(absorb(q[:, :2], w_k_b), cache, step), w_v_b)
    for b, start in enumerate([0, 7]):
        allowed = np.arange(S) <= start + np.arange(2)[:, None]
        matrices = map(as_float64, (w_k_b, w_v_b))
        expected = oracles.attention(
            as_float64(q[b, :2]), as_float64(cache[0, b]), *matrices, allowed, SCALE
        )
        close(actual[b], expected, ATTENTION)


def test_bfloat16_scores_are_not_rounded():
    """Scores near 40, which bfloat16 would round by 0.1: both forms stay near the oracle."""
    q, cache, w_k_b, w_v_b = arrays("float32")
    q, cache, w_k_b, w_v_b = (x.astype(jnp.bfloat16) for x in (q * 8, cache * 3, w_k_b, w_v_b))
    step = step_of([0, 0], [S, S], S, **SMALL)
    absorbed = absorb(q, w_k_b)
    eye = np.broadcast_to(np.eye(C), (H, C, C))
    causal = np.tril(np.ones((S, S), bool))
    latent = in_blocks(absorbed, cache, step)
    full = run_expanded(q, cache[0], w_k_b, w_v_b, np.stack([causal] * B))
    assert (latent.dtype, full.dtype) == (jnp.bfloat16, jnp.float32)
    for b in range(B):
        rows = as_float64(cache[0, b])
        expected = oracles.attention(as_float64(absorbed[b]), rows, eye, eye, causal, SCALE)
        close(latent[b], expected, ATTENTION_BF16)
        matrices = map(as_float64, (w_k_b, w_v_b))
        expected = oracles.attention(as_float64(q[b]), rows, *matrices, causal, SCALE)
        close(full[b], expected, ATTENTION_BF16)


@pytest.mark.parametrize("dtype", WIDE)
def test_attend_selected_equals_expanded_under_the_sorted_mask(dtype):
    q, cache, w_k_b, w_v_b = arrays(dtype)
    rng = np.random.default_rng(7)
    causal = np.tril(np.ones((S, S), bool))
    scores = of_type(np.where(causal, rng.integers(0, 4, (B, S, S)), NOWHERE), dtype)
    rows = select_and_attend(absorb(q, w_k_b), cache, *by_top_k(scores, 4))
    expected = run_expanded(q, cache[0], w_k_b, w_v_b, by_sort(scores, 4))
    actual = bring_out(rows, w_v_b)
    close(actual, expected, ATTENTION)


def test_where_the_keys_lie_changes_nothing():
    """No rotation: the same keys 5 slots further give the same bits."""
    q, cache, w_k_b, _ = arrays("float64")
    moved = np.full_like(cache, np.nan)
    moved[:, :, 5:] = cache[:, :, : S - 5]
    chosen = np.broadcast_to(np.array([0, 3, 5, 2], np.int32), (B, S, 4))
    kept = np.broadcast_to([True, True, True, False], (B, S, 4))
    q = absorb(q, w_k_b)
    here = select_and_attend(q, cache, chosen, kept)
    np.testing.assert_array_equal(here, select_and_attend(q, moved, chosen + 5, kept))


# The cache

run_write = quick_jit(write_rows)
run_read = quick_jit(read_block, static_argnums=(2, 3))


def test_padded_rows_write_nothing_and_never_wrap():
    """Rows of 2, 0 and 3 tokens; padding stands at position -1, or beyond the last slot."""
    cache = np.full((2, 3, 6, 4), 7.0)
    step = step_of([0, 0, 3], [2, 0, 3], 4)
    positions = np.where(step.valid, step.positions, np.int32(-1))
    positions[2, 3] = 6
    step = dataclasses.replace(step, positions=jnp.asarray(positions), group=jnp.int32(1))
    written = run_write(cache, np.ones((3, 4, 4)), step)
    expected = np.full((2, 3, 6, 4), 7.0)
    expected[1, 0, :2] = expected[1, 2, 3:6] = 1
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", *WIDE])
def test_a_written_row_is_read_back_bit_for_bit(dtype):
    """bfloat16 is kept as its bits on CPU; infinities, -0 and subnormals come back too."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 3, 5))
    rows[0, 0] = [np.inf, -np.inf, -0.0, 1e-40, 3e38]
    rows = of_type(rows, dtype)
    cache = np.full((1, 1, 8, 5), 9, cache_dtype(rows.dtype, True))
    assert cache.dtype == (jnp.uint16 if dtype == "bfloat16" else dtype)
    step = step_of([2], [3], 3)
    cache = run_write(cache, rows, step)
    back, positions = run_read(cache, np.int32(1), 6, rows.dtype, step)
    assert back.dtype == rows.dtype and positions.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(bits(back[0, 1:4]), bits(rows[0]))
    np.testing.assert_array_equal(as_float64(back[0, 4:]), 0)  # unwritten slots read as zero


# The sublayer


@functools.lru_cache
def layer(dtype="float64", **changes):
    return filled(MLA(small_config(**changes), dtype))


@functools.lru_cache
def pair():
    return mla_pair()


def tokens(B, T, dtype="float64", seed=3):
    return of_type(np.random.default_rng(seed).normal(size=(B, T, 24)), dtype)


@pytest.fixture
def run():
    """Of a module, its input, state and step."""
    return quick_jit(lambda module, x, state, step: module(x, state, step))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes", [{}, SPARSE, dict(mla_output_gate=False), dict(mla_norm_eps=0.5)], ids=str
)
def test_sublayer_equals_oracle(run, form, changes):
    """11 tokens, 14 slots of which the rest are NaN; sparse keeps 6 keys."""
    for dtype in WIDE if changes in ({}, SPARSE) else ["float64"]:
        module, x = layer(dtype, **changes), tokens(1, 11, dtype)
        state = fresh_mla(module.config, 1, 14, dtype, fill=math.nan)
        y, _ = run(module, x, state, step_of([0], [11], 11, mla=form, **SMALL))
        expected, _ = oracles.mla(weights_of(module), as_float64(x[0]), module.config)
        close(y[0], expected, MLA_LAYER)


@pytest.mark.parametrize("form", FORMS)
def test_the_softmax_scale_counts_the_unrotated_dims(run, form):
    """(nope + rope)^-0.5: queries grown to make up for nope^-0.5 give another result."""
    module, x = layer(), tokens(1, 6)
    w, prompt = weights_of(module), as_float64(x[0])
    y, _ = run(module, x, fresh_mla(module.config, 1, 6, x.dtype), step_of([0], [6], 6, mla=form))
    close(y[0], oracles.mla(w, prompt, module.config)[0], MLA_LAYER)
    w["w_q_b"] = w["w_q_b"] * ((N + ROPE) / N) ** 0.5
    assert np.abs(oracles.mla(w, prompt, module.config)[0] - as_float64(y[0])).max() > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_positions_only_order_the_keys(run, form):
    """The last token sees the same after its past is shuffled, and after all is said twice."""
    module, x = layer(), tokens(1, 5)
    shuffled = x[:, [2, 0, 3, 1, 4]]
    twice = np.concatenate([x, x], 1)
    last = []
    for prompt in (x, shuffled, twice):
        T = prompt.shape[1]
        fresh = fresh_mla(module.config, 1, 12, x.dtype)
        last.append(run(module, prompt, fresh, step_of([0], [T], T, mla=form))[0][0, -1])
    close(last[1], last[0], MLA_LAYER)
    close(last[2], last[0], MLA_LAYER)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["dense", "sparse"])
def test_a_ragged_batch_in_pieces_equals_its_prompts_alone(run, form, changes):
    """Rows of 0, 1 and 11 tokens, then 2, 1 and 1 more; slots beyond and padding hold NaN."""
    module, prompts = layer(**changes), tokens(3, 13)
    first, then = [0, 1, 11], [2, 1, 1]
    state, outputs = fresh_mla(module.config, 3, 16, prompts.dtype, fill=math.nan), [[], [], []]
    for start, lengths in ((0, first), (first, then)):
        starts = np.broadcast_to(start, 3).tolist()
        T = max(lengths)
        x = np.full((3, T, 24), np.nan)
        for b, n in enumerate(lengths):
            x[b, :n] = prompts[b, starts[b] : starts[b] + n]
        y, state = run(module, x, state, step_of(starts, lengths, T, mla=form, **SMALL))
        for b, n in enumerate(lengths):
            outputs[b].append(y[b, :n])
    for b in range(3):
        n = first[b] + then[b]
        expected, _ = oracles.mla(weights_of(module), as_float64(prompts[b, :n]), module.config)
        close(np.concatenate(outputs[b]), expected, MLA_LAYER)
        assert np.isnan(state.latents[0, b, n:]).all()  # padding wrote nothing
        assert np.isfinite(state.latents[0, b, :n]).all()


def test_absorbed_and_expanded_stay_together_over_64_layers(run):
    """bfloat16 inputs, each layer's output added and normalised, the next layer fed with it."""
    module = layer("bfloat16")
    weights, graph = jax.tree.flatten(module)
    norm = quick_jit(lambda x, y: rms_norm(x + y, jnp.ones(24, x.dtype), 1e-5))
    drift = []
    for form in FORMS:
        x, step = tokens(2, 6, "bfloat16"), step_of([0, 0], [6, 6], 6, mla=form)
        fresh = fresh_mla(module.config, 2, 6, jnp.bfloat16)
        for i in range(64):
            turned = [np.roll(w, i, 0) if w.ndim == 2 else w for w in weights]
            y, _ = run(jax.tree.unflatten(graph, turned), x, fresh, step)
            x = norm(x, y)
        drift.append(x.astype(np.float32))
    for form in drift[:-1]:
        close(form, drift[-1], DRIFT)


# The indexer


@pytest.mark.parametrize("case", ["i0", "i1"])
@pytest.mark.parametrize("dtype", WIDE)
def test_indexer_equals_golden(ops, case, dtype):
    g = ops("indexer")
    heads, width, keep = map(int, g[f"{case}.cfg"])
    x, latent = (jnp.asarray(g[f"{case}.{n}"][None], dtype) for n in ("hidden", "q_resid"))
    config = small_config(
        hidden=x.shape[2],
        q_rank=latent.shape[2],
        index_heads=heads,
        index_dim=width,
        index_topk=keep,
    )
    module = Indexer(config, dtype)
    names = dict(w_q="wq_b", w_k="wk", w_weights="weights_proj")
    for name, theirs in {**names, "k_norm": "k_norm.weight", "k_bias": "k_norm.bias"}.items():
        getattr(module, name).set_value(jnp.asarray(g[f"{case}.{theirs}"], dtype))
    scores = quick_jit(lambda m: score(*m.queries(x, latent), m.keys(x)))(module)
    close(scores[0], g[f"{case}.scores_unmasked_f64"], INDEX_SCORE)
    T = x.shape[1]
    masked = np.where(np.tril(np.ones((T, T), bool)), scores, scores.dtype.type(NOWHERE))
    expected = g[f"{case}.selected"].astype(bool)
    np.testing.assert_array_equal(by_sort(masked, keep)[0], expected)
    np.testing.assert_array_equal(by_mask(masked, keep)[0], expected)
    np.testing.assert_array_equal(as_mask(*by_top_k(masked, keep), T)[0], expected)


def as_mask(chosen, kept, S):
    mask = np.zeros((*chosen.shape[:-1], S), bool)
    for at in np.ndindex(chosen.shape):
        mask[(*at[:-1], chosen[at])] |= bool(kept[at])
    return mask


@pytest.mark.parametrize("dtype", WIDE)
def test_score_equals_oracle(dtype):
    rng = np.random.default_rng(0)
    q, w, keys = (rng.normal(size=s) for s in ((2, 5, 3, 4), (2, 5, 3), (2, 7, 4)))
    actual = run_score(*(of_type(a, dtype) for a in (q, w, keys)))
    for b in range(2):
        close(actual[b], oracles.index_scores(q[b], w[b], keys[b]), INDEX_SCORE)


def test_scores_of_zero_tie_whatever_their_sign():
    """relu leaves zeros; times a negative weight they are -0.0, which a sort would put last."""
    q, keys = -np.ones((1, 2, 1, 4)), np.ones((1, 6, 4))
    scores = run_score(q, np.array([[[-1.0], [1.0]]]), keys)
    assert not np.signbit(scores).any()
    for t in range(2):
        np.testing.assert_array_equal(by_sort(scores, 3)[0, t], [1, 1, 1, 0, 0, 0])
        np.testing.assert_array_equal(by_top_k(scores, 3)[0][0, t], [0, 1, 2])


SCORES = st.lists(st.sampled_from([NOWHERE, -1.0, 0.0, 0.5, 2.0]), min_size=12, max_size=12).map(
    lambda row: np.array(row, np.float32).reshape(1, 1, 12)
)


@settings(max_examples=20)
@given(SCORES, st.sampled_from([1, 4, 11, 12]))
def test_every_selection_keeps_the_best_and_of_equals_the_lowest_position(scores, keep):
    expected = oracles.select(scores, keep)
    np.testing.assert_array_equal(by_sort(scores, keep), expected)
    np.testing.assert_array_equal(by_mask(scores, keep), expected)
    np.testing.assert_array_equal(as_mask(*by_top_k(scores, keep), 12), expected)
    np.testing.assert_array_equal(as_mask(*by_radix(scores, keep), 12), expected)


def test_keeping_more_than_there_are_keeps_all():
    scores = np.array([[[0.0, NOWHERE, 3.0]]])
    for select in (by_sort, by_mask):
        np.testing.assert_array_equal(select(scores, 9), [[[True, False, True]]])


@pytest.mark.parametrize("block", [1, 4, 11])
def test_score_cache_in_blocks_equals_score_and_a_causal_mask(block):
    rng = np.random.default_rng(0)
    shapes = (2, 3, 3, 4), (2, 3, 3), (1, 2, S, 4)
    q, w, cache = (rng.normal(size=s) for s in shapes)
    step = step_of([6, 0], [3, 2], 3)
    unwritten = np.arange(S)[:, None] >= np.array([9, 2])[:, None, None]
    planted = np.where(unwritten, np.nan, cache)
    actual = quick_jit(score_cache, static_argnums=5)(q, w, planted, step.positions, step, block)
    causal = np.arange(S) <= np.asarray(step.positions)[..., None]
    expected = np.where(causal, run_score(q, w, cache[0]), NOWHERE)
    for b, n in enumerate([3, 2]):
        for a, e in zip(actual[b, :n], expected[b, :n], strict=True):
            seen = np.isfinite(e)
            np.testing.assert_array_equal(np.isfinite(a), seen)
            close(a[seen], e[seen], INDEX_SCORE)


@pytest.mark.parametrize("size", [1, 3, 4, 7, 9])
def test_blocks_of_queries_equal_one_block(size):
    """7 queries; the last block is padded, and blocks without a valid query are not computed."""
    x, y = tokens(2, 7), np.arange(14).reshape(2, 7)
    valid = np.array([[True] * 5 + [False] * 2, [True] * 2 + [False] * 5])
    one = lambda block: block[0] * 2 + block[1][..., None].astype(block[0].dtype)  # noqa: E731
    actual = quick_jit(lambda *arrays: over_queries(one, arrays, jnp.asarray(valid), size))(x, y)
    assert actual.shape == (2, 7, 24)
    np.testing.assert_array_equal(actual[valid], one((x, y))[valid])


# Sparse attention


@pytest.mark.parametrize("form", ("absorbed", "expanded"))
@pytest.mark.parametrize("slots, T", [(6, 6), (14, 6), (14, 3), (14, 1)])
def test_at_or_below_top_k_keys_selection_is_dense_bit_for_bit(run, form, slots, T):
    """In 6 slots, in 14 that hold no more than 6, and for all rows of a batch."""
    small = dict(mla=form, blocks=blocks_of(keys=3))
    sparse, plain = pair()
    x, lengths = tokens(2, T), [T, 1]
    results = []
    for module in (sparse, plain):
        fresh = fresh_mla(module.config, 2, slots, x.dtype, fill=math.nan)
        results.append(run(module, x, fresh, step_of([0, 0], lengths, T, **small))[0])
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(bits(results[0][b, :n]), bits(results[1][b, :n]))


@pytest.mark.parametrize("T", [1, 6])
def test_at_or_below_top_k_keys_the_radix_search_keeps_all(run, T):
    sparse, plain = pair()
    x, lengths = tokens(2, T), [T, 1]
    step = step_of([0, 0], lengths, T, mla="static")
    ys = [
        run(module, x, fresh_mla(module.config, 2, 14, x.dtype, fill=math.nan), step)[0]
        for module in (sparse, plain)
    ]
    for b, n in enumerate(lengths):
        close(ys[0][b, :n], ys[1][b, :n], MLA_LAYER)


@pytest.mark.parametrize("form", FORMS)
def test_short_rows_beside_long_ones_are_dense_too(run, form):
    """The first 6 queries of a long prompt, and a short prompt in its batch, keep every key."""
    sparse, plain = pair()
    x, lengths = tokens(2, 11), [11, 4]
    ys = []
    for module in (sparse, plain):
        fresh = fresh_mla(module.config, 2, 14, x.dtype)
        ys.append(run(module, x, fresh, step_of([0, 0], lengths, 11, mla=form, **SMALL))[0])
    close(ys[0][0, :6], ys[1][0, :6], MLA_LAYER)
    close(ys[0][1, :4], ys[1][1, :4], MLA_LAYER)
    assert np.abs(ys[0][0, 6:] - ys[1][0, 6:]).max() > 0.01


def test_above_top_k_keys_a_query_keeps_exactly_top_k_and_never_a_future_or_padded_one():
    sparse, _ = pair()
    lengths, T, keep = [11, 8, 2], 11, sparse.config.index_topk
    x = tokens(3, T)
    step = step_of([0] * 3, lengths, T)

    @quick_jit
    def choose(indexer, x):
        keys = write_rows(jnp.full((1, 3, 14, 4), jnp.nan), indexer.keys(x), step)
        q, w = indexer.queries(x, x[..., :10])
        return select_top_k(score_cache(q, w, keys, step.positions, step, 4), keep)

    chosen, kept = choose(sparse.indexer, x)
    for b, n in enumerate(lengths):
        for t in range(n):
            keys_kept = chosen[b, t][kept[b, t]]
            assert len(set(keys_kept)) == len(keys_kept) == min(keep, t + 1)
            assert keys_kept.max() <= t


@pytest.mark.parametrize("form", FORMS[:2])
def test_blocks_of_queries_do_not_change_a_sparse_layer(form):
    sparse, _ = pair()
    x, lengths = tokens(2, 11), [11, 7]
    ys = []
    for size in (SMALL["blocks"].select_bytes, 2 * 6 * 12 * 8 * 4):
        blocks = dict(mla=form, blocks=blocks_of(keys=4, select_bytes=size, dense_bytes=size))
        fresh = fresh_mla(sparse.config, 2, 14, x.dtype, fill=math.nan)
        call = quick_jit(lambda x, state, step: sparse(x, state, step))
        ys.append(call(x, fresh, step_of([0, 0], lengths, 11, **blocks))[0])
    for b, n in enumerate(lengths):
        close(ys[1][b, :n], ys[0][b, :n], MLA_LAYER)


@pytest.mark.parametrize("start, widest", [(0, 12), (2, 24), (20, 48)])
def test_keys_are_selected_among_few_slots_as_among_all(start, widest):
    """11 tokens after `start`, in 48 slots: the best 6 of the narrowest width that holds them."""
    sparse, _ = pair()
    x = tokens(1, 11)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda a: rng.normal(size=a.shape), fresh_mla(sparse.config, 1, 48, x.dtype)
    )
    ys = []
    for narrowest, widths in ((48, [48]), (4, [48, 24, 12, 6])):
        assert selection_widths(48, 6, narrowest) == widths
        blocks = blocks_of(narrowest_slots=narrowest)
        call = quick_jit(lambda x, state, step: sparse(x, state, step))
        ys.append(call(x, state, step_of([start], [11], 11, blocks=blocks))[0])
    assert min(w for w in widths if w >= start + 11) == widest
    np.testing.assert_array_equal(bits(ys[1]), bits(ys[0]))


def test_teaching_the_indexer_changes_no_value_and_lets_its_gradient_through(run):
    sparse, _ = pair()
    x = tokens(1, 9)
    fresh = fresh_mla(sparse.config, 1, 9, x.dtype)
    teach, plain = (step_of([0], [9], 9, mla="expanded", select=s) for s in ("teach", "plain"))
    close(run(sparse, x, fresh, teach)[0], run(sparse, x, fresh, plain)[0], MLA_LAYER)

    def loss(w_q, step):
        whole = jax.tree.unflatten(structure, [w_q if leaf is known else leaf for leaf in leaves])
        return jnp.sum(whole(jnp.asarray(x), jax.tree.map(jnp.asarray, fresh), step)[0] ** 2)

    leaves, structure = jax.tree.flatten(sparse)
    known = sparse.indexer.w_q.get_value()
    gradient = quick_jit(jax.grad(loss))
    assert np.abs(gradient(known, teach)).max() > 1e-3
    np.testing.assert_array_equal(gradient(known, plain), 0)
