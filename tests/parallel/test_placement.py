"""What a placement refuses and completes, how it is written down, where arrays lie on a mesh."""

import dataclasses
import json
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as Spec
from models import AWKWARD, MESHED, write

import kimi_jax as kj
from kimi_jax.checkpoint.reader import Checkpoint
from kimi_jax.model.declared import declare
from kimi_jax.model.state import STATE_ROLES
from kimi_jax.parallel.mesh import mesh_sizes
from kimi_jax.parallel.placement import as_placement
from kimi_jax.parallel.roles import Role
from kimi_jax.runtime.program import make_program

PAD = ("heads", "experts", "vocab", "dense", "shared")
BOTH = ("data", "model")


def test_a_placement_survives_replace_pickle_and_json():
    place = kj.Placement(experts="auto", local_below=8, pad=["heads"], expert_axes=list(BOTH))
    again = kj.Placement(**json.loads(json.dumps(dataclasses.asdict(place))))
    assert place == again == pickle.loads(pickle.dumps(place)) == dataclasses.replace(place)
    assert len({place, again}) == 1 and again.expert_axes == BOTH


WRONG = [
    (dict(experts="some"), "experts must be one of exchange, local, auto, got 'some'"),
    (dict(pad="heads"), "pad must be a list of names, got 'heads'"),
    (dict(pad=["head"]), "pad: unknown dimension 'head', known are heads, experts"),
    (dict(expert_axes=["data"]), r"expert_axes must be one of .* got \('data',\)"),
    (dict(local_below=-1), "local_below must be a whole number >= 0, got -1"),
    (dict(local_below=True, rows="cut"), "rows must be .*\n.*local_below must be"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=str)
def test_wrong_options_are_named_together(options, message):
    with pytest.raises(kj.PlacementError, match=message):
        kj.Placement(**options)


ALL = {"vocabulary", "experts", "heads", "KDA heads", "dense intermediate", "shared intermediate"}
NAMED = {
    3: {"vocabulary", "experts"},
    5: ALL - {"vocabulary"},
    6: {"vocabulary", "experts"},
    7: ALL - {"experts"},
    9: ALL,
    12: {"vocabulary", "experts"},
    64: {"heads", "KDA heads"},
} | {n: set() for n in (1, 2, 4, 8, 16, 32)}


@pytest.mark.parametrize("n", NAMED)
def test_every_dimension_of_k3_that_does_not_divide_is_named(n):
    config = kj.Config.k3_1()
    if not NAMED[n]:
        return kj.Placement().check(config, {"model": n})
    with pytest.raises(kj.PlacementError) as refusal:
        kj.Placement().check(config, {"model": n})
    title, *lines = str(refusal.value).splitlines()
    assert title == f"a mesh of data 1 x model {n} does not divide:"
    sizes = {"heads": 96, "KDA heads": 96, "vocabulary": 163840, "experts": 896}
    sizes |= {"dense intermediate": 33792, "shared intermediate": 6144}
    assert {line.split(":")[0].strip() for line in lines} == NAMED[n]
    for line in lines:
        name = line.split(":")[0].strip()
        assert f"{name}: {sizes[name]} over {n} ranks (pad=" in line
    kj.Placement(pad=PAD).check(config, {"model": n})


ONE = {
    "heads": (dict(heads=6), "heads"),
    "KDA heads": (dict(kda_heads=6), "heads"),
    "vocabulary": (dict(vocab=82), "vocab"),
    "experts": (dict(experts=18), "experts"),
    "dense intermediate": (dict(dense_ffn=42), "dense"),
    "shared intermediate": (dict(expert_ffn=33, quantized=False), "shared"),
}


@pytest.mark.parametrize("name", ONE)
def test_each_dimension_alone_is_refused_by_name_and_completed_by_its_own_option(name):
    changes, pad = ONE[name]
    config = dataclasses.replace(MESHED, **changes)
    with pytest.raises(kj.PlacementError) as refusal:
        kj.Placement(pad=[other for other in PAD if other != pad]).check(config, {"model": 4})
    _, *lines = str(refusal.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [name]
    kj.Placement(pad=[pad]).check(config, {"model": 4})


def test_experts_over_both_axes_and_cut_latents_are_checked_too():
    with pytest.raises(kj.PlacementError, match="experts: 896 over 6 ranks"):
        kj.Placement(expert_axes=BOTH).check(kj.Config.k3(), {"data": 3, "model": 2})
    odd = dataclasses.replace(MESHED, latent=33, quantized=False)
    with pytest.raises(kj.PlacementError, match=r"latent width: 33 over 2 ranks$"):
        kj.Placement(latent="sharded", pad=PAD).check(odd, {"model": 2})


def test_sliced_rows_and_helix_keys_are_checked_like_the_rest():
    """What they cut is named; the shared experts' width only where it is cut."""
    sliced = kj.Placement(rows="sliced", keys="helix")
    odd = dataclasses.replace(MESHED, expert_ffn=33, quantized=False)
    sliced.check(odd, {"model": 4})
    for place in (kj.Placement(), dataclasses.replace(sliced, shared="sliced")):
        with pytest.raises(kj.PlacementError, match=r"shared intermediate: 33 over 4 ranks"):
            place.check(odd, {"model": 4})
    few = dataclasses.replace(MESHED, heads=6, kda_heads=12, experts=18)
    with pytest.raises(kj.PlacementError) as refusal:
        sliced.check(few, {"model": 8})
    for said in ("heads: 6 over 8", "KDA heads: 12 over 8", "experts: 18 over 8"):
        assert said in str(refusal.value)


def test_a_dense_layer_after_one_with_experts_is_refused_where_rows_are_sliced():
    alternating = dataclasses.replace(MESHED, moe_layer_freq=2)
    assert [alternating.is_dense(i) for i in range(3)] == [True, True, False]
    later = dataclasses.replace(alternating, layers=5, mla_layers=(2,))
    kj.Placement().check(later, {"model": 2})
    kj.Placement(rows="sliced").check(alternating, {"model": 2})
    for rows in ("sliced", "auto"):
        with pytest.raises(kj.PlacementError, match=r"may be dense, and layers 3 are"):
            kj.Placement(rows=rows).check(later, {"model": 2})


def test_blocks_that_32_bits_do_not_count_are_refused():
    kj.Placement(keys="helix", helix_block=2**28).check(MESHED, {"model": 4})
    kj.Placement(helix_block=2**40).check(MESHED, {"model": 4})
    for block in (2**29, 5 * 10**9):
        with pytest.raises(kj.PlacementError, match=f"helix_block: {block} over 4 ranks"):
            kj.Placement(keys="helix", helix_block=block).check(MESHED, {"model": 4})


def test_auto_slices_from_its_number_of_rows():
    place = kj.Placement(rows="auto", sliced_from=9)
    assert [place.slices_rows(rows) for rows in (1, 8, 9, 4096)] == [False, False, True, True]
    assert kj.Placement(rows="sliced").slices_rows(1)
    assert not kj.Placement(sliced_from=1).slices_rows(4096)


def test_a_mesh_is_refused_by_its_axis():
    with pytest.raises(kj.PlacementError, match="needs 4096 devices, JAX has 8"):
        kj.make_mesh(model=4096)
    with pytest.raises(kj.PlacementError, match="mesh axis data must be a positive integer, got 0"):
        kj.make_mesh(data=0)
    with pytest.raises(kj.PlacementError, match="unknown mesh axis 'pipe'"):
        kj.Placement().check(MESHED, {"pipe": 2})


def test_a_misfit_is_refused_before_anything_is_allocated(tmp_path):
    folder = write(AWKWARD, tmp_path / "awkward")
    before = len(jax.live_arrays())
    with pytest.raises(kj.PlacementError, match="KDA heads: 6 over 4 ranks"):
        kj.load(folder, kj.make_mesh(model=4))
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("value", [{}, "", "helix", 0, False, kj.Placement, ["rows"]], ids=repr)
def test_what_is_not_a_placement_is_refused_by_every_entry(tmp_path, value):
    folder = write(MESHED, tmp_path / "meshed")
    for entry in (
        lambda: as_placement(value),
        lambda: kj.load(folder, placement=value),
        lambda: kj.plan(MESHED, {"model": 2}, value),
        lambda: make_program(MESHED, placement=value),
    ):
        with pytest.raises(kj.PlacementError, match="placement must be a Placement, got"):
            entry()


# Any option, any value: one error that names every option that is wrong, or a placement that is
# plain data.

CHOICES = ("rows", "keys", "exchange", "experts", "latent", "shared", "prefill_reduce")
LISTS = ("expert_axes", "pad")
NUMBERS = {
    **dict.fromkeys(("sliced_from", "local_below", "prefill_ring_rows"), 0),
    **{"ring_fp32_hops": 0, "ring_granule_rows": 0, "ring_pieces": 1, "helix_block": 1},
}
DEFAULTS = dataclasses.asdict(kj.Placement())
ODD_VALUES = st.sampled_from([
    None, True, False, 0, 1, -1, 7, 2**63 - 1, 2**63, 10**400, 10**5000, -(10**5000), 1.0, 0.5,
    float("nan"), float("inf"), np.int64(3), np.uint8(0), np.float32(2), np.bool_(True),
    np.array([1, 2]), np.array(["model"]), np.array("full"), np.str_("sliced"), np.str_("full"),
    "", "full", "FULL", "full ", "auto", "helix", "model", "\x1b[31m", "x" * 10**6, b"full", [],
    ["model"], ("data", "model"), ["model", "data"], ["heads", "heads"], ["heads", 3], [[]], {},
    [["model"]], {"model": 1}, {"heads"}, object(), str, Ellipsis, [None], range(2), jnp.arange(2),
])  # fmt: skip


def is_right(name, value):
    if name in NUMBERS:
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        return whole and NUMBERS[name] <= int(value) < 2**63
    if name in CHOICES:
        known = {
            "rows": ("full", "sliced", "auto"), "keys": ("whole", "helix"),
            "experts": ("exchange", "local", "auto"), "shared": ("whole", "sliced"),
        }.get(name, (DEFAULTS[name],))  # fmt: skip
        return isinstance(value, str) and value in known
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return False
    if name == "pad":
        return set(value) <= set(PAD)
    return tuple(value) in (("model",), BOTH)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*CHOICES, *LISTS, *NUMBERS]), ODD_VALUES, max_size=5))
