"""Functions compiled ahead: in threads, once for each shape, kept on disk."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.compilation import function as ahead
from kimi_jax.compilation.function import CompiledFunction, running_seconds, waited_seconds
from kimi_jax.compilation.store import Store
from kimi_jax.parallel.mesh import make_mesh

MESH = make_mesh(1, 2)
SPLIT = NamedSharding(MESH, PartitionSpec("model"))


def double(x):
    return {"twice": 2 * x}


def compiled_ahead(function=double, identity="a model"):
    def abstract(x):
        return (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SPLIT),)

    return CompiledFunction(function, "doubling", identity, MESH, abstract)


@pytest.fixture
def traced():
    """A function that counts how often it is traced."""

    def function(x):
        function.count += 1
        return double(x)

    function.count = 0
    return function


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder in which programs are kept."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()  # JAX uses the folder that it had first
    monkeypatch.setattr(Store, "is_enabled", True)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_one_program_for_each_shape_and_setting(traced):
    compiled = compiled_ahead(traced)
    for size in (4, 4, 6):
        x = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(compiled(x)["twice"], 2 * x)
    assert (traced.count, compiled.program_count, compiled.jit_calls) == (2, 2, 0)
    with jax.default_matmul_precision("highest"):
        compiled(np.ones(4, np.float32))
    assert traced.count == 3
    ahead.clear_programs()
    assert compiled.program_count == 0


def test_what_no_program_fits_goes_to_jit():
    """Other shardings and tracers; an error of the function is raised as it is."""
    compiled = compiled_ahead()
    compiled(np.ones(4, np.float32))
    placed = jax.device_put(jnp.ones(4, jnp.float32), jax.devices()[3])
    assert compiled(placed)["twice"].devices() == {jax.devices()[3]}
    slope = jax.grad(lambda x: compiled(x)["twice"].sum())(jnp.ones(4, jnp.float32))
    assert slope.tolist() == [2] * 4 and compiled.jit_calls == 2
    with jax.disable_jit():
        assert compiled(np.ones(6, np.float32))["twice"].tolist() == [2] * 6

    def broken(x):
        raise ZeroDivisionError

    failing = compiled_ahead(broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing(np.ones(4, np.float32))


def test_programs_are_compiled_in_the_background(traced):
    """While this thread does something else; whoever needs one waits for it."""
    gate = threading.Event()

    def slow(x):
        gate.wait(60)
        return traced(x)

    compiled = compiled_ahead(slow)
    before, clock = waited_seconds(), running_seconds()
    for size in (4, 4, 6):
        compiled.prepare(jax.ShapeDtypeStruct((size,), np.float32))
    assert ahead.is_compiling() and traced.count == 0 and waited_seconds() == before
    threading.Timer(0.3, gate.set).start()
    assert compiled(np.ones(4, np.float32))["twice"].tolist() == [2] * 4
    assert waited_seconds() - before > 0.2 and running_seconds() - clock < 0.2
    compiled(np.ones(6, np.float32))
    assert traced.count == 2


def test_a_program_that_is_kept_is_neither_traced_nor_compiled(folder, traced):
    """Also on several devices; what the function is, and each setting, has a program of its own."""
    x = np.arange(4, dtype=np.float32)
    first = compiled_ahead(traced)(x)["twice"]
    assert traced.count == 1 and len(list(folder.glob("doubling_*.program"))) == 1
    again = compiled_ahead(traced)(x)["twice"]
    assert traced.count == 1 and again.sharding == first.sharding == SPLIT
    np.testing.assert_array_equal(again, 2 * x)
    compiled_ahead(traced, identity="another model")(x)
    with jax.default_matmul_precision("highest"):
        compiled_ahead(traced)(x)
    assert traced.count == 3 and len(list(folder.glob("doubling_*.program"))) == 3


def test_an_entry_that_is_damaged_is_compiled_again(folder, traced):
    x = np.arange(4, dtype=np.float32)
    compiled_ahead(traced)(x)
    (entry,) = folder.glob("*.program")
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        entry.write_bytes(damaged)
        for file in folder.glob("*-cache"):
            file.unlink()
        assert compiled_ahead(traced)(x)["twice"].tolist() == [0, 2, 4, 6]
        assert entry.stat().st_size > 1000
    assert traced.count == 4


def test_what_came_from_the_cache_of_jax_is_not_written_again(folder, traced):
    """XLA on CPU writes an executable without its code where it has read it."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        x = np.arange(4, dtype=np.float32)
        compiled_ahead(traced)(x)
        (entry,) = folder.glob("*.program")
        assert len(list(folder.glob("jit_doubling_*-cache"))) == 1
        entry.unlink()
        jax.clear_caches()
        assert compiled_ahead(traced)(x)["twice"].tolist() == [0, 2, 4, 6]
        assert not entry.exists() and traced.count == 2
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


KILLED = """
import os, sys, threading, time
from pathlib import Path
import jax, numpy as np
sys.path.insert(0, "tests/compilation")
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_num_cpu_devices", 4)
import kimi_jax.compilation.store as store
from kimi_jax.compilation.function import CompiledFunction
import test_function
write = Path.write_bytes
def half(path, content):
    write(path, content[: len(content) // 2])
    os.kill(os.getpid(), 9)
Path.write_bytes = half
test_function.compiled_ahead()(np.ones(4, np.float32))
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(folder):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=300)
    assert ran.returncode == -signal.SIGKILL
    assert [file.name.split(".")[-1] for file in folder.iterdir()] == ["part"]


INTERRUPTED = """
import sys, threading, time
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_compilation_cache", False)
sys.path.insert(0, "tests/compilation")
import test_function
def slow(x):
    print("tracing", flush=True)
    time.sleep(60)
test_function.compiled_ahead(slow)(np.ones(4, np.float32))
"""


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_ends_a_program_at_once():
    """The script that waits for a compiler gets KeyboardInterrupt, and ends with 130."""
    ran = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert ran.stdout.readline() == b"tracing\n"
    begun = time.monotonic()
    os.kill(ran.pid, signal.SIGINT)
    _, err = ran.communicate(timeout=60)
    assert (ran.returncode, time.monotonic() - begun < 10) == (130, True), err
    assert err.endswith(b"KeyboardInterrupt\n")
