"""The parallel systems together: any answer to which rows, keys and experts a rank holds gives what
one device gives, on one layer of each kind. Whole depths follow in test_golden.py.
"""

import itertools

import numpy as np
import pytest
from devices import every_pair
from models import MESHED, write
from tolerances import EXACT

import kimi_jax as kj

BOTH = ("data", "model")
# Prompts around blocks of 4 and 8 positions, shorter than one, and of very different lengths.
LENGTHS = (33, 1, 8, 7, 9, 17, 16, 5, 31, 2, 4)
FACTORS = dict(
    mesh=[(1, 2), (1, 8), (2, 4), (4, 2)],
    rows=["full", "sliced", "auto"],
    keys=["whole", "helix"],
    experts=["exchange", "auto", "exchange over both", "local over both"],
    latent=["whole", "sharded"],
    exchange=["latents", "values"],
    shared=["whole", "sliced"],
    block=[4, 8, 64],
)
# Decode steps of so many rows; "auto" slices those of 8 and more a data rank, and every prefill.
COUNTS = itertools.cycle([7, 1, 33, 8, 5, 9])
CASES = [(*case, next(COUNTS)) for case in every_pair(list(FACTORS.values()))]


def placed(rows, keys, experts, latent, exchange, shared, block):
    way, _, axes = experts.partition(" over ")
    return kj.Placement(
        rows=rows, sliced_from=8, keys=keys, helix_block=block, exchange=exchange, shared=shared,
        experts=way, local_below=4, expert_axes=BOTH if axes else ("model",), latent=latent,
    )  # fmt: skip


def requests(count):
    """So many right-padded prompts, the first ones of always the same."""
    ids = np.random.default_rng(0).integers(3, MESHED.vocab, (33, max(LENGTHS)))
    return ids[:count], np.array([*itertools.islice(itertools.cycle(LENGTHS), count)])


def run(model, count, fed=None):
    """Logits after ragged prompts, prefilled by chunks, and of three decode steps after them, fed
    with the likeliest tokens or with those given; and the tokens.
    """
    logits, state = model.prefill(model.new_state(count, 64), *requests(count))
    every, tokens = [np.asarray(logits)], []
    for step in range(3):
        tokens.append(every[-1].argmax(-1) if fed is None else fed[step][:count])
        logits, state = model.decode(state, tokens[-1])
        every.append(np.asarray(logits))
    return np.stack(every, 1), tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(MESHED, tmp_path_factory.mktemp("models") / "meshed")


@pytest.fixture(scope="module")
def one_device(folder):
    """What one device makes of all 33 requests."""
    return run(kj.load(folder, dtype="float64", chunk=16), 33)


@pytest.mark.parametrize((*FACTORS, "count"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_every_pair_of_answers_equals_one_device(
    folder, one_device, mesh, rows, keys, experts, latent, exchange, shared, block, count
):
    """Equal logits and equal greedy tokens."""
    place = placed(rows, keys, experts, latent, exchange, shared, block)
    model = kj.load(folder, kj.make_mesh(*mesh), place, "float64", chunk=16)
    wanted, fed = one_device
    got, _ = run(model, count, fed)
    np.testing.assert_allclose(got, wanted[:count], atol=EXACT, rtol=0)
    np.testing.assert_array_equal(got.argmax(-1), wanted[:count].argmax(-1))
