"""JSON that every reader accepts: finite numbers, valid Unicode, string keys, bounded nesting.
Python's `json` reads and writes more than that.
"""

import json
import math
import re
from typing import Any

MAX_DEPTH = 100  # levels of lists and objects
SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_DIGITS = 4_000  # of a whole number: Python prints and reads no more than 4,300
_TOO_LARGE = 10**_MAX_DIGITS


def parse(text: str, unique_keys: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError that says why it is not one; with `unique_keys`
    also where an object names a key twice.
    """
    pairs = _unique if unique_keys else None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"it nests more than {MAX_DEPTH} levels") from error
    if problem := unwritable(value):
        raise ValueError(problem)
    return value


def unwritable(value: Any) -> str | None:
    """Why a value cannot be written as JSON, or None where it can."""
    open_values = [(value, 0)]
    while open_values:  # depth first, so that what contains itself is found by its depth
        item, depth = open_values.pop()
        if depth > MAX_DEPTH:
            return f"it nests more than {MAX_DEPTH} levels"
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    return f"a key is not text but {type(key).__name__}"
                open_values.append((key, depth))
            open_values += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list | tuple):
            open_values += [(child, depth + 1) for child in item]
        elif problem := _unwritable_scalar(item):
            return problem
    return None


def type_name(value: Any) -> str:
    """What JSON calls the type of a value: null, boolean, number, string, object or array."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _unwritable_scalar(item: Any) -> str | None:
    if isinstance(item, str):
        return "it holds half a surrogate pair" if SURROGATE.search(item) else None
    if isinstance(item, float):
        return None if math.isfinite(item) else "it holds a number that is not finite"
    if isinstance(item, int):
        is_long = abs(item) >= _TOO_LARGE
        return f"it holds a number of more than {_MAX_DIGITS:,} digits" if is_long else None
    return None if item is None else f"JSON has no {type(item).__name__}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it names a key twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
