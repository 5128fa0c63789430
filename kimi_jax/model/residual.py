"""Attention residuals: every sublayer reads a learned mixture of earlier block starts and the
running sum (Attention Residuals, arXiv 2603.15031; the form in blocks).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..numerics import widen
from .layers import HIGHEST, weight
from .step import Tapped


def scores(
    values: Float[Array, "*rows D"], direction: Float[Array, " D"], eps: float
) -> Float[Array, "*rows"]:
    """(value / rms(value)) . direction, in at least float32."""
    wide = widen(values)
    rms = jnp.sqrt(jnp.mean(wide * wide, -1) + eps)
    return jnp.einsum("...d,d->...", wide, widen(direction), precision=HIGHEST) / rms


def mix(
    x: Float[Array, "P D"],
    bank: Float[Array, "N P D"],
    count: int | Int[Array, ""],
    direction: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "P D"], Float[Array, "N1 P"]]:
    """softmax-weighted sum of the first `count` bank rows and x, and the weights [N + 1, P], x's
    last.

    Scores use RMS-normalised values, the sum the values themselves; all in at least float32,
    rounded once at the end. The bank and x are scored apart: joining them would copy the bank.
    """
    if isinstance(count, int):
        bank = bank[:count]
    banked = scores(bank, direction, eps)
    if not isinstance(count, int):
        banked = jnp.where(
            jnp.arange(bank.shape[0], dtype=jnp.int32)[:, None] < count, banked, -jnp.inf
        )
    weights = jax.nn.softmax(jnp.concatenate([banked, scores(x, direction, eps)[None]]), axis=0)
    mixed = jnp.einsum("np,npd->pd", weights[:-1], widen(bank), precision=HIGHEST)
    return (mixed + weights[-1, :, None] * widen(x)).astype(x.dtype), weights


def push(
    x: Float[Array, "P D"],
    bank: Float[Array, "N P D"],
    count: int | Int[Array, ""],
    pushing: bool | Array,
) -> tuple[Float[Array, "P D"], Float[Array, "N P D"], int | Int[Array, ""]]:
    """At a block start, move x to the bank and restart the sum at zero; elsewhere change nothing.

    `pushing` may be traced: then, where nothing is pushed, a bank row is rewritten with its
    value, never the full bank.
    """
    if isinstance(pushing, bool):
        if not pushing:
            return x, bank, count
        return jnp.zeros_like(x), bank.at[count].set(x), count + 1
    slot = jnp.minimum(count, bank.shape[0] - 1)
    row = jnp.where(pushing, x, bank[slot])
    return jnp.where(pushing, 0, x), bank.at[slot].set(row), count + pushing.astype(jnp.int32)


class Mix(nnx.Module):
    """The weights of a mixture. Only the product of norm and projection matters."""

    def __init__(self, config: Config, dtype: DTypeLike):
        self.eps = config.norm_eps
        self.norm = weight(dtype, D=config.hidden)
        self.proj = weight(dtype, D=config.hidden)

    @jax.named_scope("mix")
    def __call__(self, x: Array, bank: Array, count: int | Array) -> tuple[Array, Array]:
        """`mix` of x and the bank under these weights."""
        return mix(x, bank, count, widen(self.norm[...]) * widen(self.proj[...]), self.eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taps:
    """The residual stream after the tapped layers, filled while the layers run."""

    rows: Float[Array, "M P D"]
    tapped: Tapped = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tapped: Tapped, x: Float[Array, "P D"]) -> "Taps":
        """Room for streams like x."""
        return cls(jnp.zeros((len(tapped.layers), *x.shape), x.dtype), tapped)

    def record(
        self, layer: int | Int[Array, ""], x: Float[Array, "P D"], mixture: Float[Array, "P D"]
    ) -> "Taps":
        """Keep the stream after a layer, if that is tapped: x is the running sum there, `mixture`
        what is read next. `layer` may be traced: then one row is rewritten, never all.
        """
        value = x if self.tapped.stream == "sum" else mixture
        if isinstance(layer, int):
            if layer not in self.tapped.layers:
                return self
            slot = self.tapped.layers.index(layer)
        else:
            is_layer = jnp.asarray(self.tapped.layers, jnp.int32) == layer
            slot = jnp.where(is_layer.any(), jnp.argmax(is_layer), len(is_layer)).astype(jnp.int32)
        return dataclasses.replace(self, rows=self.rows.at[slot].set(value, mode="drop"))
