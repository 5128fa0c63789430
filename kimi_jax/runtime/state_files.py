"""Saved states: a new folder with every array as Orbax writes it, and a description of them.

The folder holds `arrays/`, one array for each name `STACK.POSITION.NAME` beside `length` and
`hidden`, and `about/metadata`, the description in JSON: sizes, model config, mesh, placement.
Unusual here: what is read back is not trusted. Every field of the description, and the shape and
type of every array, is checked against the rest of the folder before an array is read.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..config.config import Config
from ..errors import FileError, PlacementError, RequestError, shown
from ..files import read_json
from ..model.decoder import new_state, spans
from ..model.state import STATE_DIMS, State, home_of
from ..numerics import is_whole
from ..parallel.mesh import Sizes
from ..parallel.placement import Placement
from ..parallel.roles import Role

FORMAT = 1
_LIMIT = 2**20  # bytes of a description
_LARGEST = 2**31 - 1  # of a batch, a length, a mesh axis

ArrayKind = tuple[tuple[int, ...], str]  # shape and type


@dataclasses.dataclass(frozen=True)
class Description:
    """What a folder says of the state in it. `config` is a table of sizes, as in the file; `intact`
    says whether the description is unchanged since it was written.
    """

    batch: int
    max_length: int
    dtype: str
    scan: bool
    sizes: Sizes
    place: Placement
    config: dict[str, Any]
    intact: bool


def array_key(stack: int, position: int, name: str) -> str:
    """The name of an array in a folder: its stack of layers, its place in the stack's period, and
    what it holds.
    """
    return f"{stack}.{position}.{name}"


def config_table(config: Config) -> dict[str, Any]:
    """A config as JSON brings it back: lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def state_folder(path: str | os.PathLike) -> Path:
    """The absolute path of a folder. Raises `RequestError` for what is not a valid path."""
    try:
        is_path = b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):  # not a path, or a lone surrogate in it
        is_path = False
    if not is_path:
        raise RequestError(f"{shown(path)} is not the path of a folder")
    return Path(path).absolute()


def save_state(state: State, path: str | os.PathLike) -> None:
    """Write a state to a folder that does not exist yet, each process its local shards. It appears
    complete or not at all. Arrays carry no checksum: a changed number is not noticed.
    """
    home = home_of(state)
    folder = state_folder(path)
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} exists: a state is written to a new folder")
    about = {
        "format": FORMAT,
        "max_length": state.max_length,
        "batch": state.batch,
        "dtype": home.dtype,
        "scan": home.scan,
        "mesh": dict(home.mesh.shape),
        "placement": dataclasses.asdict(home.place),
        "config": config_table(home.config),
    }
    about["digest"] = _digest(about)
    arrays = {array_key(*where): array for where, array in state.named().items()}
    arrays |= {"length": state.length, "hidden": state.hidden}
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(
            folder,
            ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays),
                about=ocp.args.JsonSave(about),
            ),
        )


def _orbax() -> Any:
    """Orbax, which takes a second to import and which only saved states need."""
    import orbax.checkpoint

    return orbax.checkpoint


