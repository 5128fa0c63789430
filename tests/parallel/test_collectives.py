"""How arrays move between devices: every movement against numpy, the variable all-to-all both ways.

Each function of a test runs on every device of a mesh; its inputs and outputs lead with the number
of the device (`per_device`), so that every rank's own numbers are given and seen.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Moved:
    """What one device of `n` made of the full array x [P, L] of its group, as rank `rank`."""

    x: np.ndarray
    n: int
    rank: int
    got: dict[str, np.ndarray]

    @property
    def rows_per_rank(self):
        return -(-len(self.x) // self.n)

    @property
    def padded(self):
        """x, zero-padded to a multiple of the ranks."""
        return complete(self.x, self.n * self.rows_per_rank)

    @property
    def local_rows(self):
        """This rank's rows of x, zero-padded."""
        first = self.rank * self.rows_per_rank
        return self.padded[first : first + self.rows_per_rank]

    @property
    def local_columns(self):
        """This rank's columns of x."""
        width = self.x.shape[1] // self.n
        return self.x[:, self.rank * width : (self.rank + 1) * width]


@functools.cache
def every_movement(data, model, axis):
    """`Moved` of every device and row count, by one program."""
    n, rng = groups(data, model, axis).shape[1], np.random.default_rng(0)

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

    # Every group of devices has numbers of its own; all devices of a group hold the same ones.
    group_of = np.zeros(data * model, int)
    for g, group in enumerate(groups(data, model, axis)):
        group_of[group] = g
    row_numbers = row_counts(n) if data == 1 else [n + 1]
    xs = [rng.normal(size=(group_of.max() + 1, P, 2 * n)) for P in row_numbers]
    for x in xs:
        x[0, 0, :2] = np.nan, -0.0
    run = quick_jit(per_device(lambda xs: [move(x) for x in xs], data, model))
    results = run([x[group_of] for x in xs])
    return [
        Moved(whole[g], n, rank, {name: np.asarray(value[device]) for name, value in got.items()})
        for whole, got in zip(xs, results, strict=True)
        for g, group in enumerate(groups(data, model, axis))
        for rank, device in enumerate(group)
    ]


on_meshes = one_of("data,model,axis", MESHES, ids=str)


@on_meshes
def test_local_rows_are_a_slice_padded_with_zeros(data, model, axis):
    for moved in every_movement(data, model, axis):
        same_bits(moved.got["own"], moved.local_rows)


@on_meshes
def test_local_rows_in_their_place_have_zeros_around_them(data, model, axis):
    for moved in every_movement(data, model, axis):
        rank_of = np.arange(len(moved.x)) // moved.rows_per_rank
        same_bits(moved.got["zeros"], np.where((rank_of == moved.rank)[:, None], moved.x, 0.0))


@on_meshes
def test_rows_in_their_places_sum_to_the_whole(data, model, axis):
    for moved in every_movement(data, model, axis):
        np.testing.assert_array_equal(moved.got["sum"], moved.x)


@on_meshes
def test_local_columns_are_a_slice(data, model, axis):
    for moved in every_movement(data, model, axis):
        same_bits(moved.got["columns"], moved.local_columns)


@on_meshes
def test_columns_become_local_rows_with_the_part_of_each_rank(data, model, axis):
    for moved in every_movement(data, model, axis):
        rows = moved.local_rows.reshape(moved.rows_per_rank, moved.n, -1)
        same_bits(moved.got["to_rows"], rows)


@on_meshes
def test_local_rows_become_local_columns(data, model, axis):
    for moved in every_movement(data, model, axis):
        same_bits(moved.got["to_columns"], moved.local_columns)


@on_meshes
def test_gathered_rows_are_the_whole_and_its_zeros(data, model, axis):
    for moved in every_movement(data, model, axis):
        same_bits(moved.got["joined"], moved.padded)


@on_meshes
def test_gathered_columns_are_the_whole(data, model, axis):
    for moved in every_movement(data, model, axis):
        same_bits(moved.got["beside"], moved.x)


@functools.cache
def reduced(data, model, axis):
    """Numbers and whole numbers, whose sums are exact in any order; of each the all-reduce, the
    reduce-scatter, and the local rows of the all-reduce.
    """

    def both(x):
        scattered = collectives.reduce_scatter(x, axis=axis)
        total = collectives.all_reduce(x, axis=axis)
        rows = collectives.local_rows(total, axis)
        return total, scattered, rows

    n, run = groups(data, model, axis).shape[1], quick_jit(per_device(both, data, model))
    x = np.random.default_rng(0).normal(size=(data * model, 3 * n, 5)).astype(np.float32)
    return {"numbers": (x, run(x)), "whole numbers": (np.round(8 * x), run(np.round(8 * x)))}


@on_meshes
def test_a_reduce_scatter_gives_the_rows_of_the_all_reduce(data, model, axis):
    for _, (_, scattered, rows) in reduced(data, model, axis).values():
        same_bits(scattered, rows)


@on_meshes
def test_an_all_reduce_is_the_sum_over_its_group(data, model, axis):
    x, (total, *_) = reduced(data, model, axis)["whole numbers"]
    for group in groups(data, model, axis):
        for device in group:
            np.testing.assert_array_equal(total[device], x[group].sum(0))


@on_meshes
def test_a_reduce_scatter_is_a_slice_of_the_sum_over_its_group(data, model, axis):
    x, (_, scattered, _) = reduced(data, model, axis)["whole numbers"]
    for group in groups(data, model, axis):
        rows = np.split(x[group].sum(0), len(group))
        for device, expected in zip(group, rows, strict=True):
            np.testing.assert_array_equal(scattered[device], expected)


def embed(table, tokens):
    return collectives.all_reduce(collectives.embed(table, tokens))


