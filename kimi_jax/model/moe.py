"""The latent mixture of experts: router, every expert on every token (definition), sorted blocks
(fast), the sublayer.

Nothing is ever dropped: there is no capacity. Routed experts work in a latent space of width L,
shared experts on D.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt

from ..config.config import Config
from ..numerics import at_least_float32, widen
from ..parallel import collectives
from ..parallel.collectives import of_bits, to_bits
from ..parallel.reductions import SUM
from . import mxfp4
from .layers import HIGHEST, MLP, Expert, linear, linear_wide, rms_norm, situ, weight
from .state import Step


def limit_groups(choice: Float[Array, "P E"], groups: int, keep: int) -> Float[Array, "P E"]:
    """-inf outside the `keep` groups whose two best experts sum highest (DeepSeek-V3's group
    limiting).
    """
    if groups <= keep:
        return choice
    grouped = choice.reshape(choice.shape[0], groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    _, kept = jax.lax.top_k(best_two, keep)
    allowed = jax.nn.one_hot(kept, groups, dtype=jnp.bool_).any(1)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


def route(
    logits: Float[Array, "P E"], bias: Float[Array, " E"], config: Config
) -> tuple[Int[Array, "P A"], Float[Array, "P A"]]:
    """The active experts of each row and their weights. The bias selects, it never weighs; ties:
    lowest expert.
    """
    scores = (
        jax.nn.sigmoid(logits) if config.router == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    )
    choice = limit_groups(scores + bias[None], config.expert_groups, config.groups_kept)
    _, ids = jax.lax.top_k(choice, config.active_experts)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalize and config.active_experts > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * config.routed_scale


class Experts(nnx.Module):
    """The routed experts' weights [G, E, out, in], MXFP4-packed (two inputs a byte, a scale byte
    per 32) or plain.
    """

    def __init__(self, config: Config, dtype: DTypeLike, packed: bool):
        E, F, L = config.experts, config.expert_ffn, config.latent
        self.config, self.packed = config, packed
        if packed:
            self.w_gate = weight(jnp.uint8, Expert, E=E, F=F, L2=L // 2)
            self.w_up = weight(jnp.uint8, Expert, E=E, F=F, L2=L // 2)
            self.w_down = weight(jnp.uint8, Expert, E=E, L=L, F2=F // 2)
            self.s_gate = weight(jnp.uint8, Expert, E=E, F=F, L32=L // mxfp4.GROUP)
            self.s_up = weight(jnp.uint8, Expert, E=E, F=F, L32=L // mxfp4.GROUP)
            self.s_down = weight(jnp.uint8, Expert, E=E, L=L, F32=F // mxfp4.GROUP)
        else:
            self.w_gate = weight(dtype, Expert, E=E, F=F, L=L)
            self.w_up = weight(dtype, Expert, E=E, F=F, L=L)
            self.w_down = weight(dtype, Expert, E=E, L=L, F=F)

    def _times(
        self, x: Float[Array, "rows i"], name: str, group: int | Array, expert: Array
    ) -> Array:
        """x w^T for one expert, its weights taken by index and decoded where they are used; rounded
        to x's type.
        """
        take = lambda kind: _take(getattr(self, f"{kind}_{name}")[...], group, expert)  # noqa: E731
        if self.packed:
            return mxfp4.matmul(x, take("w"), take("s")).astype(x.dtype)
        return linear(x, take("w"))

    def one(
        self, x: Float[Array, "rows L"], group: int | Array, expert: Array
    ) -> Float[Array, "rows L"]:
        """w_down situ(w_gate x, w_up x) of one expert."""
        hidden = situ(
            self._times(x, "gate", group, expert), self._times(x, "up", group, expert), self.config
        )
        return self._times(hidden.astype(x.dtype), "down", group, expert)

    def whole(self, name: str, group: int | Array, dtype: DTypeLike) -> Array:
        """All experts' matrices of one kind [E, out, in], decoded: for the definition."""
        take = lambda kind: getattr(self, f"{kind}_{name}")[...][group]  # noqa: E731
        return mxfp4.unpack(take("w"), take("s"), dtype) if self.packed else take("w")


