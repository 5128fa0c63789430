"""Writes checkpoint folders: weights under their released names, shards, index; random weights."""

import json
import math
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ..config.config import Config
from ..config.vision import VisionConfig
from ..model import mxfp4
from ..model.mxfp4 import MXFP4, PLAIN, Quantization, expert_quantization
from .headers import INDEX_FILE
from .names import (
    FLOAT32,
    ROOT,
    Tensors,
    Weight,
    scale_name,
    weight_table,
)
from .vision_names import vision_table

# The released tensors of weights.


def to_hf(
    config: Config,
    weights: Mapping[str, Any],
    root: str = ROOT,
    vision: VisionConfig | None = None,
) -> Tensors:
    """The released tensors of weights of the model, all of them or some, with those of its vision
    tower where there is one: the inverse of reading.

    Dtypes stay as they are, but for the weights a release keeps in float32. `w_k_b` and `w_v_b` of
    a layer share a tensor and must come together. Raises one ValueError for unknown names, wrong
    shapes and halves without the other.
    """
    quantization = expert_quantization(any(".mlp.experts.s_" in name for name in weights))
    listed = [*weight_table(config, quantization, root), *(vision_table(vision) if vision else [])]
    table = {weight.name: weight for weight in listed}
    _check_weights(table, weights)
    tensors: Tensors = {}
    for name, array in weights.items():
        array = np.asarray(array)
        dtype = np.float32 if table[name].storage is FLOAT32 else array.dtype
        table[name].write(array.astype(dtype, copy=False), tensors)
    return tensors


def _check_weights(table: Mapping[str, Weight], weights: Mapping[str, Any]) -> None:
    problems = [f"{name}: no such weight" for name in weights if name not in table]
    for name, weight in table.items():
        if name in weights and np.shape(weights[name]) != weight.shape:
            problems.append(f"{name}: shape {np.shape(weights[name])}, expected {weight.shape}")
    halves: dict[str, list[str]] = {}
    for weight in table.values():
        if weight.is_half:
            halves.setdefault(weight.source, []).append(weight.name)
    for names in halves.values():
        absent = [name for name in names if name not in weights]
        if 0 < len(absent) < len(names):
            problems.append(f"{absent[0]}: missing, it shares a tensor with a weight that is given")
    if problems:
        raise ValueError("\n".join(problems))


# Folders.


def save_hf(
    folder: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Writes a released checkpoint: config.json, shards of about `shard_bytes` and their index.

    The folder appears complete, by renaming. A folder that exists is refused with FileExistsError,
    unless `overwrite` is set and it is empty or holds a config.json.
    """
    folder = Path(folder)
    if folder.exists() and not (overwrite and _is_replaceable(folder)):
        reason = ", and is not a checkpoint" if overwrite else ""
        raise FileExistsError(f"{folder} exists{reason}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    new, old = (folder.with_name(f".{folder.name}.{unique}.{age}") for age in ("new", "old"))
    try:
        new.mkdir()
        _write_shards(new, tensors, shard_bytes)
        config_text = json.dumps(config_dict, indent=1) + "\n"
        (new / "config.json").write_text(config_text, encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").exists() or not any(folder.iterdir()))


def _write_shards(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> None:
    """The shards and their index. File names hold the number of shards, so they come last."""
    shard_of: dict[str, int] = {}
    total = count = 0
    for count, shard in enumerate(_split(tensors, shard_bytes), start=1):
        save_file(shard, folder / f"{count}.part", {"format": "pt"})
        shard_of |= dict.fromkeys(shard, count)
        total += sum(array.nbytes for array in shard.values())
    files = {n: f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}
    for n, file in files.items():
        (folder / f"{n}.part").rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: files[n] for name, n in shard_of.items()},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _split(tensors: Mapping[str, np.ndarray], shard_bytes: int) -> Iterator[Tensors]:
    """The tensors in order, a shard at a time; a larger tensor gets a shard to itself."""
    shard: Tensors = {}
    size = 0
    for name in tensors:
        array = np.asarray(tensors[name], order="C")
        if shard and size + array.nbytes > shard_bytes:
            yield shard
            shard = {}
            size = 0
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
    (r"(embed|table)", _around(0.0, 1.0)),
    (r"w_patch", lambda rng, shape: _matrix(rng, (shape[0], math.prod(shape[1:]))).reshape(shape)),
    (r"a_log", lambda rng, shape: np.log(rng.uniform(1, 16, shape))),
    (r"dt_bias", _around(0.0, 0.5)),
    (r"(router_bias|k_bias)", _around(0.0, 0.1)),
    (r"", _matrix),
)


def random_tensors(
    config: Config,
    seed: int,
    quantization: Quantization = MXFP4,
    scale: float = 1.0,
    root: str = ROOT,
    vision: VisionConfig | None = None,
) -> Tensors:
    """Random weights of a model under their released names, with a vision tower if one is given.

    A weight depends on the seed and its name alone, so packed and plain experts are the same
    numbers but for rounding. Matrices keep the size of their input, times `scale`; norms are
    near 1.
    """
    weights: Tensors = {}
    for weight in (*weight_table(config, PLAIN), *(vision_table(vision) if vision else ())):
        if weight.name == "head" and config.tie_embeddings:
            continue
        array = _random(weight, seed, scale)
        if quantization is MXFP4 and weight.per_expert:
            weights[weight.name], weights[scale_name(weight.name)] = mxfp4.pack(array)
        else:
            weights[weight.name] = array.astype(np.dtype(weight.storage.dtype))
    return to_hf(config, weights, root, vision)


def _random(weight: Weight, seed: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(weight.name.encode())])
    draw = next(draw for pattern, draw in _DRAWS if re.search(f"{pattern}$", weight.name))
    return draw(rng, weight.shape) * np.float32(scale if draw is _matrix else 1)
