"""What is kept between steps, and what a step is told: recurrent memories, windows, latent and
index-key caches.

Every array leads with the group G of its stack of layers (1 where layers are not scanned) and is
updated in place: the whole stack travels through a step, a layer reads and writes at its own group.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ..config.config import Config
from ..errors import RequestError, shown
from ..parallel import collectives
from ..parallel.helix import Stripes
from ..parallel.mesh import DATA, MODEL, Sizes
from ..parallel.placement import Placement
from ..parallel.reductions import SUM, Reduction
from ..parallel.roles import Role

ONE = {DATA: 1, MODEL: 1}  # the mesh of one device

Leaf = Any  # an array, or what stands for one in a tree of the same form: its shape, its mesh axes


@dataclasses.dataclass(frozen=True)
class Forms:
    """Which form of each hard operation runs: the plain definition or the fast one. They agree;
    tests hold them to it.

    The fast forms of attention and experts loop as often as the data says and have no gradient:
    training takes `TRAINING`.
    """

    kda: str = "chunked"  # or "recurrent"
    mla: str = "absorbed"  # or "expanded", which selects by a full sort
    moe: str = "grouped"  # or "dense"
    chunk: int = 64  # tokens of a KDA chunk
    # How rows travel to experts: "padded" blocks, or "ragged" ones, which CPUs cannot send.
    transport: str = "padded"
    # "teach": attention's gradient reaches the indexer, whose choice has none.
    select: str = "plain"

    def __post_init__(self) -> None:
        known = {
            "kda": ("chunked", "recurrent"),
            "mla": ("absorbed", "expanded"),
            "moe": ("grouped", "dense"),
            "transport": ("padded", "ragged"),
            "select": ("plain", "teach"),
        }
        problems = [
            f"{name} must be one of {', '.join(forms)}, got {getattr(self, name)!r}"
            for name, forms in known.items()
            if getattr(self, name) not in forms
        ]
        if self.chunk < 1:
            problems.append(f"chunk must be positive, got {self.chunk}")
        if problems:
            raise ValueError("\n".join(problems))


DEFINITIONS = Forms(kda="recurrent", mla="expanded", moe="dense")
TRAINING = Forms(mla="expanded", moe="dense", chunk=16, select="teach")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What every layer of one call is told. Row b brings `lengths[b]` new tokens after the
    `start[b]` it has seen. Of the residual stream's B T rows a rank holds all, or its own slice.
    """

    start: Int[Array, " B"]
    lengths: Int[Array, " B"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    group: int | Int[Array, ""]
    forms: Forms = dataclasses.field(metadata={"static": True})
    place: Placement = dataclasses.field(default=Placement(), metadata={"static": True})
    reduce: Reduction = dataclasses.field(default=SUM, metadata={"static": True})
    sliced: bool = dataclasses.field(default=False, metadata={"static": True})
    stripes: Stripes = dataclasses.field(default=Stripes(), metadata={"static": True})

    @classmethod
    def of(
        cls,
        start: Array,
        lengths: Array,
        T: int,
        forms: Forms,
        place: Placement = Placement(),  # noqa: B008
        sizes: Sizes = ONE,
    ) -> "Step":
        """A call of at most T new tokens a row, on a mesh of such sizes."""
        new = jnp.arange(T, dtype=jnp.int32)[None]
        rows = len(start) * T
        return cls(
            start,
            lengths,
            positions=start[:, None] + new,
            valid=new < lengths[:, None],
            group=0,
            forms=forms,
            place=place,
            reduce=place.reduction("decode" if T == 1 else "prefill", rows, sizes[MODEL]),
            sliced=place.slices_rows(rows),
            stripes=place.stripes(sizes),
        )

    @property
    def rows(self) -> int:
        """Rows of the residual stream in all."""
        return self.valid.size

    @property
    def total(self) -> Int[Array, " B"]:
        """Tokens that each row will have seen after this call."""
        return self.start + self.lengths

    @property
    def axes_of_other_rows(self) -> tuple[str, ...]:
        """The mesh axes over which experts are spread and rows are cut."""
        cut = (DATA, MODEL) if self.sliced else (DATA,)
        return tuple(axis for axis in self.place.expert_axes if axis in cut)

    def every(self, x: Float[Array, "P D"]) -> Float[Array, "Q D"]:
        """The residual rows that a rank holds -> all of them."""
        return collectives.all_rows(x, self.rows) if self.sliced else x

    def own(self, x: Float[Array, "P D"]) -> Float[Array, "c D"]:
        """The residual rows that a rank holds -> those that it alone works on."""
        return x if self.sliced else collectives.own_rows(x)

    def enter(self, x: Float[Array, "P D"]) -> Float[Array, "B T D"]:
        """The residual rows that a rank holds -> all rows of its requests, for attention."""
        return self.every(x).reshape(*self.valid.shape, -1)

    def close(
        self,
        partial: Sequence[Float[Array, "Q D"]],
        own: Sequence[Float[Array, "c D"]] = (),
        how: Reduction | None = None,
    ) -> Float[Array, "P D"]:
        """The complete rows that a rank holds: the sum over ranks of their partial sums of all
        rows, and of what a rank made of its own rows alone.
        """
        how = self.reduce if how is None else how
        if self.sliced:
            scattered = [collectives.reduce_scatter(_sum(partial), how)] if partial else []
            return _sum([*own, *scattered])
        among = [collectives.among_zeros(one, self.rows) for one in own]
        return collectives.all_reduce(_sum([*among, *partial]), how)

    @property
    def key_rank(self) -> int | Int[Array, ""]:
        """This rank's number among those over which keys are cut."""
        return 0 if self.stripes.ranks == 1 else collectives.rank()

    @property
    def held(self) -> Int[Array, ""]:
        """The most keys that this rank holds of a row after this call."""
        return self.stripes.length(jnp.max(self.total), self.key_rank)

    def positions_of(self, slots: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The positions that this rank's slots hold."""
        return self.stripes.position(slots, self.key_rank)


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, parts)


def _at(array: Array, group: int | Array) -> Array:
    return (
        array[0]
        if array.shape[0] == 1
        else jax.lax.dynamic_index_in_dim(array, group, 0, keepdims=False)
    )


def _put(array: Array, group: int | Array, value: Array) -> Array:
    if array.shape[0] == 1:
        return value[None].astype(array.dtype)
    return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), group, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDAState:
    """The delta-rule memory and the last W - 1 convolution inputs of q, k and v, which are cut by
    head one by one.
    """

    memory: Leaf  # [G, B, H, K, V], at least float32
    window_q: Leaf  # [G, B, W - 1, H K]
    window_k: Leaf  # [G, B, W - 1, H K]
    window_v: Leaf  # [G, B, W - 1, H V]

    def at(self, group: int | Array) -> "KDAState":
        """The state of one layer, without the leading group dim."""
        return jax.tree.map(lambda x: _at(x, group), self)

    def put(self, group: int | Array, layer: "KDAState") -> "KDAState":
        """The stack with one layer replaced, in place where the buffer is donated."""
        return jax.tree.map(lambda x, new: _put(x, group, new), self, layer)

    def restarted(self, start: Int[Array, " B"]) -> "KDAState":
        """Zeros for rows that begin here, whatever an earlier request left in their slot."""
        fresh = lambda x: (start == 0).reshape(-1, *[1] * (x.ndim - 1))  # noqa: E731
        return jax.tree.map(lambda x: jnp.where(fresh(x), jnp.zeros((), x.dtype), x), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAState:
    """One latent row per token seen, and K3.1's index key; slots beyond a row's length hold
    anything.

    bfloat16 caches are kept as their bits (uint16) on CPU, where a bfloat16 update would convert
    the whole cache.
    """

    latents: Leaf  # [G, B, S, R]
    index_keys: Leaf | None  # [G, B, S, I]


@runtime_checkable
class StateHome(Protocol):
    """What laid a state's arrays out on its mesh: the programs of a model (runtime.program)."""

    @property
    def config(self) -> Config:
        """Sizes and switches of the model."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The devices that hold the arrays."""
        ...

    @property
    def place(self) -> Placement:
        """How the arrays are sharded over them."""
        ...

    @property
    def dtype(self) -> str:
        """The type of activations."""
        ...

    @property
    def scan(self) -> bool:
        """Whether equal groups of layers are scanned, and so their states stacked."""
        ...

    @property
    def quantization(self) -> Any:
        """How the model's experts are stored."""
        ...

    def other_states_than(self, other: Any) -> list[str]:
        """How states of this home differ from those of another, one line for each difference."""
        ...

    def save(self, state: "State", path: str | os.PathLike) -> None:
        """Write a state to a new folder."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that the model keeps of a batch of requests between calls. `prefill` and `decode` consume
    it and return the next; `kimi_jax.move` takes it to another placement or mesh.
    """

    layers: list[list[KDAState | MLAState]]
    length: Leaf  # [B], tokens seen by each row
    hidden: Leaf  # [B, D], normed output at each row's last token, for rows that bring no token
    max_length: int = dataclasses.field(metadata={"static": True})
    # Between steps: the requests, which inactive rows pad to the mesh, and the programs that laid
    # the arrays out. Inside a step: 0 and None, so that no batch size compiles a step again.
    batch: int = dataclasses.field(default=0, metadata={"static": True})
    home: StateHome | None = dataclasses.field(default=None, metadata={"static": True})

    def bare(self) -> "State":
        """What a step takes."""
        return dataclasses.replace(self, batch=0, home=None)

    def named(self) -> dict[tuple[int, int, str], Leaf]:
        """The arrays of the layers, by stack, position in its groups, and name."""
        return {
            (i, j, field.name): getattr(layer, field.name)
            for i, stack in enumerate(self.layers)
            for j, layer in enumerate(stack)
            for field in dataclasses.fields(layer)
            if getattr(layer, field.name) is not None
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write all of it to a new folder, for `kimi_jax.load_state`. It appears complete or not at
        all; every process must call this. Raises `RequestError` for a state that no step returned
        or that a step has consumed, and `FileExistsError`.
        """
        home_of(self).save(self, path)


def home_of(state: Any) -> StateHome:
    """The programs that laid a state out. Raises `RequestError` for what is not a state between
    steps, and for one that a step has consumed.
    """
    if not isinstance(state, State) or state.home is None:
        raise RequestError(f"a state comes from new_state or a step, got {shown(state)}")
    if state.length.is_deleted():
        raise RequestError("this state was consumed by a step: go on with the one it returned")
    return state.home


def cache_dtype(dtype: jnp.dtype, on_cpu: bool) -> jnp.dtype:
    """What a cache of `dtype` is stored as: bfloat16 as its bits on CPU."""
    return jnp.dtype(jnp.uint16) if on_cpu and dtype == jnp.bfloat16 else dtype


def from_cache(stored: Array, dtype: jnp.dtype) -> Array:
    """Stored bits or numbers as numbers of `dtype`."""
    return stored if stored.dtype == dtype else jax.lax.bitcast_convert_type(stored, dtype)


def write_rows(cache: Array, rows: Float[Array, "B T R"], step: Step) -> Array:
    """Write each valid new row at its position, where this rank holds that: the cost is the rows,
    not the cache.

    All else aims at slot S, which does not exist and is dropped; an index of -1 would wrap to the
    last slot.
    """
    if cache.dtype != rows.dtype:
        rows = jax.lax.bitcast_convert_type(rows, cache.dtype)
    here = step.valid
    if step.stripes.ranks > 1:
        here &= step.stripes.owner(step.positions) == step.key_rank
    slots = jnp.where(here, step.stripes.slot(step.positions), cache.shape[2])
    batch = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[step.group, batch, slots].set(rows, mode="drop")


def read_block(
    cache: Array, first: Int[Array, ""], size: int, dtype: jnp.dtype, step: Step
) -> tuple[Float[Array, "B block R"], Int[Array, " block"]]:
    """Slots first .. first + size of one layer, zero where nothing was written (a slot may hold NaN
    from elsewhere), and their positions.
    """
    _, B, _, R = cache.shape
    start = (jnp.int32(step.group), jnp.int32(0), jnp.int32(first), jnp.int32(0))
    block = from_cache(jax.lax.dynamic_slice(cache, start, (1, B, size, R))[0], dtype)
    positions = step.positions_of(first + jnp.arange(size, dtype=jnp.int32))
    written = positions[None] < step.total[:, None]
    return jnp.where(written[..., None], block, jnp.zeros((), dtype)), positions


# The dims of every array of a state, and the roles by which some of them are sharded.
STATE_DIMS = {
    "memory": ("G", "B", "H", "K", "V"),
    "window_q": ("G", "B", "W", "HK"),
    "window_k": ("G", "B", "W", "HK"),
    "window_v": ("G", "B", "W", "HV"),
    "latents": ("G", "B", "S", "R"),
    "index_keys": ("G", "B", "S", "I"),
    "length": ("B",),
    "hidden": ("B", "D"),
}
_ROLE_OF_DIM = {
    "B": Role.REQUESTS,
    "H": Role.HEADS,
    "HK": Role.HEADS,
    "HV": Role.HEADS,
    "S": Role.CACHED_KEYS,
}
STATE_ROLES = {
    name: tuple(_ROLE_OF_DIM.get(dim) for dim in dims) for name, dims in STATE_DIMS.items()
}


# Rows that move between states. Rows are cut over `data`: a row of all ranks is one of theirs.


def row_of(name: str, array: Array, row: Int[Array, ""]) -> Array:
    """One row of all data ranks, on every one of them."""
    at = STATE_DIMS[name].index("B")
    own = array.shape[at]
    mine = jax.lax.dynamic_slice_in_dim(array, row % own, 1, at)
    every = collectives.all_gather(mine, at, DATA)
    return jax.lax.dynamic_slice_in_dim(every, row // own, 1, at)


def with_row(name: str, array: Array, row: Int[Array, ""], new: Array) -> Array:
    """The array with one row of all data ranks replaced."""
    at = STATE_DIMS[name].index("B")
    own = array.shape[at]
    here = jax.lax.dynamic_slice_in_dim(array, row % own, 1, at)
    kept = jnp.where(row // own == collectives.rank(DATA), new, here)
    return jax.lax.dynamic_update_slice_in_dim(array, kept, row % own, at)


def slots_of(
    name: str, array: Array, row: Int[Array, ""], first: Int[Array, ""], width: int
) -> Array:
    """`width` slots from `first` on, of one row of all data ranks."""
    slots = first + jnp.arange(width, dtype=jnp.int32)
    return row_of(name, jnp.take(array, slots, axis=STATE_DIMS[name].index("S"), mode="clip"), row)


def with_slots(
    array: Array, row: Int[Array, ""], first: Int[Array, ""], last: Int[Array, ""], new: Array
) -> Array:
    """The cache with slots first .. last of one row of all data ranks replaced by the first of
    `new`. All else aims at a slot that does not exist.
    """
    _, own, S, _ = array.shape
    slots = first + jnp.arange(new.shape[2], dtype=jnp.int32)
    here = (slots < last) & (row // own == collectives.rank(DATA))
    return array.at[:, row % own, jnp.where(here, slots, S)].set(new[:, 0], mode="drop")
