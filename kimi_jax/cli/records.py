"""Prompts from a file of JSON lines, and completions to another, to which a later run adds."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import FileError, Problems, meant, shown
from ..files import parse_json, read_regular
from ..generation.options import Options
from ..text.strict_json import SURROGATE
from ..waiting import is_terminal
from .output import note

_LARGEST = 2**32  # bytes of a file
_OPTIONS = tuple(f.name for f in dataclasses.fields(Options) if f.name != "sampling")
_KEYS = ("prompt", "id", *_OPTIONS)
_BEGIN = b'{"id": '  # of every line that `Output` writes
PERIOD = 10  # seconds between two lines of progress in a log


class PromptFileError(Problems):
    """A file of prompts that cannot be used, with every problem: each names its line."""

    subject = "the file of prompts"


@dataclasses.dataclass(frozen=True)
class Record:
    """A prompt, text or token ids, its name among all, and the options of it alone."""

    id: str | int
    prompt: str | list[int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    images: tuple[Any, ...] = ()  # `ImagePatches` that stand before a text

    @property
    def given(self) -> Any:
        """The prompt as `generate` takes it."""
        if not self.images:
            return self.prompt
        return [*({"type": "image", "image": image} for image in self.images), self.prompt]


def read_records(path: str) -> list[Record]:
    """The prompts of a file: a line is text or a list of token ids in JSON, or an object with
    `prompt`, an `id` (default: the number of the line, from 1) and options of `generate`. Raises
    `PromptFileError` with every problem.
    """
    return parse_records(read_regular(path, _LARGEST))


def parse_records(content: bytes) -> list[Record]:
    """The prompts of a file's text; see `read_records`."""
    problems: list[str] = []
    records: dict[str | int, Record] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _record(number, line)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if record.id in records:
            problems.append(f"line {number}: the id {shown(record.id)} is given twice")
        records[record.id] = record
    if problems:
        raise PromptFileError(*problems)
    if not records:
        raise PromptFileError("it holds no prompt")
    return list(records.values())


def _record(number: int, line: bytes) -> Record:
    """One line. Raises `ValueError` that says what is wrong with it."""
    value = parse_json(line)
    given = value if isinstance(value, dict) else {"prompt": value}
    for key in given:
        if key not in _KEYS:
            known = f"known are {', '.join(_KEYS)}{meant(key, _KEYS)}"
            raise ValueError(f"no such key {shown(key)}, {known}")
    name, prompt = given.get("id", number), given.get("prompt")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id must be text or a whole number, got {shown(name)}")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (is_ids or isinstance(prompt, str)) or not prompt:
        raise ValueError(f"prompt must be text or a list of token ids, got {shown(prompt)}")
    if isinstance(prompt, str) and SURROGATE.search(prompt):
        raise ValueError("prompt holds half a surrogate pair")
    options = {key: given[key] for key in _OPTIONS if key in given}
    if isinstance(bias := options.get("logit_bias"), dict):
        options["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
    return Record(name, prompt, options)


def per_prompt(settings: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """`settings` of all prompts, as lists with one value a prompt where a prompt has its own."""
    records = list(records)
    own = dict.fromkeys(name for record in records for name in record.options)
    defaults = vars(Options()) | settings
    lists = {name: [r.options.get(name, defaults[name]) for r in records] for name in own}
    if "stop" in lists:  # a list of texts would be one value for all
        texts = lists["stop"]
        lists["stop"] = [[text] if isinstance(text, str) else text for text in texts]
    return settings | lists


class Output:
    """A file of completions, one JSON object a line, each written as a whole and at once, so that
    nothing is lost when the command is stopped. What a stopped command left of a line is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompts: dict[str | int, Any] = {}  # by id, of what the file holds
        self._whole = self._read_lines()
        self._file: int | None = None

    def open(self) -> None:
        """Make ready to write: before this the file is as it was. Of several processes one does."""
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, self._whole)
        os.lseek(self._file, 0, os.SEEK_END)

    def _read_lines(self) -> int:
        """Read what is done; the bytes of whole lines. Raises `FileError` for another file."""
        if not os.path.lexists(self.path):
            return 0
        held = read_regular(self.path, _LARGEST)
        *lines, rest = held.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                value = parse_json(line)
                self.prompts[value["id"]] = value["prompt"]
            except (ValueError, TypeError, KeyError) as error:
                reason = f"line {number} is not a completion, an object with an id and a prompt"
                raise FileError(self.path, f"{reason}: it is left as it is") from error
        if not (rest.startswith(_BEGIN) or _BEGIN.startswith(rest)):
            raise FileError(self.path, "is not a file of completions: it is left as it is")
        return len(held) - len(rest)

    def missing(self, records: list[Record]) -> list[Record]:
        """The records that are not done. Raises `FileError` where an id has another prompt."""
        for record in records:
            if self.prompts.get(record.id, record.prompt) != record.prompt:
                raise FileError(
                    self.path,
                    f"holds another prompt with the id {shown(record.id)}: use a new file",
                )
        return [record for record in records if record.id not in self.prompts]

    def write(self, record: Record, completion: Any) -> None:
        """Add a completion, where the file is open."""
        if self._file is None:
            return
        values = {"id": record.id, "prompt": record.prompt, **dataclasses.asdict(completion)}
        left = memoryview(json.dumps(values).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]


class Tally:
    """Completions as they come: counted, written to a file, and told of in a log every ten seconds;
    a terminal has a progress bar.
    """

    def __init__(self, count: int, is_quiet: bool) -> None:
        self.count, self.done, self.errors = count, 0, 0
        self._is_quiet = is_quiet or is_terminal()
        self._prompt_tokens = self._new_tokens = 0
        self._begun = self._told = time.monotonic()
        self._compiled_before = _compile_seconds()

    def follow(
        self, records: Sequence[Record], output: Output | None
    ) -> Callable[[int, Any], None]:
        """What is to be called with the number of a record and its completion."""

        def finish(at: int, completion: Any) -> None:
            if output:
                output.write(records[at], completion)
            self.done += 1
            self.errors += completion.error is not None
            self._prompt_tokens += completion.usage.prompt_tokens
            self._new_tokens += completion.usage.generated_tokens
            now = time.monotonic()
            if now - self._told >= PERIOD and self.done < self.count and not self._is_quiet:
                self._told = now
                note(
                    f"{self.done:,} of {self.count:,} prompts done, {self._new_tokens:,} new tokens"
                )

        return finish

    def summary(self) -> str:
        """Counts and speed, the seconds of compilation apart."""
        compiled = _compile_seconds() - self._compiled_before
        seconds = max(time.monotonic() - self._begun - compiled, 1e-9)
        errors = f", {self.errors:,} with an error" if self.errors else ""
        return (
            f"compiled in {compiled:.1f} s; {self.done:,} prompts of {self._prompt_tokens:,} "
            f"tokens, {self._new_tokens:,} new tokens in {seconds:.1f} s, "
            f"{self._new_tokens / seconds:.0f} tok/s{errors}"
        )


def _compile_seconds() -> float:
    """What this process has waited for compilation so far."""
    from ..compilation.function import waited_seconds

    return waited_seconds()


def in_portions(records: list[Record], count: int) -> Iterator[list[Record]]:
    """The records, `count` at a time."""
    for begin in range(0, len(records), count):
        yield records[begin : begin + count]
