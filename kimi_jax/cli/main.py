"""The command `kimi-jax`: generate text, chat, look into a checkpoint folder, measure speed.

JAX reads the number of CPU devices once, when it starts. So options are parsed and `--devices` is
settled first, and what needs JAX is imported by the command that runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

SHIPPED = Path(__file__).parents[1] / "shipped"
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


class Refused(ValueError):
    """A command line that cannot run as it was given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: done. 1: failed for a reason that nobody foresaw. 2: the options, a prompt or the files
    cannot be used, and the message says why. 130: stopped by Ctrl-C.
    """
    try:
        options = _parser().parse_args(argv)
        _set_devices(options.devices)
        _join(options)
        _check_devices(options.devices)
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
    except _refusals() as error:
        print(f"kimi-jax: error: {error}", file=sys.stderr)
        return 2


def _refusals() -> tuple[type[Exception], ...]:
    """What says that the input is at fault."""
    from ..errors import InputError

    files = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    return (Refused, InputError, NotImplementedError, *files)


# Options.


class _Parser(argparse.ArgumentParser):
    """Reports bad options in the way every other refusal is reported."""

    def error(self, message: str) -> Any:
        raise Refused(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # of a help text, as in `main`
        super().exit(status, message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="kimi-jax",
        description="Kimi K3 and K3.1-Pro text decoders in JAX.",
        epilog="kimi-jax COMMAND --help explains a command with examples.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_plan(commands)
    _add_inspect(commands)
    _add_bench(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, examples: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--devices", type=_positive, metavar="N", help="run on N CPU devices, made by JAX"
    )
    return command


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--place",
        action="append",
        type=_pair,
        metavar="NAME=VALUE",
        help="an option of Placement, such as experts=local or pad=heads,vocab; may be repeated",
    )


def _add_mesh(command: argparse.ArgumentParser) -> None:
    """The options of commands that spread a model over devices and processes."""
    add = command.add_argument_group("devices and processes").add_argument
    add(
        "--mesh",
        type=_mesh_sizes,
        metavar="DxM",
        help="D data x M model ranks (1 x all GPUs or --devices)",
    )
    _add_place(command)
    add("--chunk", type=_positive, metavar="T", help="most tokens of a row in a prefill step")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens, for several processes")
    add("--processes", type=_positive, metavar="N", help="how many processes run together")
    add("--process-id", type=int, metavar="I", help="which of them this one is, from 0 on")


def _add_generate(commands: Any) -> None:
    command = _add_command(
        commands, "generate", _generate, "continue one prompt or several", _GENERATE_EXAMPLES
    )
    _add_mesh(command)
    add = command.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input")
    add("--model", type=Path, default=SHIPPED, metavar="PATH", help=f"checkpoint folder ({_OWN})")
    _add_sampling(command, max_new_tokens=64, temperature=0.0, top_p=1.0)
    add("--logprobs", type=int, metavar="N", help="report log-probabilities and the N best tokens")
    add("--tokens", action="store_true", help="prompts are token ids with commas between them")
    add("--slots", type=int, default=8, metavar="N", help="prompts that decode together (8)")
    add("--json", action="store_true", help="print a line of JSON for each completion")
    add("--verbose", action="store_true", help="say on standard error what happens to each prompt")


def _add_chat(commands: Any) -> None:
    from ..generation.chat import EFFORTS, MAX_NEW_TOKENS, TEMPERATURE, TOP_P

    command = _add_command(commands, "chat", _chat, "hold a conversation", _CHAT_EXAMPLES)
    _add_mesh(command)
    add = command.add_argument
    add("path", nargs="?", type=Path, default=SHIPPED, metavar="PATH", help=f"folder ({_OWN})")
    add("--system", metavar="TEXT", help="a system prompt")
    add(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the model think before it answers (on)",
    )
    add("--thinking-effort", choices=EFFORTS, help="tell the model how much to think (nothing)")
    _add_sampling(command, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)


def _add_sampling(
    command: argparse.ArgumentParser, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """How tokens are drawn and where a reply ends, with the defaults of a command."""
    add = command.add_argument
    said = f"most tokens to add ({max_new_tokens})"
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=said)
    said = f"{_SAYS['temperature']} ({temperature:g})"
    add("--temperature", type=float, default=temperature, metavar="T", help=said)
    said = f"{_SAYS['top-p']} ({top_p:g}; 1: all)" if top_p < 1 else f"{_SAYS['top-p']} (1: all)"
    add("--top-p", type=float, default=top_p, metavar="P", help=said)
    add("--top-k", type=int, default=0, metavar="K", help=_SAYS["top-k"])
    add("--min-p", type=float, default=0.0, metavar="P", help=_SAYS["min-p"])
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help=_SAYS["penalty"])
    add("--min-new-tokens", type=int, default=0, metavar="N", help="no end before so many (0)")
    add("--seed", type=int, default=0, metavar="N", help=_SAYS["seed"])
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--dtype", choices=_DTYPES, help=f"{_SAYS['dtype']} (float32 on CPU, else bfloat16)")


def _add_plan(commands: Any) -> None:
    command = _add_command(
        commands,
        "plan",
        _plan,
        "show what each device would hold, from shapes alone, and what fits",
        _PLAN_EXAMPLES,
    )
    add = command.add_argument
    add("config", nargs="?", default="k3.1", metavar="CONFIG", help="k3, k3.1, or a path (k3.1)")
    add("--model", type=_positive, default=1, metavar="N", help="ranks of the model axis (1)")
    add("--data", type=_positive, default=1, metavar="N", help="ranks of the data axis (1)")
    add("--batch", type=_positive, default=1, metavar="B", help="requests on the whole mesh (1)")
    add("--context", type=_positive, metavar="S", help="tokens of a request (4096)")
    add("--dtype", choices=_DTYPES, default="bfloat16", help=f"{_SAYS['dtype']} (bfloat16)")
    add("--hbm", type=_gigabytes, default=[], metavar="GB,GB", help="device memories to try, in GB")
    _add_place(command)
    add("--json", action="store_true", help="print bytes by term as a line of JSON")


def _add_inspect(commands: Any) -> None:
    add = _add_command(
        commands,
        "inspect",
        _inspect,
        "show what a checkpoint folder holds, from its headers alone",
        _INSPECT_EXAMPLES,
    ).add_argument
    add("path", nargs="?", type=Path, default=SHIPPED, metavar="PATH", help=f"folder ({_OWN})")
    add("--all", action="store_true", help="list every tensor instead of groups of them")


def _add_bench(commands: Any) -> None:
    command = _add_command(
        commands,
        "bench",
        _bench,
        "measure prefill and decode, or compile a step of any size without its weights",
        _BENCH_EXAMPLES,
    )
    _add_mesh(command)
    add = command.add_argument
    add("--shape", choices=("mini", "mini-dsa", "shipped"), help="what runs (mini)")
    add(
        "--dtype",
        choices=_DTYPES,
        help=f"{_SAYS['dtype']} (float32 on CPU, else bfloat16; with --compile bfloat16)",
    )
    add("--prompt", type=_positive, metavar="T", help="tokens of a prompt (512; to compile 1)")
    add("--batch", type=_positives, metavar="B,B", help="batch sizes (1,8)")
    add("--steps", type=_positive, metavar="N", help="decode steps to time (16)")
    add(
        "--context",
        type=_positives,
        nargs="?",
        const=[2048, 8192, 32768],
        metavar="S,S",
        help="time steps that end contexts of such lengths (2048,8192,32768), and the selection of "
        "keys in them; with --compile, slots of the step (4096)",
    )
    add("--profile", type=Path, metavar="DIR", help="write a profile of a chunk and some steps")
    add(
        "--experts",
        action="store_true",
        help="find the row count below which local experts are faster than exchanging rows",
    )
    add(
        "--rows",
        action="store_true",
        help="find the row count from which slicing rows over ranks is faster than keeping all",
    )
    add(
        "--reduce",
        action="store_true",
        help="find the row count from which a ring completes sums faster than the backend's sum",
    )
    add(
        "--compile",
        metavar="CONFIG",
        help="compile k3, k3.1, or the config at a path; runs nothing",
    )
    add("--json", action="store_true", help="print a line of JSON for each row")


_DTYPES = ("float32", "bfloat16", "float64")
_OWN = "the small model of the package"
_SAYS = {
    "temperature": "divides the logits before a token is drawn; 0 takes the best token",
    "top-p": "draw from the fewest best tokens that together have probability P",
    "top-k": "draw from the K best tokens (0: all)",
    "penalty": "divide what tokens already used score by R (1: not)",
    "min-p": "draw no token less than P times as probable as the best one (0: all)",
    "seed": "start of the random draws: the same seed draws the same tokens (0)",
    "dtype": "number type of the computation",
}
_GENERATE_EXAMPLES = """\
  kimi-jax generate "Alice was beginning to"
  kimi-jax generate "Alice was" --temperature 0.8 --top-p 0.95 --seed 3 --stop "\\n\\n"
  kimi-jax generate "The Queen" "The King" --json --logprobs 3
  cat letter.txt | kimi-jax generate - --model /path/to/checkpoint
  kimi-jax generate 12,7,300 --tokens
  kimi-jax generate "The King" --devices 8 --mesh 2x4 --place experts=local