def test_odd_options_are_all_named_in_one_error(options):
    wrong = {name for name, value in options.items() if not is_right(name, value)}
    if not wrong:
        place = kj.Placement(**options)
        again = kj.Placement(**json.loads(json.dumps(dataclasses.asdict(place))))
        assert place == again and hash(place) == hash(again)
        assert all(type(value) in (str, int, tuple) for value in vars(place).values())
        return
    with pytest.raises(kj.PlacementError) as refusal:
        kj.Placement(**options)
    lines = str(refusal.value).splitlines()
    assert {line.split(" ")[0].rstrip(":") for line in lines} == wrong
    assert all(len(line) < 400 and line.isprintable() for line in lines)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([*NUMBERS]), st.sampled_from([1, 5, 2**31, 2**63 - 1])))
def test_large_numbers_that_are_accepted_can_be_asked_for(options):
    place = kj.Placement(keys="helix", rows="auto", experts="auto", **options)
    try:
        place.check(MESHED, {"model": 4})
    except kj.PlacementError as error:
        assert {line.split(":")[0].split(" ")[0] for line in str(error).splitlines()} <= {
            "helix_block",
            "ring_fp32_hops",
        }
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a threshold above the chunk
        for rows in (1, 4096):
            assert place.within(64).reduction("prefill", rows, {"data": 1, "model": 4})
    assert place.slices_rows(1) == (place.sliced_from <= 1)
    assert kj.plan(MESHED, {"model": 4}, place, context=64).total_bytes > 0


