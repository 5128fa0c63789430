"""What a device moves in a decode step: memory against the floor of scripts/bill, which counts
weight by weight; what is sent against the collectives of the traced step.
"""

import importlib

import jax.numpy as jnp
import pytest
from conftest import ROOT
from system.test_mesh import MESHED, traced

import kimi_jax as kj
from kimi_jax.planning.step_bytes import step_bytes
from kimi_jax.runtime.memory import plan
from kimi_jax.runtime.program import make_program

P = kj.Placement
N = 4


def share(kind, out):
    """Bytes that one of N ranks sends for a collective with this result."""
    size = out.size * jnp.dtype(out.dtype).itemsize
    return {
        "all-reduce": 2 * (N - 1) / N * size,
        "all-to-all": (N - 1) / N * size,
        "all-gather": (N - 1) / N * size,
        "reduce-scatter": (N - 1) * size,
    }[kind]


@pytest.mark.parametrize(
    "place",
    [
        P(experts="local"),
        P(experts="local", latent="sharded", keys="helix"),
        P(rows="sliced", experts="local", keys="helix", exchange="values"),
        P(rows="sliced", experts="local", shared="sliced"),
    ],
    ids=str,
)
def test_what_is_sent_is_that_of_the_traced_step(place):
    found = traced(place, kj.make_mesh(1, N), 4, 1)
    wanted = sum(share(kind, out) for _, kind, out in found)
    planned = plan(MESHED, {"data": 1, "model": N}, place, batch=4, context=64)
    assert step_bytes(planned).sent == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("batch, place", [(64, P(keys="helix", latent="sharded")), (8, P())])
def test_memory_is_the_floor_of_the_bill(monkeypatch, batch, place):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bill = importlib.import_module("bill.floor")
    planned = plan(kj.Config.k3_1(), {"data": 1, "model": 8}, place, batch=batch, context=131072)
    program = make_program(planned.config, kj.make_mesh(1, 8), place, "bfloat16")
    floor = bill.floor(program, bill.Load(batch, 1, 131071))
    assert step_bytes(planned).memory == pytest.approx(floor.total_bytes, rel=1e-4)
