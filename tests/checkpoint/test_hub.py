"""Checkpoints of the Hugging Face hub: which files are fetched, and what is said where none is."""

import importlib
import shutil
import types
from pathlib import Path

import pytest
from models import AWKWARD, write

import kimi_jax as kj
from kimi_jax.checkpoint import hub
from kimi_jax.checkpoint.headers import INDEX_FILE
from kimi_jax.files import SHIPPED

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HfHubHTTPError(OSError):
    """As the library names them."""


class EntryNotFoundError(Exception):
    pass


class RemoteEntryNotFoundError(HfHubHTTPError, EntryNotFoundError):
    pass


class LocalEntryNotFoundError(FileNotFoundError, EntryNotFoundError):
    pass


@pytest.fixture
def hub_of(monkeypatch, tmp_path):
    """A stand-in of `huggingface_hub` that serves a folder as the repository owner/name."""
    monkeypatch.chdir(tmp_path)

    def make(folder, fail=None):
        fetched = []

        def hf_hub_download(repository, name, revision="main"):
            assert repository == "owner/name" and revision == (COMMIT if fetched else "main")
            if fail:
                raise fail
            if not (Path(folder) / name).exists():
                raise RemoteEntryNotFoundError(f"404: {name}")
            kept = tmp_path / "cache" / COMMIT / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder) / name, kept)
            fetched.append(name)
            return str(kept)

        module = types.ModuleType("huggingface_hub")
        module.hf_hub_download = hf_hub_download
        module.errors = types.SimpleNamespace(
            HfHubHTTPError=HfHubHTTPError,
            EntryNotFoundError=EntryNotFoundError,
            LocalEntryNotFoundError=LocalEntryNotFoundError,
        )
        real = importlib.import_module
        pick = lambda name, *a: module if name == "huggingface_hub" else real(name, *a)  # noqa: E731
        monkeypatch.setattr(hub.importlib, "import_module", pick)
        return fetched

    return make


def test_a_repository_is_fetched_and_loaded(hub_of):
    fetched = hub_of(SHIPPED)
    model = kj.load("owner/name")
    assert model.config == kj.Config.from_hf(SHIPPED) and model.tokenizer is not None
    kept = {path.name for path in SHIPPED.iterdir()} - {"training.json"}
    assert set(fetched) == kept and len(fetched) == len(kept)


def test_a_shard_of_vision_alone_is_not_fetched(hub_of, tmp_path):
    """The index names it all the same; a folder without it is complete."""
    source = Path(write(AWKWARD, tmp_path / "source"))
    index = (source / INDEX_FILE).read_text()
    vision = '"weight_map": {"vision_tower.encoder.weight": "vision.safetensors", '
    (source / INDEX_FILE).write_text(index.replace('"weight_map": {', vision))
    fetched = hub_of(source)
    folder = hub.folder_of("owner/name", ())
    shards = sorted(name for name in fetched if name.endswith(".safetensors"))
    assert shards == ["model-00001-of-00001.safetensors"]
    assert kj.load(folder).config == AWKWARD


def test_what_cannot_be_fetched_is_an_error_with_command_and_size(hub_of, monkeypatch):
    hub_of(SHIPPED, fail=HfHubHTTPError("401 Client Error\nmore"))
    with pytest.raises(
        kj.FileError, match=r"^owner/name: no such folder.*401 Client Error"
    ) as error:
        kj.load("owner/name")
    assert "hf download owner/name --include" in str(error.value) and "GB" not in str(error.value)
    hub_of(SHIPPED, fail=LocalEntryNotFoundError("cannot reach the hub"))
    with pytest.raises(kj.FileError, match="cannot reach the hub"):
        kj.load("owner/name")


@pytest.mark.parametrize("name, size", [("Kimi-K3", "1,560"), ("Kimi-K3.1-Pro", "1,560")])
def test_without_the_library_the_error_says_how_to_get_it(monkeypatch, tmp_path, name, size):
    monkeypatch.chdir(tmp_path)

    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(hub.importlib, "import_module", absent)
    with pytest.raises(kj.FileError, match=r"pip install 'kimi-jax\[hub\]'") as error:
        kj.load(f"owner/{name}")
    assert error.value.missing and f"about {size} GB" in str(error.value)


@pytest.mark.parametrize("path", ["nowhere", "/nowhere/at", "./a/b", "a/b/c", "../a"])
def test_other_paths_are_folders(path):
    assert hub.folder_of(path, ()) == path
