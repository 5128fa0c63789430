"""The plan: the spec's figures, its arithmetic written out, what is really on a device, and every
argument that cannot be.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import AWKWARD, FAMILY, MESHED, write

import kimi_jax as kj
from kimi_jax.config.vision import VisionConfig
from kimi_jax.errors import PlacementError
from kimi_jax.model.attention.rollback import Verifying
from kimi_jax.model.implementations import DEFINITIONS
from kimi_jax.model.layers import Term
from kimi_jax.model.mxfp4 import MXFP4
from kimi_jax.model.state import MLAState
from kimi_jax.runtime.fitting import verdict
from kimi_jax.runtime.memory import INPUTS, ROWS, STATE_TERMS, WEIGHT_TERMS, Plan, plan
from kimi_jax.runtime.program import make_program

K3_1 = kj.Config.k3_1()
APART = Term.OTHER.value
HELIX = kj.Placement(keys="helix")
EVERY_PAD = ("heads", "experts", "vocab", "dense", "shared")
GB, MIB = 10**9, 2**20


def ranks(model: int, data: int = 1) -> dict[str, int]:
    return {"data": data, "model": model}


def ten_terms(planned: Plan) -> int:
    """What table 7 of the spec counts."""
    return sum(planned.terms[term] for term in WEIGHT_TERMS if term != APART)


# Table 7 of the spec, line by line; two bytes a parameter, expert bytes as they are packed.

EXPERT = 3 * 3584 * 3072 // 2 + 3 * 3584 * 3072 // 32
SHARDED = {
    "routed experts": 896 * 92 * EXPERT,
    "KDA": 2 * 69 * (5 * 7168 * 12288 + 128 * 12288 + 7168 * 96),
    "MLA": 2 * 24 * (1536 * 96 * 192 + 512 * 96 * 256 + 2 * 7168 * 12288),
    "shared experts": 2 * 92 * 3 * 7168 * 6144,
    "embedding and head": 2 * 2 * 163840 * 7168,
    "dense layers": 2 * 3 * 7168 * 33792,
}
REPLICATED = {
    "latent projections": 2 * 92 * 2 * 7168 * 3584,
    "router": 2 * 92 * 7168 * 896,
    "MLA latents down": 2 * 24 * 7168 * (1536 + 576),
    "indexer": 2 * 24 * (1536 * 4096 + 7168 * 128 + 7168 * 32),
}
# What the table leaves out or counts at two bytes: KDA's float32 parts, sharded and replicated;
# f_a; norms.
KDA_FLOAT32 = 4 * 69 * (3 * 4 * 12288 + 12288 + 96)
BESIDE = (
    4 * 69 * 128
    + 2 * 69 * 7168 * 128
    + 2 * (93 * (2 * 3 * 7168) + 3 * 7168)  # two norms and two mixtures a layer, and the output's
    + 2 * 24 * (1536 + 512 + 2 * 128)
    + 92 * (2 * 3584 + 4 * 896)
)


@pytest.mark.parametrize(
    "n, table, weights",
    [(4, 398.8, 399.0), (8, 205.3, 205.4), (16, 108.5, 108.6), (32, 60.1, 60.2)],
)
def test_the_table_of_the_spec(n, table, weights):
    planned = plan(K3_1, ranks(n))
    assert round(ten_terms(planned) / GB, 1) == table
    assert round(planned.weight_bytes / GB, 1) == weights
    assert abs(ten_terms(planned) - (1.44645e12 / n + 101.99e9 / n + 11.72e9)) < 0.03 * GB


@pytest.mark.parametrize("n", [1, 4, 8, 16, 32])
def test_every_term_is_its_arithmetic(n):
    expected = {term: count // n for term, count in SHARDED.items()} | REPLICATED
    expected[APART] = KDA_FLOAT32 // n + BESIDE
    terms = plan(K3_1, ranks(n)).terms
    assert {term: terms[term] for term in WEIGHT_TERMS} == expected


def test_the_whole_model_has_its_parameters():
    planned = plan(K3_1, ranks(1))
    experts = planned.terms["routed experts"]
    parameters = experts * 32 / 17 + (planned.weight_bytes - experts) / 2
    assert round(parameters / 1e12, 2) == 2.78


@pytest.mark.parametrize("n", [1, 8])
def test_what_a_request_keeps(n):
    first, second = (plan(K3_1, ranks(n), context=c).terms for c in (1000, 1001))
    assert first["KDA memory"] == 69 * 6 * MIB // n  # 414 MiB, 51.75 at n = 8
    assert first["KDA memory"] / MIB == {1: 414, 8: 51.75}[n]
    assert first["KDA windows"] == 69 * 3 * 3 * 12288 * 2 // n
    assert round(first["KDA windows"] / MIB, 1) == {1: 14.6, 8: 1.8}[n]
    assert second["latent cache"] - first["latent cache"] == 27_648
    assert second["index keys"] - first["index keys"] == 6_144
    assert first["latent cache"] == 27_648 * 1000
    assert first["lengths and outputs"] == 4 + 7168 * 2


def test_the_batch_is_padded_on_every_data_rank():
    one = plan(K3_1, ranks(8)).state_bytes
    assert plan(K3_1, ranks(8), batch=5).state_bytes == 5 * one
    spread = plan(K3_1, ranks(8, data=2), batch=5)
    assert (spread.state_bytes, spread.rows, spread.input_bytes) == (3 * one, 3, 3 * 8)


def test_a_sharded_latent_space():
    replicated = plan(K3_1, ranks(8)).terms
    sharded = plan(K3_1, ranks(8), kj.Placement(latent="sharded"))
    assert ten_terms(sharded) < 197 * GB
    for term in ("latent projections", "router"):
        assert sharded.terms[term] * 8 == replicated[term]


def test_experts_over_both_axes():
    spread = plan(K3_1, ranks(8, data=4), kj.Placement(expert_axes=("data", "model"))).terms
    assert spread["routed experts"] == SHARDED["routed experts"] // 32
    assert {t: spread[t] for t in WEIGHT_TERMS[1:]} == {
        t: plan(K3_1, ranks(8)).terms[t] for t in WEIGHT_TERMS[1:]
    }


@pytest.mark.parametrize("n", [5, 7, 11])
def test_zero_padded_to_odd_rank_counts(n):
    """Each sharded dim grows to a multiple of the ranks, then the arithmetic is the same."""
    up = lambda size: -(-size // n)  # noqa: E731
    heads = up(96)
    terms = plan(K3_1, ranks(n), kj.Placement(pad=EVERY_PAD)).terms
    assert terms["routed experts"] == up(896) * 92 * EXPERT
    assert terms["KDA"] == heads * SHARDED["KDA"] // 96
    assert terms["MLA"] == heads * SHARDED["MLA"] // 96
    assert terms["shared experts"] == 2 * 92 * 3 * 7168 * up(6144)
    assert terms["embedding and head"] == 2 * 2 * up(163840) * 7168
    assert terms["dense layers"] == 2 * 3 * 7168 * up(33792)
    assert terms["KDA memory"] == heads * 69 * 128 * 128 * 4
    assert terms["KDA windows"] == 69 * 3 * 3 * heads * 128 * 2
    for term, count in REPLICATED.items():
        assert terms[term] == count


def test_other_families_have_no_term_left_over():
    terms = plan(FAMILY, ranks(1), dtype="float32").terms
    assert terms["indexer"] == terms["index keys"] == 0
    assert terms["embedding and head"] == 4 * 83 * 72  # tied
    assert terms["routed experts"] == 4 * 3 * 10 * 3 * 96 * 32  # plain
    assert set(terms) == {*WEIGHT_TERMS, *STATE_TERMS, INPUTS}


def test_float64_doubles_float32():
    wide, narrow = (plan(FAMILY, ranks(1), dtype=dtype) for dtype in (jnp.float64, "float32"))
    assert wide.weight_bytes == 2 * narrow.weight_bytes
    assert wide.terms["latent cache"] == 2 * narrow.terms["latent cache"]


# What really lives on a device.


def on_one_device(tree, device) -> int:
    shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == device)


LOADED = {
    "model 2": (AWKWARD, ranks(2), dict(pad=("vocab",))),
    "model 4": (AWKWARD, ranks(4), dict(pad=EVERY_PAD, latent="sharded")),
    "both axes": (AWKWARD, ranks(2, data=2), dict(pad=EVERY_PAD, expert_axes=("data", "model"))),
    "family": (FAMILY, ranks(4, data=2), dict(pad=EVERY_PAD)),
}


@pytest.mark.parametrize("case", LOADED)
def test_equals_what_devices_hold(case, tmp_path):
    config, sizes, options = LOADED[case]
    placement, mesh = kj.Placement(**options), kj.make_mesh(**sizes)
    model = kj.load(
        write(config, tmp_path / "model"), mesh=mesh, placement=placement, dtype="bfloat16"
    )
    planned = plan(config, mesh, placement, batch=3, context=50)
    state = model.new_state(3, 50)
    for device in mesh.devices.flat:
        assert on_one_device(model.params, device) == planned.weight_bytes
        assert on_one_device(state, device) == planned.state_bytes


def test_equals_the_arguments_of_a_compiled_step():
    """No weight exists; the step is compiled from shapes, as `kimi-jax bench --compile` does."""
    config = dataclasses.replace(AWKWARD, layers=2, mla_layers=(1,), dense_layers=1, vocab=84)
    mesh = kj.make_mesh(data=2, model=2)
    program = make_program(
        config, mesh, dtype="bfloat16", quantization=MXFP4, implementations=DEFINITIONS
    )
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    ids, lengths = (jax.ShapeDtypeStruct(s, jnp.int32, sharding=rows) for s in [(4, 1), (4,)])
    step = program.step.lower(program.weight_shapes, program.state_shapes(4, 64), ids, lengths)
    planned = plan(config, mesh, batch=4, context=64)
    compiled = step.compile({"xla_backend_optimization_level": 0})  # only its arguments matter
    assert compiled.memory_analysis().argument_size_in_bytes == planned.total_bytes


def test_nothing_is_allocated():
    before = {id(x) for x in jax.live_arrays()}
    planned = plan(K3_1, ranks(12), kj.Placement(pad=("experts", "vocab")), batch=7, context=999)
    assert planned.total_bytes > 100 * GB and verdict(planned, 80 * GB)
    assert {id(x) for x in jax.live_arrays()} <= before


# Printing.


def test_prints_every_term_and_the_sums():
    planned = plan(K3_1, ranks(8))
    lines = str(planned).splitlines()
    assert lines[0] == (
        "one device of data 1 x model 8: bfloat16, MXFP4 experts, batch 1, context 4,096"
    )
    assert len({len(line) for line in lines[1:]}) == 1  # aligned
    for term, nbytes in planned.terms.items():
        (line,) = (line for line in lines if line.startswith(f"{term}  "))
        assert f" {nbytes:,} " in line
    assert "  180.8 GB  180,807,008,256   87.9%" in str(planned)
    sums = (planned.weight_bytes, planned.state_bytes, planned.total_bytes)
    for name, nbytes, line in zip(("weights", "state", "total"), sums, lines[-3:], strict=True):
        assert line.startswith(name) and f" {nbytes:,} " in line
    assert planned.total_bytes == planned.weight_bytes + planned.state_bytes + planned.input_bytes


def test_small_models_print_in_small_units():
    text = str(plan(AWKWARD, ranks(1)))
    assert " MB " in text and " GB " not in text


def test_a_mesh_that_does_not_fit_is_refused_before():
    with pytest.raises(PlacementError, match="KDA heads: 96 over 5 ranks"):
        plan(K3_1, ranks(5))
    with pytest.raises(PlacementError, match="unknown mesh axis 'rows'"):
        plan(K3_1, {"rows": 2})


def test_names_every_number_that_cannot_be():
    with pytest.raises(ValueError, match=r"batch must .* 0\ncontext must .* -1\ndtype .* int8"):
        plan(K3_1, ranks(8), batch=0, context=-1, dtype="int8")
    with pytest.raises(ValueError, match="context 2097152 is over the model's 1048576 tokens"):
        plan(K3_1, ranks(8), context=2**21)
    assert plan(dataclasses.replace(AWKWARD, max_positions=64), ranks(1)).context == 64


@pytest.mark.parametrize("n, weights", [(8, 206_866_960_112), (16, 110_191_471_488), (32, 0)])
def test_helix_shards_the_cache_of_a_million_tokens(n, weights):
    """27,648 bytes of latent rows a token, all layers together, and 6,144 of index keys; what q_b
    and the absorbed k_b weigh more, 1.661 (1 - 1 / n) GB, on every rank.
    """
    replicated, sharded = (
        plan(K3_1, ranks(n), p, batch=64, context=10**6) for p in (kj.Placement(), HELIX)
    )
    tokens = 64 * sharded.slots
    assert sharded.slots == (10**6 // (64 * n)) * 64 + min(64, 10**6 % (64 * n))
    assert sharded.terms["latent cache"] == 27_648 * tokens
    assert sharded.terms["index keys"] == 6_144 * tokens
    assert replicated.terms["latent cache"] == 27_648 * 64 * 10**6
    more = sharded.weight_bytes - replicated.weight_bytes
    assert more == pytest.approx(1.661e9 * (1 - 1 / n), rel=1e-3)
    assert f"{sharded.slots:,} of 1,000,000 keys a device, in blocks of 64; 33,792 B a key" in str(
        sharded
    )
    if n == 8:
        assert sharded.weight_bytes == weights


def test_what_sliced_rows_replicate_and_shard():
    """The shared experts, 24.31 (1 - 1 / n) GB more on every rank, unless they are sharded too."""
    full, replicated, sharded = (
        plan(K3_1, ranks(8), kj.Placement(**options))
        for options in (dict(), dict(rows="sliced"), dict(rows="auto", shared="sliced"))
    )
    assert sharded.weight_bytes == full.weight_bytes
    more = replicated.weight_bytes - full.weight_bytes
    assert more == pytest.approx(24.31e9 * 7 / 8, rel=1e-3)
    assert more == replicated.terms["shared experts"] - full.terms["shared experts"]


def test_a_plan_says_which_steps_slice_rows():
    auto = kj.Placement(rows="auto", sliced_from=64, shared="sliced")
    text = str(plan(K3_1, ranks(8), auto, batch=12))
    assert (
        "rows are full in decode steps of 12 rows, full in prefill steps of 16 rows, sliced in "
        "prefill steps of 4,096 rows"
    ) in text
    assert "sliced in decode steps of 64 rows" in str(plan(K3_1, ranks(8), auto, batch=64))
    assert "rows are" not in str(plan(K3_1, ranks(8)))


@pytest.mark.parametrize("block, slots", [(4, 64), (64, 500), (1, 33)])
def test_the_shards_of_a_helix_state_are_the_plan(tmp_path, block, slots):
    """What each device holds of the caches, and of KDA's recurrent states: one n-th."""
    place, mesh = kj.Placement(keys="helix", helix_block=block), kj.make_mesh(model=8)
    model = kj.load(write(MESHED, tmp_path / "meshed"), mesh, place, "float32")
    state = model.new_state(2, slots)
    planned = plan(MESHED, mesh, place, batch=2, context=slots, dtype="float32")
    wanted = planned.terms["latent cache"], planned.terms["index keys"], planned.terms["KDA memory"]
    for device in range(8):
        held = [0, 0, 0]
        for (_, _, name), array in state.named().items():
            if name in ("latents", "index_keys", "memory"):
                at = ("latents", "index_keys", "memory").index(name)
                held[at] += array.addressable_shards[device].data.nbytes
        assert tuple(held) == wanted
    one = plan(MESHED, ranks(1), batch=2, context=slots, dtype="float32")
    row = one.terms["latent cache"] // slots
    assert 0 <= wanted[0] - one.terms["latent cache"] / 8 <= row * block
    assert wanted[2] * 8 == one.terms["KDA memory"]


