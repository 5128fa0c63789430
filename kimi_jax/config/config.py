"""The sizes and switches of one model, read from the `config.json` of a released checkpoint.

`Config.from_hf` is the only place that knows the names a released file uses. It never fills in a
size that the file lacks, and it honours or refuses every key that changes a result: what it
ignores stands in `_IRRELEVANT`, `_VISION` and `_SERVING`. All problems of a file are raised
together, in one `ConfigError`.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_LISTED = 40  # layers a problem names


@dataclass(frozen=True)
class Config:
    """One model. Layer numbers are 0-based here and 1-based in released files."""

    hidden: int  # D  hidden_size
    layers: int  # num_hidden_layers
    vocab: int  # Z  vocab_size
    mla_layers: tuple[int, ...]  # linear_attn_config.full_attn_layers less one, sorted; others: KDA
    residual_block: int  # attn_res_block_size: layers between two pushes to the bank
    norm_eps: float  # rms_norm_eps
    max_positions: int  # max_position_embeddings
    tie_embeddings: bool  # tie_word_embeddings: the head is the embedding

    kda_heads: int  # linear_attn_config.num_heads
    kda_key_dim: int  # K  linear_attn_config.head_dim
    kda_value_dim: int  # V  linear_attn_config.head_v_dim, where absent head_dim
    conv_width: int  # W  linear_attn_config.short_conv_kernel_size
    decay_lower_bound: (
        float | None
    )  # linear_attn_config.gate_lower_bound; None is the softplus gate
    full_rank_gate: bool  # linear_attn_config.use_full_rank_gate

    heads: int  # H  num_attention_heads
    q_rank: int  # Q  q_lora_rank
    kv_rank: int  # kv_lora_rank
    nope_dim: int  # qk_nope_head_dim
    rope_dim: int  # qk_rope_head_dim: exists, and is not rotated
    value_dim: int  # v_head_dim
    mla_output_gate: bool  # mla_use_output_gate
    mla_norm_eps: float  # mla_norm_eps; 1e-6 where absent, as in released files

    dense_ffn: int  # intermediate_size
    dense_layers: int  # first_k_dense_replace
    moe_layer_freq: int  # moe_layer_freq
    experts: int  # E  num_experts
    active_experts: int  # A  num_experts_per_token
    shared_experts: int  # num_shared_experts
    expert_ffn: int  # F  moe_intermediate_size
    latent: int  # L  routed_expert_hidden_size
    latent_norm: bool  # latent_moe_use_norm
    router: str  # moe_router_activation_func: "sigmoid" or "softmax"
    renormalize: bool  # moe_renormalize
    routed_scale: float  # routed_scaling_factor
    expert_groups: int  # num_expert_group, 1 unless use_grouped_topk
    groups_kept: int  # topk_group, 1 unless use_grouped_topk

    situ_beta: float  # activation_situ_beta
    situ_linear_beta: float  # activation_situ_linear_beta

    index_heads: int  # J  dsa_config.index_n_heads; without one 0, as the next two
    index_dim: int  # I  dsa_config.index_head_dim
    index_topk: int  # U  dsa_config.index_topk
    quantized: (
        bool  # quantization_config: MXFP4 experts; a checkpoint shows which tensors are packed
    )

    bos: int | None  # bos_token_id
    eos: tuple[int, ...]  # eos_token_id, one or several
    pad: int | None  # pad_token_id

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
        """Reads a released config: a parsed one, a `config.json`, or a folder that holds it.

        The decoder's keys stand under `text_config` or at the top. Raises one `ConfigError` with
        every problem found.
        """
        file = source if isinstance(source, Mapping) else _load(Path(source))
        problems: list[str] = []
        values = _read(file, problems)
        if problems:
            raise ConfigError(*problems)
        return cls(**values)

    @classmethod
    def k3(cls) -> Config:
        """Kimi K3 as released: 2.78 T parameters, 104 B active."""
        return cls.from_hf(_K3)

    @classmethod
    def k3_1(cls) -> Config:
        """Kimi K3.1-Pro as released: K3 with sparse selection on its full-attention layers."""
        return cls.from_hf({**_K3, "dsa_config": _K3_1_DSA})

    def to_hf(self) -> dict[str, Any]:
        """The config in its released form, which `from_hf` reads back as an equal one."""
        text = {field.keys[0]: getattr(self, field.name) for field in (*_TEXT, *_GROUPS)}
        text |= {key: rule.value for key, rule in _FIXED.items() if rule.required}
        text |= {
            "num_key_value_heads": self.heads,
            "use_grouped_topk": True,
            "model_type": "kimi_linear",
        }
        text |= {
            "tie_word_embeddings": self.tie_embeddings,
            "linear_attn_config": _linear_to_hf(self),
        }
        text |= {
            "bos_token_id": self.bos,
            "eos_token_id": list(self.eos) or None,
            "pad_token_id": self.pad,
        }
        if self.sparse:
            text["dsa_config"] = {field.keys[0]: getattr(self, field.name) for field in _DSA}
            text["dsa_config"]["dsa_layers"] = [i + 1 for i in self.mla_layers]
        if self.quantized:
            text["quantization_config"] = _quantization_to_hf()
        return {
            "architectures": [_SPARSE_ARCHITECTURE if self.sparse else _ARCHITECTURE],
            "model_type": "kimi_k3",
            "tie_word_embeddings": self.tie_embeddings,
            "text_config": text,
        }


# What a released file says, and where. A field that the file must have has no default.


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words and as a test, and how large a number may be."""

    expects: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    most: int | None = None

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value."""
        if not self.accepts(value):
            return f"{value!r} is not {self.expects}"
        if self.most is not None and value > self.most:
            return f"{value!r} is more than {self.most}"
        return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and abs(value) < 1e300  # nor nan nor inf


def _is_ints(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_int, value))


def _as_ids(value: Any) -> tuple[int, ...]:
    return (value,) if _is_int(value) else tuple(value)


_SIZE = _Kind("a positive integer", lambda v: _is_int(v) and v > 0, most=2**31 - 1)
_COUNT = _Kind("an integer of 0 or more", lambda v: _is_int(v) and v >= 0, most=2**31 - 1)
# What is counted out one by one, in lists and tables of names, is kept to what ends in seconds.
_LAYER_COUNT = replace(_SIZE, most=10_000)
_EXPERT_COUNT = replace(_SIZE, most=2**16 - 1)  # the number of an expert travels in 16 bits
_MOST_EXPERTS = 1_000_000  # in all layers together
_POSITIVE = _Kind("a positive finite number", lambda v: _is_number(v) and v > 0, float)
_NEGATIVE = _Kind("a negative finite number", lambda v: _is_number(v) and v < 0, float)
_FLAG = _Kind("true or false", lambda v: isinstance(v, bool))
_ROUTER = _Kind("'sigmoid' or 'softmax'", lambda v: v in ("sigmoid", "softmax"))
_LAYERS = _Kind("a list of integers", _is_ints, tuple)
_TABLE = _Kind("a table", lambda v: isinstance(v, Mapping))
_ID = _Kind("a token id", lambda v: _is_int(v) and v >= 0)
_IDS = _Kind(
    "a token id or a list of them",
    lambda v: (_is_int(v) or _is_ints(v)) and min(_as_ids(v), default=0) >= 0,
    _as_ids,
)

_REQUIRED = object()


@dataclass(frozen=True)
class _Field:
    """A field of `Config` and the keys that may hold it, the released one first."""

    name: str
    keys: tuple[str, ...]
    kind: _Kind
    default: Any = _REQUIRED


_TEXT = (
    _Field("hidden", ("hidden_size",), _SIZE),
    _Field("layers", ("num_hidden_layers",), _LAYER_COUNT),
    _Field("vocab", ("vocab_size",), _SIZE),
    _Field("residual_block", ("attn_res_block_size",), _SIZE),
    _Field("norm_eps", ("rms_norm_eps",), _POSITIVE),
    _Field("max_positions", ("max_position_embeddings",), _SIZE),
    _Field("heads", ("num_attention_heads",), _SIZE),
    _Field("q_rank", ("q_lora_rank",), _SIZE),
    _Field("kv_rank", ("kv_lora_rank",), _SIZE),
    _Field("nope_dim", ("qk_nope_head_dim",), _SIZE),
    _Field("rope_dim", ("qk_rope_head_dim",), _SIZE),
    _Field("value_dim", ("v_head_dim",), _SIZE),
    _Field("mla_output_gate", ("mla_use_output_gate",), _FLAG),
    _Field("mla_norm_eps", ("mla_norm_eps", "mla_layernorm_eps"), _POSITIVE, default=1e-6),
    _Field("dense_ffn", ("intermediate_size",), _SIZE),
    _Field("dense_layers", ("first_k_dense_replace",), _COUNT),
    _Field("moe_layer_freq", ("moe_layer_freq",), _SIZE),
    _Field("experts", ("num_experts",), _EXPERT_COUNT),
    _Field("active_experts", ("num_experts_per_token",), _SIZE),
    _Field("shared_experts", ("num_shared_experts",), _SIZE),
    _Field("expert_ffn", ("moe_intermediate_size",), _SIZE),
    _Field("latent", ("routed_expert_hidden_size",), _SIZE),
    _Field("latent_norm", ("latent_moe_use_norm",), _FLAG),
    _Field("router", ("moe_router_activation_func",), _ROUTER),
    _Field("renormalize", ("moe_renormalize",), _FLAG),
    _Field("routed_scale", ("routed_scaling_factor",), _POSITIVE),
    _Field("situ_beta", ("activation_situ_beta",), _POSITIVE),
    _Field("situ_linear_beta", ("activation_situ_linear_beta",), _POSITIVE),
)
_GROUPS = (  # read only where use_grouped_topk is true
    _Field("expert_groups", ("num_expert_group",), _SIZE),
    _Field("groups_kept", ("topk_group",), _SIZE),
)
_LINEAR = (
    _Field("kda_heads", ("num_heads",), _SIZE),
    _Field("kda_key_dim", ("head_dim",), _SIZE),
    _Field("kda_value_dim", ("head_v_dim",), _SIZE, default=None),
    _Field("conv_width", ("short_conv_kernel_size",), _SIZE),
    _Field("decay_lower_bound", ("gate_lower_bound",), _NEGATIVE, default=None),
    _Field("full_rank_gate", ("use_full_rank_gate",), _FLAG),
)
_KDA_LAYERS = _Field("kda_layers", ("kda_layers",), _LAYERS)
_FULL_LAYERS = _Field("full_attn_layers", ("full_attn_layers",), _LAYERS)
_DSA = (
    _Field("index_heads", ("index_n_heads", "n_heads", "num_heads", "index_num_heads"), _SIZE),
    _Field("index_dim", ("index_head_dim", "head_dim"), _SIZE),
    _Field("index_topk", ("index_topk", "topk", "top_k"), _SIZE),
)
_TOKENS = (
    _Field("bos", ("bos_token_id",), _ID, default=None),
    _Field("eos", ("eos_token_id",), _IDS, default=()),
    _Field("pad", ("pad_token_id",), _ID, default=None),
)
_TIE = _Field("tie_embeddings", ("tie_word_embeddings",), _FLAG, default=False)
_GROUPED = _Field("use_grouped_topk", ("use_grouped_topk",), _FLAG)


@dataclass(frozen=True)
class _Fixed:
    """The only value of a key that this code computes. Unless required, it may be absent."""

    value: Any
    required: bool = False


_FIXED = {
    "hidden_act": _Fixed("situ", required=True),
    "mla_use_nope": _Fixed(True, required=True),
    "topk_method": _Fixed("noaux_tc"),
    "attention_bias": _Fixed(False),
    "attention_dropout": _Fixed(0),
    "num_nextn_predict_layers": _Fixed(0),
    "sliding_window": _Fixed(None),
    "is_encoder_decoder": _Fixed(False),
    "add_cross_attention": _Fixed(False),
}
_QUANTIZATION = {
    "quant_method": _Fixed("compressed-tensors", required=True),
    "format": _Fixed("mxfp4-pack-quantized"),  # required here or in each group
    "kv_cache_scheme": _Fixed(None),
    "sparsity_config": _Fixed({}),
    "transform_config": _Fixed({}),
}
_QUANTIZATION_GROUP = {
    "format": _Fixed("mxfp4-pack-quantized"),
    "input_activations": _Fixed(None),
    "output_activations": _Fixed(None),
}
_QUANTIZATION_WEIGHTS = {
    "num_bits": _Fixed(4, required=True),
    "type": _Fixed("float", required=True),
    "group_size": _Fixed(32, required=True),
    "strategy": _Fixed("group"),
    "symmetric": _Fixed(True),
    "dynamic": _Fixed(False),
    "scale_dtype": _Fixed("torch.uint8"),
    "actorder": _Fixed(None),
    "block_structure": _Fixed(None),
}

_ARCHITECTURE = "KimiK3ForConditionalGeneration"
_SPARSE_ARCHITECTURE = "KimiK31ForConditionalGeneration"

# Keys that change nothing this code computes: bookkeeping, training, sampling defaults, and
# rotation (no position is ever rotated). Any other unknown key is refused.
_IRRELEVANT = frozenset(
    """
    model_type architectures auto_map transformers_version dtype torch_dtype use_bfloat16
    _name_or_path name_or_path _attn_implementation _attn_implementation_autoset
    attn_implementation tokenizer_class prefix task_specific_params finetuning_task problem_type
    id2label label2id num_labels return_dict torchscript tf_legacy_loss is_decoder
    tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward pruned_heads
    output_hidden_states output_attentions output_router_logits use_cache cache_implementation
    initializer_range pretraining_tp ep_size aux_loss_alpha seq_aux router_aux_loss_coef
    ignore_index unk_token_id sep_token_id decoder_start_token_id head_dim rope_theta rope_scaling
    rope_parameters partial_rotary_factor max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens generation_config
    """.split()
)
# Of the top level of a released file: the model that sees, and how others serve it.
_VISION = ("vision_", "media_", "image_", "video_")
_SERVING = frozenset("use_unified_vision_chunk encoder_only language_only".split())
_IRRELEVANT_QUANTIZATION = (
    frozenset("config_groups quantization_status global_compression_ratio ignore version".split()),
    frozenset("weights targets".split()),  # in a group
    frozenset("observer observer_kwargs zp_dtype".split()),  # in a group's weights
)


@dataclass(frozen=True)
class _Rule:
    """What must hold between fields; checked once all of `needs` have been read."""

    needs: tuple[str, ...]
    holds: Callable[..., bool]
    says: str


_RULES = (
    _Rule(
        ("dense_layers", "layers"),
        lambda d, n: d <= n,
        "first_k_dense_replace={} exceeds num_hidden_layers={}",
    ),
    _Rule(
        ("experts", "layers"),
        lambda e, n: e * n <= _MOST_EXPERTS,
        f"num_experts={{}} in num_hidden_layers={{}} layers are more than {_MOST_EXPERTS} in all",
    ),
    _Rule(
        ("active_experts", "experts"),
        lambda a, e: a <= e,
        "num_experts_per_token={} is more than num_experts={}",
    ),
    _Rule(
        ("experts", "expert_groups"),
        lambda e, g: e % g == 0,
        "num_experts={} does not divide into num_expert_group={} equal groups",
    ),
    _Rule(
        ("groups_kept", "expert_groups"),
        lambda k, g: k <= g,
        "topk_group={} exceeds num_expert_group={}",
    ),
    _Rule(
        ("active_experts", "groups_kept", "experts", "expert_groups"),
        lambda a, k, e, g: a > e or a <= k * (e // g),
        "num_experts_per_token={} is more than topk_group={} groups hold, with num_experts={} and "
        "num_expert_group={}",
    ),
    _Rule(
        ("experts", "expert_groups", "router"),
        lambda e, g, r: r != "sigmoid" or g == 1 or e // g >= 2,
        "num_experts={} in num_expert_group={} groups leaves a group under 2 experts, and a {} "
        "router scores a group by its two best",
    ),
    _Rule(
        ("latent", "quantized"),
        lambda size, packed: size % 32 == 0 or not packed,
        "routed_expert_hidden_size={} is not a multiple of 32, the MXFP4 group_size",
    ),
    _Rule(
        ("expert_ffn", "quantized"),
        lambda size, packed: size % 32 == 0 or not packed,
        "moe_intermediate_size={} is not a multiple of 32, the MXFP4 group_size",
    ),
    _Rule(("bos", "vocab"), lambda i, z: i < z, "bos_token_id={} is outside vocab_size={}"),
    _Rule(
        ("eos", "vocab"),
        lambda ids, z: max(ids, default=0) < z,
        "eos_token_id={} is outside vocab_size={}",
    ),
    _Rule(("pad", "vocab"), lambda i, z: i < z, "pad_token_id={} is outside vocab_size={}"),
)


class _Section:
    """One table of the file: hands out values, notes what is wrong. Null counts as absent."""

    def __init__(self, values: Mapping[str, Any], problems: list[str], path: str = "") -> None:
        self.values = values
        self.problems = problems
        self.path = path

    def note(self, key: str, problem: str) -> None:
        self.problems.append(f"{self.path}{key}: {problem}")

    def read(self, field: _Field) -> Any:
        """The field's value; None where something is wrong with it."""
        given = {key: self.values[key] for key in field.keys if self.values.get(key) is not None}
        if not given:
            if field.default is _REQUIRED:
                self.note(field.keys[0], f"missing, {field.kind.expects} is required")
                return None
            return field.default
        faults = {key: fault for key in given if (fault := field.kind.fault(given[key]))}
        for key, fault in faults.items():
            self.note(key, fault)
        if faults:
            return None
        values = list(given.values())
        if any(value != values[0] for value in values):
            self.note(field.keys[0], f"spelled in ways that disagree, {given}")
            return None
        return field.kind.convert(values[0])

    def read_all(self, fields: Iterable[_Field]) -> dict[str, Any]:
        return {field.name: self.read(field) for field in fields}

    def table(self, key: str, required: bool = True) -> _Section | None:
        """The table under a key; None where it is absent or is none."""
        values = self.read(_Field(key, (key,), _TABLE, _REQUIRED if required else None))
        return None if values is None else _Section(values, self.problems, f"{self.path}{key}.")

    def check_fixed(self, fixed: Mapping[str, _Fixed]) -> None:
        for key, rule in fixed.items():
            value = self.values.get(key)
            if value is None and rule.required:
                self.note(key, f"missing, {rule.value!r} is required")
            elif value is not None and not _same(value, rule.value):
                self.note(key, f"{value!r} is not supported, only {rule.value!r}")

    def check_unknown(self, known: Iterable[str], where: str = "") -> None:
        for key in sorted(self.values.keys() - set(known)):
            value = self.values[key]
            self.note(key, f"unknown{where}, and may change the result (value {value!r})")


