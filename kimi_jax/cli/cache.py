"""`kimi-jax cache`: where compiled programs are kept."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import bytes_text
from .options import add_command
from .output import write

EXAMPLES = """\
  kimi-jax cache
  kimi-jax cache --clear
  JAX_COMPILATION_CACHE_DIR=/scratch/programs kimi-jax generate "Alice was"   keep them elsewhere
  JAX_ENABLE_COMPILATION_CACHE=false kimi-jax generate "Alice was"            keep none

What is kept was compiled for one version of this package and of JAX, one kind of device and one
shape; nothing else uses it. It is safe to delete at any time."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "show where compiled programs are kept and how large they are, or delete them"
    add = add_command(commands, "cache", run, about, EXAMPLES).add_argument
    add("--clear", action="store_true", help="delete them")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..compilation.cache import find_cache

    place = find_cache()
    if place.folder is None:
        write(f"compiled programs are not kept: {place.reason}\n")
        return 0
    if place.local is None:
        write(f"{place.folder}\nnot on this machine: neither measured nor cleared here\n")
        return 0
    sizes = [entry.stat().st_size for entry in place.entries()]
    if options.clear:
        place.clear()
    verb = "deleted, " if options.clear else ""
    write(f"{place.folder}\n{len(sizes)} files, {verb}{bytes_text(sum(sizes))}\n")
    return 0
