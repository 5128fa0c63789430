"""`kimi-jax generate`: continue prompts."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CommandError, label, shown
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
from .records import (
    Output,
    Record,
    Tally,
    in_portions,
    parse_records,
    per_prompt,
    read_records,
)

EXAMPLES = """\
  kimi-jax generate "Alice was beginning to"
  kimi-jax generate "Alice was" --temperature 0.8 --top-p 0.95 --seed 3 --stop "\\n\\n"
  kimi-jax generate "The Queen" "The King" --json --logprobs 3
  cat letter.txt | kimi-jax generate - --model /path/to/checkpoint
  kimi-jax generate 12,7,300 --tokens
  kimi-jax generate "What is this?" --image picture.png --model /path/to/checkpoint
  kimi-jax generate --input prompts.jsonl --output replies.jsonl --slots 64
  kimi-jax generate "The Queen of Hearts, she" --draft ngram
  kimi-jax generate "The King" --devices 8 --mesh 2x4 --place experts=local

A line of --input is text or a list of token ids in JSON, or an object with options of that prompt
alone, named as in Python: {"id": "q1", "prompt": "The Queen", "seed": 3}. --output is written line
by line as prompts are done: the same command, started again, does the rest.
One prompt is printed and streamed token by token; its speed goes to standard error. Several are
decoded as one batch and printed when all are done.
A line break at the end of standard input is not part of the prompt."""

NGRAM = "ngram"
PORTION = 4096  # prompts of a file that run together


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "continue one prompt or several"
    command = add_command(commands, "generate", run, about, EXAMPLES)
    add = command.add_argument
    help_prompts = "text to continue; - reads it from standard input, as UTF-8"
    add("prompts", nargs="*", type=utf8_text, metavar="PROMPT", help=help_prompts)
    add_model(command, has_path=False)
    add("--tokens", action="store_true", help="prompts are token ids with commas between them")
    help_image = "an image before every prompt, for models with a vision tower; again for more"
    add("--image", action="append", type=utf8_text, metavar="FILE", help=help_image)
    help_logprobs = "report log-probabilities, and those of the N most probable tokens"
    add("--logprobs", type=positive, metavar="N", help=help_logprobs)
    help_slots = "batch size of decoding: a finished request makes room for the next (8)"
    add("--slots", type=whole(1, 256), default=8, metavar="N", help=help_slots)
    help_input = (
        "prompts, one JSON line each: text, token ids, or an object (see below); - reads them"
    )
    add("--input", type=utf8_text, metavar="FILE", help=help_input)
    help_output = "add completions to a file, one JSON line each; skips the prompts that it holds"
    add("--output", type=Path, metavar="FILE", help=help_output)
    help_draft = (
        "speculative decoding: ngram drafts what followed the latest tokens before, a folder holds "
        "a DSpark draft"
    )
    add("--draft", type=utf8_text, metavar="ngram|FOLDER", help=help_draft)
    help_drafts = "most drafts a step (7)"
    add("--drafts", type=whole(1, 64), metavar="K", help=help_drafts)
    add("--json", action="store_true", help="print a line of JSON for each completion")
    add("--verbose", action="store_true", help="log each request's events on standard error")
    add_sampling(command, max_new_tokens=64, temperature=0.0, top_p=1.0)
    add_mesh(command)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    records, drafting = _records(options), _drafting(options)
    settings = {**sampling_options(options), "logprobs": options.logprobs or False}
    is_file = bool(options.input or options.output)
    is_streamed = len(records) == 1 and not (options.json or options.verbose or is_file)
    folder = model_folder(options)
    output = Output(options.output) if options.output else None
    missing = output.missing(records) if output else records
    with waiting("loading the model"):
        _check_prompts(folder, missing, bool(options.stop), is_streamed)
        if options.image:
            images = _read_images(folder, options.image)
            records = [dataclasses.replace(record, images=images) for record in records]
            missing = records
        if not missing:
            note(f"all {len(records):,} prompts are in {label(options.output)}: nothing to do")
            return 0
        if output and not options.process_id:  # the first process writes
            output.open()
        use_compilation_cache()
        model = load_model(folder, options)
        drafting |= _load_draft(options, model)
    if is_streamed:
        _stream(model, records[0], settings | drafting)
        return 0
    return _run_records(options, model, records, missing, output, settings, drafting)


def _drafting(options: argparse.Namespace) -> dict[str, Any]:
    """The drafter, and how much it drafts; a folder's is read by `_load_draft`."""
    if not options.draft:
        if options.drafts:
            raise CommandError("--drafts is for a drafter: name one with --draft")
        return {}
    if options.draft != NGRAM:
        check_folder(Path(options.draft))
        return {}
    from ..speculation.ngram import NgramDraft

    return {"draft": NgramDraft(most=options.drafts) if options.drafts else NgramDraft()}