def _same(value: Any, wanted: Any) -> bool:
    """Equality that tells true from 1 and false from 0."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def _keys(*fields: _Field) -> set[str]:
    return {key for field in fields for key in field.keys}


_DECODER = frozenset(
    _FIXED.keys()
    | _keys(*_TEXT, *_GROUPS, *_TOKENS, _TIE, _GROUPED)
    | {"num_key_value_heads", "linear_attn_config", "dsa_config", "quantization_config"}
)


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ConfigError(f"{file}: not a JSON file ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: holds {type(values).__name__}, not a table")
    return values


def _read(file: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Every field of `Config`; one with a problem is None or missing."""
    top = _Section(file, problems)
    text = top.table("text_config") if "text_config" in file else top
    if text is None:
        return {}
    text.path = ""  # a key is named the same in both forms
    values = text.read_all(_TEXT) | _read_groups(text)
    values |= {field.name: _holder(text, top, field.keys[0]).read(field) for field in _TOKENS}
    values["tie_embeddings"] = _agreeing_holder(text, top, _TIE.keys[0]).read(_TIE)
    values |= _read_linear(text, values["layers"])
    values |= _read_dsa(text, top, values.get("mla_layers"))
    values["quantized"] = _read_quantization(text, top)
    _check_text(text, nested=text is not top)
    if text is not top:
        _check_top(top, text)
    for rule in _RULES:
        needed = [values.get(name) for name in rule.needs]
        if None not in needed and not rule.holds(*needed):
            problems.append(rule.says.format(*needed))
    return values


