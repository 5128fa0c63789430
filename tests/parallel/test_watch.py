"""Two processes of one run: however one of them ends, the other ends too, within seconds, with a
message and an exit code that is not zero; where both end as they should, neither says a word.
"""

import os
import signal
import sys
import time

import pytest
from pairs import start_pair

from kimi_jax.parallel import watch

SCRIPT = """
import sys, time
import jax
jax.config.update("jax_num_cpu_devices", 2)
address, ready, me, *actions = sys.argv[1:]
jax.distributed.initialize(address, 2, int(me))
import jax.numpy as jnp
import kimi_jax as kj
from kimi_jax.parallel.processes import agree, together

mesh = kj.make_mesh(1, 4)
agree("the start", 0)
open(ready + me, "w").close()
exec(actions[int(me)])
agree("the end", 1)
"""
SLEEP = "time.sleep(100)"
COMPILE = """
jax.config.update("jax_enable_compilation_cache", False)
def long(x):
    for i in range(4000):
        x = jnp.sin(x) @ x + i
    return x
while True:
    jax.jit(long).lower(jnp.ones((8, 8))).compile()
    jax.clear_caches()
"""
CATCH = """
try:
    time.sleep(100)
except KeyboardInterrupt:
    pass
"""


@pytest.fixture
def start(tmp_path):
    """Two processes that do what they are told once both are there."""
    started, ready = [], str(tmp_path / "ready")

    def start(*actions):
        script = [sys.executable, "-c", SCRIPT]
        started.extend(start_pair(lambda at, me: [*script, at, ready, str(me), *actions]))
        deadline = time.monotonic() + 100
        while not all(os.path.exists(f"{ready}{me}") for me in range(2)):
            assert time.monotonic() < deadline and started[0].poll() is started[1].poll() is None
            time.sleep(0.1)
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(processes, limit=40):
    """The exit code and the errors of each process."""
    begin = time.monotonic()
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert time.monotonic() - begin < limit
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


INTERRUPTS = {  # what each process does, which is sent what, and the exit code of both
    "while it computes on the host": (("pass", SLEEP), 1, signal.SIGINT, 130),
    "the first one": ((SLEEP, "pass"), 0, signal.SIGINT, 130),
    "while it waits for the other": ((SLEEP, "pass"), 1, signal.SIGINT, 130),
    "the first one while it waits": (("pass", SLEEP), 0, signal.SIGINT, 130),
    "while it compiles": (("pass", COMPILE), 1, signal.SIGINT, 130),
    "where it catches that": (("pass", CATCH), 1, signal.SIGINT, 130),
    "told to end": (("pass", SLEEP), 1, signal.SIGTERM, 143),
    "the first one told to end while it waits": (("pass", SLEEP), 0, signal.SIGTERM, 143),
}


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("case", INTERRUPTS)
def test_a_signal_to_one_process_ends_both(start, case):
    actions, target, number, code = INTERRUPTS[case]
    processes = start(*actions)
    time.sleep(1)
    processes[target].send_signal(number)
    both = ends(processes, 20)
    assert [returned for returned, _ in both] == [code, code], both
    how = "was interrupted" if number == signal.SIGINT else "was terminated"
    said = f"kimi_jax: process {target} of 2 {how}; process {1 - target} ends with it"
    assert said in both[1 - target][1]


def test_a_process_that_is_killed_ends_the_other(start):
    processes = start("pass", SLEEP)
    processes[1].kill()
    (code, errors), _ = ends(processes, 20)
    assert code == 1 and "kimi_jax: process 1 of 2 died; process 0 ends with it" in errors


def test_the_first_process_that_is_killed_ends_the_other(start):
    processes = start(SLEEP, "pass")
    processes[0].kill()
    _, (code, errors) = ends(processes, 20)
    assert code != 0 and errors


def test_an_error_that_nothing_catches_ends_both(start):
    (code, errors), (other, trace) = ends(start("pass", "raise OSError('a \\x1b[31m disk')"), 20)
    assert code == other == 1 and "OSError" in trace
    assert r"process 1 of 2 failed with OSError: a \x1b[31m disk; process 0 ends" in errors


def test_a_process_that_leaves_ends_one_that_waits_for_it(start):
    both = ends(start("pass", "sys.exit(3)"))
    assert all(code != 0 for code, _ in both)
    assert "kimi_jax: process 1 of 2 ended, and what is computed with it" in both[0][1]


FINE = {
    "one is slower": ("time.sleep(1)", "pass"),
    "one outlives the other": ("import atexit; atexit.register(time.sleep, 3)", "pass"),
    "both catch an error": (
        *("try: together('it', lambda: 1 / 0)\nexcept ZeroDivisionError: pass",),
        *("try: together('it', lambda: 1)\nexcept kj.PlacementError: pass",),
    ),
    "one shuts down and goes on": (
        "agree('the end', 1); jax.distributed.shutdown(); time.sleep(2); sys.exit()",
        "agree('the end', 1); jax.distributed.shutdown(); sys.exit()",
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_processes_that_end_as_they_should_say_nothing(start, case):
    both = ends(start(*FINE[case]))
    assert [code for code, _ in both] == [0, 0], both
    assert not any("kimi_jax: process" in errors for _, errors in both)


def test_one_process_watches_nothing():
    watch.watch_processes()
    assert watch._watch is None
    watch.end_all_processes(1, "this returns")
    with watch.waiting():
        assert watch._watch is None
