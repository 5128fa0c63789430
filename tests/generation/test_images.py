"""Images in prompts and conversations: what is prefilled, what caches take for the same prompt, and
what is refused.
"""

import base64
import dataclasses
import io
import json

import numpy as np
import pytest
from chats import TOKENIZER
from PIL import Image
from visions import MEDIA, part, picture, write_seeing

import kimi_jax as kj
from kimi_jax.generation import requests
from kimi_jax.runtime.images.rows import PromptRows

A, B = picture(0), picture(1)
OPTIONS = {"max_new_tokens": 4, "stop_tokens": [], "logprobs": True}
PAD = MEDIA["<|media_pad|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_seeing(tmp_path_factory.mktemp("seeing") / "model")
    return kj.load(folder, dtype="float32", chunk=16)


def message(*content):
    return {"role": "user", "content": list(content)}


def text(said):
    return {"type": "text", "text": said}


def logprobs(completion):
    return [entry.logprob for entry in completion.logprobs]


def same(left, right):
    return left.tokens == right.tokens and logprobs(left) == logprobs(right)


def test_a_prompt_of_parts_is_its_ids_with_the_rows_of_its_images(model):
    (found,) = model.generate(["see ", part(A), " and ", part(B)], **OPTIONS)
    markers = "<|media_begin|>image 140x112<|media_content|>" + 20 * "<|media_pad|>"
    markers += "<|media_end|>"
    ids = model.tokenizer.encode(f"see {markers} and {markers}", markers=True)
    rows = np.concatenate(model.encode_images([model.image_patches(x) for x in (A, B)]))
    at = np.flatnonzero(np.array(ids) == PAD)
    greedy = list(ids)
    for _ in range(4):
        logits = model.logits([greedy], rows=[PromptRows(at, rows)])
        greedy.append(int(np.asarray(logits)[0, -1].argmax()))
    assert found.tokens == greedy[len(ids) :]
    assert found.usage.prompt_tokens == len(ids) and found.usage.image_tokens == 40


def test_the_image_and_its_place_decide(model):
    def replies(*prompts):
        return [logprobs(c) for c in model.generate([list(p) for p in prompts], **OPTIONS)]

    one, other, ab, ba, aa = replies(
        *[(part(A),), (part(B),), (part(A), part(B)), (part(B), part(A)), (part(A), part(A))]
    )
    assert one != other and len({tuple(x) for x in (ab, ba, aa)}) == 3


def test_prompts_with_and_without_images_run_together_as_alone(model):
    prompts = [["see ", part(A)], "a message says", [part(B), " get_weather ", part(A)], [7, 8, 9]]
    together = model.generate(prompts, slots=2, **OPTIONS)
    alone = [model.generate([prompt], slots=1, **OPTIONS)[0] for prompt in prompts]
    for left, right in zip(together, alone, strict=True):
        assert left.tokens == right.tokens
        np.testing.assert_allclose(logprobs(left), logprobs(right), atol=1e-4)


def test_chat_sees_images_as_generate_does(model):
    url = {"type": "image_url", "image_url": {"url": data_url(A)}}
    options = {"max_new_tokens": 4, "temperature": 0, "logprobs": True}
    replies = [
        model.chat([message(text("see "), image)], **options) for image in (part(A), url, part(B))
    ]
    assert same(replies[0], replies[1]) and not same(replies[0], replies[2])
    assert replies[0].usage.image_tokens == 20
    events = model.chat([message(text("see "), part(A))], stream=True, **options)
    said = "".join(event.text for event in events)
    assert events.reply.tokens == replies[0].tokens
    assert said == replies[0].thinking + replies[0].text


def data_url(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# What is restored


def test_a_prefix_cache_tells_pictures_of_one_size_apart(model):
    cache = kj.PrefixCache(model, bytes=10**8)

    def cold(image, **options):
        prompt = ["a message says role and tool ", part(image), " get_weather"]
        return model.generate([prompt], **options, **OPTIONS)[0]

    def run(image):
        return cold(image, prefix_cache=cache)

    first, again, other = run(A), run(A), run(B)
    assert first.usage.cached_tokens == 0 and same(first, cold(A))
    assert again.usage.cached_tokens == 48 and same(again, cold(A))
    before = prefix_length(model, "a message says role and tool ")
    assert other.usage.cached_tokens <= before  # nothing past the first placeholder
    assert same(other, cold(B))


def prefix_length(model, said):
    """Tokens before the first placeholder behind a text."""
    return len(model.tokenizer.encode(f"{said}<|media_begin|>image 140x112", markers=True)) + 1


def test_an_image_that_had_no_key_would_be_answered_from_another_ones_state(model, monkeypatch):
    """The fault that the test above must see."""
    monkeypatch.setattr(requests.PlacedImage, "key", PAD)
    cache = kj.PrefixCache(model, bytes=10**8)
    found = [
        model.generate([[part(image), " get_weather"]], prefix_cache=cache, **OPTIONS)[0]
        for image in (A, B)
    ]
    assert found[1].usage.cached_tokens == 32  # past the first placeholder


def test_a_session_restores_what_it_has_seen_and_no_other_picture(model):
    options = {"max_new_tokens": 4, "temperature": 0, "logprobs": True}
    session = model.session()
    turn = [message(text("see "), part(A))]
    first = session.chat(turn, **options)
    turn += [first.message, message(text("and "), part(B))]
    second = session.chat(turn, **options)
    assert 20 < second.usage.cached_tokens < second.usage.prompt_tokens
    assert second.usage.image_tokens == 40
    cold = model.chat(turn, **options)
    assert second.tokens == cold.tokens
    np.testing.assert_allclose(logprobs(second), logprobs(cold), atol=1e-4)
    swapped = [message(text("see "), part(B)), *turn[1:]]
    third = session.chat(swapped, **options)
    assert third.usage.cached_tokens == 0 and third.tokens == model.chat(swapped, **options).tokens


def test_a_session_goes_on_from_images_with_more_text(model):
    session = model.session()
    first = session.generate(["see ", part(A)], **OPTIONS)
    second = session.generate(" and", **OPTIONS)
    assert [placed.image.size for placed in session.images] == [(140, 112)]
    ids = [*session.tokens[: -len(second.tokens)]]
    assert second.usage.prompt_tokens == len(ids) and second.usage.cached_tokens >= 20 + 4
    assert len(first.tokens) == 4


def test_completions_of_one_prompt_encode_its_images_once(model, monkeypatch):
    calls = []
    encode = type(model.encoder).encode
    monkeypatch.setattr(
        type(model.encoder),
        "encode",
        lambda self, images: calls.append(images) or encode(self, images),
    )
    model.generate([[part(A), " and ", part(A)]], n=3, **OPTIONS)
    assert [len(images) for images in calls] == [1]


# What is refused


def refused(model, prompts, error=kj.PromptError, **options):
    with pytest.raises(error) as caught:
        model.generate(prompts, **options)
    return str(caught.value)


def test_problems_of_images_come_with_all_others(model):
    prompts = [["a", part("no such file.png")], ["b", part(np.zeros((0, 3), np.uint8))], [part(3)]]
    said = refused(model, prompts, max_new_tokens=-1)
    for i, words in enumerate(("No such file", "no pixels", "got 3")):
        assert any(f"prompt {i}: part" in line and words in line for line in said.splitlines())
    assert "max_new_tokens" in said


def test_a_model_without_a_tower_takes_text_only(model):
    blind = dataclasses.replace(model, encoder=None)
    assert "this model takes text only" in refused(blind, [["a", part(A)]])
    with pytest.raises(kj.ChatError, match="part 0 is an image, and this model takes text only"):
        blind.chat([message(part(A))])
    with pytest.raises(kj.ImageError, match="no vision tower"):
        blind.image_patches(A)


def test_without_markers_images_are_refused(model):
    plain = dataclasses.replace(model, tokenizer=TOKENIZER)
    assert "markers that the tokenizer lacks" in refused(plain, [["a", part(A)]])
    assert "has no tokenizer" in refused(dataclasses.replace(model, tokenizer=None), [[part(A)]])


def test_without_a_preprocessor_only_patches_are_images(model):
    patches = model.image_patches(A)
    bare = dataclasses.replace(model, preprocessor=None)
    assert "no preprocessor_config.json" in refused(bare, [[part(A)]])
    assert same(*(m.generate([[part(patches)]], **OPTIONS)[0] for m in (bare, model)))
    wrong = dataclasses.replace(patches, grid=(1, 2, 2))
    assert "patches of shape" in refused(model, [[part(wrong)]])


def test_scores_are_of_text(model):
    with pytest.raises(kj.PromptError, match="prompt 1 has images, and only text is scored"):
        model.score(["a message", ["a", part(A)]])


def test_a_preprocessor_of_another_tower_is_refused(tmp_path):
    folder = tmp_path / "model"
    write_seeing(folder)
    path = folder / "preprocessor_config.json"
    file = json.loads(path.read_text())
    file["media_proc_cfg"]["patch_size"] = 16
    path.write_text(json.dumps(file))
    with pytest.raises(kj.ConfigError, match=r"patch_size: 16 is not vision_config\.patch_size=14"):
        kj.load(folder)
    assert kj.load(folder, vision=False).encoder is None


def test_a_placeholder_that_is_not_the_tokenizers_is_refused(tmp_path):
    folder = tmp_path / "model"
    write_seeing(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"media_placeholder_token_id": 9}))
    with pytest.raises(kj.ConfigError, match="media_placeholder_token_id: 9 is not the id of"):
        kj.load(folder)
