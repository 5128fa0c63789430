"""The latent MoE on meshes: every way to place experts, rows and projections gives the sublayer of
one device.

What runs on a mesh takes rows per device and gives results per device, data-major, so that what
each rank holds is seen; `spread` and `gathered` go there and back.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from devices import BOTH, every_pair, groups, stand_in
from flax import nnx
from jax.sharding import PartitionSpec
from oracles import (
    as_float64,
    bits,
    close,
    filled,
    of_type,
    quick_jit,
    small_config,
    step_with,
    weights_of,
)
from tolerances import MOE_MESH

from kimi_jax.model.experts import dispatch
from kimi_jax.model.experts.dispatch import address_rows, dispatched
from kimi_jax.model.implementations import Implementations
from kimi_jax.model.layers import Expert
from kimi_jax.model.moe import MoE
from kimi_jax.model.mxfp4 import MXFP4, PLAIN
from kimi_jax.model.step import Step
from kimi_jax.numerics import at_least_float32
from kimi_jax.parallel import collectives
from kimi_jax.parallel.collectives import of_bits, to_bits
from kimi_jax.parallel.mesh import DATA, MODEL, make_mesh
from kimi_jax.parallel.placement import Placement

one_of = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def ragged_on_cpu(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", stand_in)


def sublayer(module, x, active, step):
    """All rows in, all rows out, whatever the rank holds between them."""
    step = step_with(active, step)
    y = module(collectives.local_rows(x) if step.is_sliced else x, step)
    return step.all_rows(y)


def per_device(f, config, data, model, place, names=None, dtype="float64", quantization=PLAIN):
    """f(module, *inputs, step) on every device, its weights cut as the placement says."""
    graph, params = nnx.split(MoE(config, dtype, quantization))
    flat = dict(nnx.to_flat_state(params))
    specs = {}
    for path, param in flat.items():
        group = (None,) if isinstance(param, Expert) else ()
        specs[path] = place.spec((*group, *param.get_metadata()["roles"]))

    def inside(weights, *inputs):
        whole = [(path, param.replace(weights[path])) for path, param in flat.items()]
        module = nnx.merge(graph, nnx.from_flat_state(whole))
        step = Step.of(
            jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), 1, names or Implementations(), place
        )
        results = f(module, *(x[0] for x in inputs), step)
        return jax.tree.map(lambda y: y[None], results)

    def outside(weights, *inputs):
        by_device = PartitionSpec(BOTH)
        return jax.shard_map(
            inside, mesh=make_mesh(data, model), in_specs=(specs, *[by_device] * len(inputs)),
            out_specs=by_device, check_vma=False,
        )(weights, *inputs)  # fmt: skip

    return outside


@functools.cache
def compiled(*settings, **options):
    """The sublayer on a mesh, one program for all weights and rows of a shape."""
    return quick_jit(per_device(sublayer, *settings, **options))


@functools.cache
def made(config, dtype="float64", quantization=PLAIN):
    """A module, its weights by path, and by name for the oracle."""
    module = filled(MoE(config, dtype, quantization))
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: np.asarray(param.get_value()) for path, param in params}, weights_of(module)


def spread(x, data, model):
    """Rows of all requests -> the rows of each device: cut over data, alike on all of `model`."""
    return np.repeat(x.reshape(data, -1, *x.shape[1:]), model, axis=0)


def gathered(y, data, model):
    """Inverse of `spread`; all ranks of `model` hold the same bits."""
    y = y.reshape(data, model, *y.shape[1:])
    np.testing.assert_array_equal(bits(y), bits(np.repeat(y[:, :1], model, 1)))
    return y[:, 0].reshape(-1, *y.shape[3:])


def expected(w, x, active, config):
    """The oracle's rows; of inactive ones, the shared experts alone."""
    shared = oracles.moe(w | {"w_latent_up": 0 * w["w_latent_up"]}, x, config)
    return np.where(active[:, None], oracles.moe(w, x, config), shared)


