"""The released names: for each weight of the decoder, the tensors of a checkpoint that hold it.

Released names occur here, in `vision_names` and in `draft_names` only. `weight_table` lists the
weights of a config; reading, writing, validation and shapes all follow from it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..config.config import Config
from ..errors import CheckpointError, shown
from ..model.mxfp4 import MXFP4, PLAIN, Quantization

ROOT = "language_model."
LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_EXPERTS = "block_sparse_moe."
TOWER, PROJECTOR = "vision_tower.", "mm_projector."  # `vision_names` has what is in them
_PADDED_HEADS = 128  # the released a_log is zero-padded to this many
_MAX_DIMS = 64  # that numpy can slice

Part = tuple[slice, ...]
Tensors = dict[str, np.ndarray]


class Storage(NamedTuple):
    """The dtype a weight is written in, and those it may have in a file."""

    dtype: str
    accepted: tuple[str, ...]


_FLOATS = ("BF16", "F32", "F16")
_DEFAULT = Storage("bfloat16", _FLOATS)
FLOAT32 = Storage("float32", _FLOATS)  # is read as float32 whatever the file holds
_INDEXER = Storage("bfloat16", (*_FLOATS, "F8_E4M3"))  # how a release stores these is not settled
_UINT8 = Storage("uint8", ("U8",))


@runtime_checkable
class TensorSource(Protocol):
    """What a weight is read from: the tensors of a checkpoint by their released names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """The numpy dtype of a tensor."""
        ...

    def fetch(self, name: str, part: Part) -> np.ndarray:
        """A part of a tensor, with start and stop for each dim."""
        ...


@dataclass(frozen=True)
class Weight:
    """A weight and its released tensor, alike but for an axis of size 1 at `unit_axis`."""

    name: str
    source: str
    shape: tuple[int, ...]
    storage: Storage = _DEFAULT
    unit_axis: int | None = None
    optional: bool = False  # zeros where the file has none
    per_expert = False  # whether each expert has a released tensor
    is_half = False  # whether two weights share the released tensor

    @property
    def count(self) -> int:
        """The number of released tensors that hold the weight."""
        return 1

    def sources(self) -> Iterator[str]:
        """The released tensors that hold the weight."""
        yield self.source

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape in which a released tensor of this weight is written."""
        if self.unit_axis is None:
            return self.shape
        return (*self.shape[: self.unit_axis], 1, *self.shape[self.unit_axis :])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a released tensor of this shape can be read."""
        return shape in (self.file_shape, self.shape)

    def misfits(self, shape: tuple[int, ...], dtype: str) -> Iterator[str]:
        """Why a released tensor of this shape and dtype cannot be read, if so."""
        if not self.fits(shape):
            yield f"shape {shape_text(shape)}, expected {shape_text(self.file_shape)}"
        if dtype not in self.storage.accepted:
            yield f"dtype {dtype}, expected {' or '.join(self.storage.accepted)}"

    def read(self, file: TensorSource, part: Part) -> np.ndarray:
        """A part of the weight, start and stop for each of its dims, in the file's dtype."""
        axis = self.unit_axis
        if axis is not None and len(file.shape(self.source)) > len(self.shape):
            with_unit_axis = (*part[:axis], slice(0, 1), *part[axis:])
            return np.squeeze(file.fetch(self.source, with_unit_axis), axis=axis)
        return file.fetch(self.source, part)

    def write(self, array: np.ndarray, tensors: Tensors) -> None:
        """Adds the weight to `tensors` in the released layout."""
        array = array.reshape(self.file_shape)
        if self.source in tensors and not np.array_equal(tensors[self.source], array):
            raise ValueError(f"{self.name} differs from the weight that it is tied to")
        tensors[self.source] = array