One prompt is shown and continued as tokens come; its speed goes to standard error.
A line break at the end of standard input is not part of the prompt."""
_CHAT_EXAMPLES = """\
  kimi-jax chat /path/to/checkpoint
  kimi-jax chat /path/to/checkpoint --system "Answer in one sentence." --temperature 0.6
  kimi-jax chat /path/to/checkpoint --no-thinking < questions.txt > answers.txt

Thinking is shown dimmed. /help lists what can be typed beside text: /reset, /stats, /quit. A line
that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn. Ctrl-C ends
a reply, and leaves at the prompt, as Ctrl-D does. Without a terminal each line of standard input is
a turn; answers go to standard output, thinking to standard error. The small model of the package
has read one book and no conversation: it goes on in the manner of that book."""
_PLAN_EXAMPLES = """\
  kimi-jax plan k3.1 --model 8 --context 131072 --batch 64 --hbm 141,288
  kimi-jax plan k3.1 --data 4 --model 8 --place expert_axes=data,model --hbm 80
  kimi-jax plan /path/to/checkpoint --model 2 --place latent=sharded

Temporaries of a step, about 2 GB at full size, are not in the table; --hbm sets 2 GB aside."""
_INSPECT_EXAMPLES = """\
  kimi-jax inspect
  kimi-jax inspect /path/to/checkpoint
  kimi-jax inspect /path/to/checkpoint --all | grep indexer"""
_BENCH_EXAMPLES = """\
  kimi-jax bench                              9 layers of random weights
  kimi-jax bench --shape mini-dsa --prompt 2048 --batch 1 --dtype bfloat16
  kimi-jax bench --experts --devices 8 --mesh 1x8
  kimi-jax bench --rows --devices 8 --mesh 2x4 --place expert_axes=data,model
  kimi-jax bench --reduce --devices 8 --dtype bfloat16
  kimi-jax bench --context --shape mini-dsa   what a token costs behind 2,048 to 32,768 others
  kimi-jax bench --profile /tmp/profile       a chunk and some steps, for xprof or ui.perfetto.dev
  kimi-jax bench --compile k3.1               the released size, from shapes alone
  kimi-jax bench --compile k3.1 --devices 8 --prompt 4096

