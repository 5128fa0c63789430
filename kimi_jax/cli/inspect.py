"""`kimi-jax inspect`: what a checkpoint folder holds."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import bytes_text, label, shortened
from .devices import check_folder
from .options import add_command, add_model, model_folder
from .output import print_table

_MOST_ROWS = 100  # of one part: tensors that the model does not use can have any names
_LINE = 400  # characters of the line that shows the kinds of layers
EXAMPLES = """\
  kimi-jax inspect
  kimi-jax inspect /path/to/checkpoint
  kimi-jax inspect /path/to/checkpoint --all | grep indexer"""

_PARTS = (  # the first pattern found in a tensor's name says which part of the model it is
    ("embedding", r"embed_tokens"),
    ("head", r"^lm_head|^model\.norm"),
    ("residual", r"_res_(norm|proj)"),
    ("norms", r"layernorm\.weight$(?<!_a_layernorm\.weight)"),
    ("selection", r"\.indexer\."),
    ("MLA", r"\.MLA\."),
    ("KDA", r"\.self_attn\."),
    ("experts", r"\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.block_sparse_moe\."),
    ("dense", r"\.mlp\."),
    ("not used", r""),
)


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "show the sizes, layers and tensors of a checkpoint folder, from its headers alone"
    command = add_command(commands, "inspect", run, about, EXAMPLES)
    add_model(command)
    help_all = "list every tensor instead of groups of them"
    command.add_argument("--all", action="store_true", help=help_all)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..checkpoint.reader import Checkpoint, vision_of
    from ..config.config import Config

    folder = model_folder(options)
    check_folder(folder)
    config = Config.from_hf(folder)
    vision = vision_of(folder, config)
    with Checkpoint(folder, config, vision) as checkpoint:
        if options.all:
            for name, tensor in checkpoint.tensors.items():
                print(
                    f"{label(name)}  {_shape_text(tensor.shape)}  {tensor.dtype}  "
                    f"{label(tensor.shard)}"
                )
            return 0
        summary = [*_summary(checkpoint, config), ("vision", _vision_text(vision))]
        print_table(label(folder), ("", ""), summary)
        columns = ("part", "tensor", "count", "shape", "dtype", "bytes")
        print_table("tensors", columns, list(_groups(checkpoint, config)))
    return 0


def _summary(checkpoint: Any, config: Any) -> Iterator[tuple[str, str]]:
    tensors = checkpoint.tensors.values()
    shards = len({tensor.shard for tensor in tensors})
    nbytes = sum(tensor.nbytes for tensor in tensors)
    yield "model", "K3.1, selects keys" if config.sparse else "K3"
    yield "weights", f"{_parameters(checkpoint, config):,} parameters"
    yield (
        "files",
        f"{len(tensors):,} tensors, {nbytes:,} bytes ({bytes_text(nbytes)}), shards: {shards}",
    )
    yield "experts are", checkpoint.quantization.title
    yield "tokenizer", _tokenizer_text(checkpoint.folder, config)
    yield from _sizes(config)


def _parameters(checkpoint: Any, config: Any) -> int:
    """Weights of the model: two in a packed byte, none in a scale or in padding."""
    from ..checkpoint.names import shapes

    return sum(
        math.prod(shape) * (2 if dtype == "uint8" else 1)
        for name, (shape, dtype) in shapes(config, checkpoint.quantization).items()
        if ".experts.s_" not in name and not (name == "head" and config.tie_embeddings)
    )


def _tokenizer_text(folder: Path, config: Any) -> str:
    from ..text.tokenizer import Tokenizer

    if not Tokenizer.is_in(folder):
        return "none, prompts must be token ids"
    tokenizer = Tokenizer.from_folder(folder, config.vocab)
    return f"found, {tokenizer.vocab_size:,} ids of which {len(tokenizer.special_ids)} special"


def _sizes(config: Any) -> Iterator[tuple[str, str]]:
    kinds = ["M" if config.is_mla(i) else "K" for i in range(config.layers)]
    mlps = ["d" if config.is_dense(i) else "e" for i in range(config.layers)]
    yield "layers", f"{config.layers}, residual blocks of {config.residual_block}"
    yield "attention", f"{shortened(' '.join(kinds), _LINE)}   (K: KDA, M: MLA)"
    yield "feed-forward", f"{shortened(' '.join(mlps), _LINE)}   (d: dense, e: experts)"
    yield "width", f"{config.hidden:,}, dense {config.dense_ffn:,}"
    yield "vocabulary", f"{config.vocab:,}" + (", head tied" if config.tie_embeddings else "")
    yield "context", f"{config.max_positions:,} tokens"
    yield (
        "KDA",
        f"{config.kda_heads} heads, keys {config.kda_key_dim}, values {config.kda_value_dim}",
    )
    yield (
        "MLA",
        f"{config.heads} heads, keys {config.nope_dim} + {config.rope_dim}, values "
        f"{config.value_dim}, {config.latent_row} values cached a token",
    )
    if config.sparse:
        yield (
            "selection",
            f"{config.index_topk:,} keys by {config.index_heads} heads of {config.index_dim}",
        )
    yield (
        "experts",
        f"{config.active_experts} of {config.experts} and {config.shared_experts} shared, "
        f"latent {config.latent:,}, width {config.expert_ffn:,}",
    )


def _vision_text(vision: Any) -> str:
    if vision is None:
        return "no tower that is read: it takes text only"
    return (
        f"{vision.blocks} blocks, {vision.heads} heads of {vision.head_dim}, width "
        f"{vision.width:,}, patches of {vision.patch}, table {vision.table_rows} x "
        f"{vision.table_columns}"
    )


def _groups(checkpoint: Any, config: Any) -> Iterator[tuple[str, ...]]:
    """A row for all tensors alike in role, shape, dtype: part, name, count, shape, dtype, bytes."""
    counts: Counter[tuple] = Counter()
    nbytes: Counter[tuple] = Counter()
    rows: Counter[str] = Counter()  # of each part
    for name, tensor in checkpoint.tensors.items():
        below = name.removeprefix(checkpoint.root)
        part = _part(below, config)
        group = (part, _role(below), _shape_text(tensor.shape), tensor.dtype)
        if group not in counts:
            rows[part] += 1
            if rows[part] > _MOST_ROWS:
                group = (part, "… others", "", "")
        counts[group] += 1
        nbytes[group] += tensor.nbytes
    parts = [part for part, _ in _PARTS]
    last = ""
    for group in sorted(counts, key=lambda group: (parts.index(group[0]), group[1:])):
        part, role, shape, dtype = group
        title = "" if part == last else part
        last = part
        size = bytes_text(nbytes[group])
        yield title, role.removeprefix("model."), f"{counts[group]:,}", shape, dtype, size
    yield "all", "", f"{counts.total():,}", "", "", bytes_text(nbytes.total())


def _role(name: str) -> str:
    """The name of a tensor without the numbers of its layer and expert."""
    return label(re.sub(r"(?<=\.)\d+(?=\.)", "*", name))


def _part(name: str, config: Any) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and config.is_mla(int(layer[1])):
        name = name.replace(".self_attn.indexer.", ".indexer.").replace(".self_attn.", ".MLA.")
    return next(part for part, pattern in _PARTS if re.search(pattern, name))


def _shape_text(shape: Sequence[int]) -> str:
    return shortened(" x ".join(map(str, shape)), 100) or "scalar"
