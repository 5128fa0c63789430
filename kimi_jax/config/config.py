"""The sizes and switches of one model. `hf` reads them from the files of a released checkpoint and
writes them back; `released` holds the two released models.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from . import hf
from .released import K3, K3_1


@dataclass(frozen=True)
class Config:
    """One model. Layers are counted from 0."""

    hidden: int  # D, the width of the residual stream
    layers: int
    vocab: int  # Z
    mla_layers: tuple[int, ...]  # with full attention, sorted; the others are KDA
    residual_block: int  # layers between two pushes to the residual bank
    norm_eps: float
    max_positions: int  # tokens of a request, prompt and reply together
    tie_embeddings: bool  # the head is the embedding

    kda_heads: int  # H of KDA
    kda_key_dim: int  # K
    kda_value_dim: int  # V
    conv_width: int  # W, taps of the short convolutions
    decay_lower_bound: float | None  # of the log decay; None is the softplus gate
    full_rank_gate: bool  # the output gate of KDA is one matrix, not two of low rank

    heads: int  # H of MLA
    q_rank: int  # Q, the width of the query latent
    kv_rank: int  # the width of the latent that keys and values share
    nope_dim: int  # of a head's keys: what comes from the latent
    rope_dim: int  # of a head's keys: what all heads share; it is not rotated
    value_dim: int  # V of MLA
    mla_output_gate: bool
    mla_norm_eps: float

    dense_ffn: int  # the width of a dense MLP
    dense_layers: int  # the first of all layers, which have a dense MLP
    moe_layer_freq: int  # after them every n-th layer by number has experts
    experts: int  # E, in each layer that has any
    active_experts: int  # A, chosen for each token
    shared_experts: int  # that every token goes through
    expert_ffn: int  # F, the width of one expert
    latent: int  # L, the width that routed experts work in
    latent_norm: bool  # a norm behind the routed experts
    router: str  # "sigmoid" or "softmax"
    renormalize: bool  # the weights of the chosen experts sum to 1
    routed_scale: float  # a factor of the routed experts' sum
    expert_groups: int  # of experts; only the best groups are chosen from
    groups_kept: int  # of expert_groups

    situ_beta: float
    situ_linear_beta: float

    index_heads: int  # J, of K3.1's key selection; K3 has 0 here and in the next two
    index_dim: int  # I
    index_topk: int  # U, keys that a query attends to
    quantized: bool  # experts in MXFP4; a checkpoint shows which tensors are packed

    bos: int | None
    eos: tuple[int, ...]  # every id that ends a reply
    pad: int | None

    @functools.cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """The 0-based layers with linear attention."""
        return tuple(i for i in range(self.layers) if not self.is_mla(i))

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The 0-based layers with routed experts."""
        return tuple(i for i in range(self.layers) if not self.is_dense(i))

    @property
    def sparse(self) -> bool:
        """Whether MLA attends to selected keys only."""
        return self.index_topk > 0

    @property
    def latent_row(self) -> int:
        """R, the values an MLA layer caches for each token."""
        return self.kv_rank + self.rope_dim

    @property
    def shared_ffn(self) -> int:
        """The width of the shared experts, which run as one MLP."""
        return self.shared_experts * self.expert_ffn

    @property
    def bank_rows(self) -> int:
        """N, the most rows the residual bank ever holds."""
        return -(-self.layers // self.residual_block)

    @functools.cached_property
    def _mla_set(self) -> frozenset[int]:
        return frozenset(self.mla_layers)

    def is_mla(self, layer: int) -> bool:
        """Whether the 0-based layer has full attention; otherwise it is KDA."""
        return layer in self._mla_set

    def is_dense(self, layer: int) -> bool:
        """Whether the 0-based layer has a plain MLP; otherwise it routes to experts."""
        return layer < self.dense_layers or layer % self.moe_layer_freq != 0

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
        """The config of a released model: a parsed file, a `config.json`, or a folder that holds
        one.

        Of a file on disk, the `generation_config.json` beside it may name further ids that end a
        reply: `eos` is the union of all that either file names. Raises one `ConfigError` with every
        problem found, FileNotFoundError where there is no file.
        """
        return cls(**hf.read(source))

    @classmethod
    def k3(cls) -> Config:
        """Kimi K3 as released: 2.78 T parameters, 104 B active."""
        return cls.from_hf(K3)

    @classmethod
    def k3_1(cls) -> Config:
        """Kimi K3.1-Pro as released: K3 with sparse selection on its full-attention layers."""
        return cls.from_hf(K3_1)

    def to_hf(self) -> dict[str, Any]:
        """The config in its released form, which `from_hf` reads back as an equal one."""
        return hf.write(asdict(self))