Times are medians; the first call of each kind is kept apart as compilation."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _mesh_sizes(text: str) -> tuple[int, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2x4")
    return _positive(sizes[0]), _positive(sizes[1])


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _gigabytes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} are no sizes in GB with commas between them")
    return sizes


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _set_devices(count: int | None) -> None:
    """Makes JAX start with `count` CPU devices; without a count, what XLA_FLAGS asks for stands."""
    if count is None:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    asked = re.findall(rf"{_DEVICES_FLAG}=(\S+)", flags)
    if asked and asked[-1] != str(count):
        raise Refused(f"--devices {count} contradicts XLA_FLAGS, which asks for {asked[-1]}")
    if not asked:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICES_FLAG}={count}".lstrip()
    import jax

    jax.config.update("jax_platforms", "cpu")


def _check_devices(count: int | None) -> None:
    import jax

    if count is not None and jax.local_device_count() != count:
        raise Refused(f"--devices {count} comes too late, JAX runs on {jax.local_device_count()}")


_PATIENCE = 20  # seconds without a sign of life after which the others take a process for dead


def _join(options: argparse.Namespace) -> None:
    """Joins the processes that run together; all but the first fall silent."""
    given = [vars(options).get(name) for name in ("coordinator", "processes", "process_id")]
    if all(value is None for value in given):
        return
    coordinator, count, number = given
    if coordinator is None or count is None or number is None:
        raise Refused("--coordinator, --processes and --process-id belong together")
    if not re.fullmatch(r"[^:\s]+:\d{1,5}", coordinator):
        raise Refused(f"--coordinator takes HOST:PORT, got {coordinator!r}")
    if not 0 <= number < count:
        raise Refused(f"--process-id {number} is not among the {count} processes, 0 to {count - 1}")
    import jax

    jax.distributed.initialize(
        coordinator,
        count,
        number,
        heartbeat_timeout_seconds=_PATIENCE,
        shutdown_timeout_seconds=_PATIENCE,
    )
    _keep_output(silent=number > 0)


def _keep_output(silent: bool) -> None:
    """Standard output takes what this command writes, and nothing where it is to be silent; what
    libraries write there themselves goes to standard error.
    """
    sys.stdout.flush()
    own = os.open(os.devnull, os.O_WRONLY) if silent else os.dup(1)
    os.dup2(own if silent else 2, 1)
    sys.stdout = open(own, "w", encoding=sys.stdout.encoding)  # noqa: SIM115 - until the end


