"""What all tests share: a quiet CPU, a compilation cache, shape checks on every signature, the
golden checkpoints.
"""

import ctypes
import gc
import lzma
import os
import signal
import sys
import tarfile
from pathlib import Path

# On CPU a test spends its time compiling: so, a step takes half of it. Flags of jaxlib 0.10; one
# that a later jaxlib does not know would end the process with its name. Programs for GPUs are
# tested as they are used.
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_use_fusion_emitters=false",
    )


import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook
from safetensors.numpy import load_file

pytest_plugins = ["commands"]

# Every run tries the same examples: a change is judged by what it changes. New ones:
# `--hypothesis-profile default --hypothesis-seed random`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

jax.config.update(
    "jax_enable_x64", True
)  # float64 is the yardstick; every index is pinned to int32 all the same
jax.config.update("jax_num_cpu_devices", 8)
# Shapes are broadcast and types are promoted where the code says so, never by accident.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

install_import_hook("kimi_jax", "beartype.beartype")

from kimi_jax.compilation import function, store  # noqa: E402 - checked by the hook
from kimi_jax.waiting import TELLER  # noqa: E402

store.Store.is_enabled = False  # a program of a test is not worth keeping, but for JAX's cache
TELLER.is_silent = True  # what a test writes does not depend on how long it waits

# Files that take longest, longest first: what begins last is short, so that two workers end
# together. With `--no-loadscope-reorder` pytest-xdist hands out files in this order.
LONGEST = (
    "system/test_golden.py",
    "system/test_mesh.py",
    "system/test_systems.py",
    "generation/test_engine.py",
    "generation/test_sessions.py",
    "generation/test_generate.py",
    "model/test_decoder.py",
    "speculation/test_rounds.py",
    "speculation/test_verify.py",
    "speculation/test_draft.py",
    "runtime/test_reshard.py",
    "system/test_ring_model.py",
    "generation/test_options.py",
    "parallel/test_watch.py",
    "docs/test_notebooks.py",
    "system/test_shipped.py",
    "docs/test_readme.py",
    "generation/test_prefix_cache.py",
    "text/test_tokenizer.py",
)


def pytest_collection_modifyitems(items):
    """The longest files first."""
    ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """A compiled program takes dozens of memory mappings, of which Linux gives a process 65,530:
    without this the whole suite in two processes comes within a tenth of them, and crashes beyond.
    What compiling has freed goes back to the system: glibc keeps more than a GB of it otherwise.
    """
    yield
    function.clear_programs()
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture
def heeds_interrupts():
    """A background job of a shell ignores SIGINT, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """name -> (checkpoint folder, expected arrays) of a golden model, unpacked once."""
    unpacked = {}

    def get(name: str):
        if name not in unpacked:
            folder = tmp_path_factory.mktemp(name)
            with (
                lzma.open(GOLDEN / name / "checkpoint.tar.xz") as file,
                tarfile.open(fileobj=file) as tar,
            ):
                tar.extractall(folder, filter="data")
            unpacked[name] = folder, load_file(GOLDEN / name / "expected.safetensors")
        return unpacked[name]

    return get


@pytest.fixture(scope="session")
def ops():
    """The golden arrays of one operation by name."""
    return lambda name: load_file(GOLDEN / "ops" / f"{name}.safetensors")
