"""`kimi-jax generate`: continue prompts."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CommandError, shown
from ..waiting import waiting
from .devices import check_folder, load_model, use_compilation_cache
from .options import (
    add_command,
    add_mesh,
    add_model,
    add_sampling,
    model_folder,
    positive,
    sampling_options,
    utf8_text,
    whole,
)
from .output import note, print_error, print_json, print_table, read_standard_input, write

EXAMPLES = """\
  kimi-jax generate "Alice was beginning to"
  kimi-jax generate "Alice was" --temperature 0.8 --top-p 0.95 --seed 3 --stop "\\n\\n"
  kimi-jax generate "The Queen" "The King" --json --logprobs 3
  cat letter.txt | kimi-jax generate - --model /path/to/checkpoint
  kimi-jax generate 12,7,300 --tokens
  kimi-jax generate "The King" --devices 8 --mesh 2x4 --place experts=local

One prompt is printed and streamed token by token; its speed goes to standard error. Several are
decoded as one batch and printed when all are done.
A line break at the end of standard input is not part of the prompt."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "continue one prompt or several"
    command = add_command(commands, "generate", run, about, EXAMPLES)
    add = command.add_argument
    help_prompts = "text to continue; - reads it from standard input, as UTF-8"
    add("prompts", nargs="*", type=utf8_text, metavar="PROMPT", help=help_prompts)
    add_model(command, has_path=False)
    add("--tokens", action="store_true", help="prompts are token ids with commas between them")
    help_logprobs = "report log-probabilities, and those of the N most probable tokens"
    add("--logprobs", type=positive, metavar="N", help=help_logprobs)
    help_slots = "batch size of decoding: a finished request makes room for the next (8)"
    add("--slots", type=whole(1, 256), default=8, metavar="N", help=help_slots)
    add("--json", action="store_true", help="print a line of JSON for each completion")
    add("--verbose", action="store_true", help="log each request's events on standard error")
    add_sampling(command, max_new_tokens=64, temperature=0.0, top_p=1.0)
    add_mesh(command)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    prompts = _prompts(options)
    settings = {**sampling_options(options), "logprobs": options.logprobs or False}
    is_streamed = len(prompts) == 1 and not (options.json or options.verbose)
    folder = model_folder(options)
    with waiting("loading the model"):
        _check_prompts(options, folder, prompts, is_streamed)
        use_compilation_cache()
        model = load_model(folder, options)
    if is_streamed:
        _stream(model, prompts[0], settings)
        return 0
    done = model.generate(prompts, **settings, slots=options.slots, verbose=options.verbose)
    for prompt, completion in zip(prompts, done, strict=True):
        _print_completion(model, prompt, completion, options.json)
    return 1 if any(completion.error for completion in done) else 0


def _prompts(options: argparse.Namespace) -> list[str] | list[list[int]]:
    if not options.prompts:
        raise CommandError("no prompt: give one, or - to read it from standard input")
    if options.prompts.count("-") > 1:
        raise CommandError("- stands for standard input, which can be one prompt only")
    texts = [
        read_standard_input().removesuffix("\n") if prompt == "-" else prompt
        for prompt in options.prompts
    ]
    for at, text in enumerate(texts):
        if not text.strip() and (options.tokens or not text):
            raise CommandError(f"prompt {at} is empty")
    return [_token_ids(text) for text in texts] if options.tokens else texts


def _check_prompts(
    options: argparse.Namespace, folder: Path, prompts: list, is_streamed: bool
) -> None:
    """Refuse prompts that cannot run, before weights are read."""
    from ..config.config import Config
    from ..text.tokenizer import Tokenizer

    check_folder(folder)
    config = Config.from_hf(folder)
    has_text = Tokenizer.is_in(folder)
    if not has_text and (options.stop or not options.tokens):
        what = "stop strings need" if options.tokens else "prompts of text need"
        raise CommandError(f"{what} a tokenizer, and this folder has no tokenizer")
    tokenizer = Tokenizer.from_folder(folder, config.vocab) if has_text else None
    for at, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else prompt
        beyond = next((token for token in ids if token >= config.vocab), None)
        if beyond is not None:
            raise CommandError(
                f"prompt {at}: {shown(beyond)} is not a token id below the vocabulary of "
                f"{config.vocab}"
            )
        if is_streamed and len(ids) >= config.max_positions:
            raise CommandError(
                f"prompt {at} has {len(ids)} tokens: the context of {config.max_positions} leaves "
                "no room for a reply"
            )


def _token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4000}", part) for part in parts if part):
        raise CommandError(
            f"--tokens takes whole numbers with commas between them, got {shown(text)}"
        )
    return [int(part) for part in parts if part]


def _stream(model: Any, prompt: str | list[int], settings: dict[str, Any]) -> None:
    """Shows a prompt and its continuation as it comes, then on standard error how fast it came."""
    events = model.stream(prompt, **settings)  # a refusal comes before anything is shown
    logprobs, event, is_first = [], None, True
    for event in events:
        if is_first:  # until then a sign may show that programs are compiled
            write(_readable(model, prompt))
            is_first = False
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
        f"compiled in {usage.compile_seconds:.1f} s; {usage.prompt_tokens} prompt tokens, prefill "
        f"{prefill:.0f} tok/s; {usage.generated_tokens} new tokens, decode "
        f"{decode:.0f} tok/s; ended by {event.finish_reason}"
    )


def _readable(model: Any, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt) if model.tokenizer else ",".join(map(str, prompt))


def _print_completion(model: Any, prompt: Any, completion: Any, as_json: bool) -> None:
    if as_json:
        print_json({"prompt": prompt, **dataclasses.asdict(completion)})
        return
    separator = "" if model.tokenizer else ","
    reply = completion.tokens if completion.text is None else completion.text
    print(_readable(model, prompt), _readable(model, reply), sep=separator)
    if completion.error:
        print_error(completion.error)
    if completion.logprobs:
        _print_logprobs(model, completion.logprobs)
    print()


def _print_logprobs(model: Any, logprobs: Sequence[Any]) -> None:
    def say(token: int) -> str:
        return repr(model.tokenizer.decode([token])) if model.tokenizer else str(token)

    rows = [
        (
            say(entry.token),
            f"{entry.logprob:.3f}",
            "  ".join(f"{say(i)} {p:.3f}" for i, p in entry.top),
        )
        for entry in logprobs
    ]
    print_table("log-probabilities in nats", ("token", "its own", "best"), rows)
