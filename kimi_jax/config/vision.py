"""The sizes and switches of the vision tower and its projector: `vision_config` of a released file.

As with the decoder's keys, none is skipped because it is unknown: a key fills a field, has one
settled value that this code computes, or stands in a list of keys that change no result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, shown
from . import hf
from .config import Config
from .keys import ID, POSITIVE, SIZE, Field, Fixed, Rule, is_positive, keys_of
from .section import Section

MERGE = 2  # patches of a frame along each side that become one row of the decoder
TABLE = "vision_config"
NORM_EPS = 2.0**-23  # of the tower's norms: torch's default for bfloat16 and float32 since 2.7

_FIELDS = (
    Field("patch", ("patch_size",), SIZE),
    Field("width", ("vt_hidden_size",), SIZE),
    Field("blocks", ("vt_num_hidden_layers",), replace(SIZE, most=10_000)),
    Field("heads", ("vt_num_attention_heads",), SIZE),
    Field("qkv_width", ("qkv_hidden_size",), SIZE),
    Field("ffn", ("vt_intermediate_size",), SIZE),
    Field("table_rows", ("init_pos_emb_height",), SIZE),
    Field("table_columns", ("init_pos_emb_width",), SIZE),
    Field("most_frames", ("init_pos_emb_time",), SIZE),
    Field("projector_eps", ("projector_ln_eps",), POSITIVE),
    Field("hidden", ("text_hidden_size",), SIZE),
)
_MERGED_WIDTH = Field("merged_width", ("mm_hidden_size",), SIZE)
_PLACEHOLDER = Field("placeholder", ("media_placeholder_token_id",), ID)
_SETTLED = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [MERGE, MERGE],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_FIXED = {key: Fixed(value, required=True) for key, value in _SETTLED.items()} | {
    "model_type": Fixed("moonvit3d"),
    "video_attn_type": Fixed("spatial_temporal"),
    "use_rot_proj": Fixed(False),  # rotated weights of re-quantised releases
}
_IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset attn_implementation architectures auto_map
    dtype torch_dtype transformers_version _name_or_path name_or_path initializer_range use_cache
    """.split()
)
_RULES = (
    Rule(
        ("qkv_width", "heads"),
        lambda width, heads: width % heads == 0 and width // heads % 4 == 0,
        "vision_config.qkv_hidden_size: {} does not give vt_num_attention_heads={} heads of a "
        "width that divides by 4",
    ),
    Rule(
        ("width",),
        lambda width: width % 2 == 0,
        "vision_config.vt_hidden_size: {} is odd, and half of it are sines of the time table",
    ),
    Rule(
        ("merged_width", "width"),
        lambda merged, width: merged == width,
        "vision_config.mm_hidden_size: {} is not vt_hidden_size={}",
    ),
    Rule(
        ("hidden", "text"),
        lambda hidden, text: hidden == text,
        "vision_config.text_hidden_size: {} is not hidden_size={} of the decoder",
    ),
    Rule(
        ("placeholder", "vocab"),
        lambda placeholder, vocab: placeholder < vocab,
        "media_placeholder_token_id: {} is outside vocab_size={}",
    ),
)


@dataclass(frozen=True)
class VisionConfig:
    """One vision tower and projector."""

    patch: int  # p, pixels along each side of a patch
    width: int  # C, the width of the residual stream
    blocks: int
    heads: int  # H
    qkv_width: int  # of queries, of keys and of values, all heads together; not C
    ffn: int  # F
    table_rows: int  # of the learned position table
    table_columns: int
    most_frames: int  # of one entry
    projector_eps: float  # of the projector's norm alone
    hidden: int  # D, the width of the decoder
    placeholder: int  # the id that stands in a prompt for each row of an image
    norm_eps: float = NORM_EPS  # of the tower's norms; no file says it

    @property
    def head_dim(self) -> int:
        """K, the width of a head."""
        return self.qkv_width // self.heads

    @property
    def merged_width(self) -> int:
        """The width of the patches that become one row, side by side."""
        return MERGE * MERGE * self.width

    def with_eps(self, norm_eps: Any) -> VisionConfig:
        """The same with another epsilon of the tower's norms. Raises `ConfigError`."""
        if not is_positive(norm_eps):
            raise ConfigError(f"vision_norm_eps must be {POSITIVE.expects}, got {shown(norm_eps)}")
        return replace(self, norm_eps=float(norm_eps))

    @classmethod
    def from_hf(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], config: Config
    ) -> VisionConfig:
        """The vision part of a released model: a parsed file, a `config.json`, or a folder that
        holds one; `config` is its decoder. Raises one `ConfigError` with every problem found.
        """
        problems: list[str] = []
        top = Section(hf.load(source, problems)[0], problems)
        problems += top.form_problems()
        values = {} if problems else _values(top, config)
        if problems:
            raise ConfigError(*problems)
        return cls(**values)

    @classmethod
    def k3(cls) -> VisionConfig:
        """The tower of Kimi K3 as released: 447 M parameters with its projector."""
        return cls(
            patch=14, width=1024, blocks=27, heads=12, qkv_width=1536, ffn=4096, table_rows=64,
            table_columns=64, most_frames=4, projector_eps=1e-5, hidden=7168, placeholder=163605,
        )  # fmt: skip

    def to_hf(self) -> dict[str, Any]:
        """The keys of the top level that `from_hf` reads back as an equal config."""
        table = {field.keys[0]: getattr(self, field.name) for field in _FIELDS}
        table |= {key: rule.value for key, rule in _FIXED.items() if key != "use_rot_proj"}
        table["mm_hidden_size"] = self.width
        return {TABLE: table, _PLACEHOLDER.keys[0]: self.placeholder}


def has_table(source: str | os.PathLike[str] | Mapping[str, Any]) -> bool:
    """Whether a released file has a `vision_config`."""
    return hf.load(source, [])[0].get(TABLE) is not None


def _values(top: Section, config: Config) -> dict[str, Any]:
    """Every field of `VisionConfig`; a field with a problem is None or missing."""
    table = top.table(TABLE)
    if table is None:
        return {}
    values = table.read_all((*_FIELDS, _MERGED_WIDTH))
    values["placeholder"] = top.read(_PLACEHOLDER)
    table.check_fixed(_FIXED)
    table.check_unknown(keys_of(*_FIELDS, _MERGED_WIDTH) | _FIXED.keys() | _IRRELEVANT)
    known = {**values, "text": config.hidden, "vocab": config.vocab}
    top.problems += hf.broken_rules(_RULES, known)
    del values["merged_width"]
    return values
