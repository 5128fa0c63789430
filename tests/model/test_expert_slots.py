"""The routed experts in slots: equal to the definition at any load, dealt without loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import bits, close, filled, of_type, quick_jit, small_config
from tolerances import EXPERTS

from kimi_jax.model.experts import slots as module
from kimi_jax.model.experts.blocks import dense
from kimi_jax.model.experts.gathered import mxfp4_matrices, mxfp4_terms
from kimi_jax.model.experts.slots import deal, expected_slots, fill, most_slots, sizes, slots
from kimi_jax.model.experts.weights import Experts
from kimi_jax.model.mxfp4 import expert_quantization, unpack_numpy
from kimi_jax.numerics import at_least_float32

E, A, L = 10, 3, 64
ROWS = [0, 1, 7, 129]


@functools.lru_cache
def experts(dtype, packed):
    return filled(Experts(small_config(), dtype, expert_quantization(packed)))


def compiled(form):
    """`form` of numpy arrays, compiled once for its shapes."""
    run = quick_jit(form)
    return lambda z, ids, weights, held: run(
        z, ids, of_type(weights, at_least_float32(z.dtype)), held, np.int32(0)
    )


run_slots, run_dense = compiled(slots), compiled(dense)


def rows(P, dtype, seed=0):
    return of_type(np.random.default_rng(seed).normal(0, 0.5, (P, L)), dtype)


def routings(P):
    """ids [P, A] by what they are; ids outside 0..9 are no expert here."""
    rng = np.random.default_rng(P)
    even = np.argsort(rng.random((P, E)), -1)[:, :A]
    outside = rng.choice([-3, -1, E, E + 7], (P, A))
    found = {
        "even": even,
        "three experts": np.where(rng.random((P, 1)) < 0.8, [[2, 7, 9]], even),
        "one expert": np.full((P, A), 4),
        "two without": np.argsort(rng.random((P, 8)), -1)[:, :A] + 1,
        "some outside": np.where(rng.random((P, A)) < 0.5, outside, even),
        "none": np.full((P, A), -1),
    }
    return {name: ids.astype(np.int32) for name, ids in found.items()}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("P", ROWS)
def test_slots_equal_dense(P, dtype, packed):
    """From no slot in use to more than uniform routing needs: every branch of the program."""
    held, z = experts(dtype, packed), rows(P, dtype)
    weights = np.random.default_rng(1).uniform(0, 1, (P, A))
    for ids in routings(P).values():
        close(run_slots(z, ids, weights, held), run_dense(z, ids, weights, held), EXPERTS)


@pytest.mark.parametrize("P", [2, 5, 13, 129])
def test_each_routing_runs_the_smallest_branch_that_holds_it(P):
    """Skewed routing takes a larger one than uniform routing, and none is beyond the last."""
    layout = sizes(P, A, E, E, 1)
    used = {
        name: int(deal(jnp.asarray(ids), E, layout.R).first_slot[-1])
        for name, ids in routings(P).items()
    }
    for name, ids in routings(P).items():
        counts = np.bincount(ids[(ids >= 0) & (ids < E)], minlength=E)
        assert used[name] == np.sum(-(-counts // layout.R))
        assert used[name] <= layout.capacities[-1]
    assert used["none"] == 0
    chosen = {name: np.searchsorted(layout.capacities, n) for name, n in used.items()}
    assert len(layout.capacities) == 1 or len({*chosen.values()}) > 1


@pytest.mark.parametrize("block", [4, 1024])
@pytest.mark.parametrize("P, R", [(1, 1), (13, 2), (40, 16)])
def test_every_pair_has_its_own_place_in_a_slot_of_its_expert(monkeypatch, block, P, R):
    monkeypatch.setattr(module, "PAIRS_OF_A_BLOCK", block)
    for ids in routings(P).values():
        dealt = deal(jnp.asarray(ids), E, R)
        S = most_slots(P * A, E, R)
        expert, row = jax.device_get(fill(dealt, S, R))
        place, held = np.asarray(dealt.place), (ids >= 0) & (ids < E)
        np.testing.assert_array_equal(place[~held], -1)
        assert len({*place[held]}) == held.sum()
        np.testing.assert_array_equal(expert[place[held] // R], ids[held])
        np.testing.assert_array_equal(row.reshape(-1)[place[held]], np.nonzero(held)[0])


def test_any_routing_fits_the_largest_branch():
    """As many slots as a worst routing of the pairs takes: one pair in each expert's last slot."""
    for pairs, held, R in [(3, 10, 4), (10, 10, 4), (37, 10, 4), (192, 112, 2), (65536, 112, 96)]:
        extra = max(0, pairs - held) // R
        counts = np.zeros(held, int)
        counts[: min(pairs, held)] = 1
        counts[0] += extra * R
        assert counts.sum() <= pairs
        assert np.sum(-(-counts // R)) == most_slots(pairs, held, R)


@pytest.mark.parametrize("P", [1, 12, 64, 512, 4096])
def test_uniform_routing_of_k3_takes_the_expected_slots(P):
    """896 experts of which 112 are held, 16 a row: a branch is at most a fifth larger."""
    rng = np.random.default_rng(0)
    layout = sizes(P, 16, 112, 896, 1 << 26)
    expected = expected_slots(P, 16, 112, 896, layout.R)
    taken = []
    for _ in range(max(1, 2000 // P)):
        ids = np.argsort(rng.random((P, 896)), -1)[:, :16]
        counts = np.bincount(ids[ids < 112], minlength=112)
        taken.append(np.sum(-(-counts // layout.R)))
    assert abs(np.mean(taken) - expected) < 0.1 * expected
    if P > 1:
        branches = [min(c for c in layout.capacities if c >= n) for n in taken]
        assert np.mean(branches) < 1.2 * expected


def test_rows_without_experts_get_zero_and_reach_no_other_row():
    """Half of the rows are padding, with NaN inside."""
    held, z = experts("float32", True), rows(20, "float32")
    ids = routings(20)["even"]
    idle = np.arange(20)[:, None] % 2 == 1
    ids, weights = np.where(idle, np.int32(-1), ids), np.full((20, A), 0.3)
    y = run_slots(z, ids, weights, held)
    np.testing.assert_array_equal(y[1::2], 0)
    planted = run_slots(np.where(idle, np.float32(np.nan), z), ids, weights, held)
    np.testing.assert_array_equal(planted[::2], y[::2])


@pytest.mark.parametrize("P", [9, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(dtype, P):
    """Row 0 in other company. Another place in a slot or another branch of the program is the same
    on GPUs too, where no product is contracted with its sum; on CPUs it is only near.
    """
    held, z = experts(dtype, True), rows(P, dtype)
    ids, weights = routings(P)["even"], np.random.default_rng(1).uniform(0, 1, (P, A))
    first = bits(run_slots(z, ids, weights, held))[0]
    others = rows(P, dtype, seed=9)
    others[0] = z[0]
    np.testing.assert_array_equal(bits(run_slots(others, ids, weights, held))[0], first)
    crowd = np.broadcast_to(ids[0], ids.shape)
    close(run_slots(others, crowd, weights, held)[0], run_slots(z, ids, weights, held)[0], EXPERTS)
    back = run_slots(z[::-1], ids[::-1], weights[::-1], held)[-1]
    close(back, run_slots(z, ids, weights, held)[0], EXPERTS)


# All 256 bytes, of the outputs of one expert.
BYTES = np.random.default_rng(0).permutation(4 * 256).astype(np.uint8).reshape(1, 1, 16, 64)


@pytest.mark.parametrize("scale", [0, 1, 8, 127, 200, 254])
def test_all_numbers_and_scales_are_decoded_exactly(scale):
    scales = np.full((1, 1, 16, 4), scale, np.uint8)
    stacks = {"w": jnp.asarray(BYTES), "s": jnp.asarray(scales)}
    expected = unpack_numpy(BYTES, scales)[0, 0]
    matrices = mxfp4_matrices(stacks, 0, jnp.zeros(1, jnp.int32), "float64")[0]
    np.testing.assert_array_equal(
        matrices, np.concatenate([expected[:, ::2], expected[:, 1::2]], 1)
    )
    x = np.random.default_rng(1).normal(size=(1, 2, 128))
    terms, factor = mxfp4_terms(jnp.asarray(x), stacks, 0, jnp.zeros(1, jnp.int32))
    for row, term in zip(x[0], terms, strict=True):
        unit = 2.0 ** (scale - 127)
        close(factor * term[0].sum(-1) / unit, expected @ row / unit, EXPERTS)
