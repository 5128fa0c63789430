"""What each row of a batch samples with and how far it has come, as arrays on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..model.state import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The requests that decode, a row each: it goes through a loop of steps and changes with them.

    The static fields hold for all rows, so that few programs are compiled; what a row asks for is
    in arrays.
    """

    active: Leaf  # [B] rows that still decode
    remaining: Leaf  # [B] tokens that each may still sample
    seeds: Leaf  # [B]
    counts: Leaf  # [B] tokens that each has sampled
    temperature: Leaf  # [B] 0: the best token
    top_k: Leaf  # [B] 0: all
    top_p: Leaf  # [B]
    min_p: Leaf  # [B]
    repetition_penalty: Leaf  # [B]
    frequency_penalty: Leaf  # [B]
    presence_penalty: Leaf  # [B]
    min_new_tokens: Leaf  # [B]
    stop_ids: Leaf  # [B, M] ids that end a row; -1: none
    bias: Leaf | None  # [B, Z] added to logits; None: no row has any
    # [B, Z] ids that prompt or reply hold; None: no row has a repetition penalty.
    seen: Leaf | None
    # [B, Z] how often the reply holds each id; None: no row has a penalty for that.
    reply_counts: Leaf | None
    top_logprobs: int = dataclasses.field(metadata={"static": True})  # best tokens to report
    draws: bool = dataclasses.field(metadata={"static": True})  # some row has a temperature
    masks_stops: bool = dataclasses.field(metadata={"static": True})  # some row has min_new_tokens
    steps_per_call: int = dataclasses.field(metadata={"static": True})  # most steps of a loop

    def after(self, ids: Int[Array, " B"], usable: Bool[Array, " B"]) -> "Rows":
        """The rows after these tokens were sampled: a token that is not `usable`, a stop id or the
        last that its row may sample ends the row.
        """
        stopped = jnp.any(ids[:, None] == self.stop_ids, axis=1)
        count = self.active.astype(jnp.int32)
        seen, reply_counts = self.seen, self.reply_counts
        batch = jnp.arange(len(ids), dtype=jnp.int32)
        if seen is not None:
            seen = seen.at[batch, ids].set(seen[batch, ids] | self.active)
        if reply_counts is not None:
            reply_counts = reply_counts.at[batch, ids].add(count)
        return dataclasses.replace(
            self,
            active=self.active & usable & ~stopped & (self.remaining > 1),
            remaining=self.remaining - count,
            counts=self.counts + count,
            seen=seen,
            reply_counts=reply_counts,
        )
