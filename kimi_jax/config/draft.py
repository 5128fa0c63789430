"""The config of a DSpark draft: a small decoder that proposes a block of tokens from hidden states
of the model. Two released forms: latent attention (`k3_dspark`) and grouped-query attention
(`qwen3` with a `dflash_config`).

As with the decoder's keys, none is skipped because it is unknown: a key fills a field, has one
settled value that this code computes, or stands in a list of keys that change no result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, shown
from . import hf, keys
from .config import Config
from .keys import COUNT, FLAG, LAYER_COUNT, POSITIVE, SIZE, Field, Fixed, Kind, Rule, keys_of
from .rope import Rope, read_rope
from .section import Section

BLOCK = 7  # drafts of a round where the file does not say: how the released drafts are served
_NESTED = "dflash_config"
_STREAMS = {"prefix": "sum", "attn_res": "mixture"}  # as released -> as `Tapped` names them
_FORMS = {"k3_dspark": "mla", "qwen3": "gqa"}
_ARCHITECTURES = {"K3DSparkModel": "mla", "DSparkDraftModel": "gqa"}

_STREAM = Kind("'prefix' or 'attn_res'", lambda v: isinstance(v, str) and v in _STREAMS, str)
_FORM = Kind("'k3_dspark' or 'qwen3'", lambda v: isinstance(v, str) and v in _FORMS, _FORMS.get)
_MODE = Kind("'mla' or 'gqa'", lambda v: isinstance(v, str) and v in _FORMS.values())
_TYPES = Kind(
    "a list of 'full_attention'",
    lambda v: isinstance(v, list | tuple) and all(kind == "full_attention" for kind in v),
)

_COMMON = (
    Field("hidden", ("hidden_size",), SIZE),
    Field("ffn", ("intermediate_size",), SIZE),
    Field("layers", ("num_hidden_layers",), LAYER_COUNT),
    Field("heads", ("num_attention_heads",), SIZE),
    Field("kv_heads", ("num_key_value_heads",), SIZE),
    Field("vocab", ("vocab_size",), SIZE),
    Field("norm_eps", ("rms_norm_eps",), POSITIVE),
    Field("max_positions", ("max_position_embeddings",), SIZE),
)
_BY_FORM = {
    "mla": (
        Field("q_rank", ("q_lora_rank",), SIZE),
        Field("kv_rank", ("kv_lora_rank",), SIZE),
        Field("nope_dim", ("qk_nope_head_dim",), SIZE),
        Field("rope_dim", ("qk_rope_head_dim",), SIZE),
        Field("value_dim", ("v_head_dim",), SIZE),
    ),
    "gqa": (Field("rope_dim", ("head_dim",), SIZE),),
}
_EITHER = (  # at the top level or in dflash_config; where both have one they must agree
    Field("layers_tapped", ("target_layer_ids",), keys.LAYERS),
    Field("block", ("block_size",), SIZE, default=BLOCK),
    Field("markov_rank", ("markov_rank",), SIZE),
    Field("confidence", ("enable_confidence_head",), FLAG, default=False),
    Field("fc_norm", ("fc_norm",), FLAG, default=False),
    Field("stream", ("aux_hidden_stream",), _STREAM, default=None),
    Field("causal", ("is_causal", "causal", "full_attention_causal"), FLAG, default=False),
    Field("target_hidden", ("target_hidden_size",), SIZE, default=None),
    Field("target_layers", ("target_num_hidden_layers",), SIZE, default=None),
    Field("counted_layers", ("num_target_layers",), SIZE, default=None),
    Field("draft_vocab", ("draft_vocab_size",), SIZE, default=None),
)
_MASKS = (
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)  # first one counts
_FIXED = {
    "mla_use_nope": Fixed(False),
    "mla_use_output_gate": Fixed(False),
    "mla_use_qk_norm": Fixed(False),
    "dspark_bonus_anchor": Fixed(False),
    "sample_from_anchor": Fixed(True),
    "hidden_act": Fixed("silu"),
    "markov_head_type": Fixed("vanilla"),
    "confidence_head_with_markov": Fixed(True),
    "attention_bias": Fixed(False),
    "attention_dropout": Fixed(0),
    "use_sliding_window": Fixed(False),
    "sliding_window": Fixed(None),
    "is_encoder_decoder": Fixed(False),
    "add_cross_attention": Fixed(False),
}
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
# The embedding and the head are the model's, and so are its special tokens.
_IRRELEVANT = keys.IRRELEVANT - _ROPE_KEYS - {"head_dim", "partial_rotary_factor"} | {
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_window_layers",
}
_RULES = (
    Rule(
        ("heads", "kv_heads"),
        lambda heads, kv: heads % kv == 0,
        "num_attention_heads={} does not divide by num_key_value_heads={}",
    ),
    Rule(("rope_dim",), lambda dim: dim % 2 == 0, "the rotated part of a head, {}, is odd"),
    Rule(
        ("vocab", "draft_vocab"),
        lambda vocab, draft: vocab == draft,
        "draft_vocab_size: not vocab_size={}, but {}",
    ),
    Rule(
        ("mask", "vocab"),
        lambda mask, vocab: mask < vocab,
        "mask_token_id={} is over vocab_size={}",
    ),
    Rule(
        ("layers_tapped",),
        lambda ids: bool(ids) and list(ids) == sorted(set(ids)),
        "target_layer_ids: {} are not ascending layers",
    ),
)


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of one draft."""

    form: str  # "mla": a latent row a token; "gqa": keys and values of a few heads
    hidden: int  # D
    ffn: int  # F
    layers: int
    heads: int
    kv_heads: int
    q_rank: int  # Q; this and the next of "mla", else 0
    kv_rank: int  # C
    nope_dim: int
    rope_dim: int  # of "gqa" the width of a head
    value_dim: int
    vocab: int  # Z
    norm_eps: float
    max_positions: int
    rope: Rope
    layers_tapped: tuple[int, ...]  # of the model: after which the draft reads its hidden states
    stream: str  # "sum" or "mixture"
    mask: int  # the id that stands for a token to be drafted
    block: int  # drafts of a round
    markov_rank: int
    confidence: bool  # whether it has a confidence head
    fc_norm: bool  # whether each tap has a norm of its own
    causal: bool  # whether a draft sees only those before it

    @property
    def cached_row(self) -> int:
        """Numbers that a token leaves in the cache of a layer, all heads together."""
        return self.latent_row if self.form == "mla" else 2 * self.kv_heads * self.rope_dim

    @property
    def latent_row(self) -> int:
        """R, the width of a cached latent row."""
        return self.kv_rank + self.rope_dim

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by: YaRN's factor stands in it for latent attention, and in
        sines and cosines for the other form.
        """
        return (self.nope_dim + self.rope_dim) ** -0.5 * self.rope.score_factor

    @classmethod
    def from_hf(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], target: Config | None = None
    ) -> DraftConfig:
        """A released draft: a parsed file, a `config.json`, or a folder that holds one. `target`:
        the model it drafts for, which it must fit. Raises one `ConfigError` with every problem.
        """
        problems: list[str] = []
        top = Section(hf.load(source, problems)[0], problems)
        problems += top.form_problems()
        values = {} if problems else _values(top, target)
        if problems:
            raise ConfigError(*problems)
        return cls(**values)


def _values(top: Section, target: Config | None) -> dict[str, Any]:
    """Every field; a field with a problem is None or missing."""
    nested = top.table(_NESTED, required=False) or Section({}, top.problems, f"{_NESTED}.")
    form = _read_form(top, nested)
    values = {field.name: 0 for field in _BY_FORM["mla"]} | top.read_all(_COMMON)
    values |= top.read_all(_BY_FORM[form]) | _read_either(top, nested)
    values |= {"form": form, "mask": _read_mask(top, nested)}
    values["rope"] = read_rope(top, form, values["rope_dim"])
    top.problems += hf.broken_rules(_RULES, values)
    _check_target(top, values, target)
    if form == "mla" and values["kv_heads"] not in (None, values["heads"]):
        top.note("num_key_value_heads", f"{values['kv_heads']} is not num_attention_heads")
    default = "prefix" if form == "mla" else "attn_res"
    values["stream"] = _STREAMS[str(values["stream"] or default)]
    _check_keys(top, nested, form)
    helpers = ("target_hidden", "target_layers", "counted_layers", "draft_vocab")
    return {name: value for name, value in values.items() if name not in helpers}


def _read_form(top: Section, nested: Section) -> str:
    """Which form the file has, by its type, its architecture and its attention mode, all of which
    must agree; where it names none, by its latent sizes.
    """
    named = top.values.get("architectures") or ()
    named = [named] if isinstance(named, str) else named
    found = {_ARCHITECTURES[x] for x in named if isinstance(x, str) and x in _ARCHITECTURES}
    if named and not found:
        top.note("architectures", f"{shown(named)} is none of {', '.join(_ARCHITECTURES)}")
    found |= {
        top.read(Field("form", ("model_type",), _FORM, default=None)),
        nested.read(Field("mode", ("attention_mode",), _MODE, default=None)),
    } - {None}
    if len(found) > 1:
        top.note("model_type", "contradicts architectures or dflash_config.attention_mode")
    if not found:
        return "mla" if "kv_lora_rank" in top.values else "gqa"
    return sorted(found)[0]


def _read_either(top: Section, nested: Section) -> dict[str, Any]:
    """Fields that stand at either level."""
    both = dict(top.values)
    for key in keys_of(*_EITHER):
        inner, outer = nested.values.get(key), top.values.get(key)
        if inner is not None and outer is not None and inner != outer:
            nested.note(key, f"{shown(inner)}, the top level has {shown(outer)}")
        both[key] = outer if inner is None else inner
    return Section(both, top.problems, top.path).read_all(_EITHER)


def _read_mask(top: Section, nested: Section) -> int | None:
    """The id that stands for a token to be drafted: the first of several names that is given."""
    for section, key in ((nested, _MASKS[0]), *((top, key) for key in _MASKS)):
        if section.values.get(key) is not None:
            return section.read(Field("mask", (key,), COUNT))
    top.note(_MASKS[0], "missing, a token id is required")
    return None


def _check_target(top: Section, values: Mapping[str, Any], target: Config | None) -> None:
    """That the file says the same of the model as the model does."""
    taps = values["layers_tapped"]
    depth = values["target_layers"] or (target.layers if target else None)
    counted = values["counted_layers"]  # of taps in one form, of the model's layers in the other
    if None not in (counted, taps, depth) and counted not in (len(taps or ()), depth):
        top.note("num_target_layers", f"{counted} is neither the number of taps nor of layers")
    if target is None:
        return
    for key, name, held in (
        ("hidden_size", "hidden", target.hidden),
        ("target_hidden_size", "target_hidden", target.hidden),
        ("target_num_hidden_layers", "target_layers", target.layers),
        ("vocab_size", "vocab", target.vocab),
    ):
        if values[name] not in (None, held):
            top.note(key, f"{values[name]}, the model has {held}")
    outside = [layer for layer in taps or () if layer > target.layers - 2]
    if outside:
        top.note("target_layer_ids", f"{outside} are not layers before the model's last one")


def _check_keys(top: Section, nested: Section, form: str) -> None:
    """Keys whose value is settled, and keys that nothing here knows."""
    either = keys_of(*_EITHER) | set(_MASKS) | _FIXED.keys()
    for section in (top, nested):
        section.check_fixed(_FIXED)
        section.read(Field("types", ("layer_types",), _TYPES, default=None))
    known = either | keys_of(*_COMMON, *_BY_FORM[form]) | _IRRELEVANT | _ROPE_KEYS
    top.check_unknown(known | {_NESTED, "layer_types"})
    nested.check_unknown(either | {"attention_mode", "layer_types"})
