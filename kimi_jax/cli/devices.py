"""Devices, processes and the mesh that a command runs on, and the model placed there."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from ..errors import CommandError, label, meant, shown
from ..waiting import TELLER
from .output import note, redirect_output

_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_PATIENCE = 20  # seconds without a sign of life after which the others take a process for dead


def set_devices(count: int | None) -> None:
    """Makes JAX start with `count` CPU devices; without a count, what XLA_FLAGS asks for stands."""
    if count is None:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    asked = re.findall(rf"{_DEVICES_FLAG}=(\S+)", flags)
    if asked and asked[-1] != str(count):
        raise CommandError(f"--devices {count} contradicts XLA_FLAGS, which asks for {asked[-1]}")
    if not asked:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICES_FLAG}={count}".lstrip()
    import jax

    jax.config.update("jax_platforms", "cpu")


def check_devices(count: int | None) -> None:
    """Refuse a count that JAX, once started, cannot follow any more."""
    if count is None:
        return
    import jax

    if jax.local_device_count() != count:
        raise CommandError(
            f"--devices {count} comes too late, JAX runs on {jax.local_device_count()}"
        )


def join_processes(options: argparse.Namespace) -> None:
    """Joins the processes that run together; all but the first fall silent."""
    given = [vars(options).get(name) for name in ("coordinator", "processes", "process_id")]
    if all(value is None for value in given):
        return
    coordinator, count, number = given
    if coordinator is None or count is None or number is None:
        raise CommandError("--coordinator, --processes and --process-id belong together")
    host = re.fullmatch(r"[A-Za-z0-9._-]+:([0-9]{1,5})", coordinator)
    if not host or not 0 < int(host[1]) < 2**16:
        raise CommandError(f"--coordinator takes HOST:PORT, got {shown(coordinator)}")
    if not 0 <= number < count:
        raise CommandError(
            f"--process-id {number} is not among the {count} processes, 0 to {count - 1}"
        )
    import jax

    from ..parallel.watch import watch_processes

    jax.distributed.initialize(
        coordinator,
        count,
        number,
        heartbeat_timeout_seconds=_PATIENCE,
        shutdown_timeout_seconds=_PATIENCE,
    )
    watch_processes()
    redirect_output(silent=number > 0)
    TELLER.is_silent = number > 0


def end_processes(code: int, reason: str) -> None:
    """End all processes that run together with this one; returns where it runs alone."""
    if "jax" in sys.modules:
        from ..parallel.watch import end_all_processes

        end_all_processes(code, reason)


def is_compiling() -> bool:
    """Whether a thread of this process compiles."""
    function = sys.modules.get("kimi_jax.compilation.function")
    return function is not None and function.is_compiling()


def load_model(path: Path, options: argparse.Namespace) -> Any:
    """The model of a folder on the mesh and placement that were asked for."""
    import jax

    import kimi_jax as kj

    check_folder(path)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh, place = make_mesh(options), make_placement(options)
    with warnings.catch_warnings(record=True) as remarks:
        model = kj.load(path, mesh=mesh, placement=place, dtype=options.dtype, chunk=options.chunk)
    for remark in remarks:
        note(f"note: {remark.message}")
    return model


def make_mesh(options: argparse.Namespace) -> Any:
    """The mesh that was asked for; else all accelerators, or the CPU devices that were asked for,
    on the model axis.
    """
    import jax

    import kimi_jax as kj

    asked = options.devices or options.processes or jax.default_backend() != "cpu"
    data, model = options.mesh or (1, jax.device_count() if asked else 1)
    return kj.make_mesh(data, model)


def make_placement(options: argparse.Namespace) -> Any:
    """The placement that `--place` spells."""
    import kimi_jax as kj

    values: dict[str, Any] = {}
    for name, value in options.place or []:
        if name in values:
            raise CommandError(f"--place {name}=... is given twice")
        values[name] = value
    return kj.Placement(**values)


def use_compilation_cache() -> None:
    """Keep compiled programs, so that a second run starts at once; say so where they cannot be."""
    from ..compilation.cache import open_cache

    place = open_cache()
    if place.folder is None:
        note(f"note: compiled programs are not kept, {place.reason}")


def check_folder(path: Path) -> None:
    """Refuse what is not a checkpoint folder."""
    if not os.path.isdir(path):  # of Path's own, some raise where a name is too long
        found = "a file and not a" if os.path.exists(path) else "no such"
        raise CommandError(f"{label(path)}: {found} folder")
    if not os.path.lexists(path / "config.json"):
        raise CommandError(f"{label(path)}: not a checkpoint, it has no config.json")


def make_folder(option: str, folder: Path) -> None:
    """Make a folder that can be written. Raises `CommandError` that names what it is for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not a name that a folder can have")
        reason = "a file and not a folder" if os.path.isfile(folder) else reason
        raise CommandError(f"{option} {folder}: {reason}") from error
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {folder}: no permission to write there")


def named_config(name: str) -> Any:
    """The config of a released model, or of the file or folder at a path."""
    from ..config.config import Config
    from ..config.released import RELEASED

    if name in RELEASED:
        return Config.from_hf(RELEASED[name])
    if not os.path.lexists(name):
        hint = f"; ranks are --mesh 1x{name}" if name.isdecimal() else meant(name, RELEASED)
        raise CommandError(f"{shown(name)} is neither k3, k3.1 nor the path of a config{hint}")
    if os.path.isdir(name):
        check_folder(Path(name))
    return Config.from_hf(name)


def mesh_text(mesh: Any) -> str:
    """The sizes of a mesh and the kind of its devices, for a title."""
    from ..parallel.mesh import mesh_sizes, sizes_text

    return f"{sizes_text(mesh_sizes(mesh))} ({mesh.devices.flat[0].device_kind})"
