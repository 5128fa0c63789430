"""The README's Python runs as it stands, from the root of the repository; its table is complete."""

import re
import shlex

import jax
import numpy as np
from chats import Script
from conftest import ROOT
from PIL import Image
from visions import picture, write_seeing

import kimi_jax as kj
from kimi_jax.cli.main import make_parser

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ("docs/architecture.md", "docs/parallelism.md")


def test_the_python_of_the_first_screen_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    block = re.search(r"```python\n(.*?)```", TEXT, re.S)
    names = {}
    exec(compile(block[1], "README.md", "exec"), names)
    assert len(capsys.readouterr().out) > 20
    assert names["reply"].text and names["logits"].shape[:2] == (1, len(names["reply"].tokens))


def test_the_python_of_generation_and_reuse_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {"kj": kj, "model": kj.load("kimi_jax/shipped")}
    for begin in ("replies = ", "session = ", "state = ", "anchors = "):
        block = re.search(rf"```python\n({begin}.*?)```", TEXT, re.S)
        exec(compile(block[1], "README.md", "exec"), names)
    assert len(names["replies"]) == 3 and not any(one.error for one in names["replies"])
    assert names["reply"].usage.cached_tokens > 20
    assert names["out"].usage.cached_tokens >= 512 and names["cache"].stats.hits == 1
    assert names["state"].length.tolist() == [10, 8] and names["logits"].shape[0] == 2


def test_the_python_of_chat_runs(monkeypatch, capsys):
    """The shipped model calls no tools, so its first reply is written here."""
    monkeypatch.chdir(ROOT)
    model = kj.load("kimi_jax/shipped")
    call = model.tokenizer.encode(
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        markers=True,
    )
    script = Script(model, monkeypatch, call, call[:3], call[:3])
    names = {"model": model}
    block = re.search(r"```python\n(def weather.*?)```", TEXT, re.S)
    exec(compile(block[1], "README.md", "exec"), names)
    assert [m["role"] for m in names["messages"]] == ["user", "assistant", "tool"]
    assert "rain in Oslo" in model.tokenizer.decode(script.prompts[1])
    assert names["stream"].reply.tokens == call[:3] and capsys.readouterr().out == "\n"


def test_the_python_of_images_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(picture(0)).save("picture.png")
    names = {"kj": kj, "model": kj.load(write_seeing(tmp_path / "seeing"), chunk=16)}
    block = re.search(r"```python\n(image = .*?)```", TEXT, re.S)
    exec(compile(block[1], "README.md", "exec"), names)
    assert names["reply"].usage.image_tokens == names["completion"].usage.image_tokens == 20
    assert names["rows"].shape == (20, names["model"].config.hidden)


def test_the_python_of_many_devices_runs(monkeypatch, tmp_path):
    """A state moves to a mesh of eight devices, to a file, and back to one device."""
    monkeypatch.chdir(ROOT)
    names = {"kj": kj, "model": kj.load("kimi_jax/shipped")}
    mesh, moves = (
        re.search(rf"```python\n({begin}.*?)```", TEXT, re.S)[1]
        for begin in ("mesh = ", "_, state = ")
    )
    exec(compile(mesh, "README.md", "exec"), names)
    assert names["decoder"].mesh.size == 8 and names["decoder"].placement.keys == "helix"
    monkeypatch.chdir(tmp_path)
    exec(compile(moves, "README.md", "exec"), names)
    model, state = names["model"], names["state"]
    assert (tmp_path / "conversation").is_dir() and state.length.tolist() == [3]
    _, stayed = model.prefill(model.new_state(1, 64), [[65, 66, 67]])
    np.testing.assert_array_equal(model.decode(state, [68])[0], model.decode(stayed, [68])[0])


def test_the_python_of_scores_and_gradients_runs(monkeypatch):
    """Scores and hidden states, then adapters trained over eight devices, whose loss falls."""
    monkeypatch.chdir(ROOT)
    names = {"kj": kj, "model": kj.load()}
    # JAX's own defaults, which a reader has: the tests are stricter about types and ranks.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for begin in ("(score,) = ", "import jax, jax.numpy"):
            start = TEXT.index(f"```python\n{begin}") + len("```python\n")
            exec(compile(TEXT[start : TEXT.index("```", start)], "README.md", "exec"), names)
    score, tokenizer = names["score"], names["model"].tokenizer
    text, count = tokenizer.decode(score.tokens), len(score.tokens)
    assert score.byte_count == len(text.encode()) - len(tokenizer.decode(score.tokens[:1]).encode())
    assert score.bits_per_byte == score.nats / np.log(2) / score.byte_count < 3
    assert names["stream"].shape == (3, 1, count, names["model"].config.hidden)
    assert names["trained"].mesh.size == 8 and names["losses"][-1] < 0.9 * names["losses"][0]
    name = "layers.0.attention.w_o"
    assert not np.array_equal(names["tuned"].weights[name], names["model"].weights[name])


def test_links_to_files_of_the_repository_are_alive():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS):
        path = ROOT / name
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{name}: {link}"


def test_the_first_screen_is_35_lines():
    assert TEXT.split("\n## ")[0].strip().count("\n") < 35


def test_the_commands_of_the_readme_are_read_by_the_parser():
    parser = make_parser()
    lines = re.findall(r"^kimi-jax (?:.*[^\\])$", TEXT, re.M)
    for line in lines:
        options = parser.parse_args(shlex.split(line, comments=True)[1:])
        assert callable(options.run)
    assert len(lines) > 15


def test_the_tree_names_every_folder_and_file():
    tree = TEXT.split("## Files")[1].split("```")[1].split("docs/")[0]
    named, folder = set(), ""
    for line in tree.splitlines():
        if found := re.match(r"  (\w+)/ ", line):
            folder = found[1]
            named.add(folder)
        elif line.startswith("    "):
            named |= {f"{folder}/{name}" for name in re.findall(r"[\w/]+\.py", line)}
        elif found := re.match(r"  (\w+\.py) ", line):
            named.add(found[1])
    package = ROOT / "kimi_jax"
    files = {str(path.relative_to(package)) for path in package.rglob("[a-z]*.py")}
    assert named == files | {path.split("/")[0] for path in files if "/" in path} | {"shipped"}
