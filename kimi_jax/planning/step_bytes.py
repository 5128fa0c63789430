"""What a device moves in a decode step, in bytes, from the terms of a plan: what it reads and
writes in its memory, and what it sends to others.

Estimates for comparing placements: every weight that a step uses is read once, of routed experts
those that uniform routing reaches; every state is read once, recurrent ones are written too; of
caches K3.1 reads all index keys and the latent rows that it selects. Of sums, gathers and exchanges
the payload is counted (docs/parallelism.md, "Collectives"), not how a backend carries it.
Intermediate values of a step are not counted.
"""

import dataclasses
import math

import jax.numpy as jnp

from ..config.config import Config
from ..parallel.roles import Role
from ..runtime.memory import Plan

_ID_AND_WEIGHT = 6  # bytes of an expert's id and weight in a message
_STATISTICS = 8  # bytes of a head's two float32 in a message of helix
_LOGIT = 4  # bytes: float32
_SLOT = 4  # bytes of a selected slot's number: int32


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """What one device moves in a decode step at the plan's batch and context."""

    memory: int  # bytes read and written in its memory
    sent: int  # bytes sent to other devices

    @property
    def total(self) -> int:
        """Both."""
        return self.memory + self.sent


def step_bytes(plan: Plan) -> StepBytes:
    """What one device of a plan moves in a decode step."""
    return StepBytes(round(_memory(plan)), round(_sent(plan)))


def reached_share(rows: float, config: Config) -> float:
    """The share of experts that at least one of `rows` rows reaches, at uniform routing."""
    return 1 - (1 - config.active_experts / config.experts) ** rows if config.experts else 0.0


# Memory.


def _memory(plan: Plan) -> float:
    """Bytes that a device reads and writes."""
    config, terms = plan.config, dict(plan.terms)
    itemsize = jnp.dtype(plan.dtype).itemsize
    reached = reached_share(_routed_rows(plan), config)
    moved = terms.pop("routed experts") * reached

    # Of the embedding the rows' own vectors are read, of the head all.
    vocabulary = terms.pop("embedding and head")
    if config.tie_embeddings:
        moved += vocabulary
    else:
        moved += vocabulary / 2 + plan.rows * config.hidden * itemsize

    moved += 2 * (terms.pop("KDA memory") + terms.pop("KDA windows"))
    selected = min(plan.context, config.index_topk) if config.sparse else plan.context
    moved += terms.pop("latent cache") * selected / plan.context
    return moved + sum(terms.values())


def _routed_rows(plan: Plan) -> float:
    """Rows that one group of ranks, which holds every expert once, routes."""
    groups = plan.data * plan.model // _expert_ranks(plan)
    return plan.rows * plan.data / groups


def _expert_ranks(plan: Plan) -> int:
    return math.prod(plan.mesh[axis] for axis in plan.placement.axes(Role.EXPERTS))


# What is sent.


def _sent(plan: Plan) -> float:
    """Bytes that a device sends."""
    if plan.data * plan.model == 1:
        return 0.0
    config, place = plan.config, plan.placement
    sums = _Sums(plan)
    layers = range(config.layers)
    is_sliced = place.slices_rows(plan.rows)
    total = sums.reduce_scatter(config.hidden) if is_sliced else sums.all_reduce(config.hidden)
    for at in layers:
        total += 2 * sums.half(config.hidden)  # attention: gather and scatter, or an all-reduce
        total += _helix(plan) + _selection(plan) if config.is_mla(at) else 0
    dense = sum(config.is_dense(at) for at in layers)
    total += dense * 2 * sums.half(config.hidden)
    total += (config.layers - dense) * _experts(plan, sums)
    total += sums.half(config.hidden) if is_sliced else 0  # the output's rows, gathered
    padded_vocabulary = place.padded(Role.VOCABULARY, config.vocab, plan.mesh)
    return total + (plan.model - 1) / plan.model * plan.rows * padded_vocabulary * _LOGIT


class _Sums:
    """Bytes that a model rank sends to sum, scatter or gather its data rank's rows."""

    def __init__(self, plan: Plan) -> None:
        self.n, self.rows = plan.model, plan.rows
        self.itemsize = jnp.dtype(plan.dtype).itemsize

    def half(self, width: int) -> float:
        """Of a reduce-scatter or an all-gather of the rows."""
        padded = -(-self.rows // self.n) * self.n
        return (self.n - 1) / self.n * padded * width * self.itemsize

    reduce_scatter = half

    def all_reduce(self, width: int) -> float:
        """Of the two halves of a sum."""
        return 2 * self.half(width)


def _helix(plan: Plan) -> float:
    """Of one MLA layer: partial attention of all heads, swapped for a share of the heads."""
    config, place, n = plan.config, plan.placement, plan.model
    if place.keys != "helix":
        return 0.0
    width = config.value_dim if place.exchange == "values" else config.kv_rank
    head = width * jnp.dtype(plan.dtype).itemsize + _STATISTICS
    heads = place.padded(Role.HEADS, config.heads, plan.mesh)
    return (n - 1) / n * plan.rows * heads * head


def _selection(plan: Plan) -> float:
    """Of one MLA layer of K3.1: the slots that each rank selected for its share of the queries."""
    config, n = plan.config, plan.model
    return (n - 1) / n * plan.rows * config.index_topk * _SLOT if config.sparse else 0.0


def _experts(plan: Plan, sums: _Sums) -> float:
    """Of one MoE layer."""
    config, place = plan.config, plan.placement
    D, L, n = config.hidden, config.latent, plan.model
    is_sliced, is_sharded = place.slices_rows(plan.rows), place.latent == "sharded"
    scores = sums.half(config.experts) * 4 / sums.itemsize  # the router's, float32
    if place.runs_local_experts(plan.rows) and not is_sliced:
        sent = _gathered(plan) + sums.all_reduce(L) + sums.all_reduce(D)
        return sent + sums.half(L) + scores if is_sharded else sent

    # Every rank routes its local rows; what is sharded along its width needs all rows.
    sent = _gathered(plan) if place.runs_local_experts(plan.rows) else _exchange(plan)
    sent += (2 * sums.half(L) + scores) / n if is_sharded else 0  # columns for rows, and back
    if not is_sliced:
        return sent + sums.all_reduce(D)
    needs_all_rows = is_sharded or (config.shared_experts and place.axes(Role.SHARED_WIDTH))
    return sent + (2 * sums.half(D) if needs_all_rows else 0)


def _exchange(plan: Plan) -> float:
    """Rows' latents to the ranks that hold their experts, each rank once, and the results back."""
    config, ranks = plan.config, _expert_ranks(plan)
    rows = -(-plan.rows // plan.model)  # of one rank
    others = (ranks - 1) * (1 - (1 - 1 / ranks) ** config.active_experts)  # distinct, expected
    latent = config.latent * jnp.dtype(plan.dtype).itemsize
    numbers = (ranks - 1) / ranks * config.active_experts * _ID_AND_WEIGHT
    return rows * (others * 2 * latent + numbers)


def _gathered(plan: Plan) -> float:
    """Local experts: rows' latents are gathered from the ranks that hold other rows, and their sums
    scattered.
    """
    is_sliced = plan.placement.slices_rows(plan.rows)
    axes = plan.placement.row_axes_of_experts(is_sliced)
    ranks = math.prod(plan.mesh[axis] for axis in axes)
    rows = -(-plan.rows // plan.model) if is_sliced else plan.rows
    row = 2 * plan.config.latent * jnp.dtype(plan.dtype).itemsize
    return float((ranks - 1) * rows * row)
