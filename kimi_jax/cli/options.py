"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CommandError, InputError, meant, shown
from ..files import SHIPPED as SHIPPED
from ..generation.options import option_help
from ..parallel.choices import ABOUT, CHOICES, PADS, values_text
from ..planning.gpus import Gpus, read_gpus

LARGEST = 2**31 - 1  # of a whole number: int32 holds it
MOST_DEVICES = 1024  # that JAX simulates in one process within seconds
DTYPES = ("float32", "bfloat16", "float64")
MOST_GIGABYTES = 1e9  # of a device: above any
SHIPPED_MODEL = "the small trained model of the package"
RENAMED = {  # what an option is called elsewhere, or was
    "--max-tokens": "--max-new-tokens",
    "--num-tokens": "--max-new-tokens",
    "--data": "--mesh DxM, data-parallel ranks first,",
    "--tp": "--mesh 1xN",
    "--tensor-parallel-size": "--mesh 1xN",
    "--users": "--batch",
    "--prompts": "--input",
}
_PLACE_COLUMN = 35  # where help says what an option of a placement does
HELP = {"dtype": "type of weights and activations"}


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command: the function that runs it, a line about it, and its examples."""
    command = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    most = whole(1, MOST_DEVICES)
    command.add_argument("--devices", type=most, metavar="N", help="simulate N devices on the CPU")
    return command


def add_mesh(command: argparse.ArgumentParser) -> None:
    """The options of commands that shard a model over devices and processes."""
    group = command.add_argument_group("devices and processes")
    add = group.add_argument
    help_mesh = "D data-parallel x M model-parallel ranks (1 x all GPUs, or 1 x --devices)"
    add("--mesh", type=mesh_shape, metavar="DxM", help=help_mesh)
    help_chunk = "prefill in chunks of at most T tokens of a request (512 on CPU, else 4096)"
    add("--chunk", type=positive, metavar="T", help=help_chunk)
    help_coordinator = "address of process 0, for a mesh over several processes"
    add("--coordinator", metavar="HOST:PORT", help=help_coordinator)
    add("--processes", type=positive, metavar="N", help="number of processes")
    add("--process-id", type=whole(0), metavar="I", help="number of this process, from 0 on")
    add_place(command)


def add_place(command: argparse.ArgumentParser) -> None:
    """The option of commands that partition a model, and what it takes."""
    lines = []
    for name, about in ABOUT.items():
        spelled = f"  {name}={values_text(name)}"
        if len(spelled) > _PLACE_COLUMN - 2:
            spelled += "\n"
            lines.append(f"{spelled}{'':<{_PLACE_COLUMN}}{about}")
        else:
            lines.append(f"{spelled:<{_PLACE_COLUMN}}{about}")
    title = "how the model is partitioned (docs/parallelism.md), the first value is the default:"
    group = command.add_argument_group("placement", "\n".join([title, *lines]))
    help_place = "one of these, such as keys=helix or pad=heads,vocab; may be repeated"
    metavar = "NAME=VALUE"
    group.add_argument(
        "--place", action="append", type=placement_option, metavar=metavar, help=help_place
    )


def add_model(command: argparse.ArgumentParser, has_path: bool = True) -> None:
    """The checkpoint folder: `--model`, also without its name where `has_path`."""
    about = f"checkpoint folder ({SHIPPED_MODEL})"
    if has_path:
        command.add_argument("path", nargs="?", type=Path, metavar="PATH", help=about)
        about = "the same"
    command.add_argument("--model", type=Path, metavar="PATH", help=about)


def model_folder(options: argparse.Namespace) -> Path:
    """The folder that `add_model` asked for."""
    path = vars(options).get("path")
    if path is not None and options.model is not None:
        raise CommandError(f"the model is given twice, {shown(str(path))} and --model")
    return path or options.model or SHIPPED


def add_sampling(
    command: argparse.ArgumentParser, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """How tokens are sampled and where a reply ends, with the defaults of a command."""
    add = command.add_argument_group("sampling").add_argument
    help_new = f"{option_help('max_new_tokens')} ({max_new_tokens})"
    add("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help=help_new)
    help_temperature = f"{option_help('temperature')} ({temperature:g})"
    add("--temperature", type=number, default=temperature, metavar="T", help=help_temperature)
    help_top_p = f"{option_help('top_p')} ({top_p:g})"
    add("--top-p", type=number, default=top_p, metavar="P", help=help_top_p)
    add("--top-k", type=whole(0), default=0, metavar="K", help=option_help("top_k"))
    add("--min-p", type=number, default=0.0, metavar="P", help=option_help("min_p"))
    add(
        "--repetition-penalty",
        type=number,
        default=1.0,
        metavar="R",
        help=option_help("repetition_penalty"),
    )
    for name in ("frequency", "presence"):
        help_penalty = option_help(f"{name}_penalty")
        add(f"--{name}-penalty", type=number, default=0.0, metavar="R", help=help_penalty)
    add(
        "--min-new-tokens",
        type=whole(0),
        default=0,
        metavar="N",
        help=option_help("min_new_tokens"),
    )
    add("--seed", type=whole(0), default=0, metavar="N", help=option_help("seed"))
    add(
        "--stop",
        action="append",
        type=stop_text,
        metavar="TEXT",
        help=option_help("stop") + "; may be repeated",
    )
    help_dtype = f"{HELP['dtype']} (float32 on CPU, else bfloat16)"
    command.add_argument("--dtype", choices=DTYPES, help=help_dtype)


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_sampling` asked for, as options of a model's methods."""
    from ..runtime.sampling import Sample

    if 3.4e38 < options.temperature < math.inf:
        raise CommandError(f"--temperature {options.temperature:g} is more than a float32 holds")
    if options.min_new_tokens > options.max_new_tokens:
        raise CommandError(
            f"--min-new-tokens {options.min_new_tokens} is more than --max-new-tokens "
            f"{options.max_new_tokens}"
        )
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    rules = ("temperature", "top_k", "top_p", "min_p", *penalties)
    Sample(**{name: getattr(options, name) for name in rules})  # refuses what cannot be
    names = (*rules, "max_new_tokens", "min_new_tokens", "seed", "stop")
    return {name: getattr(options, name) for name in names}


