"""KDA: recurrent = oracle, chunks = recurrent at every decay and length, padding stays outside."""

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
    as_float64,
    close,
    filled,
    fresh_kda,
    of_type,
    quick_jit,
    small_config,
    step_of,
    weights_of,
)
from tolerances import (
    CONVOLVE,
    INVERSE,
    KDA_CHUNKED,
    KDA_GATE,
    KDA_GRADIENT,
    KDA_LAYER,
    KDA_STEP,
    NORM,
)

from kimi_jax.model.attention.delta_rule import (
    chunked,
    recurrent,
    recurrent_step,
    transitions,
    unit_lower_inverse,
)
from kimi_jax.model.attention.rollback import ROLLBACKS
from kimi_jax.model.kda import KDA, convolve, l2_norm, log_decay

WIDE = ("float32", "float64")
MIDDLE = -10.0  # steep enough for every bound here, and the block of 16 still meets in its middle
DIFFERENCES = -math.inf
B, H, K, V = 2, 3, 12, 5

run_chunked = quick_jit(chunked, static_argnames=("chunk", "steepest"))
run_transitions = quick_jit(transitions, static_argnames=("chunk", "steepest"))
CHUNKED = pytest.mark.parametrize("run_chunked", [run_chunked, run_transitions])
run_recurrent = quick_jit(recurrent)
run_l2_norm = quick_jit(l2_norm)
run_log_decay = quick_jit(log_decay, static_argnums=3)
run_convolve = quick_jit(convolve)


def inputs(T, slowest, steepest, dtype, seed=0):
    """Random state, q, k, v, log decay in [steepest, slowest] and beta, as the layer makes them."""
    rng = np.random.default_rng(seed)
    q, k = (oracles.l2_norm(rng.normal(size=(B, T, H, K))) for _ in range(2))
    v, state = rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V))
    decay = rng.uniform(steepest, slowest, (B, T, H, K))
    beta = oracles.sigmoid(rng.normal(0, 2, (B, T, H)))
    return [of_type(a, dtype) for a in (state, q, k, v, decay, beta)]


def both_close(actual, expected, tolerances):
    for a, e in zip(actual, expected, strict=True):
        close(a, e, tolerances)


# The recurrence


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("slowest, steepest", [(-0.01, -0.02), (-0.01, -5), (-4.9, -5), (-1, -40)])
def test_recurrent_equals_oracle(slowest, steepest, dtype):
    arrays = inputs(19, slowest, steepest, dtype)
    expected = oracles.delta_rule(*map(as_float64, arrays))
    both_close(run_recurrent(*arrays), expected, KDA_STEP)


def test_the_delta_sees_the_decayed_state():
    """Two tokens, k = v = q = 1, beta = 1/2, g = -1: S1 = 1/2, S2 = S1/e + (1 - S1/e) / 2."""
    one, half, zero = np.ones((1, 2, 1, 1)), np.full((1, 2, 1), 0.5), np.zeros((1, 1, 1, 1))
    by_hand = 0.5 / math.e + (1 - 0.5 / math.e) / 2
    for form in (run_recurrent, functools.partial(run_chunked, chunk=2)):
        state, o = form(zero, one, one, one, -one, half)
        close(state, [[[[by_hand]]]], KDA_STEP)
        close(o, [[[[0.5]], [[by_hand]]]], KDA_STEP)
    undecayed = 0.5 / math.e + (1 - 0.5) / 2
    assert abs(by_hand - undecayed) > 0.1


def test_state_is_laid_out_keys_by_values():
    """One token with k = e_i, v = e_j writes entry [i, j] alone."""
    k, v = np.eye(K)[7].reshape(1, 1, 1, K), np.eye(V)[2].reshape(1, 1, 1, V)
    expected = np.zeros((1, 1, K, V))
    expected[0, 0, 7, 2] = 1
    for form in (run_recurrent, run_chunked):
        state = np.zeros((1, 1, K, V))
        state, _ = form(state, k, k, v, np.zeros((1, 1, 1, K)), np.ones((1, 1, 1)))
        close(state, expected, KDA_STEP)


