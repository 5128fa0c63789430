"""The latent MoE: exact routing, grouped = dense = oracle at any load, nothing dropped."""

import functools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    as_float64,
    bits,
    close,
    filled,
    of_type,
    on_mesh,
    quick_jit,
    small_config,
    step_of,
    step_with,
    weights_of,
)
from tolerances import EXPERTS, MOE_LAYER, ROUTE

from kimi_jax.model.experts import dispatch
from kimi_jax.model.experts.blocks import block_rows, dense, grouped
from kimi_jax.model.experts.weights import Experts
from kimi_jax.model.layers import linear_wide
from kimi_jax.model.moe import MoE, limit_groups, route
from kimi_jax.model.mxfp4 import MXFP4, PLAIN, expert_quantization
from kimi_jax.numerics import at_least_float32

WIDE = ("float32", "float64")
E, A, L = 10, 3, 64


# Routing


@pytest.mark.parametrize("case", ["r0", "r1", "r2", "r3"])
@pytest.mark.parametrize("dtype", WIDE)
def test_route_equals_golden(ops, case, dtype):
    g = ops("router")
    experts, active, groups, kept, renormalize = map(int, g[f"{case}.cfg"])
    config = small_config(
        experts=experts, active_experts=active, expert_groups=groups, groups_kept=kept,
        renormalize=bool(renormalize), routed_scale=round(float(g[f"{case}.scale"][0]), 3),
    )  # fmt: skip
    x, w, bias = (of_type(g[f"{case}.{n}"], dtype) for n in ("x", "gate_weight", "bias"))
    ids, weights = quick_jit(lambda x, w, bias: route(linear_wide(x, w), bias, config))(x, w, bias)
    np.testing.assert_array_equal(np.sort(ids, -1), g[f"{case}.ids_sorted"])
    close(weights, np.take_along_axis(g[f"{case}.dense_weights_f64"], ids, -1), ROUTE)


@settings(max_examples=20)
@given(
    st.integers(0, 1000),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (5, 2), (10, 3)]),
    st.sampled_from(["sigmoid", "softmax"]),
    st.booleans(),
    st.sampled_from([1.0, 2.446]),
)
def test_route_equals_oracle(seed, groups, router, renormalize, scale):
    rng = np.random.default_rng(seed)
    config = small_config(
        expert_groups=groups[0], groups_kept=groups[1], router=router, renormalize=renormalize,
        routed_scale=scale, active_experts=2,
    )  # fmt: skip
    logits, bias = rng.normal(0, 2, (4, E)), rng.uniform(-0.3, 0.3, E)
    ids, weights = run_route(logits, bias, config)
    expected = oracles.route(logits, bias, config)
    np.testing.assert_array_equal(ids, expected[0])
    close(weights, expected[1], ROUTE)


run_route = quick_jit(route, static_argnums=2)


def test_groups_are_limited_by_the_sum_of_their_two_best():
    """The group of the best expert loses to one with two good ones."""
    choice = np.array([[0.9, 0.1, 0.1, 0.1, 0.1, 0.6, 0.6, 0.0, 0.0, 0.0]])
    limited = quick_jit(limit_groups, static_argnums=(1, 2))(choice, 2, 1)
    np.testing.assert_array_equal(limited[0, :5], [-np.inf] * 5)
    np.testing.assert_array_equal(limited[0, 5:], choice[0, 5:])


def test_equal_scores_go_to_the_lowest_expert():
    ids, weights = run_route(np.zeros((2, E)), np.zeros(E), small_config())
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    close(weights, np.full((2, 3), 1 / 3), ROUTE)


def test_a_bias_of_ten_always_chooses_and_never_weighs():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (50, E))
    ids, weights = run_route(logits, 10.0 * (np.arange(E) == 7), small_config())
    np.testing.assert_array_equal(ids[:, 0], 7)
    own = oracles.sigmoid(np.take_along_axis(logits, ids, -1))
    close(weights, own / own.sum(-1, keepdims=True), ROUTE)


