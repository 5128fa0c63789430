"""Checkpoints of the Hugging Face hub: a repository's files that are read, and no others."""

import importlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..config.config import Config
from ..config.released import RELEASED
from ..errors import FileError
from ..model.mxfp4 import MXFP4
from .headers import INDEX_FILE, SINGLE_FILE, read_index, shards_to_read
from .names import hf_shapes
from .reader import reads_tower

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def folder_of(
    path: str | os.PathLike[str], others: Sequence[str], vision: bool | Any = None
) -> str | os.PathLike[str]:
    """A path as it is; where nothing is there and it reads "owner/name", the folder in which
    `huggingface_hub` keeps that repository, with the files that a checkpoint is read from fetched:
    config, index, shards of the text decoder, of the vision tower if `reads_tower`, and
    of the `others` those that the repository has.

    Raises `FileError` with the command that fetches them, and its size, where `huggingface_hub` is
    not installed or cannot reach them.
    """
    if os.path.lexists(path) or not _REPOSITORY.fullmatch(os.fspath(path)):
        return path
    repository = os.fspath(path)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        why = "huggingface_hub, which would fetch it, is not installed: pip install 'kimi-jax[hub]'"
        raise _refusal(repository, why) from error
    try:
        return _fetch(hub, repository, others, vision)
    except (hub.errors.HfHubHTTPError, hub.errors.EntryNotFoundError, OSError) as error:
        raise _refusal(repository, str(error).strip().split("\n")[0]) from error


def _fetch(hub: Any, repository: str, others: Sequence[str], vision: bool | Any) -> Path:
    config = Path(hub.hf_hub_download(repository, "config.json"))
    folder = config.parent  # of one commit: the other files are of the same

    def has(name: str) -> bool:
        """Fetch a file, where the repository has it."""
        try:
            hub.hf_hub_download(repository, name, revision=folder.name)
        except hub.errors.LocalEntryNotFoundError:  # the hub cannot be reached
            raise
        except hub.errors.EntryNotFoundError:
            return False
        return True

    for name in others:
        has(name)
    shards = [SINGLE_FILE]
    if has(INDEX_FILE):
        shards = shards_to_read(read_index(folder), reads_tower(folder, vision))
    for shard in shards:
        hub.hf_hub_download(repository, shard, revision=folder.name)
    return folder


def _refusal(repository: str, why: str) -> FileError:
    name = repository.split("/")[1]
    # The longest name of a released model that is part of the repository's.
    released = max((known for known in RELEASED if known in name.lower()), key=len, default=None)
    size = ""
    if released:
        size = f", about {_bytes(Config.from_hf(RELEASED[released])) / 1e9:,.0f} GB,"
    command = (
        f"hf download {repository} --include '*.json' --include '*.safetensors' "
        f"--include tiktoken.model --local-dir {name}"
    )
    reason = (
        f"no such folder, and as a repository of the Hugging Face hub it was not fetched: {why}\n"
        f"To fetch it{size} by hand and load the folder {name}:\n  {command}"
    )
    return FileError(repository, reason, missing=True)


def _bytes(config: Config) -> int:
    """The bytes of a released checkpoint, without its vision part."""
    tensors = hf_shapes(config, MXFP4).values()
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tensors)