def test_every_role_has_its_axes():
    """Each role under the default placement, and where an option changes it."""
    default = {role: kj.Placement().axes(role) for role in (*Role, None)}
    replicated = (Role.CACHED_KEYS, Role.LATENT, None)
    assert default == {role: ("model",) for role in Role} | {Role.REQUESTS: ("data",)} | (
        dict.fromkeys(replicated, ())
    )
    changed = [
        (dict(latent="sharded"), {Role.LATENT: ("model",)}),
        (dict(expert_axes=BOTH), {Role.EXPERTS: BOTH}),
        (dict(rows="sliced"), {Role.SHARED_WIDTH: ()}),
        (dict(rows="sliced", shared="sliced"), {}),
        (dict(keys="helix"), {Role.CACHED_KEYS: ("model",), Role.QUERY_HEADS: ()}),
        (
            dict(keys="helix", exchange="values"),
            {Role.CACHED_KEYS: ("model",), Role.QUERY_HEADS: (), Role.VALUE_HEADS: ()},
        ),
    ]
    for options, others in changed:
        place = kj.Placement(**options)
        assert {role: place.axes(role) for role in default} == default | others, options


def test_specs_and_padding_follow_the_roles():
    place, both = kj.Placement(), kj.Placement(expert_axes=BOTH)
    experts = (None, Role.EXPERTS, None, None)
    assert place.spec((Role.HEADS, None)) == Spec("model", None)
    assert place.spec(experts) == Spec(None, "model", None, None)
    assert both.spec(experts) == Spec(None, BOTH, None, None)
    assert place.spec(STATE_ROLES["memory"]) == Spec(None, "data", "model", None, None)
    assert place.spec(STATE_ROLES["window_v"]) == Spec(None, "data", None, "model")
    assert place.spec(STATE_ROLES["latents"]) == Spec(None, "data", None, None)
    for name in ("latents", "index_keys"):
        helix = kj.Placement(keys="helix")
        assert helix.spec(STATE_ROLES[name]) == Spec(None, "data", "model", None)
    sizes = {"data": 2, "model": 4}
    assert place.padded(Role.HEADS, 5, sizes) == 8 and both.padded(Role.EXPERTS, 9, sizes) == 16
    assert place.padded(None, 5, sizes) == 5
    # 5 heads of 3 places each become 8 heads
    assert place.padded_shape((Role.HEADS, None), (5, 7), (15, 7), sizes) == (24, 7)


