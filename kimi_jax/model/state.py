"""What is kept between steps: recurrent and conv states, caches of latent rows and of index keys.

Every array leads with the group G of its stack of layers (1 where layers are not scanned) and is
updated in place: a step carries the full stack, a layer reads and writes at its group.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..errors import RequestError, shown
from ..parallel.placement import Placement
from ..parallel.roles import Role
from .step import Step

Leaf = Any  # an array, or in a tree of the same structure its shape or its mesh axes


def _at(array: Array, group: int | Array) -> Array:
    return (
        array[0]
        if array.shape[0] == 1
        else jax.lax.dynamic_index_in_dim(array, group, 0, keepdims=False)
    )


def put_group(array: Array, group: int | Array, value: Array) -> Array:
    """A stack of arrays with that of a group replaced."""
    if array.shape[0] == 1:
        return value[None].astype(array.dtype)
    return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), group, 0)


def next_conv_state(
    conv_state: Float[Array, "B W1 C"], x: Float[Array, "B T C"], count: Int[Array, " B"]
) -> Float[Array, "B W1 C"]:
    """The conv state after the first `count` of the inputs x: the last W - 1 of all inputs so far,
    in the type of x.
    """
    inputs = jnp.concatenate([conv_state.astype(x.dtype), x], axis=1)
    last = count[:, None] + jnp.arange(conv_state.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(inputs, last[..., None], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDAState:
    """Recurrent state of the delta rule, and conv states: the last W - 1 convolution inputs of q, k
    and v, each of which is sharded by head.
    """

    memory: Leaf  # [G, B, H, K, V], recurrent state, at least float32
    window_q: Leaf  # [G, B, W - 1, H K], conv states
    window_k: Leaf  # [G, B, W - 1, H K]
    window_v: Leaf  # [G, B, W - 1, H V]

    def at(self, group: int | Array) -> "KDAState":
        """The state of a layer, without the leading group dim."""
        return jax.tree.map(lambda x: _at(x, group), self)

    def put(self, group: int | Array, layer: "KDAState") -> "KDAState":
        """The stack with the state of a layer replaced, in place where the buffer is donated."""
        return jax.tree.map(lambda x, new: put_group(x, group, new), self, layer)

    def restarted(self, start: Int[Array, " B"]) -> "KDAState":
        """Zeros for rows that begin here, whatever an earlier request left in their slot."""
        fresh = lambda x: (start == 0).reshape(-1, *[1] * (x.ndim - 1))  # noqa: E731
        return jax.tree.map(lambda x: jnp.where(fresh(x), jnp.zeros((), x.dtype), x), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAState:
    """A latent row per token seen, and K3.1's index key; slots past a row's length are undefined.

    bfloat16 caches are kept as their bits (uint16) on CPU, where a bfloat16 update would convert
    the full cache.
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
        """How states of this home differ from those of another, a line for each difference."""
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

    # KDAState or MLAState; inside a step whose rows may be taken back, `rollback.Verifying`.
    layers: list[list[Any]]
    length: Leaf  # [B], tokens seen by each row
    hidden: Leaf  # [B, D], normed output at each row's last token, for rows that bring no token
    max_length: int = dataclasses.field(metadata={"static": True})
    # Between steps: the requests, which inactive rows pad to the mesh, and the programs that laid
    # the arrays out. Inside a step: 0 and None, so that no batch size compiles a step again.
    batch: int = dataclasses.field(default=0, metadata={"static": True})
    home: StateHome | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        owner = f", {self.home.dtype}, {self.home.config.layers} layers" if self.home else ""
        return f"State(batch={self.batch}, max_length={self.max_length}{owner})"

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
    steps, and for a state that a step has consumed.
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
    """Slots first .. first + size of a layer, zero where nothing was written (a slot may hold NaN
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


def roles_of(dims: Sequence[str]) -> tuple[Role | None, ...]:
    """The roles of an array's dims."""
    return tuple(_ROLE_OF_DIM.get(dim) for dim in dims)


STATE_ROLES = {name: roles_of(dims) for name, dims in STATE_DIMS.items()}
