"""A DSpark draft on the mesh of its model: `load_draft`, and the `Drafter` that it gives."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ..checkpoint.draft_names import DraftFolder
from ..compilation.function import CompiledFunction
from ..config.draft import DraftConfig
from ..errors import RequestError, shown
from ..model.declared import declare, read_weights
from ..model.step import Tapped
from ..numerics import is_whole
from ..parallel.collectives import all_reduce, embed
from ..parallel.on_mesh import own_mesh
from ..parallel.placement import Placement
from ..parallel.processes import to_device, to_host
from ..parallel.roles import Role
from ..runtime.model_on_mesh import BY_ROW, ModelOnMesh, merged
from ..runtime.runner import Runner
from .drafter import Proposal
from .network import Block, Network, in_block, vocabulary_head

_PLACE = Placement()  # heads, width and vocabulary over the model ranks, whatever the model's is


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft ready to run beside its model: a `Drafter`. Its state is one array of cached rows
    [layers, B, S, R]; positions beyond its own context are not kept and nothing is drafted there.
    """

    config: DraftConfig
    program: ModelOnMesh = dataclasses.field(repr=False)  # of the model
    params: dict = dataclasses.field(compare=False, repr=False)  # with the model's embedding, head

    @property
    def tapped(self) -> Tapped:
        """The hidden states of the model that it reads."""
        return Tapped(self.config.layers_tapped, self.config.stream)

    @property
    def most(self) -> int:
        """The most drafts at once."""
        return self.config.block

    def begin(self, batch: int, max_length: int) -> Array:
        """An empty state."""
        S = min(max_length, self.config.max_positions)
        shape = (self.config.layers, batch, S, padded_row(self.config, self.program))
        with own_mesh(self.program.mesh):
            sharding = NamedSharding(self.program.mesh, cache_spec(self.config))
            return jnp.zeros(shape, self.program.dtype, device=sharding)

    def extend(
        self,
        state: Array,
        ids: Int[np.ndarray, "B T"],
        taps: Float[Array, "B T MD"] | None,
        starts: Int[np.ndarray, " B"],
        lengths: Int[np.ndarray, " B"],
    ) -> Array:
        """The state after committed tokens, of which the taps alone are read."""
        assert taps is not None  # `tapped` asks for them
        rows = [self._rows(x, state.shape[1]) for x in (taps, starts, lengths)]
        return extend_function(self.config, self.program)(self.params, state, *rows)

    def propose(
        self,
        state: Array,
        anchors: Int[np.ndarray, " B"],
        starts: Int[np.ndarray, " B"],
        limits: Int[np.ndarray, " B"],
        count: int,
        temperature: Float[np.ndarray, " B"],
        seeds: Int[np.ndarray, " B"],
        threshold: float = 0.0,
    ) -> Proposal:
        """At most `count` drafts after each anchor, all in one pass."""
        count = min(count, self.most)
        block = self.block(state, anchors, starts, count, temperature, seeds)
        lengths = np.minimum(limits, self.config.max_positions - starts)  # its own context ends
        lengths = np.clip(lengths, 0, count)
        if block.confidences is not None and threshold > 0:
            sure = to_host(block.confidences)[: len(lengths)] >= threshold
            lengths = np.minimum(lengths, np.cumprod(sure, axis=1).sum(1))
        probabilities = None
        if (temperature > 0).any():
            probabilities = drawn_from(block.corrected[: len(lengths)], jnp.asarray(temperature))
        ids = to_host(block.ids)[: len(lengths)]
        return Proposal(ids, lengths.astype(np.int32), probabilities, block.confidences)

    def block(
        self,
        state: Array,
        anchors: Int[np.ndarray, " B"],
        starts: Int[np.ndarray, " B"],
        count: int,
        temperature: Float[np.ndarray, " B"] | None = None,
        seeds: Int[np.ndarray, " B"] | None = None,
    ) -> Block:
        """`count` drafts of every row of a state, with their logits and confidences."""
        zeros = np.zeros(len(anchors), np.float32)
        temperature = zeros if temperature is None else temperature.astype(np.float32)
        seeds = zeros.astype(np.int32) if seeds is None else seeds
        arrays = (anchors, starts, temperature, seeds)
        rows = [self._rows(x, state.shape[1]) for x in arrays]
        return block_function(self.config, self.program, count)(self.params, state, *rows)

    def read_row(self, state: Array, row: int, first: int, last: int) -> np.ndarray:
        """A copy [layers, n, R] of a row's positions, on the host."""
        with own_mesh(self.program.mesh):
            return to_host(_row_of(state, np.int32(row)))[:, first:last]

    def write_row(self, state: Array, row: int, first: int, copy: np.ndarray) -> Array:
        """The state with positions of a row replaced by a copy."""
        S = state.shape[2]
        kept = copy[:, : max(0, S - first)]
        new = np.zeros((state.shape[0], *state.shape[2:]), state.dtype)
        new[:, first : first + kept.shape[1]] = kept
        bounds = np.array([row, first, first + kept.shape[1]], np.int32)
        return write_function(self.config, self.program)(state, new, bounds)

    def _rows(self, x: Any, batch: int) -> Array:
        """An array whose first dim is padded to the batch and sharded."""
        pads = ((0, batch - len(x)), *[(0, 0)] * (x.ndim - 1))
        if isinstance(x, np.ndarray):
            x = np.pad(x.astype(np.int32) if x.dtype == np.int64 else x, pads)
            return to_device(x, NamedSharding(self.program.mesh, BY_ROW))
        with own_mesh(self.program.mesh):
            return jnp.pad(x, pads) if len(x) < batch else x


