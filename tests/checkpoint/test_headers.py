"""Index and headers: every fault is named, all in one error, whatever the bytes say."""

import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoints import EMBED, FIXTURES, INDEX, NORM, assert_same, problems, read_all
from faults import (
    content,
    entry,
    grown,
    header,
    header_text,
    offsets,
    replaced,
    special_file,
    split_shard,
    spoil_json,
    twice,
)
from safetensors.numpy import save_file

from kimi_jax.checkpoint import Checkpoint, save_hf, to_hf
from kimi_jax.errors import CheckpointError

config, tensors, saved, folder, write = FIXTURES

CORRUPT = "corrupt header"
SHARD_FAULTS = {
    "missing": (Path.unlink, "cannot be read, No such file"),
    "a FIFO": (special_file(os.mkfifo), "not a regular file but a FIFO"),
    "a folder": (special_file(Path.mkdir), "not a regular file but a directory"),
    "a device": (special_file(lambda p: p.symlink_to("/dev/zero")), "but a character device"),
    "a link to itself": (special_file(lambda p: p.symlink_to(p)), "Too many levels"),
    "a link to nothing": (special_file(lambda p: p.symlink_to("gone")), "No such file"),
    "empty": (replaced(b""), "truncated"),
    "cut in its length": (content(lambda c: c[:7]), "truncated"),
    "cut in its header": (content(lambda c: c[:50]), "truncated"),
    "cut in its data": (content(lambda c: c[:-1]), "truncated"),
    "too long": (content(lambda c: c + b"\0"), "corrupt, its tensors end"),
    "of a huge header": (content(lambda c: b"\xff" * 8 + c[8:]), "truncated or corrupt"),
    "of 6 GB of header": (
        grown(7_000_000_000, 6_000_000_000),
        "a header of 6,000,000,000 bytes where 100,000,000 are allowed",
    ),
    "of no header": (replaced(bytes(8)), CORRUPT),
    "not JSON": (header_text(lambda h: h.replace(b"{", b"[", 1)), CORRUPT),
    "not UTF-8": (header_text(lambda h: h.replace(b'"', b"\xff", 1)), CORRUPT),
    "UTF-16": (header_text(lambda h: h.decode().encode("utf-16")), "not UTF-8"),
    "with a BOM": (header_text(lambda h: b"\xef\xbb\xbf" + h), "BOM"),
    "a list": (header_text(lambda h: b"[]"), "not a table"),
    "nested without end": (header_text(lambda h: b"[" * 100_000), "nested too deeply"),
    "with a tensor twice": (header_text(twice), "appears twice"),
    "with a number of 5,000 digits": (
        header_text(lambda h: h.replace(b"[", b"[" + b"9" * 5_000 + b",", 1)),
        "5,000 digits",
    ),
    "with metadata that is a list": (header(lambda h: h.update(__metadata__=[])), "__metadata__"),
    "with metadata that is null": (header(lambda h: h.update(__metadata__=None)), "__metadata__"),
    "with a number in its metadata": (
        header(lambda h: h.update(__metadata__={"a": 1})),
        "corrupt header, __metadata__: {'a': 1}",
    ),
    "with a tensor that is a list": (header(lambda h: h.update(x=[1, 2])), "x: [1, 2]"),
    "with a tensor that is null": (header(lambda h: h.update(x=None)), "x: None"),
    "of a shape unlike its bytes": (entry(shape=[5]), CORRUPT),
    "of a negative shape": (entry(shape=[-1]), CORRUPT),
    "of a shape that is negative twice": (entry(shape=[-2, -18, 2]), CORRUPT),
    "of a shape of floats": (entry(shape=[36.0, 2.0]), CORRUPT),
    "of a shape of booleans": (entry(shape=[True, 36]), CORRUPT),
    "of a shape that is text": (entry(shape="36"), CORRUPT),
    "of a shape that is a table": (entry(shape={"36": 36}), CORRUPT),
    "of a shape whose product overflows": (entry(shape=[2**32, 2**32, 36]), CORRUPT),
    "of a shape of huge numbers": (entry(shape=[10**3_999] * 100), CORRUPT),
    "of an unknown dtype": (entry(dtype="F3"), CORRUPT),
    "of a dtype that is a list": (entry(dtype=["BF16"]), CORRUPT),
    "without a dtype": (entry(dtype=None), CORRUPT),
    "without offsets": (entry(data_offsets=None), CORRUPT),
    "with one offset": (entry(data_offsets=[0]), CORRUPT),
    "with offsets that are text": (entry(data_offsets="01"), CORRUPT),
    "with floats as offsets": (offsets(lambda a, b: [float(a), float(b)]), CORRUPT),
    "with negative offsets": (offsets(lambda a, b: [a - b, 0]), CORRUPT),
    "with offsets the wrong way round": (offsets(lambda a, b: [b, a]), CORRUPT),
    "with a gap": (offsets(lambda a, b: [a + 2, b + 2]), "starts at byte"),
    "with an overlap": (offsets(lambda a, b: [a - 2, b - 2]), "starts at byte"),
    "with offsets beyond its end": (offsets(lambda a, b: [a + 10**15, b + 10**15]), CORRUPT),
}


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_a_bad_shard_is_named_and_its_tensors_are_not(fault, folder, config):
    plant, expected = SHARD_FAULTS[fault]
    path = sorted(folder.glob("model-00002-*"))[0]
    plant(path)
    (problem,) = problems(folder, config)
    assert problem.startswith(f"{path.name}: ") and expected in problem


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_a_bad_single_file_is_named(fault, config, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    plant, expected = SHARD_FAULTS[fault]
    plant(path)
    (problem,) = problems(tmp_path, config)
    if fault == "missing":
        assert problem == f"{tmp_path}: holds neither {INDEX} nor model.safetensors"
    else:
        assert problem.startswith("model.safetensors: ") and expected in problem


def test_no_folder_and_no_index(config, tmp_path):
    assert problems(tmp_path / "nowhere", config) == (f"{tmp_path}/nowhere: no such folder",)
    (tmp_path / "file").touch()
    assert problems(tmp_path / "file", config) == (f"{tmp_path}/file: no such folder",)
    expected = f"{tmp_path}: holds neither {INDEX} nor model.safetensors"
    assert problems(tmp_path, config) == (expected,)


def weight_map(listed):
    return replaced(json.dumps({"weight_map": listed}).encode())


INDEX_FAULTS = {
    "empty": (replaced(b""), "not a JSON file"),
    "cut": (content(lambda c: c[:-40]), "not a JSON file"),
    "UTF-16": (content(lambda c: c.decode().encode("utf-16")), "not UTF-8"),
    "deep": (replaced(b"[" * 100_000), "nested too deeply"),
    "a list": (replaced(b"[]"), "not an index"),
    "a number": (replaced(b"3"), "not an index"),
    "without a map": (replaced(b"{}"), "not an index"),
    "a map that is a number": (weight_map(3), "not an index"),
    "a map that is a list": (weight_map([["a", "b"]]), "not an index"),
    "a shard that is a number": (weight_map({"a": 3}), "not an index"),
    "a shard that is null": (weight_map({"a": None}), "not an index"),
    "a shard that is a list": (weight_map({"a": ["b"]}), "not an index"),
    "an empty map": (weight_map({}), "lists no tensor"),
    "a tensor twice": (replaced(b'{"weight_map": {"a": "b", "a": "c"}}'), "'a' appears twice"),
    "another folder": (weight_map({"a": "../b"}), "outside the folder, ['../b']"),
    "an absolute name": (weight_map({"a": "/etc/passwd"}), "outside the folder"),
    "a folder below": (weight_map({"a": "b/c"}), "outside the folder"),
    "the folder": (weight_map({"a": "."}), "outside the folder"),
    "the folder above": (weight_map({"a": ".."}), "outside the folder"),
    "an empty name": (weight_map({"a": ""}), "outside the folder"),
    "a FIFO": (special_file(os.mkfifo), "not a regular file but a FIFO"),
    "a folder in its place": (special_file(Path.mkdir), "but a directory"),
    "a link to itself": (special_file(lambda p: p.symlink_to(p)), "Too many levels"),
    "a link to nothing": (special_file(lambda p: p.symlink_to("gone")), "No such file"),
    "huge": (grown(1 << 40, 0), "too large"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_bad_index(fault, folder, config):
    plant, expected = INDEX_FAULTS[fault]
    plant(folder / INDEX)
    (problem,) = problems(folder, config)
    assert problem.startswith(f"{folder / INDEX}: ") and expected in problem


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_shard_of_a_name_that_no_file_has(name, folder, config):
    weight_map({NORM: name})(folder / INDEX)
    (problem,) = problems(folder, config)
    assert problem.startswith(f"{name}: ")


def test_index_and_shards_that_disagree(folder, config):
    name, other = NORM, EMBED
    shard = {}
    spoil_json(folder, lambda listed: shard.update({name: listed.pop(name), other: listed[other]}))
    spoil_json(
        folder,
        lambda listed: listed.update({"language_model.ghost": shard[name], other: shard[name]}),
    )
    found = problems(folder, config)
    assert f"language_model.ghost: not in {shard[name]}, where the index has it" in found
    assert f"{name}: in {shard[name]}, where the index does not have it" in found
    assert f"{other}: not in {shard[name]}, where the index has it" in found
    assert f"{other}: in {shard[other]}, where the index does not have it" in found
    assert len(found) == 4


def test_a_shard_that_the_index_points_to_is_missing(folder, config):
    spoil_json(
        folder,
        lambda listed: listed.update({NORM: "model-9.safetensors"}),
    )
    found = problems(folder, config)
    assert found[0] == "model-9.safetensors: cannot be read, No such file or directory"
    assert len(found) == 2 and "norm.weight: in model-" in found[1]


def test_a_tensor_in_two_shards_is_named(folder, config):
    first, second = sorted(folder.glob("model-*"))[:2]
    table = json.loads(split_shard(first)[0])
    name = next(name for name in table if name != "__metadata__")
    shape, dtype = table[name]["shape"], table[name]["dtype"]
    size = np.diff(table[name]["data_offsets"])[0]
    end = len(split_shard(second)[1])
    repeated = {"shape": shape, "dtype": dtype, "data_offsets": [end, end + int(size)]}
    header(lambda h: h.update({name: repeated}))(second)
    content(lambda c: c + bytes(size))(second)
    assert problems(folder, config) == (
        f"{name}: in {second.name}, where the index does not have it",
    )


@pytest.mark.parametrize("padding", range(8))
def test_data_of_any_alignment_are_read_alike(padding, folder, config, tensors):
    for path in folder.glob("model-*.safetensors"):
        header_text(lambda text: text.rstrip() + b" " * padding)(path)
    with Checkpoint(folder, config) as checkpoint:
        assert_same(to_hf(config, read_all(checkpoint)), tensors)


def test_shards_may_be_links_as_in_a_download_cache(folder, config, tmp_path):
    (tmp_path / "blobs").mkdir()
    for path in folder.glob("model-*.safetensors"):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    with Checkpoint(folder, config) as checkpoint:
        assert len(read_all(checkpoint)) > 50


# Damage of any kind: the same weights, or one error; nothing else, and no large allocation.

ODD_VALUES = [
    None,
    True,
    -1,
    2**40,
    1.5,
    10**30,
    "",
    "BF16 ",
    [],
    [0],
    [0, 0, 0],
    {},
    {"a": 1},
    "\ud800",
]


def damaged_bytes(rng, sound):
    start = rng.randrange(len(sound))
    stop = start + rng.choice([0, 1, 1, 1, 2, 20])
    noise = rng.choice(
        [b"", rng.randbytes(1), b'"', b"0", b"9", b"{", b"]", b",", b"-", b" ", b"\\"]
    )
    return sound[:start] + noise + sound[stop:]


def damaged_json(rng, sound):
    """The JSON value with one of its values, at any depth, replaced by an odd one."""
    value = json.loads(sound)
    parent = value
    while True:
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        child = parent[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.2:
            break
        parent = child
    parent[key] = rng.choice(ODD_VALUES)
    return json.dumps(value).encode()


def damage(rng, folder, single):
    """Damages the index or the length, header or end of the file of tensors, in one place."""
    kind = rng.choice(["index", "index", "header", "header", "header", "length", "end"])
    change = rng.choice([damaged_bytes, damaged_json])
    if kind == "index":
        content(lambda sound: change(rng, sound))(folder / INDEX)
    elif kind == "header":
        header_text(lambda sound: change(rng, sound))(single)
    elif kind == "length":
        content(lambda sound: damaged_bytes(rng, sound[:8])[:8].ljust(8, b"\1") + sound[8:])(single)
    else:
        content(
            lambda sound: sound[: -rng.randrange(1, 5_000)] if rng.random() < 0.5 else sound + b"\0"
        )(single)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_folder_gives_the_same_weights_or_one_error(seed, config, tensors, tmp_path):
    """Of the data only the end is damaged: other values there are other weights."""
    save_hf(tmp_path / "sound", config.to_hf(), tensors)
    names = sorted(path.name for path in (tmp_path / "sound").iterdir())
    rng = random.Random(seed)
    refused = 0
    if seed == 0:  # takes four times as long
        tracemalloc.start()
    for _ in range(40):
        folder = shutil.copytree(tmp_path / "sound", tmp_path / "copy", dirs_exist_ok=True)
        damage(rng, folder, folder / "model-00001-of-00001.safetensors")
        try:
            with Checkpoint(folder, config) as checkpoint:
                assert_same(to_hf(config, read_all(checkpoint)), tensors)
        except CheckpointError as error:
            refused += 1
            assert any(name in str(error) for name in [*names, "language_model", "experts"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 25 and peak < 50e6