def _say(line: str) -> None:
    """A remark beside the output, from the first of the processes."""
    import jax

    if jax.process_index() == 0:
        print(f"kimi-jax: {line}", file=sys.stderr)


def _load(path: Path, options: argparse.Namespace) -> Any:
    import jax

    import kimi_jax as kj

    _check_folder(path)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh, place = _mesh(options), _placement(options)
    with warnings.catch_warnings(record=True) as remarks:
        model = kj.load(path, mesh=mesh, placement=place, dtype=options.dtype, chunk=options.chunk)
    for remark in remarks:
        _say(f"note: {remark.message}")
    return model


def _mesh(options: argparse.Namespace) -> Any:
    """The mesh that was asked for; else all accelerators, or the CPU devices that were asked for,
    on the model axis.
    """
    import jax

    import kimi_jax as kj

    asked = options.devices or options.processes or jax.default_backend() != "cpu"
    data, model = options.mesh or (1, jax.device_count() if asked else 1)
    return kj.make_mesh(data, model)


def _placement(options: argparse.Namespace) -> Any:
    """The placement that `--place` spells: names with JSON values, plain words or a,b lists."""
    import kimi_jax as kj

    fields = {field.name: field.default for field in dataclasses.fields(kj.Placement)}
    values = {}
    for name, text in options.place or []:
        if name in values:
            raise Refused(f"--place {name}=... is given twice")
        if name not in fields:
            raise Refused(f"--place {name}=...: no such option, there are {', '.join(fields)}")
        if isinstance(fields[name], tuple):
            values[name] = tuple(part for part in text.split(",") if part)
        elif isinstance(fields[name], int) and not text.isdecimal():
            raise Refused(f"--place {name} takes a whole number, got {text!r}")
        else:
            values[name] = int(text) if isinstance(fields[name], int) else text
    return kj.Placement(**values)


def _keep_programs() -> None:
    """Compiled programs stay in the user's cache folder, so that a second run starts at once."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "kimi_jax" / "programs"))


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise Refused(f"{path}: {'a file and not a' if path.exists() else 'no such'} folder")
    if not (path / "config.json").is_file():
        raise Refused(f"{path}: no checkpoint, it has no config.json")


def _make_folder(option: str, folder: Path) -> None:
    """A folder that can be written, or a refusal."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = "a file and not a folder" if folder.is_file() else error.strerror
        raise Refused(f"{option} {folder}: {said}") from error
    if not os.access(folder, os.W_OK):
        raise Refused(f"{option} {folder}: no permission to write there")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, figures to the right, and no header where no column has a name."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(columns))
    table.title_justify, table.title_style = "left", "bold"
    for at, column in enumerate(columns):
        figures = all(re.match(r"[-\d.,e+]+( [kMGT]?B)?$", row[at]) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width to keep to
    with console.capture() as said:  # rich would end the program where a pipe is closed
        console.print(table)
    _write(said.get())


def _say_bytes(count: int) -> str:
    """Three figures and a unit, in powers of 1000."""
    power = min(4, int(math.log10(max(1, count))) // 3)
    return f"{count} B" if power == 0 else f"{count / 1000**power:.3g} {'kMGT'[power - 1]}B"


# generate


def _generate(options: argparse.Namespace) -> int:
    prompts = _prompts(options)
    settings = {**_settings(options), "logprobs": options.logprobs or False}
    _keep_programs()
    model = _load(options.model, options)
    if len(prompts) == 1 and not (options.json or options.verbose):
        _stream(model, prompts[0], settings)
        return 0
    done = model.generate(prompts, **settings, slots=options.slots, verbose=options.verbose)
    for prompt, completion in zip(prompts, done, strict=True):
        _print_completion(model, prompt, completion, options.json)
    return 1 if any(completion.error for completion in done) else 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What `_add_sampling` asked for, as options of a model's methods."""
    from ..runtime.sampling import Sample

    if 3.4e38 < options.temperature < math.inf:
        raise Refused(f"--temperature {options.temperature:g} is more than a float32 holds")
    o = options
    sampling = Sample(o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty)
    names = ("max_new_tokens", "min_new_tokens", "seed", "stop")
    own = {name: getattr(options, name) for name in names}
    return {"sampling": sampling, **own}


def _prompts(options: argparse.Namespace) -> list[str] | list[list[int]]:
    if not options.prompts:
        raise Refused("no prompt: give one, or - to read it from standard input")
    if options.logprobs is not None and options.logprobs < 1:
        raise Refused(f"--logprobs must be a positive number of tokens, got {options.logprobs}")
    if options.prompts.count("-") > 1:
        raise Refused("- stands for standard input, which can be one prompt only")
    texts = [sys.stdin.read().removesuffix("\n") if p == "-" else p for p in options.prompts]
    if not options.tokens:
        return texts
    try:
        return [[int(part) for part in text.split(",") if part.strip()] for text in texts]
    except ValueError as error:
        raise Refused("--tokens takes whole numbers with commas between them") from error


def _stream(model: Any, prompt: str | list[int], settings: dict[str, Any]) -> None:
    """Shows a prompt and its continuation as it comes, then on standard error how fast it came."""
    events = model.stream(prompt, **settings)  # a refusal comes before anything is shown
    _write(_readable(model, prompt))
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    begun = time.perf_counter()
    _compile(model, ids, settings)
    compiling = time.perf_counter() - begun
    logprobs, event = [], None
    for event in events:
        logprobs += [event.logprob] if event.logprob else []
        _write(event.text)
        if model.tokenizer is None and event.token is not None:
            _write(f",{event.token}")
    _write("\n")
    if logprobs:
        _print_logprobs(model, logprobs)
    assert event is not None
    usage = event.usage
    prefill = usage.prompt_tokens / usage.prefill_seconds
    decode = usage.generated_tokens / usage.decode_seconds
    _say(
        f"compiled in {compiling:.1f} s; {usage.prompt_tokens} prompt tokens, prefill "
        f"{prefill:.0f} tok/s; {usage.generated_tokens} new tokens, decode "
        f"{decode:.0f} tok/s; ended by {event.finish_reason}"
    )


def _compile(model: Any, ids: list[int], settings: dict[str, Any]) -> None:
    """Compiles what these ids will run, so that compiling is not counted into their speed.

    Each width of prompt piece runs once on its own, with room for as many tokens in all.
    """
    total = len(ids) + settings["max_new_tokens"]
    for width in {min(model.chunk, len(ids) - at) for at in range(0, len(ids), model.chunk)}:
        room = {**settings, "max_new_tokens": total - width}
        for _ in itertools.islice(model.stream(ids[:width], **room), 2):
            pass


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _readable(model: Any, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt) if model.tokenizer else ",".join(map(str, prompt))


def _print_completion(model: Any, prompt: Any, completion: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"prompt": prompt, **dataclasses.asdict(completion)}, ensure_ascii=False))
        return
    separator = "" if model.tokenizer else ","
    reply = completion.tokens if completion.text is None else completion.text
    print(_readable(model, prompt), _readable(model, reply), sep=separator)
    if completion.error:
        print(f"kimi-jax: error: {completion.error}", file=sys.stderr)
    if completion.logprobs:
        _print_logprobs(model, completion.logprobs)
    print()


