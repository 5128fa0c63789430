"""Files and values that nobody would write: a config, or one error that is safe to print."""

import inspect
import json
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from configs import DSA, MISSING, TEXT, k3, k3_1, plant, problems_of, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.config import hf
from kimi_jax.config.config import Config
from kimi_jax.errors import ConfigError

ESCAPES = "\x1b[2J\x1b]0;title\x07\r\n\u202e\u200b\x9b"


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


ODD_VALUES = {
    "null": None,
    "true": True,
    "zero": 0,
    "one": 1,
    "negative": -1,
    "huge": 10**5000,
    "64 bits": 2**63,
    "fraction": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "subnormal": 1e-320,
    "too large": 1e300,
    "empty text": "",
    "text": "sigmoid",
    "escapes": ESCAPES,
    "3 MB": "x" * 3_000_000,
    "empty list": [],
    "huge numbers": [10**5000] * 3,
    "mixed list": [1, "1", None, [2], {"a": 1}, 1.0, True],
    "long list": list(range(20_000)),
    "deep": deep(60),
    "deeper": deep(5_000),
    "empty table": {},
    "table": {"num_heads": 1, ESCAPES: ESCAPES},
    "odd keys": {1: 2, None: 3, (): 4},
    "array": np.arange(3),
    "bytes": b"\xff",
}


def paths(table: dict, prefix: str = "") -> list[str]:
    """Every dotted key of a table, those of tables in it too."""
    inner = [paths(value, f"{prefix}{key}.") for key, value in table.items() if type(value) is dict]
    return [prefix + key for key in table] + [path for listed in inner for path in listed]


def check_printed(error: ConfigError) -> None:
    """A terminal only shows it, and it is short."""
    lines = str(error).split("\n")
    assert len(lines) <= 42 and max(map(len, lines)) < 2_100
    assert all(line.isprintable() for line in lines)
    assert len(lines) == min(len(error.problems), 40) + 1 + (len(error.problems) > 40)


def read_or_refuse(file: Any) -> Config | None:
    try:
        config = Config.from_hf(file)
    except ConfigError as error:
        check_printed(error)
        return None
    assert Config.from_hf(config.to_hf()) == config
    return config


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_any_key_with_any_value_reads_or_is_refused(value):
    for key in paths(k3_1()["text_config"]):
        read_or_refuse(plant(k3_1(), key, value))
    for key in k3_1():
        read_or_refuse(k3_1() | {key: value})
    for key in (*TEXT, *DSA, "generation_config", "dsa_config", "vision_x", "mystery", ESCAPES):
        read_or_refuse(k3_1() | {key: value})


def test_any_key_may_be_missing():
    for key in paths(k3_1()["text_config"]):
        read_or_refuse(plant(k3_1(), key, MISSING))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(paths(k3_1()["text_config"])), json_values, max_size=4))
def test_several_odd_values_read_or_are_refused_together(planted):
    file = k3_1()
    for key in sorted(planted, key=len, reverse=True):  # a table after what stands in it
        plant(file, key, planted[key])
    read_or_refuse(file)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_reads_or_is_refused(tmp_path_factory, data):
    text = json.dumps(k3_1(), indent=1).encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)) | st.just(len(text)))
    put = data.draw(st.binary(max_size=8) | st.sampled_from([b"{", b"]", b'"', b"1e999", b"NaN"]))
    path = tmp_path_factory.mktemp("damaged") / "config.json"
    path.write_bytes(text[:start] + put + text[stop:])
    read_or_refuse(path)


def test_escapes_in_keys_and_values_are_shown_and_not_obeyed():
    file = plant(k3(), f"linear_attn_config.{ESCAPES}", ESCAPES) | {f"a\n  b{ESCAPES}": 1}
    file = plant(file, "hidden_act", f"silu{ESCAPES}")
    problems = problems_of(file)
    assert len(problems) == 3
    for problem in problems:
        assert problem.isprintable()
    assert any(r"linear_attn_config.\x1b[2J\x1b]0;title\x07\r\n\u202e" in p for p in problems)
    assert any(p.startswith(r"a\n  b\x1b[2J") for p in problems)


def test_a_value_of_3_mb_is_shortened():
    (problem,) = problems_of(plant(k3(), "vocab_size", "x" * 3_000_000))
    assert problem.startswith("vocab_size: 'xxx") and len(problem) < 250
    (problem,) = problems_of(k3() | {"k" * 3_000_000: 1})
    assert problem.startswith("kkk") and len(problem) < 600


def test_many_unknown_keys_are_counted():
    problems = problems_of(k3() | {f"mystery_{i}": i for i in range(5_000)})
    assert len(problems) == 201 and problems[-1] == "the top level: 4,800 more unknown keys"


@pytest.mark.parametrize("key", ["vision_config", "mystery", "hidden_size", "id2label"])
def test_nesting_without_end_is_refused_by_its_key(key):
    refused(k3() | {key: deep(100)}, f"{key}: nested in more than 64 levels")
    assert Config.from_hf(k3() | {"vision_config": deep(60)}) == Config.from_hf(k3())


