"""The command `kimi-jax`: generate text, look into a checkpoint folder, measure speed.

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
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "shipped"
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
        return options.run(options)
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
    from . import checkpoint, config, generate, placement, runner, tokenizer

    files = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    return (
        *(Refused, NotImplementedError, *files),
        *(checkpoint.CheckpointError, config.ConfigError, tokenizer.TokenizerError),
        *(generate.PromptError, runner.RequestError, placement.PlacementError),
    )


# Options.


class _Parser(argparse.ArgumentParser):
    """Reports bad options in the way every other refusal is reported."""

    def error(self, message: str) -> Any:
        raise Refused(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="kimi-jax",
        description="Kimi K3 and K3.1-Pro text decoders in JAX.",
        epilog="kimi-jax COMMAND --help explains a command with examples.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
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


def _add_generate(commands: Any) -> None:
    add = _add_command(
        commands, "generate", _generate, "continue one prompt or several", _GENERATE_EXAMPLES
    ).add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input")
    add("--model", type=Path, default=SHIPPED, metavar="PATH", help=f"checkpoint folder ({_OWN})")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens to add (64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="best tokens of probability P (1)")
    add("--top-k", type=int, default=0, metavar="K", help="K best tokens, 0 for all (0)")
    add("--min-p", type=float, default=0.0, metavar="P", help="P times the best probability (0)")
    add("--seed", type=int, default=0, metavar="N", help="of the random draws (0)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--dtype", choices=_DTYPES, help="of the computation (float32 on CPU, else bfloat16)")
    add("--logprobs", type=int, metavar="N", help="report log-probabilities and the N best tokens")
    add("--tokens", action="store_true", help="prompts are token ids with commas between them")
    add("--json", action="store_true", help="print a line of JSON for each completion")


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
    add = _add_command(
        commands,
        "bench",
        _bench,
        "measure prefill and decode, or compile a decode step of any size without its weights",
        _BENCH_EXAMPLES,
    ).add_argument
    add("--shape", choices=("mini", "mini-dsa", "shipped"), default="mini", help="what runs (mini)")
    add("--dtype", choices=_DTYPES, help="of the computation (float32 on CPU, else bfloat16)")
    add("--prompt", type=_positive, default=512, metavar="T", help="tokens of a prompt (512)")
    add("--batch", type=_positives, default=[1, 8], metavar="B,B", help="batch sizes (1,8)")
    add("--steps", type=_positive, default=16, metavar="N", help="decode steps to time (16)")
    add(
        "--compile",
        metavar="CONFIG",
        help="compile k3, k3.1, or the config at a path; runs nothing",
    )
    add("--json", action="store_true", help="print a line of JSON for each row")


_DTYPES = ("float32", "bfloat16", "float64")
_OWN = "the small model of the package"
_GENERATE_EXAMPLES = """\
  kimi-jax generate "Alice was beginning to"
  kimi-jax generate "Alice was" --temperature 0.8 --top-p 0.95 --seed 3 --stop "\\n\\n"
  kimi-jax generate "The Queen" "The King" --json --logprobs 3
  cat letter.txt | kimi-jax generate - --model /path/to/checkpoint
  kimi-jax generate 12,7,300 --tokens

One prompt is shown and continued as tokens come; its speed goes to standard error.
A line break at the end of standard input is not part of the prompt."""
_INSPECT_EXAMPLES = """\
  kimi-jax inspect
  kimi-jax inspect /path/to/checkpoint
  kimi-jax inspect /path/to/checkpoint --all | grep indexer"""
_BENCH_EXAMPLES = """\
  kimi-jax bench                              9 layers of random weights
  kimi-jax bench --shape mini-dsa --prompt 2048 --batch 1 --dtype bfloat16
  kimi-jax bench --compile k3.1               the released size, from shapes alone

Times are medians; the first call of each kind is kept apart as compilation."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


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
    if jax.device_count() != count:
        raise Refused(f"--devices {count} comes too late, JAX runs on {jax.device_count()}")


def _load(path: Path, dtype: str | None) -> Any:
    import jax

    import kimi_jax as kj

    _check_folder(path)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return kj.load(path, dtype=dtype)