def _holder(text: _Section, top: _Section, key: str) -> _Section:
    """The level that holds the key: the decoder's, or else the top one."""
    return text if text.values.get(key) is not None else top


def _agreeing_holder(text: _Section, top: _Section, key: str) -> _Section:
    """The level that holds the key; where both do, they must hold the same."""
    inner, outer = text.values.get(key), top.values.get(key)
    if inner is not None and outer is not None and inner != outer:
        top.note(key, f"text_config has {inner!r}, the top level has {outer!r}")
    return _holder(text, top, key)


def _read_groups(text: _Section) -> dict[str, Any]:
    if text.read(_GROUPED) is False:
        return {field.name: 1 for field in _GROUPS}
    return text.read_all(_GROUPS)


def _read_linear(text: _Section, layers: int | None) -> dict[str, Any]:
    linear = text.table("linear_attn_config")
    if linear is None:
        return {}
    values = linear.read_all(_LINEAR)
    values["kda_value_dim"] = values["kda_value_dim"] or values["kda_key_dim"]
    kda, full = linear.read(_KDA_LAYERS), linear.read(_FULL_LAYERS)
    if layers is not None and kda is not None and full is not None:
        _check_partition(linear, kda, full, layers)
        values["mla_layers"] = tuple(sorted(i - 1 for i in full))
    linear.check_unknown(_keys(*_LINEAR, _KDA_LAYERS, _FULL_LAYERS))
    return values