def test_a_plan_shows_what_the_chosen_sums_cost():
    """3,072 rows of K3 at 8 ranks: the ring sends 2 (n - 1) / n of the tensor and lands as much."""
    place = kj.Placement(prefill_reduce="ring_bf16", prefill_ring_rows=3072)
    planned = plan(kj.Config.k3(), {"model": 8}, place)
    how, count, cost = planned.sums(3072)
    assert (how.algorithm, count, cost.steps) == ("ring_bf16", 186, 14)
    assert cost.sent == cost.scratch == 2 * 7 * 3072 * 7168 * 2 // 8
    assert planned.sums(1024)[0].algorithm == "two_shot"
    assert planned.sums(4096, "decode")[0].algorithm == "sum"
    assert "steps of 3,072 rows: 186 sums by ring_bf16" in str(planned)
    assert "steps of 1,024 rows: 186 sums by two_shot" in str(planned)
    assert "sums by" not in str(plan(kj.Config.k3(), {"model": 8}))


# Arguments.

ODD = {
    **{"none": None, "true": True, "text": "8", "long text": "x" * 10**6, "escapes": "\x1b[2J\n"},
    **{"zero": 0, "negative": -1, "fraction": 1.5, "NaN": float("nan"), "infinity": float("inf")},
    **{"huge": 10**5000, "64 bits": 2**64, "list": [8], "table": {"data": {}}, "empty": {}},
    **{"bytes": b"\xff", "object": object(), "type": dict, "array": np.arange(3), "mesh": {8: 8}},
    **{"huge mesh": {"model": 10**5000}, "wide mesh": {"data": 2**16, "model": 2**16}},
}
ARGUMENTS = ("mesh", "placement", "batch", "context", "dtype", "packed")


