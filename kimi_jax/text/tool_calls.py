"""Tool calls of a reply, built as they come. Knows no arrays.

A call that is returned can be rendered again: it has a name, its arguments are JSON that every
reader accepts (finite numbers, valid Unicode, bounded nesting), and its markup was not damaged.
"""

import dataclasses
from typing import Any

from ..errors import shown
from . import strict_json
from .messages import call_id
from .tags import Header


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that a reply asks for. `id` is what a result's `tool_call_id` names."""

    id: str
    name: str
    arguments: dict[str, Any]


class CallBuilder:
    """A call while it is read: its name, its arguments so far, and the first problem with it."""

    def __init__(self, header: Header):
        self.name = header.attributes.get("tool", "")
        self.arguments: dict[str, Any] = {}
        self.problem = None if self.name else "it names no tool"
        self._json: dict[str, Any] | None = None  # arguments that came as one JSON block
        self._element = header
        self._raw: list[str] = []
        self.fail(header.problem)

    def fail(self, problem: str | None) -> None:
        """Record the first problem; the call will be left out."""
        self.problem = self.problem or problem

    def begin(self, header: Header) -> None:
        """Begin an argument or a JSON block."""
        self._element = header
        self._raw.clear()

    def add(self, text: str) -> None:
        """Add text to the open argument or JSON block."""
        self._raw.append(text)

    def abandon(self) -> None:
        """Record that the open argument or JSON block was not closed."""
        self.fail(f"{self._described()} has no end")

    def end(self) -> None:
        """End the open argument or JSON block: a string is kept as is, other types are parsed."""
        header, raw = self._element, "".join(self._raw)
        self._raw.clear()
        self.fail(header.problem)
        if header.name == "json":
            self._end_json(raw, header.attributes.get("type", "object"))
        else:
            self._end_argument(raw, header.attributes.get("type", ""))

    def result(self, index: int) -> ToolCall | None:
        """The call, number `index` of its reply; None where `problem` says why it is left out."""
        arguments = self.arguments if self._json is None else self._json
        self.fail(strict_json.unwritable(arguments))
        return None if self.problem else ToolCall(call_id(self.name, index), self.name, arguments)

    def _end_json(self, raw: str, kind: str) -> None:
        if self._json is not None or self.arguments:
            self.fail("a JSON block is not its only child")
        value = self._parsed(raw, kind)
        self._json = value if isinstance(value, dict) else {}
        if kind != "object":
            self.fail(f"{self._described()} is not of type 'object' but {shown(kind)}")

    def _end_argument(self, raw: str, kind: str) -> None:
        key = self._element.attributes.get("key")
        if key is None:
            return self.fail("an argument has no key")
        if self._json is not None:
            self.fail("a JSON block is not its only child")
        if key in self.arguments:
            self.fail(f"{self._described()} comes twice")
        self.arguments[key] = raw if kind == "string" else self._parsed(raw, kind)

    def _parsed(self, raw: str, kind: str) -> Any:
        try:
            value = strict_json.parse(raw, unique_keys=True)
        except ValueError as error:
            return self.fail(f"{self._described()} is not usable JSON: {shown(raw)}: {error}")
        if strict_json.type_name(value) != kind:
            self.fail(f"{self._described()} is not of type {shown(kind)}: {shown(raw)}")
        return value

    def _described(self) -> str:
        if self._element.name == "json":
            return "its JSON block"
        return f"argument {shown(self._element.attributes.get('key', ''))}"
