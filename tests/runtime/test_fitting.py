"""What a verdict says: whether a plan fits, how far it may grow, and what would fit."""

import dataclasses
import inspect
import math
import os
import re

import pytest
from models import AWKWARD

import kimi_jax as kj
from kimi_jax.errors import PlacementError
from kimi_jax.runtime.fitting import device_memory, refuse_what_exceeds, verdict
from kimi_jax.runtime.memory import plan

K3_1 = kj.Config.k3_1()
HELIX = kj.Placement(keys="helix")
GB = 10**9


def ranks(model: int, data: int = 1) -> dict[str, int]:
    return {"data": data, "model": model}


def test_a_verdict_that_fits_says_how_far_it_may_grow():
    planned = plan(K3_1, ranks(8), batch=64, context=4096)
    text = verdict(planned, 288 * GB)
    assert planned.fits(288 * GB)
    assert text.startswith("fits with 68.13 GB to spare: 217.9 GB of 288 GB a device, with 2 GB")
    assert "Temporaries are not counted" in text and "about 2 GB at full size" in text
    grown = {
        "context": int(text.split("batch 64: ")[1].split()[0].replace(",", "")),
        "batch": int(text.split("context 4,096: ")[1].rstrip(".").replace(",", "")),
    }
    for name, most in grown.items():  # so far and not further
        assert dataclasses.replace(planned, **{name: most}).fits(288 * GB)
        assert not dataclasses.replace(planned, **{name: most + 1}).fits(288 * GB)
    assert "1,048,576 tokens, the model's limit" in verdict(plan(K3_1, ranks(8)), 288e9)


def test_the_largest_batch_is_as_many_on_each_data_rank():
    planned = plan(K3_1, ranks(8, data=3), batch=3)
    most = int(verdict(planned, 288 * GB).split(": ")[-1].rstrip(".").replace(",", ""))
    assert most % 3 == 0
    assert dataclasses.replace(planned, batch=most).fits(288 * GB)
    assert not dataclasses.replace(planned, batch=most + 1).fits(288 * GB)


def test_a_verdict_without_full_attention_has_no_slots():
    config = dataclasses.replace(AWKWARD, mla_layers=(), index_topk=0, index_heads=0, index_dim=0)
    text = verdict(plan(config, ranks(1)), 8 * GB)
    assert "Largest context at batch 1: 4,096 tokens, the model's limit." in text


def test_a_verdict_that_does_not_fit_says_what_would():
    text = verdict(plan(K3_1, ranks(4)), 288 * GB)
    assert text.startswith("does not fit, lacks 113.2 GB: 399.2 GB of 288 GB a device, with 2 GB")
    assert text.endswith("It would fit:\n  on a mesh of data 1 x model 8: 205.6 GB a device")
    text = verdict(plan(K3_1, ranks(8)), 200 * GB)
    assert 'on this mesh with latent="sharded": 196.3 GB a device' in text
    assert "on a mesh of data 1 x model 16: 108.8 GB a device" in text
    text = verdict(plan(K3_1, ranks(8)), 10 * GB)
    assert text.endswith("No mesh of up to 64 devices would hold it.")
    text = verdict(plan(K3_1, ranks(1), packed=False, dtype="float32"), 10 * GB)
    assert text.startswith("does not fit, lacks 11,111 GB: 11,119 GB of 10 GB a device")


def test_a_verdict_says_which_requests_would_fit():
    planned = plan(K3_1, ranks(8), batch=64, context=100_000)
    text = verdict(planned, 288 * GB)
    assert "at batch 64 with a context of at most 35,599\n" in text
    assert "at context 100,000 with a batch of at most 23\n" in text
    assert dataclasses.replace(planned, context=35_599).fits(288 * GB)
    assert dataclasses.replace(planned, batch=23).fits(288 * GB)
    assert "on a mesh of data 3 x model 8" in text


