"""State that moves: the same bits on any placement and mesh, in memory and through files, and the
same logits after it.
"""

import dataclasses
import gc
import json
import sys

import jax
import numpy as np
import pytest
from models import MESHED, ODD, prompts, write
from pairs import results_of, start_pair
from tolerances import EXACT

import kimi_jax as kj
from kimi_jax.model.state import KDAState
from kimi_jax.runtime import reshard

P, BOTH = kj.Placement, ("data", "model")
PAD = ("heads", "experts", "vocab", "dense", "shared")
LENGTHS = (21, 9, 3)
NEXT = np.array([5, 6, 7])
# One device, tensor parallel, helix with blocks of several sizes, sliced rows, requests that are
# completed from three to four.
PLACES = [
    ((1, 1), P()),
    ((1, 2), P()),
    ((1, 8), P(keys="helix", helix_block=4)),
    ((2, 4), P(keys="helix", helix_block=1, rows="sliced", expert_axes=BOTH)),
    ((4, 2), P(rows="sliced", latent="sharded")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(MESHED, tmp_path_factory.mktemp("reshard") / "meshed")


@pytest.fixture(scope="module")
def models(folder):
    made = {}

    def get(at, dtype="float64"):
        if (at, dtype) not in made:
            mesh, place = PLACES[at]
            made[at, dtype] = kj.load(folder, kj.make_mesh(*mesh), place, dtype)
        return made[at, dtype]

    return get


def after_prompts(model):
    logits, state = model.prefill(model.new_state(3, 64), *prompts(MESHED, LENGTHS))
    return np.asarray(logits), state


def whole(state):
    """Every array in one device's layout: all there is to compare."""
    one = kj.move(state, P(), kj.make_mesh())
    return {jax.tree_util.keystr(k): np.asarray(x) for k, x in jax.tree.leaves_with_path(one)}


def same(some, others):
    assert some.keys() == others.keys() and len(some) > 8
    for name, one in some.items():
        assert one.dtype == others[name].dtype
        np.testing.assert_array_equal(one, others[name], err_msg=name)


@pytest.mark.parametrize("source", range(len(PLACES)))
def test_moving_keeps_every_bit_and_going_on_there_is_having_been_there(models, source):
    """To every placement and back; the state that was moved is only read."""
    _, state = after_prompts(models(source))
    before, lengths = whole(state), np.asarray(state.length)
    wanted, _ = models(0).decode(after_prompts(models(0))[1], NEXT)
    for target in range(len(PLACES)):
        model = models(target)
        there = kj.move(state, model.placement, model.mesh)
        same(whole(there), before)
        back = kj.move(there, *reversed((models(source).mesh, models(source).placement)))
        for own, again in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
            assert own.sharding.is_equivalent_to(again.sharding, own.ndim)
            real = slice(0, len(own)) if own.ndim < 2 else ...
            np.testing.assert_array_equal(own[real], again[real])
        logits, _ = model.decode(there, NEXT)
        np.testing.assert_allclose(logits, wanted, atol=EXACT, rtol=0)
    np.testing.assert_array_equal(state.length, lengths)
    models(source).decode(state, NEXT)


def test_a_moved_state_lies_as_the_model_would_have_laid_it(models):
    """Slice by slice: heads of memories and of all three windows, striped latents, index keys."""
    _, here = after_prompts(models(1))
    _, there = after_prompts(models(2))
    moved = kj.move(here, models(2).placement, models(2).mesh)
    for own, other in zip(jax.tree.leaves(there), jax.tree.leaves(moved), strict=True):
        for a, b in zip(own.addressable_shards, other.addressable_shards, strict=True):
            assert a.device == b.device and a.index == b.index
            np.testing.assert_allclose(a.data, b.data, atol=EXACT, rtol=0)


def test_padded_heads_are_left_behind_and_made_anew(tmp_path):
    """6 KDA heads over 4 and 8 ranks, 3 requests over 2 data ranks; bfloat16, kept as its bits."""
    odd = write(ODD, tmp_path / "odd")
    states = []
    for mesh in ((1, 8), (2, 4)):
        place = P(pad=PAD, keys="helix", helix_block=2)
        model = kj.load(odd, kj.make_mesh(*mesh), place, "bfloat16")
        _, state = model.prefill(model.new_state(3, 40), *prompts(ODD, LENGTHS))
        states.append(whole(state))
        for other in ((1, 4), (1, 8), (2, 4)):
            moved = kj.move(state, place, kj.make_mesh(*other))
            same(whole(moved), states[-1])
    for name, one in states[0].items():
        assert one.shape == states[1][name].shape


def test_layers_that_are_scanned_travel_group_by_group_and_may_be_grouped_anew(tmp_path):
    """To models that scan and that do not, in memory and through files."""
    config = dataclasses.replace(MESHED, layers=7, mla_layers=(2, 4, 6), residual_block=3)
    deep = write(config, tmp_path / "deep")
    places = [((1, 2), P()), ((1, 4), P(keys="helix", helix_block=4))]
    one, four = (kj.load(deep, kj.make_mesh(*m), p, "float32", scan=True) for m, p in places)
    assert max(span.groups for span in one.program.stacks) > 1
    ids, lengths = prompts(config, LENGTHS)
    _, state = one.prefill(one.new_state(3, 64), ids, lengths)
    moved = kj.move(state, four.placement, four.mesh)
    same(whole(moved), whole(state))
    wanted, _ = one.decode(state, NEXT)
    logits, _ = four.decode(moved, NEXT)
    np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)
    flat = kj.load(deep, kj.make_mesh(model=4), four.placement, "float32", scan=False)
    _, state = one.prefill(one.new_state(3, 64), ids, lengths)
    state.save(tmp_path / "scanned")
    apart = kj.move(state, flat.placement, flat.mesh, scan=False)
    apart.save(tmp_path / "apart")
    with pytest.raises(kj.RequestError, match="grouped by scan=False, the model by True"):
        four.decode(apart, NEXT)
    same(whole(kj.load_state(tmp_path / "scanned", flat)), whole(apart))
    together = kj.load_state(tmp_path / "apart", four)
    same(whole(together), whole(state))
    for model, again in ((flat, apart), (four, together)):
        logits, _ = model.decode(again, NEXT)
        np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("part", ["memory", "window_q", "window_k", "window_v"])
def test_a_state_without_half_of_itself_shows(models, part):
    """What an engine lost on the way, and wrote fluent text all the same: compare tensors."""
    _, state = after_prompts(models(0))
    wanted, _ = models(0).decode(after_prompts(models(0))[1], NEXT)
    layers = [
        [
            dataclasses.replace(layer, **{part: 0 * getattr(layer, part)})
            if isinstance(layer, KDAState)
            else layer
            for layer in stack
        ]
        for stack in state.layers
    ]
    poor = dataclasses.replace(state, layers=layers)
    with pytest.raises(AssertionError):
        same(whole(poor), whole(state))
    logits, _ = models(2).decode(kj.move(poor, models(2).placement, models(2).mesh), NEXT)
    assert np.abs(np.asarray(logits) - np.asarray(wanted)).max() > 1e-4


# Refusals


def test_a_state_laid_out_otherwise_is_refused_by_name(models, folder):
    _, state = after_prompts(models(2))
    for options, said in [
        (dict(keys="helix", helix_block=8), "helix_block 4, the model helix_block 8"),
        (dict(), "has helix keys, the model whole keys"),
    ]:
        other = kj.load(folder, models(2).mesh, P(**options), "float64")
        with pytest.raises(kj.RequestError, match=said):
            other.decode(state, NEXT)
    fitting = P(keys="helix", helix_block=4, experts="local", exchange="values", rows="sliced")
    other = kj.load(folder, models(2).mesh, fitting, "float64")
    other.decode(state, NEXT)


def test_what_cannot_be_moved_is_refused(models):
    _, state = after_prompts(models(0))
    with pytest.raises(kj.PlacementError, match="heads: 8 over 3 ranks"):
        kj.move(state, P(), kj.make_mesh(model=3))
    with pytest.raises(kj.RequestError, match="a state comes from"):
        kj.move(models(0).program.empty(1, 16), P())
    models(0).decode(state, NEXT)
    with pytest.raises(kj.RequestError, match="consumed by a step"):
        kj.move(state, P())


def test_a_move_that_fails_leaves_the_state_usable(models, monkeypatch):
    (_, state), target = after_prompts(models(0)), models(2)
    gc.collect()
    before = len(jax.live_arrays())
    monkeypatch.setattr(reshard, "copy_indices", lambda *a: 1 / 0)
    try:  # what pytest.raises keeps would hold arrays
        kj.move(state, target.placement, target.mesh)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("a failed move was not raised")
    gc.collect()  # the wrappers that check types hold the error, and it their frames
    assert len(jax.live_arrays()) == before
    models(0).decode(state, NEXT)


def test_more_than_the_devices_hold_is_refused(models, monkeypatch):
    _, state = after_prompts(models(0))
    monkeypatch.setattr(reshard, "device_memory", lambda mesh: 1000)
    with pytest.raises(kj.PlacementError, match="bytes a device there, of 1,000"):
        kj.move(state, P())


# Files


@pytest.mark.parametrize("source, target", [(0, 3), (2, 4), (3, 1), (4, 2)])
def test_a_saved_state_goes_on_elsewhere(models, tmp_path, source, target):
    _, state = after_prompts(models(source))
    state.save(tmp_path / "state")
    wanted, _ = models(0).decode(after_prompts(models(0))[1], NEXT)
    loaded = kj.load_state(tmp_path / "state", models(target))
    same(whole(loaded), whole(state))
    logits, _ = models(target).decode(loaded, NEXT)
    np.testing.assert_allclose(logits, wanted, atol=EXACT, rtol=0)
    with pytest.raises(FileExistsError):
        state.save(tmp_path / "state")


# Several processes

SCRIPT = """
import json, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
folder, address, path, me = sys.argv[1:]
jax.distributed.initialize(address, 2, int(me))
import kimi_jax as kj
from kimi_jax.runtime import reshard
from kimi_jax.parallel.processes import to_host

P = kj.Placement
helix = P(keys="helix", helix_block=4, rows="sliced")
a = kj.load(folder, kj.make_mesh(2, 4), P(expert_axes=("data", "model")), "float32")
b = kj.load(folder, kj.make_mesh(1, 8), helix, "float32")
_, state = a.prefill(a.new_state(3, 64), np.arange(15).reshape(3, 5) + 3, np.array([5, 2, 4]))

def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__} {error}"

said, copy_indices = {}, reshard.copy_indices
if me == "1":
    reshard.copy_indices = lambda *x: 1 / 0
said["failed move"] = error_of(lambda: kj.move(state, b.placement, b.mesh))
reshard.copy_indices = copy_indices
moved = kj.move(state, b.placement, b.mesh)
moved.save(path)
said["failed reading"] = error_of(lambda: kj.load_state(path + "nowhere" * int(me), b))
logits, _ = b.decode(kj.load_state(path, b), np.array([5, 6, 7]))
said["tokens"] = to_host(logits).argmax(-1).tolist()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def two_processes(folder, tmp_path_factory):
    """What each of two processes says of moving, saving and reading, first where the second fails
    and then where none does.
    """
    path = str(tmp_path_factory.mktemp("processes") / "state")
    ended = results_of(
        start_pair(lambda at, me: [sys.executable, "-c", SCRIPT, folder, at, path, str(me)])
    )
    assert [code for code, *_ in ended] == [0, 0], ended
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def test_two_processes_move_save_and_read_and_go_on_as_one_does(two_processes, folder):
    """Also after a move and a reading that failed."""
    one = kj.load(folder, dtype="float32")
    ids, lengths = np.arange(15).reshape(3, 5) + 3, np.array([5, 2, 4])
    _, state = one.prefill(one.new_state(3, 64), ids, lengths)
    wanted, _ = one.decode(state, NEXT)
    assert [said["tokens"] for said in two_processes] == [
        np.asarray(wanted).argmax(-1).tolist()
    ] * 2


def test_a_move_that_fails_on_one_process_fails_on_both(two_processes):
    first, second = (said["failed move"] for said in two_processes)
    assert first.startswith("PlacementError resharding the state failed on process 1")
    assert second.startswith("ZeroDivisionError")


def test_a_reading_that_fails_on_one_process_fails_on_both(two_processes):
    first, second = (said["failed reading"] for said in two_processes)
    assert first.startswith("PlacementError reading the state failed on process 1")
    assert second.startswith("RequestError") and "holds no state" in second