VOCAB, DIM = 13, 3
TABLE = np.random.default_rng(0).normal(size=(VOCAB, DIM)).astype(np.float32)


@functools.cache
def embedding(n):
    """(table [VOCAB, DIM], tokens) -> embeddings on each of n ranks; the vocabulary is padded with
    NaN to a multiple of the ranks.
    """
    run = quick_jit(per_device(embed, 1, n))

    def lookup(table, tokens):
        held = -(-VOCAB // n)
        padded = np.full((n * held, DIM), np.nan, np.float32)
        padded[:VOCAB] = table
        return run(padded.reshape(n, held, DIM), np.broadcast_to(tokens, (n, *tokens.shape)))

    return lookup


def assert_everywhere(found, expected):
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@one_of("n", [1, 2, 3, 4, 8])
def test_every_id_is_looked_up_in_a_padded_vocabulary(n):
    ids = np.arange(VOCAB, dtype=np.int32)[None]
    assert_everywhere(embedding(n)(TABLE, ids), TABLE[ids])


@one_of("n", [1, 2, 3, 4, 8])
def test_an_embedding_reads_no_row_of_ranks_that_hold_no_token(n):
    """NaN stands in the first row of those ranks, which an id that is not theirs must not read."""
    tokens = np.array([[12, 1, 2, 11, 1, 5, 8, 1, 12, 10]], np.int32)
    table = TABLE.copy()
    firsts = np.arange(0, VOCAB, -(-VOCAB // n))
    table[np.setdiff1d(firsts, tokens)] = np.nan
    assert_everywhere(embedding(n)(table, tokens), TABLE[tokens])


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
@settings(max_examples=25)
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
@settings(max_examples=25)
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


@functools.cache
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


def exchanged(data, model, axis, matrices, dtype=np.uint32):
    """Blocks, counts of each device, and what both transports give. `matrices` [groups, n, n]: the
    counts of each group of devices that exchange.
    """
    n, devices = matrices.shape[1], data * model
    rng = np.random.default_rng(0)
    random = rng.integers(1, 2**32, (devices, n, C, X)).astype(np.uint32)
    counts, real = np.zeros((devices, n, n), np.int32), np.zeros((devices, n, C, 1), bool)
    for matrix, group in zip(matrices, groups(data, model, axis), strict=True):
        counts[group] = matrix
        real[group] = (np.arange(C) < matrix[..., None])[..., None]
    dirty = random.view(dtype)
    blocks = np.where(real, dirty, dtype(0))
    return blocks, counts, run_exchange(data, model, axis)(blocks, dirty, counts)


def assert_blocks_reach_their_rank(data, model, axis, exchange):
    blocks, _, got = exchange
    for group in groups(data, model, axis):
        for rank, device in enumerate(group):
            same_bits(got["padded"][device], np.stack([blocks[source, rank] for source in group]))


def assert_both_transports_are_equal(data, model, axis, exchange):
    _, _, got = exchange
    same_bits(got["ragged"], got["padded"])


def assert_the_way_back_is_the_inverse(data, model, axis, exchange):
    blocks, _, got = exchange
    same_bits(got["padded_back"], blocks)
    same_bits(got["ragged_back"], blocks)


def assert_counts_are_gathered(data, model, axis, exchange):
    _, counts, got = exchange
    np.testing.assert_array_equal(got["counts"], counts)


CLAIMS = {
    "blocks reach their rank": assert_blocks_reach_their_rank,
    "both transports are equal": assert_both_transports_are_equal,
    "the way back is the inverse": assert_the_way_back_is_the_inverse,
    "counts are gathered": assert_counts_are_gathered,
}
EXCHANGES = [*LINES[1:], (2, 4, BOTH), (4, 2, DATA)]


@functools.cache
def at_extreme_counts(data, model, axis):
    count, n = groups(data, model, axis).shape
    every = [matrix for _, matrix in loads(n)]
    matrices = [np.stack([every[k - g] for g in range(count)]) for k in range(len(every))]
    return [exchanged(data, model, axis, each) for each in matrices]


@one_of("data,model,axis", EXCHANGES, ids=str)
@one_of("claim", CLAIMS)
def test_exchange_at_extreme_counts(ragged_on_cpu, data, model, axis, claim):
    for exchange in at_extreme_counts(data, model, axis):
        CLAIMS[claim](data, model, axis, exchange)


@one_of("data,model,axis", EXCHANGES, ids=str)
def test_exchange_at_any_counts(ragged_on_cpu, data, model, axis):
    """All of that, for counts that hypothesis draws."""
    count, n = groups(data, model, axis).shape

    @settings(max_examples=15)
    @given(st.lists(counts_matrices(n, C), min_size=count, max_size=count))
    def check(matrices):
        exchange = exchanged(data, model, axis, np.stack(matrices))
        for claim in CLAIMS.values():
            claim(data, model, axis, exchange)

    check()


@one_of("claim", CLAIMS)
def test_numbers_are_exchanged_bit_for_bit(ragged_on_cpu, claim):
    """NaN with payloads among them: every bit pattern travels as a number, too."""
    exchange = exchanged(1, 4, MODEL, np.full((1, 4, 4), 2), np.float32)
    CLAIMS[claim](1, 4, MODEL, exchange)


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


DIVISIBLE = small_config(heads=4, kda_heads=4, experts=12)


def test_cpus_take_the_padded_transport():
    assert make_program(DIVISIBLE, make_mesh(1, 4)).implementations.transport == "padded"


def test_cpus_refuse_the_ragged_transport():
    with pytest.raises(NotImplementedError, match=r"transport='ragged'"):
        make_program(
            DIVISIBLE, make_mesh(1, 4), implementations=Implementations(transport="ragged")
        )
