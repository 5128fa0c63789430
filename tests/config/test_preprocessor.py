"""`preprocessor_config.json`: every key has a say, and each bad one is named."""

import copy
import json

import pytest

from kimi_jax.config.preprocessor import Board, Preprocessor
from kimi_jax.config.released import K3_PREPROCESSOR
from kimi_jax.errors import ConfigError

RELEASED = {"auto_map": {"AutoProcessor": "x.Y"}, **copy.deepcopy(K3_PREPROCESSOR)}
RELEASED["media_proc_cfg"] |= {"max_num_frames_each_video": None, "config_type": "x.Y"}
OPTIONAL = ("transparent_bg_config", "transparent_bg_fill_stage", "config_type")
OPTIONAL += ("max_num_frames_each_video",)


def changed(path, value=None, drop=False):
    file = copy.deepcopy(RELEASED)
    *tables, key = ("media_proc_cfg", *path.split("."))
    table = file
    for name in tables:
        table = table[name]
    if drop:
        del table[key]
    else:
        table[key] = value
    return file


def test_the_released_file():
    half = (0.5, 0.5, 0.5)
    expected = Preprocessor(14, 65536, 512, half, half, Board(8, 255, 180), "after_resize")
    assert Preprocessor.from_hf(RELEASED) == Preprocessor.k3() == expected


def test_without_a_board_alpha_is_dropped_and_the_stage_has_a_default():
    for file in (
        changed("transparent_bg_config", drop=True),
        changed("transparent_bg_config", None),
    ):
        assert Preprocessor.from_hf(file).board is None
    file = changed("transparent_bg_fill_stage", drop=True)
    assert Preprocessor.from_hf(file).fill_stage == "before_resize"


@pytest.mark.parametrize("key", [k for k in RELEASED["media_proc_cfg"] if k not in OPTIONAL])
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=rf"media_proc_cfg\.{key}: missing"):
        Preprocessor.from_hf(changed(key, drop=True))


@pytest.mark.parametrize("key", RELEASED["media_proc_cfg"]["transparent_bg_config"])
def test_a_missing_key_of_the_board_is_named(key):
    path = f"transparent_bg_config.{key}"
    with pytest.raises(ConfigError, match=f"{path}: missing"):
        Preprocessor.from_hf(changed(path, drop=True))


@pytest.mark.parametrize(
    "path, value",
    [
        ("patch_size", 0),
        ("patch_size", 14.0),
        ("in_patch_limit", True),
        ("in_patch_limit", "65536"),
        ("patch_limit_on_one_side", 511),
        ("patch_limit_on_one_side", 2**20),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", 0.5),
        ("image_mean", [0.5, 0.5, float("nan")]),
        ("image_std", [0.5, 0, 0.5]),
        ("merge_kernel_size", 4),
        ("merge_kernel_size", [2, 2]),
        ("fixed_output_tokens", 64),
        ("in_patch_limit_each_frame", -1),
        ("in_patch_limit_video", None),
        ("sample_fps", 0),
        ("temporal_merge_kernel_size", "4"),
        ("timestamp_mode", 3),
        ("max_num_frames_each_video", 0),
        ("transparent_bg_config", "chessboard"),
        ("transparent_bg_config.pattern", "stripes"),
        ("transparent_bg_config.chessboard_square_size", 0),
        ("transparent_bg_config.chessboard_square_on_top_left", False),
        ("transparent_bg_config.chessboard_white_value", 256),
        ("transparent_bg_config.chessboard_gray_value", -1),
        ("transparent_bg_config.colour", 1),
        ("transparent_bg_fill_stage", "never"),
        ("do_rescale", False),
    ],
)
def test_a_bad_value_is_named(path, value):
    with pytest.raises(ConfigError, match=rf"media_proc_cfg\.{path}: "):
        Preprocessor.from_hf(changed(path, value))


def test_all_problems_are_told_at_once():
    file = changed("patch_size", 0)
    file["media_proc_cfg"]["nonsense"] = 1
    with pytest.raises(ConfigError) as caught:
        Preprocessor.from_hf(file)
    assert len(caught.value.problems) == 2


def test_a_folder_a_file_and_none(tmp_path):
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: missing"):
        Preprocessor.from_hf(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(RELEASED))
    assert Preprocessor.from_hf(tmp_path) == Preprocessor.from_hf(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        Preprocessor.from_hf(tmp_path)
    for bad in ({}, {"media_proc_cfg": 3}):
        with pytest.raises(ConfigError, match="media_proc_cfg"):
            Preprocessor.from_hf(bad)
