"""The command `kimi-jax`: its parser, and the exit code of whatever it runs.

JAX reads the number of CPU devices once, when it starts. So options are parsed and `--devices` is
settled first, and what needs JAX is imported by the command that runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..errors import CommandError, InputError, PromptError, meant, shortened, shown
from ..waiting import end_process
from . import bench, cache, devices, generate, inspect, plan
from .chat import command as chat
from .options import RENAMED, Once, OnceFlag
from .output import prepare_streams, print_error, silence_output
from .texts import score, tokens

EPILOG = """\
kimi-jax COMMAND --help explains a command with examples. A first try, with the small model of the
package:

  kimi-jax generate "Alice was beginning to"
  kimi-jax chat"""
COMMANDS = (generate, chat, score, tokens, plan, inspect, bench, cache)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: an unexpected failure. 2: the options, a prompt or the files
    cannot be used, and the message says why. 130: stopped by Ctrl-C.

    Without `argv`, as the command itself, an interrupted process ends here, and so does one in
    which a thread still compiles: XLA would crash when Python ends.
    """
    code, reason = _run(argv)
    if reason:
        devices.end_processes(code, reason)
    if argv is None and (code == 130 or devices.is_compiling()):
        end_process(code)
    return code


def _run(argv: Sequence[str] | None) -> tuple[int, str]:
    """The exit code of a command, and why it ended early if it did."""
    try:
        prepare_streams()
        parser = make_parser()
        options = parser.parse_args(argv)
        if "run" not in options:
            parser.print_help()
            sys.stdout.flush()
            return 0, ""
        with _naming_help(options.prog):
            devices.set_devices(options.devices)
            devices.join_processes(options)
            devices.check_devices(options.devices)
            code = options.run(options)
        sys.stdout.flush()  # a closed pipe shows here and not when Python ends
        return code, f"failed with exit code {code}" if code else ""
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130, "was interrupted"
    except BrokenPipeError:  # whoever reads the output has enough of it
        silence_output()
        return 0, "ended because its output is no longer read"
    except FloatingPointError as error:
        print_error(error)
        return 1, f"failed: {error}"
    except (InputError, NotImplementedError) as error:
        print_error(error)
        return 2, f"failed: {error}"
    except OSError as error:
        if error.filename is not None:  # of a file that was named
            print_error(error)
            return 2, f"failed: {error}"
        print_error(f"output cannot be written: {error.strerror}")  # a full disk
        silence_output()
        return 1, f"failed: {error}"


@contextlib.contextmanager
def _naming_help(prog: str) -> Iterator[None]:
    """What is wrong with options is told with the help that explains them, as by the parser."""
    try:
        yield
    except (CommandError, PromptError) as error:
        if "--" not in str(error) and isinstance(error, CommandError):
            raise
        raise CommandError(f"{error} (see {prog} --help)") from error


class Parser(argparse.ArgumentParser):
    """Reports bad options in the way every other refusal is reported, with the help that explains
    them and the name that was meant; options given twice too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in (None, "store"):
            self.register("action", action, Once)
        self.register("action", "store_true", OnceFlag)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and raise `CommandError` for arguments that this command does not take; argparse
        would leave them to the parser of all commands, which cannot say what was meant.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = [word.partition("=")[0] for word in unknown]
            hints = (self._hint(name) for name in given if name.startswith("-"))
            hint = next((hint for hint in hints if hint), "")
            self.error(f"unrecognized arguments: {shortened(' '.join(unknown), 200)}{hint}")
        vars(options).setdefault("prog", self.prog)  # that of the command, whose parser ends first
        return options, unknown

    def _hint(self, name: str) -> str:
        moved = RENAMED.get(name)
        if moved and moved.split()[0] in self._option_string_actions:
            return f"; it is {moved} here"
        return meant(name, [known for known in self._option_string_actions if known[:2] == "--"])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        kind = "command" if action.dest == argparse.SUPPRESS else "choice"
        message = f"no such {kind} {shown(value)}, there are {', '.join(names)}"
        raise argparse.ArgumentError(action, message + meant(value, names))

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError`, where argparse would end the program."""
        raise CommandError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the program once the help text is written."""
        sys.stdout.flush()  # as in `main`
        super().exit(status, message)


class Version(argparse.Action):
    """Prints the version of the package and ends; looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and end."""
        from importlib.metadata import version

        print(f"kimi-jax {version('kimi-jax')}")
        parser.exit()


def make_parser() -> Parser:
    """The parser of all commands; each command's module adds its own options."""
    parser = Parser(
        prog="kimi-jax",
        description="Kimi K3 and K3.1-Pro in JAX: text and images to text.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--version", nargs=0, action=Version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