def _print_logprobs(model: Any, logprobs: Sequence[Any]) -> None:
    def say(token: int) -> str:
        return repr(model.tokenizer.decode([token])) if model.tokenizer else str(token)

    rows = [
        (say(one.token), f"{one.logprob:.3f}", "  ".join(f"{say(i)} {p:.3f}" for i, p in one.top))
        for one in logprobs
    ]
    _print_table("log-probabilities in nats", ("token", "its own", "best"), rows)


# chat


def _chat(options: argparse.Namespace) -> int:
    from ..generation.chat import Markup
    from ..text.tokenizer import Tokenizer
    from .terminal import Conversation

    if options.processes and options.processes > 1:
        raise Refused("chat reads what one person types: with several processes use Model.chat")
    settings = _settings(options)
    _check_folder(options.path)
    has_text = Tokenizer.is_in(options.path)
    Markup.of(Tokenizer.from_folder(options.path) if has_text else None)  # before weights are read
    _keep_programs()
    model = _load(options.path, options)
    if options.path == SHIPPED:
        _say("note: the small model of the package has read one book and no conversation")
    settings |= {"thinking": options.thinking, "thinking_effort": options.thinking_effort}
    Conversation(model, options.system, **settings).run()
    return 0


# plan


def _plan(options: argparse.Namespace) -> int:
    from ..runtime.memory import plan, verdict

    config, place = _named_config(options.config), _placement(options)
    mesh = {"data": options.data, "model": options.model}
    if options.context is not None and options.context > config.max_positions:
        raise Refused(
            f"--context {options.context} is over the model's {config.max_positions} tokens"
        )
    made = plan(
        config, mesh, place, batch=options.batch, context=options.context, dtype=options.dtype
    )
    if options.json:
        totals = {"weights": made.weight_bytes, "state": made.state_bytes, "all": made.total_bytes}
        fits = {f"{size:g}": made.fits(size * 1e9) for size in options.hbm}
        print(json.dumps({"terms": made.terms, "bytes": totals, "fits": fits}))
        return 0
    print(made)
    for size in options.hbm:
        print(f"\n{size:g} GB a device: {verdict(made, size * 1e9)}")
    return 0


