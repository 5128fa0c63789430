"""`kimi-jax bench`: measure prefill and decode."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CommandError, bytes_text
from .devices import (
    load_model,
    make_folder,
    make_mesh,
    make_placement,
    mesh_text,
    named_config,
    use_compilation_cache,
)
from .options import DTYPES, HELP, SHIPPED, add_command, add_mesh, positive, positives
from .output import print_json, print_table, write

EXAMPLES = """\
  kimi-jax bench                              9 layers of random weights
  kimi-jax bench --shape mini-dsa --prompt 2048 --batch 1 --dtype bfloat16
  kimi-jax bench --experts --devices 8 --mesh 1x8
  kimi-jax bench --rows --devices 8 --mesh 2x4 --place expert_axes=data,model
  kimi-jax bench --reduce --devices 8 --dtype bfloat16
  kimi-jax bench --context --shape mini-dsa   what a token costs behind 2,048 to 32,768 others
  kimi-jax bench --floor --json               beside what plain products and copies allow, by part
  kimi-jax bench --profile /tmp/profile       a chunk and some steps, for xprof or ui.perfetto.dev
  kimi-jax bench --compile k3.1               the released size, from shapes alone
  kimi-jax bench --compile k3.1 --devices 8 --prompt 4096

Times are medians; the first call of each kind is kept apart as compilation."""

_RUN_DEFAULTS = {"shape": "mini", "prompt": 512, "batch": [1, 8], "steps": 16}
_PROFILE_DEFAULTS = {"shape": "mini", "prompt": 512, "batch": [1], "steps": 4}
_FLOOR_DEFAULTS = {"shape": "mini", "prompt": None, "batch": None, "steps": 16}
_COMPILE_DEFAULTS = {
    **{"shape": None, "prompt": 1, "batch": [1], "steps": None, "context": [4096], "profile": None}
}


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "measure prefill and decode, or compile a step of any size without weights"
    command = add_command(commands, "bench", run, about, EXAMPLES)
    add = command.add_argument
    help_shape = "random weights of 9 layers, these with key selection, or the shipped model (mini)"
    add("--shape", choices=("mini", "mini-dsa", "shipped"), help=help_shape)
    help_dtype = f"{HELP['dtype']} (float32 on CPU, else bfloat16; with --compile bfloat16)"
    add("--dtype", choices=DTYPES, help=help_dtype)
    add("--prompt", type=positive, metavar="T", help="prompt tokens (512; with --compile 1)")
    add("--batch", type=positives, metavar="B,B", help="batch sizes (1,8)")
    add("--steps", type=positive, metavar="N", help="decode steps to time (16)")
    add("--json", action="store_true", help="print a line of JSON for each row")
    _add_measurements(command)
    add_mesh(command)


def _add_measurements(command: argparse.ArgumentParser) -> None:
    """What is measured instead of prefill and decode: at most one of these."""
    add = command.add_argument_group("instead of prefill and decode, one of").add_argument
    help_context = (
        "the time a token takes at the end of contexts of S tokens (2048,8192,32768), and the part "
        "of it that selects keys; with --compile, cache slots (4096)"
    )
    contexts = [2048, 8192, 32768]
    add("--context", type=positives, nargs="?", const=contexts, metavar="S,S", help=help_context)
    help_profile = "write a profile of one prefill chunk and some decode steps"
    add("--profile", type=Path, metavar="DIR", help=help_profile)
    help_floor = (
        "prompts, decode steps and eight rows beside the most that a large plain product and a "
        "plain copy of the same run allow, and the time of each part; in both types without --dtype"
    )
    add("--floor", action="store_true", help=help_floor)
    help_experts = "the batch size below which experts=local is faster than experts=exchange"
    add("--experts", action="store_true", help=help_experts)
    help_rows = "the batch size from which rows=sliced is faster than rows=full"
    add("--rows", action="store_true", help=help_rows)
    help_reduce = "the row count from which a ring all-reduce is faster than the backend's"
    add("--reduce", action="store_true", help=help_reduce)
    help_compile = "compile a step of k3, k3.1, or the config at a path, and run nothing"
    add("--compile", metavar="CONFIG", help=help_compile)


class Measured(NamedTuple):
    """What was measured: a table, and what it says about the options of a placement."""

    title: str
    columns: Sequence[str]
    rows: list
    advice: str = ""


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    measure = _measurement(options)
    _set_defaults(options)
    if options.dtype == "float64" and (options.compile or options.shape != "shipped"):
        raise CommandError("--dtype float64 is for --shape shipped")
    measured = measure(options, make_mesh(options), make_placement(options))
    if options.json:
        for row in measured.rows:
            print_json(dict(zip(measured.columns, row, strict=True)))
        return 0
    columns = [column.replace("_", " ") for column in measured.columns]
    rows = [list(map(_cell_text, measured.columns, row)) for row in measured.rows]
    print_table(measured.title, columns, rows)
    write(measured.advice)
    return 0


def _measurement(options: argparse.Namespace) -> Callable[..., Measured]:
    """The function of what was asked for; prefill and decode where nothing was."""
    functions = {"compile": _compiled, "experts": _experts, "rows": _rows, "reduce": _reductions}
    if not options.compile:  # which has a context of its own
        functions |= {"context": _contexts, "profile": _profile, "floor": _against_floor}
    asked = [name for name in functions if getattr(options, name)]
    if len(asked) > 1:
        raise CommandError(f"--{' and --'.join(asked)}: one at a time")
    return functions[asked[0]] if asked else _speed


def _set_defaults(options: argparse.Namespace) -> None:
    """Fill in what was not given. Refuse options that --compile, which runs nothing, has no use
    for.
    """
    defaults = _PROFILE_DEFAULTS if options.profile else _RUN_DEFAULTS
    defaults = _FLOOR_DEFAULTS if options.floor else defaults
    defaults = _COMPILE_DEFAULTS if options.compile else defaults
    unused = [
        name
        for name, value in defaults.items()
        if value is None and getattr(options, name) is not None
    ]
    if unused:
        why = "--compile runs nothing" if options.compile else "--floor has rows of its own"
        raise CommandError(f"{why} and takes no --{', --'.join(unused)}")
    if options.compile and options.context and len(options.context) > 1:
        raise CommandError(
            f"--compile takes one --context, got {','.join(map(str, options.context))}"
        )
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)


def _cell_text(column: str, value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return bytes_text(int(value)) if column.endswith("_bytes") else str(value)


# What is measured.


def _speed(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    model = _model(options, mesh, place)
    title = f"{options.shape}, {model.dtype}, {mesh_text(mesh)}"
    rows = list(measure.speed(model, options.prompt, options.batch, options.steps))
    return Measured(title, measure.SPEED_COLUMNS, rows)


def _contexts(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    model = _model(options, mesh, place)
    title = f"contexts of {options.shape}, {model.dtype}, {mesh_text(mesh)}"
    rows = list(measure.contexts(model, options.batch[0], options.context))
    return Measured(title, measure.CONTEXT_COLUMNS, rows)


def _against_floor(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    dtypes = [options.dtype] if options.dtype else ["float32", "bfloat16"]
    rows = []
    for dtype in dtypes:
        options.dtype = dtype
        rows += measure.against_floor(_model(options, mesh, place), options.steps)
    title = f"{options.shape} beside plain products and copies, {mesh_text(mesh)}"
    return Measured(title, measure.FLOOR_COLUMNS, rows)


def _profile(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    folder = options.profile
    make_folder("--profile", folder)
    model = _model(options, mesh, place)
    T = min(options.prompt, model.chunk)
    row = measure.profile(model, options.batch[0], T, options.steps, folder)
    trace = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=os.path.getmtime)
    advice = (
        f"parts by name: pip install xprof tensorboard; tensorboard --logdir {folder}\n"
        f"times alone: open {trace} at https://ui.perfetto.dev\n"
    )
    title = f"profile of {options.shape}, {mesh_text(mesh)}"
    return Measured(title, measure.PROFILE_COLUMNS, [row], advice)


def _compiled(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from ..model.mxfp4 import expert_quantization
    from ..runtime.probes import compile_step
    from ..runtime.program import make_program
    from . import measure

    config = named_config(options.compile)
    dtype = options.dtype or "bfloat16"
    quantization = expert_quantization(config.quantized)
    program = make_program(config, mesh, place, dtype, quantization=quantization, scan=True)
    slots = min(options.context[0], config.max_positions)
    B = options.batch[0]
    T = options.prompt
    title = f"a step of {options.compile}, {B} x {T} tokens, {slots} slots, {mesh_text(mesh)}"
    use_compilation_cache()
    compiled, seconds = compile_step(program, B, T, slots)
    sizes = compiled.memory_analysis()
    row = (*seconds.values(), sizes.argument_size_in_bytes, sizes.temp_size_in_bytes)
    return Measured(title, measure.COMPILE_COLUMNS, [row])


def _experts(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    if mesh.size == 1:
        raise CommandError("--experts needs several devices: give --devices or --mesh")
    rows = list(measure.experts(_config(options), mesh, place, options.dtype))
    below = measure.local_below(rows)
    place = f'Placement(experts="auto", local_below={below})'
    advice = f"here: {place}, or --place experts=auto --place local_below={below}\n"
    title = f"experts of {options.shape}, {mesh_text(mesh)}"
    return Measured(title, measure.EXPERTS_COLUMNS, rows, advice)


def _rows(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    if mesh.shape["model"] == 1:
        raise CommandError("--rows slices over several model ranks: give --devices or --mesh")
    rows = list(measure.rows(_config(options), mesh, place, options.dtype))
    first = measure.crossover(rows)
    if first is None:
        advice = 'here: slicing is not faster; keep Placement(rows="full")\n'
    elif first == 0:
        advice = 'here: slicing is always faster; Placement(rows="sliced")\n'
    else:
        place = f'Placement(rows="auto", sliced_from={first})'
        advice = f"here: {place}, or --place rows=auto --place sliced_from={first}\n"
    title = f"rows of {options.shape}, {mesh_text(mesh)}"
    return Measured(title, measure.ROWS_COLUMNS, rows, advice)


def _reductions(options: argparse.Namespace, mesh: Any, place: Any) -> Measured:
    from . import measure

    if mesh.shape["model"] == 1:
        raise CommandError("--reduce sums over several model ranks: give --devices or --mesh")
    if options.dtype == "float64":
        raise CommandError("--reduce measures float32 and bfloat16")
    width = _config(options).hidden
    rows = list(measure.reductions(width, mesh, options.dtype))
    ring = measure.ring_from(rows)
    if ring is None:
        advice = "here: ring_bf16 is not faster than sum; leave prefill_ring_rows at 0\n"
    else:
        count, pieces = ring
        more = f", ring_pieces={pieces}" if pieces > 1 else ""
        place = f'Placement(prefill_reduce="ring_bf16", prefill_ring_rows={count}{more})'
        advice = f"here: {place}\n"
    title = f"sums of rows of {width}, {mesh_text(mesh)}"
    return Measured(title, measure.REDUCE_COLUMNS, rows, advice)


# The model that is measured.


def _model(options: argparse.Namespace, mesh: Any, place: Any) -> Any:
    """The model of --shape. Refuses more tokens than its context holds."""
    from . import measure

    config = _config(options)
    prompt = max(measure.FLOOR_PROMPTS) if options.floor else options.prompt
    needed = prompt + options.steps + 1  # the first step is not timed
    said = f"--prompt {prompt} and --steps {options.steps} need"
    if options.context:
        needed = max(options.context)
        said = f"--context {needed} needs"
    if needed > config.max_positions:
        raise CommandError(
            f"{said} a context of {needed} tokens, and that of --shape {options.shape} is "
            f"{config.max_positions}"
        )
    use_compilation_cache()
    if options.shape == "shipped":
        return load_model(SHIPPED, options)
    model = measure.random_model(config, mesh, place, options.dtype)
    return dataclasses.replace(model, chunk=options.chunk or model.chunk)


def _config(options: argparse.Namespace) -> Any:
    from ..config.config import Config
    from . import measure

    if options.shape == "shipped":
        return Config.from_hf(SHIPPED)
    return measure.mini(options.shape == "mini-dsa")
