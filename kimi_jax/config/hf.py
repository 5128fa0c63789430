"""Reads a released `config.json` into the fields of `Config`, and writes them back.

`read` never fills in a size that the file lacks, and it honours or refuses every key that changes a
result: `keys` lists them. Values that are null count as absent. All problems of the files are
raised together, in one `ConfigError`.

Where the file has a `text_config`, the decoder's keys stand there, and tokens, tied embeddings and
the tables of selection and quantization may stand at the top level instead. The ids that end a
reply are the union of every `eos_token_id`: in `text_config`, at the top level, and in the
`generation_config.json` beside the file. Of that second file nothing else is read.
"""

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, FileError, label, shown
from ..files import read_json
from . import keys
from .keys import keys_of
from .section import Section, same

_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
_FILE_BYTES = 16 << 20  # a released file has about 10 kB
_LISTED = 40  # layers a problem names


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Every field of `Config`, from a parsed file, a file, or a folder that holds a `config.json`.

    Raises one `ConfigError` with every problem; FileNotFoundError where there is no file.
    """
    problems: list[str] = []
    file, generation = load(source, problems)
    top = Section(file, problems)
    ends = Section(generation, problems, f"{_GENERATION_FILE}: ")
    problems += [*top.form_problems(), *ends.form_problems()]
    values = {} if problems else _fields(top, ends)
    if problems:
        raise ConfigError(*problems)
    return values


def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The released form of every field of `Config`: the inverse of `read`."""
    text = {field.keys[0]: fields[field.name] for field in (*keys.TEXT, *keys.GROUPS)}
    text |= {key: rule.value for key, rule in keys.FIXED.items() if rule.required}
    text |= {
        "num_key_value_heads": fields["heads"],
        "use_grouped_topk": True,
        "model_type": "kimi_linear",
        "tie_word_embeddings": fields["tie_embeddings"],
        "linear_attn_config": _linear_table(fields),
        "bos_token_id": fields["bos"],
        "eos_token_id": list(fields["eos"]) or None,
        "pad_token_id": fields["pad"],
    }
    sparse = fields["index_topk"] > 0
    if sparse:
        text["dsa_config"] = {field.keys[0]: fields[field.name] for field in keys.DSA}
        text["dsa_config"]["dsa_layers"] = [i + 1 for i in fields["mla_layers"]]
    if fields["quantized"]:
        text["quantization_config"] = quantization_table()
    return {
        "architectures": [keys.SPARSE_ARCHITECTURE if sparse else keys.ARCHITECTURE],
        "model_type": "kimi_k3",
        "tie_word_embeddings": fields["tie_embeddings"],
        "text_config": text,
    }


def quantization_table() -> dict[str, Any]:
    """The released declaration of MXFP4 experts."""
    packing = keys.QUANTIZATION["format"].value
    weights = {key: rule.value for key, rule in keys.QUANTIZATION_WEIGHTS.items()}
    return {
        "quant_method": keys.QUANTIZATION["quant_method"].value,
        "format": packing,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"format": packing, "targets": ["Linear"], "weights": weights}
        },
    }


def _linear_table(fields: Mapping[str, Any]) -> dict[str, Any]:
    linear = {field.keys[0]: fields[field.name] for field in keys.LINEAR}
    if fields["kda_value_dim"] == fields["kda_key_dim"]:
        del linear["head_v_dim"]  # released files have one head_dim for both
    full = {i + 1 for i in fields["mla_layers"]}
    linear["kda_layers"] = [i for i in range(1, fields["layers"] + 1) if i not in full]
    linear["full_attn_layers"] = sorted(full)
    return linear


# Files.