@CHUNKED
@pytest.mark.parametrize("dtype", WIDE)
def test_three_chunks_of_8_equal_token_by_token(run_chunked, dtype):
    state, *tokens = inputs(24, -0.05, -5, dtype)
    whole = run_chunked(state, *tokens, chunk=8, steepest=-5.0)
    one, outputs = quick_jit(recurrent_step), []
    for t in range(24):
        state, o = one(state, *(x[:, t] for x in tokens))
        outputs.append(o)
    both_close(whole, (state, np.stack(outputs, 1)), KDA_CHUNKED)


@CHUNKED
@pytest.mark.parametrize("case", ["c0", "c0h", "c1", "c1h", "c2", "c2h", "c3", "c3h"])
@pytest.mark.parametrize("dtype", WIDE)
def test_both_forms_equal_golden(run_chunked, ops, case, dtype):
    g = ops("kda")
    q, k, v, decay, beta = (of_type(g[f"{case}.{n}"], dtype) for n in "q k v g beta".split())
    normed = run_l2_norm(q), run_l2_norm(k)
    close(normed[0], g[f"{case}.q_l2norm_f64"], NORM)
    close(normed[1], g[f"{case}.k_l2norm_f64"], NORM)
    expected = g[f"{case}.final_state_f64"], g[f"{case}.o_f64"]
    state = np.zeros(expected[0].shape, dtype)
    if case.endswith("h"):
        state = of_type(g[f"{case}.initial_state"], dtype)
    arrays = state, normed[0] * of_type(q.shape[-1] ** -0.5, dtype), normed[1], v, decay, beta
    both_close(run_recurrent(*arrays), expected, KDA_STEP)
    both_close(run_chunked(*arrays, chunk=64), expected, KDA_CHUNKED)


# Chunks


@CHUNKED
@pytest.mark.parametrize("chunk", [1, 3, 8, 16, 64, 1000])
@pytest.mark.parametrize("form", [MIDDLE, DIFFERENCES], ids=["middle", "differences"])
def test_chunked_equals_recurrent(run_chunked, chunk, form):
    """A state comes in, 37 tokens are no multiple of a chunk; decays reach the bound and beyond."""
    beyond = [] if form == MIDDLE else [(-1, -40)]
    for slowest, steepest in [(-0.01, -0.01), (-0.01, -5), (-5, -5), (-9, -9), *beyond]:
        for dtype in WIDE if chunk in (8, 64) else ["float32"]:
            arrays = inputs(37, slowest, steepest, dtype, seed=chunk)
            actual = run_chunked(*arrays, chunk=chunk, steepest=form)
            both_close(actual, run_recurrent(*arrays), KDA_CHUNKED)


@pytest.mark.parametrize("T", [1, 7, 129, 300])
def test_transitions_equal_recurrent_at_awkward_lengths(T):
    """Blocks of 32 at the bound of -5, where what lies above their diagonal overflows."""
    for dtype in WIDE:
        arrays = inputs(T, -0.01, -5, dtype, seed=T)
        actual = run_transitions(*arrays, chunk=64, steepest=-5.0)
        both_close(actual, run_recurrent(*arrays), KDA_CHUNKED)


@settings(max_examples=8)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([-5.0, DIFFERENCES]))
def test_chunked_equals_recurrent_for_any_length_and_chunk(T, chunk, steepest):
    arrays = inputs(T, -0.01, -5, jnp.float64, seed=T)
    actual = run_chunked(*arrays, chunk=chunk, steepest=steepest)
    both_close(actual, run_recurrent(*arrays), KDA_CHUNKED)


@CHUNKED
@pytest.mark.parametrize("form", [MIDDLE, DIFFERENCES], ids=["middle", "differences"])
@pytest.mark.parametrize("bound", [-5.0, -9.0, -10.0])
def test_all_gates_at_the_lower_bound_stay_finite(run_chunked, bound, form):
    arrays = inputs(70, bound, bound, "float32")
    actual = run_chunked(*arrays, chunk=64, steepest=form)
    both_close(actual, run_recurrent(*arrays), KDA_CHUNKED)


