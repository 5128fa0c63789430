"""The whole decoder against logits, continuations and states that another implementation
computed.
"""

import jax
import numpy as np
import pytest
from tolerances import LOGITS, NEAR, SIX, STATE

import kimi_jax as kj
from kimi_jax.config.block_sizes import BLOCK_SIZES
from kimi_jax.model.implementations import DEFINITIONS, Implementations
from kimi_jax.model.state import KDAState

P, BOTH = kj.Placement, ("data", "model")
# What GPUs run, but for the ragged exchange.
ON_GPUS = Implementations(kda="transitions", mla="static", moe="slots", blocks=BLOCK_SIZES["gpu"])
HELIX = dict(rows="sliced", keys="helix", helix_block=4)
# Fast and defining forms, every walk over the layers, both types, and meshes; other placements are
# held to one device. Prompts at once or in chunks of 16 tokens, whose programs all prompts share.
RUNS = [
    ("k3-tiny", "float32", "scanned", None, (1, 1), 256, P()),
    (
        *("k3-tiny", "float64", "unrolled", DEFINITIONS, (1, 2), 16),
        P(rows="auto", sliced_from=8),
    ),
    ("k31-tiny", "float64", "scanned", ON_GPUS, (1, 4), 16, P(**HELIX, latent="sharded")),
    (
        *("k31-tiny", "float32", "by_group", None, (2, 4), 16),
        P(**HELIX, shared="sliced", expert_axes=BOTH),
    ),
]
# Where `generate` runs too, whose loops are programs of their own: a plain model and a large one.
GENERATED = [RUNS[0], RUNS[3]]
# Two float32 orders of one sum differ too; all but this share of tokens must be nearer.
FAR = 0.01


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: "-".join(map(str, run[:6])))
def run(request, golden):
    name, dtype, walk, forms, mesh, chunk, placement = request.param
    folder, expected = golden(name)
    mesh = kj.make_mesh(*mesh)
    return (
        kj.load(folder, mesh, placement, dtype, walk=walk, implementations=forms, chunk=chunk),
        expected,
        LOGITS[dtype],
        STATE[dtype],
    )


def prompts(expected):
    names = sorted(
        {key.split(".")[0] for key in expected if key.endswith(".cont_ids")},
        key=lambda p: int(p[1:]),
    )
    return {name: expected[f"{name}.ids"].tolist() for name in names}


def padded(rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids, np.array([len(row) for row in rows])


def test_logits_of_every_prompt_equal_the_golden_ones(run):
    model, expected, tolerance, _ = run
    ids, lengths = padded(list(prompts(expected).values()))
    logits, worst = np.asarray(model.logits(ids, lengths)), []
    for row, name in zip(logits, prompts(expected), strict=True):
        want = expected[f"{name}.logits_f64"]
        np.testing.assert_allclose(row[: len(want)], want, atol=tolerance, rtol=0, err_msg=name)
        worst.extend(np.abs(row[: len(want)] - want).max(-1))
    assert np.quantile(worst, 1 - FAR) < NEAR[model.dtype]
    if name := next((p for p, row in prompts(expected).items() if len(row) >= 6), None):
        row = logits[list(prompts(expected)).index(name), :6]
        assert np.abs(row - expected[f"{name}.logits_f64"][:6]).max() < SIX[model.dtype]


@pytest.mark.parametrize(
    "run", GENERATED, ids=lambda run: "-".join(map(str, run[:6])), indirect=True
)
def test_every_greedy_continuation_equals_the_golden_one(run):
    model, expected, *_ = run
    out = model.generate(list(prompts(expected).values()), max_new_tokens=16, stop_tokens=[])
    for name, completion in zip(prompts(expected), out, strict=True):
        assert completion.tokens == expected[f"{name}.cont_ids"].tolist(), name


def test_logits_along_a_continuation_equal_the_golden_ones(run):
    """Prefill of the whole ragged batch, then decode steps fed with the golden tokens."""
    model, expected, tolerance, _ = run
    rows = list(prompts(expected).values())
    rows += [rows[0]] * (8 - len(rows))
    ids, lengths = padded(rows)
    logits, state = model.prefill(model.new_state(8, 256), ids, lengths)
    names = list(prompts(expected))
    for i in range(16):
        for row, name in zip(np.asarray(logits), names, strict=False):
            want = expected[f"{name}.cont_logits_f64"][i]
            np.testing.assert_allclose(
                row, want, atol=tolerance, rtol=0, err_msg=f"{name} step {i}"
            )
        taken = [expected[f"{name}.cont_ids"][i] for name in names] + [0] * (8 - len(names))
        logits, state = model.decode(state, np.array(taken))


def test_ragged_batch_equals_the_golden_one(run):
    model, expected, tolerance, _ = run
    lengths = expected["batch.mask"].sum(1)
    # Completed to the shape of all prompts, whose program serves this test too.
    ids, of_prompts = padded(list(prompts(expected).values()))
    ids[:] = 0
    ids[: len(lengths), : lengths.max()] = expected["batch.ids"][:, : lengths.max()]
    of_prompts[:] = 0
    of_prompts[: len(lengths)] = lengths
    logits = np.asarray(model.logits(ids, of_prompts))
    for r, length in enumerate(lengths):
        want = expected[f"batch.row{r}.logits_f64"]
        np.testing.assert_allclose(logits[r, :length], want, atol=tolerance, rtol=0)


def test_memories_and_windows_after_64_tokens_equal_the_golden_ones(run):
    """KDA's memory [K, V] and the three convolution windows, layer by layer."""
    model, expected, _, tolerance = run
    rows = list(prompts(expected).values())
    rows = [expected["p64.ids"].tolist()] * 8
    _, state = model.prefill(model.new_state(8, 256), *padded(rows))
    compared = 0
    for span, states in zip(model.program.stacks, state.layers, strict=True):
        for j, layer in enumerate(states):
            for g in range(span.groups if isinstance(layer, KDAState) else 0):
                one, name = (
                    jax.tree.map(np.asarray, layer.at(g)),
                    f"state.layers.{span.layer(j, g):02d}",
                )
                want = expected[f"{name}.kda_state"][0]  # padded heads come last
                np.testing.assert_allclose(one.memory[3, : len(want)], want, atol=tolerance, rtol=0)
                for part in "qkv":
                    want = expected[f"{name}.{part}_conv_tail"]
                    got = getattr(one, f"window_{part}")[3, :, : want.shape[1]]
                    np.testing.assert_allclose(
                        got, want, atol=tolerance, rtol=0, err_msg=f"{name} {part}"
                    )
                compared += 1
    assert compared == 6


def test_bfloat16_stays_near(golden):
    """A loose check: random weights flip routes under bfloat16 noise. One token is free of
    flips.
    """
    folder, expected = golden("k31-tiny")
    model = kj.load(folder, dtype="bfloat16")
    got = np.asarray(model.logits(expected["p1.ids"][None]))[0, 0]
    want = expected["p1.logits_f64"][0]
    assert np.dot(got, want) / np.linalg.norm(got) / np.linalg.norm(want) > 0.998
    assert got.argmax() == want.argmax()