def _keep_programs() -> None:
    """Compiled programs stay in the user's cache folder, so that a second run starts at once."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "kimi_jax" / "programs"))


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise Refused(f"{path}: no such folder")
    if not (path / "config.json").is_file():
        raise Refused(f"{path}: no checkpoint, it has no config.json")


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
    console.print(table)


def _say_bytes(count: int) -> str:
    """Three figures and a unit, in powers of 1000."""
    power = min(4, int(math.log10(max(1, count))) // 3)
    return f"{count} B" if power == 0 else f"{count / 1000**power:.3g} {'kMGT'[power - 1]}B"


# generate


def _generate(options: argparse.Namespace) -> int:
    from . import generate as generation

    prompts = _prompts(options)
    sampling = generation.Sample(options.temperature, options.top_k, options.top_p, options.min_p)
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": sampling,
        "seed": options.seed,
        "stop": options.stop,
        "logprobs": options.logprobs or False,
    }
    _keep_programs()
    model = _load(options.model, options.dtype)
    if len(prompts) == 1 and not options.json:
        _stream(model, prompts[0], settings)
        return 0
    done = model.generate(prompts, **settings)
    for prompt, completion in zip(prompts, done, strict=True):
        _print_completion(model, prompt, completion, options.json)
    return 1 if any(completion.error for completion in done) else 0


def _prompts(options: argparse.Namespace) -> list[str] | list[list[int]]:
    if not options.prompts:
        raise Refused("no prompt: give one, or - to read it from standard input")
    if options.logprobs is not None and options.logprobs < 1:
        raise Refused(f"--logprobs must be a positive number of tokens, got {options.logprobs}")
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
    times, logprobs, reason, tokens = [time.perf_counter()], [], None, 0
    compiling = times[0] - begun
    for event in events:
        times.append(time.perf_counter())
        tokens += event.token is not None
        logprobs += [event.logprob] if event.logprob else []
        reason = event.finish_reason
        _write(event.text)
        if model.tokenizer is None and event.token is not None:
            _write(f",{event.token}")
    _write("\n")
    if logprobs:
        _print_logprobs(model, logprobs)
    prefill, decode = times[1] - times[0], times[-1] - times[1]
    print(
        f"kimi-jax: compiled in {compiling:.1f} s; {len(ids)} prompt tokens, prefill "
        f"{len(ids) / prefill:.0f} tok/s; {tokens} new tokens, decode "
        f"{(len(times) - 2) / decode if decode else 0:.0f} tok/s; ended by {reason}",
        file=sys.stderr,
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


# inspect


def _inspect(options: argparse.Namespace) -> int:
    from .checkpoint import Checkpoint
    from .config import Config

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
    from .checkpoint import shapes

    return sum(
        math.prod(shape) * (2 if dtype == "uint8" else 1)
        for name, (shape, dtype) in shapes(config, checkpoint.packed).items()
        if ".experts.s_" not in name and not (name == "head" and config.tie_embeddings)
    )


def _say_tokenizer(folder: Path, config: Any) -> str:
    from .tokenizer import Tokenizer

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


def _bench(options: argparse.Namespace) -> int:
    if options.dtype == "float64" and (options.compile or options.shape != "shipped"):
        raise Refused("--dtype float64 is for --shape shipped")
    if options.compile:
        columns, rows = _COMPILE_COLUMNS, [_compile_step(options)]
        title = f"a decode step of {options.compile}, one token, {_COMPILE_CONTEXT} slots"
    else:
        model = _bench_model(options)
        columns, rows = _SPEED_COLUMNS, list(_measure(model, options))
        title = f"{options.shape}, {model.dtype}, {model.mesh.devices.flat[0].device_kind}"
    if options.json:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True))))
        return 0
    said = [[_say_cell(*cell) for cell in zip(columns, row, strict=True)] for row in rows]
    _print_table(title, [column.replace("_", " ") for column in columns], said)
    return 0


def _say_cell(column: str, value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _say_bytes(int(value)) if column.endswith("_bytes") else str(value)


_COMPILE_CONTEXT = 4096
_COMPILE_COLUMNS = ("trace_s", "lower_s", "compile_s", "argument_bytes", "temporary_bytes")
_SPEED_COLUMNS = ("step", "batch", "tokens", "compile_s", "step_ms", "tokens_per_s")


def _compile_step(options: argparse.Namespace) -> tuple[float | int, ...]:
    """Compiles a whole decode step from shapes; no weight exists."""
    import jax
    import jax.numpy as jnp

    from .model import declare
    from .runner import make_program

    config = _named_config(options.compile)
    dtype = options.dtype or "bfloat16"
    program = make_program(config, dtype=dtype, packed=config.quantized, scan=True)
    weights = {w.path: jax.ShapeDtypeStruct(w.shape, w.dtype) for w in declare(program.declared)}
    slots = min(_COMPILE_CONTEXT, config.max_positions)
    state = jax.eval_shape(lambda: program.empty(1, slots))
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    times = [time.perf_counter()]
    traced = program.step.trace(weights, state, *ids)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    memory = lowered.compile().memory_analysis()
    times.append(time.perf_counter())
    seconds = (end - begin for begin, end in itertools.pairwise(times))
    return (*seconds, memory.argument_size_in_bytes, memory.temp_size_in_bytes)


def _named_config(name: str) -> Any:
    from .config import Config

    named = {"k3": Config.k3, "k3.1": Config.k3_1}
    if name in named:
        return named[name]()
    if not Path(name).exists():
        raise Refused(f"--compile takes k3, k3.1 or the path of a config; {name!r} is none")
    return Config.from_hf(name)


def _mini(sparse: bool) -> Any:
    """The shape for measuring: nine layers that a laptop holds, every part of K3 among them."""
    from .config import Config

    index = {"index_heads": 4, "index_dim": 32, "index_topk": 256} if sparse else {}
    return dataclasses.replace(
        Config.k3_1() if sparse else Config.k3(),
        **{"hidden": 1024, "layers": 9, "vocab": 8192, "mla_layers": (3, 7, 8)},
        **{"residual_block": 4, "max_positions": 65536, "dense_ffn": 2048},
        **{"kda_heads": 16, "kda_key_dim": 64, "kda_value_dim": 64},
        **{"heads": 16, "q_rank": 256, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32},
        **{"value_dim": 64, "experts": 64, "active_experts": 8, "latent": 512, "expert_ffn": 256},
        **{"bos": None, "eos": (), "pad": None},
        **index,
    )


def _bench_model(options: argparse.Namespace) -> Any:
    from .model import build
    from .runner import Model, make_program

    if options.shape == "shipped":
        return _load(SHIPPED, options.dtype)
    program = make_program(_mini(options.shape == "mini-dsa"), dtype=options.dtype)
    weights = build(program.declared, program.place, program.mesh, _random_read(program))
    return Model(program, weights)


def _random_read(program: Any) -> Callable:
    """Random weights that keep the size of what runs through them, made when they are asked for."""
    import numpy as np

    from .model import declare

    shapes = {
        name: w.shape[w.dims[0] == "G" :] for w in declare(program.declared) for name in w.names
    }
    rng = np.random.default_rng(0)

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        role = name.rsplit(".", 1)[-1]
        shape = [len(range(size)[cut]) for size, cut in zip(shapes[name], index, strict=True)]
        if ".experts." in name:
            low, high = (118, 123) if role.startswith("s_") else (0, 256)
            return rng.integers(low, high, shape, np.uint8)
        if role.endswith("norm"):
            return np.ones(shape, np.float32)
        if role == "a_log":
            return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(shapes[name][-1] ** -0.5)

    return read


def _measure(model: Any, options: argparse.Namespace) -> Iterator[tuple[str | int | float, ...]]:
    """A row for prefill, of the first batch size, and one for decode of each batch size."""
    import numpy as np

    from .runner import capacity

    T, steps = options.prompt, options.steps
    slots = capacity(T + steps + 1, model.config.max_positions)
    rng = np.random.default_rng(0)
    for at, B in enumerate(options.batch):
        prompts = rng.integers(0, model.config.vocab, (B, T))
        new = [model.new_state(B, slots) for _ in range(4 if at == 0 else 1)]
        first, *times = [_timed(model.prefill, state, prompts) for state in new]
        if times:
            yield _speed("prefill", B, T, first[0], [seconds for seconds, _ in times])
        _, state = (times or [first])[-1][1]
        seconds = []
        for token in rng.integers(0, model.config.vocab, (steps + 1, B)):
            took, (_, state) = _timed(model.decode, state, token)
            seconds.append(took)
        yield _speed("decode", B, 1, seconds[0], seconds[1:])


def _timed(step: Callable, *inputs: Any) -> tuple[float, Any]:
    import jax

    begun = time.perf_counter()
    results = jax.block_until_ready(step(*inputs))
    return time.perf_counter() - begun, results


def _speed(
    what: str, B: int, T: int, first: float, times: Sequence[float]
) -> tuple[str | int | float, ...]:
    usual = statistics.median(times)
    return what, B, T, max(0.0, first - usual), usual * 1000, B * T / usual