def load_draft(
    path: str | os.PathLike,
    model: Runner,
    *,
    block: int | None = None,
    progress: bool | None = None,
) -> Draft:
    """A DSpark draft for a model, from a folder with `config.json` and safetensors: latent
    attention (`k3_dspark`), or grouped-query attention (`qwen3` with a `dflash_config`).

    It lives on the model's mesh, in the model's type, and shares the model's embedding and head:
    copies of them in the folder are not read, also where they differ. `block`: drafts of a round
    (default: what the config says, else 7). All problems of the config are raised in one
    `ConfigError`, then those of the headers in one `CheckpointError`, before anything is allocated.
    """
    if block is not None and not is_whole(block, 1, 2**10):
        raise RequestError(f"block must be a whole number in 1..1024, got {shown(block)}")
    config = DraftConfig.from_hf(path, model.config)
    if block is not None:
        config = dataclasses.replace(config, block=int(block))
    network = Network(config, model.dtype)
    with DraftFolder(Path(path), config) as folder:
        own = read_weights(network, _PLACE, model.mesh, folder.read, progress)
    shared = {path: model.params[path] for path in _shared(model.program)}
    return Draft(config, model.program, own | shared)


def _shared(program: ModelOnMesh) -> list[tuple]:
    """The paths of the model's embedding and head."""
    embedding, head = ("embed",), ("head",)
    return [embedding] if program.config.tie_embeddings else [embedding, head]


def cache_spec(config: DraftConfig) -> PartitionSpec:
    """How cached rows are sharded: latent rows whole, keys and values by their heads."""
    heads = None if config.form == "mla" else Role.HEADS
    return _PLACE.spec((None, Role.REQUESTS, None, heads))


def padded_row(config: DraftConfig, program: ModelOnMesh) -> int:
    """The width of a cached row, with heads that are padded to the ranks."""
    if config.form == "mla":
        return config.latent_row
    heads = _PLACE.padded(Role.HEADS, config.kv_heads, program.sizes)
    return config.cached_row // config.kv_heads * heads


