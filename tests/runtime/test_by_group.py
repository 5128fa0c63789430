"""Steps that walk the layers by group: calls of few programs that give what one program gives."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from models import DEEP, prompts, write
from tolerances import EXACT

import kimi_jax as kj
from kimi_jax.errors import RequestError
from kimi_jax.runtime.probes import compile_parts, compile_step
from kimi_jax.runtime.program import default_walk, make_program

# A dense layer, three groups of four, and a tail. A residual block starts in the second group.
GROUPED = dataclasses.replace(DEEP, layers=14, mla_layers=(3, 7, 11, 13), residual_block=8)
PLACE = kj.Placement(
    rows="sliced", keys="helix", helix_block=2, pad=("heads", "experts", "vocab", "dense", "shared")
)
IDS, LENGTHS = prompts(GROUPED, (5, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(GROUPED, tmp_path_factory.mktemp("grouped") / "model")


@pytest.fixture(scope="module")
def models(folder):
    """One model scanned and walked by group, on 2 x 2 devices."""
    mesh = kj.make_mesh(2, 2)
    walks = ("scanned", "by_group")
    return [kj.load(folder, mesh, PLACE, "float64", walk=walk) for walk in walks]


def test_steps_by_group_equal_scanned_ones(models):
    """Two pieces of a prompt and a token: the logits and all of the state."""
    logits, states = [], []
    for model in models:
        state = model.new_state(2, 16)
        for _ in range(2):
            _, state = model.prefill(state, IDS, LENGTHS)
        last, state = model.decode(state, [3, 4])
        logits.append(np.asarray(last))
        states.append(kj.move(state, PLACE, scan=False).bare())
    np.testing.assert_allclose(*logits, atol=EXACT, rtol=0)
    chex.assert_trees_all_close(*states, atol=EXACT, rtol=0)


def test_multi_step_decode_by_group_samples_the_same_tokens(models):
    options = dict(max_new_tokens=[6, 3], temperature=[0.0, 0.8], seed=5, logprobs=True)
    rows = [row[:n].tolist() for row, n in zip(IDS, LENGTHS, strict=True)]
    one, other = (model.generate(rows, **options) for model in models)
    assert [reply.tokens for reply in one] == [reply.tokens for reply in other]
    for a, b in zip(one, other, strict=True):
        pairs = zip(a.logprobs, b.logprobs, strict=True)
        assert all(abs(x.logprob - y.logprob) < EXACT for x, y in pairs)


def test_logits_without_a_state_by_group_equal_scanned_ones(models):
    one, other = (np.asarray(model.logits(IDS, LENGTHS)) for model in models)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(one[row, :length], other[row, :length], atol=EXACT, rtol=0)


def test_equal_groups_share_a_program_and_a_step_consumes_its_state(models):
    model = models[1]
    state = model.new_state(2, 16)
    before = jax.tree.leaves(state.layers)
    model.prefill(state, IDS, LENGTHS)
    assert all(array.is_deleted() for array in before)
    with pytest.raises(RequestError, match="consumed by a step"):
        model.decode(state, [3, 4])
    groups = model.program.by_group("prefill").groups
    assert [(group.span.first, group.span.period) for group in groups] == [
        *((0, 1), (1, 4), (5, 4), (9, 4), (13, 1))
    ]
    assert groups[1].run is groups[3].run
    assert len({group.run for group in groups}) == 4


def test_the_programs_of_a_step_compile_from_shapes_alone():
    program = make_program(GROUPED, kj.make_mesh(1, 1), dtype="float32", walk="by_group")
    before = len(jax.live_arrays())
    parts, seconds = compile_parts(program, 2, 1, 32)
    assert [(part.name, part.calls) for part in parts] == [
        *(("begin", 1), ("layer 0", 1), ("layers 1 to 4", 2), ("layers 5 to 8", 1)),
        *(("layer 13", 1), ("end", 1), ("head", 1)),
    ]
    caches = jax.tree.leaves(program.state_shapes(2, 32).layers[0][3])
    group = parts[2].compiled.memory_analysis()
    assert group.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in caches)
    assert set(seconds) == {"lower", "compile"}
    assert len(jax.live_arrays()) == before
    with pytest.raises(ValueError, match="use compile_parts"):
        compile_step(program, 2, 1, 32)


def test_how_layers_are_walked_follows_the_platform_and_is_checked():
    assert default_walk("cpu", 8) == "unrolled"
    assert default_walk("cpu", 93) == "scanned"
    assert default_walk("gpu", 8) == default_walk("gpu", 93) == "by_group"
    for walk, scan in (("backwards", None), ("by_group", True)):
        with pytest.raises(ValueError, match="walk must be one of unrolled, scanned, by_group"):
            make_program(GROUPED, walk=walk, scan=scan)
