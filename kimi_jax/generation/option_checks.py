"""From options as users give them, one value or one a prompt, to the checked options of each
request.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from ..errors import shown
from ..numerics import is_number, is_whole
from ..runtime.sampling import Sample, sampling_problems
from .options import Options
from .prompts import TextRunner, items_of
from .requests import RequestOptions


class RequestKeywords(TypedDict, total=False):
    """The fields of `Options` as keywords, for type checkers: one value, or one a prompt."""

    max_new_tokens: int | Sequence[int]
    min_new_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_p: float | Sequence[float]
    top_k: int | Sequence[int]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    sampling: Sample | Sequence[Sample | None] | None
    seed: int | Sequence[int]
    stop: str | Sequence[str] | Sequence[Sequence[str] | None] | None
    stop_tokens: Collection[int] | Sequence[Collection[int] | None] | None
    logprobs: bool | int | Sequence[bool | int]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None


MAX_WHOLE = 2**31 - 1  # the largest integer of an option: int32 holds it


def request_options(
    options: Options, model: TextRunner, count: int, problems: list[str]
) -> list[RequestOptions]:
    """The checked options of each prompt; what is wrong with them goes to `problems`."""
    found: list[str] = []
    columns = {
        field.name: per_prompt(field.name, getattr(options, field.name), count, found)
        for field in dataclasses.fields(options)
    }
    requests = [
        _checked(model, {name: column[i] for name, column in columns.items()}, found)
        for i in range(count)
    ]
    problems += dict.fromkeys(found)  # one value for all prompts is wrong once
    return requests


# One value, or one a prompt


def per_prompt(name: str, value: Any, count: int, problems: list[str]) -> list[Any]:
    """The values of an option of all prompts."""
    if not _is_one_a_prompt(name, value):
        return [value] * count
    values = items_of(value) or []
    if len(values) != count:
        problems.append(
            f"{name} must be one value, or one for each of the {count} prompts; got {shown(value)}"
        )
        return [getattr(Options(), name, 1)] * count
    return values


def _is_one_a_prompt(name: str, value: Any) -> bool:
    items = items_of(value)
    if items is None:
        return False
    if name == "stop":
        return any(item is None or items_of(item) is not None for item in items)
    if name == "stop_tokens":
        return any(item is None or ids_of(item) is not None for item in items)
    return True


def of_one_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, of which a list with the value of the only prompt is that value."""
    return {
        name: items[0]
        if (items := items_of(value)) and len(items) == 1 and _is_one_a_prompt(name, value)
        else value
        for name, value in given.items()
    }


def ids_of(value: Any) -> list | None:
    """The items of a list, an array or a set."""
    return list(value) if isinstance(value, set | frozenset) else items_of(value)


# The value of one prompt


def _checked(model: TextRunner, given: dict[str, Any], problems: list[str]) -> RequestOptions:
    """The checked options of one prompt; anything where there are problems."""
    found: list[str] = []
    max_new = given["max_new_tokens"]
    min_new = given["min_new_tokens"]
    if not is_whole(max_new, 1, MAX_WHOLE):
        found.append(
            f"max_new_tokens must be a positive whole number, got {shown(max_new)} (1 to 2^31-1)"
        )
    if not is_whole(min_new, 0, MAX_WHOLE) or (is_whole(max_new, 1) and min_new > max_new):
        found.append(f"min_new_tokens must lie in 0..max_new_tokens, got {shown(min_new)}")
    if not is_whole(given["seed"], 0, MAX_WHOLE):
        found.append(f"seed must be a whole number in 0..2^31-1, got {shown(given['seed'])}")
    sampling = _sampling(given, found)
    stop = _stop(model, given["stop"], found)
    stop_ids = _stop_ids(model, given["stop_tokens"], found)
    top = _logprobs(model, given["logprobs"], found)
    bias = _bias(model, given["logit_bias"], found)
    problems += found
    if found:
        return RequestOptions()
    return RequestOptions(
        sampling, int(given["seed"]), int(max_new), int(min_new), stop, stop_ids,
        bool(given["logprobs"]), top, bias,
    )  # fmt: skip


_SAMPLING = {
    field.name: field.default
    for field in dataclasses.fields(Options)
    if field.name in {field.name for field in dataclasses.fields(Sample)}
}


def _sampling(given: dict[str, Any], problems: list[str]) -> Sample:
    """The sampling parameters of a prompt: `sampling`, or the options themselves."""
    sampling, values = given["sampling"], {name: given[name] for name in _SAMPLING}
    wrong = sampling_problems(**values)
    problems += wrong
    if not (sampling is None or isinstance(sampling, Sample)):
        problems.append(f"sampling must be Greedy() or Sample(...), got {shown(sampling)}")
    elif not wrong and sampling is not None and values != _SAMPLING:
        problems.append(f"sampling= excludes {', '.join(_SAMPLING)}")
    if isinstance(sampling, Sample):
        return sampling
    if wrong:
        return Sample()
    top_k = int(values.pop("top_k"))
    return Sample(top_k=top_k, **{name: float(value) for name, value in values.items()})


def _logprobs(model: TextRunner, value: Any, problems: list[str]) -> int:
    """How many best tokens to report."""
    if isinstance(value, bool):
        return 0
    if is_whole(value, 0, model.config.vocab):
        return int(value)
    problems.append(
        "logprobs must be True, False or a number of tokens up to the vocabulary; "
        f"got {shown(value)}"
    )
    return 0


def _bias(model: TextRunner, bias: Any, problems: list[str]) -> tuple[tuple[int, float], ...]:
    """logit_bias as pairs of id and number."""
    if bias is None:
        return ()
    if not isinstance(bias, Mapping):
        problems.append(f"logit_bias must map token ids to numbers, got {shown(bias)}")
        return ()
    bad = [
        f"logit_bias: {shown(token)}: {shown(value)} is not an id and a number"
        for token, value in bias.items()
        if not (model.is_id(token) and is_number(value) and value < float("inf"))
    ]
    problems += bad
    return () if bad else tuple(sorted((int(t), float(v)) for t, v in bias.items()))


def _stop(model: TextRunner, stop: Any, problems: list[str]) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else items_of(stop)
    if texts is None or not all(isinstance(text, str) for text in texts):
        problems.append(f"stop must be a string or a list of strings, got {shown(stop)}")
        return ()
    if texts and model.tokenizer is None:
        problems.append("stop strings need a tokenizer, and this folder has none: use stop_tokens")
    if "" in texts:
        problems.append("an empty stop string would stop at once")
    return tuple(map(str, texts))


def _stop_ids(model: TextRunner, stop_tokens: Any, problems: list[str]) -> frozenset[int]:
    ids = ids_of(model.config.eos if stop_tokens is None else stop_tokens)
    if ids is None:
        problems.append(f"stop_tokens must be a list of token ids, got {shown(stop_tokens)}")
        return frozenset()
    bad = [f"stop_tokens: {shown(i)} is not a token id" for i in ids if not model.is_id(i)]
    problems += bad
    return frozenset() if bad else frozenset(map(int, ids))
