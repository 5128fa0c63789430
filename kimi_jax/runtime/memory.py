"""What a device will hold, term by term in bytes, before anything is allocated: `plan` of a config
on a mesh. `fitting` says whether it fits a device's memory, and what would.
"""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..config.block_sizes import block_sizes
from ..config.config import Config
from ..config.released import RELEASED
from ..config.vision import VisionConfig
from ..errors import PlacementError, bytes_text, shown, table_lines
from ..model.attention.rollback import rollback_bytes
from ..model.declared import Declared, declare
from ..model.decoder import Kimi, kind_spans, new_state
from ..model.layers import Term
from ..model.mxfp4 import GROUP, Quantization, expert_quantization
from ..model.state import STATE_DIMS, STATE_ROLES
from ..model.vision.encoder import activation_bytes, weight_bytes
from ..numerics import is_number, is_whole
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, MODEL, ONE_DEVICE, Sizes, mesh_sizes, shard_counts, sizes_text
from ..parallel.placement import Placement, as_placement
from ..parallel.reductions import Reduction, Traffic, traffic, two_shot_rows
from ..parallel.roles import Role

CONTEXT = 4096  # tokens of a plan that names no context, where the model takes as many
RESERVE = 2 * 10**9  # bytes set aside for temporaries: about what a step needs at full size
PREFILL_ROWS = (16, 64, 256, 1024, 4096)  # of one request: the widths that prefill compiles
MOST = 2**31 - 1  # requests and devices: what int32 counts
DTYPES = ("float32", "bfloat16", "float64")
_COUNTS = ("data", "model", "batch", "context", "drafts")
IMAGE_PLACES = 12_288  # of the program that encodes an image of 1920 x 1080
_MOST_BYTES = 2**63  # of a device

_STATE_TERMS = {
    "memory": "KDA memory",
    **dict.fromkeys(("window_q", "window_k", "window_v"), "KDA windows"),
    "latents": "latent cache",
    "index_keys": "index keys",
    **dict.fromkeys(("length", "hidden"), "lengths and outputs"),
}
_BESIDE = (Term.VISION, Term.DRAFTER)
WEIGHT_TERMS = tuple(term.value for term in Term if term not in _BESIDE)  # of the decoder
STATE_TERMS = tuple(dict.fromkeys(_STATE_TERMS.values()))
ROWS = "rows to verify"
INPUTS = "tokens and lengths of a step"
_INPUT_BYTES = 2 * 4  # of a request: one token and one length, int32

