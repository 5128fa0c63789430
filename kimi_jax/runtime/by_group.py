"""A step as calls of few programs: one runs a group of layers, and is called for every equal group.

GPUs read a weight where it lies only if it is an array of its own: out of a stack that is scanned,
every weight is copied before it is multiplied. One program of all layers copies nothing either, but
compiles for as long as there are layers. So weights and states are held layer by layer, and each
kind of group compiles once. No call waits for the one before to end, and all that one hands to the
next (rows, their bank, the number of the group) stays on the devices.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ..config.config import Config
from ..model.decoder import Embedded, Kimi, Span, Stack, spans
from ..model.residual import Taps
from ..model.state import KDAState, MLAState, State
from ..model.step import Step, Tapped
from ..parallel.mesh import DATA, MODEL
from .model_on_mesh import BY_ROW, BY_SECOND, REPLICATED, ModelOnMesh, merged
from .rows import Rows
from .sampling import sample

# How arguments and results are sharded, beside specs: residual rows [P, D] and their bank
# [N, P, D], which ranks replicate or slice.
ROWS, BANK = "rows", "bank"
Specs = Sequence[Any]
_BEGUN = (BY_ROW, BY_ROW, BY_ROW, REPLICATED, ROWS, BANK)
_SAMPLED = (REPLICATED, BY_SECOND)


class Part(NamedTuple):
    """One program of a step: its name, how often a step calls it, and the program, lowered."""

    name: str
    calls: int
    lowered: Any


class Group(NamedTuple):
    """A group of layers, and the program that runs it and all of its kind."""

    span: Span  # of this group alone
    run: Callable
    weights: dict[str, tuple]  # what `run` takes, by name: their paths in the model


class StepParts:
    """The programs of steps of one kind (of `reductions.STEPS`) of a model whose layers are held
    one by one, with taps where some are asked for.
    """

    commits = True  # the new tokens; else lengths, `hidden` and recurrent states stay

    def __init__(self, model: ModelOnMesh, kind: str, tapped: Tapped | None = None):
        self.model, self.kind, self.tapped = model, kind, tapped
        self.ends = Kimi(model.config, model.dtype, (), quantization=model.quantization)
        ends = [path for path in model.weight_specs if path[0] != "stacks"]
        self.end_paths = {_weight_name(path): path for path in ends}
        self.groups = [
            group for span in spans(model.config, scan=True) for group in self._groups_of(span)
        ]

    # The parts, each a function of arrays on the mesh. Those that run layers know the step by
    # `tokens` [B, T], whose values `begin` alone reads, by `start` [B] and by `lengths` [B].

    @functools.cached_property
    def begin(self) -> Callable:
        """(tokens, start, lengths, weights, embedded or nothing) -> the first three, on the
        devices, the number of the first group, x, bank. Consumes `start`. Here and below, taps
        travel beside the bank.
        """

        def device_fn(
            tokens: Array, start: Array, lengths: Array, weights: dict, *embedded: Embedded
        ) -> tuple:
            step = self._step(tokens, start, lengths)
            model = self._merged_ends(weights)
            x, bank = model.begin(jnp.where(step.valid, tokens, 0), step, *embedded)
            taps = Taps.of(self.tapped, x) if self.tapped else None
            return tokens, start, lengths, jnp.int32(0), x, (bank, taps)

        inputs = (BY_ROW, BY_ROW, BY_ROW, self._end_specs, BY_ROW)
        return self._compiled(device_fn, inputs, _BEGUN, donate=1)

    def _groups_of(self, span: Span) -> Iterator[Group]:
        """The groups of a span of the layers in order. Those that start residual blocks at the same
        positions share a program.
        """
        runs = {}
        for number in range(span.groups):
            one = Span(span.layer(0, number), span.period, 1)
            starts = tuple(
                one.layer(j, 0) % self.model.config.residual_block == 0 for j in range(one.period)
            )
            if starts not in runs:
                runs[starts] = self._program_of_groups(span, starts)
            run, inner = runs[starts]
            weights = {name: _path_in_model(one, path) for name, path in inner.items()}
            yield Group(one, run, weights)

    def _program_of_groups(
        self, span: Span, starts_block: tuple[bool, ...]
    ) -> tuple[Callable, dict[str, tuple]]:
        """(tokens, start, lengths, weights, number, x, bank, caches, recurrent) -> the last five,
        after the group of this number in a span; and the weights that it takes, by name: their
        paths in a group. Consumes all of the five but `recurrent`.

        Caches (of MLA layers) change by a few rows, in place. Recurrent states (of KDA layers) are
        written as new arrays: XLA reads and writes them in one kernel, but not in place, and would
        copy what is donated.
        """
        model = self.model
        one = Span(span.first, span.period, 1)
        stack = Stack(model.config, model.dtype, one, model.quantization)
        params = nnx.to_flat_state(nnx.state(stack, nnx.Param))
        inner = {_weight_name(path): path for path, _ in params}

        def device_fn(
            tokens: Array,
            start: Array,
            lengths: Array,
            weights: dict[str, Array],
            number: Array,
            x: Array,
            bank: tuple[Array, Taps | None],
            caches: list[MLAState],
            recurrent: list[KDAState],
        ) -> tuple:
            step = self._step(tokens, start, lengths)
            layers = merged(stack, {inner[name]: array for name, array in weights.items()})
            states = joined(model.config, one, caches, self.entering(recurrent, tokens.shape[1]))
            at = number if span.groups > 1 else 0
            rows, taps = bank
            x, rows, states, taps, _ = layers(x, rows, states, step, at, starts_block, taps)
            following = number + 1 if span.groups > 1 else number
            caches, after = parted(states)
            return following, x, (rows, taps), caches, self.leaving(after)

        weight_specs = {
            name: model.weight_specs[_path_in_model(span, path)] for name, path in inner.items()
        }
        state_specs = model.state_specs().layers[0][span.first : span.first + span.period]
        caches, recurrent = parted(state_specs)
        carried = (REPLICATED, ROWS, BANK, caches)
        inputs = (BY_ROW, BY_ROW, BY_ROW, weight_specs, *carried, recurrent)
        outputs = (*carried, self.leaving_specs(recurrent))
        return self._compiled(device_fn, inputs, outputs, donate=(4, 5, 6, 7)), inner

    def entering(self, recurrent: list[KDAState], T: int) -> list:
        """Recurrent states as the layers of a step take them."""
        return recurrent

    def leaving(self, recurrent: list) -> list:
        """What is returned of the recurrent states after a group."""
        return recurrent

    def leaving_specs(self, recurrent: list) -> list:
        """How that is sharded, by how recurrent states are."""
        return recurrent

    @functools.cached_property
    def end(self) -> Callable:
        """(tokens, start, lengths, weights, x, bank, hidden) -> output rows [B, T, D], the tokens
        seen [B], hidden, taps [M, B, T, D] or None. Consumes `start` and `hidden`.
        """

        def device_fn(
            tokens: Array,
            start: Array,
            lengths: Array,
            weights: dict[str, Array],
            x: Array,
            bank: tuple[Array, Taps | None],
            hidden: Array,
        ) -> tuple:
            step, model = self._step(tokens, start, lengths), self._merged_ends(weights)
            rows, taps = bank
            count = lengths if self.commits else jnp.zeros_like(lengths)
            out, hidden, _ = model.end(x, rows, hidden, count, step)
            return out, start + count, hidden, taps and model.end_of_taps(taps, x, rows, step)

        inputs = (BY_ROW, BY_ROW, BY_ROW, self._end_specs, ROWS, BANK, BY_ROW)
        outputs = (BY_ROW, BY_ROW, BY_ROW, BY_SECOND)
        return self._compiled(device_fn, inputs, outputs, donate=(1, 6))

    @functools.cached_property
    def head(self) -> Callable:
        """(normed output rows [B, ..., D], weights) -> logits [B, ..., Z]."""

        def device_fn(out: Array, weights: dict[str, Array]) -> Array:
            return self._merged_ends(weights).head_logits(out)

        return self._compiled(device_fn, (BY_ROW, self._end_specs), BY_ROW)

    def end_weights(self, weights: dict) -> dict[str, Any]:
        """Embedding, output mixture, norm and head, by name."""
        return {name: weights[path] for name, path in self.end_paths.items()}

    @property
    def _end_specs(self) -> dict[str, PartitionSpec]:
        return self.end_weights(self.model.weight_specs)

    def _merged_ends(self, weights: dict[str, Array]) -> Kimi:
        return merged(self.ends, {self.end_paths[name]: array for name, array in weights.items()})

    def _step(self, tokens: Array, start: Array, lengths: Array) -> Step:
        step = self.model.step_info(start, lengths, tokens.shape[1], self.kind)
        return dataclasses.replace(step, tapped=self.tapped)

    def _row_specs(self, shape: tuple[int, ...]) -> dict[str, PartitionSpec]:
        """How residual rows and their bank are sharded, for tokens of a shape."""
        B, T = shape
        rows = B // self.model.sizes[DATA] * T
        axes = (DATA, MODEL) if self.model.place.slices_rows(rows) else DATA
        return {ROWS: PartitionSpec(axes), BANK: PartitionSpec(None, axes)}

    def _compiled(
        self, device_fn: Callable, inputs: Specs, outputs: Any, donate: Any = ()
    ) -> Callable:
        """`device_fn`, written for one device, for arrays on the mesh; where rows or their bank are
        among them, the first are the tokens.
        """

        def global_fn(*arguments: Any) -> Any:
            def specs(kinds: Any) -> Any:
                if type(kinds) is not tuple:
                    return kinds
                has_rows = any(isinstance(kind, str) for kind in kinds)
                rows = self._row_specs(arguments[0].shape) if has_rows else {}
                return tuple(rows[kind] if isinstance(kind, str) else kind for kind in kinds)

            call = jax.shard_map(
                device_fn,
                mesh=self.model.mesh,
                in_specs=specs(inputs)[: len(arguments)],
                out_specs=specs(outputs),
                check_vma=False,
            )
            return call(*arguments)

        return jax.jit(global_fn, donate_argnums=donate)


class ByGroup(StepParts):
    """Whole steps: calls of the programs, none of which waits for the one before to end."""

    def step(
        self, weights: dict, state: State, tokens: Any, lengths: Any, *embedded: Embedded
    ) -> tuple[Array, State]:
        """As `Program.step`."""
        _, state = self.advance(weights, state, tokens, lengths, *embedded)
        return self.head(state.hidden, self.end_weights(weights)), state

    def advance(
        self, weights: dict, state: State, tokens: Any, lengths: Any, *embedded: Embedded
    ) -> tuple[Array, State]:
        """The normed output rows [B, T, D] of a step, and the state after it. The state is
        consumed.
        """
        out, _, state = self.run(weights, state, tokens, lengths, *embedded)
        return out, state

    def run(
        self, weights: dict, state: State, tokens: Any, lengths: Any, *embedded: Embedded
    ) -> tuple[Array, Array | None, State]:
        """`advance`, with the taps [M, B, T, D]; what leaves a KDA layer is in the place of its
        state.
        """
        ends = self.end_weights(weights)
        *step, number, x, bank = self.begin(tokens, state.length, lengths, ends, *embedded)
        self._keep_order(x)
        layers = []
        for group in self.groups:
            caches, recurrent = parted(_of(state, group.span))
            taken = {name: weights[path] for name, path in group.weights.items()}
            number, x, bank, caches, after = group.run(
                *step, taken, number, x, bank, caches, recurrent
            )
            for array in jax.tree.leaves(recurrent) if self.commits else ():
                array.delete()  # its memory is free as soon as the call has read it
            self._keep_order(x)
            layers += joined(self.model.config, group.span, caches, after)
        out, length, hidden, taps = self.end(*step, ends, x, bank, state.hidden)
        self._keep_order(out)
        return out, taps, State([layers], length, hidden, state.max_length)

    def after_end(self, function: Callable, count: int) -> Callable:
        """(weights, *arrays [B, ...]) -> `function` of the model, without its layers, and of
        `count` arrays: an array [B, ...]. A program of its own; the first is the rows of `advance`.
        """

        def device_fn(weights: dict[str, Array], *arrays: Array) -> Array:
            return function(self._merged_ends(weights), *arrays)

        run = self._compiled(device_fn, (self._end_specs, *[BY_ROW] * count), BY_ROW)
        return lambda weights, *arrays: run(self.end_weights(weights), *arrays)

    def _keep_order(self, x: Array) -> None:
        """On CPUs, wait for a call: devices take threads from one pool there, and the collectives
        of several calls in flight can wait for each other. Other backends run calls in order.
        """
        if self.model.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(x)

    def decode_steps(self, weights: dict, state: State, rows: Rows, n: Any) -> tuple[tuple, State]:
        """As `Program.decode_steps`."""
        ends = self.end_weights(weights)
        sampled = self.nothing_sampled(state.hidden, ends, rows)
        for _ in range(n):
            tokens, lengths, rows, sampled = self.sample(state.hidden, ends, rows, sampled)
            self._keep_order(tokens)
            _, state = self.advance(weights, state, tokens, lengths)
        return sampled[1], state

    def parts(
        self, weights: dict, state: State, tokens: Any, lengths: Any, rows: Rows | None = None
    ) -> Iterator[Part]:
        """Every program of a step, lowered for arrays or their shapes; with rows, of a step of the
        multi-step decode.
        """
        ends = self.end_weights(weights)
        step = (tokens, state.length, lengths)
        begun = jax.eval_shape(self.begin, *step, ends)
        *_, number, x, bank = self._shaped(begun, _BEGUN, tokens.shape)
        yield Part("begin", 1, self.begin.lower(*step, ends))
        calls = Counter(group.run for group in self.groups)
        for group in self.groups:
            if count := calls.pop(group.run, 0):
                taken = {name: weights[path] for name, path in group.weights.items()}
                states = parted(_of(state, group.span))
                lowered = group.run.lower(*step, taken, number, x, bank, *states)
                yield Part(_name(group.span), count, lowered)
        yield Part("end", 1, self.end.lower(*step, ends, x, bank, state.hidden))
        if rows is None:
            yield Part("head", 1, self.head.lower(state.hidden, ends))
        else:
            nothing = jax.eval_shape(self.nothing_sampled, state.hidden, ends, rows)
            sampled = self._shaped(nothing, _SAMPLED, tokens.shape)
            yield Part("sample", 1, self.sample.lower(state.hidden, ends, rows, sampled))

    def _shaped(self, results: tuple, kinds: Specs, tokens_shape: tuple[int, ...]) -> tuple:
        """The shapes of results that are sharded as `kinds` say, with their shardings."""
        rows = self._row_specs(tokens_shape)

        def with_sharding(kind: Any, part: Any) -> Any:
            spec = rows[kind] if isinstance(kind, str) else kind
            sharding = NamedSharding(self.model.mesh, spec)
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
            return jax.tree.map(shape, part)

        return tuple(map(with_sharding, kinds, results))

    @functools.cached_property
    def sample(self) -> Callable:
        """(hidden, weights, rows, sampled) -> the next tokens [B, 1] and their number in
        each row [B], rows, sampled. `sampled`, which is consumed, is as `nothing_sampled` has it.
        """

        def device_fn(hidden: Array, weights: dict[str, Array], rows: Rows, sampled: Any) -> tuple:
            logits = self._merged_ends(weights).head_logits(hidden)
            with jax.named_scope("sample"):
                latest = sample(logits, rows)
            count, kept = sampled
            kept = jax.tree.map(lambda all, new: all.at[count].set(new), kept, latest)
            rows = rows.after(*latest[:2])
            following = jnp.where(rows.active, latest[0], 0)[:, None]
            return following, rows.active.astype(jnp.int32), rows, (count + 1, kept)

        inputs = (BY_ROW, self._end_specs, BY_ROW, _SAMPLED)
        return self._compiled(device_fn, inputs, (BY_ROW, BY_ROW, BY_ROW, _SAMPLED), donate=3)

    @functools.cached_property
    def nothing_sampled(self) -> Callable:
        """(hidden, weights, rows) -> the number of steps that have sampled, 0, and room for what
        each samples, arrays [rows.steps_per_call, B, ...].
        """

        def device_fn(hidden: Array, weights: dict[str, Array], rows: Rows) -> tuple:
            head = self._merged_ends(weights).head_logits
            shapes = jax.eval_shape(lambda: sample(head(hidden), rows))
            steps = rows.steps_per_call
            room = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)
            return jnp.int32(0), room

        return self._compiled(device_fn, (BY_ROW, self._end_specs, BY_ROW), _SAMPLED)


def parted(states: list) -> tuple[list[MLAState], list]:
    """The states of a group's layers as caches and recurrent states."""
    caches = [state for state in states if isinstance(state, MLAState)]
    return caches, [state for state in states if not isinstance(state, MLAState)]


def joined(config: Config, span: Span, caches: list, recurrent: list) -> list:
    """Inverse of `parted` for a group of a span."""
    of_kind = {True: iter(caches), False: iter(recurrent)}
    layers = range(span.first, span.first + span.period)
    return [next(of_kind[config.is_mla(layer)]) for layer in layers]


def _of(state: State, span: Span) -> list[Any]:
    """The states of the layers of a group."""
    return state.layers[0][span.first : span.first + span.period]


def _name(span: Span) -> str:
    last = span.first + span.period - 1
    return f"layer {last}" if span.period == 1 else f"layers {span.first} to {last}"


def _path_in_model(span: Span, path: tuple) -> tuple:
    """The path in the model of a weight of the first group of a span, from its path there."""
    return ("stacks", 0, "layers", span.first + path[1], *path[2:])


def _weight_name(path: tuple) -> str:
    return ".".join(map(str, path))
