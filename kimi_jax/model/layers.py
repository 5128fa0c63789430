"""Small parts that every layer uses: declaring a weight, linear maps, norms, SiTU and the gated
MLP.
"""

import enum
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel.roles import Dim, Role

HIGHEST = jax.lax.Precision.HIGHEST


class Expert(nnx.Param):
    """A weight of the routed experts: read in place by (layer, expert), never copied in full."""


class Term(enum.Enum):
    """The part of the model that a weight is counted to in a plan."""

    EXPERTS = "routed experts"
    KDA = "KDA"
    MLA = "MLA"
    SHARED = "shared experts"
    EMBEDDING = "embedding and head"
    DENSE = "dense layers"
    LATENT = "latent projections"
    ROUTER = "router"
    MLA_DOWN = "MLA latents down"
    INDEXER = "indexer"
    OTHER = "norms, float32 parts and KDA's f_a"
    VISION = "vision tower and projector"
    DRAFTER = "drafter"


def weight(
    dtype: DTypeLike,
    kind: type[nnx.Param] = nnx.Param,
    *,
    term: Term = Term.OTHER,
    **dims: int | Dim,
) -> nnx.Param:
    """Declare a weight by its dims, letter = size: HK=Dim(H, K, Role.HEADS) has H K places and is
    sharded by head, D=D is replicated. Nothing is allocated.
    """
    sizes = [size if isinstance(size, Dim) else Dim(size) for size in dims.values()]
    return kind(
        jax.ShapeDtypeStruct(tuple(dim.places for dim in sizes), dtype),
        dims=tuple(dims),
        counts=tuple(dim.count for dim in sizes),
        roles=tuple(dim.role for dim in sizes),
        term=term,
        eager_sharding=False,
    )


def with_rank(x: Array, rank: int) -> Array:
    """x with leading dims of size 1 up to `rank`: broadcasting as it is written, whatever
    `jax_numpy_rank_promotion` says.
    """
    return jax.lax.expand_dims(x, range(rank - x.ndim))


def linear(x: Float[Array, "*rows i"], w: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """x w^T, accumulated in at least float32 and rounded once to the type of x."""
    return linear_wide(x, w).astype(x.dtype)


def linear_wide(x: Float[Array, "*rows i"], w: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """x w^T in at least float32, full precision (GPUs would take TF32 by default), not rounded
    back.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # none too
    multiply = partial(dot, "pi,oi->po")
    if rows.dtype == jnp.float32 and 1 < len(rows) <= FEW_ROWS:
        y = jax.lax.platform_dependent(rows, w, cpu=_multiply_few, default=multiply)
    else:
        y = multiply_rows(multiply, rows, w)
    return y.reshape(*x.shape[:-1], len(w))


# Those of decode steps: prompts are padded to 16 tokens or more, or to a chunk that is smaller.
FEW_ROWS = 15


def _multiply_few(x: Float[Array, "rows i"], w: Float[Array, "o i"]) -> Float[Array, "rows o"]:
    """x w^T as (w x^T)^T: XLA on CPU takes a third of the time for 2 to 16 float32 rows where the
    weights are the left operand. The barrier keeps it from turning the product around.
    """
    return jax.lax.optimization_barrier(dot("oi,pi->op", w, x)).T


def dot(spec: str, a: Array, b: Array) -> Array:
    """einsum accumulated in at least float32 at full precision, not rounded back."""
    wide = at_least_float32(a.dtype)
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=wide)


def multiply_rows(
    multiply: Callable[[Array, Array], Array], x: Float[Array, "*H rows i"], w: Array
) -> Float[Array, "*H rows o"]:
    """`multiply(x, w)`, which treats rows alike; on CPUs bfloat16 rows are zero-padded to a
    multiple of eight.

    XLA on CPU multiplies a row or two by weights that it widens, 7 times slower than eight, and
    sums the last rows of some other counts in another order. Among eight, a row has the bits that
    it has in any larger batch.
    """
    rows = x.shape[-2]
    if x.dtype != jnp.bfloat16 or rows % 8 == 0:
        return multiply(x, w)

    def in_eights(x: Array, w: Array) -> Array:
        padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % 8), (0, 0)]
        return multiply(jnp.pad(x, padding), w)[..., :rows, :]

    return jax.lax.platform_dependent(x, w, cpu=in_eights, default=multiply)


def rms_norm(
    x: Float[Array, "*rows D"], w: Float[Array, " D"], eps: float
) -> Float[Array, "*rows D"]:
    """w * round(x / rms(x)): statistics in at least float32, rounded to the type of x *before* the
    weight.
    """
    wide = widen(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return normed.astype(x.dtype) * with_rank(w.astype(x.dtype), x.ndim)


def layer_norm(
    x: Float[Array, "*rows I"], w: Float[Array, " I"], bias: Float[Array, " I"], eps: float
) -> Float[Array, "*rows I"]:
    """(x - mean) / std * w + bias in at least float32, rounded once."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    scaled = normed * with_rank(w.astype(normed.dtype), x.ndim)
    return (scaled + with_rank(bias.astype(normed.dtype), x.ndim)).astype(x.dtype)


def situ(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], config: Config) -> Array:
    """b1 tanh(gate / b1) sigmoid(gate) b2 tanh(up / b2), in at least float32; the caller rounds."""
    b1, b2 = config.situ_beta, config.situ_linear_beta
    gate, up = widen(gate), widen(up)
    return b1 * jnp.tanh(gate / b1) * jax.nn.sigmoid(gate) * b2 * jnp.tanh(up / b2)


class MLP(nnx.Module):
    """down(situ(gate x, up x)): the dense layers and the shared experts. The result is a partial
    sum over the width, which is sharded by `role`.
    """

    def __init__(self, config: Config, width: int, dtype: DTypeLike, role: Role = Role.FFN_WIDTH):
        D, F = config.hidden, Dim(width, role=role)
        self.config = config
        self.scope = "shared" if role is Role.SHARED_WIDTH else "dense"
        term = Term.SHARED if role is Role.SHARED_WIDTH else Term.DENSE
        self.w_gate = weight(dtype, term=term, F=F, D=D)
        self.w_up = weight(dtype, term=term, F=F, D=D)
        self.w_down = weight(dtype, term=term, D=D, F=F)

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "P D"]:
        """x [P, D] -> this rank's partial sum [P, D]."""
        with jax.named_scope(self.scope):
            hidden = situ(linear(x, self.w_gate[...]), linear(x, self.w_up[...]), self.config)
            return linear(hidden.astype(x.dtype), self.w_down[...])