Checked = TypeVar("Checked")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The bytes that one device holds during a decode step, by term; all devices hold the same.

    Temporaries are not counted: intermediate values of a step, about 2 GB at full size. Prints as a
    table. `dataclasses.replace` makes another plan, with another batch say. Raises one
    `PlacementError` for numbers out of range, and what `Placement.check` raises.
    """

    config: Config
    placement: Placement
    data: int  # ranks of the mesh axis "data"
    model: int  # ranks of the mesh axis "model"
    batch: int  # requests on the full mesh, all data ranks together
    context: int  # slots of each request, prompt and reply together
    dtype: str
    packed: bool  # experts in MXFP4
    vision: VisionConfig | None = None  # the tower that every device holds too
    drafts: int = 0  # most drafts of a request that a verify step takes; 0: decode steps

    def __post_init__(self) -> None:
        problems = _argument_problems(**vars(self))
        if problems:
            raise PlacementError("\n".join(problems))
        for name in _COUNTS:  # numpy's integers would overflow
            object.__setattr__(self, name, int(getattr(self, name)))
        self.placement.check(self.config, self.mesh)

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks of both mesh axes."""
        return {DATA: self.data, MODEL: self.model}

    @property
    def rows(self) -> int:
        """Requests of one data rank; the batch is padded to a multiple of the data ranks."""
        return -(-self.batch // self.data)

    @functools.cached_property
    def terms(self) -> dict[str, int]:
        """Bytes of each term: weights, state, what rows to verify leave, and a step's inputs."""
        quantization = expert_quantization(self.packed)
        weights = _weight_bytes(
            self.config, self.placement, self.data, self.model, self.dtype, quantization
        )
        state = {
            term: self.rows * (fixed + slot * self.slots)
            for term, (fixed, slot) in self._request.items()
        }
        tower = {Term.VISION.value: weight_bytes(self.vision, self.dtype)} if self.vision else {}
        verified = {ROWS: self.verified_bytes("replay")} if self.drafts else {}
        return {**weights, **tower, **state, **verified, INPUTS: self.input_bytes}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.terms.get(term.value, 0) for term in Term)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of the batch at this context."""
        return sum(self.terms[term] for term in STATE_TERMS)

    @property
    def stripes(self) -> Stripes:
        """Where cached keys are stored."""
        return self.placement.stripes(self.mesh)

    @property
    def slots(self) -> int:
        """Cached keys of a request at this context that a device has room for; with helix as many
        as the first rank holds.
        """
        return self.stripes.slots(self.context)

    @property
    def input_bytes(self) -> int:
        """Bytes of the tokens of a step and one length a request."""
        return self.rows * (_INPUT_BYTES + 4 * self.drafts)

    def verified_bytes(self, rollback: str) -> int:
        """Bytes that the rows to verify leave in a form of `model.attention.rollback`."""
        H = self.placement.padded(Role.HEADS, self.config.kda_heads, self.mesh) // self.model
        row = rollback_bytes(self.config, H, rollback, self.dtype)
        return self.rows * (1 + self.drafts) * row

    @property
    def total_bytes(self) -> int:
        """Bytes of a step's arguments, and of what rows to verify leave."""
        return sum(self.terms.values())

    @property
    def row_bytes(self) -> int:
        """State and inputs of one request without its slots."""
        of_request = self.input_bytes + self.terms.get(ROWS, 0)
        return sum(fixed for fixed, _ in self._request.values()) + of_request // self.rows

    @property
    def slot_bytes(self) -> int:
        """State of one slot of one request, on one device; 0 without full attention."""
        return sum(slot for _, slot in self._request.values())

    @property
    def _request(self) -> dict[str, tuple[int, int]]:
        return _request_bytes(self.config, self.placement, self.data, self.model, self.dtype)

    def sums(self, rows: int, step: str = "prefill") -> tuple[Reduction, int, Traffic]:
        """How a step of `rows` rows a data rank reduces partial sums, how many there are (two a
        layer), and what each costs a rank, where the rows are replicated. The latent columns of
        local experts are not counted.
        """
        reduction = self.placement.reduction(step, rows, self.mesh)
        cost = traffic(reduction, self.model, rows, self.config.hidden, self.dtype)
        return reduction, 2 * self.config.layers, cost

    def spare(self, memory: float | Any, reserve: float | Any = RESERVE) -> int:
        """Bytes left of a device's memory beside the plan and the reserve; negative: bytes lacking.

        All three count in bytes: a device of 288 GB has 288e9. Raises `PlacementError` for what is
        not a number of bytes.
        """
        return byte_count("memory", memory) - byte_count("reserve", reserve) - self.total_bytes

    def fits(self, memory: float | Any, reserve: float | Any = RESERVE) -> bool:
        """Whether a device of `memory` bytes holds the plan and the reserve."""
        return self.spare(memory, reserve) >= 0

    @property
    def title(self) -> str:
        """What is planned, on one line."""
        experts = f"{expert_quantization(self.packed).title} experts"
        return (
            f"one device of data {self.data} x model {self.model}: {self.dtype}, {experts}, "
            f"batch {self.batch:,}, context {self.context:,}"
        )

    @property
    def notes(self) -> list[str]:
        """A line for each thing that a step of the placement does and the table does not show."""
        notes = (_key_notes, _row_notes, _sum_notes, _image_notes, _verify_notes)
        return [line for lines in notes for line in lines(self)]

    def __str__(self) -> str:
        return "\n".join([self.title, *table_lines(table_rows(self)), *self.notes])


def plan(
    config: Config | str | os.PathLike,
    mesh: Mesh | Sizes | Any,
    placement: Placement | Any = None,
    *,
    batch: int | Any = 1,
    context: int | Any = None,
    dtype: DTypeLike | Any = "bfloat16",
    packed: bool | Any = None,
    vision: VisionConfig | None = None,
    drafts: int | Any = 0,
) -> Plan:
    """What each device of a mesh, {"data": 1, "model": 8} or a real one, would hold, from shapes.

    `config`: a `Config`, a folder, or the name of a released model, "k3" or "k3.1".
    Needs no device and allocates nothing. `batch` requests of `context` tokens each (default 4096,
    or the model's limit where that is less); `packed`: experts in MXFP4 (default: as the config
    says); `vision`: a vision tower to count too; `drafts`: most drafts of a request. Raises one
    `PlacementError` with every invalid argument, or what `Placement.check` raises.
    """
    if not isinstance(config, Config):
        released = RELEASED.get(config) if isinstance(config, str) else None
        config = Config.from_hf(released or config)
    problems: list[str] = []
    sizes = _checked(mesh_sizes, mesh, ONE_DEVICE, problems)
    values: dict[str, Any] = {
        "config": config,
        "placement": _checked(as_placement, placement, Placement(), problems),
        "data": sizes[DATA],
        "model": sizes[MODEL],
        "batch": batch,
        "context": min(CONTEXT, config.max_positions) if context is None else context,
        "dtype": _dtype_name(dtype),
        "packed": config.quantized if packed is None else packed,
        "vision": vision,
        "drafts": drafts,
    }
    problems += _argument_problems(**values)
    if problems:
        raise PlacementError("\n".join(problems))
    values |= {name: int(values[name]) for name in _COUNTS}
    return Plan(**values)


