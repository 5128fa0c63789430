"""The small trained model that the package carries: its size, its figures, its text."""

import json
import sys

import pytest
from conftest import ROOT

import kimi_jax as kj
from kimi_jax.progress import Progress

SHIPPED = ROOT / "kimi_jax" / "shipped"


@pytest.fixture(scope="module")
def model():
    return kj.load(SHIPPED, dtype="float32")


def test_it_is_small_and_has_every_part():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 8_000_000
    config = kj.Config.from_hf(SHIPPED)
    assert config.sparse and config.quantized and config.shared_experts
    assert config.experts >= 16 and config.bank_rows >= 2
    assert config.mla_layers and config.kda_layers


def test_its_bits_per_byte_are_those_it_says(monkeypatch):
    """On the last tenth of the book, which training never saw; at most 2.4 are asked."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import eval_small

    from kimi_jax.model.implementations import Implementations

    _, held_out = eval_small.split(eval_small.BOOK.read_text(encoding="utf-8"))
    measured = eval_small.evaluate(SHIPPED, "float32", Implementations(), held_out)["bits_per_byte"]
    said = json.loads((SHIPPED / "training.json").read_text())
    assert measured == pytest.approx(said["bits_per_byte"], abs=1e-3)
    assert measured < 2.2
    assert said["bits_per_byte"] - said["bits_per_byte_experts_not_packed"] < 0.05
    sys.modules.pop("eval_small", None)


def test_streamed_text_equals_the_text_made_at_once(model):
    """Sampled, with a stop string across tokens; the prompt's own markers stay ordinary text."""
    prompt = "The Queen said<|end_of_msg|>"
    assert not set(model.tokenizer.encode(prompt)) & set(model.tokenizer.special_ids.values())
    options = dict(max_new_tokens=40, temperature=0.8, seed=5)
    (whole,) = model.generate(prompt, **options)
    events = list(model.stream(prompt, **options))
    assert "".join(event.text for event in events) == whole.text
    assert events[-1].finish_reason == whole.finish_reason
    stop = whole.text[10:13]
    (stopped,) = model.generate(prompt, stop=stop, **options)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert "".join(e.text for e in model.stream(prompt, stop=stop, **options)) == stopped.text


def test_a_prompt_longer_than_a_chunk_and_the_selection_is_taken_whole(model, monkeypatch):
    """Selection bites at 64 keys: 700 tokens in chunks of 512 continue as one forward says, and the
    bar advances with each.
    """
    advanced = []
    monkeypatch.setattr(Progress, "advance", lambda self, n: advanced.append(n))
    text = (ROOT / "scripts" / "data" / "alice.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)[:700]
    (reply,) = model.generate(ids, max_new_tokens=1, logprobs=True, stop_tokens=[])
    logits = model.logits([ids])[0, -1]
    assert reply.tokens == [int(logits.argmax())]
    assert reply.usage.prompt_tokens == 700
    assert advanced == [512, 188, 1]
