"""Which instructions XLA launches from command buffers (CUDA graphs), read from what it dumps."""

import re
from pathlib import Path

_LINE = re.compile(r"( *)(\d+): (k\w+)")
_THUNK = re.compile(r"thunk_metadata \{(.*?)\n\}", re.DOTALL)
_NAME = re.compile(r'profile_annotation: "([^"]*)"')
_ID = re.compile(r"thunk_id: (\d+)")


def in_command_buffers(dump: Path) -> frozenset[str]:
    """The names of the instructions that run inside command buffers. Raises FileNotFoundError
    where XLA dumped no sequence of launches.
    """
    sequences = sorted(dump.glob("*.thunk_sequence.txt"), key=lambda path: path.stat().st_size)
    if not sequences:
        raise FileNotFoundError(f"XLA dumped no sequence of launches into {dump}")
    first = sequences[-1]
    after = first.with_name(first.name.replace(".txt", "_after_thunk_passes.txt"))
    if not after.exists():  # no pass changed anything: no launch was put into a buffer
        return frozenset()
    metadata = first.with_name(first.name.replace("thunk_sequence", "thunk_metadata"))
    names = thunk_names(metadata.read_text())
    return frozenset(names[i] for i in buffered_ids(after.read_text()) if i in names)


def thunk_names(metadata: str) -> dict[int, str]:
    """The instruction of each launch by its number."""
    names = {}
    for thunk in _THUNK.findall(metadata):
        name, number = _NAME.search(thunk), _ID.search(thunk)
        if name and number:
            names[int(number[1])] = name[1]
    return names


def buffered_ids(sequence: str) -> list[int]:
    """The numbers of the launches that stand, at any depth, inside a command buffer."""
    found, inside = [], None
    for line in sequence.splitlines():
        read = _LINE.match(line)
        if not read:
            continue
        depth = len(read[1])
        if inside is not None and depth <= inside:
            inside = None
        if inside is not None:
            found.append(int(read[2]))
        elif read[3] == "kCommandBuffer":
            inside = depth
    return found