def thirds(x):
    """Three bfloat16 values that sum to x, for which one has not enough bits."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16).astype(np.float64))
        x = x - parts[-1]
    return parts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_near_ties_of_896_experts_are_chosen_as_in_float64(monkeypatch, dtype):
    """Each row's logits are 896 values 1e-4 apart in some order, in the model's own type."""
    rng = np.random.default_rng(0)
    rows, experts, active = 4, 896, 16
    config = small_config(hidden=16 + 3 * rows, experts=experts, active_experts=active)
    module = filled(MoE(config, dtype, quantization=PLAIN))
    shared = rng.normal(size=16).astype(jnp.bfloat16).astype(np.float64)
    x, w = np.zeros((rows, config.hidden)), np.zeros((experts, config.hidden))
    x[:, :16], w[:, :16] = shared, rng.normal(size=(experts, 16)).astype(jnp.bfloat16)
    for p in range(rows):
        own = slice(16 + 3 * p, 19 + 3 * p)
        x[p, own] = 1
        w[:, own] = np.stack(thirds(rng.permutation(experts) * 1e-4 - w[:, :16] @ shared), -1)
    x, w = of_type(x, dtype), of_type(w, dtype)
    module.w_router.set_value(jnp.asarray(w))
    module.router_bias.set_value(jnp.asarray(np.zeros(experts, np.float32)))
    logits = as_float64(x) @ as_float64(w).T
    assert np.diff(np.sort(logits, -1), axis=-1).min() > 0.9e-4
    expected, _ = oracles.route(logits, np.zeros(experts), config)

    def spy(z, ids, weights, experts, group):
        routed.append((ids, weights))
        return jnp.zeros(z.shape, jnp.float32)

    @quick_jit
    @on_mesh
    def chosen(module, x, step):
        module(x, step)
        return routed[0]

    routed = []
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "grouped", spy)
    ids, weights = chosen(module, x, step_of([0], [rows], rows))
    np.testing.assert_array_equal(np.sort(ids, -1), np.sort(expected, -1))
    assert weights.dtype == jnp.float32


# Experts


@functools.lru_cache
def experts(dtype, packed):
    return filled(Experts(small_config(), dtype, expert_quantization(packed)))


@functools.lru_cache
def matrices(dtype, packed):
    return weights_of(experts(dtype, packed))


def run_form(form):
    """`form` of numpy arrays, compiled once for its shapes."""
    compiled = quick_jit(form)
    return lambda z, ids, weights, held, group=0: compiled(
        z, ids, of_type(weights, at_least_float32(z.dtype)), held, np.int32(group)
    )


run_grouped, run_dense = run_form(grouped), run_form(dense)


def rows(P, dtype, seed=0):
    return of_type(np.random.default_rng(seed).normal(0, 0.5, (P, L)), dtype)


def assignment(load, P):
    """ids [P, A] and weights [P, A]; ids outside 0..9 belong to no rank here."""
    rng = np.random.default_rng(len(load))
    ids = np.argsort(rng.random((P, E)), -1)[:, :A]
    if load == "uneven":  # three experts carry nearly all, some have none
        ids = np.where(rng.random((P, 1)) < 0.8, [[2, 7, 9]], ids)
    if load == "one":  # all pairs of all rows
        ids = np.full((P, A), 4)
    if load == "two without":
        ids = np.argsort(rng.random((P, 8)), -1)[:, :A] + 1
    if load == "outside":
        ids = np.where(rng.random((P, A)) < 0.5, rng.choice([-3, -1, E, E + 7], (P, A)), ids)
    if load == "nobody":
        ids = np.full((P, A), E)
    return ids.astype(np.int32), rng.uniform(0, 1, (P, A))


LOADS = ["even", "uneven", "one", "two without", "outside", "nobody"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("load", LOADS)
def test_grouped_equals_dense_equals_oracle(packed, dtype, load):
    """21 rows, no multiple of a block."""
    held, z = experts(dtype, packed), rows(21, dtype)
    ids, weights = assignment(load, 21)
    expected = oracles.experts(as_float64(z), ids, weights, matrices(dtype, packed), held.config)
    for form in (run_grouped, run_dense):
        close(form(z, ids, weights, held), expected, EXPERTS)


@pytest.mark.parametrize("P", [1, 2, 8, 63, 64, 65, 256])
def test_grouped_equals_oracle_at_every_block_size(P):
    held, z = experts("float64", False), rows(P, "float64")
    ids, weights = assignment("uneven", P)
    expected = oracles.experts(as_float64(z), ids, weights, matrices("float64", False), held.config)
    close(run_grouped(z, ids, weights, held), expected, EXPERTS)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_64_identical_rows_get_identical_results(packed):
    """All go to the same three experts: nothing is dropped."""
    held = experts("float32", packed)
    z, weights = np.tile(rows(1, "float32"), (64, 1)), np.full((64, A), 0.3)
    ids = np.tile(np.array([[8, 0, 5]], np.int32), (64, 1))
    y = run_grouped(z, ids, weights, held)
    np.testing.assert_array_equal(y, y[:1].repeat(64, 0))
    assert (y[0] != 0).any()
    close(y, run_dense(z, ids, weights, held), EXPERTS)


@pytest.mark.parametrize("form", [run_grouped, run_dense], ids=["grouped", "dense"])
def test_rows_of_nobody_get_zero_and_reach_nobody(form):
    """Half of the rows are padding, with NaN inside."""
    held, z = experts("float32", True), rows(20, "float32")
    ids, weights = assignment("even", 20)
    idle = np.arange(20)[:, None] % 2 == 1
    ids = np.where(idle, np.int32(E), ids)
    y = form(z, ids, weights, held)
    np.testing.assert_array_equal(y[1::2], 0)
    planted = form(np.where(idle, np.float32(np.nan), z), ids, weights, held)
    np.testing.assert_array_equal(planted[::2], y[::2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(dtype, packed):
    """Row 0 alone with its like, in other company, and at another place: one block size for all."""
    held, z = experts(dtype, packed), rows(24, dtype)
    ids, weights = assignment("uneven", 24)
    first = bits(run_grouped(z, ids, weights, held))[0]
    assert block_rows(24) == block_rows(9)
    others = rows(24, dtype, seed=9)
    others[0] = z[0]
    np.testing.assert_array_equal(bits(run_grouped(others, ids, weights, held))[0], first)
    crowd = np.broadcast_to(ids[0], ids.shape)
    np.testing.assert_array_equal(bits(run_grouped(others, crowd, weights, held))[0], first)
    back = bits(run_grouped(z[::-1], ids[::-1], weights[::-1], held))[-1]
    np.testing.assert_array_equal(back, first)
    fewer = bits(run_grouped(z[:9], ids[:9], weights[:9], held))[0]
    np.testing.assert_array_equal(fewer, first)


def test_experts_are_read_from_their_own_group():
    """A stack of two layers' experts: group 1 is the second layer."""
    first, second = experts("float64", False), filled(Experts(small_config(), "float64", PLAIN), 5)
    both = filled(Experts(small_config(), "float64", PLAIN))
    for name in ("w_gate", "w_up", "w_down"):
        pair = [np.asarray(getattr(m, name)[...])[0] for m in (first, second)]
        getattr(both, name).set_value(jnp.asarray(np.stack(pair)))
    z, (ids, weights) = rows(5, "float64"), assignment("even", 5)
    for form in (run_grouped, run_dense):
        for group, one in enumerate((first, second)):
            expected = form(z, ids, weights, one)
            close(form(z, ids, weights, both, group), expected, EXPERTS)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_each_expert_output_is_rounded_to_the_model_type_before_it_is_weighed(packed):
    """As in the reference: one expert of weight 1 gives a bfloat16 value, a sum of two need not."""
    held, z = experts("bfloat16", packed), rows(4, "bfloat16")
    one, two = (np.array([row] * 4, np.int32) for row in ([3, E, E], [3, 6, E]))
    for form in (run_grouped, run_dense):
        y = form(z, one, np.ones((4, A)), held)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, y.astype(jnp.bfloat16).astype(np.float32))
        y = form(z, two, np.full((4, A), 0.3), held)
        assert (y != y.astype(jnp.bfloat16).astype(np.float32)).any()