class Once(argparse.Action):
    """Stores the value of an option, which may be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store a value, or raise `argparse.ArgumentError` for the second one."""
        if option_string:
            _refuse_second(self, namespace)
            if self.nargs is None and values == []:  # argparse drops the value of --option=--
                raise argparse.ArgumentError(self, "expected one argument, not '--'")
        setattr(namespace, self.dest, values)


class OnceFlag(argparse.Action):
    """Turns an option on, which may be given once."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=False, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Turn the option on, or raise `argparse.ArgumentError` the second time."""
        _refuse_second(self, namespace)
        setattr(namespace, self.dest, True)


class OnceSwitch(argparse.BooleanOptionalAction):
    """Turns an option on or off by --NAME or --no-NAME, of which one may be given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the option, or raise `argparse.ArgumentError` the second time."""
        _refuse_second(self, namespace)
        super().__call__(parser, namespace, values, option_string)


def _refuse_second(action: argparse.Action, namespace: argparse.Namespace) -> None:
    given = vars(namespace).setdefault("given", set())
    if action.dest in given:
        raise argparse.ArgumentError(action, "is given twice")
    given.add(action.dest)


# Values. Digits are those of ASCII: `int` also reads the digits of other scripts, and 1_000.


def whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """A reader of whole numbers in low..high."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,400}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not a whole number from {low} to {high}"
            )
        return int(text)

    return read


positive = whole(1)


def positives(text: str) -> list[int]:
    """Positive whole numbers with commas between them."""
    return [positive(part) for part in text.split(",")]


def number(text: str) -> float:
    """A number, which may be nan or inf: what an option means by it says its range."""
    if not text.isascii() or "_" in text or text != text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number")
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from error


def utf8_text(text: str) -> str:
    """Text of the command line. Bytes that the locale did not decode are read as UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode()
        except UnicodeError as error:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not UTF-8") from error


_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def stop_text(text: str) -> str:
    r"""Text that ends a reply, in which \n, \t, \r and \\ are read as the characters they name."""
    if not text:
        raise argparse.ArgumentTypeError("an empty stop string would stop at once")
    return re.sub(r"\\[ntr\\]", lambda found: _ESCAPES[found[0]], utf8_text(text))


def mesh_shape(text: str) -> tuple[int, int]:
    """The ranks of the axes data and model, spelled 2x4."""
    sizes = text.lower().split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not of the form 2x4")
    return positive(sizes[0]), positive(sizes[1])


def placement_option(text: str) -> tuple[str, Any]:
    """An option of `Placement` and its value, spelled NAME=VALUE or NAME=VALUE,VALUE. What a number
    may be is checked by `Placement`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not of the form NAME=VALUE")
    if name not in ABOUT:
        known = f"there are {', '.join(ABOUT)}{meant(name, ABOUT)}"
        raise argparse.ArgumentTypeError(f"no such option {shown(name)}, {known}")
    if name in ("pad", "expert_axes"):
        found = tuple(part for part in value.split(",") if part)
        wrong = next((part for part in found if name == "pad" and part not in PADS), None)
        if wrong is None and (name == "pad" or found in CHOICES[name]):
            return name, found
        raise argparse.ArgumentTypeError(_not_a_value(name, value if wrong is None else wrong))
    if name in CHOICES:
        if value in CHOICES[name]:
            return name, value
        raise argparse.ArgumentTypeError(_not_a_value(name, value))
    if not re.fullmatch("[0-9]{1,400}", value):
        raise argparse.ArgumentTypeError(f"{name} takes a whole number, got {shown(value)}")
    return name, int(value)


def _not_a_value(name: str, value: str) -> str:
    known = PADS if name == "pad" else CHOICES[name]
    return f"{name} takes {values_text(name)}, got {shown(value)}{meant(value, known)}"


def gpus(text: str) -> Gpus:
    """GPUs, spelled 8xH200, 2x8xH200 or 8x141."""
    try:
        return read_gpus(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def gigabytes(text: str) -> list[float]:
    """Sizes in GB with commas between them."""
    try:
        sizes = [number(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        sizes = []
    if not sizes or not all(0 < size <= MOST_GIGABYTES for size in sizes):
        message = f"{shown(text)} must be sizes in GB with commas between them"
        raise argparse.ArgumentTypeError(message)
    return sizes