class _PaddedWeight(Weight):
    """[H]: a value for each head, zero-padded in the file, where only one axis is longer than 1."""

    @property
    def file_shape(self) -> tuple[int, ...]:
        return (max(_PADDED_HEADS, self.shape[0]),)

    def fits(self, shape: tuple[int, ...]) -> bool:
        longest = max(shape, default=0)
        return len(shape) <= _MAX_DIMS and math.prod(shape) == longest >= self.shape[0]

    def read(self, file: TensorSource, part: Part) -> np.ndarray:
        (heads,) = part
        all_heads = self.shape[0]
        shape = file.shape(self.source)
        # Only a part that holds the last head pays for checking the padding after it.
        stop = max(shape) if heads.start < heads.stop == all_heads else heads.stop
        in_file = [slice(0, 1)] * len(shape)
        in_file[shape.index(max(shape))] = slice(heads.start, stop)
        values = file.fetch(self.source, tuple(in_file)).reshape(-1)
        count = heads.stop - heads.start
        if values[count:].any():
            raise CheckpointError(
                f"{self.source}: values other than zero after the {all_heads} heads"
            )
        return values[:count]

    def write(self, array: np.ndarray, tensors: Tensors) -> None:
        tensors[self.source] = np.pad(array, (0, self.file_shape[0] - len(array)))


@dataclass(frozen=True)
class PerHeadWeight(Weight):
    """[H, out, in]: rows of each head from `first_row` on, of the `rows_per_head` in the file."""

    rows_per_head: int = 0
    first_row: int = 0
    is_half = True

    @property
    def file_shape(self) -> tuple[int, ...]:
        """[H rows_per_head, in]."""
        return (self.shape[0] * self.rows_per_head, self.shape[2])

    def read(self, file: TensorSource, part: Part) -> np.ndarray:
        """A part of the weight, head by head."""
        heads, rows, columns = part
        array = np.empty([p.stop - p.start for p in part], file.dtype(self.source))
        for i, head in enumerate(range(heads.start, heads.stop)):
            first = head * self.rows_per_head + self.first_row
            rows_of_head = slice(first + rows.start, first + rows.stop)
            array[i] = file.fetch(self.source, (rows_of_head, columns))
        return array

    def write(self, array: np.ndarray, tensors: Tensors) -> None:
        """Put the weight's rows of each head into the released tensor."""
        if self.source not in tensors:
            tensors[self.source] = np.empty(self.file_shape, array.dtype)
        heads = tensors[self.source].reshape(self.shape[0], self.rows_per_head, self.shape[2])
        heads[:, self.first_row : self.first_row + self.shape[1]] = array


class _StackedWeight(Weight):
    """[E, out, in]: a released tensor for each expert, whose number replaces {} in its name."""

    per_expert = True

    @property
    def count(self) -> int:
        return self.shape[0]

    def sources(self) -> Iterator[str]:
        before, after = self.source.split("{}")
        return (f"{before}{expert}{after}" for expert in range(self.shape[0]))

    @property
    def file_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    def read(self, file: TensorSource, part: Part) -> np.ndarray:
        experts, *rest = part
        array = np.empty([p.stop - p.start for p in part], file.dtype(self.source.format(0)))
        for i, expert in enumerate(range(experts.start, experts.stop)):
            array[i] = file.fetch(self.source.format(expert), tuple(rest))
        return array

    def write(self, array: np.ndarray, tensors: Tensors) -> None:
        tensors.update(zip(self.sources(), array, strict=True))


def weight_table(config: Config, quantization: Quantization, root: str = ROOT) -> list[Weight]:
    """Every weight of a model, in the order of the layers; `root` begins every released name."""
    D, Z = config.hidden, config.vocab
    head = _EMBEDDING if config.tie_embeddings else LM_HEAD
    weights = [Weight("embed", f"{root}{_EMBEDDING}", (Z, D))]
    layers: dict[tuple[bool, bool], list[Weight]] = {}  # layers of a kind have the same weights
    for i in range(config.layers):
        kind = (config.is_mla(i), config.is_dense(i))
        if kind not in layers:
            layers[kind] = _layer(config, quantization, i)
        weights += prefixed(f"layers.{i}.", f"{root}model.layers.{i}.", layers[kind])
    return [
        *weights,
        *prefixed("residual.", f"{root}model.output_attn_res_", _residual(config)),
        Weight("norm", f"{root}model.norm.weight", (D,)),
        Weight("head", f"{root}{head}", (Z, D)),
    ]