# The sublayer


@quick_jit
@on_mesh
def run(module, x, active, step):
    return module(x, step_with(active, step))


VARIANTS = [
    {},
    dict(latent_norm=False, shared_experts=0),
    dict(expert_groups=2, groups_kept=1, routed_scale=2.446),
    dict(router="softmax", renormalize=False),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("form", ["grouped", "dense"])
def test_sublayer_equals_oracle(changes, packed, form):
    """Shared experts read all of x; the routed sum is complete before its norm, then goes up."""
    config = small_config(**changes)
    for dtype in WIDE if not changes else ["float64"]:
        module = filled(MoE(config, dtype, expert_quantization(packed)))
        x = of_type(np.random.default_rng(3).normal(size=(6, 24)), dtype)
        y = run(module, x, np.ones(6, bool), step_of([0], [6], 6, moe=form))
        close(y, oracles.moe(weights_of(module), as_float64(x), config), MOE_LAYER)


def test_the_latent_norm_sees_the_complete_sum():
    """Doubled outputs of all experts leave the result as it is, the shared part included."""
    config = small_config(norm_eps=1e-20)
    module = filled(MoE(config, "float64", PLAIN))
    x, all_rows = np.random.default_rng(3).normal(size=(6, 24)), np.ones(6, bool)
    step = step_of([0], [6], 6)
    once = run(module, x, all_rows, step)
    module.experts.w_down.set_value(2 * module.experts.w_down[...])
    close(run(module, x, all_rows, step), once, MOE_LAYER)


@pytest.mark.parametrize("form", ["grouped", "dense"])
def test_padding_reaches_no_expert_and_disturbs_no_row(form):
    """Inactive rows get their shared experts alone, and NaN inside them stays there."""
    module = filled(MoE(small_config(), "float64", MXFP4))
    x = np.random.default_rng(3).normal(size=(8, 24))
    active = np.array([True, False, True, True, False, True, False, True])
    step = step_of([0], [8], 8, moe=form)
    expected = run(module, x, active, step)
    planted = run(module, np.where(active[:, None], x, np.nan), active, step)
    np.testing.assert_array_equal(planted[active], expected[active])
    w = weights_of(module)
    close(expected[active], oracles.moe(w, x, module.config)[active], MOE_LAYER)
    shared = oracles.mlp(x, *(w[f"shared.w_{name}"] for name in ("gate", "up", "down")), 4.0, 25.0)
    close(expected[~active], shared[~active], MOE_LAYER)


def test_a_bfloat16_sublayer_stays_near_its_float64_oracle():
    module = filled(MoE(small_config(), "bfloat16", MXFP4))
    x = of_type(np.random.default_rng(3).normal(size=(8, 24)), jnp.bfloat16)
    y = run(module, x, np.ones(8, bool), step_of([0], [8], 8))
    assert y.dtype == jnp.bfloat16
    close(y, oracles.moe(weights_of(module), as_float64(x), module.config), MOE_LAYER)


def test_packed_experts_are_bytes_and_the_bias_is_float32_in_a_bfloat16_model():
    module = MoE(small_config(), jnp.bfloat16, quantization=MXFP4)
    assert module.experts.w_gate.get_value().dtype == jnp.uint8
    assert module.experts.w_gate.get_value().shape == (E, 32, L // 2)
    assert module.experts.s_down.get_value().shape == (E, L, 1)
    assert module.router_bias.get_value().dtype == jnp.float32
