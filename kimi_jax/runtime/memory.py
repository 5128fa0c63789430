"""What a device will hold, term by term in bytes, before anything exists: `plan` of a config on a
mesh, whether it fits, and what would.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..config.config import Config
from ..errors import PlacementError
from ..model.decoder import Declared, Kimi, declare, kind_spans, new_state
from ..model.state import STATE_DIMS
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, MODEL, Sizes, mesh_sizes, shard_counts, sizes_text
from ..parallel.placement import Placement, as_placement
from ..parallel.reductions import Reduction, Traffic, traffic, two_shot_rows

CONTEXT = 4096  # tokens of a plan that names no context, where the model takes as many
RESERVE = 2 * 10**9  # bytes set aside for temporaries: about what a step takes at full size
PREFILL_ROWS = (16, 64, 256, 1024, 4096)  # of one request: the widths that prefill compiles
MOST_DEVICES = 64  # of the meshes that a verdict tries
_UNITS = ("B", "kB", "MB", "GB")
DTYPES = ("float32", "bfloat16", "float64")

APART = "norms, float32 parts and KDA's f_a"
_WEIGHT_TERMS = {  # the first pattern found in a weight's name says what it counts to
    "routed experts": r"\.experts\.",
    "KDA": r"\.KDA\.w_(?!(decay|gate)_a$)",
    "MLA": r"\.MLA\.w_(?!(q|kv)_a$)",
    "shared experts": r"\.shared\.",
    "embedding and head": r"^(embed|head)$",
    "dense layers": r"\.mlp\.w_(gate|up|down)$",
    "latent projections": r"\.w_latent_",
    "router": r"\.w_router$",
    "MLA latents down": r"\.MLA\.w_",
    "indexer": r"\.indexer\.w_",
    APART: r"",
}
_STATE_TERMS = {
    "memory": "KDA memory",
    **dict.fromkeys(("window_q", "window_k", "window_v"), "KDA windows"),
    "latents": "latent cache",
    "index_keys": "index keys",
    **dict.fromkeys(("length", "hidden"), "lengths and outputs"),
}
WEIGHT_TERMS = tuple(_WEIGHT_TERMS)
STATE_TERMS = tuple(dict.fromkeys(_STATE_TERMS.values()))
INPUTS = "tokens and lengths of a step"
_INPUT_BYTES = 2 * 4  # of a row: one token and one length, int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """The bytes that one device holds during a decode step, by term; all devices hold as many.

    Temporaries are not counted: what a step computes on its way, about 2 GB at full size. Prints as
    a table. `dataclasses.replace` plans anew, with another batch say. Raises `ValueError`, or what
    `Placement.check` raises.
    """

    config: Config
    placement: Placement
    data: int  # ranks of the mesh axis "data"
    model: int  # ranks of the mesh axis "model"
    batch: int  # requests on the whole mesh
    context: int  # slots of each request, prompt and reply together
    dtype: str
    packed: bool  # experts in MXFP4

    def __post_init__(self) -> None:
        limit = self.config.max_positions
        problems = [
            f"{name} must be a positive whole number, got {value!r}"
            for name, value in (("batch", self.batch), ("context", self.context))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if not problems and self.context > limit:
            problems.append(f"context {self.context} is over the model's {limit} tokens")
        if self.dtype not in DTYPES:
            problems.append(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype}")
        if problems:
            raise ValueError("\n".join(problems))
        self.placement.check(self.config, self.mesh)

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks of both mesh axes."""
        return {DATA: self.data, MODEL: self.model}

    @property
    def rows(self) -> int:
        """Requests of one data rank; the batch is completed to as many on each."""
        return -(-self.batch // self.data)

    @functools.cached_property
    def terms(self) -> dict[str, int]:
        """Bytes of each term: the weights', the state's, and a decode step's inputs."""
        weights = _weight_bytes(
            self.config, self.placement, self.data, self.model, self.dtype, self.packed
        )
        state = {
            term: self.rows * (fixed + slot * self.slots)
            for term, (fixed, slot) in self._row.items()
        }
        return {**weights, **state, INPUTS: self.input_bytes}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.terms[term] for term in WEIGHT_TERMS)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of the batch at this context."""
        return sum(self.terms[term] for term in STATE_TERMS)

    @property
    def stripes(self) -> Stripes:
        """Where cached keys live."""
        return self.placement.stripes(self.mesh)

    @property
    def slots(self) -> int:
        """Cached keys of a request at this context that a device has room for: of helix ranks, as
        many as the first one's.
        """
        return self.stripes.slots(self.context)

    @property
    def input_bytes(self) -> int:
        """Bytes of one token and one length a row."""
        return self.rows * _INPUT_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of a decode step's arguments: weights, state and inputs."""
        return sum(self.terms.values())

    @property
    def row_bytes(self) -> int:
        """State and inputs of one request without its slots."""
        return sum(fixed for fixed, _ in self._row.values()) + _INPUT_BYTES

    @property
    def slot_bytes(self) -> int:
        """State of one slot of one request, on one device; 0 without full attention."""
        return sum(slot for _, slot in self._row.values())

    @property
    def _row(self) -> dict[str, tuple[int, int]]:
        return _row_bytes(self.config, self.placement, self.data, self.model, self.dtype)

    def sums(self, rows: int, step: str = "prefill") -> tuple[Reduction, int, Traffic]:
        """How a step of so many rows a data rank completes partial sums, how many there are (two
        a layer), and what each costs a rank, where all rows are kept. The latent columns of local
        experts are not counted.
        """
        how = self.placement.reduction(step, rows, self.model)
        cost = traffic(how, self.model, rows, self.config.hidden, self.dtype)
        return how, 2 * self.config.layers, cost

    def spare(self, memory: int | float, reserve: int | float = RESERVE) -> int:
        """Bytes left of a device's memory beside the plan and the reserve; negative: bytes lacking.

        All three count in bytes: a device of 288 GB has 288e9.
        """
        return int(memory) - int(reserve) - self.total_bytes

    def fits(self, memory: int | float, reserve: int | float = RESERVE) -> bool:
        """Whether a device of so many bytes holds the plan and the reserve."""
        return self.spare(memory, reserve) >= 0

    def __str__(self) -> str:
        experts = "MXFP4 experts" if self.packed else "plain experts"
        title = (
            f"one device of data {self.data} x model {self.model}: {self.dtype}, {experts}, "
            f"batch {self.batch:,}, context {self.context:,}"
        )
        sums = {
            "weights": self.weight_bytes,
            "state": self.state_bytes,
            "total": self.total_bytes,
        }
        said = (self._said_keys(), self._said_rows(), self._said_sums())
        return "\n".join([title, *_table(self.terms, sums), *itertools.chain(*said)])

    def _said_keys(self) -> Iterator[str]:
        """A line where cached keys are cut."""
        if self.stripes.ranks > 1 and self.slot_bytes:
            yield (
                f"helix: {self.slots:,} of {self.context:,} keys a device, in blocks of "
                f"{self.stripes.block}; {self.slot_bytes:,} B a key, all layers together; "
                f"{self.placement.exchange} travel"
            )

    def _said_rows(self) -> Iterator[str]:
        """A line where rows are sliced, always or in some steps."""
        if self.model == 1 or self.placement.rows == "full":
            return
        steps = [("decode", self.rows)]
        steps += [("prefill", rows) for rows in (PREFILL_ROWS[0], PREFILL_ROWS[-1])]
        said = (
            f"{'sliced' if self.placement.slices_rows(rows) else 'full'} in {step} steps of "
            f"{rows:,} rows"
            for step, rows in steps
        )
        yield f"rows are {', '.join(said)} (a data rank)"

    def _said_sums(self) -> Iterator[str]:
        """A line for the chosen reduction and for the one below its threshold, where one acts."""
        threshold = self.placement.prefill_ring_rows
        if threshold > PREFILL_ROWS[-1]:
            yield (
                f"prefill_ring_rows={threshold} is above the largest prefill step of a request, "
                f"{PREFILL_ROWS[-1]:,} rows, and does nothing there"
            )
            return
        for rows in (threshold, two_shot_rows(PREFILL_ROWS, threshold)):
            if rows and self.model > 1:
                how, count, cost = self.sums(rows)
                if self.placement.slices_rows(rows):
                    yield (
                        f"prefill steps of {rows:,} rows: sums by {how.algorithm}, of which a rank "
                        "completes its own rows alone"
                    )
                    continue
                yield (
                    f"prefill steps of {rows:,} rows: {count} sums by {how.algorithm}, each "
                    f"{_say(cost.sent)} sent in {cost.steps} steps, {_say(cost.scratch)} of scratch"
                )