@CHUNKED
@pytest.mark.parametrize("bound", [-5.0, -20.0])
def test_a_layer_may_name_any_bound(run_chunked, bound):
    """Exponents that a block's middle cannot hold in float32 are met by differences."""
    arrays = inputs(37, bound, bound, "float32")
    actual = run_chunked(*arrays, chunk=16, steepest=bound)
    both_close(actual, run_recurrent(*arrays), KDA_CHUNKED)


@functools.lru_cache
def gradients(form):
    """Of a weighted sum of all that `form` returns, to all that it takes."""
    f = recurrent if form == "recurrent" else functools.partial(chunked, chunk=16, steepest=form)

    def loss(arrays, towards):
        return sum(jnp.sum(x * w) for x, w in zip(f(*arrays), towards, strict=True))

    return quick_jit(jax.grad(loss))


@pytest.mark.parametrize("form", [MIDDLE, DIFFERENCES], ids=["middle", "differences"])
@pytest.mark.parametrize("dtype", WIDE)
def test_gradients_of_chunked_are_finite_and_equal_those_of_recurrent(form, dtype):
    rng = np.random.default_rng(5)
    towards = [of_type(rng.normal(size=s), dtype) for s in ((B, H, K, V), (B, 21, H, V))]
    for slowest, steepest in [(-0.01, -0.5), (-9, -9), (-0.01, -9)]:
        arrays = inputs(21, slowest, steepest, dtype)
        expected = gradients("recurrent")(arrays, towards)
        both_close(gradients(form)(arrays, towards), expected, KDA_GRADIENT)


@CHUNKED
def test_padding_to_whole_chunks_changes_nothing(run_chunked):
    """No key, decay or beta: the state is passed on bit for bit."""
    state, q, k, v, decay, beta = inputs(9, -0.01, -5, jnp.float32)
    short = [x[:, :5] for x in (q, k, v, decay, beta)]
    cut = [np.concatenate([x, np.zeros_like(x[:, :4])], 1) for x in short]
    padded, alone = run_chunked(state, *cut, chunk=16), run_chunked(state, *short, chunk=16)
    np.testing.assert_array_equal(padded[0], alone[0])
    np.testing.assert_array_equal(padded[1][:, :5], alone[1])


@pytest.mark.parametrize("C", [1, 2, 3, 12, 16, 33])
@pytest.mark.parametrize("dtype", WIDE)
def test_unit_lower_inverse_equals_numpy(C, dtype):
    lower = np.tril(np.random.default_rng(C).uniform(-0.5, 0.5, (3, C, C)), -1)
    expected = np.linalg.inv(np.eye(C) + lower)
    close(quick_jit(unit_lower_inverse)(of_type(lower, dtype)), expected, INVERSE)


# Gates and norms


@pytest.mark.parametrize("case", ["g0", "g1", "g2"])
@pytest.mark.parametrize("dtype", WIDE)
def test_log_decay_equals_golden(ops, case, dtype):
    g = ops("kda_gate")
    expected, bound = g[f"{case}.out_f64"], float(g[f"{case}.lower_bound"][0])
    T, heads, width = expected.shape
    raw, a_log, dt_bias = (of_type(g[f"{case}.{n}"], dtype) for n in ("x", "A_log", "dt_bias"))
    raw, dt_bias = raw.reshape(T, heads, width), dt_bias.reshape(heads, width)
    bound = None if math.isnan(bound) else bound
    close(run_log_decay(raw, a_log, dt_bias, bound), expected, KDA_GATE)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_log_decay_equals_oracle(bound):
    rng = np.random.default_rng(2)
    arrays = rng.normal(0, 3, (2, 7, H, K)), rng.normal(0, 0.5, H), rng.normal(size=(H, K))
    close(run_log_decay(*arrays, bound), oracles.log_decay(*arrays, bound), KDA_GATE)