def attempt(**options) -> tuple[Plan | None, str]:
    """The plan of these options, or the one error that refuses them."""
    unchecked = inspect.unwrap(plan)  # without the check of types that tests add
    try:
        return unchecked(AWKWARD, **{"mesh": ranks(1), **options}), ""
    except PlacementError as error:
        return None, str(error)


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_any_argument_plans_or_is_refused(value):
    for name in ARGUMENTS:
        planned, message = attempt(**{name: value})
        if planned is None:
            assert name in message or "mesh" in message
            assert all(line.isprintable() for line in message.split("\n"))
            assert len(message) < 1_000
        else:
            assert str(planned) and all(n >= 0 for n in planned.terms.values())


def test_every_odd_argument_is_in_one_error():
    options = {"mesh": {"rows": 2}, "placement": 5, "batch": 0, "context": "x", "dtype": 5}
    _, message = attempt(**options, packed=1)
    parts = ["unknown mesh axis 'rows'", "got 5", "batch must be", "context must be", "dtype must"]
    for part in (*parts, "packed must be true or false, got 1"):
        assert part in message


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(ARGUMENTS), st.sampled_from(list(ODD)), max_size=6))
def test_any_arguments_plan_or_are_refused_together(chosen):
    planned, message = attempt(**{name: ODD[odd] for name, odd in chosen.items()})
    alone = [name for name, odd in chosen.items() if attempt(**{name: ODD[odd]})[0] is None]
    if alone:
        assert planned is None and len(message.split("\n")) >= len(alone)