# What the layout of system A shards: everything else is replicated.
CUT = {
    *("embed", "head", "w_q", "w_k", "w_v", "conv_q", "conv_k", "conv_v", "w_decay_b", "a_log"),
    *("dt_bias", "w_beta", "w_gate", "w_o", "w_q_b", "w_k_b", "w_v_b", "w_up", "w_down"),
    *("s_gate", "s_up", "s_down", "w_gate_b"),
}


def test_the_released_model_is_cut_as_the_layout_says():
    mesh = kj.make_mesh(model=8)
    program = make_program(kj.Config.k3_1(), mesh, dtype="bfloat16")
    for w in declare(program.declared):
        cut = "model" in program.weight_specs[w.path]
        inside = "indexer" not in w.path and w.path[-1] in CUT
        assert cut == inside, w.path


def test_two_experts_a_device_over_both_axes(tmp_path):
    mesh, place = kj.make_mesh(2, 4), kj.Placement(expert_axes=BOTH)
    folder = write(MESHED, tmp_path / "meshed")
    model = kj.load(folder, mesh, place)
    w = next(w for w in declare(model.program.declared) if w.path[-2:] == ("experts", "w_gate"))
    stack = model.params[w.path]
    with Checkpoint(folder, MESHED) as file:
        whole = np.stack([file.read(name) for name in w.names])
    assert whole.shape[1] == 16
    for number, device in enumerate(mesh.devices.flat):  # data first, then model
        (shard,) = (s for s in stack.addressable_shards if s.device == device)
        assert shard.data.shape[1] == 2
        np.testing.assert_array_equal(shard.data, whole[:, 2 * number : 2 * number + 2])


def test_the_state_is_cut_as_the_placement_says(tmp_path):
    model = kj.load(write(MESHED, tmp_path / "meshed"), kj.make_mesh(2, 4))
    state = model.new_state(3, 128)  # completed to 4 rows
    (kda, *_, mla) = state.layers[0]
    shapes = lambda x: {s.data.shape for s in x.addressable_shards}  # noqa: E731
    H, K, V = MESHED.kda_heads, MESHED.kda_key_dim, MESHED.kda_value_dim
    assert shapes(kda.memory) == {(1, 2, H // 4, K, V)}
    assert shapes(kda.window_v) == {(1, 2, MESHED.conv_width - 1, H // 4 * V)}
    assert shapes(mla.latents) == {(1, 2, 128, MESHED.latent_row)}
    assert shapes(mla.index_keys) == {(1, 2, 128, MESHED.index_dim)}
    assert shapes(state.length) == {(2,)}
    assert mesh_sizes(model.mesh) == {"data": 2, "model": 4}


def test_a_mesh_of_any_size_is_refused_in_one_error():
    place = kj.Placement(keys="helix", prefill_reduce="ring_bf16", ring_fp32_hops=2**40)
    with pytest.raises(kj.PlacementError, match="a whole number of 16,610 bits"):
        place.check(kj.Config.k3(), {"model": 10**5000})
