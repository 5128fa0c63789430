"""The released names of a DSpark draft, as `names` has those of the decoder, and its folder."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..config.draft import DraftConfig
from ..errors import CheckpointError
from .headers import Contents, read_folder
from .inventory import inventory_problems
from .names import PerHeadWeight, Weight, prefixed
from .reader import TensorFolder

ROOT = "model."  # which some files put before every name
# Not read: the model's embedding and head are shared, copies of them in a draft are ignored even
# where they differ; angles are computed.
_SKIPPED = re.compile(r"(embed_tokens\.weight|lm_head\.weight|.*rotary_emb\.inv_freq)$")
_OUTER = {  # by form: the projection of taps, its norm, the last norm
    "mla": ("context_proj", "context_norm", "final_norm"),
    "gqa": ("fc", "hidden_norm", "norm"),
}


class DraftFolder(TensorFolder):
    """A draft on disk, its headers checked against its config when it is opened. Raises one
    `CheckpointError` with every tensor that is missing, unknown, or of another shape or dtype.
    """

    def __init__(self, folder: str | os.PathLike[str], config: DraftConfig) -> None:
        contents = read_folder(Path(folder), False)
        names = contents.tensors.keys() | contents.index.keys()
        root = ROOT if any(name.startswith(ROOT) for name in names) else ""
        weights = draft_table(config, root)
        super().__init__(contents, weights)
        if problems := [*contents.problems, *_problems(weights, contents, root)]:
            raise CheckpointError(*problems)


def _problems(weights: list[Weight], contents: Contents, root: str) -> Iterator[str]:
    """Where the tensors are not those of the weights."""
    is_read = lambda name: not _SKIPPED.fullmatch(name.removeprefix(root))  # noqa: E731
    tensors = {name: tensor for name, tensor in contents.tensors.items() if is_read(name)}
    listed = [name for name in contents.index if is_read(name)]
    return inventory_problems(weights, tensors, listed, (), reads_vision=True)


def draft_table(config: DraftConfig, root: str = "") -> list[Weight]:
    """Every weight of a draft; `root` begins every released name."""
    D, M, Z, r = config.hidden, len(config.layers_tapped), config.vocab, config.markov_rank
    project, context, final = (f"{root}{name}.weight" for name in _OUTER[config.form])
    layers = [
        weight
        for i in range(config.layers)
        for weight in prefixed(f"layers.{i}.", f"{root}layers.{i}.", _layer(config))
    ]
    markov, head = f"{root}markov_head.markov_w", f"{root}confidence_head.proj."
    taps = [Weight(f"tap_norms.{j}", f"{root}fc_norm.{j}.weight", (D,)) for j in range(M)]
    confidence = [
        Weight("w_confidence", f"{head}weight", (D + r,), unit_axis=0),
        Weight("b_confidence", f"{head}bias", (1,)),
    ]
    return [
        *(taps if config.fc_norm else []),
        Weight("w_context", project, (D, M * D)),
        Weight("context_norm", context, (D,)),
        *layers,
        Weight("norm", final, (D,)),
        Weight("w_markov_in", f"{markov}1.weight", (Z, r)),
        Weight("w_markov_out", f"{markov}2.weight", (Z, r)),
        *(confidence if config.confidence else []),
    ]


def _layer(config: DraftConfig) -> list[Weight]:
    D, F = config.hidden, config.ffn
    attention = _mla(config) if config.form == "mla" else _gqa(config)
    return [
        Weight("attention_norm", "input_layernorm.weight", (D,)),
        *prefixed("attention.", "self_attn.", attention),
        Weight("mlp_norm", "post_attention_layernorm.weight", (D,)),
        Weight("w_gate", "mlp.gate_proj.weight", (F, D)),
        Weight("w_up", "mlp.up_proj.weight", (F, D)),
        Weight("w_down", "mlp.down_proj.weight", (D, F)),
    ]


def _mla(config: DraftConfig) -> list[Weight]:
    D, H, Q, C = config.hidden, config.heads, config.q_rank, config.kv_rank
    K, R, V = config.nope_dim, config.latent_row, config.value_dim
    rows = K + V  # of each head in kv_b_proj
    return [
        Weight("w_q_a", "q_a_proj.weight", (Q, D)),
        Weight("q_norm", "q_a_layernorm.weight", (Q,)),
        Weight("w_q_b", "q_b_proj.weight", (H * (K + config.rope_dim), Q)),
        Weight("w_kv_a", "kv_a_proj_with_mqa.weight", (R, D)),
        Weight("kv_norm", "kv_a_layernorm.weight", (C,)),
        PerHeadWeight("w_k_b", "kv_b_proj.weight", (H, K, C), rows_per_head=rows),
        PerHeadWeight("w_v_b", "kv_b_proj.weight", (H, V, C), rows_per_head=rows, first_row=K),
        Weight("w_o", "o_proj.weight", (D, H * V)),
    ]


def _gqa(config: DraftConfig) -> list[Weight]:
    D, H, h, K = config.hidden, config.heads, config.kv_heads, config.rope_dim
    return [
        Weight("w_q", "q_proj.weight", (H * K, D)),
        Weight("q_norm", "q_norm.weight", (K,)),
        Weight("w_k", "k_proj.weight", (h * K, D)),
        Weight("k_norm", "k_norm.weight", (K,)),
        Weight("w_v", "v_proj.weight", (h * K, D)),
        Weight("w_o", "o_proj.weight", (D, H * K)),
    ]
