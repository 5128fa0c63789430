"""The index and the headers of a checkpoint, checked before any weight is touched.

A shard is safetensors: eight bytes with the length of the header, the header as JSON, and the data
of the tensors one after another. A header is untrusted: every number in it is checked before it is
used, and each problem names its file or its tensor.
"""

import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, FileError, shown
from ..files import open_regular, parse_json, read_json
from ..numerics import is_whole
from .names import is_vision

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_INDEX_BYTES = 256 << 20  # four times the index of the largest release
_HEADER_BYTES = 100_000_000  # the limit of the format
_MAX_BYTES = 1 << 62  # of a shard: sizes and offsets are not above this

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class Tensor(NamedTuple):
    """What a shard's header says of a tensor; its data begin at byte `start` of the shard."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shard: str
    start: int


class Shard(NamedTuple):
    """The tensors of a shard and its bytes, mapped into memory."""

    tensors: dict[str, Tensor]
    data: mmap.mmap


class Contents(NamedTuple):
    """What a folder holds: its tensors, the shard of each tensor in its index, the bytes of
    each shard, and what is wrong with them so far.
    """

    tensors: dict[str, Tensor]
    index: dict[str, str]
    data: dict[str, mmap.mmap]
    problems: list[str]


def read_folder(folder: Path, reads_vision: bool) -> Contents:
    """Index and headers of a checkpoint. Raises CheckpointError where no shard can be read."""
    problems: list[str] = []
    index = read_index(folder)
    files = _shards_of(folder, index, reads_vision) or [SINGLE_FILE]
    shards = _read_shards(folder, files, problems)
    index = index or dict.fromkeys(shards[SINGLE_FILE].tensors, SINGLE_FILE)
    problems += _disagreements(index, shards)
    data = {name: shard.data for name, shard in shards.items()}
    return Contents(_merge(index, shards), index, data, problems)


# The index.


def read_index(folder: Path) -> dict[str, str]:
    """The shard of each tensor; empty for a checkpoint of a single file, which needs no index."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = folder / INDEX_FILE
    if not os.path.lexists(path):
        if os.path.lexists(folder / SINGLE_FILE):
            return {}
        raise CheckpointError(f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")
    try:
        index = read_json(path, _INDEX_BYTES)
    except FileError as error:
        raise CheckpointError(f"{path}: {error.reason}") from error
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise CheckpointError(f"{path}: not an index with a weight_map of tensors and files")
    if not listed:
        raise CheckpointError(f"{path}: lists no tensor")
    outside = sorted(shard for shard in set(listed.values()) if not _is_file_name(shard))
    if outside:
        raise CheckpointError(f"{path}: names files outside the folder, {shown(outside)}")
    return listed


def tensor_names(folder: Path) -> Collection[str]:
    """The tensors that a folder lists, in its index or in the header of its single file."""
    return read_index(folder) or _read_shard(folder / SINGLE_FILE).tensors


def shards_to_read(index: Mapping[str, str], reads_vision: bool) -> list[str]:
    """The shards of an index that hold a tensor which is read."""
    return sorted({shard for name, shard in index.items() if reads_vision or not is_vision(name)})


def _shards_of(folder: Path, index: Mapping[str, str], reads_vision: bool) -> list[str]:
    """The shards of an index that must be there, and others that are."""
    needed = shards_to_read(index, reads_vision)
    others = set(index.values()) - set(needed)
    return sorted([*needed, *(name for name in others if os.path.lexists(folder / name))])


def _is_file_name(shard: str) -> bool:
    return shard not in ("", ".", "..") and "/" not in shard


# The headers.


def _read_shards(folder: Path, names: Iterable[str], problems: list[str]) -> dict[str, Shard]:
    """Each shard whose header is sound; the problems of the others are added to `problems`."""
    shards = {}
    for name in names:
        try:
            shards[name] = _read_shard(folder / name)
        except CheckpointError as error:
            problems += error.problems
    if not shards:
        raise CheckpointError(*problems)
    return shards


def _read_shard(path: Path) -> Shard:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            _check_header_length(path.name, length, size)
            header = parse_json(file.read(length))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileError as error:
        raise CheckpointError(f"{path.name}: {error.reason}") from error
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read, {error.strerror}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path.name}: corrupt header, {error}") from error
    return Shard(_tensors(path.name, header, 8 + length, len(data)), data)


