"""What all tests share: a quiet CPU, a compilation cache, shape checks on every signature, the
golden checkpoints.
"""

import ctypes
import gc
import lzma
import os
import sys
import tarfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A test spends its time compiling: so, a step takes half of it. Flags of jaxlib 0.10; one that a
# later jaxlib does not know would end the process with its name.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)


import jax
import pytest
from jaxtyping import install_import_hook
from safetensors.numpy import load_file

pytest_plugins = ["commands"]

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


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """A compiled program takes dozens of memory mappings, of which Linux gives a process 65,530:
    without this the whole suite in two processes comes within a tenth of them, and crashes beyond.
    What compiling has freed goes back to the system: glibc keeps more than a GB of it otherwise.
    """
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


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
