"""The decoder, top to bottom: Layer, stacks of equal groups of layers, Kimi.

Unusual in this model:

- Attention residuals: a layer reads a softmax mixture of earlier block starts and the running sum.
- Three KDA layers (linear attention, a fixed-size state) to one MLA layer; the last layer is MLA.
- Positions are not encoded: the "rope" dims of MLA exist and are not rotated.
- A sigmoid gate on the output of both kinds of attention.
- Latent mixture of experts: routed experts run on a projection of half the hidden size, the shared
  experts on the hidden size; the router's bias selects experts and never weighs them.
- Routed experts are stored in MXFP4; all else is bfloat16 or float32.
- SiTU in place of SwiGLU: tanh bounds both the gate and the up projection.
- K3.1: an indexer in every MLA layer selects the 2,048 cached keys that a token attends to.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32
from ..parallel import collectives
from ..parallel.reductions import SUM
from ..parallel.roles import Dim, Role
from .declared import lead_with_groups
from .kda import KDA
from .layers import MLP, Expert, Term, linear_wide, rms_norm, weight
from .mla import MLA
from .moe import MoE
from .mxfp4 import Quantization
from .residual import Mix, Taps, push
from .state import KDAState, Leaf, MLAState, State, cache_dtype
from .step import Step


class Layer(nnx.Module):
    """One decoder layer: mix, norm, KDA or MLA; mix, norm, dense MLP or latent MoE."""

    def __init__(self, config: Config, dtype: DTypeLike, index: int, quantization: Quantization):
        D = config.hidden
        self.config = config
        self.dense = config.is_dense(index)
        self.attention_residual = Mix(config, dtype)
        self.attention_norm = weight(dtype, D=D)
        self.attention: Any = MLA(config, dtype) if config.is_mla(index) else KDA(config, dtype)
        self.mlp_residual = Mix(config, dtype)
        self.mlp_norm = weight(dtype, D=D)
        self.mlp: Any = (
            MLP(config, config.dense_ffn, dtype) if self.dense else MoE(config, dtype, quantization)
        )

    def __call__(
        self,
        x: Array,
        bank: Array,
        state: Any,
        step: Step,
        index: int | Array,
        starts_block: bool | None = None,
    ) -> tuple[Array, Array, Any, tuple[Array, Array], Array]:
        """The residual rows x [P, D] that this rank holds and their bank after this layer, the
        state, the two mixtures' weights, and the mixture that attention read [P, D].
        `starts_block` may say what a traced index does not say: whether this is the first layer of
        a residual block.

        The mixture that attention reads is computed before a block start pushes x to the bank.
        """
        eps, block = self.config.norm_eps, self.config.residual_block
        count = -(-index // block)
        pushing = index % block == 0 if starts_block is None else starts_block
        with jax.named_scope("attention"):
            read, mixed = self.attention_residual(x, bank, count)
            x, bank, count = push(x, bank, count, pushing)
            rows = step.attention_rows(rms_norm(read, self.attention_norm[...], eps))
            partial, state = self.attention(rows, state, step)
            x = x + step.reduce([partial.reshape(step.rows, -1)])
        with jax.named_scope("mlp"):
            h, mixed_mlp = self.mlp_residual(x, bank, count)
            x = x + self._mlp(rms_norm(h, self.mlp_norm[...], eps), step)
        return x, bank, state, (mixed, mixed_mlp), read

    def _mlp(self, x: Array, step: Step) -> Array:
        return step.reduce([self.mlp(step.all_rows(x))]) if self.dense else self.mlp(x, step)


@dataclasses.dataclass(frozen=True)
class Span:
    """`groups` repetitions of `period` layers from layer `first` on, of equal kinds position by
    position.
    """

    first: int
    period: int
    groups: int

    def layer(self, position: int, group: Any) -> Any:
        """The index of a layer, traced where the group is."""
        return self.first + group * self.period + position


def spans(config: Config, scan: bool) -> tuple[Span, ...]:
    """Layers as spans: a single span without scan; with it, a head, the longest run of equal
    groups, and a tail.

    The run is chosen so that the least number of layers is traced; among equal runs, the shortest
    period, then the first.
    """
    N = config.layers
    run = _longest_run(_kinds(config)) if scan else Span(0, N, 1)
    end = run.first + run.period * run.groups
    around = (Span(0, run.first, 1), run, Span(end, N - end, 1))
    return tuple(span for span in around if span.period)


def kind_spans(config: Config) -> tuple[Span, ...]:
    """One span for each kind of layer, with as many groups as there are layers of the kind: enough
    to count bytes, and of at most four layers at any depth. It is not the order of the layers.
    """
    _, firsts, counts = np.unique(_kinds(config), return_index=True, return_counts=True)
    pairs = zip(firsts, counts, strict=True)
    return tuple(Span(int(first), 1, int(count)) for first, count in pairs)


def _kinds(config: Config) -> np.ndarray:
    """A number for the kind of each layer [N]: attention by two, MLP by one."""
    kinds = [2 * config.is_mla(i) + config.is_dense(i) for i in range(config.layers)]
    return np.array(kinds, np.int32)


def _longest_run(kinds: np.ndarray) -> Span:
    """The run of equal groups that saves the most layers: (groups - 1) * period of them.

    Groups repeat where a layer equals the layer a period before it, so each unbroken stretch of
    these layers is a candidate. Quadratic in the number of layers at worst.
    """
    N = len(kinds)
    best, saved = Span(0, N, 1), 0
    for period in range(1, N // 2 + 1):
        if N - period <= saved:
            break  # no longer period saves more
        repeats = kinds[period:] == kinds[:-period]  # of layer `period` and those after it
        edges = np.flatnonzero(np.diff(repeats, prepend=False, append=False))
        firsts, groups = edges[::2], 1 + (edges[1::2] - edges[::2]) // period
        if not len(groups):
            continue
        at = int(np.argmax(groups))
        if (int(groups[at]) - 1) * period > saved:
            saved = (int(groups[at]) - 1) * period
            best = Span(int(firsts[at]), period, int(groups[at]))
    return best


class Stack(nnx.Module):
    """The layers of one span. Every weight leads with the span's groups; more than one group is
    scanned.

    The state of all groups is carried and updated in place: passed through a scan as inputs and
    outputs it would exist twice. Expert weights are closed over and read by (group, expert): as
    scanned inputs they would be copied.
    """

    def __init__(self, config: Config, dtype: DTypeLike, span: Span, quantization: Quantization):
        self.span = span
        self.layers = nnx.List(
            [Layer(config, dtype, span.layer(j, 0), quantization) for j in range(span.period)]
        )
        lead_with_groups(self.layers, span.groups)

    def __call__(
        self,
        x: Array,
        bank: Array,
        states: list,
        step: Step,
        number: int | Array = 0,
        starts_block: Sequence[bool] | None = None,
        taps: Taps | None = None,
    ) -> tuple[Array, Array, list, Taps | None, list]:
        """x, bank, the states, the taps and the mixtures' weights, two [N + 1, P] a layer (none
        where layers are scanned).

        A stack of one group can stand for each of several equal ones: `number` says which, and
        `starts_block`, where the number is traced, which of its layers start a residual block.
        """
        graph, experts, rest = nnx.split(self.layers, Expert, ...)
        if self.span.groups == 1:
            layers = nnx.merge(graph, experts, jax.tree.map(lambda w: w[0], rest))
            return self._group(layers, (x, bank, states, taps), step, number, starts_block)

        def scan_group(carry: tuple, group_weights: tuple) -> tuple[tuple, None]:
            group, weights = group_weights
            layers = nnx.merge(graph, experts, weights)
            result = self._group(layers, carry, dataclasses.replace(step, group=group), group)
            return result[:-1], None

        groups = jnp.arange(self.span.groups, dtype=jnp.int32)
        carry, _ = jax.lax.scan(scan_group, (x, bank, states, taps), (groups, rest))
        return *carry, []

    def _group(
        self,
        layers: Sequence[Layer],
        carry: tuple,
        step: Step,
        group: int | Array,
        starts_block: Sequence[bool] | None = None,
    ) -> tuple:
        x, bank, states, taps = carry
        states, mixtures = list(states), []
        for j, layer in enumerate(layers):
            index = self.span.layer(j, group)
            starts = starts_block[j] if starts_block else None
            with jax.named_scope(
                f"layer_{index}" if isinstance(index, int) else f"layer_{j}_of_group"
            ):
                before = x
                x, bank, states[j], mixed, read = layer(x, bank, states[j], step, index, starts)
                taps = taps and taps.record(index - 1, before, read)
            mixtures.extend(mixed)
        return x, bank, states, taps, mixtures


class Embedded(NamedTuple):
    """Rows that replace the embeddings of tokens, as those of an image do."""

    is_given: Leaf  # [B, T] tokens whose embedding is replaced
    rows: Leaf  # [B, T, D] used there alone


class Trace(NamedTuple):
    """What a step records beside its result."""

    mixtures: list[Array]  # the weights of every residual mixture, of the rows that a rank holds
    taps: Float[Array, "M B T D"] | None  # the residual stream after the layers of `Step.tapped`


class Kimi(nnx.Module):
    """Embedding, the stacks of layers, the output mixture and norm, and the head."""

    def __init__(
        self,
        config: Config,
        dtype: DTypeLike,
        stacks: Sequence[Span],
        *,
        quantization: Quantization,
    ):
        D, Z = config.hidden, Dim(config.vocab, role=Role.VOCABULARY)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.embed = weight(dtype, term=Term.EMBEDDING, Z=Z, D=D)
        self.stacks = nnx.List([Stack(config, dtype, span, quantization) for span in stacks])
        self.residual = Mix(config, dtype)
        self.norm = weight(dtype, D=D)
        if not config.tie_embeddings:
            self.head = weight(dtype, term=Term.EMBEDDING, Z=Z, D=D)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: State,
        lengths: Int[Array, " B"],
        step: Step,
        embedded: Embedded | None = None,
    ) -> tuple[Float[Array, "B T D"], State, Trace]:
        """Tokens -> normed output rows [B, T, D], the state after them, and what was recorded."""
        x, bank = self.begin(tokens, step, embedded)
        layers, mixtures = [], []
        taps = Taps.of(step.tapped, x) if step.tapped else None
        for stack, states in zip(self.stacks, state.layers, strict=True):
            x, bank, states, taps, mixed = stack(x, bank, states, step, taps=taps)
            layers.append(states)
            mixtures.extend(mixed)
        out, hidden, weights = self.end(x, bank, state.hidden, lengths, step)
        state = dataclasses.replace(
            state, layers=layers, length=state.length + lengths, hidden=hidden
        )
        tapped = taps and self.end_of_taps(taps, x, bank, step)
        return out, state, Trace([*mixtures, weights], tapped)

    def names_of(self, path: tuple) -> tuple[str, ...]:
        """The names of the weight at a path: one for each group of its stack, if it is in one."""
        if path[0] != "stacks":
            return (".".join(map(str, path)),)
        span, tail = self.stacks[int(str(path[1]))].span, ".".join(map(str, path[4:]))
        layers = (span.layer(int(str(path[3])), g) for g in range(span.groups))
        return tuple(f"layers.{layer}.{tail}" for layer in layers)

    def end_of_taps(self, taps: Taps, x: Array, bank: Array, step: Step) -> Float[Array, "M B T D"]:
        """The tapped streams of all rows, after the last layer."""
        mixture, _ = self.residual(x, bank, self.config.bank_rows)  # as in `end`: compiled once
        taps = taps.record(self.config.layers - 1, x, mixture)
        return jnp.stack([step.attention_rows(rows) for rows in taps.rows])

    def begin(
        self, tokens: Int[Array, "B T"], step: Step, embedded: Embedded | None = None
    ) -> tuple[Array, Array]:
        """The residual rows x [P, D] that this rank holds before the first layer, and their empty
        bank [N, P, D].
        """
        with jax.named_scope("embedding"):
            x = step.reduce([collectives.embed(self.embed[...], tokens.reshape(-1))], how=SUM)
            if embedded is not None:
                is_given = step.held_rows(embedded.is_given.reshape(-1))
                given = step.held_rows(embedded.rows.reshape(step.rows, -1)).astype(x.dtype)
                x = jnp.where(is_given[:, None], given, x)
        return x, jnp.zeros((self.config.bank_rows, *x.shape), x.dtype)

    def end(
        self,
        x: Float[Array, "P D"],
        bank: Float[Array, "N P D"],
        hidden: Float[Array, "B D"],
        lengths: Int[Array, " B"],
        step: Step,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B D"], Array]:
        """After the last layer: normed output rows, `hidden` renewed for the rows that brought
        tokens, and the weights of the output mixture.
        """
        with jax.named_scope("output"):
            mixed, weights = self.residual(x, bank, self.config.bank_rows)
            out = step.attention_rows(rms_norm(mixed, self.norm[...], self.config.norm_eps))
            at_last = jnp.maximum(lengths - 1, 0)[:, None, None]
            last = jnp.take_along_axis(out, at_last, axis=1)[:, 0]
            return out, jnp.where((lengths > 0)[:, None], last, hidden), weights

    def head_logits(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows Z"]:
        """Logits in at least float32, replicated on the model ranks."""
        w = self.embed if self.config.tie_embeddings else self.head
        with jax.named_scope("head"):
            logits = collectives.all_gather(linear_wide(x, w[...]), x.ndim - 1)
        return logits[..., : self.config.vocab]  # a padded vocabulary ends in ids that do not exist


def new_state(
    config: Config, dtype: str, stacks: tuple[Span, ...], B: int, S: int, H: int, on_cpu: bool
) -> State:
    """An empty state of B rows, S slots and H KDA heads."""
    K, V, W1 = config.kda_key_dim, config.kda_value_dim, config.conv_width - 1
    wide, stored = at_least_float32(dtype), cache_dtype(jnp.dtype(dtype), on_cpu)

    def layer(index: int, G: int) -> KDAState | MLAState:
        if config.is_mla(index):
            keys = jnp.zeros((G, B, S, config.index_dim), stored) if config.sparse else None
            return MLAState(jnp.zeros((G, B, S, config.latent_row), stored), keys)
        conv = lambda width: jnp.zeros((G, B, W1, H * width), dtype)  # noqa: E731
        return KDAState(jnp.zeros((G, B, H, K, V), wide), conv(K), conv(K), conv(V))

    layers = [[layer(span.layer(j, 0), span.groups) for j in range(span.period)] for span in stacks]
    return State(layers, jnp.zeros(B, jnp.int32), jnp.zeros((B, config.hidden), dtype), S)
