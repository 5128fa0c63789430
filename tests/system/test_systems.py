"""The parallel systems together: any answer to which rows, keys and experts a rank holds gives what
one device gives.
"""

import itertools

import numpy as np
import pytest
from devices import every_pair
from models import MESHED, write
from tolerances import EXACT, LOGITS, NEAR

import kimi_jax as kj

BOTH = ("data", "model")
SHIPPED = "kimi_jax/shipped"
# Prompts around blocks of 4 and 8 positions, shorter than one, and of very different lengths.
LENGTHS = (33, 1, 8, 7, 9, 17, 16, 5, 31, 2, 4)
FACTORS = dict(
    mesh=[(1, 2), (1, 4), (1, 8), (2, 2), (2, 4)],
    rows=["full", "sliced", "auto"],
    keys=["whole", "helix"],
    experts=["exchange", "local", "exchange over both"],
    exchange=["latents", "values"],
    shared=["whole", "sliced"],
    block=[4, 8, 64],
)
# Decode steps of so many rows; "auto" slices those of 8 and more a data rank, and every prefill.
COUNTS = itertools.cycle([7, 1, 33, 8, 5, 9])
CASES = [(*case, next(COUNTS)) for case in every_pair(list(FACTORS.values()))]


def placed(rows, keys, experts, exchange, shared, block):
    way, _, axes = experts.partition(" over ")
    return kj.Placement(
        rows=rows, sliced_from=8, keys=keys, helix_block=block, exchange=exchange, shared=shared,
        experts=way, expert_axes=BOTH if axes else ("model",),
    )  # fmt: skip


def requests(config, count, scale):
    """So many right-padded prompts, the first ones of always the same."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab, (33, scale * max(LENGTHS)))
    return ids[:count], scale * np.array([*itertools.islice(itertools.cycle(LENGTHS), count)])


def run(model, count, fed=None):
    """Logits after ragged prompts, prefilled by chunks, and of three decode steps after them, fed
    with the likeliest tokens or with those given; and the tokens.
    """
    scale = 4 if model.config.index_topk == 64 else 1  # so that keys are selected there too
    prompts = requests(model.config, count, scale)
    logits, state = model.prefill(model.new_state(count, 64 * scale), *prompts)
    every, tokens = [np.asarray(logits)], []
    for step in range(3):
        tokens.append(every[-1].argmax(-1) if fed is None else fed[step][:count])
        logits, state = model.decode(state, tokens[-1])
        every.append(np.asarray(logits))
    return np.stack(every, 1), tokens


@pytest.fixture(scope="module")
def folder_of(golden, tmp_path_factory):
    """name -> the checkpoint folder of a model: the shipped one, one with a layer of each kind, or
    a golden one.
    """
    meshed = tmp_path_factory.mktemp("models") / "meshed"
    others = {"shipped": lambda: SHIPPED, "meshed": lambda: write(MESHED, meshed)}
    return lambda name: others[name]() if name in others else golden(name)[0]


@pytest.fixture(scope="module")
def one_device(folder_of):
    """What one device makes of all 33 requests, by folder and type."""
    done = {}

    def get(name, dtype):
        folder = folder_of(name)
        if (name, dtype) not in done:
            done[name, dtype] = run(kj.load(folder, dtype=dtype, chunk=16), 33)
        return folder, *done[name, dtype]

    return get


def agrees(one_device, name, dtype, mesh, place, count):
    """Equal logits, token by token; and equal greedy tokens, where no two logits are near."""
    folder, wanted, fed = one_device(name, dtype)
    model = kj.load(folder, kj.make_mesh(*mesh), place, dtype, chunk=16)
    got, _ = run(model, count, fed)
    worst = np.abs(got - wanted[:count]).max(-1)
    if dtype == "float64":
        assert worst.max() < EXACT
        np.testing.assert_array_equal(got.argmax(-1), wanted[:count].argmax(-1))
    else:
        assert worst.max() < LOGITS[dtype]
        assert np.quantile(worst, 0.99) < NEAR[dtype]


@pytest.mark.parametrize((*FACTORS, "count"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_every_pair_of_answers_equals_one_device(
    one_device, mesh, rows, keys, experts, exchange, shared, block, count
):
    """On one layer of each kind; whole depths follow below."""
    place = placed(rows, keys, experts, exchange, shared, block)
    agrees(one_device, "meshed", "float64", mesh, place, count)


OTHERS = [
    (
        "k3-tiny",
        "float64",
        (2, 4),
        placed("sliced", "helix", "exchange over both", "latents", "sliced", 4),
    ),
    ("k3-tiny", "float32", (1, 4), placed("auto", "helix", "local", "values", "whole", 8)),
    ("k31-tiny", "float32", (1, 8), placed("sliced", "helix", "exchange", "latents", "whole", 4)),
    ("shipped", "float32", (1, 2), placed("sliced", "helix", "exchange", "values", "sliced", 4)),
    (
        "shipped",
        "float32",
        (2, 4),
        placed("sliced", "helix", "exchange over both", "latents", "whole", 8),
    ),
]


@pytest.mark.parametrize(
    "name, dtype, mesh, place", OTHERS, ids=lambda v: "" if isinstance(v, kj.Placement) else str(v)
)
def test_other_models_and_types_equal_one_device(one_device, name, dtype, mesh, place):
    agrees(one_device, name, dtype, mesh, place, 7)
