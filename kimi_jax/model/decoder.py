"""The decoder, top to bottom: Layer, stacks of equal groups of layers, Kimi; and how its weights
are declared and built.

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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..config.config import Config
from ..numerics import at_least_float32
from ..parallel import collectives
from ..parallel.mesh import Sizes, mesh_sizes
from ..parallel.placement import Placement
from ..parallel.reductions import SUM
from ..parallel.roles import Dim, Role
from .kda import KDA
from .layers import MLP, Expert, Term, linear_wide, rms_norm, weight
from .mla import MLA
from .moe import MoE
from .mxfp4 import Quantization
from .residual import Mix, Taps, push
from .state import KDAState, MLAState, State, cache_dtype
from .step import Step

Read = Callable[[str, tuple[slice, ...]], np.ndarray]


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
        for _, param in nnx.iter_graph(self.layers):
            if isinstance(param, nnx.Param):
                layer = param.get_value()
                param.set_value(jax.ShapeDtypeStruct((span.groups, *layer.shape), layer.dtype))
                meta = param.get_metadata()
                param.set_metadata(dims=("G", *meta["dims"]))
                param.set_metadata(counts=(span.groups, *meta["counts"]))
                param.set_metadata(roles=(None, *meta["roles"]))

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
        self, tokens: Int[Array, "B T"], state: State, lengths: Int[Array, " B"], step: Step
    ) -> tuple[Float[Array, "B T D"], State, Trace]:
        """Tokens -> normed output rows [B, T, D], the state after them, and what was recorded."""
        x, bank = self.begin(tokens, step)
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
        tapped = taps and self._end_of_taps(taps, x, bank, step)
        return out, state, Trace([*mixtures, weights], tapped)

    def _end_of_taps(
        self, taps: Taps, x: Array, bank: Array, step: Step
    ) -> Float[Array, "M B T D"]:
        """The tapped streams of all rows, after the last layer."""
        mixture, _ = self.residual(x, bank, self.config.bank_rows)  # as in `end`: compiled once
        taps = taps.record(self.config.layers - 1, x, mixture)
        return jnp.stack([step.attention_rows(rows) for rows in taps.rows])

    def begin(self, tokens: Int[Array, "B T"], step: Step) -> tuple[Array, Array]:
        """The residual rows x [P, D] that this rank holds before the first layer, and their empty
        bank [N, P, D].
        """
        with jax.named_scope("embedding"):
            x = step.reduce([collectives.embed(self.embed[...], tokens.reshape(-1))], how=SUM)
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


@dataclasses.dataclass(frozen=True)
class Declared:
    """A declared weight, not yet allocated: its path in the module, shape, type, dims, and the
    names of its released layers.
    """

    path: tuple
    shape: tuple[int, ...]
    dtype: jnp.dtype
    dims: tuple[str, ...]
    counts: tuple[int, ...]  # of things that are never split, dim by dim
    roles: tuple[Role | None, ...]  # what each dim is sharded by
    term: Term  # what a plan counts it to
    names: tuple[str, ...]  # one per group, or a single name for a weight outside the layers

    def placed(self, place: Placement, sizes: Sizes) -> tuple[int, ...]:
        """Its shape on a mesh, with the padding of the placement."""
        return place.padded_shape(self.roles, self.counts, self.shape, sizes)


def declare(model: Kimi) -> Iterator[Declared]:
    """Every weight of a declared model, in order. Allocates no arrays."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value, meta = param.get_value(), param.get_metadata()
        names = (".".join(map(str, path)),)
        if path[0] == "stacks":
            span = model.stacks[int(str(path[1]))].span
            tail = ".".join(map(str, path[4:]))
            layers = (span.layer(int(str(path[3])), g) for g in range(span.groups))
            names = tuple(f"layers.{layer}.{tail}" for layer in layers)
        dtype = jnp.dtype(value.dtype)
        dims, counts, roles = meta["dims"], meta["counts"], meta["roles"]
        yield Declared(path, value.shape, dtype, dims, counts, roles, meta["term"], names)


def build(
    model: Kimi,
    place: Placement,
    mesh: Mesh,
    read: Read,
    done: Callable[[int], None] = lambda n: None,
) -> dict:
    """Fill a declared model: path -> array on the mesh. `read(name, index)` is called once for each
    slice that this process' devices hold, however many of them hold it; `done` gets its bytes.

    A slice goes to its devices before the next is read, so that the host holds a single slice.
    """
    weights = {}
    for w in declare(model):
        shape, sharding, parts = w.placed(place, mesh_sizes(mesh)), _sharding(w, place, mesh), []
        for spans, devices in holders(shape, sharding).items():
            part = _slice_of(w, spans, read)
            parts += jax.block_until_ready([jax.device_put(part, device) for device in devices])
            done(part.nbytes)
        weights[w.path] = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    return weights


def slice_sizes(w: Declared, place: Placement, mesh: Mesh) -> list[int]:
    """The numbers in each slice of a weight that `build` asks for in this process."""
    held = holders(w.placed(place, mesh_sizes(mesh)), _sharding(w, place, mesh))
    return [math.prod(stop - start for start, stop in spans) for spans in held]


def _sharding(w: Declared, place: Placement, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, place.spec(w.roles))


def holders(shape: tuple[int, ...], sharding: NamedSharding) -> dict[tuple, list]:
    """The slices that this process holds, as (start, stop) of each dim, and the devices of each."""
    held: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        pairs = zip(index or (), shape, strict=True)
        spans = tuple(part.indices(size)[:2] for part, size in pairs)
        held.setdefault(spans, []).append(device)
    return held


def _slice_of(w: Declared, spans: tuple[tuple[int, int], ...], read: Read) -> np.ndarray:
    """A slice of a weight, read group by group and zero-padded beyond the weight's shape."""
    out = np.zeros([stop - start for start, stop in spans], w.dtype)
    real = [slice(min(a, n), min(b, n)) for (a, b), n in zip(spans, w.shape, strict=True)]
    filled = tuple(slice(0, part.stop - part.start) for part in real)
    if w.dims[0] != "G":
        out[filled] = _fit(read(w.names[0], tuple(real)), w, tuple(real))
        return out
    for at, name in enumerate(w.names[real[0]]):
        out[at][filled[1:]] = _fit(read(name, tuple(real[1:])), w, tuple(real[1:]))
    return out


def _fit(array: np.ndarray, w: Declared, index: tuple[slice, ...]) -> np.ndarray:
    shape = tuple(part.stop - part.start for part in index)
    if array.shape != shape:
        raise ValueError(f"{w.names[0]}: read {array.shape}, the model declares {shape}")
    return array
