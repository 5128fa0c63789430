"""Copies of a ring between GPUs run beside its additions, in the program that XLA compiles."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from kimi_jax.parallel.reductions import copy_engine_flags

COMPILE = """\
import sys
sys.path.insert(0, "scripts")
import jax
import jax.numpy as jnp
from aot import TARGET, make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from kimi_jax.parallel.collectives import all_reduce
from kimi_jax.parallel.on_mesh import on_model_ranks
from kimi_jax.parallel.reductions import Reduction

mesh, how = make_mesh(1, 4, TARGET), Reduction("ring_bf16", pieces=int(sys.argv[1]))
by_rank = NamedSharding(mesh, PartitionSpec("model"))
x = jax.ShapeDtypeStruct((4 * 256, 1024), jnp.bfloat16, sharding=by_rank)
ring = on_model_ranks(mesh, lambda partial: all_reduce(partial, how))
print(ring.trace(x).lower().compile().as_text())
"""


def compiled_ring(pieces: int) -> list[str]:
    """The instructions of the entry of a ring over 4 ranks, compiled for GPUs, as they run."""
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("XLA's compiler for CUDA is not installed (jax-cuda12-plugin, jax-cuda12-pjrt)")
    flags = {"XLA_FLAGS": copy_engine_flags(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMPILE, str(pieces)]
    run = subprocess.run(
        command, env={**os.environ, **flags}, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    entry = run.stdout[run.stdout.index("ENTRY") :]
    return [line for line in entry.splitlines() if " = " in line]


def test_copies_of_two_pieces_stay_apart_and_every_addition_runs_beside_one():
    lines = compiled_ring(pieces=2)
    starts = [line for line in lines if " collective-permute-start(" in line]
    assert len(starts) == 2 * 2 * 3  # pieces, reduce and gather, hops
    assert all("COLLECTIVES_PEER_MEMORY" in line for line in starts)
    in_flight, beside = 0, []
    for line in lines:
        in_flight += " collective-permute-start(" in line
        in_flight -= " collective-permute-done(" in line
        if " fusion(" in line and "/convert_element_type" in line:  # adds, rounds and narrows
            beside.append(in_flight)
    assert len(beside) == 2 * 3
    assert min(beside) == 1
    assert sum('"is_sync":false' in line for line in starts) == 2 * 3