# inspect


def _inspect(options: argparse.Namespace) -> int:
    from ..checkpoint.reader import Checkpoint
    from ..config.config import Config

    _check_folder(options.path)
    config = Config.from_hf(options.path)
    with Checkpoint(options.path, config) as checkpoint:
        if options.all:
            for name, tensor in checkpoint.tensors.items():
                print(f"{name}  {_say_shape(tensor.shape)}  {tensor.dtype}  {tensor.shard}")
            return 0
        _print_table(f"{options.path}", ("", ""), list(_summary(checkpoint, config)))
        columns = ("part", "tensor", "count", "shape", "dtype", "bytes")
        _print_table("tensors", columns, list(_groups(checkpoint, config)))
    return 0


def _say_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _summary(checkpoint: Any, config: Any) -> Iterator[tuple[str, str]]:
    tensors = checkpoint.tensors.values()
    shards = len({tensor.shard for tensor in tensors})
    nbytes = sum(tensor.nbytes for tensor in tensors)
    yield "model", "K3.1, selects keys" if config.sparse else "K3"
    yield "weights", f"{_parameters(checkpoint, config):,} parameters"
    yield (
        "files",
        f"{len(tensors):,} tensors, {nbytes:,} bytes ({_say_bytes(nbytes)}), shards: {shards}",
    )
    yield "experts are", "MXFP4" if checkpoint.packed else "plain"
    yield "tokenizer", _say_tokenizer(checkpoint.folder, config)
    yield from _sizes(config)


def _parameters(checkpoint: Any, config: Any) -> int:
    """Weights of the model: two in a packed byte, none in a scale or in padding."""
    from ..checkpoint.reader import shapes

    return sum(
        math.prod(shape) * (2 if dtype == "uint8" else 1)
        for name, (shape, dtype) in shapes(config, checkpoint.packed).items()
        if ".experts.s_" not in name and not (name == "head" and config.tie_embeddings)
    )


def _say_tokenizer(folder: Path, config: Any) -> str:
    from ..text.tokenizer import Tokenizer

    if not Tokenizer.is_in(folder):
        return "none, prompts must be token ids"
    tokenizer = Tokenizer.from_folder(folder, config.vocab)
    return f"found, {tokenizer.vocab_size:,} ids of which {len(tokenizer.special_ids)} special"


def _sizes(config: Any) -> Iterator[tuple[str, str]]:
    kinds = ["M" if config.is_mla(i) else "K" for i in range(config.layers)]
    mlps = ["d" if config.is_dense(i) else "e" for i in range(config.layers)]
    yield "layers", f"{config.layers}, residual blocks of {config.residual_block}"
    yield "attention", f"{' '.join(kinds)}   (K: KDA, M: MLA)"
    yield "feed-forward", f"{' '.join(mlps)}   (d: dense, e: experts)"
    yield "width", f"{config.hidden:,}, dense {config.dense_ffn:,}"
    yield "vocabulary", f"{config.vocab:,}" + (", head tied" if config.tie_embeddings else "")
    yield "context", f"{config.max_positions:,} tokens"
    yield (
        "KDA",
        f"{config.kda_heads} heads, keys {config.kda_key_dim}, values {config.kda_value_dim}",
    )
    yield (
        "MLA",
        f"{config.heads} heads, keys {config.nope_dim} + {config.rope_dim}, values "
        f"{config.value_dim}, {config.latent_row} values cached a token",
    )
    if config.sparse:
        yield (
            "selection",
            f"{config.index_topk:,} keys by {config.index_heads} heads of {config.index_dim}",
        )
    yield (
        "experts",
        f"{config.active_experts} of {config.experts} and {config.shared_experts} shared, "
        f"latent {config.latent:,}, width {config.expert_ffn:,}",
    )


def _groups(checkpoint: Any, config: Any) -> Iterator[tuple[str, ...]]:
    """A row for all tensors of one role and form: part, name, count, shape, dtype, bytes."""
    counts: Counter[tuple] = Counter()
    nbytes: Counter[tuple] = Counter()
    for name, tensor in checkpoint.tensors.items():
        below = name.removeprefix(checkpoint.root)
        role = re.sub(r"(?<=\.)\d+(?=\.)", "*", below)
        group = (_part(below, config), role, _say_shape(tensor.shape), tensor.dtype)
        counts[group] += 1
        nbytes[group] += tensor.nbytes
    parts, last = [part for part, _ in _PARTS], ""
    for group in sorted(counts, key=lambda group: (parts.index(group[0]), group[1:])):
        part, role, shape, dtype = group
        count, size = f"{counts[group]:,}", _say_bytes(nbytes[group])
        yield "" if part == last else part, role.removeprefix("model."), count, shape, dtype, size
        last = part
    yield "all", "", f"{counts.total():,}", "", "", _say_bytes(nbytes.total())