def test_large_numbers_are_counted_exactly():
    largest = 2**31 - 1
    planned = plan(AWKWARD, {"data": np.int64(1)}, batch=np.int64(largest), context=np.int32(4096))
    assert planned.state_bytes == largest * plan(AWKWARD, ranks(1)).state_bytes
    assert "GB" in str(planned) and type(planned.batch) is int


def test_packed_experts_come_in_groups_of_32():
    odd = dataclasses.replace(AWKWARD, latent=72, expert_ffn=33, quantized=False)
    assert plan(odd, ranks(1)).weight_bytes
    with pytest.raises(PlacementError, match="width 33 and latent 72 are not multiples of 32"):
        plan(odd, ranks(1), packed=True)


SIZES = [
    *("hidden", "vocab", "residual_block", "kda_heads", "kda_key_dim", "kda_value_dim"),
    *("conv_width", "heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"),
    *("dense_ffn", "moe_layer_freq", "shared_experts", "expert_ffn", "latent", "index_heads"),
    *("index_dim", "index_topk"),
]


@pytest.mark.parametrize("size", [1, 2**31 - 1])
def test_every_size_that_a_config_may_have_is_planned(size):
    plain = dataclasses.replace(AWKWARD, quantized=False)
    for name in SIZES:
        assert str(plan(dataclasses.replace(plain, **{name: size}), ranks(1)))
    everything = plan(dataclasses.replace(plain, **dict.fromkeys(SIZES, size)), ranks(1))
    assert everything.total_bytes > 0 and str(everything)


