"""Files: only regular ones are read, up to a limit; JSON says one thing or is refused."""

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.errors import FileError
from kimi_jax.files import open_regular, parse_json, read_json, read_regular


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is at most 108 bytes long
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def make_unreadable(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0)


NOT_FILES = {
    "missing": (lambda path: None, "cannot be read, No such file"),
    "directory": (lambda path: path.mkdir(), "not a regular file but a directory"),
    "FIFO": (lambda path: os.mkfifo(path), "not a regular file but a FIFO"),
    "socket": (make_socket, "cannot be read, No such device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "but a character device"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), "cannot be read, "),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read, Too many levels"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "cannot be read, No such file"),
    "link to a FIFO": (
        lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
        "not a regular file but a FIFO",
    ),
}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_only_regular_files_are_read(kind, tmp_path):
    path = tmp_path / "file.json"
    make, expected = NOT_FILES[kind]
    make(path)
    for read in (open_regular, lambda p: read_regular(p, 10), lambda p: read_json(p, 10)):
        with pytest.raises(FileError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ") and expected in str(caught.value)
        assert caught.value.missing == ("No such file" in expected)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "file"
    make_unreadable(path)
    with pytest.raises(FileError, match="cannot be read, Permission denied"):
        read_regular(path, 10)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5_000])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(FileError, match=r"cannot be read|not a name"):
        read_regular(tmp_path / name, 10)


def test_links_to_regular_files_are_followed(tmp_path):
    (tmp_path / "blob").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("blob")
    assert read_regular(tmp_path / "link", 3) == b"[1]"
    assert read_json(tmp_path / "link", 3) == [1]


def test_a_file_above_the_limit_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(FileError, match=r"too large, 1,099,511,627,776 bytes of at most 1,000"):
        read_regular(path, 1_000)
    os.truncate(path, 1_000)
    assert len(read_regular(path, 1_000)) == 1_000


def test_a_file_whose_size_is_not_known_beforehand_is_limited_too():
    assert os.stat("/proc/self/status").st_size == 0
    with pytest.raises(FileError, match="too large"):
        read_regular("/proc/self/status", 10)


BAD_JSON = {
    b"": "Expecting value",
    b"{": "Expecting property name",
    b"\xef\xbb\xbf{}": "BOM",
    '{"a": 1}'.encode("utf-16"): "not UTF-8 at byte 0",
    '{"a": 1}'.encode("utf-16-le"): "Expecting property name",
    b'{"a": "\xff"}': "not UTF-8 at byte 7",
    b'{"a": 1, "b": 2, "a": 1}': "the key 'a' appears twice",
    b'[NaN, {"a": -Infinity}]': "NaN is not a JSON number",
    b"1e999": "the number 1e999 is too large",
    b"9" * 5_000: "a number of 5,000 digits",
    b"[" * 100_000: "nested too deeply",
    b'{"a":' * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("content", BAD_JSON, ids=lambda content: repr(content[:12]))
def test_json_that_says_no_one_thing_is_refused(content, tmp_path):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        parse_json(content)
    assert BAD_JSON[content] in str(caught.value)
    with pytest.raises(FileError, match=r"file.json: not a JSON file \("):
        read_json(tmp_path / "file.json", 1 << 20)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=200)
@given(values, st.integers(0, 1 << 30), st.binary(max_size=3))
def test_any_bytes_are_json_or_a_value_error(value, place, damage):
    content = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if "\\ud" not in json.dumps(value):
        assert parse_json(content) == value
    place %= len(content) + 1
    try:
        parse_json(content[:place] + damage + content[place + len(damage) :])
    except ValueError as error:
        assert str(error)
