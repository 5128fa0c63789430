"""One table of a config file: hands out values and notes what is wrong with them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import label, shown
from . import keys
from .keys import Field, Fixed

_LEVELS = 64  # of nested tables and lists; a released file has 5
_UNKNOWN = 200  # unknown keys of a table that are reported one by one


class Section:
    """One table of a file, at a path such as `linear_attn_config.` in it. A value that is null
    counts as absent. What is wrong is added to a list of problems that all sections share.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], path: str = "") -> None:
        self.values = values
        self.problems = problems
        self.path = path

    def note(self, key: str, problem: str) -> None:
        """Add a problem of one key."""
        self.problems.append(f"{self.path}{label(key)}: {problem}")

    def form_problems(self) -> Iterator[str]:
        """What no JSON file can hold, or none that anybody writes, so that all else need not care:
        keys that are not text, and nesting without end.
        """
        for key, value in self.values.items():
            if not isinstance(key, str):
                yield f"{self.path}the key {shown(key)} is not a text"
            elif fault := _form_fault(value):
                yield f"{self.path}{label(key)}: {fault}"

    def read(self, field: Field) -> Any:
        """The field's value; None where something is wrong with it."""
        given = {key: self.values[key] for key in field.keys if self.values.get(key) is not None}
        if not given:
            if field.default is keys.REQUIRED:
                self.note(field.keys[0], f"missing, {field.kind.expects} is required")
                return None
            return field.default
        faults = {key: fault for key in given if (fault := _fault(field.kind, given[key]))}
        for key, fault in faults.items():
            self.note(key, fault)
        if faults:
            return None
        values = list(given.values())
        if any(value != values[0] for value in values):
            self.note(field.keys[0], f"spelled in ways that disagree, {shown(given)}")
            return None
        return field.kind.convert(values[0])

    def read_all(self, fields: Iterable[Field]) -> dict[str, Any]:
        """The values of several fields by name."""
        return {field.name: self.read(field) for field in fields}

    def table(self, key: str, required: bool = True) -> "Section | None":
        """The table under a key; None where it is absent or not a table."""
        default = keys.REQUIRED if required else None
        values = self.read(Field(key, (key,), keys.TABLE, default))
        path = f"{self.path}{label(key)}."
        return None if values is None else Section(values, self.problems, path)

    def check_fixed(self, fixed: Mapping[str, Fixed]) -> None:
        """Note every key whose value differs from the settled value."""
        for key, rule in fixed.items():
            value = self.values.get(key)
            if value is None and rule.required:
                self.note(key, f"missing, {rule.value!r} is required")
            elif value is not None and not same(value, rule.value):
                self.note(key, f"{shown(value)} is not supported, only {rule.value!r}")

    def check_unknown(self, known: Collection[str], where: str = "") -> None:
        """Note every key that is not known."""
        unknown = sorted(key for key in self.values if key not in known)
        for key in unknown[:_UNKNOWN]:
            value = shown(self.values[key])
            self.note(key, f"unknown{where}, and may change the result (value {value})")
        if len(unknown) > _UNKNOWN:
            more = len(unknown) - _UNKNOWN
            self.problems.append(f"{self.path or 'the top level'}: {more:,} more unknown keys")


def _form_fault(value: Any) -> str | None:
    """What is wrong with the structure of a value: how deep it is, and keys that are not text."""
    pending: list[tuple[Any, int]] = [(value, 1)]
    seen: dict[int, int] = {}  # the level at which a table or list has been looked at
    while pending:
        item, level = pending.pop()
        if isinstance(item, np.ndarray):
            return "holds an array, which is not a JSON value"
        if not isinstance(item, Mapping | list | tuple) or seen.get(id(item), 0) >= level:
            continue
        seen[id(item)] = level
        if level > _LEVELS:
            return f"nested in more than {_LEVELS} levels"
        inner = item
        if isinstance(item, Mapping):
            inner = item.values()
            odd = [key for key in item if not isinstance(key, str)]
            if odd:
                return f"holds the key {shown(odd[0])}, which is not a text"
        pending += [(child, level + 1) for child in inner]
    return None


def _fault(kind: keys.Kind, value: Any) -> str | None:
    """What is wrong with a value."""
    if not kind.accepts(value):
        return f"{shown(value)} is not {kind.expects}"
    if kind.most is not None and value > kind.most:
        return f"{shown(value)} is more than {kind.most}"
    return None


def same(value: Any, wanted: Any) -> bool:
    """Equality that tells true from 1 and false from 0."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
