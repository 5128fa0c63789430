"""Logits as a function of weights by name, which can be differentiated, and models with other
weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from ..errors import RequestError, shown
from ..model.implementations import TRAINING
from ..model.step import ImplementationNames
from ..runtime.program import Program
from ..runtime.runner import Runner
from .weights import replaced

AnyRunner = TypeVar("AnyRunner", bound=Runner)


def apply(runner: Runner, weights: Mapping[str, Any], tokens: Any, lengths: Any = None) -> Array:
    """Logits [B, T, vocab] of right-padded prompts [B, T] under some `weights`, by name; the others
    are the model's. A function of weights and tokens for `jax.grad`, `jax.jit` and optimizers.

    Layers that are walked by group, the default on accelerators, are one program here: deep models
    that train are loaded with `scan=True`. `B` must divide over the data ranks. Token ids are not
    checked, as they may be traced. Raises `RequestError` for unknown names and other shapes.
    Differentiating it raises `NotImplementedError` unless the model was loaded with
    `implementations=kj.TRAINING`.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    ranks = runner.data_ranks
    if tokens.ndim != 2 or not tokens.size or tokens.shape[0] % ranks:
        raise RequestError(
            f"tokens must be ids [B, T], B a multiple of the {ranks} data ranks; "
            f"got shape {tokens.shape}"
        )
    B, T = tokens.shape
    lengths = jnp.full(B, T, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (B,):
        raise RequestError(f"lengths must be {B} whole numbers, got shape {lengths.shape}")
    params = replaced(runner.program, runner.params, _differentiable(runner, weights))
    return _logits(runner.program)(params, tokens, lengths)


@functools.lru_cache(maxsize=32)
def _logits(program: Program) -> Callable:
    """Logits of a program that can be differentiated: walked by group, layers consume states."""
    return jax.jit(program.logits) if program.walk == "by_group" else program.jitted_logits


def with_weights(model: AnyRunner, weights: Mapping[str, Any]) -> AnyRunner:
    """A model with some weights, by name, in place of its own; it is not changed, and shares the
    others. Raises `RequestError` for unknown names and other shapes.
    """
    if not isinstance(weights, Mapping):
        raise RequestError(f"weights must map names to arrays, got {shown(weights)}")
    program = model.program
    params = {
        path: array
        if array is model.params[path]
        else jax.device_put(array, NamedSharding(program.mesh, program.weight_specs[path]))
        for path, array in replaced(program, model.params, weights).items()
    }
    return dataclasses.replace(model, params=params)


def _differentiable(runner: Runner, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights, or weights whose derivative is an error that says how to get one."""
    lacking = _without_gradient(runner.program.implementations)
    if not lacking:
        return weights
    refuse = _refusing(
        f"{' and '.join(lacking)} have no gradient. Load the model with "
        "kj.load(..., implementations=kj.TRAINING), whose implementations have"
    )
    return {name: refuse(value) for name, value in weights.items()}


def _without_gradient(names: ImplementationNames) -> list[str]:
    """The implementations that loop as often as the data says, and so have no gradient."""
    return [
        f"{operation}={getattr(names, operation)!r}"
        for operation in ("mla", "moe")
        if getattr(names, operation) != getattr(TRAINING, operation)
    ]


def _refusing(message: str) -> Callable[[Any], Any]:
    """The identity, whose derivative raises `NotImplementedError`."""

    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    @identity.defjvp
    def derivative(primals: tuple, tangents: tuple) -> tuple:
        raise NotImplementedError(message)

    return identity