def prefixed(name: str, source: str, weights: Iterable[Weight]) -> list[Weight]:
    """The weights, with a prefix for their names and another for the names of their tensors."""
    return [replace(w, name=f"{name}{w.name}", source=f"{source}{w.source}") for w in weights]


def _layer(config: Config, quantization: Quantization, i: int) -> list[Weight]:
    D = config.hidden
    attention = _mla(config) if config.is_mla(i) else _kda(config)
    if config.is_dense(i):
        mlp = prefixed("mlp.", "mlp.", _mlp(config.dense_ffn, D))
    else:
        mlp = prefixed("mlp.", _EXPERTS, _moe(config, quantization))
    return [
        *prefixed("attention_residual.", "self_attention_res_", _residual(config)),
        Weight("attention_norm", "input_layernorm.weight", (D,)),
        *prefixed("attention.", "self_attn.", attention),
        *prefixed("mlp_residual.", "mlp_res_", _residual(config)),
        Weight("mlp_norm", "post_attention_layernorm.weight", (D,)),
        *mlp,
    ]


def _residual(config: Config) -> list[Weight]:
    D = config.hidden
    return [Weight("norm", "norm.weight", (D,)), Weight("proj", "proj.weight", (D,), unit_axis=0)]


def _kda(config: Config) -> list[Weight]:
    D, W = config.hidden, config.conv_width
    H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
    if config.full_rank_gate:
        gate = [Weight("w_gate", "g_proj.weight", (H * V, D))]
    else:
        gate = [
            Weight("w_gate_a", "g_a_proj.weight", (V, D)),
            Weight("w_gate_b", "g_b_proj.weight", (H * V, V)),
        ]
    return [
        Weight("w_q", "q_proj.weight", (H * K, D)),
        Weight("w_k", "k_proj.weight", (H * K, D)),
        Weight("w_v", "v_proj.weight", (H * V, D)),
        Weight("conv_q", "q_conv1d.weight", (H * K, W), FLOAT32, unit_axis=1),
        Weight("conv_k", "k_conv1d.weight", (H * K, W), FLOAT32, unit_axis=1),
        Weight("conv_v", "v_conv1d.weight", (H * V, W), FLOAT32, unit_axis=1),
        Weight("w_decay_a", "f_a_proj.weight", (K, D)),
        Weight("w_decay_b", "f_b_proj.weight", (H * K, K)),
        _PaddedWeight("a_log", "A_log", (H,), FLOAT32),
        Weight("dt_bias", "dt_bias", (H * K,), FLOAT32),
        Weight("w_beta", "b_proj.weight", (H, D)),
        Weight("o_norm", "o_norm.weight", (V,), FLOAT32),
        *gate,
        Weight("w_o", "o_proj.weight", (D, H * V)),
    ]


def _mla(config: Config) -> list[Weight]:
    D, H, Q, R = config.hidden, config.heads, config.q_rank, config.latent_row
    keys, rope, values, latent = config.nope_dim, config.rope_dim, config.value_dim, config.kv_rank
    rows = keys + values  # of each head in kv_b_proj
    gate = [Weight("w_gate", "g_proj.weight", (H * values, D))] if config.mla_output_gate else []
    indexer = prefixed("indexer.", "indexer.", _indexer(config)) if config.sparse else []
    return [
        Weight("w_q_a", "q_a_proj.weight", (Q, D)),
        Weight("q_norm", "q_a_layernorm.weight", (Q,)),
        Weight("w_q_b", "q_b_proj.weight", (H * (keys + rope), Q)),
        Weight("w_kv_a", "kv_a_proj_with_mqa.weight", (R, D)),
        Weight("kv_norm", "kv_a_layernorm.weight", (latent,)),
        PerHeadWeight("w_k_b", "kv_b_proj.weight", (H, keys, latent), rows_per_head=rows),
        PerHeadWeight(
            "w_v_b", "kv_b_proj.weight", (H, values, latent), rows_per_head=rows, first_row=keys
        ),
        *gate,
        Weight("w_o", "o_proj.weight", (D, H * values)),
        *indexer,
    ]