def plan(
    config: Config | str | os.PathLike,
    mesh: Mesh | Sizes | Any,
    placement: Placement | Any = None,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: DTypeLike = "bfloat16",
    packed: bool | None = None,
) -> Plan:
    """What each device of a mesh, {"data": 1, "model": 8} or a real one, would hold, from shapes.

    Needs no device and allocates nothing. `batch` requests of `context` tokens each (default 4096,
    or the model's limit where that is less); `packed`: experts in MXFP4 (default: as the config
    says). Raises what `Placement.check` raises.
    """
    sizes = mesh_sizes(mesh)
    config = config if isinstance(config, Config) else Config.from_hf(config)
    return Plan(
        config,
        as_placement(placement),
        sizes[DATA],
        sizes[MODEL],
        batch,
        min(CONTEXT, config.max_positions) if context is None else context,
        jnp.dtype(dtype).name,
        config.quantized if packed is None else packed,
    )


def verdict(plan: Plan, memory: int | float, reserve: int | float = RESERVE) -> str:
    """Whether a device of `memory` bytes holds the plan and `reserve` bytes for temporaries, in
    words: how far context and batch may grow, or what would fit.
    """
    memory, reserve = int(memory), int(reserve)
    spare = plan.spare(memory, reserve)
    need = f"{_say(plan.total_bytes)} of {_say(memory)} a device"
    kept = f", with {_say(reserve)} set aside for temporaries" if reserve else ""
    counted = "Temporaries are not counted in the plan: about 2 GB at full size."
    if spare >= 0:
        title = f"fits with {_say(spare)} to spare: {need}{kept}."
        return "\n".join([title, counted, *_growth(plan, memory - reserve)])
    title = f"does not fit, lacks {_say(-spare)}: {need}{kept}."
    ways = list(_ways(plan, memory, reserve))
    what = "It would fit:" if ways else f"No mesh of up to {MOST_DEVICES} devices would hold it."
    return "\n".join([title, counted, what, *(f"  {way}" for way in ways)])


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that one device of a real mesh may use: the least of what this process' devices report.

    Devices of a CPU share its physical memory in equal parts. None where nothing is known.
    """
    devices = mesh.local_devices
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    if known:
        return min(known)
    if not devices or devices[0].platform != "cpu":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def refuse_what_exceeds(plan: Plan, memory: int | float | None) -> None:
    """Raise `PlacementError`, with the plan and what would fit, where the plan alone exceeds a
    device's bytes. Unknown memory refuses nothing, and no reserve is counted.
    """
    if memory is not None and not plan.fits(memory, reserve=0):
        raise PlacementError(f"{verdict(plan, memory, reserve=0)}\n\n{plan}")


@functools.lru_cache(maxsize=32)
def _declared(config: Config, dtype: str, packed: bool) -> Counter[tuple[str, Declared]]:
    """How many weights of each term and form there are, layers of a kind taken together: in any
    order a model holds the same bytes. Shared: not to be changed.
    """
    weights = declare(Kimi(config, dtype, kind_spans(config), packed=packed))
    return Counter(
        (_term(config, w.names[0]), dataclasses.replace(w, path=(), names=())) for w in weights
    )


def _term(config: Config, name: str) -> str:
    """The term of a weight such as `layers.3.attention.w_q`."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer:
        kind = "MLA" if config.is_mla(int(layer[1])) else "KDA"
        name = name.replace(".attention.", f".{kind}.")
    return next(term for term, pattern in _WEIGHT_TERMS.items() if re.search(pattern, name))


