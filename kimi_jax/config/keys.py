"""What a released `config.json` may say: the keys, what their values must be, which field of
`Config` that each fills, and what must hold between fields.

Unusual here: no key is skipped because it is unknown. A key fills a field, or has one settled value
that this code computes, or stands in a list of keys that change no result; any other is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..numerics import is_number, is_whole

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True)
class Kind:
    """What a value must be, as text and as a test, how it is stored, and how large a number may
    be.
    """

    expects: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    most: int | None = None


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of whole numbers >= 0."""
    return isinstance(value, list | tuple) and all(is_whole(item, 0) for item in value)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive number that float32 holds."""
    return is_number(value) and float(_FLOAT32.tiny) <= value <= float(_FLOAT32.max)


def _is_negative(value: Any) -> bool:
    return is_number(value) and is_positive(-value)


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


def _ids(value: Any) -> tuple[int, ...]:
    return (int(value),) if is_whole(value, 0) else _integers(value)


SIZE = Kind("a positive integer", lambda v: is_whole(v, 1), int, most=2**31 - 1)
COUNT = Kind("an integer of 0 or more", lambda v: is_whole(v, 0), int, most=2**31 - 1)
# Layers and experts are counted one by one, in lists and tables of names: these limits keep that
# to seconds.
LAYER_COUNT = replace(SIZE, most=10_000)
EXPERT_COUNT = replace(SIZE, most=2**16 - 1)  # the number of an expert is sent in 16 bits
MOST_EXPERTS = 1_000_000  # in all layers together
POSITIVE = Kind("a positive number that float32 holds", is_positive, float)
NEGATIVE = Kind("a negative number that float32 holds", _is_negative, float)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
ROUTER = Kind("'sigmoid' or 'softmax'", lambda v: isinstance(v, str) and v in _ROUTERS)
LAYERS = Kind("a list of integers of 0 or more", is_numbers, _integers)
TABLE = Kind("a table", lambda v: isinstance(v, Mapping))
ID = Kind("a token id", lambda v: is_whole(v, 0), int)
IDS = Kind("a token id or a list of them", lambda v: is_whole(v, 0) or is_numbers(v), _ids)
_ROUTERS = ("sigmoid", "softmax")

REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """A field of `Config` and the keys that may hold it, the released one first. Without a default
    the file must have it.
    """

    name: str
    keys: tuple[str, ...]
    kind: Kind
    default: Any = REQUIRED


TEXT = (
    Field("hidden", ("hidden_size",), SIZE),
    Field("layers", ("num_hidden_layers",), LAYER_COUNT),
    Field("vocab", ("vocab_size",), SIZE),
    Field("residual_block", ("attn_res_block_size",), SIZE),
    Field("norm_eps", ("rms_norm_eps",), POSITIVE),
    Field("max_positions", ("max_position_embeddings",), SIZE),
    Field("heads", ("num_attention_heads",), SIZE),
    Field("q_rank", ("q_lora_rank",), SIZE),
    Field("kv_rank", ("kv_lora_rank",), SIZE),
    Field("nope_dim", ("qk_nope_head_dim",), SIZE),
    Field("rope_dim", ("qk_rope_head_dim",), SIZE),
    Field("value_dim", ("v_head_dim",), SIZE),
    Field("mla_output_gate", ("mla_use_output_gate",), FLAG),
    Field("mla_norm_eps", ("mla_norm_eps", "mla_layernorm_eps"), POSITIVE, default=1e-6),
    Field("dense_ffn", ("intermediate_size",), SIZE),
    Field("dense_layers", ("first_k_dense_replace",), COUNT),
    Field("moe_layer_freq", ("moe_layer_freq",), SIZE),
    Field("experts", ("num_experts",), EXPERT_COUNT),
    Field("active_experts", ("num_experts_per_token",), SIZE),
    Field("shared_experts", ("num_shared_experts",), SIZE),
    Field("expert_ffn", ("moe_intermediate_size",), SIZE),
    Field("latent", ("routed_expert_hidden_size",), SIZE),
    Field("latent_norm", ("latent_moe_use_norm",), FLAG),
    Field("router", ("moe_router_activation_func",), ROUTER),
    Field("renormalize", ("moe_renormalize",), FLAG),
    Field("routed_scale", ("routed_scaling_factor",), POSITIVE),
    Field("situ_beta", ("activation_situ_beta",), POSITIVE),
    Field("situ_linear_beta", ("activation_situ_linear_beta",), POSITIVE),
)
GROUPS = (  # 1 unless use_grouped_topk is true
    Field("expert_groups", ("num_expert_group",), SIZE),
    Field("groups_kept", ("topk_group",), SIZE),
)
GROUPED = Field("use_grouped_topk", ("use_grouped_topk",), FLAG)
LINEAR = (  # in linear_attn_config
    Field("kda_heads", ("num_heads",), SIZE),
    Field("kda_key_dim", ("head_dim",), SIZE),
    Field("kda_value_dim", ("head_v_dim",), SIZE, default=None),  # absent: head_dim
    Field("conv_width", ("short_conv_kernel_size",), SIZE),
    Field("decay_lower_bound", ("gate_lower_bound",), NEGATIVE, default=None),  # absent: softplus
    Field("full_rank_gate", ("use_full_rank_gate",), FLAG),
)
# Layer numbers are 1-based in files. mla_layers is full_attn_layers minus 1, sorted.
KDA_LAYERS = Field("kda_layers", ("kda_layers",), LAYERS)
FULL_LAYERS = Field("full_attn_layers", ("full_attn_layers",), LAYERS)
DSA = (  # in dsa_config; 0 without this table
    Field("index_heads", ("index_n_heads", "n_heads", "num_heads", "index_num_heads"), SIZE),
    Field("index_dim", ("index_head_dim", "head_dim"), SIZE),
    Field("index_topk", ("index_topk", "topk", "top_k"), SIZE),
)
BOS = Field("bos", ("bos_token_id",), ID, default=None)
EOS = Field("eos", ("eos_token_id",), IDS, default=())
PAD = Field("pad", ("pad_token_id",), ID, default=None)
TIE = Field("tie_embeddings", ("tie_word_embeddings",), FLAG, default=False)


def keys_of(*fields: Field) -> set[str]:
    """Every key that may hold one of the fields."""
    return {key for field in fields for key in field.keys}


@dataclass(frozen=True)
class Fixed:
    """The only value of a key that this code computes. Unless required, it may be absent."""

    value: Any
    required: bool = False


FIXED = {
    "hidden_act": Fixed("situ", required=True),
    "mla_use_nope": Fixed(True, required=True),
    "topk_method": Fixed("noaux_tc"),
    "attention_bias": Fixed(False),
    "attention_dropout": Fixed(0),
    "num_nextn_predict_layers": Fixed(0),
    "sliding_window": Fixed(None),
    "is_encoder_decoder": Fixed(False),
    "add_cross_attention": Fixed(False),
}
QUANTIZATION = {
    "quant_method": Fixed("compressed-tensors", required=True),
    "format": Fixed("mxfp4-pack-quantized"),  # required here or in each group
    "kv_cache_scheme": Fixed(None),
    "sparsity_config": Fixed({}),
    "transform_config": Fixed({}),
}
QUANTIZATION_GROUP = {
    "format": Fixed("mxfp4-pack-quantized"),
    "input_activations": Fixed(None),
    "output_activations": Fixed(None),
}
QUANTIZATION_WEIGHTS = {
    "num_bits": Fixed(4, required=True),
    "type": Fixed("float", required=True),
    "group_size": Fixed(32, required=True),
    "strategy": Fixed("group"),
    "symmetric": Fixed(True),
    "dynamic": Fixed(False),
    "scale_dtype": Fixed("torch.uint8"),
    "actorder": Fixed(None),
    "block_structure": Fixed(None),
}

ARCHITECTURE = "KimiK3ForConditionalGeneration"
SPARSE_ARCHITECTURE = "KimiK31ForConditionalGeneration"

DECODER = frozenset(  # every key that a result depends on
    FIXED.keys()
    | keys_of(*TEXT, *GROUPS, GROUPED, BOS, EOS, PAD, TIE)
    | {"num_key_value_heads", "linear_attn_config", "dsa_config", "quantization_config"}
)
# Keys that change nothing this code computes: bookkeeping, training, sampling defaults, and
# rotation (no position is ever rotated). Any other unknown key is refused.
IRRELEVANT = frozenset(
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
# Of the top level of a released file: the vision model, and how other engines serve it.
VISION = ("vision_", "media_", "image_", "video_")  # prefixes of keys
SERVING = frozenset("use_unified_vision_chunk encoder_only language_only".split())
IRRELEVANT_QUANTIZATION = frozenset(
    "config_groups quantization_status global_compression_ratio ignore version".split()
)
IRRELEVANT_GROUP = frozenset("weights targets".split())
IRRELEVANT_WEIGHTS = frozenset("observer observer_kwargs zp_dtype".split())


@dataclass(frozen=True)
class Rule:
    """What must hold between fields; checked once all of `needs` have been read."""

    needs: tuple[str, ...]
    holds: Callable[..., bool]
    message: str  # with a place for the value of each field


RULES = (
    Rule(
        ("dense_layers", "layers"),
        lambda dense, layers: dense <= layers,
        "first_k_dense_replace={} exceeds num_hidden_layers={}",
    ),
    Rule(
        ("experts", "layers"),
        lambda experts, layers: experts * layers <= MOST_EXPERTS,
        f"num_experts={{}} in num_hidden_layers={{}} layers are more than {MOST_EXPERTS} in all",
    ),
    Rule(
        ("active_experts", "experts"),
        lambda active, experts: active <= experts,
        "num_experts_per_token={} is more than num_experts={}",
    ),
    Rule(
        ("experts", "expert_groups"),
        lambda experts, groups: experts % groups == 0,
        "num_experts={} does not divide into num_expert_group={} equal groups",
    ),
    Rule(
        ("groups_kept", "expert_groups"),
        lambda kept, groups: kept <= groups,
        "topk_group={} exceeds num_expert_group={}",
    ),
    Rule(
        ("active_experts", "groups_kept", "experts", "expert_groups"),
        lambda active, kept, experts, groups: (
            active > experts or active <= kept * (experts // groups)
        ),
        "num_experts_per_token={} is more than topk_group={} groups hold, with num_experts={} and "
        "num_expert_group={}",
    ),
    Rule(
        ("experts", "expert_groups", "router"),
        lambda experts, groups, router: (
            router != "sigmoid" or groups == 1 or experts // groups >= 2
        ),
        "num_experts={} in num_expert_group={} groups leaves a group under 2 experts, and a {} "
        "router scores a group by its two best",
    ),
    Rule(
        ("latent", "quantized"),
        lambda size, quantized: size % 32 == 0 or not quantized,
        "routed_expert_hidden_size={} is not a multiple of 32, the MXFP4 group_size",
    ),
    Rule(
        ("expert_ffn", "quantized"),
        lambda size, quantized: size % 32 == 0 or not quantized,
        "moe_intermediate_size={} is not a multiple of 32, the MXFP4 group_size",
    ),
    Rule(
        ("bos", "vocab"), lambda bos, vocab: bos < vocab, "bos_token_id={} is outside vocab_size={}"
    ),
    Rule(
        ("pad", "vocab"), lambda pad, vocab: pad < vocab, "pad_token_id={} is outside vocab_size={}"
    ),
)
