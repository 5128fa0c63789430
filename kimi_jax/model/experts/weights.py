"""The routed experts' weights, as their quantization stores them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ...config.config import Config
from ...parallel.roles import Dim, Role
from ..layers import Expert, Term, situ
from ..mxfp4 import PARTS, Quantization


class Experts(nnx.Module):
    """The routed experts' weights: matrices gate, up [G, E, F, L] and down [G, E, L, F], each
    stored as its quantization says, under the prefixes of its parts (`w_gate`, `s_gate`).
    """

    w_gate: nnx.Param

    def __init__(self, config: Config, dtype: DTypeLike, quantization: Quantization):
        E = Dim(config.experts, role=Role.EXPERTS)
        F, L = config.expert_ffn, config.latent
        self.config, self.quantization = config, quantization
        inward, outward = dict(E=E, F=F, L=L), dict(E=E, L=L, F=F)
        for name, dims in dict(gate=inward, up=inward, down=outward).items():
            for part, param in quantization.declare(dtype, Expert, Term.EXPERTS, **dims).items():
                setattr(self, f"{part}_{name}", param)

    @property
    def count(self) -> int:
        """The experts that this rank holds."""
        return self.w_gate.shape[1]

    def run(
        self, x: Float[Array, "rows L"], group: int | Array, expert: Int[Array, ""]
    ) -> Float[Array, "rows L"]:
        """w_down situ(w_gate x, w_up x) of one expert of one layer."""
        gate, up = self._linear(x, "gate", group, expert), self._linear(x, "up", group, expert)
        hidden = situ(gate, up, self.config).astype(x.dtype)
        return self._linear(hidden, "down", group, expert)

    def _linear(
        self, x: Float[Array, "rows i"], name: str, group: int | Array, expert: Int[Array, ""]
    ) -> Float[Array, "rows o"]:
        """x w^T for one expert, its weights read by index and decoded where they are used; rounded
        to x's type.
        """
        stored = self._parts(name, lambda stack: _read_expert(stack, group, expert))
        return self.quantization.multiply(x, stored)

    def stack(self, name: str, group: int | Array, dtype: DTypeLike) -> Float[Array, "E o i"]:
        """All experts' matrices of one kind of one layer, decoded: for the definition."""
        return self.quantization.decode(self._parts(name, lambda stack: stack[group]), dtype)

    def _parts(self, name: str, read: Callable[[Array], Array]) -> dict[str, Array]:
        """What `read` takes of each weight that a matrix is stored as, by its prefix."""
        return {part: read(stack) for part, stack in self.stacks(name).items()}

    def stacks(self, name: str) -> dict[str, Array]:
        """The stacks [G, E, o, i] of what a matrix is stored as, by prefix."""
        params = {part: getattr(self, f"{part}_{name}", None) for part in PARTS}
        return {part: param[...] for part, param in params.items() if param is not None}


def _read_expert(
    stack: Shaped[Array, "G E o i"], group: int | Array, expert: Int[Array, ""]
) -> Shaped[Array, "o i"]:
    """One expert's matrix of one layer, without a copy of the others."""
    start = (jnp.int32(group), expert, jnp.int32(0), jnp.int32(0))
    return jax.lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]