def _indexer(config: Config) -> list[Weight]:
    D, I, J, Q = config.hidden, config.index_dim, config.index_heads, config.q_rank  # noqa: E741
    return [
        Weight("w_q", "wq_b.weight", (J * I, Q), _INDEXER),
        Weight("w_k", "wk.weight", (I, D), _INDEXER),
        Weight("w_weights", "weights_proj.weight", (J, D), _INDEXER),
        Weight("k_norm", "k_norm.weight", (I,), _INDEXER),
        Weight("k_bias", "k_norm.bias", (I,), _INDEXER, optional=True),
    ]


def _mlp(F: int, D: int) -> list[Weight]:
    return [
        Weight("w_gate", "gate_proj.weight", (F, D)),
        Weight("w_up", "up_proj.weight", (F, D)),
        Weight("w_down", "down_proj.weight", (D, F)),
    ]


def _moe(config: Config, quantization: Quantization) -> list[Weight]:
    D, E, L = config.hidden, config.experts, config.latent
    norm = [Weight("latent_norm", "routed_expert_norm.weight", (L,))] if config.latent_norm else []
    shared = _mlp(config.shared_ffn, D) if config.shared_experts else []
    return [
        Weight("w_router", "gate.weight", (E, D)),
        Weight("router_bias", "gate.e_score_correction_bias", (E,), FLOAT32),
        Weight("w_latent_down", "routed_expert_down_proj.weight", (L, D)),
        Weight("w_latent_up", "routed_expert_up_proj.weight", (D, L)),
        *norm,
        *prefixed("shared.", "shared_experts.", shared),
        *prefixed("experts.", "experts.{}.", _experts(config, quantization)),
    ]


def _experts(config: Config, quantization: Quantization) -> list[Weight]:
    E, F, L = config.experts, config.expert_ffn, config.latent
    plain: list[Weight] = [
        _StackedWeight("w_gate", "w1.weight", (E, F, L)),
        _StackedWeight("w_up", "w3.weight", (E, F, L)),
        _StackedWeight("w_down", "w2.weight", (E, L, F)),
    ]
    if quantization is PLAIN:
        return plain
    group = quantization.group
    if F % group or L % group:
        raise CheckpointError(f"packed experts of {F} x {L}: not multiples of {group}")
    weights: list[Weight] = []
    for w in plain:
        *rows, columns = w.shape
        values, scales = (*rows, columns // 2), (*rows, columns // group)
        weights += [
            _StackedWeight(w.name, f"{w.source}_packed", values, _UINT8),
            _StackedWeight(scale_name(w.name), f"{w.source}_scale", scales, _UINT8),
        ]
    return weights


def scale_name(name: str) -> str:
    """The weight that holds the scales of a packed weight."""
    stem, role = name.rsplit("w_", 1)
    return f"{stem}s_{role}"


def expert_format(names: Iterable[str]) -> tuple[Quantization, set[str]]:
    """How most experts are stored, and the matrices (names without `.weight`) that differ."""
    matrices: dict[str, set[str]] = {"": set(), "_packed": set()}
    for name in names:
        if f".{_EXPERTS}experts." in name:
            matrix, _, suffix = name.rpartition(".weight")
            matrices.get(suffix, set()).add(matrix)
    plain, packed = matrices[""], matrices["_packed"]
    return (MXFP4, plain) if len(packed) > len(plain) else (PLAIN, packed)


def shape_text(shape: Iterable[int]) -> str:
    """A shape for a message, shortened where it has many dims."""
    return shown(list(shape))


def is_vision(name: str) -> bool:
    """Whether a released tensor belongs to the vision tower or its projector."""
    return name.removeprefix(ROOT).startswith((TOWER, PROJECTOR))


def shapes(config: Config, quantization: Quantization) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each weight of the model."""
    return {w.name: (w.shape, w.storage.dtype) for w in weight_table(config, quantization)}


def hf_shapes(
    config: Config, quantization: Quantization, root: str = ROOT
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a released checkpoint, leaving out the vision part."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for weight in weight_table(config, quantization, root):
        tensors |= dict.fromkeys(weight.sources(), (weight.file_shape, weight.storage.dtype))
    return tensors