def test_a_vision_tower_is_replicated_and_its_image_noted():
    for n in (1, 8):
        planned = plan(K3_1, ranks(n), vision=VisionConfig.k3())
        assert planned.terms[Term.VISION.value] == 894_717_952
        assert planned.weight_bytes - plan(K3_1, ranks(n)).weight_bytes == 894_717_952
        assert "2,691 tokens and takes 817.9 MB" in str(planned)
    with pytest.raises(PlacementError, match="are 7168 wide, the model 72"):
        plan(AWKWARD, ranks(1), vision=VisionConfig.k3())


@pytest.mark.parametrize("rollback", ["replay", "checkpoints"])
def test_what_rows_to_verify_leave_is_the_plan(rollback):
    """A rank's share of the records of 3 requests with 4 rows each, and their output rows."""
    mesh = kj.make_mesh(1, 4)
    program = make_program(MESHED, mesh, dtype="bfloat16")
    leaves = jax.eval_shape(
        lambda: [
            Verifying.of(layer, 4, rollback).pending
            for layer in program.empty(3, 16, ranks=4).layers[0]
            if not isinstance(layer, MLAState)
        ]
    )
    found = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    planned = plan(MESHED, mesh, batch=3, context=16, drafts=3)
    assert planned.verified_bytes(rollback) == found + 3 * 4 * MESHED.hidden * 2
    assert planned.terms[ROWS] == planned.verified_bytes("replay")
    assert "4 rows to verify: " in planned.notes[-1]
    plain = plan(MESHED, mesh, batch=3, context=16)
    more = planned.row_bytes - plain.row_bytes
    assert 3 * more == planned.total_bytes - plain.total_bytes and ROWS not in plain.terms
    with pytest.raises(PlacementError, match="drafts must be a whole number >= 0, got -1"):
        plan(MESHED, mesh, drafts=-1)
