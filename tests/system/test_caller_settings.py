"""Settings of JAX that belong to the caller never change a result: types, precisions, broadcasting
and devices are written in the code.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import MESHED, prompts, write
from tolerances import PATHS

import kimi_jax as kj
from kimi_jax.model.implementations import DEFINITIONS, Implementations
from kimi_jax.runtime.program import make_program

SMALL = dataclasses.replace(MESHED, layers=2, mla_layers=(1,), residual_block=1, index_topk=3)

SETTINGS = {
    "types and precisions": (
        jax.enable_x64(False),
        jax.default_matmul_precision("bfloat16"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("warn"),  # a warning fails a test
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
    ),
    "devices and checks": (
        jax.debug_nans(True),
        jax.debug_key_reuse(True),
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Logits, a state after a step, ids of greedy and of drawn replies and their log-probabilities,
    of a fresh model.
    """
    folder = write(SMALL, tmp_path_factory.mktemp("settings") / "small")
    ids, lengths = prompts(SMALL, (7, 4))

    def run() -> list[np.ndarray]:
        model = kj.load(folder, dtype="float32", progress=False)
        logits, state = model.prefill(model.new_state(2, 16), ids, lengths)
        _, state = model.decode(state, [3, 5])
        options = dict(max_new_tokens=4, logprobs=1, stop_tokens=())
        replies = [
            model.generate([ids[0].tolist()], sampling=sampling, **options)[0]
            for sampling in (kj.Greedy(), kj.Sample(temperature=0.8, top_p=0.9))
        ]
        scores = [[token.logprob for token in reply.logprobs] for reply in replies]
        return [
            *map(np.asarray, [logits, *jax.tree.leaves(state)]),
            np.array([reply.tokens for reply in replies]),
            np.array(scores, np.float32),
        ]

    return run


@pytest.fixture(scope="module")
def expected(results):
    return results()


@pytest.mark.parametrize("name", SETTINGS)
def test_results_have_the_same_bits_under_any_settings(results, expected, name):
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS[name]:
            stack.enter_context(setting)
        if name.startswith("devices"):
            stack.enter_context(jax.default_device(jax.devices()[1]))
        actual = results()
    *bits, scores = zip(actual, expected, strict=True)
    for found, right in bits:
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(found, right)
    np.testing.assert_allclose(*scores, atol=PATHS)  # 64-bit types change how a loop is fused


def products(jaxpr):
    """The precisions of all matrix products of a program, its inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize("forms", [Implementations(), DEFINITIONS], ids=["fast", "definitions"])
@pytest.mark.parametrize("T", [1, 5])
def test_every_product_of_a_step_has_full_precision(forms, T):
    """GPUs would take TF32 for float32, or what `jax_default_matmul_precision` says."""
    program = make_program(SMALL, dtype="float32", implementations=forms)
    state = program.state_shapes(2, 8)
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, T), (2,)))
    jaxpr = jax.make_jaxpr(program.step)(program.weight_shapes, state, tokens, lengths)
    found = list(products(jaxpr.jaxpr))
    assert len(found) > 20
    highest = jax.lax.Precision.HIGHEST
    assert set(found) == {(highest, highest)}