def _load_draft(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The draft in a folder, if one is named."""
    if not options.draft or options.draft == NGRAM:
        return {}
    from ..speculation.draft import load_draft

    return {"draft": load_draft(options.draft, model, block=options.drafts)}


def _run_records(
    options: argparse.Namespace,
    model: Any,
    records: list[Record],
    missing: list[Record],
    output: Output | None,
    settings: dict[str, Any],
    drafting: dict[str, Any],
) -> int:
    """Complete the records that are not done; print their completions or write them to a file."""
    if len(missing) < len(records):
        done = len(records) - len(missing)
        skipped = f"{done:,} of {len(records):,} prompts are skipped"
        note(f"{skipped}: {label(options.output)} holds them")
    tally = Tally(len(missing), is_quiet=options.json and output is None)
    try:
        for portion in in_portions(missing, PORTION):
            finish = tally.follow(portion, output)
            completions = model.generate(
                [record.given for record in portion],
                **per_prompt(settings, portion),
                **drafting,
                slots=options.slots,
                verbose=options.verbose,
                on_completion=finish,
            )
            for record, completion in zip(portion, completions, strict=True):
                if output is None:
                    _print_completion(model, record, completion, options)
    except KeyboardInterrupt:
        if output:
            note(f"{tally.done:,} of {len(missing):,} done; the same command goes on from there")
        raise
    if output or not options.json:
        note(tally.summary())
    return 1 if tally.errors else 0


# Prompts.


def _records(options: argparse.Namespace) -> list[Record]:
    """The prompts of the command line or of a file."""
    if options.input:
        if options.prompts or options.tokens:
            what = "--tokens" if options.tokens else "prompts"
            raise CommandError(f"--input takes its prompts from a file: leave {what} out")
        _refuse_images(options, "--input")
        if options.input == "-":
            return parse_records(read_standard_input().encode())
        return read_records(options.input)
    if not options.prompts:
        raise CommandError("no prompt: give one, - to read it from standard input, or --input FILE")
    if options.prompts.count("-") > 1:
        raise CommandError("- stands for standard input, which can be one prompt only")
    texts = [
        read_standard_input().removesuffix("\n") if prompt == "-" else prompt
        for prompt in options.prompts
    ]
    for at, text in enumerate(texts):
        if not text.strip() and (options.tokens or not text):
            raise CommandError(f"prompt {at} is empty")
    for other in ("tokens", "output"):
        if getattr(options, other):
            _refuse_images(options, f"--{other}")
    prompts = [_token_ids(text) for text in texts] if options.tokens else texts
    return [Record(at, prompt) for at, prompt in enumerate(prompts)]


def _refuse_images(options: argparse.Namespace, other: str) -> None:
    if options.image:
        raise CommandError(f"--image goes with texts of the command line, not with {other}")


def _read_images(folder: Path, paths: Sequence[str]) -> tuple[Any, ...]:
    """The images as patches; refused before weights are read."""
    from ..checkpoint.reader import vision_of
    from ..config.config import Config
    from ..config.preprocessor import Preprocessor
    from ..vision.pixels import image_patches

    if vision_of(folder, Config.from_hf(folder)) is None:
        raise CommandError(f"--image: the model in {label(folder)} has no vision tower")
    preprocessor = Preprocessor.from_hf(folder)
    return tuple(image_patches(Path(path), preprocessor) for path in paths)


def _check_prompts(
    folder: Path, records: Sequence[Record], has_stop: bool, is_streamed: bool
) -> None:
    """Refuse prompts that cannot run, before weights are read."""
    from ..config.config import Config
    from ..text.tokenizer import Tokenizer

    check_folder(folder)
    config = Config.from_hf(folder)
    has_text = Tokenizer.is_in(folder)
    is_text = any(isinstance(record.prompt, str) for record in records)
    if not has_text and (has_stop or is_text):
        what = "prompts of text need" if is_text else "stop strings need"
        raise CommandError(f"{what} a tokenizer, and this folder has no tokenizer")
    tokenizer = Tokenizer.from_folder(folder, config.vocab) if has_text else None
    for record in records:
        ids = record.prompt
        if isinstance(ids, str):  # its tokens are in the vocabulary; only a stream counts them
            ids = tokenizer.encode(ids) if tokenizer and is_streamed else []
        beyond = next((t for t in ids if not isinstance(t, int) or not 0 <= t < config.vocab), None)
        if beyond is not None:
            raise CommandError(
                f"prompt {record.id}: {shown(beyond)} is not a token id below the vocabulary of "
                f"{config.vocab}"
            )
        if is_streamed and len(ids) >= config.max_positions:
            raise CommandError(
                f"prompt {record.id} has {len(ids)} tokens: the context of {config.max_positions} "
                "leaves no room for a reply"
            )


def _token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4000}", part) for part in parts if part):
        raise CommandError(
            f"--tokens takes whole numbers with commas between them, got {shown(text)}"
        )
    return [int(part) for part in parts if part]


def _stream(model: Any, record: Record, settings: dict[str, Any]) -> None:
    """Shows a prompt and its continuation as it comes, then on standard error how fast it came."""
    prompt = record.prompt
    events = model.stream(record.given, **settings)  # a refusal comes before anything is shown
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
    of_images = f" ({usage.image_tokens} of images)" if usage.image_tokens else ""
    note(
        f"compiled in {usage.compile_seconds:.1f} s; {usage.prompt_tokens} prompt tokens"
        f"{of_images}, prefill "
        f"{prefill:.0f} tok/s; {usage.generated_tokens} new tokens, decode "
        f"{decode:.0f} tok/s; ended by {event.finish_reason}{_rounds(event.acceptance)}"
    )


def _rounds(acceptance: Any) -> str:
    """What became of drafts, if there were any."""
    if acceptance is None:
        return ""
    return f"; {acceptance.rounds} rounds of drafts, {acceptance.length:.2f} tokens each"


def _readable(model: Any, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt) if model.tokenizer else ",".join(map(str, prompt))


def _print_completion(
    model: Any, record: Record, completion: Any, options: argparse.Namespace
) -> None:
    if options.json or options.input:
        name = {"id": record.id} if options.input else {}
        print_json({**name, "prompt": record.prompt, **dataclasses.asdict(completion)})
        return
    separator = "" if model.tokenizer else ","
    reply = completion.tokens if completion.text is None else completion.text
    print(_readable(model, record.prompt), _readable(model, reply), sep=separator)
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