def _take(stack: Array, group: int | Array, expert: Array) -> Array:
    start = (jnp.int32(group), expert, jnp.int32(0), jnp.int32(0))
    return jax.lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:]))[0, 0]


def dense(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """Every expert on every row, then a mask: slow, and plainly right. Ids outside the experts held
    weigh nothing.
    """
    w_gate, w_up, w_down = (experts.whole(name, group, z.dtype) for name in ("gate", "up", "down"))
    every = jax.vmap(linear)
    rows = jnp.broadcast_to(z, (w_gate.shape[0], *z.shape))
    hidden = situ(every(rows, w_gate), every(rows, w_up), experts.config).astype(z.dtype)
    outputs = widen(every(hidden, w_down))
    chosen = jax.nn.one_hot(ids, w_gate.shape[0], dtype=weights.dtype)
    return jnp.einsum("pae,pa,epl->pl", chosen, weights, outputs, precision=HIGHEST)


def block_rows(rows: int) -> int:
    """Rows of one expert that are multiplied together: one for a lone row, else 8 to 32.

    For 256 rows, 8 of 64 experts each, a layer took 95 ms in blocks of 16, 82 of 32, 100 of 64.
    """
    return 1 if rows == 1 else 8 if rows < 64 else 16 if rows < 256 else 32


def grouped(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    group: int | Array,
) -> Float[Array, "P L"]:
    """`dense` by sorting (row, expert) pairs by expert and running the blocks that exist, one
    expert a block.

    Cost follows the active experts. A row's sum runs in the order of its experts, whatever its
    neighbours are.
    """
    P, A = ids.shape
    E, block = experts.w_gate.shape[1], block_rows(P)
    pair_expert = jnp.where((ids >= 0) & (ids < E), ids, E).reshape(-1)
    order = jnp.argsort(pair_expert, stable=True).astype(jnp.int32)
    counts = jnp.zeros(E, jnp.int32).at[pair_expert].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    block_ends = jnp.cumsum((counts + block - 1) // block, dtype=jnp.int32)
    flat_weights = weights.reshape(-1)

    def one(i: Array, total: Array) -> Array:
        expert = jnp.sum(block_ends <= i, dtype=jnp.int32)
        last = block_ends[expert] - (counts[expert] + block - 1) // block
        pairs = (
            ends[expert] - counts[expert] + (i - last) * block + jnp.arange(block, dtype=jnp.int32)
        )
        real = pairs < ends[expert]
        pair = order[jnp.where(real, pairs, 0)]
        row = pair // A
        output = widen(experts.one(z[row], group, expert)) * flat_weights[pair][:, None]
        return total.at[jnp.where(real, row, P)].add(output, mode="drop")

    return jax.lax.fori_loop(0, block_ends[-1], one, jnp.zeros(z.shape, at_least_float32(z.dtype)))


FORMS = {"dense": dense, "grouped": grouped}


def run_own(
    z: Float[Array, "P L"],
    ids: Int[Array, "P A"],
    weights: Float[Array, "P A"],
    experts: Experts,
    step: Step,
) -> Float[Array, "P L"]:
    """The sum over those experts of each row that this rank owns; the others add nothing."""
    held = experts.w_gate.shape[1]
    local = jnp.where(ids >= 0, ids - collectives.rank(step.place.expert_axes) * held, -1)
    return FORMS[step.forms.moe](z, local, weights, experts, step.group)


def owners(ids: Int[Array, "c A"], held: int, n: int) -> tuple[Array, Array]:
    """The rank that owns each expert, of n that hold so many each, -1 where it is none [c, A]; and
    the ranks that a row is sent to [c, n].
    """
    owner = jnp.where(ids >= 0, ids // held, -1)
    return owner, jnp.any(owner[..., None] == jnp.arange(n, dtype=jnp.int32)[None, None], axis=1)


def dispatched(
    z: Float[Array, "c L"],
    ids: Int[Array, "c A"],
    weights: Float[Array, "c A"],
    experts: Experts,
    step: Step,
) -> Float[Array, "c L"]:
    """The complete sums of this rank's own rows, each sent once to every rank that owns some of its
    experts, and back.

    A message is the latent row with the numbers and weights of that rank's experts behind it; a
    number 0 is none, so a row of zeros asks for nothing. At most c rows go to a rank: none is ever
    dropped. What returns is rounded to the type of z and summed in at least float32, in rank order.
    """
    axes, (c, L), A = step.place.expert_axes, z.shape, ids.shape[1]
    n, held = collectives.ranks(axes), experts.w_gate.shape[1]
    if n == 1:
        return run_own(z, ids, weights, experts, step)
    numbers = jnp.arange(n, dtype=jnp.int32)
    owner, wanted = owners(ids, held, n)
    slot = jnp.cumsum(wanted, 0, dtype=jnp.int32) - 1
    own = jnp.arange(c, dtype=jnp.int32)[:, None]
    rows = jnp.full((n, c), c, jnp.int32)
    rows = rows.at[numbers[None], jnp.where(wanted, slot, c)].set(own, mode="drop")
    take = lambda x, fill: x.at[rows].get(mode="fill", fill_value=fill)  # noqa: E731
    theirs = take(owner, -1) == numbers[:, None, None]
    message = to_bits(
        take(z, 0),
        jnp.where(theirs, take(ids, 0) % held + 1, 0),
        jnp.where(theirs, take(weights, 0), 0),
    )
    counts = None
    if step.forms.transport == "ragged":
        counts = collectives.gather_counts(wanted.sum(0, dtype=jnp.int32), axes)
    asked = collectives.exchange(message, counts, axes).reshape(n * c, -1)
    there = of_bits(asked, (L, z.dtype), (A, jnp.int32), (A, weights.dtype))
    done = FORMS[step.forms.moe](there[0], there[1] - 1, there[2], experts, step.group)
    blocks = done.astype(z.dtype).reshape(n, c, L)
    returned = collectives.exchange(blocks, None if counts is None else counts.T, axes)
    total = jnp.zeros((c, L), at_least_float32(z.dtype))
    for j in range(n):
        total += jnp.where(wanted[:, j, None], widen(returned[j, slot[:, j]]), 0)
    return total


class MoE(nnx.Module):
    """The latent MoE sublayer: w_up rmsnorm(sum of experts of w_down x) + shared(x)."""

    def __init__(self, config: Config, dtype: DTypeLike, packed: bool):
        D, E, L = config.hidden, config.experts, config.latent
        self.config = config
        self.w_router = weight(dtype, YE=E, D=D)
        self.router_bias = weight(at_least_float32(dtype), NE=E)
        self.w_latent_down = weight(dtype, YL=L, D=D)
        self.w_latent_up = weight(dtype, D=D, YL=L)
        if config.latent_norm:
            self.latent_norm = weight(dtype, L=L)
        self.experts = Experts(config, dtype, packed)
        if config.shared_experts:
            self.shared = MLP(config, config.shared_ffn, dtype, "X")

    def __call__(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """The residual rows that a rank holds [P, D] -> [P, D], complete. Padding reaches no
        expert.
        """
        local = step.place.runs_local_experts(step.rows)
        if local and not step.sliced:
            return self._local(x, step)
        combine = self._own_experts if local else self._dispatched
        return self._on_own_rows(x, combine, step)

    def _on_own_rows(self, x: Array, combine: Callable, step: Step) -> Array:
        """Every rank routes its own rows, and closes the sums of their experts, which `combine`
        brings together. All rows are needed by what is cut along its width.
        """
        active = collectives.own_rows(step.valid.reshape(-1))
        cut = step.place.latent == "sharded" or self._is_cut(step)
        own, every = step.own(x), step.every(x) if cut else x
        z, logits = self._enter(own, every, step)
        ids, weights = self._route(logits, active)
        routed = self._norm(combine(z, ids, weights, step).astype(x.dtype))
        partial, whole = [], []
        if step.place.latent == "sharded":
            columns = collectives.rows_to_columns(routed, step.rows)
            partial.append(linear(columns, self.w_latent_up[...]))
        else:
            whole.append(linear(routed, self.w_latent_up[...]))
        if self._is_cut(step):
            partial.append(self.shared(every))
        elif self.config.shared_experts:
            whole.append(self.shared(own))
        return step.close(partial, whole)

    def _local(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """Every rank runs its own experts on all rows, which it holds; one all-reduce closes latent
        and shared sums together. Cut latent projections need the complete latent rows first, and
        take two.
        """
        active = step.valid.reshape(-1)
        shared = self._shared_partial(x, step)
        z, logits = linear(x, self.w_latent_down[...]), self._logits(x)
        if step.place.latent == "whole":
            partial = self._own_experts(z, *self._route(logits, active), step)
            both = jnp.concatenate([partial, shared], axis=1)
            joint = collectives.all_reduce(both, step.reduce)
            routed, shared = joint[:, : z.shape[1]], joint[:, z.shape[1] :]
            return linear(self._norm(routed), self.w_latent_up[...]) + shared
        z, logits = self._split(collectives.all_gather(to_bits(z, logits)[:, None], 1), z, logits)
        partial = self._own_experts(z, *self._route(logits, active), step)
        total = collectives.all_reduce(partial, step.reduce)
        routed = linear(collectives.own_columns(self._norm(total)), self.w_latent_up[...])
        return collectives.all_reduce(routed + shared, step.reduce)

    @jax.named_scope("experts")
    def _dispatched(self, z: Array, ids: Array, weights: Array, step: Step) -> Array:
        return dispatched(z, ids, weights, self.experts, step)

    @jax.named_scope("experts")
    def _own_experts(self, z: Array, ids: Array, weights: Array, step: Step) -> Array:
        """The latent sums of this rank's experts over the rows of all ranks that hold others, which
        are gathered, and their sums handed back: partial where every model rank holds all rows,
        complete where rows are sliced.
        """
        axes = step.axes_of_other_rows
        bits = collectives.all_gather(to_bits(z, ids + 1, weights), 0, axes)
        z, ids, weights = of_bits(
            bits, (z.shape[1], z.dtype), (ids.shape[1], jnp.int32), (ids.shape[1], weights.dtype)
        )
        partial = run_own(z, ids - 1, weights, self.experts, step).astype(z.dtype)
        how = step.reduce if axes == (collectives.MODEL,) else SUM
        return collectives.reduce_scatter(partial, how, axes)

    def _enter(self, own: Array, every: Array, step: Step) -> tuple[Array, Array]:
        """Latent rows [c, L] and router logits [c, E] of this rank's own rows."""
        x = own if step.place.latent == "whole" else every
        z, logits = linear(x, self.w_latent_down[...]), self._logits(x)
        if step.place.latent == "whole":
            return z, logits
        return self._split(collectives.columns_to_rows(to_bits(z, logits)), z, logits)

    def _split(self, bits: UInt[Array, "c n X"], z: Array, logits: Array) -> tuple[Array, Array]:
        """Whole latent rows and logits out of every rank's columns of both."""
        parts = of_bits(bits, (z.shape[1], z.dtype), (logits.shape[1], logits.dtype))
        z, logits = (part.reshape(len(part), -1) for part in parts)
        return z, logits[:, : self.config.experts]

    @jax.named_scope("router")
    def _logits(self, x: Array) -> Array:
        return linear_wide(x, self.w_router[...])

    @jax.named_scope("router")
    def _route(self, logits: Array, active: Array) -> tuple[Array, Array]:
        ids, weights = route(logits, self.router_bias[...], self.config)
        return jnp.where(active[:, None], ids, -1), weights

    def _norm(self, total: Array) -> Array:
        """The latent norm; it must see the complete sum of a row."""
        if not self.config.latent_norm:
            return total
        return rms_norm(total, self.latent_norm[...], self.config.norm_eps)

    def _is_cut(self, step: Step) -> bool:
        """Whether a rank holds a part of the shared experts' width."""
        return bool(self.config.shared_experts and step.place.axes("X"))

    def _shared_partial(self, x: Float[Array, "P D"], step: Step) -> Float[Array, "P D"]:
        """This rank's partial sum of the shared experts for all rows."""
        if not self.config.shared_experts:
            return jnp.zeros_like(x)
        if self._is_cut(step):
            return self.shared(x)
        return collectives.among_zeros(self.shared(collectives.own_rows(x)), len(x))