def test_the_bounded_gate_is_no_clamp_of_the_softplus_gate():
    raw, a_log, dt_bias = np.array([[[0.0, 8.0]]]), np.zeros(1), np.zeros((1, 2))
    bounded = run_log_decay(raw, a_log, dt_bias, -5.0)
    softplus = run_log_decay(raw, a_log, dt_bias, None)
    close(bounded, [[[-2.5, -5 / (1 + math.exp(-8))]]], KDA_GATE)
    close(softplus, [[[-math.log(2), -math.log1p(math.exp(8))]]], KDA_GATE)
    assert np.abs(bounded - np.maximum(softplus, -5.0)).max() > 1


def test_the_rate_of_a_head_is_its_own():
    """a_log is one value per head, also where heads are as many as channels."""
    raw, a_log = np.ones((1, 2, 2)), np.array([0.0, 1.0])
    decay = run_log_decay(raw, a_log, np.zeros((2, 2)), -5.0)
    assert (decay[0, 0] == decay[0, 0, 0]).all() and (decay[0, 1] == decay[0, 1, 0]).all()
    assert decay[0, 0, 0] != decay[0, 1, 0]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_l2_norm_sums_in_float32_for_bfloat16(scale):
    """512 equal squares: a bfloat16 sum stops growing. Small rows show the epsilon in the root."""
    x = of_type(np.full((1, 512), scale), jnp.bfloat16)
    normed = run_l2_norm(x)
    assert normed.dtype == jnp.float32
    close(normed, oracles.l2_norm(as_float64(x)), NORM)


def test_gated_norm_equals_golden(ops):
    """An identity for the gate's weight makes x the gate itself."""
    g = ops("norms_conv")
    heads, width = g["gnorm.x"].shape[1:]
    config = small_config(hidden=heads * width, kda_heads=heads, kda_value_dim=width)
    for dtype in WIDE:
        module = filled(KDA(config, dtype))
        module.w_gate.set_value(jnp.eye(heads * width, dtype=dtype))
        module.o_norm.set_value(jnp.asarray(g["gnorm.w"], dtype))
        o = of_type(g["gnorm.x"], dtype)[None]
        gate = of_type(g["gnorm.gate"].reshape(1, 5, -1), dtype)
        actual = quick_jit(lambda m, *a: m._gated(*a))(module, o, gate)
        close(actual.reshape(g["gnorm.y_f64"].shape), g["gnorm.y_f64"], NORM)


# The short convolution


@pytest.mark.parametrize("case", ["conv0", "conv1", "conv2"])
@pytest.mark.parametrize("dtype", WIDE)
def test_convolve_equals_golden(ops, case, dtype):
    g = ops("norms_conv")
    x, taps = of_type(g[f"{case}.x"], dtype), of_type(g[f"{case}.w"], dtype)[:, 0]
    rows, T, C = x.shape
    before = g.get(f"{case}.initial_last3", np.zeros((rows, C, 3)))
    window = of_type(before, dtype).swapaxes(1, 2)
    y, window = run_convolve(x, window, taps, np.full(rows, T, np.int32))
    close(y, g[f"{case}.y_f64"], CONVOLVE)
    close(window.swapaxes(1, 2), g[f"{case}.final_last3_f64"], CONVOLVE)


def test_convolve_ends_each_row_at_its_own_length():
    """Lengths 0, 1 and 2 keep inputs of the old window; what is beyond a length never enters."""
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 2, 3, 6, 7], np.int32)
    x, window, taps = (rng.normal(size=s) for s in ((6, 7, 4), (6, 3, 4), (4, 4)))
    planted = np.where(np.arange(7)[:, None] < lengths[:, None, None], x, np.nan)
    y, after = run_convolve(planted, window, taps, lengths)
    for b, n in enumerate(lengths):
        expected = oracles.convolve(x[b, :n], window[b], taps)
        close(y[b, :n], expected[0], CONVOLVE)
        np.testing.assert_array_equal(after[b], expected[1])


