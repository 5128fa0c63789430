"""What a step must touch and compute on one device, whatever program runs it.

Bytes: every weight that the rows use once (of routed experts those that uniform routing reaches),
every state once, of caches the rows that the placement makes this device read, and the new rows.
Products: by the definition, two operations for each multiplication and addition.
"""

import dataclasses
import math

import jax.numpy as jnp

from kimi_jax.config.config import Config
from kimi_jax.model.declared import Declared, declare
from kimi_jax.model.layers import Term
from kimi_jax.parallel.mesh import DATA, MODEL
from kimi_jax.parallel.roles import Role
from kimi_jax.runtime.program import Program


@dataclasses.dataclass(frozen=True)
class Load:
    """The rows of one step, and how many tokens each request has cached before it."""

    batch: int  # requests, of all data ranks
    tokens: int  # new ones of each request
    cached: int


@dataclasses.dataclass
class Floor:
    """Bytes and FLOP of one device, by part."""

    bytes: dict[str, int]
    products: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes.values())

    @property
    def total_products(self) -> int:
        """FLOP of all parts."""
        return sum(self.products.values())


class Shares:
    """How a load is divided over the devices of a program."""

    def __init__(self, program: Program, load: Load):
        sizes, place = program.sizes, program.place
        self.n = sizes[MODEL]
        self.requests = load.batch // sizes[DATA]
        self.rows = self.requests * load.tokens  # of a data rank
        self.expert_ranks = math.prod(sizes[axis] for axis in place.expert_axes)
        groups = sizes[DATA] * sizes[MODEL] // self.expert_ranks
        self.routed_rows = load.batch * load.tokens // groups  # that one group of experts serves
        self.key_ranks = program.stripes.ranks
        config = program.config
        total = load.cached + load.tokens
        self.selected = min(total, config.index_topk) if config.sparse else total
        self.keys = total


def distinct_share(rows: int, config: Config) -> float:
    """The share of experts that at least one of `rows` rows reaches, at uniform routing."""
    return 1 - (1 - config.active_experts / config.experts) ** rows if config.experts else 0.0


def floor(program: Program, load: Load) -> Floor:
    """The least bytes and products of a step on one device."""
    shares = Shares(program, load)
    nbytes: dict[str, float] = {}
    products: dict[str, float] = {}

    def add(part: str, count: float, flop: float = 0) -> None:
        nbytes[part] = nbytes.get(part, 0) + count
        products[part] = products.get(part, 0) + flop

    for weight in declare(program.declared):
        add(*_weight(program, weight, shares))
    for part, count, flop in (*_kda(program, shares), *_mla(program, shares, load)):
        add(part, count, flop)
    whole = {part: round(count) for part, count in nbytes.items()}
    return Floor(whole, {part: round(flop) for part, flop in products.items()})


def _weight(program: Program, weight: Declared, shares: Shares) -> tuple[str, float, float]:
    """The part of a weight, its bytes, and the FLOP of its products."""
    config, place, sizes = program.config, program.place, program.sizes
    shape = weight.placed(place, sizes)
    ranks = math.prod(sizes[axis] for role in weight.roles for axis in place.axes(role))
    local = math.prod(shape) / ranks
    itemsize, name = weight.dtype.itemsize, str(weight.path[-1])
    if weight.path[0] != "stacks":
        if name == "embed" and not config.tie_embeddings:
            return "embedding", shares.rows * config.hidden * itemsize, 0
        rows = shares.requests if name in ("head", "embed") else 0
        return "head", local * itemsize, 2 * local * rows
    part = "mlp" if "mlp" in str(weight.path[4]) else "attention"
    if weight.term == Term.EXPERTS:
        share = distinct_share(shares.routed_rows, config)
        packed = 2 if itemsize == 1 and name.startswith("w_") else 0 if itemsize == 1 else 1
        used = shares.routed_rows * config.active_experts / config.experts
        return "mlp/experts", local * itemsize * share, 2 * local * packed * used
    is_matrix = name.startswith("w_")
    rows = shares.rows / shares.n if part == "mlp" and ranks == 1 else shares.rows
    if name in ("w_k_b", "w_v_b"):
        return part, local * itemsize, 0  # counted with attention, in the cheaper of two forms
    return part, local * itemsize, 2 * local * rows if is_matrix else 0


def _kda(program: Program, shares: Shares) -> list[tuple[str, float, float]]:
    """Recurrent and conv states are read and written; three products of [K, V] a token and head."""
    config, layers = program.config, len(program.config.kda_layers)
    H = program.place.padded(Role.HEADS, config.kda_heads, program.sizes) / shares.n
    K, V = config.kda_key_dim, config.kda_value_dim
    itemsize = 8 if program.dtype == "float64" else 4
    recurrent = shares.requests * H * K * V * itemsize
    width = jnp.dtype(program.dtype).itemsize
    conv = shares.requests * (config.conv_width - 1) * H * (2 * K + V) * width
    flop = 6 * shares.rows * H * K * V
    return [("attention/state", 2 * layers * (recurrent + conv), layers * flop)]


def _mla(program: Program, shares: Shares, load: Load) -> list[tuple[str, float, float]]:
    """The caches' rows that are read and written, and attention over the keys in question."""
    config, layers = program.config, len(program.config.mla_layers)
    width = jnp.dtype(program.dtype).itemsize
    B, T, U = shares.requests, load.tokens, config.index_topk
    key_row, index_row = config.latent_row * width, config.index_dim * width
    reach = min(shares.keys, T * shares.selected)  # rows that some query of a request attends to
    read = B * (reach * key_row + shares.keys * index_row) / shares.key_ranks
    written = B * T * (key_row + index_row) / shares.key_ranks
    seen = [load.cached + t + 1 for t in range(T)]
    pairs = B * sum(min(keys, U) if config.sparse else keys for keys in seen)
    scored = B * sum(seen) if config.sparse else 0
    attended = _attention_products(config, shares, pairs, B * shares.keys)
    indexed = 2 * config.index_heads * config.index_dim * scored / shares.key_ranks
    return [
        ("attention/caches", layers * (read + written), 0),
        ("attention/scores", 0, layers * attended),
        ("attention/indexer", 0, layers * indexed),
    ]


def _attention_products(config: Config, shares: Shares, pairs: int, keys: int) -> float:
    """FLOP of attention over (query, key) pairs on one rank, in the form that needs fewer: absorbed
    (latents are the keys) or expanded (keys and values of each head).
    """
    H, N, V, C = config.heads, config.nope_dim, config.value_dim, config.kv_rank
    absorbed = 2 * H * (config.latent_row + C) * pairs + 2 * H * C * (N + V) * shares.rows
    expanded = 2 * H * (N + config.rope_dim + V) * pairs + 2 * H * C * (N + V) * keys
    return min(absorbed, expanded) / shares.n