def experts_for(data, model, axes):
    """A number of experts that divides and is not a power of two for a rank: 5, 3 or 3 each."""
    return {2: 10, 4: 12, 8: 24}[data * model if axes == BOTH else model]


def random_rows(count, dtype="float64", seed=3):
    return of_type(np.random.default_rng(seed).normal(size=(count, 24)), dtype)


# Every placement


FACTORS = dict(
    mesh=[(1, 2), (1, 4), (1, 8), (2, 2), (2, 4)],
    rows=["one", "n - 1", "n", "n + 1", "5 n + 3"],
    way=["padded", "ragged", "local"],
    axes=[(MODEL,), BOTH],
    latent=["whole", "sharded"],
    hold=["full", "sliced", "sliced, shared too"],
    form=["grouped", "slots", "dense"],
    changes=[
        {},
        dict(latent_norm=False, shared_experts=0),
        dict(expert_groups=2, groups_kept=1, routed_scale=2.446),
        dict(router="softmax", renormalize=False),
    ],
)
COUNTS = {
    "one": lambda n: 1,
    "n - 1": lambda n: max(1, n - 1),
    "n": lambda n: n,
    "n + 1": lambda n: n + 1,
    "5 n + 3": lambda n: 5 * n + 3,
}


CASES = list(every_pair(list(FACTORS.values())))


def placed(way, axes=(MODEL,), latent="whole", hold="full"):
    """How the experts are run and rows are held, as a placement; and how rows travel."""
    experts = "local" if way == "local" else "exchange"
    rows, _, shared = hold.partition(", shared ")
    place = Placement(
        experts=experts, expert_axes=axes, latent=latent,
        rows=rows, shared="sliced" if shared else "whole",
    )  # fmt: skip
    return place, "ragged" if way == "ragged" else "padded"


@one_of(tuple(FACTORS), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_placement_equals_one_device(mesh, rows, way, axes, latent, hold, form, changes):
    config = small_config(experts=experts_for(*mesh, axes), **changes)
    place, transport = placed(way, axes, latent, hold)
    place.check(
        small_config(experts=config.experts, heads=8, kda_heads=8, dense_ffn=8), sizes(mesh)
    )
    total = mesh[0] * COUNTS[rows](mesh[1])
    x, active = random_rows(total), np.arange(total) % 5 != 3
    weights, w = made(config)
    run = compiled(config, *mesh, place, Implementations(moe=form, transport=transport))
    y = gathered(run(weights, spread(x, *mesh), spread(active, *mesh)), *mesh)
    close(y, expected(w, x, active, config), MOE_MESH)


@one_of("way,hold", [("padded", "full"), ("local", "sliced")])
def test_rows_that_only_pad_the_slices_reach_no_expert(monkeypatch, way, hold):
    """One row on four ranks, which hold a slice of one row each."""
    config, (place, _), seen = small_config(experts=12), placed(way, hold=hold), []
    grouped = dispatch.IMPLEMENTATIONS["grouped"]

    def counted(z, *rest):
        seen.append(len(z))
        return grouped(z, *rest)

    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "grouped", counted)
    run = per_device(sublayer, config, 1, 4, place, Implementations())
    x, active = spread(random_rows(1), 1, 4), spread(np.ones(1, bool), 1, 4)
    jax.eval_shape(run, made(config)[0], x, active)
    assert seen == [1]


def sizes(mesh):
    return {DATA: mesh[0], MODEL: mesh[1]}


@one_of("way", ["padded", "local"])
def test_a_bfloat16_sublayer_with_packed_experts_stays_near_its_oracle(way):
    config, (data, model) = small_config(experts=12), (1, 4)
    place, transport = placed(way)
    x, active = random_rows(9, jnp.bfloat16), np.ones(9, bool)
    weights, w = made(config, "bfloat16", MXFP4)
    run = compiled(
        config, data, model, place, Implementations(transport=transport), "bfloat16", MXFP4
    )
    y = gathered(run(weights, spread(x, data, model), spread(active, data, model)), data, model)
    assert y.dtype == jnp.bfloat16
    close(y, oracles.moe(w, as_float64(x), config), MOE_MESH)