def _weight_specs(config: DraftConfig, program: ModelOnMesh) -> dict[tuple, PartitionSpec]:
    own = {w.path: _PLACE.spec(w.roles) for w in declare(Network(config, program.dtype))}
    return own | {path: program.weight_specs[path] for path in _shared(program)}


@functools.lru_cache(maxsize=32)
def extend_function(config: DraftConfig, program: ModelOnMesh) -> CompiledFunction:
    """(weights, state, taps [B, T, M D], starts [B], lengths [B]) -> state, which is consumed."""
    network, own = Network(config, program.dtype), set(_own_paths(config, program))

    def device_fn(weights: dict, cache: Array, taps: Array, starts: Array, lengths: Array) -> Array:
        model = merged(network, {path: w for path, w in weights.items() if path in own})
        numbers = jnp.arange(taps.shape[1], dtype=jnp.int32)
        positions = starts[:, None] + numbers[None]
        rows = model.context_rows(taps.astype(cache.dtype), positions)
        slots = jnp.where(numbers[None] < lengths[:, None], positions, cache.shape[2])
        batch = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
        return cache.at[:, batch, slots].set(rows, mode="drop")

    spec = cache_spec(config)
    specs = (_weight_specs(config, program), spec, BY_ROW, BY_ROW, BY_ROW)
    return program.compiled(device_fn, specs, spec, "rows of a draft", donate=1, beside=config)


@functools.lru_cache(maxsize=32)
def block_function(config: DraftConfig, program: ModelOnMesh, count: int) -> CompiledFunction:
    """(weights, state, anchors, starts, temperature, seeds, each [B]) -> `Block`."""
    network, own = Network(config, program.dtype), set(_own_paths(config, program))
    head = _shared(program)[-1]

    def device_fn(weights: dict, cache: Array, anchors: Array, *rows: Array) -> Block:
        model = merged(network, {path: w for path, w in weights.items() if path in own})
        ids = in_block(anchors, config.mask, count)
        embedded = all_reduce(embed(weights[("embed",)], ids.reshape(-1)))
        hidden = model.hidden(embedded.reshape(*ids.shape, -1), cache, rows[0])
        base = vocabulary_head(weights[head], hidden, config.vocab)
        return model.chain(hidden, base, anchors, *rows)

    inputs = (_weight_specs(config, program), cache_spec(config), *[BY_ROW] * 4)
    return program.compiled(device_fn, inputs, BY_ROW, f"{count} drafts", beside=config)


@functools.lru_cache(maxsize=32)
def write_function(config: DraftConfig, program: ModelOnMesh) -> Any:
    """(state, row [layers, S, R], [row, first, last]) -> state, which is consumed."""

    def with_row(cache: Array, new: Array, bounds: Array) -> Array:
        row, first, last = bounds
        positions = jnp.arange(cache.shape[2], dtype=jnp.int32)
        is_new = (positions >= first) & (positions < last)
        old = jax.lax.dynamic_index_in_dim(cache, row, 1, keepdims=False)
        both = jnp.where(is_new[None, :, None], new, old)
        return jax.lax.dynamic_update_index_in_dim(cache, both, row, 1)

    sharding = NamedSharding(program.mesh, cache_spec(config))
    return jax.jit(with_row, donate_argnums=0, out_shardings=sharding)


def _own_paths(config: DraftConfig, program: ModelOnMesh) -> list[tuple]:
    return [w.path for w in declare(Network(config, program.dtype))]


@jax.jit
def _row_of(state: Array, row: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(state, row, 1, keepdims=False)


@jax.jit
def drawn_from(
    logits: Float[Array, "B k Z"], temperature: Float[Array, " B"]
) -> Float[Array, "B k Z"]:
    """The distribution of each draft; one-hot at the best token where the temperature is 0."""
    scale = jnp.where(temperature > 0, temperature, 1).astype(logits.dtype)[:, None, None]
    best = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype)
    return jnp.where((temperature > 0)[:, None, None], jax.nn.softmax(logits / scale), best)