@pytest.mark.parametrize("pieces", [[1] * 9, [2, 7], [4, 1, 4], [8, 1]])
def test_convolve_in_pieces_equals_the_whole(pieces):
    rng = np.random.default_rng(0)
    x, window, taps = (rng.normal(size=s) for s in ((2, 9, 4), (2, 3, 4), (4, 4)))
    whole = run_convolve(x, window, taps, np.full(2, 9, np.int32))
    outputs, first = [], 0
    for n in pieces:
        y, window = run_convolve(x[:, first : first + n], window, taps, np.full(2, n, np.int32))
        outputs.append(y)
        first += n
    both_close((np.concatenate(outputs, 1), window), whole, CONVOLVE)


# The sublayer

FORMS = [dict(kda="recurrent"), dict(chunk=4), dict(chunk=64), dict(kda="transitions", chunk=4)]
VARIANTS = [(dict(), forms, dtype) for dtype in WIDE for forms in FORMS] + [
    (dict(full_rank_gate=False), FORMS[0], "float64"),
    (dict(decay_lower_bound=None), FORMS[0], "float64"),
    (dict(decay_lower_bound=None), FORMS[1], "float64"),
]


@functools.lru_cache
def layer(dtype="float64", **changes):
    return filled(KDA(small_config(**changes), dtype))


def tokens(B, T, dtype="float64", seed=3):
    return of_type(np.random.default_rng(seed).normal(size=(B, T, 24)), dtype)


@quick_jit
def run(module, x, state, step):
    return module(x, state, step)


@pytest.mark.parametrize("changes, forms, dtype", VARIANTS, ids=str)
def test_sublayer_equals_oracle(changes, forms, dtype):
    module, x = layer(dtype, **changes), tokens(1, 11, dtype)
    y, state = run(module, x, fresh_kda(module.config, 1, dtype), step_of([0], [11], 11, **forms))
    expected = oracles.kda(weights_of(module), as_float64(x[0]), module.config)
    both_close((y[0], state.memory[0, 0]), expected, KDA_LAYER)


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_a_ragged_batch_equals_its_prompts_alone(forms):
    """Rows of 0, 1, 1, 2 and 11 tokens; NaN beyond a length reaches no state, no valid output."""
    module, lengths = layer(), [0, 1, 1, 2, 11]
    x = tokens(5, 11)
    planted = np.where(np.arange(11)[:, None] < np.array(lengths)[:, None, None], x, np.nan)
    fresh = fresh_kda(module.config, 5, x.dtype)
    y, state = run(module, planted, fresh, step_of([0] * 5, lengths, 11, **forms))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))
    for b, n in enumerate(lengths):
        if n:
            fresh = fresh_kda(module.config, 1, x.dtype)
            alone = run(module, x[b : b + 1, :n], fresh, step_of([0], [n], n))
            close(y[b, :n], alone[0][0], KDA_LAYER)
            for a, e in zip(jax.tree.leaves(state), jax.tree.leaves(alone[1]), strict=True):
                close(a[0, b], e[0, 0], KDA_LAYER)


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_a_row_without_tokens_keeps_its_state_bit_for_bit(forms):
    module, x = layer(), tokens(2, 5)
    seen = fresh_kda(module.config, 2, x.dtype, fill=0.7)
    x[1] = np.nan
    _, state = run(module, x, seen, step_of([4, 9], [5, 0], 5, **forms))
    for a, e in zip(jax.tree.leaves(state), jax.tree.leaves(seen), strict=True):
        np.testing.assert_array_equal(a[0, 1], e[0, 1])
        assert (a[0, 0] != e[0, 0]).any()


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("garbage", [math.nan, 3.0])
def test_a_new_request_on_a_used_slot_equals_one_on_zeros(n, garbage):
    module, x = layer(), tokens(1, n)
    results = [
        run(module, x, fresh_kda(module.config, 1, x.dtype, fill), step_of([0], [n], n))
        for fill in (garbage, 0.0)
    ]
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [8, 1]])
def test_a_prompt_in_pieces_equals_the_whole(pieces):
    module, x = layer(), tokens(1, 9)
    whole = run(module, x, fresh_kda(module.config, 1, x.dtype), step_of([0], [9], 9))
    state, outputs, first = fresh_kda(module.config, 1, x.dtype), [], 0
    for n in pieces:
        y, state = run(module, x[:, first : first + n], state, step_of([first], [n], n))
        outputs.append(y)
        first += n
    both_close(
        [np.concatenate(outputs, 1), *jax.tree.leaves(state)], jax.tree.leaves(whole), KDA_LAYER
    )