# What each rank holds


@one_of(
    "mesh,axes,latent",
    [((1, 4), (MODEL,), "whole"), ((2, 4), BOTH, "whole"), ((2, 4), BOTH, "sharded")],
    ids=str,
)
def test_partial_outputs_sum_to_the_sublayer_and_are_zero_outside_the_own_rows(
    monkeypatch, mesh, axes, latent
):
    """Before the closing sum. Six rows on four ranks: the last one owns none."""
    config = small_config(experts=experts_for(*mesh, axes), shared_experts=0)
    place, (data, model) = placed("padded", axes, latent)[0], mesh
    x, (weights, w) = random_rows(6 * data), made(config)
    active = np.ones(6 * data, bool)
    monkeypatch.setattr(collectives, "all_reduce", lambda partial, how=None, axis=MODEL: partial)
    run = quick_jit(per_device(sublayer, config, data, model, place))
    partial = run(weights, spread(x, *mesh), spread(active, *mesh)).reshape(data, model, 6, 24)
    close(partial.sum(1).reshape(-1, 24), oracles.moe(w, x, config), MOE_MESH)
    if latent == "whole":
        for rank in range(model):
            own = np.arange(6) // 2 == rank
            assert (partial[:, rank, own] != 0).all()
            np.testing.assert_array_equal(bits(partial[:, rank, ~own]), 0)
    else:
        assert (partial != 0).all()


RUNS = [  # mesh, way, axes, latent
    ((1, 8), "padded", (MODEL,), "whole"),
    ((1, 8), "ragged", (MODEL,), "whole"),
    ((1, 8), "local", (MODEL,), "whole"),
    ((2, 4), "ragged", BOTH, "sharded"),
    ((2, 4), "local", BOTH, "sharded"),
]