@functools.lru_cache(maxsize=512)
def _weight_bytes(
    config: Config, place: Placement, data: int, model: int, dtype: str, packed: bool
) -> dict[str, int]:
    """Bytes of weights on one device, by term. Shared: not to be changed."""
    sizes = {DATA: data, MODEL: model}
    terms = dict.fromkeys(WEIGHT_TERMS, 0)
    for (term, w), times in _declared(config, dtype, packed).items():
        whole, cut = w.placed(place, sizes), shard_counts(place.spec(w.dims), sizes)
        terms[term] += times * math.prod(whole) // math.prod(cut) * w.dtype.itemsize
    return terms


@functools.lru_cache(maxsize=512)
def _row_bytes(
    config: Config, place: Placement, data: int, model: int, dtype: str
) -> dict[str, tuple[int, int]]:
    """Bytes of one row of a state on one device, by term: beside its slots, and of each slot.

    Shared: not to be changed.
    """
    sizes = {DATA: data, MODEL: model}
    (H,) = place.whole("H", (config.kda_heads,), (config.kda_heads,), sizes)
    terms: dict[str, tuple[int, int]] = dict.fromkeys(STATE_TERMS, (0, 0))
    for name, array in _row_shapes(config, dtype, H):
        dims, term = STATE_DIMS[name], _STATE_TERMS[name]
        cut = math.prod(
            ranks
            for dim, ranks in zip(dims, shard_counts(place.spec(dims), sizes), strict=True)
            if dim not in ("B", "S")
        )
        nbytes = math.prod(array.shape) // cut * array.dtype.itemsize
        fixed, slot = terms[term]
        terms[term] = (fixed, slot + nbytes) if "S" in dims else (fixed + nbytes, slot)
    return terms


