"""The weights of a model by name."""

import fnmatch
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..errors import RequestError, label, meant, shown
from ..model.declared import Declared, declare
from ..runtime.program import Program


class Weights(Mapping[str, Array]):
    """The weights of a model by name, as `kimi_jax.checkpoint` reads and writes them: "embed",
    "layers.0.attention.a_log", "layers.3.mlp.experts.w_up". An array is made when it is asked for:
    a copy of its layer's part of the stack that the model holds, without padding, sharded as that.
    """

    def __init__(self, program: Program, params: Mapping[tuple, Array]):
        self._params, self._places = params, _places(program)

    def __repr__(self) -> str:
        return f"Weights({len(self):,} arrays)"

    def __getitem__(self, name: str) -> Array:
        weight, group = self._places[name]
        array = self._params[weight.path]
        index = tuple(slice(0, size) for size in weight.shape)
        return array[group, *index[1:]] if is_stacked(weight) else array[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, without making its array."""
        weight, _ = self._places[name]
        return weight.shape[1:] if is_stacked(weight) else weight.shape

    def is_float(self, name: str) -> bool:
        """Whether a weight holds numbers that have a gradient: packed experts do not."""
        return jnp.issubdtype(self._places[name][0].dtype, jnp.floating)

    def select(self, *patterns: str) -> dict[str, Array]:
        """The arrays of floating-point weights whose names match one of the patterns, in which *
        stands for any text: "*.attention.w_*". Raises `RequestError` for patterns without a match.
        """
        matches = {p: [n for n in self if fnmatch.fnmatchcase(n, p)] for p in patterns}
        if empty := [pattern for pattern, names in matches.items() if not names]:
            raise RequestError(f"no weight matches {', '.join(map(shown, empty))}")
        names = {name for matched in matches.values() for name in matched if self.is_float(name)}
        return {name: self[name] for name in self if name in names}


@functools.lru_cache(maxsize=32)
def _places(program: Program) -> Mapping[str, tuple[Declared, int]]:
    """The array that holds each weight, and its number in that."""
    return {
        name: (weight, group)
        for weight in declare(program.declared)
        for group, name in enumerate(weight.names)
    }


def replaced(
    program: Program, params: Mapping[tuple, Array], weights: Mapping[str, Any]
) -> dict[tuple, Array]:
    """`params` with some weights, by name, in place of theirs, cast to their dtypes. May be traced
    and differentiated. Raises one `RequestError` for unknown names and other shapes.
    """
    named = Weights(program, params)
    problems = [_problem(named, name, value) for name, value in weights.items()]
    if any(problems):
        raise RequestError("\n".join(problem for problem in problems if problem))
    return {
        weight.path: _array(program, weight, params[weight.path], weights)
        for weight in declare(program.declared)
    }


def is_stacked(weight: Declared) -> bool:
    """Whether an array holds a weight of several layers, or of one with a leading dim for it."""
    return weight.dims[0] == "G"


def _problem(named: Weights, name: str, value: Any) -> str | None:
    if name not in named:
        return f"{label(name)}: no such weight{meant(name, named)}"
    if jnp.shape(value) != named.shape(name):
        return f"{name}: shape {jnp.shape(value)}, the model has {named.shape(name)}"
    if jnp.issubdtype(jnp.result_type(value), jnp.floating) != named.is_float(name):
        return f"{name}: dtype {jnp.result_type(value)}, the model holds packed bytes or numbers"
    return None


def _array(program: Program, weight: Declared, array: Array, weights: Mapping[str, Any]) -> Array:
    """The array of a weight, with the given layers in place of its own."""
    given = {g: weights[name] for g, name in enumerate(weight.names) if name in weights}
    if not given:
        return array
    shape = weight.placed(program.place, program.sizes)
    layer = shape[1:] if is_stacked(weight) else shape
    given = {g: _padded(jnp.asarray(value, weight.dtype), layer) for g, value in given.items()}
    if not is_stacked(weight):
        return given[0]
    if len(given) == shape[0]:
        return jnp.stack(list(given.values()))
    for g, value in given.items():
        array = array.at[g].set(value)
    return array


def _padded(value: Array, shape: tuple[int, ...]) -> Array:
    widths = [(0, size - have) for size, have in zip(shape, value.shape, strict=True)]
    return jnp.pad(value, widths) if any(after for _, after in widths) else value
