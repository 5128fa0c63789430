"""Whether a plan fits a device's memory, how far batch and context may grow, and which placements
and meshes would fit.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from ..errors import PlacementError, bytes_text
from ..parallel.mesh import DATA, MODEL, sizes_text
from ..parallel.placement import Placement
from .memory import MOST, RESERVE, Plan, byte_count

MOST_DEVICES = 64  # of the meshes that a verdict tries


def verdict(plan: Plan, memory: float | Any, reserve: float | Any = RESERVE) -> str:
    """Whether a device of `memory` bytes holds the plan and `reserve` bytes for temporaries, as
    text: how far context and batch may grow, or what would fit.

    Raises `PlacementError` for what is not a number of bytes.
    """
    spare = plan.spare(memory, reserve)
    memory = byte_count("memory", memory)
    reserve = byte_count("reserve", reserve)
    need = f"{bytes_text(plan.total_bytes)} of {bytes_text(memory)} a device"
    kept = f", with {bytes_text(reserve)} set aside for temporaries" if reserve else ""
    counted = "Temporaries are not counted in the plan: about 2 GB at full size."
    if spare >= 0:
        title = f"fits with {bytes_text(spare)} to spare: {need}{kept}."
        return "\n".join([title, counted, *_growth(plan, memory - reserve)])
    title = f"does not fit, lacks {bytes_text(-spare)}: {need}{kept}."
    ways = list(_ways(plan, memory, reserve))
    what = "It would fit:" if ways else f"No mesh of up to {MOST_DEVICES} devices would hold it."
    return "\n".join([title, counted, what, *(f"  {way}" for way in ways)])


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that one device of a real mesh may use: the minimum over this process' devices.

    Devices of a CPU share its physical memory in equal parts. None where no device reports any.
    """
    devices = mesh.local_devices
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    reported = [limit for limit in limits if limit]
    if reported:
        return min(reported)
    if not devices or devices[0].platform != "cpu":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def refuse_what_exceeds(plan: Plan, memory: int | float | None) -> None:
    """Raise `PlacementError`, with the plan and what would fit, where the plan alone exceeds a
    device's bytes. With `memory` None nothing is refused; no reserve is counted.
    """
    if memory is not None and not plan.fits(memory, reserve=0):
        raise PlacementError(f"{verdict(plan, memory, reserve=0)}\n\n{plan}")


def _largest_context(plan: Plan, memory: int) -> int:
    """The most slots at this batch, at most the model's limit; 0 or less where none fits."""
    room = memory - plan.weight_bytes - plan.rows * plan.row_bytes
    slot = plan.rows * plan.slot_bytes
    limit = plan.config.max_positions
    if slot:
        return min(limit, plan.stripes.most(max(0, room // slot)))
    return limit if room >= 0 else 0


def _largest_batch(plan: Plan, memory: int) -> int:
    """The most requests at this context, as many on each data rank; 0 or less where none fits."""
    request = plan.row_bytes + plan.slot_bytes * plan.slots
    rows = min((memory - plan.weight_bytes) // request, MOST // plan.data)
    return rows * plan.data


def _growth(plan: Plan, memory: int) -> Iterator[str]:
    context = _largest_context(plan, memory)
    limit = ", the model's limit" if context == plan.config.max_positions else ""
    yield f"Largest context at batch {plan.batch:,}: {context:,} tokens{limit}."
    batch = _largest_batch(plan, memory)
    yield f"Largest batch at context {plan.context:,}: {batch:,}."


def _ways(plan: Plan, memory: int, reserve: int) -> Iterator[str]:
    """What would make a plan fit that does not."""
    context, batch = (f(plan, memory - reserve) for f in (_largest_context, _largest_batch))
    if context > 0:
        yield f"at batch {plan.batch:,} with a context of at most {context:,}"
    if batch > 0:
        yield f"at context {plan.context:,} with a batch of at most {batch:,}"
    for option, value in (("latent", "sharded"), ("keys", "helix")):
        placement = dataclasses.replace(plan.placement, **{option: value})
        smaller = _changed(plan, placement=placement) if placement != plan.placement else None
        if smaller and smaller.fits(memory, reserve):
            size = bytes_text(smaller.total_bytes)
            yield f'on this mesh with {option}="{value}": {size} a device'
    spread = dataclasses.replace(plan.placement, expert_axes=(DATA, MODEL))
    wider = _changed(plan, placement=spread)
    for change, start in (("", plan), (" with experts over data and model", wider)):
        found = _smallest_mesh(start, memory, reserve) if start else None
        if found:
            size = bytes_text(found.total_bytes)
            yield f"on a mesh of {sizes_text(found.mesh)}{change}: {size} a device"
            return


def _smallest_mesh(plan: Plan, memory: int, reserve: int) -> Plan | None:
    """The plan on the smallest mesh that holds it; of equal sizes, the smallest `data` axis."""
    all_bytes = dataclasses.replace(plan, data=1, model=1).total_bytes
    room = memory - reserve
    for count in range(1, MOST_DEVICES + 1):
        if count * room < all_bytes:
            continue  # not even if everything were sharded
        for data in (n for n in range(1, count + 1) if count % n == 0):
            candidate = _changed(plan, data=data, model=count // data)
            if candidate and candidate.fits(memory, reserve):
                return candidate
    return None


def _changed(plan: Plan, **changes: int | Placement) -> Plan | None:
    """The plan with changes; None where the changed plan is not valid."""
    try:
        return dataclasses.replace(plan, **changes)
    except PlacementError:
        return None
