"""Reads weights from a checkpoint folder: any part of a weight, and only the bytes of that part.

The folder is validated from its headers before a weight is copied.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from ..config.config import Config
from ..config.vision import VisionConfig, has_table
from ..errors import CheckpointError, ConfigError, shown
from ..model.mxfp4 import PLAIN, unpack_numpy
from .headers import Contents, read_folder, tensor_names
from .inventory import inventory_problems
from .names import (
    FLOAT32,
    LM_HEAD,
    ROOT,
    Part,
    Weight,
    expert_format,
    scale_name,
    weight_table,
)
from .vision_names import holds_tower, vision_table

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
_NOT_FINITE = {  # the bits that are all set in NaN and Inf, as the unsigned type of the same width
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F800000),
    "F8_E4M3": np.uint8(0x7F),
}
_CHECKED_AT_ONCE = 1 << 22


def reads_tower(folder: str | os.PathLike[str], wanted: bool | None = None) -> bool:
    """Whether the vision tower of a folder is read: where the caller does not say, if it has a
    `vision_config` and at least one block of a tower; else it is a text model.
    """
    if wanted is None:
        return has_table(folder) and holds_tower(tensor_names(Path(folder)))
    return wanted


def vision_of(
    folder: str | os.PathLike[str], config: Config, wanted: bool | Any = None
) -> VisionConfig | None:
    """The vision tower of a folder, where it is read: `config` is that of its decoder. Raises
    `ConfigError` with every problem of `vision_config`.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise ConfigError(f"vision must be true, false or None, got {shown(wanted)}")
    return VisionConfig.from_hf(folder, config) if reads_tower(folder, wanted) else None


Folder = TypeVar("Folder", bound="TensorFolder")


class TensorFolder:
    """Weights of a checkpoint on disk, read part by part: `tensors` lists what the headers hold,
    `names` the weights, and `bytes_read` counts the bytes copied so far. Who makes one has checked
    the headers against the weights.
    """

    def __init__(self, contents: Contents, weights: Iterable[Weight]) -> None:
        self.tensors, self._data, self.bytes_read = contents.tensors, contents.data, 0
        self._weights = {weight.name: weight for weight in weights}

    @property
    def names(self) -> tuple[str, ...]:
        """The weights of the model, in the order of the layers."""
        return tuple(self._weights)

    def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        """A weight of the model, or the part that `index` selects: a slice for each of its dims.

        In the file's dtype, but for the weights that are always float32. Copies the bytes of that
        part alone, and with the last head of an a_log the zeros after it. Raises `CheckpointError`
        for NaN, Inf, a scale byte of 255 and values after the last head of an a_log.
        """
        weight = self._weights[name]
        part = _bounds(weight, index)
        if weight.optional and weight.source not in self.tensors:
            return np.zeros([p.stop - p.start for p in part], ml_dtypes.bfloat16)
        array = weight.read(self, part)
        return array.astype(np.float32, copy=False) if weight.storage is FLOAT32 else array

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a released tensor in its file."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The numpy dtype of a released tensor."""
        return _DTYPES[self.tensors[name].dtype]

    def fetch(self, name: str, part: Part) -> np.ndarray:
        """A copy of a part of a released tensor, its values checked."""
        array = self._copy(name, part)
        self.bytes_read += array.nbytes
        if problem := _value_problem(name, self.tensors[name].dtype, array):
            raise CheckpointError(problem)
        return array

    def close(self) -> None:
        """Gives the shards back; a read after this raises KeyError."""
        self._data.clear()

    def __enter__(self: Folder) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copy(self, name: str, part: Part) -> np.ndarray:
        tensor = self.tensors[name]
        dtype = _DTYPES[tensor.dtype]
        data = self._data[tensor.shard]
        if any(p.start == p.stop for p in part):  # an empty tensor may start where the file ends
            return np.empty([p.stop - p.start for p in part], dtype)
        # As unsigned integers, which numpy copies fast from any alignment.
        bits = np.ndarray(tensor.shape, f"u{dtype.itemsize}", data, tensor.start)
        return bits[part].copy().view(dtype)


