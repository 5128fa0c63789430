"""Saved states: what is read back is the state that was written, or one error that names what is
wrong with the folder.
"""

import copy
import dataclasses
import json
import os
import random
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import MESHED, ODD, prompts, write

import kimi_jax as kj
from kimi_jax.runtime import state_files

# Where one array of several cannot be read, Orbax leaves those still being read to a closed loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PLACE = kj.Placement(keys="helix", helix_block=4)
SMALL = dataclasses.replace(MESHED, layers=3, mla_layers=(2,), residual_block=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(SMALL, tmp_path_factory.mktemp("states") / "small")


@pytest.fixture(scope="module")
def model(checkpoint):
    return kj.load(checkpoint, kj.make_mesh(1, 4), PLACE, "float64")


@pytest.fixture(scope="module")
def state(model):
    """Three requests of 57 tokens at most: 16 slots on each of four ranks, in blocks of 4."""
    return model.prefill(model.new_state(3, 57), *prompts(SMALL, (21, 9, 3)))[1]


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "saved"
    state.save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to plant faults in."""
    return shutil.copytree(saved, tmp_path / "copy")


def described(folder):
    return json.loads((folder / "about" / "metadata").read_text())


def describe(folder, about):
    """Write another description, a valid digest of it beside."""
    about = {**about, "digest": state_files._digest(about)}
    (folder / "about" / "metadata").write_text(json.dumps(about))


def assert_same(state, other):
    for array, again in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(array, again)


def test_a_folder_that_holds_no_state_of_this_model_is_refused(model, checkpoint, folder, tmp_path):
    float32 = kj.load(checkpoint, kj.make_mesh(1, 4), PLACE, "float32")
    with pytest.raises(kj.RequestError, match="the state is float64, the model float32"):
        kj.load_state(folder, float32)
    odd = kj.load(write(ODD, tmp_path / "odd"), dtype="float64")
    with pytest.raises(kj.RequestError, match=r"kda_heads 8, not 6[\s\S]*experts 16, not 10"):
        kj.load_state(folder, odd)
    with pytest.raises(kj.RequestError, match="holds no state"):
        kj.load_state(tmp_path / "nowhere", model)
    describe(folder, described(folder) | {"format": 99})
    with pytest.raises(kj.RequestError, match="that this version reads"):
        kj.load_state(folder, model)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_what_cannot_be_a_path_is_refused(model, state, path):
    with pytest.raises(kj.RequestError, match="is not the path of a folder"):
        kj.load_state(path, model)
    with pytest.raises(kj.RequestError, match="is not the path of a folder"):
        state.save(path)


def test_a_state_is_not_written_over_anything(state, folder, tmp_path):
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (folder, dangling):
        with pytest.raises(FileExistsError):
            state.save(path)


WHOLE = "must be a whole number >= 1"
DAMAGED = [
    ("batch", 5, r"0.0.memory is float64 \[1, 3.*expected float64 \[1, 5"),
    ("batch", 2, r"length is int32 \[3\], expected int32 \[2\]"),
    ("batch", -1, f"batch {WHOLE}, got -1"),
    ("batch", True, f"batch {WHOLE}, got True"),
    ("batch", None, f"batch {WHOLE}, got None"),
    ("max_length", 5, r"latents is float64 \[1, 3, 64, .*expected float64 \[1, 3, 16, "),
    ("max_length", 10**12, f"max_length {WHOLE}, got 1000000000000"),
    ("max_length", 2**31 - 1, "max_length 2147483647 is over the model's context"),
    ("max_length", True, f"max_length {WHOLE}, got True"),
    ("max_length", -5, f"max_length {WHOLE}, got -5"),
    ("dtype", 32, "dtype must be a name, got 32"),
    ("scan", 1, "scan must be true or false, got 1"),
    ("config", 5, "config must be a table, got 5"),
    ("config", [["a"]] * 3, "config must be a table"),
    ("mesh", {"data": 1, "model": 0}, f"mesh axis 'model' {WHOLE}, got 0"),
    ("mesh", {"model": 4}, "mesh must have the axes data and model"),
    ("mesh", {"data": 1, "model": 2}, r"latents is float64 \[1, 3, 64, .*expected .* 3, 58, "),
    ("mesh", {"data": 1, "model": 3}, "its placement does not fit its mesh"),
    ("placement", {"speed": 1}, "placement: .*speed"),
    ("placement", {"pad": [[1]]}, "placement: "),
    ("placement", {"keys": "helix", "helix_block": 64}, "expected float64 .* 3, 228, "),
]


@pytest.mark.parametrize("name, value, said", DAMAGED, ids=str)
def test_a_description_that_contradicts_the_arrays_is_refused(model, folder, name, value, said):
    describe(folder, described(folder) | {name: value})
    with pytest.raises(kj.RequestError, match=said):
        kj.load_state(folder, model)


def test_a_config_that_lacks_a_size_or_has_another_is_refused(model, folder):
    about = described(folder)
    about["config"] |= {"wheels": 4, "kda_key_dim": SMALL.kda_key_dim + 8}
    del about["config"]["experts"]
    describe(folder, about)
    said = r"kda_key_dim 24, not 16[\s\S]*experts None, not 16[\s\S]*wheels 4, not None"
    with pytest.raises(kj.RequestError) as refused:
        kj.load_state(folder, model)
    lines = str(refused.value)
    for part in ("kda_key_dim", "experts None, not 16", "wheels 4, not None"):
        assert part in lines, said


@pytest.mark.parametrize(
    "text, said",
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "format": 1}', "appears twice"),
        ('{"format": ' + "1" * 5000 + "}", "a number of 5,000 digits"),
        ('{"format": NaN}', "NaN"),
        ("\ufeff{}", "not a JSON file"),
        ("[]", "that this version reads"),
        ('{"format": true}', "that this version reads"),
        (" " * 2**20 + "{}", "too large"),
    ],
    ids=range(8),
)
def test_a_description_that_is_not_json_is_refused(model, folder, text, said):
    (folder / "about" / "metadata").write_text(text, encoding="utf-8")
    with pytest.raises(kj.RequestError, match=said):
        kj.load_state(folder, model)


def test_a_fifo_as_description_is_refused(model, folder):
    (folder / "about" / "metadata").unlink()
    os.mkfifo(folder / "about" / "metadata")
    with pytest.raises(kj.RequestError, match="a FIFO"):
        kj.load_state(folder, model)


def test_a_missing_folder_of_arrays_is_refused(model, folder):
    shutil.rmtree(folder / "arrays")
    with pytest.raises(kj.RequestError, match="its arrays cannot be read"):
        kj.load_state(folder, model)


def test_a_description_without_a_digest_is_read(model, state, folder):
    """States that an earlier version wrote have none."""
    about = described(folder)
    del about["digest"]
    (folder / "about" / "metadata").write_text(json.dumps(about))
    assert_same(state, kj.load_state(folder, model))


# Fuzzing: always `RequestError`, or the state that was written.


def paths(table, at=()):
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


VALUES = [
    *(None, True, False, -5, 0, 1, 3, 2**31, 10**12, 10**400, 1.5, -0.0, "", "x", "\x1b[2J"),
    *([], [[]], [[["heads"]]], {}, {"a": {"b": 1}}, "whole", "helix", "float32"),
]
REMOVED = object()


def mutated(about, path, value):
    about = copy.deepcopy(about)
    *parents, last = path
    table = about
    for key in parents:
        table = table[key]
    if value is REMOVED:
        del table[last]
    else:
        table[last] = value
    return about


def outcome(folder, model, state):
    """What loading says, or nothing where it gives the state that was written."""
    try:
        again = kj.load_state(folder, model)
    except kj.RequestError as error:
        assert str(error).isprintable() or "\n" in str(error)
        assert "\x1b" not in str(error)
        return str(error)
    assert_same(state, again)
    return None


def test_any_change_of_the_description_is_refused_or_harmless(model, state, folder):
    about = described(folder)
    changes = [(path, value) for path in paths(about) for value in (*VALUES, REMOVED)]
    random.Random(1).shuffle(changes)
    said = []
    for path, value in changes[:400]:
        (folder / "about" / "metadata").write_text(json.dumps(mutated(about, path, value)))
        said.append(outcome(folder, model, state))
    assert sum(line is not None for line in said) > 350


def reshaped(array, draw):
    """An array of another shape or type."""
    axis = draw.randrange(array.ndim) if array.ndim else 0
    changes = [
        lambda: np.concatenate([array, array.take([0], axis)], axis),
        lambda: array.take(range(array.shape[axis] - 1), axis),
        lambda: array[None],
        lambda: array.reshape(-1, 1),
        lambda: array.astype(np.float32 if array.dtype.itemsize == 8 else np.float64),
        lambda: array.astype(np.int8),
        lambda: np.swapaxes(array, 0, -1) if len(set(array.shape)) > 1 else array[None],
    ]
    changed = draw.choice(changes)()
    return changed if changed.shape != array.shape or changed.dtype != array.dtype else array[None]


def rewrite(folder, arrays, target):
    """The same description beside other arrays."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(target, ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays)))
    shutil.copytree(folder / "about", target / "about")
    return target


@pytest.fixture(scope="module")
def arrays(model, saved):
    about = state_files.read_description(saved)
    return state_files.read_arrays(saved, about, model.config)


def test_an_array_of_another_shape_or_type_is_refused_by_name(
    model, saved, arrays, tmp_path, monkeypatch
):
    draw = random.Random(2)
    for at, key in enumerate(sorted(arrays) * 2):
        changed = {**arrays, key: reshaped(arrays[key], draw)}
        folder = rewrite(saved, changed, tmp_path / str(at))
        with pytest.raises(kj.RequestError) as refused:
            kj.load_state(folder, model)
        lines = str(refused.value).splitlines()
        assert len(lines) == 2 and f"{key} is " in lines[1] and "expected" in lines[1]


def test_missing_and_unknown_arrays_are_refused_by_name(model, saved, arrays, tmp_path):
    changed = {key: array for key, array in arrays.items() if key != "hidden"} | {
        "7.0.memory": arrays["hidden"]
    }
    with pytest.raises(kj.RequestError, match=r"'7.0.memory' is not[\s\S]*hidden is missing"):
        kj.load_state(rewrite(saved, changed, tmp_path / "other"), model)


@pytest.mark.parametrize("length, row", [(-5, 0), (58, 2), (2**31 - 1, 1), (-(2**31), 2)])
def test_a_length_that_cannot_be_is_refused(model, saved, arrays, tmp_path, length, row):
    lengths = arrays["length"].copy()
    lengths[row] = length
    folder = rewrite(saved, {**arrays, "length": lengths}, tmp_path / "other")
    said = f"the length of request {row} is {length}, not from 0 to the max_length 57"
    with pytest.raises(kj.RequestError, match=said):
        kj.load_state(folder, model)


def test_damaged_files_are_refused_or_read(model, saved, tmp_path):
    """Cut, emptied and overwritten at random; arrays have no checksum, so some may be read."""
    draw = random.Random(3)
    files = sorted(path for path in saved.rglob("*") if path.is_file() and path.stat().st_size)
    for at in range(25):
        folder = shutil.copytree(saved, tmp_path / str(at))
        path = folder / draw.choice(files).relative_to(saved)
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        kept = draw.choice([content[:place], content[:place] + b"\xff" * 9 + content[place + 9 :]])
        path.write_bytes(kept)
        try:
            kj.load_state(folder, model)
        except kj.RequestError as error:
            assert str(folder) in str(error)
