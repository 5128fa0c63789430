"""Images in the commands: `generate --image` and `/image` of a chat."""

import io
import json

import pytest
from chats import write_model
from commands import assert_refused
from PIL import Image
from visions import picture, write_seeing

import kimi_jax as kj
from kimi_jax.cli.chat.terminal import Conversation


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing") / "model"
    return write_seeing(folder), kj.load(folder, dtype="float32", chunk=16)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a picture.png"
    Image.fromarray(picture(0)).save(path)
    return path


def test_generate_shows_the_model_an_image(run, seeing, image, monkeypatch):
    folder, model = seeing
    monkeypatch.setattr(kj, "load", lambda path, **options: model)
    words = ("generate", "get_weather", "--model", folder, "--max-new-tokens", 3)
    plain, one, two = (run(*words, *("--image", image) * n, "--json") for n in range(3))
    usages = [json.loads(out)["usage"] for _, out, _ in (plain, one, two)]
    assert [usage["image_tokens"] for usage in usages] == [0, 20, 40]
    assert len({out for _, out, _ in (plain, one, two)}) == 3
    code, out, err = run(*words, "--image", image)  # streamed
    assert code == 0 and out.startswith("get_weather") and "(20 of images)" in err


def test_images_that_cannot_be_are_refused_before_weights_are_read(
    run, seeing, image, tmp_path, monkeypatch
):
    monkeypatch.setattr(kj, "load", lambda *a, **k: pytest.fail("loaded"))
    words = ("generate", "a", "--model", seeing[0])
    assert_refused(run(*words, "--image", tmp_path / "no.png"), "no.png", "No such file")
    image.write_bytes(image.read_bytes()[:60])
    assert_refused(run(*words, "--image", image), "cannot be decoded")
    blind = write_model(tmp_path / "blind")
    refused = run("generate", "a", "--model", blind, "--image", image)
    assert_refused(refused, "--image: the model in", "has no vision tower")
    for other in (("--tokens",), ("--output", tmp_path / "x")):
        refused = run("generate", "7", "--model", seeing[0], "--image", image, *other)
        assert_refused(refused, f"not with {other[0]}")
    assert_refused(run("generate", "--input", "x", "--image", image), "not with --input")


def conversation(monkeypatch, capsys, model, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(str, lines)) + "\n"))
    chat = Conversation(model, max_new_tokens=3, thinking=False, temperature=0)
    chat.run()
    return chat, capsys.readouterr()


def test_an_image_goes_with_the_next_turn(seeing, image, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "chat.json"
    lines = (f"/image {image}", "see", "and", "/retry", f"/save {saved}")
    chat, said = conversation(monkeypatch, capsys, seeing[1], *lines)
    assert "140 x 112 pixels, 20 tokens, with the next turn" in said.err
    first, _, second, _ = chat.messages
    assert [part["type"] for part in first["content"]] == ["image", "text"]
    assert second["content"] == "and" and chat.total.last.image_tokens == 20
    again, _ = conversation(monkeypatch, capsys, seeing[1], f"/load {saved}", "and")
    assert again.total.last.image_tokens == 20 and again.messages[:4] == chat.messages[:4]


def test_undo_takes_the_image_back_and_retry_shows_it_again(seeing, image, monkeypatch, capsys):
    lines = (f"/image {image}", "see", "/retry")
    chat, _ = conversation(monkeypatch, capsys, seeing[1], *lines)
    assert chat.total.last.image_tokens == 20
    chat, _ = conversation(monkeypatch, capsys, seeing[1], *lines, "/undo", "see")
    assert chat.total.last.image_tokens == 0


def test_an_image_that_cannot_be_ends_a_script(seeing, tmp_path, monkeypatch, capsys):
    with pytest.raises(kj.ImageError, match="No such file"):
        conversation(monkeypatch, capsys, seeing[1], f"/image {tmp_path / 'no.png'}")
    with pytest.raises(kj.ChatError, match="/image needs the name of a file"):
        conversation(monkeypatch, capsys, seeing[1], "/image")
