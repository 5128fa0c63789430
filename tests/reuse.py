"""What the tests of sessions and of prefix caches share: models on three placements, prompts, and
how two replies are compared.
"""

import numpy as np
import pytest
from models import MESHED

import kimi_jax as kj

CHUNK = 16
EVERY = dict(max_new_tokens=5, stop_tokens=[], logprobs=MESHED.vocab)  # all log-probabilities
HELIX = kj.Placement(keys="helix", helix_block=4, rows="sliced")
BOTH = ("data", "model")
VALUES = kj.Placement(keys="helix", helix_block=4, exchange="values", expert_axes=BOTH)
PLACES = {"one": ((1, 1), kj.Placement()), "1x8": ((1, 8), HELIX), "2x4": ((2, 4), VALUES)}


def load(folder, place="one"):
    """A small model in chunks of 16 tokens."""
    sizes, placement = PLACES[place]
    return kj.load(folder, kj.make_mesh(*sizes), placement, "float32", chunk=CHUNK)


def ids(count, seed=0):
    """Random ids."""
    return np.random.default_rng(seed).integers(0, MESHED.vocab, count).tolist()


def cache_of(model, entries):
    """A prefix cache with room for that many chunks."""
    width = model.program.stripes.window(CHUNK)
    return kj.PrefixCache(model, model.program.row_bytes(width) * entries)


def cold(model, prompt, **options):
    """The reply without a session and without a cache."""
    return model.generate([prompt], **{**EVERY, **options})[0]


def same(reply, wanted):
    """Equal tokens, and log-probabilities bit for bit."""
    assert reply.tokens == wanted.tokens
    assert reply.logprobs == wanted.logprobs


def near(reply, wanted):
    """Equal tokens, and log-probabilities within 1e-4."""
    assert (reply.tokens, reply.finish_reason) == (wanted.tokens, wanted.finish_reason)
    for said, right in zip(reply.logprobs, wanted.logprobs, strict=True):
        assert dict(said.top) == pytest.approx(dict(right.top), abs=1e-4)