_PARTS = (  # the first pattern found in a tensor's name says which part of the model it is
    ("embedding", r"embed_tokens"),
    ("head", r"^lm_head|^model\.norm"),
    ("residual", r"_res_(norm|proj)"),
    ("norms", r"layernorm\.weight$(?<!_a_layernorm\.weight)"),
    ("selection", r"\.indexer\."),
    ("MLA", r"\.MLA\."),
    ("KDA", r"\.self_attn\."),
    ("experts", r"\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.block_sparse_moe\."),
    ("dense", r"\.mlp\."),
    ("not used", r""),
)


def _part(name: str, config: Any) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and config.is_mla(int(layer[1])):
        name = name.replace(".self_attn.indexer.", ".indexer.").replace(".self_attn.", ".MLA.")
    return next(part for part, pattern in _PARTS if re.search(pattern, name))


# bench


_RUN_DEFAULTS = {"shape": "mini", "prompt": 512, "batch": [1, 8], "steps": 16}
_PROFILE_DEFAULTS = {"shape": "mini", "prompt": 512, "batch": [1], "steps": 4}
_COMPILE_DEFAULTS = {
    **{"shape": None, "prompt": 1, "batch": [1], "steps": None, "context": [4096], "profile": None}
}


def _bench(options: argparse.Namespace) -> int:
    ways = {"compile": _compiled, "experts": _experts, "rows": _rows, "reduce": _reduce}
    if not options.compile:
        ways |= {"context": _contexts, "profile": _profile}
    asked = [name for name in ways if getattr(options, name)]
    if len(asked) > 1:
        raise Refused(f"--{' and --'.join(asked)}: one at a time")
    _set_defaults(options)
    if options.dtype == "float64" and (options.compile or options.shape != "shipped"):
        raise Refused("--dtype float64 is for --shape shipped")
    mesh, place = _mesh(options), _placement(options)
    measure = ways[asked[0]] if asked else _speed
    title, columns, rows = measure(options, mesh, place)
    if options.json:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True))))
        return 0
    said = [[_say_cell(*cell) for cell in zip(columns, row, strict=True)] for row in rows]
    _print_table(title, [column.replace("_", " ") for column in columns], said)
    if options.experts:
        _advise(mesh, rows)
    if options.rows:
        _advise_rows(rows)
    if options.reduce:
        _advise_ring(rows)
    if options.profile:
        _advise_profile(options.profile)
    return 0


def _set_defaults(options: argparse.Namespace) -> None:
    """What was not given, by what is asked for; a compiled step is told of nothing that runs."""
    defaults = _PROFILE_DEFAULTS if options.profile else _RUN_DEFAULTS
    defaults = _COMPILE_DEFAULTS if options.compile else defaults
    idle = [n for n, value in defaults.items() if value is None and getattr(options, n) is not None]
    if idle:
        raise Refused(f"--compile runs nothing and takes no --{', --'.join(idle)}")
    if options.compile and options.context and len(options.context) > 1:
        raise Refused(f"--compile takes one --context, got {','.join(map(str, options.context))}")
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)