def _check_partition(
    linear: _Section, kda: tuple[int, ...], full: tuple[int, ...], layers: int
) -> None:
    """The two 1-indexed lists must name each of 1..layers exactly once."""
    for key, listed in (("kda_layers", kda), ("full_attn_layers", full)):
        outside = {i for i in listed if not 1 <= i <= layers}
        if outside:
            linear.note(key, f"layers {_some(outside)} are outside 1..{layers}")
        twice = {i for i, times in Counter(listed).items() if times > 1}
        if twice:
            linear.note(key, f"layers {_some(twice)} are listed more than once")
    both = set(kda) & set(full)
    if both:
        linear.note("kda_layers", f"layers {_some(both)} are in full_attn_layers too")
    neither = set(range(1, layers + 1)) - set(kda) - set(full)
    if neither:
        note = f"layers {_some(neither)} are neither here nor in full_attn_layers"
        linear.note("kda_layers", note)


def _some(layers: Collection[int]) -> str:
    """The layers in order, the first of them where they are many."""
    more = f" and {len(layers) - _LISTED} more" if len(layers) > _LISTED else ""
    return f"{sorted(layers)[:_LISTED]}{more}"


def _read_dsa(text: _Section, top: _Section, mla: tuple[int, ...] | None) -> dict[str, Any]:
    """The sparse selection of K3.1; sizes of 0 where the file has none."""
    holder = _agreeing_holder(text, top, "dsa_config")
    dsa = holder.table("dsa_config", required=False)
    if dsa is None:
        named = _SPARSE_ARCHITECTURE in str(top.values.get("architectures"))
        if named and holder.values.get("dsa_config") is None:
            text.note("dsa_config", f"missing, architectures names {_SPARSE_ARCHITECTURE}")
        return {field.name: 0 for field in _DSA}
    values = dsa.read_all(_DSA)
    # The name of the layer list is not settled; what it must hold is.
    unread = dsa.values.keys() - _keys(*_DSA)
    lists = {key for key in unread if "rope" not in key and _is_ints(dsa.values[key])}
    full = None if mla is None else [i + 1 for i in mla]
    for key in sorted(lists):
        if full is not None and sorted(dsa.values[key]) != full:
            dsa.note(key, f"{list(dsa.values[key])} is not full_attn_layers, {full}")
    dsa.check_unknown(_keys(*_DSA) | lists)
    return values


