"""Reads and writes released checkpoints: safetensors shards, their index, and a config.json.

Released names occur here only. `_table` says for each of our weights which released tensor it
comes from; reading, writing, validation and shapes all follow from it. A checkpoint is validated
whole from its headers before one weight is copied, and a weight is read in the part that is asked
for.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..config.config import Config
from ..errors import CheckpointError
from ..model import mxfp4

ROOT = "language_model."
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_SKIPPED = ("vision_tower.", "mm_projector.")  # the released model sees; this one reads text
_PADDED_HEADS = 128  # the released a_log is padded with zeros to this many


class Tensor(NamedTuple):
    """What a shard's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shard: str


# The name table: our weights, and where a released file keeps them.


class _Kind(NamedTuple):
    """The dtype a weight is written in, and those it may have in a file."""

    dtype: str
    accepted: tuple[str, ...]


_FLOATS = ("BF16", "F32", "F16")
_TRUNK = _Kind("bfloat16", _FLOATS)
_EXACT = _Kind("float32", _FLOATS)  # becomes float32 in any case
_INDEX = _Kind("bfloat16", (*_FLOATS, "F8_E4M3"))  # how a release stores these is not settled
_BYTES = _Kind("uint8", ("U8",))

Part = tuple[slice, ...]


@dataclass(frozen=True)
class _Weight:
    """One of our weights and its released tensor, alike but for an axis of size 1 at `unit`."""

    name: str
    source: str  # below the root
    shape: tuple[int, ...]
    kind: _Kind = _TRUNK
    unit: int | None = None
    optional: bool = False  # zeros where the file has none

    def sources(self) -> Iterator[str]:
        """The released tensors this weight is made of."""
        yield self.source

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape a released tensor of this weight is written in."""
        if self.unit is None:
            return self.shape
        return (*self.shape[: self.unit], 1, *self.shape[self.unit :])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be read."""
        return shape in (self.file_shape, self.shape)

    def read(self, file: Checkpoint, part: Part) -> np.ndarray:
        """The part that `part` cuts out of our shape, in the file's dtype."""
        if self.unit is not None and len(file.shape(self.source)) > len(self.shape):
            part = (*part[: self.unit], slice(0, 1), *part[self.unit :])
            return np.squeeze(file.fetch(self.source, part), axis=self.unit)
        return file.fetch(self.source, part)

    def write(self, array: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Adds the released form of our array to `tensors`."""
        array = array.reshape(self.file_shape)
        if self.source in tensors and not np.array_equal(tensors[self.source], array):
            raise ValueError(f"{self.name} differs from the weight that it is tied to")
        tensors[self.source] = array


class _Padded(_Weight):
    """One value for each head, zeros after them; only one axis is longer than 1."""

    @property
    def file_shape(self) -> tuple[int, ...]:
        return (max(_PADDED_HEADS, self.shape[0]),)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= self.shape[0] and math.prod(shape) == max(shape, default=0)

    def read(self, file: Checkpoint, part: Part) -> np.ndarray:
        (asked,) = part
        heads, shape = self.shape[0], file.shape(self.source)
        # Whoever asks for the last head, and nobody else, looks at the zeros after it.
        stop = max(shape) if asked.start < asked.stop == heads else asked.stop
        cut = [slice(0, 1)] * len(shape)
        cut[shape.index(max(shape))] = slice(asked.start, stop)
        values = file.fetch(self.source, tuple(cut)).reshape(-1)
        count = asked.stop - asked.start
        if values[count:].any():
            name = f"{file.root}{self.source}"
            raise CheckpointError(f"{name}: values other than zero after the {heads} heads")
        return values[:count]

    def write(self, array: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        tensors[self.source] = np.pad(array, (0, self.file_shape[0] - len(array)))


@dataclass(frozen=True)
class _PerHead(_Weight):
    """[H, out, in]: rows of each head from `start` on; the released tensor has `rows` of them."""

    rows: int = 0
    start: int = 0

    @property
    def file_shape(self) -> tuple[int, ...]:
        return (self.shape[0] * self.rows, self.shape[2])

    def read(self, file: Checkpoint, part: Part) -> np.ndarray:
        heads, rows, columns = part
        array = np.empty([p.stop - p.start for p in part], file.dtype(self.source))
        for at, head in enumerate(range(heads.start, heads.stop)):
            first = head * self.rows + self.start
            of_head = slice(first + rows.start, first + rows.stop)
            array[at] = file.fetch(self.source, (of_head, columns))
        return array

    def write(self, array: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        if self.source not in tensors:
            tensors[self.source] = np.empty(self.file_shape, array.dtype)
        heads = tensors[self.source].reshape(self.shape[0], self.rows, self.shape[2])
        heads[:, self.start : self.start + self.shape[1]] = array


class _Stacked(_Weight):
    """[E, out, in]: a released tensor for each expert, whose number goes into the name."""

    def sources(self) -> Iterator[str]:
        before, after = self.source.split("{}")
        return (f"{before}{expert}{after}" for expert in range(self.shape[0]))

    @property
    def file_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    def read(self, file: Checkpoint, part: Part) -> np.ndarray:
        experts, *rest = part
        sources = list(self.sources())[experts]
        array = np.empty([p.stop - p.start for p in part], file.dtype(next(self.sources())))
        for at, source in enumerate(sources):
            array[at] = file.fetch(source, tuple(rest))
        return array

    def write(self, array: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        tensors.update(zip(self.sources(), array, strict=True))


def _table(config: Config, packed: bool) -> list[_Weight]:
    """Every weight of a model, in the order of the layers."""
    D, Z = config.hidden, config.vocab
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    layers = [
        weight
        for i in range(config.layers)
        for weight in _below(f"layers.{i}.", f"model.layers.{i}.", _layer(config, packed, i))
    ]
    return [
        _Weight("embed", "model.embed_tokens.weight", (Z, D)),
        *layers,
        *_below("residual.", "model.output_attn_res_", _residual(config)),
        _Weight("norm", "model.norm.weight", (D,)),
        _Weight("head", head, (Z, D)),
    ]


def _below(ours: str, theirs: str, weights: Iterable[_Weight]) -> list[_Weight]:
    """The weights with a prefix before their names, ours and the released ones."""
    return [replace(w, name=f"{ours}{w.name}", source=f"{theirs}{w.source}") for w in weights]


def _layer(config: Config, packed: bool, i: int) -> list[_Weight]:
    D = config.hidden
    attention = _mla(config) if config.is_mla(i) else _kda(config)
    if config.is_dense(i):
        mlp = _below("mlp.", "mlp.", _mlp(config.dense_ffn, D))
    else:
        mlp = _below("mlp.", "block_sparse_moe.", _moe(config, packed))
    return [
        *_below("attention_residual.", "self_attention_res_", _residual(config)),
        _Weight("attention_norm", "input_layernorm.weight", (D,)),
        *_below("attention.", "self_attn.", attention),
        *_below("mlp_residual.", "mlp_res_", _residual(config)),
        _Weight("mlp_norm", "post_attention_layernorm.weight", (D,)),
        *mlp,
    ]


def _residual(config: Config) -> list[_Weight]:
    D = config.hidden
    return [_Weight("norm", "norm.weight", (D,)), _Weight("proj", "proj.weight", (D,), unit=0)]


def _kda(config: Config) -> list[_Weight]:
    D, W = config.hidden, config.conv_width
    H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
    if config.full_rank_gate:
        gate = [_Weight("w_gate", "g_proj.weight", (H * V, D))]
    else:
        gate = [
            _Weight("w_gate_a", "g_a_proj.weight", (V, D)),
            _Weight("w_gate_b", "g_b_proj.weight", (H * V, V)),
        ]
    return [
        _Weight("w_q", "q_proj.weight", (H * K, D)),
        _Weight("w_k", "k_proj.weight", (H * K, D)),
        _Weight("w_v", "v_proj.weight", (H * V, D)),
        _Weight("conv_q", "q_conv1d.weight", (H * K, W), _EXACT, unit=1),
        _Weight("conv_k", "k_conv1d.weight", (H * K, W), _EXACT, unit=1),
        _Weight("conv_v", "v_conv1d.weight", (H * V, W), _EXACT, unit=1),
        _Weight("w_decay_a", "f_a_proj.weight", (K, D)),
        _Weight("w_decay_b", "f_b_proj.weight", (H * K, K)),
        _Padded("a_log", "A_log", (H,), _EXACT),
        _Weight("dt_bias", "dt_bias", (H * K,), _EXACT),
        _Weight("w_beta", "b_proj.weight", (H, D)),
        _Weight("o_norm", "o_norm.weight", (V,), _EXACT),
        *gate,
        _Weight("w_o", "o_proj.weight", (D, H * V)),
    ]


def _mla(config: Config) -> list[_Weight]:
    D, H, Q, R = config.hidden, config.heads, config.q_rank, config.latent_row
    keys, rope, values, latent = config.nope_dim, config.rope_dim, config.value_dim, config.kv_rank
    rows = keys + values  # that kv_b_proj holds for each head
    gate = [_Weight("w_gate", "g_proj.weight", (H * values, D))] if config.mla_output_gate else []
    indexer = _below("indexer.", "indexer.", _indexer(config)) if config.sparse else []
    return [
        _Weight("w_q_a", "q_a_proj.weight", (Q, D)),
        _Weight("q_norm", "q_a_layernorm.weight", (Q,)),
        _Weight("w_q_b", "q_b_proj.weight", (H * (keys + rope), Q)),
        _Weight("w_kv_a", "kv_a_proj_with_mqa.weight", (R, D)),
        _Weight("kv_norm", "kv_a_layernorm.weight", (latent,)),
        _PerHead("w_k_b", "kv_b_proj.weight", (H, keys, latent), rows=rows),
        _PerHead("w_v_b", "kv_b_proj.weight", (H, values, latent), rows=rows, start=keys),
        *gate,
        _Weight("w_o", "o_proj.weight", (D, H * values)),
        *indexer,
    ]


def _indexer(config: Config) -> list[_Weight]:
    D, I, J, Q = config.hidden, config.index_dim, config.index_heads, config.q_rank  # noqa: E741
    return [
        _Weight("w_q", "wq_b.weight", (J * I, Q), _INDEX),
        _Weight("w_k", "wk.weight", (I, D), _INDEX),
        _Weight("w_weights", "weights_proj.weight", (J, D), _INDEX),
        _Weight("k_norm", "k_norm.weight", (I,), _INDEX),
        _Weight("k_bias", "k_norm.bias", (I,), _INDEX, optional=True),
    ]


def _mlp(F: int, D: int) -> list[_Weight]:
    return [
        _Weight("w_gate", "gate_proj.weight", (F, D)),
        _Weight("w_up", "up_proj.weight", (F, D)),
        _Weight("w_down", "down_proj.weight", (D, F)),
    ]


def _moe(config: Config, packed: bool) -> list[_Weight]:
    D, E, L = config.hidden, config.experts, config.latent
    norm = [_Weight("latent_norm", "routed_expert_norm.weight", (L,))] if config.latent_norm else []
    shared = _mlp(config.shared_ffn, D) if config.shared_experts else []
    return [
        _Weight("w_router", "gate.weight", (E, D)),
        _Weight("router_bias", "gate.e_score_correction_bias", (E,), _EXACT),
        _Weight("w_latent_down", "routed_expert_down_proj.weight", (L, D)),
        _Weight("w_latent_up", "routed_expert_up_proj.weight", (D, L)),
        *norm,
        *_below("shared.", "shared_experts.", shared),
        *_below("experts.", "experts.{}.", _experts(config, packed)),
    ]


def _experts(config: Config, packed: bool) -> list[_Weight]:
    E, F, L = config.experts, config.expert_ffn, config.latent
    plain: list[_Weight] = [
        _Stacked("w_gate", "w1.weight", (E, F, L)),
        _Stacked("w_up", "w3.weight", (E, F, L)),
        _Stacked("w_down", "w2.weight", (E, L, F)),
    ]
    if not packed:
        return plain
    if F % mxfp4.GROUP or L % mxfp4.GROUP:
        raise CheckpointError(f"packed experts of {F} x {L}: no multiples of {mxfp4.GROUP}")
    weights: list[_Weight] = []
    for w in plain:
        *rows, columns = w.shape
        bytes_of, scales_of = (*rows, columns // 2), (*rows, columns // mxfp4.GROUP)
        weights += [
            _Stacked(w.name, f"{w.source}_packed", bytes_of, _BYTES),
            _Stacked(_scale_name(w.name), f"{w.source}_scale", scales_of, _BYTES),
        ]
    return weights


def _scale_name(name: str) -> str:
    """The weight that holds the scales of a packed one."""
    stem, role = name.rsplit("w_", 1)
    return f"{stem}s_{role}"


def shapes(config: Config, packed: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each of our weights."""
    return {weight.name: (weight.shape, weight.kind.dtype) for weight in _table(config, packed)}


def hf_shapes(
    config: Config, packed: bool, root: str = ROOT
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a released checkpoint, leaving out the vision part."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for weight in _table(config, packed):
        form = weight.file_shape, weight.kind.dtype
        tensors |= dict.fromkeys((f"{root}{source}" for source in weight.sources()), form)
    return tensors


def to_hf(config: Config, weights: Mapping[str, Any], root: str = ROOT) -> dict[str, np.ndarray]:
    """The released tensors of our weights, all of them or some: the inverse of reading.

    Dtypes stay as they are, but for the weights a release keeps in float32. `w_k_b` and `w_v_b` of
    a layer share a tensor and must come together. Raises one ValueError for unknown names, wrong
    shapes and halves without the other.
    """
    packed = any(".mlp.experts.s_" in name for name in weights)
    table = {weight.name: weight for weight in _table(config, packed)}
    _check_ours(table, weights)
    tensors: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        array = np.asarray(array)
        wide = np.float32 if table[name].kind is _EXACT else array.dtype
        table[name].write(array.astype(wide, copy=False), tensors)
    return {f"{root}{source}": array for source, array in tensors.items()}


def _check_ours(table: Mapping[str, _Weight], weights: Mapping[str, Any]) -> None:
    problems = [f"{name}: no such weight" for name in weights if name not in table]
    for name, weight in table.items():
        if name in weights and np.shape(weights[name]) != weight.shape:
            problems.append(f"{name}: shape {np.shape(weights[name])}, expected {weight.shape}")
    halves: dict[str, list[str]] = {w.source: [] for w in table.values() if isinstance(w, _PerHead)}
    for weight in table.values():
        if weight.source in halves:
            halves[weight.source].append(weight.name)
    for names in halves.values():
        absent = [name for name in names if name not in weights]
        if 0 < len(absent) < len(names):
            problems.append(f"{absent[0]}: missing, it shares a tensor with a weight that is there")
    if problems:
        raise ValueError("\n".join(problems))


# Reading.


class Checkpoint:
    """A released checkpoint on disk, checked against a config when it is opened; read part by part.

    `tensors` lists what the headers hold, `names` our weights, `packed` says whether experts are
    MXFP4, `root` is what stands before every name, and `bytes_read` counts the weight bytes copied
    so far. Raises one `CheckpointError` with every problem of index, headers and inventory.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        problems: list[str] = []
        listed = _read_index(self.folder)
        self._headers = _read_headers(self.folder, sorted(set(listed.values())), problems)
        listed = listed or dict.fromkeys(self._headers[_SINGLE_FILE], _SINGLE_FILE)
        problems += _compare(listed, self._headers)
        self.tensors = _merge(listed, self._headers)
        known = self.tensors.keys() | listed.keys()
        self.root = ROOT if any(name.startswith(ROOT) for name in known) else ""
        self.packed, odd = _expert_form(known)
        problems += [
            f"{name}: {'plain' if self.packed else 'packed'}, unlike most experts"
            for name in sorted(odd)
        ]
        self._weights = {weight.name: weight for weight in _table(config, self.packed)}
        problems += self._inventory(config, listed, odd)
        if problems:
            raise CheckpointError(*problems)
        self._handles = _open_all(self.folder, self._headers)

    @property
    def names(self) -> tuple[str, ...]:
        """Our weights, in the order of the layers."""
        return tuple(self._weights)

    def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        """One of our weights, or the part that `index` cuts out: a slice for each dim of our shape.

        In the file's dtype, but for the weights that are always float32. Copies the bytes of that
        part alone, and with the last head of an a_log the zeros after it. Raises `CheckpointError`
        for NaN, Inf, a scale byte of 255 and values after the last head of an a_log.
        """
        weight = self._weights[name]
        part = _whole_part(weight, index)
        if weight.optional and self.root + weight.source not in self.tensors:
            return np.zeros([p.stop - p.start for p in part], ml_dtypes.bfloat16)
        array = weight.read(self, part)
        return array.astype(np.float32, copy=False) if weight.kind is _EXACT else array

    def shape(self, source: str) -> tuple[int, ...]:
        """The shape a released tensor has in its file."""
        return self.tensors[self.root + source].shape

    def dtype(self, source: str) -> np.dtype:
        """The numpy dtype of a released tensor."""
        return _DTYPES[self.tensors[self.root + source].dtype]

    def fetch(self, source: str, part: Part) -> np.ndarray:
        """A part of a released tensor, named below the root, with its values checked."""
        name = self.root + source
        tensor = self.tensors[name]
        if any(p.start == p.stop for p in part):  # safetensors refuses some of these
            return np.empty([p.stop - p.start for p in part], _DTYPES[tensor.dtype])
        if tensor.dtype.startswith("F8"):  # safetensors has no numpy type for these
            array = np.array(self._map(name)[part])
        else:
            array = self._handles[tensor.shard].get_slice(name)[part]
        self.bytes_read += array.nbytes
        _check_values(name, tensor.dtype, array)
        return array

    def close(self) -> None:
        """Gives the shards back; a read after this raises KeyError."""
        self._handles.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map(self, name: str) -> np.ndarray:
        shape, dtype, _, shard = self.tensors[name]
        start = self._headers[shard][name].start
        return np.memmap(self.folder / shard, _DTYPES[dtype], "r", start, shape)

    def _inventory(
        self, config: Config, listed: Mapping[str, str], odd: Iterable[str]
    ) -> Iterator[str]:
        """Tensors missing, unknown, or of a wrong form, if not reported elsewhere."""
        expected = {
            self.root + s: weight for weight in self._weights.values() for s in weight.sources()
        }
        reported = {f"{name}.weight{form}" for name in odd for form in ("", "_packed", "_scale")}
        for name, weight in expected.items():
            if name in self.tensors:
                yield from _misfit(name, self.tensors[name], weight)
            elif name not in listed and name not in reported and not weight.optional:
                yield f"{name}: missing, shape {_say(weight.file_shape)} is expected"
        for weight in self._weights.values():
            parts = [self.tensors.get(self.root + source) for source in weight.sources()]
            dtypes = {part.dtype for part in parts if part and part.dtype in weight.kind.accepted}
            if len(dtypes) > 1:
                yield f"{weight.name}: experts differ in dtype, {' and '.join(sorted(dtypes))}"
        for name, tensor in self.tensors.items():
            if name not in expected and name not in reported and not _is_skipped(name, config):
                yield f"{name}: unknown tensor of shape {_say(tensor.shape)} in {tensor.shard}"


def _misfit(name: str, tensor: Tensor, weight: _Weight) -> Iterator[str]:
    if not weight.fits(tensor.shape):
        yield f"{name}: shape {_say(tensor.shape)}, expected {_say(weight.file_shape)}"
    if tensor.dtype not in weight.kind.accepted:
        yield f"{name}: dtype {tensor.dtype}, expected {' or '.join(weight.kind.accepted)}"


def _say(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _is_skipped(name: str, config: Config) -> bool:
    below = name.removeprefix(ROOT)
    return below.startswith(_SKIPPED) or (config.tie_embeddings and below == "lm_head.weight")


def _expert_form(names: Iterable[str]) -> tuple[bool, set[str]]:
    """Whether experts are packed, and the expert matrices that are not like most of them."""
    matrices: dict[str, set[str]] = {"": set(), "_packed": set()}
    for name in names:
        if ".block_sparse_moe.experts." in name:
            matrix, _, form = name.rpartition(".weight")
            matrices.get(form, set()).add(matrix)
    plain, packed = matrices[""], matrices["_packed"]
    return (True, plain) if len(packed) > len(plain) else (False, packed)


def _whole_part(weight: _Weight, index: Sequence[slice]) -> Part:
    """A slice with start and stop for each dim."""
    if len(index) > len(weight.shape):
        raise ValueError(f"{weight.name}: {len(index)} slices for shape {weight.shape}")
    part = []
    for at, size in enumerate(weight.shape):
        start, stop, step = (index[at] if at < len(index) else slice(None)).indices(size)
        if step != 1:
            raise ValueError(f"{weight.name}: a slice with step {step}")
        part.append(slice(start, max(start, stop)))
    return tuple(part)


_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
_NOT_FINITE = {  # the bits that are all set in NaN and Inf, as the unsigned type they are tested in
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F800000),
    "F8_E4M3": np.uint8(0x7F),
}
_CHECKED_AT_ONCE = 1 << 22


def _check_values(name: str, dtype: str, array: np.ndarray) -> None:
    if dtype == "U8":
        if name.endswith("_scale") and (array == 255).any():
            raise CheckpointError(f"{name}: scale byte 255, which is no scale")
        return
    mask = _NOT_FINITE[dtype]
    bits = array.reshape(-1).view(mask.dtype)
    for start in range(0, bits.size, _CHECKED_AT_ONCE):
        if ((bits[start : start + _CHECKED_AT_ONCE] & mask) == mask).any():
            raise CheckpointError(f"{name}: holds NaN or Inf")


# Index and headers, before any weight is touched.


class _Entry(NamedTuple):
    """Where a tensor lies in its shard: bytes start..stop of the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


_Header = dict[str, _Entry]
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def _read_index(folder: Path) -> dict[str, str]:
    """The shard of each tensor; empty for a checkpoint of one file, which needs no index."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = folder / _INDEX_FILE
    if not path.exists():
        if (folder / _SINGLE_FILE).exists():
            return {}
        raise CheckpointError(f"{folder}: holds neither {_INDEX_FILE} nor {_SINGLE_FILE}")
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = {str(name): str(shard) for name, shard in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index with a weight_map ({error!r})") from error
    outside = sorted(shard for shard in set(plain.values()) if Path(shard).name != shard)
    if outside or not plain:
        found = f"names files outside the folder, {outside}" if outside else "lists no tensor"
        raise CheckpointError(f"{path}: {found}")
    return plain


def _read_headers(folder: Path, shards: Sequence[str], problems: list[str]) -> dict[str, _Header]:
    """The header of each shard that can be read."""
    headers = {}
    for shard in shards or [_SINGLE_FILE]:
        try:
            headers[shard] = _read_header(folder / shard)
        except CheckpointError as error:
            problems += error.problems
    if not headers:
        raise CheckpointError(*problems)
    return headers


def _read_header(path: Path) -> _Header:
    """Raises CheckpointError where header and file do not fit together."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path.name}: truncated or corrupt, a header of {length} bytes in {size}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read, {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name}: corrupt header, {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: corrupt header, not a table")
    header.pop("__metadata__", None)
    entries = {name: _entry(path.name, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path.name, entries, 8 + length, size)
    return entries


def _entry(shard: str, name: str, value: Any, data: int) -> _Entry:
    """A header's line for a tensor, with offsets from the start of the file."""
    try:
        dtype, (start, stop) = value["dtype"], value["data_offsets"]
        shape = tuple(value["shape"])
        right = stop - start == math.prod(shape) * _ITEM_BYTES[dtype] and min(start, *shape, 0) == 0
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise CheckpointError(f"{shard}: corrupt header, {name}: {value}")
    return _Entry(shape, dtype, data + start, data + stop)


def _check_layout(shard: str, entries: _Header, data: int, size: int) -> None:
    """Tensors follow one another and fill the file."""
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise CheckpointError(
                f"{shard}: corrupt header, {name} starts at byte {entry.start}, not at {end}"
            )
        end = entry.stop
    if end != size:
        what = "truncated" if end > size else "corrupt"
        raise CheckpointError(
            f"{shard}: {what}, its tensors end at byte {end} and the file at {size}"
        )


def _compare(listed: Mapping[str, str], headers: Mapping[str, _Header]) -> Iterator[str]:
    """Where the index and the shards disagree."""
    for name, shard in listed.items():
        if shard in headers and name not in headers[shard]:
            yield f"{name}: not in {shard}, where the index has it"
    for shard, header in headers.items():
        for name in header:
            if listed.get(name) != shard:
                yield f"{name}: in {shard}, where the index does not have it"


def _merge(listed: Mapping[str, str], headers: Mapping[str, _Header]) -> dict[str, Tensor]:
    """Every tensor of every shard; of two with one name, that of the index."""
    tensors: dict[str, Tensor] = {}
    for shard, header in headers.items():
        for name, (shape, dtype, start, stop) in header.items():
            if name not in tensors or listed.get(name) == shard:
                tensors[name] = Tensor(shape, dtype, stop - start, shard)
    return tensors


def _open_all(folder: Path, shards: Iterable[str]) -> dict[str, Any]:
    try:
        return {shard: safe_open(folder / shard, framework="numpy") for shard in shards}
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from error


# Writing.


def save_hf(
    folder: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Writes a released checkpoint: config.json, shards of about `shard_bytes` and their index.

    The folder appears at once and whole, by renaming. One that exists is refused with
    FileExistsError, unless `overwrite` is set and it is empty or holds a config.json.
    """
    folder = Path(folder)
    if folder.exists() and not (overwrite and _is_replaceable(folder)):
        raise FileExistsError(f"{folder} exists" + (", and is no checkpoint" if overwrite else ""))
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    fresh, old = (folder.with_name(f".{folder.name}.{mark}.{age}") for age in ("new", "old"))
    try:
        fresh.mkdir()
        _write_shards(fresh, tensors, shard_bytes)
        (fresh / "config.json").write_text(
            json.dumps(config_dict, indent=1) + "\n", encoding="utf-8"
        )
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").exists() or not any(folder.iterdir()))


def _write_shards(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> None:
    """The shards and their index. Names hold the number of shards, so they come last."""
    weight_map: dict[str, int] = {}
    total = count = 0
    for count, shard in enumerate(_cut(tensors, shard_bytes), start=1):
        save_file(shard, folder / f"{count}.part", {"format": "pt"})
        weight_map |= dict.fromkeys(shard, count)
        total += sum(array.nbytes for array in shard.values())
    names = {at: f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)}
    for at, name in names.items():
        (folder / f"{at}.part").rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[at] for name, at in weight_map.items()},
    }
    (folder / _INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _cut(tensors: Mapping[str, np.ndarray], shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """The tensors in order, a shard at a time; one that is larger than a shard has its own."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name in tensors:
        array = np.asarray(tensors[name], order="C")
        if shard and size + array.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    if shard:
        yield shard


# Random weights.

_Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _around(mean: float, std: float) -> _Draw:
    return lambda rng, shape: mean + std * rng.standard_normal(shape, np.float32)


def _matrix(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


_DRAWS: tuple[tuple[str, _Draw], ...] = (  # the first pattern that matches the end of a name
    (r"norm", _around(1.0, 0.1)),
    (r"embed", _around(0.0, 1.0)),
    (r"a_log", lambda rng, shape: np.log(rng.uniform(1, 16, shape))),
    (r"dt_bias", _around(0.0, 0.5)),
    (r"(router_bias|k_bias)", _around(0.0, 0.1)),
    (r"", _matrix),
)


def random_tensors(
    config: Config, seed: int, packed: bool = True, scale: float = 1.0, root: str = ROOT
) -> dict[str, np.ndarray]:
    """Random weights of a whole model in the released form.

    A weight depends on the seed and its name alone, so packed and plain experts are the same
    numbers but for rounding. Matrices keep the size of their input, times `scale`; norms are
    near 1.
    """
    weights: dict[str, np.ndarray] = {}
    for weight in _table(config, packed=False):
        if weight.name == "head" and config.tie_embeddings:
            continue
        array = _random(weight, seed, scale)
        if packed and isinstance(weight, _Stacked):
            weights[weight.name], weights[_scale_name(weight.name)] = mxfp4.pack(array)
        else:
            weights[weight.name] = array.astype(np.dtype(weight.kind.dtype))
    return to_hf(config, weights, root)


def _random(weight: _Weight, seed: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(weight.name.encode())])
    draw = next(draw for pattern, draw in _DRAWS if re.search(f"{pattern}$", weight.name))
    return draw(rng, weight.shape) * np.float32(scale if draw is _matrix else 1)