def test_a_table_that_holds_itself_is_refused():
    loop: dict[str, Any] = {}
    loop["a"] = [loop, loop]
    refused(k3() | {"vision_config": loop}, "vision_config: nested")
    shared: Any = {}
    for _ in range(60):
        shared = [shared] * 9  # 9^60 paths through 60 lists
    assert Config.from_hf(k3() | {"vision_config": shared}) == Config.from_hf(k3())


def test_keys_that_are_not_text_are_refused():
    refused(k3() | {5: 1}, "the key 5 is not a text")
    refused(plant(k3(), "linear_attn_config", {**TEXT["linear_attn_config"], 10**5000: 1}),
            "text_config: holds the key a whole number of 16,610 bits")  # fmt: skip


def test_any_mapping_reads():
    file = {key: MappingProxyType(value) if isinstance(value, dict) else value
            for key, value in k3().items()}  # fmt: skip
    assert Config.from_hf(MappingProxyType(file)) == Config.from_hf(k3())
    numbers = plant(k3(), "hidden_size", np.int64(256))
    assert type(Config.from_hf(numbers).hidden) is int


NOT_CONFIGS = {
    "empty": (lambda path: path.write_bytes(b""), "not a JSON file"),
    "spaces": (lambda path: path.write_bytes(b"  \n"), "not a JSON file"),
    "mark": (lambda path: path.write_bytes(b"\xef\xbb\xbf{}"), "not a JSON file"),
    "utf-16": (lambda path: path.write_text("{}", encoding="utf-16"), "not UTF-8"),
    "latin-1": (lambda path: path.write_bytes('{"a": "é"}'.encode("latin-1")), "not UTF-8"),
    "two": (lambda path: path.write_bytes(b"{} {}"), "not a JSON file"),
    "twice": (lambda path: path.write_bytes(b'{"a": 1, "a": 2}'), "'a' appears twice"),
    "huge number": (lambda path: path.write_text(f'{{"a": {"9" * 5000}}}'), "not a JSON file"),
    "a number": (lambda path: path.write_bytes(b"1"), "holds int, not a table"),
    "directory": (lambda path: path.mkdir(), "a directory"),
    "FIFO": (lambda path: os.mkfifo(path), "a FIFO"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a character device"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels"),
    "large": (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**40), "too large"),
}


@pytest.mark.parametrize("case", NOT_CONFIGS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_not_a_config_is_refused_by_its_path(tmp_path, case, name):
    make, words = NOT_CONFIGS[case]
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(k3()))
    make(tmp_path / name)
    refused(tmp_path, str(tmp_path / name), words)


@pytest.mark.parametrize("path", ["a" * 5_000, "a\0b", "/dev/null", "/dev/stdin"])
def test_a_path_that_cannot_be_read_is_refused(path):
    refused(path, path[:20].replace("\0", "\\x00"))


@pytest.mark.parametrize("source", [None, 5, [TEXT], b"config.json", {1}])
def test_what_is_not_a_path_is_refused(source):
    with pytest.raises(ConfigError, match="a config is a table, or the path of a file or folder"):
        inspect.unwrap(hf.read)(source)


# Ids that end a reply.


def write_files(folder: Path, inner: Any, outer: Any, generation: Any) -> Path:
    file = plant(k3(), "eos_token_id", inner)
    file |= {} if outer is MISSING else {"eos_token_id": outer}
    (folder / "config.json").write_text(json.dumps(file))
    if generation is not MISSING:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    "inner, outer, generation, ends",
    [
        (6, MISSING, MISSING, (6,)),
        (6, [6, 5], MISSING, (6, 5)),
        (6, 5, {"eos_token_id": [7, 6]}, (6, 5, 7)),
        ([6, 6], MISSING, {"eos_token_id": 7, "temperature": 1.0}, (6, 7)),
        (MISSING, MISSING, {"eos_token_id": 7}, (7,)),
        (MISSING, 5, {"eos_token_id": None}, (5,)),
        (6, MISSING, {}, (6,)),
        (MISSING, MISSING, {"bos_token_id": 3}, ()),
    ],
)
def test_a_reply_ends_at_every_id_that_any_file_names(tmp_path, inner, outer, generation, ends):
    folder = write_files(tmp_path, inner, outer, generation)
    assert Config.from_hf(folder).eos == ends == Config.from_hf(folder / "config.json").eos
    assert Config.from_hf(Config.from_hf(folder).to_hf()).eos == ends


@pytest.mark.parametrize("ends", [-1, True, 1.5, "2", [1, None], {"a": 1}, 512, [2, 10**30]])
def test_a_wrong_end_is_refused_with_its_file(tmp_path, ends):
    refused(write_files(tmp_path, 6, MISSING, {"eos_token_id": ends}),
            "generation_config.json: eos_token_id: ")  # fmt: skip
    refused(write_files(tmp_path, 6, ends, {}), "eos_token_id: ")


def test_problems_of_both_files_come_together(tmp_path):
    folder = write_files(tmp_path, 6, 999, {"eos_token_id": "x"})
    named = [re.split(r": [^e]", problem)[0] for problem in problems_of(folder)]
    assert named == ["eos_token_id", "generation_config.json: eos_token_id"]