def _read_quantization(text: _Section, top: _Section) -> bool:
    """Whether the file declares packed experts. Only the released MXFP4 scheme passes."""
    holder = _agreeing_holder(text, top, "quantization_config")
    scheme = holder.table("quantization_config", required=False)
    if scheme is None:
        return False
    scheme.check_fixed(_QUANTIZATION)
    scheme.check_unknown(_QUANTIZATION.keys() | _IRRELEVANT_QUANTIZATION[0])
    groups = scheme.table("config_groups")
    if groups is not None:
        if not groups.values:
            scheme.note("config_groups", "empty, at least one group is required")
        for name in groups.values:
            _check_quantization_group(groups.table(name), scheme.values.get("format"))
    return True


def _check_quantization_group(group: _Section | None, outer_format: str | None) -> None:
    if group is None:
        return
    group.check_fixed(_QUANTIZATION_GROUP)
    group.check_unknown(_QUANTIZATION_GROUP.keys() | _IRRELEVANT_QUANTIZATION[1])
    if outer_format is None and group.values.get("format") is None:
        group.note("format", f"missing, {_QUANTIZATION['format'].value!r} is required")
    weights = group.table("weights")
    if weights is not None:
        weights.check_fixed(_QUANTIZATION_WEIGHTS)
        weights.check_unknown(_QUANTIZATION_WEIGHTS.keys() | _IRRELEVANT_QUANTIZATION[2])


