"""Checks of what a runner is given."""

import dataclasses

import pytest
from models import SHALLOW, write

import kimi_jax as kj


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner") / "model"
    return kj.load(write(SHALLOW, folder), dtype="float32", chunk=16)


def with_config(model, **changes):
    config = dataclasses.replace(model.config, **changes)
    return dataclasses.replace(model, program=dataclasses.replace(model.program, config=config))


def test_what_exceeds_the_context_is_refused_everywhere(model):
    small = with_config(model, max_positions=20)
    assert small.logits([[1] * 20]).shape == (1, 20, 83)
    assert small.logits([[1] * 25], [20]).shape == (1, 25, 83)  # padding does not count
    for action in (
        lambda: small.logits([[1] * 21]),
        lambda: small.logits([[1] * 21, [1] * 21], [3, 21]),
        lambda: small.mixtures([1] * 21),
        lambda: small.new_state(1, 21),
        lambda: small.prefill(small.new_state(1, 20), [[1] * 21]),
    ):
        with pytest.raises(kj.RequestError, match=r"2[01]"):
            action()
    _, full = small.prefill(small.new_state(1, 20), [[1] * 20])
    with pytest.raises(kj.RequestError, match="has seen 20 tokens and brings 1"):
        small.decode(full, [1])


@pytest.mark.parametrize(
    "tokens, lengths, message",
    [
        ([[1], [1, 2]], None, "tokens must be .B, T.: pad rows"),
        ([[10**400]], None, "tokens must be whole numbers"),
        ([["x"]], None, "tokens must be whole numbers"),
        ([[1.0]], None, "tokens must be whole numbers"),
        ([[True]], None, "tokens must be whole numbers"),
        ([[]], None, "tokens must be whole numbers"),
        ([[83]], None, "token id 83 at row 0, position 0"),
        ([[1, -1]], None, "token id -1 at row 0, position 1"),
        ([[1]], [2], "lengths must be 1 whole numbers from 0 to 1"),
        ([[1]], [[1], [1, 2]], "lengths must be .B."),
        ([[1]], [float("nan")], "lengths must be"),
    ],
)
def test_tokens_that_are_not_ids_are_refused(model, tokens, lengths, message):
    state = model.new_state(1, 8)
    with pytest.raises(kj.RequestError, match=message):
        model.logits(tokens, lengths)
    with pytest.raises(kj.RequestError, match=message):
        model.prefill(state, tokens, lengths)
    assert not state.length.is_deleted()


@pytest.mark.parametrize("size", [0, -1, 10**400, 2**31])
def test_sizes_of_a_state_are_refused(model, size):
    for sizes in ((size, 4), (1, size)):
        with pytest.raises(kj.RequestError, match="must be a positive whole number below 2\\^31"):
            model.new_state(*sizes)