def byte_count(name: str, value: Any) -> int:
    """An argument that is a number of bytes. Raises `PlacementError` for anything else."""
    if not is_number(value) or not 0 <= value <= _MOST_BYTES:
        raise PlacementError(f"{name} must be a number of bytes, got {shown(value)}")
    return int(value)


def table_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """A plan's terms and their sums: name, size, exact bytes, share."""
    sums = {"weights": plan.weight_bytes, "state": plan.state_bytes, "total": plan.total_bytes}
    rows = [*plan.terms.items(), *sums.items()]
    return [(term, bytes_text(n), f"{n:,}", f"{n / plan.total_bytes:.1%}") for term, n in rows]


# Arguments.


def _checked(
    check: Callable[[Any], Checked], value: Any, default: Checked, problems: list[str]
) -> Checked:
    """What a check returns; where it raises, `default`, and the error is added to `problems`."""
    try:
        return check(value)
    except PlacementError as error:
        problems.append(error.args[0])
        return default


def _dtype_name(dtype: Any) -> str:
    """The name of a number type; of anything else, how it is shown."""
    if not isinstance(dtype, str | type | np.dtype):
        return shown(dtype)
    try:
        return jnp.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):  # numpy parses texts
        return shown(dtype)


def _argument_problems(
    *, config: Config, dtype: str, packed: Any, placement: Placement, vision: Any, **counts: Any
) -> list[str]:
    """Every invalid number of a plan; divisibility is checked elsewhere."""
    drafts = counts.pop("drafts")
    problems = [
        f"{name} must be a positive whole number, got {shown(count)}"
        for name, count in counts.items()
        if not is_whole(count, 1)
    ]
    if not is_whole(drafts, 0, config.max_positions):
        problems.append(f"drafts must be a whole number >= 0, got {shown(drafts)}")
    valid = {name: int(count) if is_whole(count, 1) else 1 for name, count in counts.items()}
    if valid["batch"] > MOST:
        problems.append(f"batch {shown(valid['batch'])} is over {MOST}")
    if valid["context"] > config.max_positions:
        limit = f"the model's {config.max_positions} tokens"
        problems.append(f"context {shown(valid['context'])} is over {limit}")
    if valid[DATA] * valid[MODEL] > MOST:
        problems.append(f"a mesh of {sizes_text(valid)} has more than {MOST} devices")
    if dtype not in DTYPES:
        problems.append(f"dtype must be one of {', '.join(DTYPES)}; got {dtype}")
    if vision is not None and vision.hidden != config.hidden:
        problems.append(f"vision: its rows are {vision.hidden} wide, the model {config.hidden}")
    if not isinstance(packed, bool):
        problems.append(f"packed must be true or false, got {shown(packed)}")
    elif packed and (config.latent % GROUP or config.expert_ffn % GROUP):
        widths = f"width {config.expert_ffn} and latent {config.latent}"
        problems.append(f"packed experts of {widths} are not multiples of {GROUP}")
    return problems


# Bytes.


@functools.lru_cache(maxsize=32)
def _declared(config: Config, dtype: str, quantization: Quantization) -> Counter[Declared]:
    """How many weights there are of each shape, type and sharding. Layers are grouped by kind, as
    their order does not change the bytes. Cached: callers must not change it.
    """
    weights = declare(Kimi(config, dtype, kind_spans(config), quantization=quantization))
    return Counter(dataclasses.replace(w, path=(), names=()) for w in weights)


@functools.lru_cache(maxsize=512)
def _weight_bytes(
    config: Config, place: Placement, data: int, model: int, dtype: str, quantization: Quantization
) -> dict[str, int]:
    """Bytes of weights on one device, by term. Cached: callers must not change it."""
    sizes = {DATA: data, MODEL: model}
    terms = dict.fromkeys(WEIGHT_TERMS, 0)
    for w, count in _declared(config, dtype, quantization).items():
        shards = math.prod(shard_counts(place.spec(w.roles), sizes))
        nbytes = math.prod(w.placed(place, sizes)) // shards * w.dtype.itemsize
        terms[w.term.value] += count * nbytes
    return terms


