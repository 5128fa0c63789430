"""The command `kimi-jax`: its parser, and the exit code of whatever it runs.

JAX reads the number of CPU devices once, when it starts. So options are parsed and `--devices` is
settled first, and what needs JAX is imported by the command that runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import CommandError, InputError
from . import bench, chat, devices, generate, inspect, plan

COMMANDS = (generate, chat, plan, inspect, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: failed for a reason that nobody foresaw. 2: the options, a prompt or the files
    cannot be used, and the message says why. 130: stopped by Ctrl-C.
    """
    try:
        options = make_parser().parse_args(argv)
        devices.set_devices(options.devices)
        devices.join_processes(options)
        devices.check_devices(options.devices)
        code = options.run(options)
        sys.stdout.flush()  # a closed pipe shows here and not when Python ends
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FloatingPointError as error:
        print(f"kimi-jax: error: {error}", file=sys.stderr)
        return 1
    except REFUSALS as error:
        print(f"kimi-jax: error: {error}", file=sys.stderr)
        return 2


REFUSALS = (  # the input is at fault
    InputError,
    NotImplementedError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class Parser(argparse.ArgumentParser):
    """Reports bad options in the way every other refusal is reported."""

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError`, where argparse would end the program."""
        raise CommandError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the program once the help text is written."""
        sys.stdout.flush()  # as in `main`
        super().exit(status, message)


def make_parser() -> Parser:
    """The parser of all commands; each command's module adds its own options."""
    parser = Parser(
        prog="kimi-jax",
        description="Kimi K3 and K3.1-Pro text decoders in JAX.",
        epilog="kimi-jax COMMAND --help explains a command with examples.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
