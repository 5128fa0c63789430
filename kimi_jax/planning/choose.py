"""The mesh and placement that move the fewest bytes in a decode step, of all that fit a number of
devices and their memory.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ..config.config import Config
from ..errors import PlacementError
from ..parallel.choices import CHOICES, PADS
from ..parallel.mesh import meshes_of
from ..parallel.placement import Placement
from ..runtime.memory import RESERVE, Plan, plan
from .step_bytes import StepBytes, step_bytes

# What decides a decode step. "auto" is one of the other two there, and prefill alone has rings.
_DECIDING: tuple[str, ...] = tuple("rows shared keys exchange experts expert_axes latent".split())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and a placement: what a device holds, and what it moves in a decode step."""

    plan: Plan
    moved: StepBytes

    @property
    def rank(self) -> tuple:
        """Fewest bytes first; of equals, the placement with the fewest options."""
        place = self.plan.placement
        fields = dataclasses.fields(place)
        options = [field.name for field in fields if getattr(place, field.name) != field.default]
        return self.moved.total, len(options), options, self.plan.data


@dataclasses.dataclass(frozen=True)
class Choice:
    """All valid meshes and placements: those that fit, best first and each once where options make
    no difference; how many they are, how many do not fit, and the plan that needs the least memory.
    """

    fitting: list[Candidate]
    fit: int
    too_large: int
    smallest: Plan


def choose(
    config: Config,
    devices: int,
    memory: float,
    *,
    batch: int,
    context: int | None = None,
    dtype: str = "bfloat16",
    mesh: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    reserve: float = RESERVE,
) -> Choice:
    """Rank all valid meshes and placements of `devices` devices of `memory` bytes, for `batch`
    requests of `context` tokens. `mesh` and `options` of a placement that are given stay. Raises
    `PlacementError` where none is valid.
    """
    plans, problems = [], []
    sizes = [mesh] if mesh else list(meshes_of(devices))
    for each in sizes:
        for place in _placements(options or {}):
            try:
                padded = _padded(config, each, place, is_free="pad" not in (options or {}))
                plans.append(plan(config, each, padded, batch=batch, context=context, dtype=dtype))
            except PlacementError as error:
                problems.append(error)
    if not plans:
        raise problems[0]
    fitting = [Candidate(each, step_bytes(each)) for each in plans if each.fits(memory, reserve)]
    best: dict[Any, Candidate] = {}  # the first of those that differ in nothing but options
    for candidate in sorted(fitting, key=lambda candidate: candidate.rank):
        held = candidate.plan.data, candidate.plan.total_bytes, candidate.moved
        best.setdefault(held, candidate)
    smallest = min(plans, key=lambda plan: plan.total_bytes)
    return Choice(list(best.values()), len(fitting), len(plans) - len(fitting), smallest)


def _placements(given: Mapping[str, Any]) -> Iterator[Placement]:
    """Every placement that differs in a decode step, with the options that are given."""
    values = [
        (given[name],) if name in given else [value for value in CHOICES[name] if value != "auto"]
        for name in _DECIDING
    ]
    for combination in itertools.product(*values):
        chosen: dict[str, Any] = dict(zip(_DECIDING, combination, strict=True))
        if _is_idle(chosen, given):
            continue
        yield Placement(**{**given, **chosen})


def _padded(config: Config, mesh: Mapping[str, int], place: Placement, is_free: bool) -> Placement:
    """The placement, zero-padding only what does not divide over the mesh, where that helps."""
    if not is_free or _is_valid(config, mesh, place):
        return place
    padded = dataclasses.replace(place, pad=PADS)
    if not _is_valid(config, mesh, padded):
        return place
    for name in PADS:
        fewer = tuple(kept for kept in padded.pad if kept != name)
        narrower = dataclasses.replace(padded, pad=fewer)
        padded = narrower if _is_valid(config, mesh, narrower) else padded
    return padded


def _is_valid(config: Config, mesh: Mapping[str, int], place: Placement) -> bool:
    try:
        place.check(config, dict(mesh))
    except PlacementError:
        return False
    return True


def _is_idle(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether an option that was not asked for would do nothing beside the others."""
    idle = {
        "exchange": chosen["exchange"] == "values" and chosen["keys"] == "whole",
        "shared": chosen["shared"] == "sliced" and chosen["rows"] == "full",
    }
    return any(is_idle and name not in given for name, is_idle in idle.items())
