"""How images become patches: `media_proc_cfg` of a released `preprocessor_config.json`.

As in the decoder's config, no key is skipped because it is unknown. Those of videos are checked and
not kept: videos are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown
from ..numerics import is_number, is_whole
from . import hf
from .keys import POSITIVE, SIZE, Field, Fixed, Kind, Rule, keys_of
from .released import K3_PREPROCESSOR
from .section import Section
from .vision import MERGE, VisionConfig

FILE = "preprocessor_config.json"
_CFG = "media_proc_cfg"
_STAGES = ("before_resize", "after_resize")


def _is_color(value: Any) -> bool:
    is_triple = isinstance(value, list | tuple) and len(value) == 3
    return is_triple and all(is_number(number) and abs(number) < 1e6 for number in value)


def _is_divisor(value: Any) -> bool:
    return _is_color(value) and all(abs(number) > 1e-6 for number in value)


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(float, value))


_COLOR = Kind("three numbers, of red, green and blue", _is_color, _numbers)
_DIVISOR = Kind("three numbers other than 0, of red, green and blue", _is_divisor, _numbers)
_BYTE = Kind("a whole number from 0 to 255", lambda v: is_whole(v, 0, 255), int)
_STAGE = Kind(" or ".join(map(repr, _STAGES)), lambda v: isinstance(v, str) and v in _STAGES, str)
_TEXT = Kind("text", lambda v: isinstance(v, str))

_FIELDS = (
    Field("patch", ("patch_size",), SIZE),
    Field("patch_limit", ("in_patch_limit",), SIZE),
    Field("side_limit", ("patch_limit_on_one_side",), replace(SIZE, most=2**15)),
    Field("mean", ("image_mean",), _COLOR),
    Field("std", ("image_std",), _DIVISOR),
    Field("fill_stage", ("transparent_bg_fill_stage",), _STAGE, "before_resize"),
)
_VIDEO = (  # needed in a complete file, and not used
    Field("frame_limit", ("in_patch_limit_each_frame",), SIZE),
    Field("video_limit", ("in_patch_limit_video",), SIZE),
    Field("sample_fps", ("sample_fps",), POSITIVE),
    Field("frames", ("temporal_merge_kernel_size",), SIZE),
    Field("timestamps", ("timestamp_mode",), _TEXT),
    Field("most_frames", ("max_num_frames_each_video",), SIZE, None),
)
_BOARD = (
    Field("square", ("chessboard_square_size",), SIZE),
    Field("white", ("chessboard_white_value",), _BYTE),
    Field("gray", ("chessboard_gray_value",), _BYTE),
)
_BOARD_FIXED = {
    "pattern": Fixed("chessboard", required=True),
    "chessboard_square_on_top_left": Fixed(True, required=True),
}
_BOARD_KEY = "transparent_bg_config"
_FIXED = {"merge_kernel_size": Fixed(MERGE, required=True)}
_OUTPUT = "fixed_output_tokens"
_IRRELEVANT = frozenset(("config_type",))
_RULES = (
    Rule(
        ("side_limit",),
        lambda side: side % MERGE == 0,
        "media_proc_cfg.patch_limit_on_one_side: {} is odd, and padding would exceed it",
    ),
)


@dataclass(frozen=True)
class Board:
    """The chessboard behind what is transparent; the square at the top left is white."""

    square: int  # pixels along a side
    white: int  # bytes
    gray: int


@dataclass(frozen=True)
class Preprocessor:
    """The sizes and colours with which images become patches."""

    patch: int  # p, pixels along each side of a patch
    patch_limit: int  # patches of an image, about: sizes are rounded after it
    side_limit: int  # patches along a side
    mean: tuple[float, ...]  # of red, green and blue, taken from values of 0 to 1
    std: tuple[float, ...]  # by which the rest is divided
    board: Board | None  # None: transparency is dropped
    fill_stage: str  # where the board comes in: "before_resize" or "after_resize"

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Preprocessor:
        """The preprocessor of a released model: a parsed file, a `preprocessor_config.json`, or a
        folder that holds one. Raises one `ConfigError` with every problem found.
        """
        problems: list[str] = []
        top = Section(_load(source), problems)
        problems += top.form_problems()
        table = None if problems else top.table(_CFG)
        values = {} if table is None else _values(table)
        if problems:
            raise ConfigError(*problems)
        return cls(**values)

    @classmethod
    def k3(cls) -> Preprocessor:
        """That of the released Kimi K3."""
        return cls.from_hf(K3_PREPROCESSOR)


def preprocessor_of(folder: str | os.PathLike[str], tower: VisionConfig) -> Preprocessor | None:
    """The preprocessor beside a checkpoint with a vision tower; None where the file is missing.
    Raises `ConfigError` for one of another tower.
    """
    if not (Path(folder) / FILE).exists():
        return None
    preprocessor = Preprocessor.from_hf(folder)
    if preprocessor.patch != tower.patch:
        raise ConfigError(
            f"{_CFG}.patch_size: {preprocessor.patch} is not vision_config.patch_size={tower.patch}"
        )
    return preprocessor


def _load(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / FILE if path.is_dir() else path
    table = hf.load_table(path)
    if table is None:
        raise ConfigError(f"{path}: missing, images need it")
    return table


def _values(table: Section) -> dict[str, Any]:
    """Every field of `Preprocessor`; a field with a problem is None."""
    values = table.read_all(_FIELDS)
    table.read_all(_VIDEO)
    values["board"] = _read_board(table)
    table.check_fixed(_FIXED)
    if _OUTPUT not in table.values:
        table.note(_OUTPUT, "missing, null is required")
    elif table.values[_OUTPUT] is not None:
        table.note(_OUTPUT, f"{shown(table.values[_OUTPUT])} is not supported, only null")
    known = keys_of(*_FIELDS, *_VIDEO) | _FIXED.keys() | {_BOARD_KEY, _OUTPUT} | _IRRELEVANT
    table.check_unknown(known)
    table.problems += hf.broken_rules(_RULES, values)
    return values


def _read_board(table: Section) -> Board | None:
    board = table.table(_BOARD_KEY, required=False)
    if board is None:
        return None
    values = board.read_all(_BOARD)
    board.check_fixed(_BOARD_FIXED)
    board.check_unknown(keys_of(*_BOARD) | _BOARD_FIXED.keys())
    return None if None in values.values() else Board(**values)