def test_only_its_own_group_of_a_stacked_state_changes():
    module, x = layer(), tokens(1, 3)
    fresh = fresh_kda(module.config, 1, x.dtype, 0.5)
    stacked = jax.tree.map(lambda a: np.repeat(a, 3, 0), fresh)
    middle = dataclasses.replace(step_of([2], [3], 3), group=jnp.int32(1))
    y, state = run(module, x, stacked, middle)
    alone = run(module, x, fresh, step_of([2], [3], 3))
    close(y, alone[0], KDA_LAYER)
    for a, old, new in zip(*map(jax.tree.leaves, (state, stacked, alone[1])), strict=True):
        np.testing.assert_array_equal(a[::2], old[::2])
        close(a[1], new[0], KDA_LAYER)


def test_a_bfloat16_model_keeps_its_state_and_sums_in_float32():
    """The memory equals the oracle's over the same q, k, v, closer than bfloat16 could hold it."""
    module, x = layer("bfloat16"), tokens(1, 24, "bfloat16")
    fresh, step_ = fresh_kda(module.config, 1, jnp.bfloat16), step_of([0], [24], 24)

    @quick_jit
    def project(module):
        carried = jax.tree.map(jnp.asarray, fresh).at(0)
        conv_inputs = module._conv_inputs(jnp.asarray(x))
        q, k, v, _ = module._convolved(conv_inputs, carried, step_.lengths)
        return q, k, v, *module._gates(jnp.asarray(x))

    q, k, v, decay, beta = project(module)
    assert {a.dtype for a in (q, k, v, decay, beta)} == {jnp.dtype("float32")}
    arrays = map(as_float64, (q, k, v, decay, beta))
    memory, _ = oracles.delta_rule(np.zeros((1, H, K, V)), *arrays)
    for forms in FORMS[:2]:
        y, state = run(module, x, fresh, step_of([0], [24], 24, **forms))
        assert (y.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.float32)
        assert state.window_q.dtype == jnp.bfloat16
        close(state.memory[0], memory, KDA_LAYER)
        assert (state.memory != state.memory.astype(jnp.bfloat16)).mean() > 0.9


# Rows that may be taken back


def after_rows(rollback, state, *tokens, steepest):
    """Outputs, and the state after each row."""
    record, o = ROLLBACKS[rollback].of_rows(state, *tokens, steepest=steepest)
    counts = range(1, o.shape[1] + 1)
    rows = [record.state_after(state, jnp.full(len(state), n, jnp.int32)) for n in counts]
    return o, jnp.stack(rows)


run_rows = quick_jit(after_rows, static_argnums=0, static_argnames="steepest")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("T, steepest", [(1, -5.0), (8, -5.0), (18, -5.0), (5, -math.inf)])
def test_both_forms_equal_the_recurrence_after_every_row(T, steepest, dtype):
    """Decays from none to some that leave nothing of the state, in one batch."""
    state, *tokens = inputs(T, 0.0, max(steepest, -60.0), dtype)
    o, states = run_rows("checkpoints", state, *tokens, steepest=steepest)
    for n in range(1, T + 1):
        wanted, outputs = oracles.delta_rule(*map(as_float64, (state, *(x[:, :n] for x in tokens))))
        close(states[n - 1], wanted, KDA_CHUNKED)
    close(o, outputs, KDA_CHUNKED)
    replayed, replayed_states = run_rows("replay", state, *tokens, steepest=steepest)
    close(replayed, outputs, KDA_CHUNKED)
    for n in range(T):
        close(replayed_states[n], as_float64(states[n]), KDA_CHUNKED)
