"""Where compiled programs are kept between processes: a folder, which JAX's compilation cache uses.

The caller decides: a folder set with `jax_compilation_cache_dir` (or the environment variable
`JAX_COMPILATION_CACHE_DIR`) is used as it is, and with `jax_enable_compilation_cache` off nothing
is kept. Otherwise it is `kimi_jax/programs` in the user's cache folder.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache  # the only way to know whether an entry is complete

from ..errors import shown

_OPTION = "jax_compilation_cache_dir"
_CHECKED = "checked"  # a file: entries older than it are complete
_KINDS = ("-cache", "-atime", ".program", ".part")  # how the names of entries end


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder where programs are kept, or the reason why they are not."""

    folder: str | None
    reason: str = ""

    def __str__(self) -> str:
        return f"kept in {self.folder}" if self.folder else f"not kept: {self.reason}"

    @property
    def local(self) -> Path | None:
        """The folder, where it is one of this machine: JAX also takes addresses of storage."""
        return Path(self.folder) if self.folder and "://" not in self.folder else None

    def entries(self) -> Iterator[os.DirEntry]:
        """The files that hold programs. A caller's folder may hold others."""
        if self.local is None:
            return
        with contextlib.suppress(FileNotFoundError), os.scandir(self.local) as files:
            yield from (file for file in files if file.name.endswith(_KINDS))

    def clear(self) -> None:
        """Delete all programs."""
        for entry in list(self.entries()):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                os.unlink(entry.path)


def open_cache() -> Place:
    """Have JAX keep compiled programs, and the place where. A folder that cannot be written means
    that none are kept.
    """
    place = find_cache()
    if jax.config.values["jax_enable_compilation_cache"] and place.folder != _asked():
        jax.config.update(_OPTION, place.folder)
        if place.local is not None:
            _discard_torn_entries(place)
    return place


def find_cache() -> Place:
    """The place where programs are kept, its folder made; changes no setting."""
    if not jax.config.values["jax_enable_compilation_cache"]:
        return Place(None, "jax_enable_compilation_cache is off")
    place = Place(asked) if (asked := _asked()) is not None else _of_user()
    if place.folder == "":
        return Place(None, f"{_OPTION} is empty")
    return place if place.local is None else _writable(place.local)


def _asked() -> str | None:
    """The caller's folder."""
    folder = jax.config.values[_OPTION]
    return None if folder is None else os.fspath(folder)


def _of_user() -> Place:
    """The default folder, by the convention of the XDG base directories."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # what is not absolute does not count, by the convention
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return Place(None, "there is no HOME, and the user has no home folder")
    if not os.path.isabs(base):
        return Place(None, f"HOME is {shown(str(Path.home()))}, not an absolute path")
    return Place(str(Path(base) / "kimi_jax" / "programs"))


def _writable(folder: Path) -> Place:
    """A folder, made where it does not exist; or why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not a name that a folder can have")
        reason = "a file and not a folder" if os.path.isfile(folder) else reason
        return Place(None, f"{folder}: {reason}")
    if not os.access(folder, os.W_OK):
        return Place(None, f"{folder}: no permission to write there")
    return Place(str(folder))


def _discard_torn_entries(place: Place) -> None:
    """Delete entries that JAX had not written to their end when its process was killed: it would
    warn of each one and compile that program in every process, and never replace it.
    """
    assert place.local is not None
    checked = place.local / _CHECKED
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    for entry in list(place.entries()):
        with contextlib.suppress(FileNotFoundError):
            if entry.name.endswith("-cache") and entry.stat().st_mtime_ns >= since:
                content = Path(entry.path).read_bytes()
                try:
                    compilation_cache.decompress_executable(content)
                except Exception:  # of whichever compression JAX uses
                    os.unlink(entry.path)
    with contextlib.suppress(OSError):
        checked.touch()