@one_of("mesh,way,axes,latent", RUNS, ids=str)
def test_nothing_is_dropped_at_any_load(mesh, way, axes, latent):
    """64 rows, three experts on each of eight ranks, steered by a bias that chooses and never
    weighs.
    """
    config = small_config(experts=24)
    place, transport = placed(way, axes, latent)
    run = compiled(config, *mesh, place, Implementations(transport=transport))
    weights, w = made(config)
    expert, row = np.arange(24), np.arange(64)
    x, everyone = random_rows(64), np.ones(64, bool)
    alike = np.repeat(x[:1], 64, 0)

    def check(wanted, x=x, active=everyone):
        bias = np.where(wanted, 1e3, -1e3) if wanted is not None else w["router_bias"]
        held = weights | {("router_bias",): bias}
        y = gathered(run(held, spread(x, *mesh), spread(active, *mesh)), *mesh)
        close(y, expected(w | {"router_bias": bias}, x, active, config), MOE_MESH)
        return y

    check(expert // 3 == 5)  # all rows to one rank, all its experts
    check(np.isin(expert, [0, 10, 23]))  # every row to the same three ranks, the others get none
    check(expert // 3 != 2)  # one rank has none
    check((expert >= 9) & (expert < 15), active=row < 8)  # one source, two destinations
    check(None, active=row == 37)  # one row in all
    y = check(None, active=row < 0)  # no expert is hit
    assert (y != 0).all()
    # Identical rows get identical bits from one source rank; another one's share of the closing sum
    # comes in another order.
    for wanted in (None, expert // 3 == 7):
        y = check(wanted, x=alike).reshape(8, 8, 24)
        np.testing.assert_array_equal(y, np.repeat(y[:, :1], 8, 1))


@one_of("mesh,way,axes,latent", RUNS[1:], ids=str)
def test_padding_reaches_no_other_row(mesh, way, axes, latent):
    """NaN in inactive rows, the first among them, changes no bit of the others; 64 rows, so that
    programs are shared.
    """
    config = small_config(experts=24)
    place, transport = placed(way, axes, latent)
    run = compiled(config, *mesh, place, Implementations(transport=transport))
    weights, w = made(config)
    x, active = random_rows(64), np.random.default_rng(0).random(64) < 0.6
    active[0], active[-1] = False, False
    finite = gathered(run(weights, spread(x, *mesh), spread(active, *mesh)), *mesh)
    planted = np.where(active[:, None], x, np.nan)
    y = run(weights, spread(planted, *mesh), spread(active, *mesh))
    y = y.reshape(*mesh, -1, 24)[:, 0].reshape(64, 24)
    np.testing.assert_array_equal(bits(y[active]), bits(finite[active]))
    close(y[active], oracles.moe(w, x, config)[active], MOE_MESH)


@one_of("mesh,way,axes,latent", RUNS[1:], ids=str)
def test_the_latent_norm_sees_the_complete_sum(mesh, way, axes, latent):
    """A norm of each rank's partial sum, summed afterwards, is another function by far."""
    config, x, everyone = small_config(experts=24), random_rows(64), np.ones(64, bool)
    place, transport = placed(way, axes, latent)
    weights, w = made(config)
    run = compiled(config, *mesh, place, Implementations(transport=transport))
    y = gathered(run(weights, spread(x, *mesh), spread(everyone, *mesh)), *mesh)
    shared = expected(w, x, ~everyone, config)
    ids, chosen = oracles.route(x @ w["w_router"].T, w["router_bias"], config)
    held = {name: w["experts." + name] for name in ("w_gate", "w_up", "w_down")}
    partials = [
        oracles.experts(
            x @ w["w_latent_down"].T, np.where(ids // 3 == rank, ids, -1), chosen, held, config
        )
        for rank in range(8)
    ]
    norm = lambda rows: oracles.rms_norm(rows, w["latent_norm"], config.norm_eps)  # noqa: E731
    close(y, norm(sum(partials)) @ w["w_latent_up"].T + shared, MOE_MESH)
    planted = sum(map(norm, partials)) @ w["w_latent_up"].T + shared
    several = np.array([len(set(row)) > 1 for row in ids // 3])
    assert (np.abs(planted - y).max(-1) > 0.1)[several].all() and several.sum() > 50


# Messages


def strange(shape, dtype, seed=0, payloads=True):
    """Random numbers with NaN payloads, infinities, -0.0 and subnormal numbers among them."""
    x = of_type(np.random.default_rng(seed).normal(size=shape), dtype)
    words, size = bits(x).reshape(-1), 8 * x.dtype.itemsize
    sign, mantissa = 1 << (size - 1), {16: 7, 32: 23, 64: 52}[size]
    infinity, quiet = sign - (1 << mantissa), 1 << (mantissa - 1)
    special = [infinity, sign | infinity, infinity | quiet]
    special += [sign, 0, 1, sign | 2, (1 << mantissa) - 1]
    if payloads:
        special += [infinity | 1, sign | infinity | 5, infinity | quiet | 3]
    words[3 : 3 + 7 * len(special) : 7] = np.array(special, words.dtype)
    return words.view(x.dtype).reshape(shape)


@one_of("dtype", ["bfloat16", "float32", "float64"])
def test_bits_travel_exactly(dtype):
    """Ids to the largest that fit, weights wider than the row, and every bit of both."""
    wide = at_least_float32(dtype)
    z, weights = strange((5, 16), dtype), strange((5, 15), wide, 1)
    most = min(2**15, np.iinfo(bits(z).dtype).max)
    ids = np.array([[0, 1, 255], [256, 897, most], [1, 1, 1], [0, 0, 0], [2, 3, 5]], np.int32)

    @quick_jit
    def there_and_back(z, ids, weights):
        sent = to_bits(z, ids, weights)
        widths = (16, z.dtype), (3, jnp.int32), (15, weights.dtype)
        return sent, of_bits(sent, *widths), of_bits(sent[:, None], *widths)

    sent, back, deeper = there_and_back(z, ids, weights)
    assert sent.dtype == bits(z).dtype
    in_words = bits(weights).reshape(5, -1).view(sent.dtype)
    np.testing.assert_array_equal(sent, np.concatenate([bits(z), ids, in_words], -1))
    for x, y, one in zip((z, ids, weights), back, deeper, strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(bits(y), bits(x))
        np.testing.assert_array_equal(bits(one[:, 0]), bits(x))


@one_of(
    "mesh,axes,dtype",
    [
        ((1, 4), (MODEL,), "float32"),
        ((2, 4), (MODEL,), "float64"),
        ((1, 4), (MODEL,), "bfloat16"),
        ((2, 2), BOTH, "bfloat16"),
    ],
    ids=str,
)
def test_messages_and_counts(monkeypatch, mesh, axes, dtype):
    """What each rank sends is every row once for each rank that owns some of its experts, in order,
    bit for bit, with that rank's numbers and weights; nothing of inactive rows; and one counts
    matrix, which all ranks know. (CPUs widen bfloat16 on the way: a NaN loses its payload there.)
    """
    L, A, c, held, (data, model) = 64, 3, 6, 3, mesh
    devices, wide = data * model, at_least_float32(dtype)
    rng, n = np.random.default_rng(1), 4
    z = strange((devices, c, L), dtype, payloads=dtype != "bfloat16")
    weights = of_type(rng.uniform(size=(devices, c, A)), wide)
    ids = np.argsort(rng.random((devices, c, 12)), -1)[..., :A].astype(np.int32)
    ids[:, 1] = -1  # an inactive row
    z[:, 1], weights[:, 1] = np.nan, np.nan
    ids[1] = [9, 11, 10]  # all rows of a rank to one other
    ids[2] = -1  # a rank without rows
    sent, seen = [], []
    all_to_all_blocks = collectives.all_to_all_blocks
    gather_counts = collectives.gather_counts

    def spy_blocks(blocks, counts, axis):
        sent.append((blocks, counts))
        return all_to_all_blocks(blocks, counts, axis)

    def spy_counts(wanted, axis):
        seen.append(gather_counts(wanted, axis))
        return seen[-1]

    def run(module, z, ids, weights, step):
        rows = jnp.zeros(n * c, jnp.int32)  # those of all slices exist
        step = Step.of(rows, rows + 1, 1, step.implementations, step.place)
        dispatched(z, ids, weights, module.experts, step)
        (there, counts), (back, transposed) = sent
        return there, back, counts, transposed, seen[0]

    monkeypatch.setattr(collectives, "all_to_all_blocks", spy_blocks)
    monkeypatch.setattr(collectives, "gather_counts", spy_counts)
    monkeypatch.setattr(collectives, "_message", collectives._message.fun)  # no gradient: spied on
    config, place = small_config(experts=12), placed("ragged", axes)[0]
    names = Implementations(moe="dense", transport="ragged")
    program = quick_jit(per_device(run, config, *mesh, place, names, dtype))
    message, back, *matrices = program(made(config, dtype)[0], z, ids, weights)
    assert message.dtype == bits(z).dtype and back.dtype == z.dtype
    ratio = weights.dtype.itemsize // z.dtype.itemsize
    for group in groups(*mesh, MODEL if axes == (MODEL,) else BOTH):
        counts = np.zeros((n, n), int)
        for i, device in enumerate(group):
            for j in range(n):
                theirs = ids[device] // held == j
                rows = np.flatnonzero(theirs.any(-1))
                counts[i, j] = len(rows)
                block, mine = message[device, j], theirs[rows]
                first, beyond = block[: len(rows)], block[len(rows) :]
                np.testing.assert_array_equal(beyond, 0)
                np.testing.assert_array_equal(first[:, :L], bits(z[device, rows]))
                numbers = np.where(mine, ids[device, rows] % held + 1, 0)
                np.testing.assert_array_equal(first[:, L : L + A], numbers)
                travelled = np.ascontiguousarray(first[:, L + A :]).view(weights.dtype)
                own = np.where(mine, weights[device, rows], 0)
                assert first.shape[1] == L + A + ratio * A
                np.testing.assert_array_equal(bits(travelled), bits(own.astype(wide)))
                # What it asks for returns in as many rows; the rest is zero.
                returned = back[group[j], i]
                assert (as_float64(returned[: len(rows)]) != 0).any(-1).all()
                np.testing.assert_array_equal(bits(returned[len(rows) :]), 0)
        for matrix, right in zip(matrices, (counts, counts.T, counts), strict=True):
            for device in group:
                np.testing.assert_array_equal(matrix[device], right)


# The cost: sums and exchanges of a sublayer


COLLECTIVES = ("psum", "all_to_all", "ragged_all_to_all", "all_gather", "reduce_scatter")
SUMS = [  # mesh, way, axes, latent -> how many of each collective
    ((1, 1), "padded", BOTH, "sharded", (0, 0, 0, 0, 0)),
    ((1, 1), "local", BOTH, "sharded", (0, 0, 0, 0, 0)),
    ((1, 4), "padded", (MODEL,), "whole", (1, 2, 0, 0, 0)),
    ((1, 4), "ragged", (MODEL,), "whole", (1, 0, 2, 1, 0)),
    ((1, 4), "padded", (MODEL,), "sharded", (1, 4, 0, 0, 0)),
    ((2, 2), "padded", BOTH, "whole", (1, 2, 0, 0, 0)),
    ((1, 4), "local", (MODEL,), "whole", (1, 0, 0, 0, 0)),
    ((1, 4), "local", (MODEL,), "sharded", (2, 0, 0, 1, 0)),
    ((2, 2), "local", BOTH, "whole", (1, 0, 0, 1, 1)),
]


def count_collectives(mesh, place, rows=5, transport="padded"):
    config = small_config(experts=12)
    program = per_device(sublayer, config, *mesh, place, Implementations(transport=transport))
    x, active = spread(random_rows(rows * mesh[0]), *mesh), np.ones((mesh[0] * mesh[1], rows), bool)
    text = str(jax.make_jaxpr(program)(made(config)[0], x, active))
    return tuple(text.count(f" {name}[") for name in COLLECTIVES)


@one_of("mesh,way,axes,latent,counts", SUMS, ids=str)
def test_collectives_of_a_sublayer(monkeypatch, mesh, way, axes, latent, counts):
    monkeypatch.undo()  # traced, not compiled: the real ragged exchange
    place, transport = placed(way, axes, latent)
    assert count_collectives(mesh, place, transport=transport) == counts


@one_of("n, ideal", [(8, 36_179), (16, 35_577), (32, 33_344)])
def test_bytes_of_distinct_copies_of_10000_rows_are_those_of_the_formula(n, ideal):
    """K3 under sliced rows, bytes a row, layer and rank: one gather and one scatter of rows of H,
    and the copies of latent rows to other ranks and back; 16 of 896 experts drawn uniformly.
    """
    rows, H, L = 10_000, 7168, 3584
    ids = np.random.default_rng(0).random((rows, 896)).argsort(-1)[:, :16].astype(np.int32)
    wanted = jax.jit(lambda ids: address_rows(ids, 896 // n, n).is_sent)(ids)  # without the slots
    source = np.arange(rows) * n // rows
    remote = np.asarray(wanted) & (source[:, None] != np.arange(n))
    sent = 2 * (n - 1) / n * 2 * H + 2 * remote.sum() / rows * 2 * L / n
    assert sent == pytest.approx(ideal, rel=0.01)


def test_auto_takes_local_experts_below_its_number_of_rows():
    place = Placement(experts="auto", local_below=4)
    local, exchanged = (1, 0, 0, 0, 0), (1, 2, 0, 0, 0)
    for mesh in ((1, 4), (2, 4)):
        assert count_collectives(mesh, place, 3) == local
        assert count_collectives(mesh, place, 4) == exchanged
    assert count_collectives((1, 4), Placement(experts="auto"), 1) == exchanged
