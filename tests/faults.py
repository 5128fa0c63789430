"""Faults to plant in a checkpoint folder: functions that damage the file at a path."""

import json
import os
import struct

from checkpoints import INDEX


def spoil_json(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def split_shard(path):
    """The header of a shard and its data, both bytes."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def join_shard(path, header, data):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def replaced(content):
    """A fault: these bytes instead of the file."""
    return lambda path: path.write_bytes(content)


def content(change):
    """A fault: the bytes of the file, changed."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def header_text(change):
    """A fault: the bytes of the header, changed; the data stay."""

    def plant(path):
        header, data = split_shard(path)
        join_shard(path, change(header), data)

    return plant


def header(change):
    """A fault: the table of the header, changed; the data stay."""
    return header_text(lambda text: json.dumps(changed(json.loads(text), change)).encode())


def changed(value, change):
    change(value)
    return value


def entry(**changes):
    """A fault: the header's entry of the first tensor, changed."""
    return header(lambda h: next(v for k, v in h.items() if k != "__metadata__").update(changes))


def offsets(change):
    """A fault: the offsets of the second tensor, changed."""

    def shift(table):
        second = [value for name, value in table.items() if name != "__metadata__"][1]
        second["data_offsets"] = change(*second["data_offsets"])

    return header(shift)


def twice(text):
    """A header whose first tensor is listed twice."""
    table = json.loads(text)
    name = next(name for name in table if name != "__metadata__")
    return b'{"%s": %s, %s' % (name.encode(), json.dumps(table[name]).encode(), text.lstrip()[1:])


def grown(size, length):
    """A fault: a sparse file of `size` bytes whose header claims `length`."""

    def plant(path):
        path.write_bytes(struct.pack("<Q", length))
        os.truncate(path, size)

    return plant


def special_file(make):
    return lambda path: (path.unlink(), make(path))
