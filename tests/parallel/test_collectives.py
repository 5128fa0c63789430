"""How arrays move between devices: every movement against numpy, the variable all-to-all both ways.

Each function of a test runs on every device of a mesh; its inputs and outputs lead with the number
of the device (`per_device`), so that every rank's own numbers are given and seen.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import BOTH, C, X, groups, loads, per_device, same_bits, stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import quick_jit, small_config

from kimi_jax.model.implementations import Implementations
from kimi_jax.parallel import collectives
from kimi_jax.parallel.collectives import RaggedOffsets
from kimi_jax.parallel.mesh import DATA, MODEL, make_mesh
from kimi_jax.runtime.program import make_program

# data x model ranks, and the axis that is used
LINES = [(1, n, MODEL) for n in (1, 2, 3, 4, 8)]
MESHES = [*LINES, (2, 4, BOTH), (2, 4, MODEL), (4, 2, DATA)]
one_of = pytest.mark.parametrize


def test_there_are_eight_devices():
    assert jax.device_count() == 8


# Ranks, sums, slices


@one_of("data,model", [(1, 1), (2, 4), (4, 2), (1, 8)])
def test_ranks_are_counted_data_first(data, model):
    seen = []

    def ask(_):
        axes = (DATA, MODEL, BOTH, (MODEL,), (DATA,), ())
        seen.append([collectives.ranks(axis) for axis in axes])
        return [collectives.rank(axis) for axis in axes]

    device = np.arange(data * model, dtype=np.int32)
    by_data, by_model, both, *single, none = quick_jit(per_device(ask, data, model))(device)
    assert seen[0] == [data, model, data * model, model, data, 1]
    np.testing.assert_array_equal(by_data, device // model)
    np.testing.assert_array_equal(by_model, device % model)
    np.testing.assert_array_equal(both, device)
    np.testing.assert_array_equal(single, [by_model, by_data])
    np.testing.assert_array_equal(none, 0)


def row_counts(n):
    """One row, one fewer than ranks, as many, one more, and several each with a rest."""
    return sorted({1, max(1, n - 1), n, n + 1, 5 * n + 3})


def complete(x, rows):
    return np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])


@one_of("data,model,axis", MESHES, ids=str)
def test_rows_and_columns_are_cut_and_joined(data, model, axis):
    """Every slice equals numpy's, every way back is the identity, nothing but zeros is added."""
    n, rng = groups(data, model, axis).shape[1], np.random.default_rng(0)
    devices, L = data * model, 2 * n

    def move(x):
        P = len(x)
        own, columns = collectives.local_rows(x, axis), collectives.local_columns(x, axis)
        zeros = collectives.zero_padded_rows(own, P, axis)
        return dict(
            own=own,
            zeros=zeros,
            sum=collectives.all_reduce(zeros, axis=axis),
            columns=columns,
            to_rows=collectives.columns_to_rows(columns, axis),
            to_columns=collectives.rows_to_columns(own, P, axis),
            joined=collectives.all_gather(own, 0, axis),
            beside=collectives.all_gather(columns, 1, axis),
        )

    def each(xs):
        return [move(x) for x in xs]

    # Every group of devices has numbers of its own; all devices of a group hold the same ones.
    group_of = np.zeros(devices, int)
    for g, group in enumerate(groups(data, model, axis)):
        group_of[group] = g
    row_numbers = row_counts(n) if data == 1 else [n + 1]
    xs = [rng.normal(size=(group_of.max() + 1, P, L)) for P in row_numbers]
    for x in xs:
        x[0, 0, :2] = np.nan, -0.0
    results = quick_jit(per_device(each, data, model))([x[group_of] for x in xs])
    for whole, moved in zip(xs, results, strict=True):
        P, c = whole.shape[1], -(-whole.shape[1] // n)
        for g, group in enumerate(groups(data, model, axis)):
            x, padded = whole[g], complete(whole[g], n * c)
            for r, device in enumerate(group):
                got = {name: value[device] for name, value in moved.items()}
                own, mine = slice(r * c, (r + 1) * c), slice(r * L // n, (r + 1) * L // n)
                inside = (np.arange(P) >= r * c) & (np.arange(P) < (r + 1) * c)
                same_bits(got["own"], padded[own])
                same_bits(got["zeros"], np.where(inside[:, None], x, 0.0))
                np.testing.assert_array_equal(got["sum"], x)
                same_bits(got["columns"], x[:, mine])
                same_bits(got["to_rows"], padded[own].reshape(c, n, -1))
                same_bits(got["to_columns"], x[:, mine])
                same_bits(got["joined"], padded)
                same_bits(got["beside"], x)


@one_of("data,model,axis", MESHES, ids=str)
def test_a_reduce_scatter_gives_the_rows_of_the_all_reduce(data, model, axis):
    n = groups(data, model, axis).shape[1]
    x = np.random.default_rng(0).normal(size=(data * model, 3 * n, 5)).astype(np.float32)
    # Whole numbers as well: their sums are exact in any order, so that numpy's is the answer.
    whole = np.round(8 * x)

    def both(x):
        scattered = collectives.reduce_scatter(x, axis=axis)
        total = collectives.all_reduce(x, axis=axis)
        rows = collectives.local_rows(total, axis)
        return total, scattered, rows

    run = quick_jit(per_device(both, data, model))
    _, scattered, rows = run(x)
    same_bits(scattered, rows)
    total, scattered, _ = run(whole)
    for group in groups(data, model, axis):
        expected = whole[group].sum(0)
        for r, device in enumerate(group):
            np.testing.assert_array_equal(total[device], expected)
            np.testing.assert_array_equal(scattered[device], expected[3 * r : 3 * r + 3])


def embed(table, tokens):
    return collectives.all_reduce(collectives.embed(table, tokens))


@one_of("n", [1, 2, 3, 4, 8])
def test_embedding_is_a_table_lookup_with_padded_vocabulary(n):
    """What completes the table is never read: it holds NaN here, as do the first rows of ranks
    whose tokens are elsewhere.
    """
    vocab, D = 13, 3
    table = np.random.default_rng(0).normal(size=(vocab, D)).astype(np.float32)
    held = -(-vocab // n)
    padded = np.full((n * held, D), np.nan, np.float32)
    padded[:vocab] = table
    tokens = np.array([[12, 1, 2, 11, 1], [5, 8, 1, 12, 10]], np.int32)
    for first in range(0, vocab, held):
        if first not in tokens:
            padded[first] = np.nan
    shards = padded.reshape(n, held, D)
    run = quick_jit(per_device(embed, 1, n))
    everywhere = lambda x: np.broadcast_to(x, (n, *x.shape))  # noqa: E731
    np.testing.assert_array_equal(run(shards, everywhere(tokens)), everywhere(table[tokens]))
    all_ids = np.arange(vocab, dtype=np.int32)
    padded[:vocab] = table
    np.testing.assert_array_equal(run(shards, everywhere(all_ids)), everywhere(table))


def test_one_device_runs_without_collectives():
    def everything(x, table, tokens):
        own = collectives.local_rows(x)
        columns = collectives.columns_to_rows(collectives.local_columns(x))
        return (
            collectives.all_reduce(x, axis=BOTH),
            collectives.all_gather(x, 0),
            collectives.reduce_scatter(x),
            collectives.zero_padded_rows(own, 3),
            columns,
            collectives.rows_to_columns(own, 3),
            embed(table, tokens),
        )

    known = {"psum", "reduce_scatter", "all_gather", "all_to_all", "axis_index"}
    for n in (1, 2):
        shapes = np.ones((n, 4, 4)), np.ones((n, 7, 4)), np.ones((n, 2, 3), np.int32)
        text = str(jax.make_jaxpr(per_device(everything, 1, n))(*shapes))
        assert {name for name in known if f"{name}[" in text} == (known if n > 1 else set())


# Layout, pack, unpack


def counts_matrices(n, most):
    row = st.lists(st.integers(0, most), min_size=n, max_size=n)
    return st.lists(row, min_size=n, max_size=n).map(lambda rows: np.array(rows, np.int32))


def begins_of(sizes):
    """Where each of some consecutive blocks begins."""
    return np.array([sum(sizes[:k]) for k in range(len(sizes))], np.int32)


run_offsets = quick_jit(lambda counts: jax.vmap(collectives.ragged_offsets, (None, 0))(
    counts, jnp.arange(len(counts), dtype=jnp.int32)
))  # fmt: skip


@one_of("n", [1, 2, 3, 4, 8])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_ragged_offsets_equal_brute_force(n, data):
    """A list of (source, destination, row) in the order of each buffer says where all begins."""
    counts = data.draw(counts_matrices(n, 5))
    every = run_offsets(counts)
    assert all(field.dtype == np.int32 for field in every)
    for me in range(n):
        sent = [(me, j, k) for j in range(n) for k in range(counts[me, j])]
        received = [(i, me, k) for i in range(n) for k in range(counts[i, me])]
        at = RaggedOffsets(*(field[me] for field in every))
        assert at.send_sizes.sum() == len(sent) == counts[me].sum()
        assert at.recv_sizes.sum() == len(received) == counts[:, me].sum()
        for j in range(n):
            assert sent[at.send_offsets[j] : at.send_offsets[j] + at.send_sizes[j]] == [
                (me, j, k) for k in range(counts[me, j])
            ]
            assert received[at.recv_offsets[j] : at.recv_offsets[j] + at.recv_sizes[j]] == [
                (j, me, k) for k in range(counts[j, me])
            ]
            buffer_of_j = [(i, k) for i in range(n) for k in range(counts[i, j])]
            landed = buffer_of_j[at.landing_offsets[j] : at.landing_offsets[j] + counts[me, j]]
            assert landed == [(me, k) for k in range(counts[me, j])]
            assert at.landing_offsets[j] == every.recv_offsets[j, me]


@one_of("n", [1, 3, 8])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_blocks_come_back_from_a_buffer_without_gaps(n, data):
    c, X = 4, 2
    sizes = data.draw(counts_matrices(n, c))[0]
    blocks = np.random.default_rng(0).normal(size=(n, c, X))
    packed, back, shifted = run_pack(blocks, begins_of(sizes), sizes)
    in_a_row = np.concatenate([block[:size] for block, size in zip(blocks, sizes, strict=True)])
    same_bits(packed, complete(in_a_row, n * c))
    kept = np.arange(c) < sizes[:, None]
    same_bits(back, np.where(kept[..., None], blocks, 0.0))
    same_bits(shifted, back)


@quick_jit
def run_pack(blocks, begins, sizes):
    """The buffer; its blocks; those of a buffer that is full of NaN where nothing was put."""
    packed = collectives.to_buffer(blocks, begins, sizes)
    beyond = jnp.arange(len(packed)) >= sizes.sum()
    dirty = jnp.where(beyond[:, None], jnp.nan, packed)
    return tuple(
        [packed, *(collectives.to_blocks(buffer, begins, sizes) for buffer in (packed, dirty))]
    )


# The variable all-to-all. Its real primitive does not run on CPUs: a stand-in takes its place, and
# is itself held against plain loops.


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    """What is compiled under this fixture sends ragged rows by the stand-in."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", stand_in)


def ragged_twin(operands, outputs, input_offsets, send_sizes, output_offsets):
    """The same in numpy for all ranks at once, one row after another."""
    n, results = len(operands), [output.copy() for output in outputs]
    each = len(send_sizes[0]) // n
    for source in range(n):
        for k, size in enumerate(send_sizes[source]):
            for row in range(size):
                sent = operands[source][input_offsets[source][k] + row]
                results[k // each][output_offsets[source][k] + row] = sent
    return np.stack(results)


def run_stand_in(*arguments):
    n = len(arguments[0])
    call = functools.partial(stand_in, axis_name=MODEL)
    return quick_jit(per_device(call, 1, n))(*arguments)


def test_the_stand_in_gives_the_example_of_the_documentation():
    int32 = lambda *rows: np.array(rows, np.int32)  # noqa: E731
    arguments = [
        np.array([[1.0, 2.0, 2.0], [3.0, 4.0, 0.0]]), np.zeros((2, 4)), int32([0, 1], [0, 1]),
        int32([1, 2], [1, 1]), int32([0, 0], [1, 2]), int32([1, 1], [2, 1]),
    ]  # fmt: skip
    expected = [[1, 3, 0, 0], [2, 2, 4, 0]]
    np.testing.assert_array_equal(run_stand_in(*arguments), expected)
    np.testing.assert_array_equal(ragged_twin(*arguments[:5]), expected)
    arguments[5] = int32([1, 2], [2, 1])
    received = run_stand_in(*arguments)
    assert np.isnan(received[0]).all()
    np.testing.assert_array_equal(received[1], expected[1])


@one_of("n,each", [(1, 2), (3, 1), (4, 2), (8, 1)])
def test_the_stand_in_equals_plain_loops(n, each):
    """Slices with gaps between them on both sides; what no slice writes keeps its value."""
    rng = np.random.default_rng(n)
    sizes = rng.integers(0, 4, (n, n * each)).astype(np.int32)
    sizes[0] = 0
    received = sizes.reshape(n, n, each).swapaxes(0, 1).reshape(n, n * each)
    begins, landing = np.zeros((n, n * each), np.int32), np.zeros((n, n * each), np.int32)
    for r in range(n):
        gaps = rng.integers(0, 3, (2, n * each)).cumsum(1)
        begins[r] = begins_of(sizes[r]) + gaps[0]
        landing[r] = begins_of(received[r]) + gaps[1]
    landing = landing.reshape(n, n, each).swapaxes(0, 1).reshape(n, n * each)
    room = n * each * 6
    operands, outputs = rng.normal(size=(n, room, 2)), rng.normal(size=(n, room, 2))
    arguments = [operands, outputs, begins, sizes, landing]
    np.testing.assert_array_equal(run_stand_in(*arguments, received), ragged_twin(*arguments))


@functools.lru_cache
def run_exchange(data, model, axis):
    """Both transports there and back: padded out of blocks that hold zeros beyond their counts,
    ragged out of blocks that hold anything there. Counts are data: one program for all of them.
    """

    def both_ways(blocks, dirty, counts):
        padded = collectives.all_to_all_blocks(blocks, None, axis)
        ragged = collectives.all_to_all_blocks(dirty, counts, axis)
        return dict(
            padded=padded,
            ragged=ragged,
            padded_back=collectives.all_to_all_blocks(padded, None, axis),
            ragged_back=collectives.all_to_all_blocks(ragged, counts.T, axis),
            counts=collectives.gather_counts(counts[collectives.rank(axis)], axis),
        )

    return quick_jit(per_device(both_ways, data, model))


def check_exchange(data, model, axis, matrices, dtype=np.uint32):
    """`matrices` [groups, n, n]: the counts of each group of devices that exchange."""
    n, devices = matrices.shape[1], data * model
    rng = np.random.default_rng(0)
    random = rng.integers(1, 2**32, (devices, n, C, X)).astype(np.uint32)
    counts, real = np.zeros((devices, n, n), np.int32), np.zeros((devices, n, C, 1), bool)
    for matrix, group in zip(matrices, groups(data, model, axis), strict=True):
        counts[group] = matrix
        real[group] = (np.arange(C) < matrix[..., None])[..., None]
    dirty = random.view(dtype)
    blocks = np.where(real, dirty, dtype(0))
    got = run_exchange(data, model, axis)(blocks, dirty, counts)
    for group in groups(data, model, axis):
        for r, device in enumerate(group):
            for i, source in enumerate(group):
                same_bits(got["padded"][device, i], blocks[source, r])
    for name, expected in {
        "ragged": got["padded"],
        "padded_back": blocks,
        "ragged_back": blocks,
    }.items():
        same_bits(got[name], expected)
    np.testing.assert_array_equal(got["counts"], counts)


EXCHANGES = [*LINES[1:], (2, 4, BOTH), (4, 2, DATA)]


@one_of("data,model,axis", EXCHANGES, ids=str)
def test_exchange_at_extreme_counts(ragged_on_cpu, data, model, axis):
    """Padded and ragged transport place equal bytes, and the way back is the exact inverse."""
    count, n = groups(data, model, axis).shape
    every = [matrix for _, matrix in loads(n)]
    for k in range(len(every)):
        check_exchange(data, model, axis, np.stack([every[k - g] for g in range(count)]))


@one_of("data,model,axis", EXCHANGES, ids=str)
def test_exchange_at_any_counts(ragged_on_cpu, data, model, axis):
    count, n = groups(data, model, axis).shape

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.lists(counts_matrices(n, C), min_size=count, max_size=count))
    def check(matrices):
        check_exchange(data, model, axis, np.stack(matrices))

    check()


def test_numbers_are_exchanged_bit_for_bit(ragged_on_cpu):
    """NaN with payloads among them: every bit pattern travels as a number, too."""
    check_exchange(1, 4, MODEL, np.full((1, 4, 4), 2), np.float32)


@one_of("data,model,axis", [(1, 8, MODEL), (2, 4, BOTH), (2, 4, MODEL)], ids=str)
@one_of("dtype", [jnp.uint16, jnp.float32])
def test_the_real_ragged_exchange_is_accepted_for_gpus(data, model, axis, dtype):
    """Its arguments pass the checks of JAX, and it lowers to the collective that GPUs have."""
    n = groups(data, model, axis).shape[1]

    def there(blocks, counts):
        return collectives.all_to_all_blocks(blocks, counts, axis)

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in [
        ((8, n, C, X), dtype), ((8, n, n), jnp.int32)
    ]]  # fmt: skip
    traced = jax.jit(per_device(there, data, model)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 1
    members = ", ".join(map(str, groups(data, model, axis)[0]))
    assert f"[{members}]" in text


def test_cpus_take_the_padded_transport_and_refuse_the_ragged_one():
    config = small_config(heads=4, kda_heads=4, experts=12)
    assert make_program(config, make_mesh(1, 4)).implementations.transport == "padded"
    with pytest.raises(NotImplementedError, match=r"transport='ragged'"):
        make_program(config, make_mesh(1, 4), implementations=Implementations(transport="ragged"))
