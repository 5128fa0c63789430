"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CommandError

SHIPPED = Path(__file__).parents[1] / "shipped"
DTYPES = ("float32", "bfloat16", "float64")
_MOST_GIGABYTES = 1e9  # of a device: above any
SHIPPED_MODEL = "the small model of the package"
HELP = {
    "temperature": "divides the logits before a token is drawn; 0 takes the best token",
    "top-p": "draw from the fewest best tokens that together have probability P",
    "top-k": "draw from the K best tokens (0: all)",
    "penalty": "divide what tokens already used score by R (1: not)",
    "min-p": "draw no token less than P times as probable as the best one (0: all)",
    "seed": "start of the random draws: the same seed draws the same tokens (0)",
    "dtype": "number type of the computation",
}


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command: the function that runs it, one line about it, and its examples."""
    command = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--devices", type=positive, metavar="N", help="run on N CPU devices, made by JAX"
    )
    return command


def add_mesh(command: argparse.ArgumentParser) -> None:
    """The options of commands that spread a model over devices and processes."""
    add = command.add_argument_group("devices and processes").add_argument
    add(
        "--mesh",
        type=mesh_shape,
        metavar="DxM",
        help="D data x M model ranks (1 x all GPUs or --devices)",
    )
    add_place(command)
    add("--chunk", type=positive, metavar="T", help="most tokens of a row in a prefill step")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, for several processes")
    add("--processes", type=positive, metavar="N", help="how many processes run together")
    add("--process-id", type=int, metavar="I", help="which of them this one is, from 0 on")


def add_place(command: argparse.ArgumentParser) -> None:
    """The option of commands that partition a model."""
    command.add_argument(
        "--place",
        action="append",
        type=name_and_value,
        metavar="NAME=VALUE",
        help="an option of Placement, such as experts=local or pad=heads,vocab; may be repeated",
    )


def add_sampling(
    command: argparse.ArgumentParser, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """How tokens are drawn and where a reply ends, with the defaults of a command."""
    add = command.add_argument
    said = f"most tokens to add ({max_new_tokens})"
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=said)
    said = f"{HELP['temperature']} ({temperature:g})"
    add("--temperature", type=float, default=temperature, metavar="T", help=said)
    said = f"{HELP['top-p']} ({top_p:g}; 1: all)" if top_p < 1 else f"{HELP['top-p']} (1: all)"
    add("--top-p", type=float, default=top_p, metavar="P", help=said)
    add("--top-k", type=int, default=0, metavar="K", help=HELP["top-k"])
    add("--min-p", type=float, default=0.0, metavar="P", help=HELP["min-p"])
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=HELP["penalty"])
    add("--min-new-tokens", type=int, default=0, metavar="N", help="no end before so many (0)")
    add("--seed", type=int, default=0, metavar="N", help=HELP["seed"])
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--dtype", choices=DTYPES, help=f"{HELP['dtype']} (float32 on CPU, else bfloat16)")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_sampling` asked for, as options of a model's methods."""
    from ..runtime.sampling import Sample

    if 3.4e38 < options.temperature < math.inf:
        raise CommandError(f"--temperature {options.temperature:g} is more than a float32 holds")
    o = options
    sampling = Sample(o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty)
    names = ("max_new_tokens", "min_new_tokens", "seed", "stop")
    own = {name: getattr(options, name) for name in names}
    return {"sampling": sampling, **own}


def positive(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positives(text: str) -> list[int]:
    """Positive whole numbers with commas between them."""
    return [positive(part) for part in text.split(",")]


def mesh_shape(text: str) -> tuple[int, int]:
    """The ranks of the axes data and model, spelled 2x4."""
    sizes = text.lower().split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2x4")
    return positive(sizes[0]), positive(sizes[1])


def name_and_value(text: str) -> tuple[str, str]:
    """An option of `Placement` and its value, spelled NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def gigabytes(text: str) -> list[float]:
    """Sizes in GB with commas between them."""
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= _MOST_GIGABYTES for size in sizes):
        message = f"{text!r} must be sizes in GB with commas between them"
        raise argparse.ArgumentTypeError(message)
    return sizes