@functools.lru_cache(maxsize=512)
def _request_bytes(
    config: Config, place: Placement, data: int, model: int, dtype: str
) -> dict[str, tuple[int, int]]:
    """Bytes of the state of one request on one device, by term: without its slots, and of each
    slot. Cached: callers must not change it.
    """
    sizes = {DATA: data, MODEL: model}
    H = place.padded(Role.HEADS, config.kda_heads, sizes)
    terms: dict[str, tuple[int, int]] = dict.fromkeys(STATE_TERMS, (0, 0))
    for name, array in _request_shapes(config, dtype, H):
        dims = STATE_DIMS[name]
        counts = zip(dims, shard_counts(place.spec(STATE_ROLES[name]), sizes), strict=True)
        shards = math.prod(count for dim, count in counts if dim not in ("B", "S"))
        nbytes = math.prod(array.shape) // shards * array.dtype.itemsize
        fixed, slot = terms[_STATE_TERMS[name]]
        per_slot = "S" in dims
        terms[_STATE_TERMS[name]] = (fixed + nbytes * (not per_slot), slot + nbytes * per_slot)
    return terms


@functools.lru_cache(maxsize=128)
def _request_shapes(
    config: Config, dtype: str, heads: int
) -> tuple[tuple[str, jax.ShapeDtypeStruct], ...]:
    """Every array of the state of one request with one slot and `heads` KDA heads, by its name."""
    stacks = kind_spans(config)
    with jax.enable_x64(True):  # also a float64 plan in a process without 64-bit types
        state = jax.eval_shape(lambda: new_state(config, dtype, stacks, 1, 1, heads, on_cpu=False))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return tuple((path[-1].name, array) for path, array in leaves)


# Text.


def _key_notes(plan: Plan) -> Iterator[str]:
    """A line where cached keys are sharded."""
    if plan.stripes.ranks > 1 and plan.slot_bytes:
        yield (
            f"helix: {plan.slots:,} of {plan.context:,} keys a device, in blocks of "
            f"{plan.stripes.block}; {plan.slot_bytes:,} B a key, all layers together; ranks "
            f"exchange {plan.placement.exchange}"
        )


def _row_notes(plan: Plan) -> Iterator[str]:
    """A line where rows are sliced, always or in some steps."""
    if plan.model == 1 or plan.placement.rows == "full":
        return
    steps = [("decode", plan.rows)]
    steps += [("prefill", rows) for rows in (PREFILL_ROWS[0], PREFILL_ROWS[-1])]
    parts = (
        f"{'sliced' if plan.placement.slices_rows(rows) else 'full'} in {step} steps of "
        f"{rows:,} rows"
        for step, rows in steps
    )
    yield f"rows are {', '.join(parts)} (a data rank)"


def _verify_notes(plan: Plan) -> Iterator[str]:
    """A line for what verified rows leave, in both forms."""
    replay, states = (bytes_text(plan.verified_bytes(form)) for form in ("replay", "checkpoints"))
    if plan.drafts:
        yield f"{1 + plan.drafts} rows to verify: {replay} to replay, {states} as KDA states"


def _sum_notes(plan: Plan) -> Iterator[str]:
    """A line for the chosen reduction and for the one below its threshold, where they apply."""
    threshold = plan.placement.prefill_ring_rows
    if threshold > PREFILL_ROWS[-1]:
        yield (
            f"prefill_ring_rows={threshold} is above the largest prefill step of a request, "
            f"{PREFILL_ROWS[-1]:,} rows, and does nothing there"
        )
        return
    for rows in (threshold, two_shot_rows(PREFILL_ROWS, threshold)):
        if rows and plan.model > 1:
            reduction, count, cost = plan.sums(rows)
            if plan.placement.slices_rows(rows):
                yield (
                    f"prefill steps of {rows:,} rows: sums by {reduction.algorithm}, of which a "
                    "rank completes its local rows alone"
                )
                continue
            yield (
                f"prefill steps of {rows:,} rows: {count} sums by {reduction.algorithm}, each "
                f"{bytes_text(cost.sent)} sent in {cost.steps} steps, {bytes_text(cost.scratch)} "
                "of scratch"
            )


def _image_notes(plan: Plan) -> Iterator[str]:
    """A line where there is a vision tower."""
    if plan.vision:
        block = block_sizes("gpu").dense_bytes
        size = bytes_text(activation_bytes(plan.vision, IMAGE_PLACES, plan.dtype, block))
        yield f"an image of 1920 x 1080 is 2,691 tokens and takes {size} while it is encoded"
