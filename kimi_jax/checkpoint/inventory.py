"""The tensors of a checkpoint compared with those that the weights of a config are read from."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .headers import Tensor
from .names import Weight, is_vision, shape_text

_LISTED_EXPERTS = 16  # missing experts of a weight that are reported one by one
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)(0|[1-9][0-9]{0,8})(?=\.)")


def inventory_problems(
    weights: Sequence[Weight],
    tensors: Mapping[str, Tensor],
    listed: Iterable[str],
    odd_experts: Iterable[str],
    reads_vision: bool,
) -> Iterator[str]:
    """Tensors that are missing, unknown, or of another shape or dtype than their weight; where the
    vision part is not read, its tensors are not looked at.

    `listed` are the tensors of the index and `odd_experts` the expert matrices reported already:
    what they name is not missing. Takes time and memory in proportion to what the files hold and to
    the number of weights, not to the number of experts that a config claims.
    """
    reported = {f"{name}.weight{end}" for name in odd_experts for end in ("", "_packed", "_scale")}
    by_source = _by_source({**tensors, **dict.fromkeys(listed), **dict.fromkeys(reported)})
    unknown = dict.fromkeys(tensors.keys() - reported)
    for source, weight in {weight.source: weight for weight in weights}.items():
        found = {n: name for n, name in by_source[source].items() if n < weight.count}
        yield from _missing(weight, found)
        readable = [found[n] for n in sorted(found) if found[n] in unknown]
        for name in readable:
            shape, dtype, *_ = tensors[name]
            yield from (f"{name}: {misfit}" for misfit in weight.misfits(shape, dtype))
            del unknown[name]
        yield from _mixed_dtypes(weight, [tensors[name] for name in readable])
    for name, tensor in tensors.items():
        if name in unknown and (reads_vision or not is_vision(name)):
            yield f"{name}: unknown tensor of shape {shape_text(tensor.shape)} in {tensor.shard}"


def _by_source(names: Iterable[str]) -> defaultdict[str, dict[int, str]]:
    """Tensor names by the source of their weight and the expert's number, 0 for other weights."""
    by_source: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        if "{}" in name:
            continue
        expert = _EXPERT_NUMBER.search(name)
        if expert is None:
            by_source[name][0] = name
        else:
            source = f"{name[: expert.start()]}{{}}{name[expert.end() :]}"
            by_source[source][int(expert[0])] = name
    return by_source


def _missing(weight: Weight, found: Mapping[int, str]) -> Iterator[str]:
    absent = weight.count - len(found)
    if absent == 0 or weight.optional:
        return
    expected = f"shape {shape_text(weight.file_shape)} is expected"
    numbers = (number for number in range(weight.count) if number not in found)
    if absent <= _LISTED_EXPERTS:
        for number in numbers:
            yield f"{weight.source.replace('{}', str(number))}: missing, {expected}"
    else:
        first = ", ".join(str(next(numbers)) for _ in range(3))
        name = weight.source.replace("{}", "*")
        yield f"{name}: missing for {absent:,} of {weight.count:,} experts ({first}, …), {expected}"


def _mixed_dtypes(weight: Weight, tensors: Iterable[Tensor]) -> Iterator[str]:
    dtypes = {tensor.dtype for tensor in tensors} & set(weight.storage.accepted)
    if len(dtypes) > 1:
        yield f"{weight.name}: experts differ in dtype, {' and '.join(sorted(dtypes))}"