@functools.lru_cache(maxsize=128)
def _row_shapes(
    config: Config, dtype: str, heads: int
) -> tuple[tuple[str, jax.ShapeDtypeStruct], ...]:
    """Every array of a state of one row, one slot and so many KDA heads, by its name."""
    stacks = kind_spans(config)
    with jax.enable_x64(True):  # float64 has a plan whatever the process runs in
        state = jax.eval_shape(lambda: new_state(config, dtype, stacks, 1, 1, heads, on_cpu=False))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return tuple((path[-1].name, array) for path, array in leaves)


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
    row = plan.row_bytes + plan.slot_bytes * plan.slots
    return (memory - plan.weight_bytes) // row * plan.data


def _growth(plan: Plan, memory: int) -> Iterator[str]:
    context, batch = _largest_context(plan, memory), _largest_batch(plan, memory)
    limit = ", the model's limit" if context == plan.config.max_positions else ""
    yield f"Largest context at batch {plan.batch:,}: {context:,} tokens{limit}."
    yield f"Largest batch at context {plan.context:,}: {batch:,}."


def _ways(plan: Plan, memory: int, reserve: int) -> Iterator[str]:
    """What would make a plan fit that does not."""
    context, batch = (f(plan, memory - reserve) for f in (_largest_context, _largest_batch))
    if context > 0:
        yield f"at batch {plan.batch:,} with a context of at most {context:,}"
    if batch > 0:
        yield f"at context {plan.context:,} with a batch of at most {batch:,}"
    for option, value in (("latent", "sharded"), ("keys", "helix")):
        other = dataclasses.replace(plan.placement, **{option: value})
        cut = _changed(plan, placement=other) if other != plan.placement else None
        if cut and cut.fits(memory, reserve):
            yield f'on this mesh with {option}="{value}": {_say(cut.total_bytes)} a device'
    spread = dataclasses.replace(plan.placement, expert_axes=(DATA, MODEL))
    wider = _changed(plan, placement=spread)
    for how, one in (("", plan), (" with experts over data and model", wider)):
        found = _smallest_mesh(one, memory, reserve) if one else None
        if found:
            yield f"on a mesh of {sizes_text(found.mesh)}{how}: {_say(found.total_bytes)} a device"
            return


def _smallest_mesh(plan: Plan, memory: int, reserve: int) -> Plan | None:
    """The plan on the smallest mesh that holds it, of equals the one of fewest data ranks."""
    whole, room = dataclasses.replace(plan, data=1, model=1).total_bytes, memory - reserve
    for count in range(1, MOST_DEVICES + 1):
        if count * room < whole:
            continue  # not even if all were cut
        for data in (n for n in range(1, count + 1) if count % n == 0):
            one = _changed(plan, data=data, model=count // data)
            if one and one.fits(memory, reserve):
                return one
    return None


def _changed(plan: Plan, **changes: int | Placement) -> Plan | None:
    """The plan with changes, None where they do not fit together."""
    try:
        return dataclasses.replace(plan, **changes)
    except PlacementError:
        return None


def _say(count: int) -> str:
    """Four figures, or whole GB from 1000 on, and a unit in powers of 1000."""
    power = min(3, int(math.log10(max(1, count))) // 3)
    value = count / 1000**power
    return f"{value:,.0f} {_UNITS[power]}" if value >= 1000 else f"{value:.4g} {_UNITS[power]}"


def _table(terms: dict[str, int], sums: dict[str, int]) -> list[str]:
    """Aligned lines: term, bytes in one unit, exact bytes, share; a rule before the sums."""
    total = sums["total"]
    power = min(3, int(math.log10(total)) // 3)
    decimals = 3 if power else 0
    rows = [("term", _UNITS[power], "bytes", "share")]
    rows += [
        (term, f"{n / 1000**power:.{decimals}f}", f"{n:,}", f"{n / total:.1%}")
        for term, n in (terms | sums).items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1 : -len(sums)], rule, *lines[-len(sums) :]]