def _digest(about: dict[str, Any]) -> str:
    text = json.dumps({name: about[name] for name in about if name != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Reading.


def read_description(folder: Path) -> Description:
    """The description in a folder. Raises `RequestError` with every invalid field."""
    try:
        about = read_json(folder / "about" / "metadata", _LIMIT)
    except FileError as error:
        raise RequestError(f"{folder} holds no state: {error}") from error
    if not isinstance(about, dict) or not is_whole(about.get("format"), FORMAT, FORMAT):
        raise RequestError(f"{folder} holds no state that this version reads")
    problems = list(_field_problems(about))
    place = None
    if not problems:
        try:
            place = Placement(**about["placement"])
        except (TypeError, PlacementError) as error:
            problems.append(f"placement: {error}")
    if problems or place is None:
        raise RequestError("\n  ".join([f"{folder}: its description is damaged:", *problems]))
    names = ("batch", "max_length", "dtype", "scan", "config")
    values = {name: about[name] for name in names}
    intact = about.get("digest", _digest(about)) == _digest(about)
    return Description(**values, sizes=about["mesh"], place=place, intact=intact)


def _field_problems(about: dict[str, Any]) -> Iterator[str]:
    for name in ("batch", "max_length"):
        if not is_whole(about.get(name), 1, _LARGEST):
            yield f"{name} must be a whole number >= 1, got {shown(about.get(name))}"
    for name, kind, words in (
        ("dtype", str, "a name"),
        ("scan", bool, "true or false"),
        ("mesh", dict, "a table"),
        ("placement", dict, "a table"),
        ("config", dict, "a table"),
    ):
        if not isinstance(about.get(name), kind):
            yield f"{name} must be {words}, got {shown(about.get(name))}"
    mesh = about.get("mesh")
    if isinstance(mesh, dict):
        if mesh.keys() != {"data", "model"}:
            yield f"mesh must have the axes data and model, got {shown(list(mesh))}"
        for axis, ranks in mesh.items():
            if not is_whole(ranks, 1, _LARGEST):
                yield f"mesh axis {shown(axis)} must be a whole number >= 1, got {shown(ranks)}"


def read_arrays(folder: Path, about: Description, config: Config) -> dict[str, np.ndarray]:
    """Every array in a folder, by its key. Raises `RequestError` that names each array whose shape
    or type is not what the description says, before any is read.
    """
    expected = _expected_arrays(about, config)
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        try:
            found = _stored_arrays(folder)
        except Exception as error:  # whatever Orbax and TensorStore raise for damaged files
            raise RequestError(f"{folder}: its arrays cannot be read: {error}") from error
        _refuse_contradictions(folder, found, expected)
        if not about.intact:
            raise RequestError(f"{folder}: its description was changed after it was written")
        restore = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in expected}
        wanted = ocp.args.PyTreeRestore(restore_args=restore)
        try:
            arrays = reader.restore(folder, ocp.args.Composite(arrays=wanted))["arrays"]
        except Exception as error:
            raise RequestError(f"{folder}: its arrays cannot be read: {error}") from error
    stored = {key: (array.shape, array.dtype.name) for key, array in arrays.items()}
    _refuse_contradictions(folder, stored, expected)
    for row, length in enumerate(arrays["length"][: about.batch].tolist()):
        if not 0 <= length <= about.max_length:
            raise RequestError(
                f"{folder}: the length of request {row} is {length}, not from 0 to the max_length "
                f"{about.max_length}"
            )
    return arrays


def _stored_arrays(folder: Path) -> dict[str, ArrayKind]:
    """Shape and type of every array, from Orbax's metadata alone."""
    tree = _orbax().PyTreeCheckpointHandler().metadata(folder / "arrays").tree
    return {
        key: (tuple(array.shape), np.dtype(array.dtype).name) for key, array in dict(tree).items()
    }


def _expected_arrays(about: Description, config: Config) -> dict[str, list[ArrayKind]]:
    """Every array that a state of this description has, with its shape, and the types it may have:
    a bfloat16 cache is stored as its bits on CPU and as it is elsewhere.
    """
    data = about.sizes["data"]
    H = about.place.padded(Role.HEADS, config.kda_heads, about.sizes)
    stripes = about.place.stripes(about.sizes)
    sizes = {
        "B": -(-about.batch // data) * data,
        "S": stripes.slots(about.max_length) * stripes.ranks,
        "H": H,
        "HK": H * config.kda_key_dim,
        "HV": H * config.kda_value_dim,
    }
    expected: dict[str, list[Any]] = {}
    for on_cpu in (True, False):
        for key, name, leaf in _leaves(config, about.dtype, about.scan, on_cpu):
            dims = zip(STATE_DIMS[name], leaf.shape, strict=True)
            shape = tuple(sizes.get(dim, size) for dim, size in dims)
            expected.setdefault(key, []).append((shape, leaf.dtype.name))
    return expected


def _leaves(
    config: Config, dtype: str, scan: bool, on_cpu: bool
) -> Iterator[tuple[str, str, jax.ShapeDtypeStruct]]:
    """Key, name, and the shape for one request, slot and head, of every array of a state."""
    stacks = spans(config, scan)
    state = jax.eval_shape(lambda: new_state(config, dtype, stacks, 1, 1, 1, on_cpu))
    for where, leaf in state.named().items():
        yield array_key(*where), where[2], leaf
    yield "length", "length", state.length
    yield "hidden", "hidden", state.hidden


def _refuse_contradictions(
    folder: Path, found: dict[str, ArrayKind], expected: dict[str, list[ArrayKind]]
) -> None:
    problems = [
        f"{shown(key)} is not an array of this state" for key in found if key not in expected
    ]
    for key, kinds in expected.items():
        if key not in found:
            problems.append(f"{key} is missing")
        elif found[key] not in kinds:
            (shape, dtype), (wanted, wanted_dtype) = found[key], kinds[-1]
            problems.append(
                f"{key} is {dtype} {list(shape)}, expected {wanted_dtype} {list(wanted)}"
            )
    if problems:
        title = f"{folder}: the arrays are not of the state that it describes:"
        raise RequestError("\n  ".join([title, *problems]))
