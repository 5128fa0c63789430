"""Where compiled programs are kept, and how they are found, counted and deleted."""

import os
from pathlib import Path

import jax
import pytest
from conftest import ROOT
from jax._src import compilation_cache

import kimi_jax as kj
from kimi_jax.cli import devices
from kimi_jax.compilation.cache import find_cache, open_cache


def chosen():
    return jax.config.values["jax_compilation_cache_dir"]


@pytest.fixture
def uncached(monkeypatch):
    """No folder that was chosen before."""
    before = chosen()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def home(uncached, monkeypatch, tmp_path):
    """The folder of a user who chose none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "kimi_jax" / "programs"


def homeless():
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_runs_without_a_cache(run, loaded, monkeypatch, uncached):
    monkeypatch.setattr(Path, "home", homeless)
    code, out, err = run("generate", "the cat", "--max-new-tokens", 1)
    assert code == 0 and out.startswith("the cat")
    assert err.count("compiled programs are not kept, there is no HOME") == 1
    assert chosen() is None
    assert run("cache")[1].startswith("compiled programs are not kept: there is no HOME")


@pytest.mark.parametrize("home", ["/dev/null", "relative", ""])
def test_a_home_that_cannot_be_written_means_no_cache(monkeypatch, capsys, uncached, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "access", lambda *_: False)
    devices.use_compilation_cache()
    assert "note: compiled programs are not kept" in capsys.readouterr().err
    assert chosen() is None


def test_loading_a_model_opens_the_cache_of_the_user(monkeypatch, home):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # does not count
    kj.load(ROOT / "kimi_jax" / "shipped")
    assert chosen() == str(home) and home.is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert open_cache().folder == chosen() == str(home)  # as it was chosen first


def test_the_folder_of_the_caller_is_used(home, capsys, tmp_path):
    for asked in ("gs://bucket/programs", str(tmp_path / "asked")):
        jax.config.update("jax_compilation_cache_dir", asked)
        assert open_cache().folder == chosen() == asked
    (tmp_path / "file").touch()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file"))
    devices.use_compilation_cache()
    assert "a file and not a folder" in capsys.readouterr().err
    assert not home.exists()


def test_a_cache_that_is_off_stays_off(run, home):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert open_cache().folder is None and chosen() is None
        assert "jax_enable_compilation_cache is off" in run("cache")[1]
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "")
    assert open_cache().reason == "jax_compilation_cache_dir is empty"


def test_the_command_shows_and_clears(run, home):
    assert run("cache") == (0, f"{home}\n0 files, 0 B\n", "")
    for name in ("jit_step-1-cache", "jit_step-1-atime", "step-2.program", "a file of the user's"):
        (home / name).write_bytes(b"x" * 500)
    assert run("cache")[1] == f"{home}\n3 files, 1.5 kB\n"
    assert run("cache", "--clear")[1] == f"{home}\n3 files, deleted, 1.5 kB\n"
    assert [file.name for file in home.iterdir()] == ["a file of the user's"]
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert "not on this machine" in run("cache")[1]


def test_an_entry_whose_writer_was_killed_is_dropped(home):
    place = find_cache()
    whole = compilation_cache.compress_executable(b"program " * 1000)
    for name, content in (("whole", whole), ("torn", whole[:-9]), ("empty", b"")):
        (home / f"{name}-cache").write_bytes(content)
    open_cache()
    assert {Path(entry).name for entry in place.entries()} == {"whole-cache"}
    assert (home / "checked").exists()
