"""`kimi-jax generate`: continue prompts."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .devices import load_model, use_compilation_cache
from .options import SHIPPED, SHIPPED_MODEL, add_command, add_mesh, add_sampling, sampling_options
from .output import note, print_table, write

EXAMPLES = """\
  kimi-jax generate "Alice was beginning to"
  kimi-jax generate "Alice was" --temperature 0.8 --top-p 0.95 --seed 3 --stop "\\n\\n"
  kimi-jax generate "The Queen" "The King" --json --logprobs 3
  cat letter.txt | kimi-jax generate - --model /path/to/checkpoint
  kimi-jax generate 12,7,300 --tokens
  kimi-jax generate "The King" --devices 8 --mesh 2x4 --place experts=local

One prompt is shown and continued as tokens come; its speed goes to standard error.
A line break at the end of standard input is not part of the prompt."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    command = add_command(commands, "generate", run, "continue one prompt or several", EXAMPLES)
    add_mesh(command)
    add = command.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input")
    add(
        "--model",
        type=Path,
        default=SHIPPED,
        metavar="PATH",
        help=f"checkpoint folder ({SHIPPED_MODEL})",
    )
    add_sampling(command, max_new_tokens=64, temperature=0.0, top_p=1.0)
    add("--logprobs", type=int, metavar="N", help="report log-probabilities and the N best tokens")
    add("--tokens", action="store_true", help="prompts are token ids with commas between them")
    add("--slots", type=int, default=8, metavar="N", help="prompts that decode together (8)")
    add("--json", action="store_true", help="print a line of JSON for each completion")
    add("--verbose", action="store_true", help="say on standard error what happens to each prompt")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    prompts = _prompts(options)
    settings = {**sampling_options(options), "logprobs": options.logprobs or False}
    use_compilation_cache()
    model = load_model(options.model, options)
    if len(prompts) == 1 and not (options.json or options.verbose):
        _stream(model, prompts[0], settings)
        return 0
    done = model.generate(prompts, **settings, slots=options.slots, verbose=options.verbose)
    for prompt, completion in zip(prompts, done, strict=True):
        _print_completion(model, prompt, completion, options.json)
    return 1 if any(completion.error for completion in done) else 0


def _prompts(options: argparse.Namespace) -> list[str] | list[list[int]]:
    if not options.prompts:
        raise CommandError("no prompt: give one, or - to read it from standard input")
    if options.logprobs is not None and options.logprobs < 1:
        raise CommandError(
            f"--logprobs must be a positive number of tokens, got {options.logprobs}"
        )
    if options.prompts.count("-") > 1:
        raise CommandError("- stands for standard input, which can be one prompt only")
    texts = [sys.stdin.read().removesuffix("\n") if p == "-" else p for p in options.prompts]
    if not options.tokens:
        return texts
    try:
        return [[int(part) for part in text.split(",") if part.strip()] for text in texts]
    except ValueError as error:
        raise CommandError("--tokens takes whole numbers with commas between them") from error


def _stream(model: Any, prompt: str | list[int], settings: dict[str, Any]) -> None:
    """Shows a prompt and its continuation as it comes, then on standard error how fast it came."""
    events = model.stream(prompt, **settings)  # a refusal comes before anything is shown
    write(_readable(model, prompt))
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    begun = time.perf_counter()
    _compile(model, ids, settings)
    compiling = time.perf_counter() - begun
    logprobs, event = [], None
    for event in events:
        logprobs += [event.logprob] if event.logprob else []
        write(event.text)
        if model.tokenizer is None and event.token is not None:
            write(f",{event.token}")
    write("\n")
    if logprobs:
        _print_logprobs(model, logprobs)
    assert event is not None
    usage = event.usage
    prefill = usage.prompt_tokens / usage.prefill_seconds
    decode = usage.generated_tokens / usage.decode_seconds
    note(
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
    print_table("log-probabilities in nats", ("token", "its own", "best"), rows)