def _check_header_length(shard: str, length: int, size: int) -> None:
    if size < 8 or length > size - 8:
        raise CheckpointError(
            f"{shard}: truncated or corrupt, a header of {length} bytes in {size}"
        )
    if length > _HEADER_BYTES:
        raise CheckpointError(
            f"{shard}: corrupt, a header of {length:,} bytes where {_HEADER_BYTES:,} are allowed"
        )


def _tensors(shard: str, header: Any, first: int, size: int) -> dict[str, Tensor]:
    """The tensors of a header, whose data begin at byte `first` of the shard's `size`."""
    if not isinstance(header, dict):
        raise CheckpointError(f"{shard}: corrupt header, not a table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{shard}: corrupt header, __metadata__: {shown(metadata)}")
    tensors = {name: _tensor(shard, name, entry, first) for name, entry in header.items()}
    _check_layout(shard, tensors, first, size)
    return tensors


def _tensor(shard: str, name: str, entry: Any, first: int) -> Tensor:
    """A header's entry, its offsets counted from the start of the file."""
    with suppress(KeyError, TypeError, ValueError):  # not a table, or a key is missing
        shape, dtype, (start, stop) = entry["shape"], entry["dtype"], entry["data_offsets"]
        if _are_sound(shape, dtype, start, stop):
            return Tensor(tuple(shape), dtype, stop - start, shard, first + start)
    raise CheckpointError(f"{shard}: corrupt header, {name}: {shown(entry)}")


def _are_sound(shape: Any, dtype: Any, start: Any, stop: Any) -> bool:
    """Whether a shape and a dtype are what they should be and take the bytes start..stop."""
    if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        return False
    if not all(is_whole(size, 0, _MAX_BYTES) for size in (*shape, start, stop)):
        return False
    return stop - start == _elements(shape) * _ITEM_BYTES[dtype]


def _elements(shape: Sequence[int]) -> int:
    """The product of a shape, or the first partial product that no file can hold."""
    if 0 in shape:
        return 0
    product = 1
    for size in shape:
        product *= size
        if product > _MAX_BYTES:
            break
    return product


def _check_layout(shard: str, tensors: Mapping[str, Tensor], first: int, size: int) -> None:
    """Raises CheckpointError unless the tensors follow one another and fill the file."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            raise CheckpointError(
                f"{shard}: corrupt header, {name} starts at byte {tensor.start}, not at {end}"
            )
        end = tensor.start + tensor.nbytes
    if end != size:
        problem = "truncated" if end > size else "corrupt"
        raise CheckpointError(
            f"{shard}: {problem}, its tensors end at byte {end} and the file at {size}"
        )


# Index and headers compared.


def _disagreements(listed: Mapping[str, str], shards: Mapping[str, Shard]) -> Iterator[str]:
    """Where the index and the shards contradict each other."""
    for name, shard in listed.items():
        if shard in shards and name not in shards[shard].tensors:
            yield f"{name}: not in {shard}, where the index has it"
    for shard, (tensors, _) in shards.items():
        for name in tensors:
            if listed.get(name) != shard:
                yield f"{name}: in {shard}, where the index does not have it"


def _merge(listed: Mapping[str, str], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The tensors of all shards; of two with the same name, the tensor in the index's shard."""
    merged: dict[str, Tensor] = {}
    for shard, (tensors, _) in shards.items():
        for name, tensor in tensors.items():
            if name not in merged or listed.get(name) == shard:
                merged[name] = tensor
    return merged