def test_the_smallest_mesh_is_the_smallest():
    """By definition: of all meshes in order of devices, the first that divides and holds it."""
    planned = plan(K3_1, ranks(1), kj.Placement(expert_axes=("data", "model")))

    def holds(data: int, model: int, memory: int) -> bool:
        try:
            return dataclasses.replace(planned, data=data, model=model).fits(memory)
        except PlacementError:
            return False

    meshes = [(d, n // d) for n in range(1, 65) for d in range(1, n + 1) if n % d == 0]
    for memory in (150 * GB, 70 * GB):
        data, model = next(mesh for mesh in meshes if holds(*mesh, memory))
        assert f"on a mesh of data {data} x model {model}: " in verdict(planned, memory)


def test_refuses_only_what_exceeds():
    planned = plan(K3_1, ranks(8))
    for memory in (None, planned.total_bytes, 288e9):
        refuse_what_exceeds(planned, memory)  # no reserve: what may fit is let through
    with pytest.raises(PlacementError) as error:
        refuse_what_exceeds(planned, planned.total_bytes - 1)
    assert "lacks 1 B" in str(error.value) and str(planned) in str(error.value)
    assert "set aside" not in str(error.value)


def test_the_memory_of_a_device():
    mesh = kj.make_mesh(data=2, model=4)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert device_memory(mesh) == physical // math.prod(mesh.shape.values())


class FakeMesh:
    """Devices that report what an accelerator would."""

    def __init__(self, *limits, platform="gpu"):
        self.local_devices = [FakeDevice(limit, platform) for limit in limits]


@dataclasses.dataclass
class FakeDevice:
    limit: int | None
    platform: str

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": 5}


def test_the_memory_that_accelerators_report():
    memory = inspect.unwrap(device_memory)  # without the check of types
    assert memory(FakeMesh(80 * GB, 79 * GB)) == 79 * GB
    assert memory(FakeMesh(None, None)) is None
    assert memory(FakeMesh()) is None


HELIX = kj.Placement(keys="helix")


def test_a_verdict_proposes_helix_keys_and_their_longest_context():
    """At 8 ranks, 12 requests of a million tokens do not fit 288 GB with replicated keys."""
    text = verdict(plan(K3_1, ranks(8), batch=12, context=10**6), 288 * GB)
    assert 'on this mesh with keys="helix": ' in text
    fits = plan(K3_1, ranks(8), HELIX, batch=48, context=1000)
    found = re.search(r"at batch 48: ([\d,]+) tokens", verdict(fits, 288 * GB))
    longest = int(found[1].replace(",", ""))
    room = 286 * GB
    assert dataclasses.replace(fits, context=longest).total_bytes <= room
    assert longest == 2**20 or dataclasses.replace(fits, context=longest + 1).total_bytes > room


@pytest.mark.parametrize(
    "memory", [float("nan"), float("inf"), -1, 2**64, 10**4000, "80", None, True]
)
def test_what_is_not_a_number_of_bytes_is_refused(memory):
    planned = plan(K3_1, ranks(8))
    for action in (inspect.unwrap(type(planned).fits), inspect.unwrap(verdict)):
        with pytest.raises(PlacementError, match="memory must be a number of bytes, got "):
            action(planned, memory)
        with pytest.raises(PlacementError, match="reserve must be a number of bytes, got "):
            action(planned, 80 * GB, memory)


def test_any_number_of_bytes_has_a_verdict():
    small = plan(AWKWARD, ranks(1))
    assert "Largest batch at context 4,096: 2,147,483,647." in verdict(small, 2**63)
    assert verdict(small, 0).startswith("does not fit, lacks ")
    assert verdict(small, 5e-324, 0.5).startswith("does not fit, lacks ")


def test_a_verdict_on_ten_thousand_layers():
    config = dataclasses.replace(K3_1, layers=10_000, mla_layers=tuple(range(3, 10_000, 4)))
    text = verdict(plan(config, ranks(8)), 80 * GB)
    assert text.endswith("No mesh of up to 64 devices would hold it.")