def _check_text(text: _Section, nested: bool) -> None:
    """Keys whose value is settled, and keys that nothing here knows."""
    text.check_fixed(_FIXED)
    kv_heads, heads = (text.values.get(f"num_{kind}_heads") for kind in ("key_value", "attention"))
    if kv_heads is not None and heads is not None and kv_heads != heads:
        text.note("num_key_value_heads", f"{kv_heads!r} is not num_attention_heads, {heads!r}")
    text.check_unknown(_DECODER | _IRRELEVANT | (set() if nested else _beside_decoder(text)))


def _check_top(top: _Section, text: _Section) -> None:
    """Beside a text_config a key of the decoder is not read, so it may only repeat what holds."""
    repeated = {
        key
        for key in _DECODER & top.values.keys()
        if any(_same(top.values[key], held) for held in (None, text.values.get(key)))
        or (key in _FIXED and _same(top.values[key], _FIXED[key].value))
    }
    read = _keys(*_TOKENS, _TIE) | {"text_config", "dsa_config", "quantization_config"}
    known = read | repeated | _IRRELEVANT | _beside_decoder(top)
    top.check_unknown(known, where=" beside text_config")


def _beside_decoder(top: _Section) -> set[str]:
    """The keys of the top level that are no matter of the decoder."""
    return {key for key in top.values if key.startswith(_VISION)} | _SERVING


