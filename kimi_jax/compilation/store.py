"""Executables on disk, each with all that it was compiled from in its name: a process that finds
one neither traces nor compiles that program.

An entry is written under another name and then renamed, and carries a digest of its bytes: a
process that is killed leaves none that is incomplete. Like JAX's own entries these are machine
code: whoever can write to the folder can run programs.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import zlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jax.stages import Compiled

from .cache import find_cache

_MAGIC = b"kimi_jax program 1\n"
_SUFFIX = ".program"
_DIGEST = 32  # bytes of a sha256
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings that change what a program computes and that `with` can set for a thread.
_CONTEXTUAL = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")
_NEUTRAL = re.compile("cache|log|dump|traceback|profil|distributed|coordinat")


def settings() -> tuple:
    """The settings of this thread that programs depend on."""
    return tuple(getattr(jax.config, name) for name in _CONTEXTUAL)


@contextlib.contextmanager
def with_settings(values: tuple) -> Iterator[None]:
    """A block with the `settings` of another thread."""
    x64, precision, generator = values
    with (
        jax.enable_x64(x64),
        jax.default_matmul_precision(precision),
        jax.default_prng_impl(generator),
    ):
        yield


class Store:
    """The executables of one mesh, in the folder of the compilation cache. Where nothing is kept,
    or several processes share the mesh, it is not open.
    """

    is_enabled = True

    def __init__(self, mesh: Mesh):
        self._devices = list(mesh.devices.flat)

        self._folder = find_cache().local if jax.process_count() == 1 else None

    @property
    def is_open(self) -> bool:
        """Whether anything is kept."""
        return self._folder is not None and self.is_enabled

    def key(self, name: str, *parts: Any) -> str:
        """The name under which a program is kept; it ends in a digest of what it is made from."""
        sources = [*_software(), *map(repr, settings()), *self._hardware(), name, *map(str, parts)]
        digest = hashlib.sha256("\0".join(sources).encode()).hexdigest()[:40]
        return f"{re.sub('[^a-z0-9]+', '_', name)}_{digest}"

    def _hardware(self) -> Iterable[str]:
        devices = [(d.platform, d.device_kind, d.id) for d in self._devices]
        yield repr((devices, len(jax.devices()), self._devices[0].client.platform_version))
        if self._devices[0].platform == "cpu":
            yield _processor()

    def get(self, key: str) -> Compiled | None:
        """The executable of a key; None where there is none that can be loaded."""
        assert self._folder is not None
        path = self._folder / f"{key}{_SUFFIX}"
        try:
            content = path.read_bytes()
            begin = len(_MAGIC) + _DIGEST
            body = content[begin:]
            if content[:begin] != _MAGIC + hashlib.sha256(body).digest():
                raise ValueError("damaged")
            parts = pickle.loads(zlib.decompress(body))
            return serialize_executable.deserialize_and_load(
                *parts, execution_devices=self._devices
            )
        except FileNotFoundError:
            return None
        except Exception:  # whatever this version of JAX says of an executable it cannot load
            with contextlib.suppress(OSError):
                path.unlink()  # it is compiled and written again
            return None

    def put(self, key: str, compiled: Compiled) -> None:
        """Keep an executable that XLA has just compiled."""
        assert self._folder is not None
        try:
            parts = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError):  # JAX does not serialise this one
            return
        body = zlib.compress(pickle.dumps(parts), 1)
        part = self._folder / f"{key}.{os.getpid()}.part"
        with contextlib.suppress(OSError):  # a full disk
            part.write_bytes(_MAGIC + hashlib.sha256(body).digest() + body)
            part.replace(self._folder / f"{key}{_SUFFIX}")


@functools.cache
def _software() -> tuple[str, ...]:
    """The code that programs come from: this package's files, JAX, and the flags of XLA."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    options = {k: v for k, v in sorted(jax.config.values.items()) if not _NEUTRAL.search(k)}
    flags = [os.environ.get(name, "") for name in _FLAGS]
    return sources.hexdigest(), jax.__version__, version("jaxlib"), repr(flags), repr(options)


@functools.cache
def _processor() -> str:
    """What machine code for this CPU depends on: its instructions, else the machine's name."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = {line for line in lines if re.match("flags|Features|model name|vendor_id", line)}
        if kinds:
            return repr(sorted(kinds))
    return repr((platform.machine(), platform.processor(), platform.node()))
