"""The residual stream after chosen layers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..errors import RequestError, shown
from ..generation.prompts import items_of
from ..model.step import Tapped
from ..numerics import is_whole
from ..parallel.on_mesh import own_mesh
from ..runtime.runner import Runner
from ..speculation.taps import STREAMS, tapped_step


def hidden(
    runner: Runner, tokens: Any, layers: Any, lengths: Any = None, *, stream: str = "sum"
) -> Array:
    """The residual stream after some layers [layers, B, T, D], of right-padded prompts [B, T], in
    the model's dtype. `layers`: a 0-based number or several, in the order of the result.

    `stream`: with attention residuals there are two of them, neither normed. "sum" is the running
    sum after the layer's attention and MLP: as it restarts at every block start, it is the sum of
    the current block alone, and never holds the embedding after the first layer. "mixture" is what
    the next layer's attention reads, the learned mixture of block starts and running sum; after the
    last layer, what the output norm reads.

    Prompts run in chunks. Positions at and after a row's length are undefined.
    Raises one `RequestError` for layers that the model lacks, streams and ids.
    """
    numbers = [layers] if is_whole(layers, 0) else items_of(layers)
    problems = []
    N = runner.config.layers
    if not numbers or not all(is_whole(layer, 0, N - 1) for layer in numbers):
        problems.append(f"layers must be numbers in 0..{N - 1}, got {shown(layers)}")
    if not isinstance(stream, str) or stream not in STREAMS:
        problems.append(f"stream must be one of {', '.join(STREAMS)}, got {shown(stream)}")
    if problems:
        raise RequestError("\n".join(problems))
    wanted = [int(layer) for layer in numbers or ()]
    tapped = Tapped(tuple(sorted(set(wanted))), stream)
    step = tapped_step(runner.program, tapped)
    chunks = list(runner.in_chunks(step, tokens, lengths))
    B = len(np.asarray(tokens))
    with own_mesh(runner.mesh):
        pieces = [rows[:, :B, :width] for rows, width in chunks]
        rows = jnp.concatenate(pieces, axis=2) if len(pieces) > 1 else pieces[0]
        order = np.array([tapped.layers.index(layer) for layer in wanted], np.int32)
        return rows if len(order) == len(rows) and (np.diff(order) > 0).all() else rows[order]
