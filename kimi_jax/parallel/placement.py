"""How a model is partitioned over a mesh: the table sharding role -> mesh axis, and the `Placement`
that answers for a run. Which role a dim has stands where weights and states are declared.

One decoder serves every parallel system; a placement is a value given to it, never a second
decoder.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..config.config import Config
from ..errors import PlacementError, meant, shown
from ..numerics import is_whole
from .choices import CHOICES, PADS
from .helix import Stripes
from .mesh import DATA, MODEL, Sizes, mesh_sizes, sizes_text
from .reductions import Reduction, acting, choose
from .roles import Role

# Roles whose mesh axis no option changes; `Placement.axes` has them all.
_FIXED_AXES = {
    Role.REQUESTS: (DATA,),
    Role.HEADS: (MODEL,),
    Role.FFN_WIDTH: (MODEL,),
    Role.VOCABULARY: (MODEL,),
}

# Any value is taken and then checked, so that one error names all that are wrong.
Word = str | Any
Words = Sequence[str] | Any
Number = int | Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the model is partitioned: activations, KV cache, experts, and how partial sums are
    reduced. Frozen and hashable; lists become tuples. `PlacementError` names every option that is
    wrong.

    `rows`: "full" keeps all rows of the residual stream on every model rank; "sliced" gives rank r
    of n the rows r c to (r + 1) c, c = ceil(rows / n): attention sees all of them (all-gather,
    reduce-scatter), all else runs on local rows. Better for many rows; "auto" slices steps of at
    least `sliced_from` rows a data rank (`kimi-jax bench --rows` measures it).
    `keys`: "whole" replicates the KV cache (latent rows and index keys) on every model rank;
    "helix" shards it in blocks of `helix_block` positions, dealt to the ranks in turn: 1/n of the
    memory. Every rank then attends for all heads over its local keys, and `exchange` says what it
    sends of each head: "latents", or "values", which is fewer bytes and more work.
    `shared`: under "sliced" or "auto" rows, "whole" replicates the shared experts on every rank,
    "sliced" shards their width for one more gather and scatter; under "full" rows they are always
    sharded.
    `experts`: "exchange" sends each row's latent to the ranks that hold its experts; "local" runs
    every rank's experts on all rows and all-reduces once, better for few rows; "auto" is local in
    steps of fewer than `local_below` rows a data rank (`kimi-jax bench --experts` measures it; 0:
    never). `expert_axes`: experts over ("model",) or over ("data", "model") together.
    `latent`: "sharded" shards the latent projections and the router too. `pad`: of "heads",
    "experts", "vocab", "dense" and "shared", those that are zero-padded where they do not divide.
    `prefill_reduce`: how prefill steps of at least `prefill_ring_rows` rows a data rank reduce
    their partial sums (0: as all others, by the backend's sum); smaller ones then take "two_shot".
    A number above the chunk of `load` does nothing, which a warning says.
    The `ring_` options are those of `reductions.Reduction`, for "ring_bf16".
    On one device every answer is the same program.
    """

    rows: Word = "full"
    sliced_from: Number = 0
    keys: Word = "whole"
    helix_block: Number = 64
    exchange: Word = "latents"
    experts: Word = "exchange"
    local_below: Number = 0
    expert_axes: Words = (MODEL,)
    latent: Word = "whole"
    shared: Word = "whole"
    pad: Words = ()
    prefill_reduce: Word = "sum"
    prefill_ring_rows: Number = 0
    ring_pieces: Number = 1
    ring_fp32_hops: Number = 0
    ring_granule_rows: Number = 0

    def __post_init__(self) -> None:
        problems = [problem for name in CHOICES for problem in self._choice_problems(name)]
        problems += self._pad_problems()
        for field in dataclasses.fields(self):
            if isinstance(field.default, int):
                problems += self._number_problems(field.name)
        if problems:
            raise PlacementError("\n".join(problems))

    def _choice_problems(self, name: str) -> Iterator[str]:
        value = getattr(self, name)
        if name == "expert_axes":
            if not _is_list_of_names(value):
                yield f"expert_axes must be a list of names, got {shown(value)}"
                return
            value = tuple(dict.fromkeys(map(str, value)))
        elif isinstance(value, str):
            value = str(value)
        if type(value) not in (str, tuple) or value not in CHOICES[name]:
            known = ", ".join(map(str, CHOICES[name]))
            hint = meant(value, CHOICES[name])
            yield f"{name} must be one of {known}, got {shown(value)}{hint}"
        object.__setattr__(self, name, value)

    def _pad_problems(self) -> Iterator[str]:
        if not _is_list_of_names(self.pad):
            yield f"pad must be a list of names, got {shown(self.pad)}"
            return
        object.__setattr__(self, "pad", tuple(dict.fromkeys(map(str, self.pad))))
        for name in self.pad:
            if name not in PADS:
                known = f"known are {', '.join(PADS)}{meant(name, PADS)}"
                yield f"pad: unknown dimension {shown(name)}, {known}"

    def _number_problems(self, name: str) -> Iterator[str]:
        value, low = getattr(self, name), 1 if name in ("ring_pieces", "helix_block") else 0
        if not is_whole(value, 0):
            yield f"{name} must be a whole number >= {low}, got {shown(value)}"
        elif value < low:
            yield f"{name} must be at least {low}, got {value}"
        elif value >= 2**63:
            yield f"{name} must be below 2**63, got {shown(value)}"
        else:
            object.__setattr__(self, name, int(value))

    def check(self, config: Config, mesh: Mesh | AbstractMesh | Sizes | Any) -> None:
        """Raise unless this placement can run `config` on `mesh`; nothing is allocated before.

        One `PlacementError` names every dimension that does not divide, with its size and the rank
        count.
        """
        sizes = mesh_sizes(mesh)
        lines = [*_division_lines(self, config, sizes), *_option_lines(self, config, sizes)]
        if lines:
            raise PlacementError("\n".join(lines))

    def axes(self, role: Role | None) -> tuple[str, ...]:
        """The mesh axes that shard dims of a role; none where they are replicated."""
        if role is None:
            return ()
        helix = self.keys == "helix"
        by_option = {
            Role.EXPERTS: tuple(self.expert_axes),
            Role.LATENT: (MODEL,) if self.latent == "sharded" else (),
            Role.SHARED_WIDTH: ((MODEL,) if self.rows == "full" or self.shared == "sliced" else ()),
            Role.CACHED_KEYS: (MODEL,) if helix else (),
            Role.QUERY_HEADS: () if helix else (MODEL,),
            Role.VALUE_HEADS: () if helix and self.exchange == "values" else (MODEL,),
        }
        return {**_FIXED_AXES, **by_option}[role]

    def spec(self, roles: Sequence[Role | None]) -> PartitionSpec:
        """The mesh axes of each dim of an array, by the dims' roles."""
        axes = [self.axes(role) for role in roles]
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))

    def padded(self, role: Role | None, count: int, sizes: Sizes) -> int:
        """`count` things of a role, zero-padded to a multiple of the ranks that share them."""
        ranks = math.prod(sizes[axis] for axis in self.axes(role))
        return -(-count // ranks) * ranks

    def padded_shape(
        self,
        roles: Sequence[Role | None],
        counts: Sequence[int],
        shape: Sequence[int],
        sizes: Sizes,
    ) -> tuple[int, ...]:
        """The shape that a weight takes on a mesh: sharded dims are zero-padded to a multiple of
        their ranks. `counts`: the things of each dim, where each (a head) takes several places.
        """
        dims = zip(roles, counts, shape, strict=True)
        return tuple(
            self.padded(role, count, sizes) * (size // count) for role, count, size in dims
        )

    def runs_local_experts(self, rows: int) -> bool:
        """Whether a step of `rows` rows a data rank runs local experts."""
        return self.experts == "local" or (self.experts == "auto" and rows < self.local_below)

    def slices_rows(self, rows: int) -> bool:
        """Whether a step of `rows` rows a data rank slices them over the model ranks."""
        return self.rows == "sliced" or (self.rows == "auto" and rows >= self.sliced_from)

    def row_axes_of_experts(self, is_sliced: bool) -> tuple[str, ...]:
        """The mesh axes over which both experts and the rows of the residual stream are split."""
        row_axes = (DATA, MODEL) if is_sliced else (DATA,)
        return tuple(axis for axis in self.expert_axes if axis in row_axes)

    def stripes(self, sizes: Sizes) -> Stripes:
        """Where the positions of the KV cache live."""
        return Stripes(self.helix_block, sizes[MODEL]) if self.keys == "helix" else Stripes()

    def model_ranks(self, sizes: Sizes) -> int:
        """The ranks that work on the same requests."""
        return sizes[MODEL]

    def within(self, chunk: int) -> "Placement":
        """This placement for prefill steps of at most `chunk` tokens a row: a threshold above it
        does nothing, which a warning says.
        """
        acts = acting(self.prefill_ring_rows, chunk)
        same = acts == self.prefill_ring_rows
        return self if same else dataclasses.replace(self, prefill_ring_rows=acts)

    def reduction(self, step: str, rows: int, sizes: Sizes) -> Reduction:
        """How a step of `rows` rows a data rank reduces its partial sums; `reductions.choose`
        says when.
        """
        threshold = self.prefill_ring_rows
        return choose(
            self._reduction,
            step,
            capacity=rows,
            chunk=threshold,
            threshold=threshold,
            n=sizes[MODEL],
        )

    @property
    def _reduction(self) -> Reduction:
        if self.prefill_reduce != "ring_bf16":
            return Reduction(self.prefill_reduce)
        return Reduction(
            self.prefill_reduce, self.ring_pieces, self.ring_fp32_hops, self.ring_granule_rows
        )


def as_placement(placement: Any = None) -> Placement:
    """The placement that was given, the default one for None; `PlacementError` for other values."""
    if placement is None:
        return Placement()
    if not isinstance(placement, Placement):
        raise PlacementError(f"placement must be a Placement, got {shown(placement)}")
    return placement


def _division_lines(place: Placement, config: Config, sizes: Sizes) -> list[str]:
    """A title and a line for every dimension that does not divide; none where all do."""
    lines = [
        f"  {name}: {size} over {shown(ranks)} ranks"
        + (f" (pad={(pad,)!r} would pad it to {shown(-(-size // ranks) * ranks)})" if pad else "")
        for name, size, ranks, pad in _sharded_dims(place, config, sizes)
        if size % ranks and pad not in place.pad
    ]
    return [f"a mesh of {sizes_text(sizes)} does not divide:", *lines] if lines else []


def _sharded_dims(
    place: Placement, config: Config, sizes: Sizes
) -> Iterator[tuple[str, int, int, str | None]]:
    """Every dimension that is sharded: its name, size, ranks, and what `pad` calls it."""
    model = sizes[MODEL]
    spread = math.prod(sizes[axis] for axis in place.expert_axes)
    dense = [config.is_dense(i) for i in range(config.layers)]
    if config.mla_layers:
        yield "heads", config.heads, model, "heads"
    if config.kda_layers:
        yield "KDA heads", config.kda_heads, model, "heads"
    yield "vocabulary", config.vocab, model, "vocab"
    if not all(dense):
        yield "experts", config.experts, spread, "experts"
    if any(dense):
        yield "dense intermediate", config.dense_ffn, model, "dense"
    if not all(dense) and config.shared_experts and place.axes(Role.SHARED_WIDTH):
        yield "shared intermediate", config.shared_ffn, model, "shared"
    if not all(dense) and place.latent == "sharded":
        yield "latent width", config.latent, model, None
        if spread != model:
            yield "router", config.experts, model, "experts"


def _option_lines(place: Placement, config: Config, sizes: Sizes) -> Iterator[str]:
    """A line for every option whose number does not go with the config or the mesh."""
    hops = place.ring_fp32_hops if place.prefill_reduce == "ring_bf16" else 0
    most = max(0, sizes[MODEL] - 2)
    if sizes[MODEL] > 1 and hops > most:
        ranks = shown(sizes[MODEL])
        yield f"ring_fp32_hops must lie in 0..{shown(most)} at {ranks} ranks, got {hops}"
    lap = place.helix_block * sizes[MODEL]
    if place.keys == "helix" and lap >= 2**31:
        yield (
            f"helix_block: {place.helix_block} over {shown(sizes[MODEL])} ranks is {shown(lap)} "
            "positions, more than 32 bits count"
        )
    dense = [i for i in range(config.layers) if config.is_dense(i)]
    if place.rows != "full" and dense[-1:] > [len(dense) - 1]:
        late = ", ".join(str(i) for at, i in enumerate(dense) if i > at)
        yield (
            f"rows={place.rows!r}: no layer after the first with experts may be dense, and layers "
            f"{late} are"
        )


def _is_list_of_names(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(name, str) for name in value)
