"""What is accepted as a mesh, by every entry that takes one, and what is refused."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh
from models import MESHED, write

import kimi_jax as kj
from kimi_jax.parallel.mesh import as_mesh, mesh_sizes, shard_counts, sizes_text
from kimi_jax.runtime.fitting import device_memory

AXES = ("data", "model")
PROMPTS = [[5, 6, 7, 8], [9, 10]]


def explicit(data, model, names=AXES):
    return jax.make_mesh((data, model), names, devices=jax.devices()[: data * model])


def reversed_axes(data, model):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices.T, AXES[::-1])


MESHES = {
    "explicit axis types": explicit,
    "axes in the other order": reversed_axes,
    "explicit axes in the other order": lambda d, m: explicit(m, d, AXES[::-1]),
    "manual axis types": lambda d, m: Mesh(
        np.array(jax.devices()[: d * m]).reshape(d, m), AXES, axis_types=(AxisType.Manual,) * 2
    ),
    "one axis explicit": lambda d, m: Mesh(
        np.array(jax.devices()[: d * m]).reshape(d, m),
        AXES,
        axis_types=(AxisType.Explicit, AxisType.Auto),
    ),
    "the last devices": lambda d, m: Mesh(
        np.array(jax.devices()[8 - d * m :][::-1]).reshape(d, m), AXES
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(MESHED, tmp_path_factory.mktemp("models") / "meshed")


@pytest.fixture(scope="module")
def expected(folder):
    model = kj.load(folder, kj.make_mesh(1, 2))
    return [reply.tokens for reply in model.generate(PROMPTS, max_new_tokens=3, stop_tokens=[])]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 4)], ids=str)
def test_every_kind_of_mesh_becomes_one_of_automatic_axes_on_its_devices(kind, sizes):
    mesh = as_mesh(MESHES[kind](*sizes))
    assert mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
    data, model = sizes
    first = kj.make_mesh(data, model)
    if kind == "the last devices":
        assert (
            mesh.devices.tolist()
            == np.flip(np.array(jax.devices()[-data * model :])).reshape(data, model).tolist()
        )
    else:
        swapped = kind == "explicit axes in the other order"
        expected = np.reshape(first.devices, (model, data)).T if swapped else first.devices
        assert (mesh.devices == expected).all()
    assert as_mesh(mesh) is mesh


@pytest.fixture(scope="module", params=["explicit axis types", "the last devices"])
def other_mesh(request):
    return MESHES[request.param](1, 2)


@pytest.fixture(scope="module")
def on_other_mesh(folder, other_mesh):
    return kj.load(folder, other_mesh)


def test_a_model_lives_on_the_devices_of_its_mesh(on_other_mesh, other_mesh):
    assert set(on_other_mesh.mesh.devices.flat) == set(other_mesh.devices.flat)


def test_other_meshes_generate_the_same(on_other_mesh, expected):
    replies = on_other_mesh.generate(PROMPTS, max_new_tokens=3, stop_tokens=[])
    assert [reply.tokens for reply in replies] == expected


def test_placements_are_checked_against_other_meshes(other_mesh):
    kj.Placement().check(MESHED, other_mesh)


def test_other_meshes_are_planned_the_same(on_other_mesh, other_mesh):
    plans = [kj.plan(MESHED, mesh) for mesh in (other_mesh, on_other_mesh.mesh)]
    assert plans[0].total_bytes == plans[1].total_bytes


def test_a_state_moves_to_another_mesh(folder, on_other_mesh, other_mesh):
    state = kj.load(folder).new_state(2, 16)
    assert kj.move(state, kj.Placement(), other_mesh).home.mesh == on_other_mesh.mesh


def test_the_memory_of_other_meshes_is_found(other_mesh):
    assert device_memory(other_mesh)


# `jax.set_mesh` is the caller's own: models run on their own mesh all the same.

SET_BY_CALLER = {
    "explicit": lambda: explicit(1, 2),
    "other": lambda: kj.make_mesh(2, 2),
    "third": lambda: jax.make_mesh((8,), ("x",)),
}


@pytest.fixture(params=SET_BY_CALLER)
def under_another_mesh(request, folder):
    """A model on 2x2 devices, loaded and used under a mesh that the caller set."""
    with jax.set_mesh(SET_BY_CALLER[request.param]()):
        yield kj.load(folder, explicit(2, 2))


def test_a_mesh_set_by_the_caller_does_not_matter_to_generation(under_another_mesh, expected):
    replies = under_another_mesh.generate(PROMPTS, max_new_tokens=3, stop_tokens=[])
    assert [reply.tokens for reply in replies] == expected


def test_a_mesh_set_by_the_caller_does_not_matter_to_steps_and_moves(under_another_mesh):
    model = under_another_mesh
    _, state = model.prefill(model.new_state(3, 16), np.arange(6).reshape(3, 2) + 3)
    logits, state = model.decode(state, np.array([4, 5, 6]))
    assert logits.shape == (3, MESHED.vocab)
    assert kj.move(state, kj.Placement(keys="helix", helix_block=4)).batch == 3


def test_a_mesh_set_by_the_caller_does_not_matter_to_logits(under_another_mesh):
    logits = under_another_mesh.logits(np.arange(6).reshape(3, 2) + 3)
    assert logits.shape == (3, 2, MESHED.vocab)


def two_of_a_kind():
    return Mesh(np.array([jax.devices()[0]] * 2).reshape(1, 2), AXES)


NO_MESH = {
    "one axis": lambda: jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]),
    "the other axis": lambda: jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]),
    "one axis more": lambda: jax.make_mesh((1, 2, 1), (*AXES, "pipe"), devices=jax.devices()[:2]),
    "other names": lambda: explicit(1, 2, ("x", "y")),
    "other case": lambda: explicit(1, 2, ("Data", "Model")),
    "no devices": lambda: Mesh(np.empty((0, 2), object), AXES),
    "one device twice": two_of_a_kind,
    "abstract": lambda: AbstractMesh((1, 2), AXES),
    "text": lambda: "1x2",
    "empty text": lambda: "",
    "sizes": lambda: {"data": 1, "model": 2},
    "no sizes": dict,
    "pair": lambda: (1, 2),
    "number": lambda: 2,
    "zero": lambda: 0,
    "false": lambda: False,
    "devices": lambda: jax.devices()[:2],
    "array": lambda: np.array(jax.devices()[:2]),
    "class": lambda: Mesh,
}


@pytest.mark.parametrize("kind", NO_MESH)
def test_what_is_not_a_mesh_is_refused_by_one_error_that_names_make_mesh(folder, kind):
    entries = {
        "load": lambda mesh: kj.load(folder, mesh),
        "move": lambda mesh: kj.move(kj.load(folder).new_state(1, 8), kj.Placement(), mesh),
        "as_mesh": as_mesh,
    }
    for entry in entries.values():
        with pytest.raises(kj.PlacementError, match=r"kj\.make_mesh"):
            entry(NO_MESH[kind]())


SIZES = ("abstract", "sizes", "no sizes", "one device twice")  # sizes are all that these ask for


@pytest.mark.parametrize("kind", [kind for kind in NO_MESH if kind not in SIZES])
def test_sizes_are_taken_from_nothing_else(kind):
    for entry in (
        lambda mesh: kj.Placement().check(MESHED, mesh),
        lambda mesh: kj.plan(MESHED, mesh),
        mesh_sizes,
    ):
        with pytest.raises(kj.PlacementError, match=r"mesh"):
            entry(NO_MESH[kind]())


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_need_no_devices(kind):
    mesh = NO_MESH[kind]()
    model = 1 if kind == "no sizes" else 2
    kj.Placement().check(MESHED, mesh)
    assert mesh_sizes(mesh) == {"data": 1, "model": model}
    assert kj.plan(MESHED, mesh).model == model


ODD_SIZES = (
    st.integers(max_value=0)
    | st.booleans()
    | st.floats()
    | st.none()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from([10**400, 10**5000, -(10**5000), np.float32(2), np.array([1]), np.int64(0)])
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(AXES), ODD_SIZES, min_size=1))
def test_odd_sizes_are_named_in_one_error(sizes):
    wrong = {
        name: size
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    }
    with pytest.raises(kj.PlacementError) as refusal:
        kj.make_mesh(**sizes)
    said = str(refusal.value)
    assert all(f"mesh axis {name} must be" in said for name in wrong)
    if not wrong:
        assert "JAX has 8 (cpu)" in said


def test_numpy_sizes_are_numbers():
    mesh = kj.make_mesh(np.int64(2), np.uint8(4))
    assert mesh == kj.make_mesh(2, 4)
    sizes = mesh_sizes({"data": np.int32(2), "model": 4})
    assert sizes == mesh_sizes(mesh) and type(sizes["data"]) is int
    assert sizes_text(sizes) == "data 2 x model 4"


def test_shards_are_counted_along_each_dim():
    spec = jax.sharding.PartitionSpec(None, "data", AXES, ())
    assert shard_counts(spec, {"data": 2, "model": 4}) == (1, 2, 8, 1)
