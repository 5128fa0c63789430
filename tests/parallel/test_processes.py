"""Several processes of one run: arrays that all of them hold, errors that all of them raise."""

import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pairs import results_of, start_pair

from kimi_jax.parallel.mesh import MODEL, make_mesh
from kimi_jax.parallel.processes import agree, settle, to_device, to_host, to_mesh, together

SCRIPT = """
import atexit, json, sys, threading
names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print("threads at the end:", names(), file=sys.stderr))  # after all others
import jax
jax.config.update("jax_num_cpu_devices", 2)
address, me = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, me)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.processes import agree, settle, to_device, to_host, to_mesh, together

mesh, x = make_mesh(1, 4), np.arange(8, dtype=np.float32).reshape(4, 2)
said = {}

def placed(array):
    shards = [[shard.index[0].start, np.asarray(shard.data).tolist()]
              for shard in array.addressable_shards]
    return [array.is_fully_addressable, shards, to_host(array).tolist()]

def outcome(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for place in (to_device, to_mesh):
    for name, spec in (("sharded", ["model"]), ("replicated", [])):
        said[place.__name__, name] = placed(place(x, NamedSharding(mesh, PartitionSpec(*spec))))
said["both succeed"] = outcome(lambda: together("the read", lambda: 10 + me))
said["first fails"] = outcome(lambda: together("the read", lambda: 1 // me))
said["both fail"] = outcome(lambda: together("the read", lambda: 1 // 0))
said["second settles an error"] = outcome(lambda: settle("a move", OSError("disk") if me else None))
said["equal"] = outcome(lambda: agree("options", 3, "x", x))
said["other values"] = outcome(lambda: agree("options", 3, me))
said["other array"] = outcome(lambda: agree("prompts", x + me))
said["other shape"] = outcome(lambda: agree("prompts", x.reshape((2, 4) if me else (4, 2))))
said["after errors"] = outcome(lambda: agree("options", 3))
print(json.dumps([[key, value] for key, value in said.items()]))
"""
X = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture(scope="module")
def both():
    """key -> what the first and the second of two processes of two devices each say."""
    ended = results_of(start_pair(lambda at, me: [sys.executable, "-c", SCRIPT, at, str(me)]))
    assert [code for code, *_ in ended] == [0, 0], ended
    assert all("threads at the end: ['MainThread']" in errors for *_, errors in ended), ended
    first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in ended)
    assert [key for key, _ in first] == [key for key, _ in second]
    key_of = lambda key: key if isinstance(key, str) else tuple(key)  # noqa: E731
    return {key_of(key): (one, other) for (key, one), (_, other) in zip(first, second, strict=True)}


# Arrays


@pytest.mark.parametrize("place", ["to_device", "to_mesh"])
def test_a_sharded_array_lies_a_row_a_device_over_both_processes(both, place):
    for me, (is_whole, shards, _) in enumerate(both[place, "sharded"]):
        assert not is_whole
        assert shards == [[row, X[row : row + 1].tolist()] for row in (2 * me, 2 * me + 1)]


@pytest.mark.parametrize("place", ["to_device", "to_mesh"])
def test_a_replicated_array_is_held_by_every_device(both, place):
    for _, shards, _ in both[place, "replicated"]:
        assert shards == [[None, X.tolist()]] * 2


@pytest.mark.parametrize("name", ["sharded", "replicated"])
def test_the_host_of_each_process_gets_all_of_an_array(both, name):
    for place in ("to_device", "to_mesh"):
        assert [host for *_, host in both[place, name]] == [X.tolist()] * 2


def test_one_process_gives_a_step_the_array_itself():
    sharding = NamedSharding(make_mesh(1, 4), PartitionSpec(MODEL))
    assert to_mesh(X, sharding) is X


def test_one_process_places_an_array_as_its_sharding_says():
    sharding = NamedSharding(make_mesh(1, 4), PartitionSpec(MODEL))
    array = to_device(X, sharding)
    assert array.sharding == sharding
    np.testing.assert_array_equal(to_host(array), X)


# Errors


def test_an_action_that_succeeds_gives_each_process_its_own_result(both):
    assert both["both succeed"] == (10, 11)


def test_an_error_of_one_process_is_an_error_of_the_other_that_names_it(both):
    first, second = both["first fails"]
    assert first.startswith("ZeroDivisionError")
    assert second == "PlacementError: the read failed on process 0, and so on none succeeded"


def test_where_both_fail_each_raises_its_own_error(both):
    assert all(said.startswith("ZeroDivisionError") for said in both["both fail"])


def test_an_error_that_was_caught_before_is_settled_the_same_way(both):
    assert both["second settles an error"] == (
        "PlacementError: a move failed on process 1, and so on none succeeded",
        "OSError: disk",
    )


def test_one_process_gets_the_result_of_an_action():
    assert together("the read", lambda: 3) == 3


def test_one_process_gets_the_error_of_an_action():
    with pytest.raises(ZeroDivisionError):
        together("the read", lambda: 1 // 0)


def test_without_an_error_nothing_is_raised():
    settle("the read", None)


# Agreement


def test_equal_values_and_arrays_agree(both):
    assert both["equal"] == (None, None)


@pytest.mark.parametrize(
    "key, what",
    [("other values", "options"), ("other array", "prompts"), ("other shape", "prompts")],
)
def test_a_difference_is_an_error_on_both(both, key, what):
    assert both[key] == (f"PlacementError: the processes disagree on {what}",) * 2


def test_processes_go_on_after_errors_of_both(both):
    assert both["after errors"] == (None, None)


def test_one_process_agrees_with_itself_without_asking(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    monkeypatch.setattr("kimi_jax.parallel.processes._gather", lambda *x: 1 / 0)
    agree("options", 3, X)