def _linear_to_hf(config: Config) -> dict[str, Any]:
    linear = {field.keys[0]: getattr(config, field.name) for field in _LINEAR}
    if config.kda_value_dim == config.kda_key_dim:
        del linear["head_v_dim"]  # released files have one head_dim for both
    linear["kda_layers"] = [i + 1 for i in config.kda_layers]
    linear["full_attn_layers"] = [i + 1 for i in config.mla_layers]
    return linear


def _quantization_to_hf() -> dict[str, Any]:
    packing = _QUANTIZATION["format"].value
    weights = {key: rule.value for key, rule in _QUANTIZATION_WEIGHTS.items()}
    return {
        "quant_method": _QUANTIZATION["quant_method"].value,
        "format": packing,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"format": packing, "targets": ["Linear"], "weights": weights}
        },
    }


# The released sizes, in the released form.

_K3_FULL_LAYERS = [*range(4, 93, 4), 93]
_K3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "vocab_size": 163840,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "attn_res_block_size": 12,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [i for i in range(1, 94) if i not in _K3_FULL_LAYERS],
        "full_attn_layers": _K3_FULL_LAYERS,
    },
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "quantization_config": _quantization_to_hf(),
}
_K3_1_DSA = {
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "dsa_layers": _K3_FULL_LAYERS,
}
