"""Rows of the delta rule that may be taken back: what is kept of them, so that the state can be
brought to any row once it is known how many of them count.

A recurrent state cannot be shortened. So the state before the rows stays as it is, and each row
leaves a record of one of two forms: the state after it (the definition), or what the row adds to
the state, from which the state after any row is replayed. Convolutions leave their inputs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...config.config import Config
from ...numerics import at_least_float32
from ...parallel.roles import Role
from ..state import STATE_DIMS, KDAState, next_conv_state, put_group, roles_of
from .delta_rule import chunk_of, dot, recurrent_step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The state after each row: the definition. K V numbers a row and head."""

    states: Any  # [B, T, H, K, V]

    @classmethod
    def of_rows(
        cls,
        state: Float[Array, "B H K V"],
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        decay: Float[Array, "B T H K"],
        beta: Float[Array, "B T H"],
        steepest: float = -math.inf,
    ) -> tuple["Checkpoints", Float[Array, "B T H V"]]:
        """What rows leave, and their outputs, as `delta_rule.recurrent` has them."""

        def row(state: Array, token: tuple) -> tuple[Array, tuple[Array, Array]]:
            state, o = recurrent_step(state, *token)
            return state, (state, o)

        inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, decay, beta))
        _, (states, o) = jax.lax.scan(row, state, inputs)
        return cls(jnp.moveaxis(states, 0, 1)), jnp.moveaxis(o, 0, 1)

    def state_after(
        self, state: Float[Array, "B H K V"], count: Int[Array, " B"]
    ) -> Float[Array, "B H K V"]:
        """The state after the first `count` >= 1 rows; `state` is that before them."""
        return row_at(self.states, count - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """What each row adds to the state: its error, written under its key, and how the state decays.
    2 K + V numbers a row and head.

    With G the running sum of the log decay and u the errors of the delta rule, the state after row
    h is exp(G_h) S + sum over j <= h of exp(G_h - G_j) k_j u_j^T. All of them are values of the
    forward pass itself: another rounding of a gate would let the state drift.
    """

    errors: Any  # [B, T, H, V]
    keys: Any  # [B, T, H, K]
    decay: Any  # [B, T, H, K], the running sum of the log decay

    @classmethod
    def of_rows(
        cls,
        state: Float[Array, "B H K V"],
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        decay: Float[Array, "B T H K"],
        beta: Float[Array, "B T H"],
        steepest: float = -math.inf,
    ) -> tuple["Replay", Float[Array, "B T H V"]]:
        """What rows leave, and their outputs: they are one chunk, and the state is read once."""
        errors, cumulative, o = chunk_of(state, q, k, v, decay, beta, steepest)
        return cls(errors, k, cumulative), o

    def state_after(
        self, state: Float[Array, "B H K V"], count: Int[Array, " B"]
    ) -> Float[Array, "B H K V"]:
        """As that of `Checkpoints`."""
        counts = jnp.arange(self.keys.shape[1], dtype=jnp.int32)[None] < count[:, None]
        end = row_at(self.decay, count - 1)
        until_end = jnp.where(counts[..., None, None], end[:, None] - self.decay, -jnp.inf)
        added = dot("bthk,bthv->bhkv", self.keys * jnp.exp(until_end), self.errors)
        return jnp.exp(end)[..., None] * state + added


ROLLBACKS = {"replay": Replay, "checkpoints": Checkpoints}


def fields_of(rollback: str) -> tuple[str, ...]:
    """The names of the arrays of a record."""
    return tuple(field.name for field in dataclasses.fields(ROLLBACKS[rollback]))


def row_at(rows: Float[Array, "B T *dims"], at: Int[Array, " B"]) -> Float[Array, "B *dims"]:
    """One row of each request."""
    index = jnp.maximum(at, 0).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """What rows leave of a stack of KDA layers: records of the delta rule, and the inputs of the
    three convolutions. Every array leads with the stack's groups.
    """

    record: Any  # one of `ROLLBACKS`
    window_q: Any  # [G, B, T, H K]
    window_k: Any  # [G, B, T, H K]
    window_v: Any  # [G, B, T, H V]

    def commit(self, state: KDAState, start: Int[Array, " B"], count: Int[Array, " B"]) -> KDAState:
        """The stack's state after the first `count` rows; where that is 0, as it was."""

        def layer(pending: Pending, before: KDAState) -> KDAState:
            begun = before.restarted(start)
            windows = {
                name: next_conv_state(getattr(begun, name), getattr(pending, name), count)
                for name in ("window_q", "window_k", "window_v")
            }
            after = KDAState(pending.record.state_after(begun.memory, count), **windows)
            return jax.tree.map(lambda new, old: _where(count > 0, new, old), after, before)

        if len(self.window_q) > 1:
            return jax.vmap(layer)(self, state)
        only = layer(*jax.tree.map(lambda x: x[0], (self, state)))
        return jax.tree.map(lambda x: x[None], only)


def _where(chosen: Array, new: Array, old: Array) -> Array:
    return jnp.where(chosen.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verifying:
    """The state of a stack of KDA layers in a step whose rows may be taken back: it is read, and
    what the rows leave is written beside it.
    """

    state: KDAState
    pending: Pending

    @classmethod
    def of(cls, state: KDAState, T: int, rollback: str) -> "Verifying":
        """A state before T rows a request, with room for what these leave."""
        sizes = dict(zip("GBHKV", state.memory.shape, strict=True), T=T)
        room = lambda shape, dtype: jnp.zeros(shape, dtype)  # noqa: E731
        record = {
            name: room([sizes[dim] for dim in PENDING_DIMS[name]], state.memory.dtype)
            for name in fields_of(rollback)
        }
        inputs = {
            name: room((*array.shape[:2], T, array.shape[3]), array.dtype)
            for name, array in vars(state).items()
            if name != "memory"
        }
        return cls(state, Pending(ROLLBACKS[rollback](**record), **inputs))

    def at(self, group: int | Array) -> KDAState:
        """The state of a layer, without the leading group dim."""
        return self.state.at(group)

    def put(self, group: int | Array, pending: Pending) -> "Verifying":
        """The stack with what the rows leave of a layer."""
        rows = jax.tree.map(lambda x, new: put_group(x, group, new), self.pending, pending)
        return dataclasses.replace(self, pending=rows)


# The dims of every array of a `Pending`, and the roles by which some of them are sharded.
PENDING_DIMS = {
    "states": ("G", "B", "T", "H", "K", "V"),
    "errors": ("G", "B", "T", "H", "V"),
    "keys": ("G", "B", "T", "H", "K"),
    "decay": ("G", "B", "T", "H", "K"),
    **{name: STATE_DIMS[name] for name in ("window_q", "window_k", "window_v")},
}


def rollback_bytes(config: Config, heads: int, rollback: str, dtype: str) -> int:
    """Bytes of what a row leaves of all KDA layers with this many heads, and of its output row."""
    K, V, item = config.kda_key_dim, config.kda_value_dim, jnp.dtype(dtype).itemsize
    sizes = dict(G=1, B=1, T=1, H=heads, K=K, V=V, W=1, HK=heads * K, HV=heads * V)
    count = lambda name: math.prod(sizes[dim] for dim in PENDING_DIMS[name])  # noqa: E731
    record = sum(map(count, fields_of(rollback))) * at_least_float32(dtype).itemsize
    windows = sum(count(name) for name in PENDING_DIMS if name.startswith("window")) * item
    return len(config.kda_layers) * (record + windows) + config.hidden * item


def pending_tree(rollback: str, leaf: Callable[[tuple[Role | None, ...]], Any]) -> Pending:
    """A `Pending` with what `leaf` makes of the roles of each array's dims, such as its axes."""
    of = {name: leaf(roles_of(dims)) for name, dims in PENDING_DIMS.items()}
    record = ROLLBACKS[rollback](**{name: of[name] for name in fields_of(rollback)})
    return Pending(record, of["window_q"], of["window_k"], of["window_v"])