class Checkpoint(TensorFolder):
    """A released checkpoint on disk, checked against a config when it is opened; read part by part.

    `tensors` lists what the headers hold, `names` the weights of the model, with those of the
    vision tower where its config is given; `quantization` is that of the experts, `root` begins
    every released name of the decoder, and `bytes_read` counts the weight bytes copied so far.
    Raises one `CheckpointError` with every problem of index, headers and inventory; with tied
    embeddings, a head that differs from them is a problem too.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: Config, vision: VisionConfig | None = None
    ) -> None:
        self.folder = Path(folder)
        reads_vision = vision is not None
        contents = read_folder(self.folder, reads_vision)
        index, problems = contents.index, contents.problems
        names = contents.tensors.keys() | index.keys()
        self.root = ROOT if any(name.startswith(ROOT) for name in names) else ""
        self.quantization, odd_experts = expert_format(names)
        problems += [
            f"{name}: {'packed' if self.quantization is PLAIN else 'plain'}, unlike most experts"
            for name in sorted(odd_experts)
        ]
        weights = weight_table(config, self.quantization, self.root)
        weights += vision_table(vision, names) if vision else []
        super().__init__(contents, weights)
        tied = [self._tied_head()] if config.tie_embeddings else []
        problems += inventory_problems(
            [*weights, *tied], self.tensors, index, odd_experts, reads_vision
        )
        problems += [problem for weight in tied for problem in self._tie_problems(weight)]
        if problems:
            raise CheckpointError(*problems)

    def read_unpacked(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        """`read`, of the weights that a model with plain experts has: packed ones as float32."""
        if ".experts.w_" not in name or self.quantization is PLAIN:
            return self.read(name, index)
        *rows, columns = index or (slice(None),) * 3
        packed, scales = self.read(name, rows), self.read(scale_name(name), rows)
        experts = [unpack_numpy(*pair)[..., columns] for pair in zip(packed, scales, strict=True)]
        return np.array(experts, np.float32).reshape(len(packed), packed.shape[1], -1)

    def _tied_head(self) -> Weight:
        """The head of a file that ties it to the embedding; it may be left out."""
        return Weight("head", self.root + LM_HEAD, self._weights["embed"].shape, optional=True)

    def _tie_problems(self, head: Weight) -> Iterator[str]:
        """Where the head differs from the embedding that it is tied to, if both can be read."""
        embed = self._weights["embed"]
        for weight in (embed, head):
            tensor = self.tensors.get(weight.source)
            if tensor is None or list(weight.misfits(tensor.shape, tensor.dtype)):
                return
        rows_at_once = max(1, _CHECKED_AT_ONCE // max(1, head.shape[1]))
        for start in range(0, head.shape[0], rows_at_once):
            rows = (slice(start, min(start + rows_at_once, head.shape[0])), slice(0, head.shape[1]))
            values = self._copy(head.source, rows)
            if problem := _value_problem(head.source, self.tensors[head.source].dtype, values):
                yield problem
                return
            expected = self._copy(embed.source, rows).astype(np.float32)
            if not np.array_equal(values.astype(np.float32), expected):
                yield (
                    f"{head.source}: differs from {embed.source}, which is the head where "
                    "tie_word_embeddings is true"
                )
                return


def _bounds(weight: Weight, index: Sequence[slice]) -> Part:
    """A slice with start and stop for each dim."""
    if len(index) > len(weight.shape):
        raise ValueError(f"{weight.name}: {len(index)} slices for shape {weight.shape}")
    part = []
    for axis, size in enumerate(weight.shape):
        start, stop, step = (index[axis] if axis < len(index) else slice(None)).indices(size)
        if step != 1:
            raise ValueError(f"{weight.name}: a slice with step {step}")
        part.append(slice(start, max(start, stop)))
    return tuple(part)


def _value_problem(name: str, dtype: str, array: np.ndarray) -> str | None:
    """What is wrong with the values of a tensor, if anything."""
    if dtype == "U8":
        if name.endswith("_scale") and (array == 255).any():
            return f"{name}: scale byte 255, which is not a scale"
        return None
    mask = _NOT_FINITE[dtype]
    bits = array.reshape(-1).view(mask.dtype)
    for start in range(0, bits.size, _CHECKED_AT_ONCE):
        if ((bits[start : start + _CHECKED_AT_ONCE] & mask) == mask).any():
            return f"{name}: holds NaN or Inf"
    return None
