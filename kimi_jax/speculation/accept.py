"""Which drafts of a round are accepted: those that the model would have sampled itself.

The model's token after each verified row is sampled as a decode step samples it, with the options
of the row and the noise of that token's place in the reply. A draft is accepted where it is that
token. So the reply is the one without a draft, whatever is drafted. For a draft that is certain
(one-hot) this is rejection sampling: token d is accepted with the probability p(d) that the model
gives it, and else replaced by one of p without d.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..compilation.function import CompiledFunction
from ..model.state import State
from ..runtime.model_on_mesh import BY_ROW, BY_SECOND, STATE, WEIGHTS, CallsInTurn
from ..runtime.program import Program
from ..runtime.rows import Rows
from ..runtime.sampling import described, sample
from .acceptance import accept_drawn, adjusted_logits


@functools.lru_cache(maxsize=32)
def accept_step(program: Program) -> CompiledFunction:
    """(logits [B, T, Z], tokens [B, T], lengths [B], rows) -> what was sampled after each row,
    arrays [T, B, ...] as those of `Program.decode_steps`, and how many of them, [B], are the
    request's next tokens: one more than its accepted drafts. Compiled.

    `tokens` are the verified rows: the anchor, which is not read, and the drafts.
    """
    inputs, outputs = (BY_ROW, BY_ROW, BY_ROW, BY_ROW), (BY_SECOND, BY_ROW)
    return program.compiled(accept, inputs, outputs, "accepted drafts")


def accept(
    logits: Float[Array, "B T Z"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rows: Rows,
) -> tuple[Any, Int[Array, " B"]]:
    """As `accept_step`, per device. A row that ends (stop id, last token) accepts no more drafts;
    penalties count the tokens that were accepted before.
    """
    B, T, _ = logits.shape
    drafts = jnp.concatenate([tokens[:, 1:], jnp.full((B, 1), -1, tokens.dtype)], axis=1)

    def after_row(i: Array, carry: tuple) -> tuple:
        rows, count, sampled = carry
        latest = sample(_column(logits, i), rows)
        sampled = jax.tree.map(lambda all, new: all.at[i].set(new), sampled, latest)
        count = count + rows.active.astype(jnp.int32)
        is_accepted = (i + 1 < lengths) & (_column(drafts, i) == latest[0])
        rows = rows.after(*latest[:2])
        return going(rows, is_accepted), count, sampled

    rows = going(rows, lengths > 0)
    shapes = jax.eval_shape(lambda: sample(logits[:, 0], rows))
    room = jax.tree.map(lambda x: jnp.zeros((T, *x.shape), x.dtype), shapes)
    _, count, sampled = jax.lax.fori_loop(0, T, after_row, (rows, jnp.zeros(B, jnp.int32), room))
    return sampled, count


@functools.lru_cache(maxsize=32)
def rejection_step(program: Program, rule: str, is_drawn: bool) -> CompiledFunction:
    """`accept_step` by a rule of `acceptance.RULES`, with the distributions [B, T - 1, Z] that the
    drafts were drawn from as one more argument where `is_drawn`. Compiled.
    """

    def device_fn(
        logits: Array, tokens: Array, lengths: Array, rows: Rows, *drawn_from: Array
    ) -> tuple[Any, Array]:
        rows, q = going(rows, lengths > 0), drawn_from[0] if drawn_from else None
        counts = jnp.maximum(lengths - 1, 0)
        adjusted = adjusted_logits(logits, tokens[:, 1:], rows)
        ids, count = accept_drawn(adjusted, tokens[:, 1:], q, counts, rows, rule)
        describe = jax.vmap(described, (1, 1, 1, None))
        return describe(logits, adjusted, ids, rows.top_logprobs), count

    inputs = (BY_ROW, BY_ROW, BY_ROW, BY_ROW, *[BY_ROW] * is_drawn)
    name = f"drafts accepted by the {rule} rule"
    return program.compiled(device_fn, inputs, (BY_SECOND, BY_ROW), name)


def _column(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False)


def going(rows: Rows, which: Bool[Array, " B"]) -> Rows:
    """The rows, of which only these go on."""
    return dataclasses.replace(rows, active=rows.active & which)


@functools.lru_cache(maxsize=32)
def logits_step(program: Program) -> CompiledFunction | CallsInTurn:
    """(weights, state) -> logits [B, 1, Z] after each row's last token. Compiled."""
    if program.walk == "by_group":
        parts = program.by_group("decode")

        def of_parts(weights: dict, state: State) -> Array:
            return parts.head(state.hidden[:, None], parts.end_weights(weights))

        return CallsInTurn(of_parts, program.mesh)

    def device_fn(weights: dict, state: State) -> Array:
        return program.merge(weights).head_logits(state.hidden[:, None])

    return program.compiled(device_fn, (WEIGHTS, STATE), BY_ROW, "logits of a state")
