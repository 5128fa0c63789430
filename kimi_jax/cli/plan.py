"""`kimi-jax plan`: what each device would hold, and the best mesh and placement for given GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from ..errors import CommandError, bytes_text
from ..planning.gpus import MEMORY
from .devices import make_placement, named_config
from .options import (
    DTYPES,
    HELP,
    add_command,
    add_place,
    gigabytes,
    gpus,
    mesh_shape,
    positive,
    whole,
)
from .output import print_json, print_table, write

EXAMPLES = """\
  kimi-jax plan k3.1 --users 64 --context 131072 --gpus 16xH200
  kimi-jax plan k3.1 --users 64 --context 131072 --gpus 2x8x141
  kimi-jax plan k3.1 --mesh 1x8 --context 131072 --batch 64 --hbm 141,288
  kimi-jax plan k3.1 --mesh 4x8 --place expert_axes=data,model --hbm 80
  kimi-jax plan /path/to/checkpoint --mesh 1x2 --place latent=sharded

--gpus ranks all meshes and placements, or those that --mesh and --place leave, by the bytes that a
device moves in a decode step. Temporaries of a step, about 2 GB at full size, are not in the table;
--hbm and --gpus set 2 GB aside."""
RANKING = """Ranked by the
bytes that a device reads, writes and sends in a decode step at this context: estimates from shapes
and uniform routing, without the time of messages and of links between nodes. The best one:"""
SHOWN = 5  # candidates


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "plan memory: the bytes of each device, what fits, the best mesh and placement"
    command = add_command(commands, "plan", run, about, EXAMPLES)
    add = command.add_argument
    help_config = "k3, k3.1, or the path of a config or checkpoint folder (k3.1)"
    add("config", nargs="?", metavar="CONFIG", help=help_config)
    add("--model", metavar="CONFIG", help="the same")
    help_mesh = "D data-parallel x M model-parallel ranks (1x1)"
    add("--mesh", type=mesh_shape, metavar="DxM", help=help_mesh)
    help_gpus = (
        "choose mesh and placement for these: a number of GPUs, or nodes x GPUs, and their model "
        f"({', '.join(MEMORY)}) or memory in GB"
    )
    add("--gpus", type=gpus, metavar="NxMODEL", help=help_gpus)
    help_batch = "requests that decode together, on the whole mesh (1)"
    add("--batch", "--users", type=positive, default=1, metavar="B", help=help_batch)
    add("--context", type=positive, metavar="S", help="tokens of each request (4096)")
    help_drafts = "most drafts of each request that a step verifies, in speculative decoding (0)"
    add("--drafts", type=whole(0), default=0, metavar="K", help=help_drafts)
    add("--dtype", choices=DTYPES, default="bfloat16", help=f"{HELP['dtype']} (bfloat16)")
    help_hbm = "device memories to try, in GB"
    add("--hbm", type=gigabytes, default=[], metavar="GB,GB", help=help_hbm)
    add("--vision", action="store_true", help="count a vision tower that CONFIG only names, too")
    add_place(command)
    add("--json", action="store_true", help="print bytes by term as a line of JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if options.config and options.model:
        hint = f"; ranks are --mesh 1x{options.model}" if options.model.isdecimal() else ""
        raise CommandError(f"the model is given twice, as CONFIG and as --model{hint}")
    name = options.config or options.model or "k3.1"
    config = named_config(name)
    if options.context is not None and options.context > config.max_positions:
        raise CommandError(
            f"--context {options.context} is over the model's {config.max_positions} tokens"
        )
    return _choose(options, name, config) if options.gpus else _plan(options, config)


def _plan(options: argparse.Namespace, config: Any) -> int:
    """What a device of one mesh and placement holds."""
    from ..runtime.fitting import verdict
    from ..runtime.memory import plan, table_rows

    mesh = dict(zip(("data", "model"), options.mesh or (1, 1), strict=True))
    planned = plan(
        config, mesh, make_placement(options),
        batch=options.batch, context=options.context, dtype=options.dtype,
        vision=_vision(options, config), drafts=options.drafts,
    )  # fmt: skip
    if options.json:
        totals = {
            "weights": planned.weight_bytes,
            "state": planned.state_bytes,
            "all": planned.total_bytes,
        }
        fits = {f"{size:g}": planned.fits(size * 1e9) for size in options.hbm}
        print_json({"terms": planned.terms, "bytes": totals, "fits": fits})
        return 0
    columns = ("term", "size", "bytes", "share")
    write(f"{planned.title}\n")
    print_table("", columns, table_rows(planned))
    write("".join(f"{line}\n" for line in planned.notes))
    for size in options.hbm:
        print(f"\n{size:g} GB a device: {verdict(planned, size * 1e9)}")
    return 0


def _vision(options: argparse.Namespace, config: Any) -> Any:
    """The vision tower to count: that of a folder that has one, or where it is asked for."""
    from ..checkpoint.reader import vision_of
    from ..config.released import RELEASED
    from ..config.vision import VisionConfig

    name = options.config or options.model or "k3.1"
    if name in RELEASED:
        return VisionConfig.k3() if options.vision else None
    return vision_of(name, config, options.vision or (None if os.path.isdir(name) else False))


# The best mesh and placement for given GPUs.


def _choose(options: argparse.Namespace, name: str, config: Any) -> int:
    """Print the meshes and placements that move the fewest bytes, and the command of the best."""
    from ..planning.choose import choose

    gpus = options.gpus
    if options.hbm:
        raise CommandError("--gpus says how much memory a device has: leave --hbm out")
    if options.drafts:
        raise CommandError("--gpus ranks decode steps: leave --drafts out, and plan the best one")
    if options.mesh and options.mesh[0] * options.mesh[1] != gpus.count:
        ranks = "x".join(map(str, options.mesh))
        raise CommandError(f"--mesh {ranks} is not a mesh of {gpus.count} GPUs")
    mesh = {"data": options.mesh[0], "model": options.mesh[1]} if options.mesh else None
    make_placement(options)  # refuses what cannot be, and options given twice
    found = choose(
        config, gpus.count, gpus.gigabytes * 1e9, batch=options.batch, context=options.context,
        dtype=options.dtype, mesh=mesh, options=dict(options.place or []),
    )  # fmt: skip
    if options.json:
        for candidate in found.fitting:
            print_json(_as_json(candidate))
        return 0
    _print_choice(options, name, found)
    return 0


def _print_choice(options: argparse.Namespace, name: str, found: Any) -> None:
    from ..runtime.fitting import verdict

    gpus = options.gpus
    context = found.smallest.context
    requests = f"{options.batch:,} request{'s' if options.batch > 1 else ''}"
    title = f"{name}, {requests} of {context:,} tokens, {options.dtype}, on {gpus}"
    counted = f"{found.fit + found.too_large} meshes and placements are valid, {found.fit} fit"
    if not found.fitting:
        write(f"{title}: {counted}. The one that needs the least memory:\n\n")
        place = _place_text(found.smallest) or "default placement"
        write(f"--mesh {_mesh_text(found.smallest)} {place}\n")
        write(f"{verdict(found.smallest, gpus.gigabytes * 1e9)}\n")
        return
    columns = ("mesh", "placement", "holds", "reads and writes", "sends", "moves a step")
    rows = [_row(candidate) for candidate in found.fitting[:SHOWN]]
    print_table(title, columns, rows)
    write(f"{counted} beside 2 GB for temporaries. {RANKING}\n\n{_command(options, found)}\n")


def _row(candidate: Any) -> tuple[str, ...]:
    moved = candidate.moved
    sizes = (candidate.plan.total_bytes, moved.memory, moved.sent, moved.total)
    place = _place_text(candidate.plan).replace("--place ", "") or "default"
    return (_mesh_text(candidate.plan), place, *map(bytes_text, sizes))


def _command(options: argparse.Namespace, found: Any) -> str:
    """The command that runs the best one, a line for each node."""
    from ..config.released import RELEASED

    best, nodes = found.fitting[0].plan, options.gpus.nodes
    folder = options.model or options.config
    folder = folder if folder and folder not in RELEASED else "/path/to/checkpoint"
    words = f"kimi-jax generate --model {folder} --mesh {_mesh_text(best)} {_place_text(best)}"
    words = f"{words.rstrip()} --dtype {options.dtype} --slots {min(options.batch, 256)}"
    words += " --input prompts.jsonl --output replies.jsonl"
    if nodes == 1:
        return words
    each = f"{words} --coordinator HOST:8476 --processes {nodes} --process-id"
    title = f"one process on each node, HOST is the first of them:\n\n{each} 0\n"
    return title + f"and the same with --process-id {', '.join(map(str, range(1, nodes)))}"


def _mesh_text(planned: Any) -> str:
    return f"{planned.data}x{planned.model}"


def _place_text(planned: Any) -> str:
    """The options of a placement; empty for the default."""
    parts = []
    for field in dataclasses.fields(planned.placement):
        value = getattr(planned.placement, field.name)
        if value != field.default:
            spelled = ",".join(value) if isinstance(value, tuple) else value
            parts.append(f"--place {field.name}={spelled}")
    return " ".join(parts)


def _as_json(candidate: Any) -> dict[str, Any]:
    planned, moved = candidate.plan, candidate.moved
    sizes = {"held": planned.total_bytes, "memory": moved.memory, "sent": moved.sent}
    return {"mesh": planned.mesh, "placement": _place_text(planned), "bytes": sizes}