def _say_cell(column: str, value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _say_bytes(int(value)) if column.endswith("_bytes") else str(value)


def _compiled(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from ..runtime.program import make_program
    from . import measure as bench

    config, dtype = _named_config(options.compile), options.dtype or "bfloat16"
    program = make_program(config, mesh, place, dtype, packed=config.quantized, scan=True)
    slots = min(options.context[0], config.max_positions)
    (B, *_), T = options.batch, options.prompt
    title = f"a step of {options.compile}, {B} x {T} tokens, {slots} slots, {_say_mesh(mesh)}"
    compiled, seconds = bench.compile_step(program, B, T, slots)
    memory = compiled.memory_analysis()
    row = (*seconds.values(), memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    return title, bench.COMPILE_COLUMNS, [row]


def _speed(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    model = _bench_model(options, mesh, place)
    title = f"{options.shape}, {model.dtype}, {_say_mesh(mesh)}"
    rows = list(bench.speed(model, options.prompt, options.batch, options.steps))
    return title, bench.SPEED_COLUMNS, rows


def _bench_model(options: argparse.Namespace, mesh: Any, place: Any) -> Any:
    """The model that is measured, once its context is known to hold what it will be given."""
    from . import measure as bench

    config = _bench_config(options)
    needed, said = options.prompt + options.steps + 1, f"--prompt {options.prompt} and --steps "
    said += f"{options.steps} need"  # the first step is not timed
    if options.context:
        needed, said = max(options.context), f"--context {max(options.context)} needs"
    if needed > config.max_positions:
        raise Refused(
            f"{said} a context of {needed} tokens, and that of --shape {options.shape} is "
            f"{config.max_positions}"
        )
    if options.shape == "shipped":
        return _load(SHIPPED, options)
    model = bench.random_model(config, mesh, place, options.dtype)
    return dataclasses.replace(model, chunk=options.chunk or model.chunk)


def _contexts(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    model = _bench_model(options, mesh, place)
    title = f"contexts of {options.shape}, {model.dtype}, {_say_mesh(mesh)}"
    rows = list(bench.contexts(model, options.batch[0], options.context))
    return title, bench.CONTEXT_COLUMNS, rows


def _profile(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    _make_folder("--profile", options.profile)
    model = _bench_model(options, mesh, place)
    T = min(options.prompt, model.chunk)
    row = bench.profile(model, options.batch[0], T, options.steps, options.profile)
    return f"profile of {options.shape}, {_say_mesh(mesh)}", bench.PROFILE_COLUMNS, [row]


def _advise_profile(folder: Path) -> None:
    trace = max(folder.glob("plugins/profile/*/*.trace.json.gz"), key=os.path.getmtime)
    _write(f"parts by name: pip install xprof tensorboard; tensorboard --logdir {folder}\n")
    _write(f"times alone: open {trace} at https://ui.perfetto.dev\n")


def _experts(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    if mesh.size == 1:
        raise Refused("--experts compares ways over several devices: give --devices or --mesh")
    rows = list(bench.experts(_bench_config(options), mesh, place, options.dtype))
    return f"experts of {options.shape}, {_say_mesh(mesh)}", bench.EXPERTS_COLUMNS, rows


def _rows(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    if mesh.shape["model"] == 1:
        raise Refused("--rows slices over several model ranks: give --devices or --mesh")
    rows = list(bench.rows(_bench_config(options), mesh, place, options.dtype))
    return f"rows of {options.shape}, {_say_mesh(mesh)}", bench.ROWS_COLUMNS, rows


def _reduce(options: argparse.Namespace, mesh: Any, place: Any) -> tuple[str, Any, list]:
    from . import measure as bench

    if mesh.shape["model"] == 1:
        raise Refused("--reduce sums over several model ranks: give --devices or --mesh")
    if options.dtype == "float64":
        raise Refused("--reduce measures float32 and bfloat16")
    width = _bench_config(options).hidden
    rows = list(bench.reductions(width, mesh, options.dtype))
    return f"sums of rows of {width}, {_say_mesh(mesh)}", bench.REDUCE_COLUMNS, rows


def _advise_ring(rows: list) -> None:
    from . import measure as bench

    found = bench.ring_from(rows)
    if found is None:
        _write("here: ring_bf16 is not faster than sum; leave prefill_ring_rows at 0\n")
        return
    count, pieces = found
    more = f", ring_pieces={pieces}" if pieces > 1 else ""
    _write(f'here: Placement(prefill_reduce="ring_bf16", prefill_ring_rows={count}{more})\n')


def _advise(mesh: Any, rows: list) -> None:
    from . import measure as bench

    below = bench.local_below(rows)
    place = f'Placement(experts="auto", local_below={below})'
    _write(f"here: {place}, or --place experts=auto --place local_below={below}\n")


def _advise_rows(rows: list) -> None:
    from . import measure as bench

    found = bench.crossover(rows)
    if found is None:
        _write('here: slicing is not faster; keep Placement(rows="full")\n')
    elif found == 0:
        _write('here: slicing is always faster; Placement(rows="sliced")\n')
    else:
        place = f'Placement(rows="auto", sliced_from={found})'
        _write(f"here: {place}, or --place rows=auto --place sliced_from={found}\n")


def _say_mesh(mesh: Any) -> str:
    from ..parallel.placement import mesh_sizes, say_mesh

    return f"{say_mesh(mesh_sizes(mesh))} ({mesh.devices.flat[0].device_kind})"


def _named_config(name: str) -> Any:
    from ..config.config import Config

    named = {"k3": Config.k3, "k3.1": Config.k3_1}
    if name in named:
        return named[name]()
    if not Path(name).exists():
        raise Refused(f"{name!r} is neither k3, k3.1 nor the path of a config")
    if Path(name).is_dir():
        _check_folder(Path(name))
    return Config.from_hf(name)


def _bench_config(options: argparse.Namespace) -> Any:
    from ..config.config import Config
    from . import measure as bench

    if options.shape == "shipped":
        return Config.from_hf(SHIPPED)
    return bench.mini(options.shape == "mini-dsa")
