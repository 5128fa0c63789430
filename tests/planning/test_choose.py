"""The mesh and placement that move the fewest bytes, of all that fit."""

import dataclasses
import itertools

import pytest

import kimi_jax as kj
from kimi_jax.config.config import Config
from kimi_jax.planning.choose import choose
from kimi_jax.planning.step_bytes import step_bytes
from kimi_jax.runtime.memory import plan

K3_1 = Config.k3_1()


def test_the_best_is_the_least_of_all_that_fit():
    """Against every combination of what is not given, tried one by one."""
    found = choose(K3_1, 4, 480e9, batch=64, context=131072, options={"rows": "full"})
    plans = [one for one in every_plan(4, batch=64, context=131072) if one.fits(480e9)]
    least = min(step_bytes(planned).total for planned in plans)
    best = found.fitting[0]
    assert best.moved.total == least and best.plan.mesh == {"data": 1, "model": 4}
    assert (best.plan.placement.keys, best.plan.placement.latent) == ("helix", "sharded")
    totals = [candidate.moved.total for candidate in found.fitting]
    assert totals == sorted(totals) and all(c.plan.fits(480e9) for c in found.fitting)
    assert {one.total_bytes for one in plans} == {c.plan.total_bytes for c in found.fitting}


def every_plan(devices, **load):
    values = {
        "keys": ("whole", "helix"),
        "exchange": ("latents", "values"),
        "experts": ("exchange", "local"),
        "expert_axes": (("model",), ("data", "model")),
        "latent": ("whole", "sharded"),
    }
    for data in (1, 2, 4):
        for chosen in itertools.product(*values.values()):
            place = kj.Placement(**dict(zip(values, chosen, strict=True)))
            try:
                yield plan(K3_1, {"data": data, "model": devices // data}, place, **load)
            except kj.PlacementError:
                continue


def test_what_is_given_stays():
    options = {"experts": "local", "expert_axes": ("data", "model"), "rows": "full"}
    found = choose(K3_1, 16, 141e9, batch=64, mesh={"data": 2, "model": 8}, options=options)
    assert found.fitting
    for candidate in found.fitting:
        assert candidate.plan.mesh == {"data": 2, "model": 8}
        assert candidate.plan.placement.experts == "local"
        assert candidate.plan.placement.expert_axes == ("data", "model")


def test_what_does_not_divide_is_padded_where_it_must():
    best = (
        choose(K3_1, 12, 180e9, batch=8, mesh={"data": 1, "model": 12}, options={"rows": "full"})
        .fitting[0]
        .plan
    )
    assert best.placement.pad
    for name in best.placement.pad:
        fewer = tuple(kept for kept in best.placement.pad if kept != name)
        with pytest.raises(kj.PlacementError):
            dataclasses.replace(best.placement, pad=fewer).check(K3_1, best.mesh)


def test_where_nothing_fits_the_smallest_is_told():
    mesh = {"data": 1, "model": 8}
    found = choose(K3_1, 8, 80e9, batch=64, context=131072, mesh=mesh, options={"rows": "full"})
    assert found.fitting == [] and found.fit == 0 and found.too_large > 10
    assert found.smallest.placement.keys == "helix"
    with pytest.raises(kj.PlacementError, match="wheels"):
        choose(K3_1, 7, 80e9, batch=1, options={"pad": ("wheels",)})