def load(source: Any, problems: list[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The two parsed files; the second is empty where there is none, and for a parsed file."""
    if isinstance(source, Mapping):
        return source, {}
    try:
        path = Path(source)
    except TypeError as error:
        message = f"a config is a table, or the path of a file or folder; got {shown(source)}"
        raise ConfigError(message) from error
    path = path / _FILE if os.path.isdir(path) else path
    file = load_table(path)
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        generation = load_table(path.with_name(_GENERATION_FILE)) or {}
    except ConfigError as error:
        problems += error.problems
        generation = {}
    return file, generation


def load_table(path: Path) -> Mapping[str, Any] | None:
    """The table in a JSON file; None where there is no such file."""
    try:
        table = read_json(path, _FILE_BYTES)
    except FileError as error:
        if error.missing:
            return None
        raise ConfigError(f"{label(error.path)}: {error.reason}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{label(path)}: holds {type(table).__name__}, not a table")
    return table


# Fields.


def _fields(top: Section, generation: Section) -> dict[str, Any]:
    """Every field of `Config`; a field with a problem is None or missing."""
    text = top.table("text_config") if "text_config" in top.values else top
    if text is None:
        return {}
    text.path = ""  # a key has the same name nested or not
    values = text.read_all(keys.TEXT) | _read_groups(text)
    for field in (keys.BOS, keys.PAD):
        values[field.name] = _holder(text, top, field.keys[0]).read(field)
    values["eos"] = _read_ends((text, top, generation), values["vocab"])
    values["tie_embeddings"] = _agreeing_holder(text, top, keys.TIE.keys[0]).read(keys.TIE)
    values |= _read_linear(text, values["layers"])
    values |= _read_dsa(text, top, values.get("mla_layers"))
    values["quantized"] = _read_quantization(text, top)
    _check_text(text, nested=text is not top)
    if text is not top:
        _check_top(top, text)
    top.problems += broken_rules(keys.RULES, values)
    return values


def broken_rules(rules: Iterable[keys.Rule], values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each rule that the values break; values that are None or missing break none."""
    for rule in rules:
        needed = [values.get(name) for name in rule.needs]
        if None not in needed and not rule.holds(*needed):
            yield rule.message.format(*map(shown, needed))


def _holder(text: Section, top: Section, key: str) -> Section:
    """The level that holds the key: the decoder's, or else the top level."""
    return text if text.values.get(key) is not None else top


def _agreeing_holder(text: Section, top: Section, key: str) -> Section:
    """The level that holds the key; where both do, they must hold the same."""
    inner = text.values.get(key)
    outer = top.values.get(key)
    if inner is not None and outer is not None and inner != outer:
        top.note(key, f"text_config has {shown(inner)}, the top level has {shown(outer)}")
    return _holder(text, top, key)


def _read_ends(sections: Iterable[Section], vocab: int | None) -> tuple[int, ...] | None:
    """Every id that ends a reply, in the order in which the sections name them."""
    named: list[int] = []
    for section in dict.fromkeys(sections):  # a file without text_config is one section, not two
        ids = section.read(keys.EOS) or ()
        outside = [end for end in ids if vocab is not None and end >= vocab]
        if outside:
            section.note(keys.EOS.keys[0], f"{_some(outside)} outside vocab_size={vocab}")
        named += ids
    return tuple(dict.fromkeys(named))


def _read_groups(text: Section) -> dict[str, Any]:
    if text.read(keys.GROUPED) is False:
        return {field.name: 1 for field in keys.GROUPS}
    return text.read_all(keys.GROUPS)


def _read_linear(text: Section, layers: int | None) -> dict[str, Any]:
    linear = text.table("linear_attn_config")
    if linear is None:
        return {}
    values = linear.read_all(keys.LINEAR)
    values["kda_value_dim"] = values["kda_value_dim"] or values["kda_key_dim"]
    kda = linear.read(keys.KDA_LAYERS)
    full = linear.read(keys.FULL_LAYERS)
    if layers is not None and kda is not None and full is not None:
        _check_partition(linear, kda, full, layers)
        values["mla_layers"] = tuple(sorted(i - 1 for i in full))
    linear.check_unknown(keys_of(*keys.LINEAR, keys.KDA_LAYERS, keys.FULL_LAYERS))
    return values


def _check_partition(
    linear: Section, kda: tuple[int, ...], full: tuple[int, ...], layers: int
) -> None:
    """The two 1-indexed lists must name each of 1..layers exactly once."""
    for key, listed in (("kda_layers", kda), ("full_attn_layers", full)):
        outside = {i for i in listed if not 1 <= i <= layers}
        if outside:
            linear.note(key, f"layers {_some(outside)} are outside 1..{layers}")
        twice = {i for i, times in Counter(listed).items() if times > 1}
        if twice:
            linear.note(key, f"layers {_some(twice)} are listed more than once")
    both = set(kda) & set(full)
    if both:
        linear.note("kda_layers", f"layers {_some(both)} are in full_attn_layers too")
    neither = set(range(1, layers + 1)) - set(kda) - set(full)
    if neither:
        note = f"layers {_some(neither)} are neither here nor in full_attn_layers"
        linear.note("kda_layers", note)


def _some(numbers: Collection[int]) -> str:
    """Whole numbers in order, the first of them where they are many."""
    more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return f"[{', '.join(map(shown, sorted(numbers)[:_LISTED]))}]{more}"


def _read_dsa(text: Section, top: Section, mla: tuple[int, ...] | None) -> dict[str, Any]:
    """The sparse selection of K3.1; sizes of 0 where the file has none."""
    holder = _agreeing_holder(text, top, "dsa_config")
    dsa = holder.table("dsa_config", required=False)
    if dsa is None:
        if _is_sparse(top.values) and holder.values.get("dsa_config") is None:
            named = keys.SPARSE_ARCHITECTURE
            text.note("dsa_config", f"missing, architectures names {named}")
        return {field.name: 0 for field in keys.DSA}
    values = dsa.read_all(keys.DSA)
    # The name of the layer list is not settled; what it must hold is.
    unread = dsa.values.keys() - keys_of(*keys.DSA)
    lists = {key for key in unread if "rope" not in key and keys.is_numbers(dsa.values[key])}
    full = None if mla is None else [i + 1 for i in mla]
    for key in sorted(lists):
        if full is not None and sorted(dsa.values[key]) != full:
            given = shown(list(dsa.values[key]))
            dsa.note(key, f"{given} is not full_attn_layers, {shown(full)}")
    dsa.check_unknown(keys_of(*keys.DSA) | lists)
    return values


def _is_sparse(values: Mapping[str, Any]) -> bool:
    """Whether `architectures` names K3.1."""
    named = values.get("architectures")
    named = [named] if isinstance(named, str) else named
    return isinstance(named, list | tuple) and keys.SPARSE_ARCHITECTURE in [
        name for name in named if isinstance(name, str)
    ]


def _read_quantization(text: Section, top: Section) -> bool:
    """Whether the file declares packed experts. Only the released MXFP4 scheme passes."""
    holder = _agreeing_holder(text, top, "quantization_config")
    scheme = holder.table("quantization_config", required=False)
    if scheme is None:
        return False
    scheme.check_fixed(keys.QUANTIZATION)
    scheme.check_unknown(keys.QUANTIZATION.keys() | keys.IRRELEVANT_QUANTIZATION)
    groups = scheme.table("config_groups")
    if groups is not None:
        if not groups.values:
            scheme.note("config_groups", "empty, at least one group is required")
        for name in groups.values:
            _check_quantization_group(groups.table(name), scheme.values.get("format"))
    return True


def _check_quantization_group(group: Section | None, outer_format: Any) -> None:
    if group is None:
        return
    group.check_fixed(keys.QUANTIZATION_GROUP)
    group.check_unknown(keys.QUANTIZATION_GROUP.keys() | keys.IRRELEVANT_GROUP)
    if outer_format is None and group.values.get("format") is None:
        group.note("format", f"missing, {keys.QUANTIZATION['format'].value!r} is required")
    weights = group.table("weights")
    if weights is not None:
        weights.check_fixed(keys.QUANTIZATION_WEIGHTS)
        weights.check_unknown(keys.QUANTIZATION_WEIGHTS.keys() | keys.IRRELEVANT_WEIGHTS)


def _check_text(text: Section, nested: bool) -> None:
    """Keys whose value is settled, and keys that nothing here knows."""
    text.check_fixed(keys.FIXED)
    kv_heads, heads = (text.values.get(f"num_{kind}_heads") for kind in ("key_value", "attention"))
    if kv_heads is not None and heads is not None and not same(kv_heads, heads):
        note = f"{shown(kv_heads)} is not num_attention_heads, {shown(heads)}"
        text.note("num_key_value_heads", note)
    beside = set() if nested else _beside_decoder(text)
    text.check_unknown(keys.DECODER | keys.IRRELEVANT | beside)


def _check_top(top: Section, text: Section) -> None:
    """Beside a text_config a key of the decoder is not read, so it may only repeat what holds."""
    repeated = {
        key
        for key in keys.DECODER & top.values.keys()
        if any(same(top.values[key], held) for held in (None, text.values.get(key)))
        or (key in keys.FIXED and same(top.values[key], keys.FIXED[key].value))
    }
    read = keys_of(keys.BOS, keys.EOS, keys.PAD, keys.TIE)
    read |= {"text_config", "dsa_config", "quantization_config"}
    known = read | repeated | keys.IRRELEVANT | _beside_decoder(top)
    top.check_unknown(known, where=" beside text_config")


def _beside_decoder(top: Section) -> set[str]:
    """The keys of the top level that do not concern the decoder."""
    return {key for key in top.values if key.startswith(keys.VISION)} | keys.SERVING
