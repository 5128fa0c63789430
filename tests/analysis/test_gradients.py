"""Weights by name, logits as a function of them, and their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import ODD, SHALLOW_MESHED, write

import kimi_jax as kj
from kimi_jax.checkpoint import Checkpoint, to_hf

IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(SHALLOW_MESHED, tmp_path_factory.mktemp("gradients") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return kj.load(folder, dtype="float64", implementations=kj.TRAINING, unpack=True)


def loss_of(model, ids=IDS):
    def loss(weights):
        logits = model.apply(weights, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return loss


@pytest.mark.parametrize("walk", ["unrolled", "scanned", "by_group"])
def test_weights_have_the_names_and_values_of_the_checkpoint(folder, walk):
    model = kj.load(folder, dtype="float64", walk=walk)
    with Checkpoint(folder, model.config) as checkpoint:
        assert set(model.weights) == set(checkpoint.names)
        for name in checkpoint.names:
            want = checkpoint.read(name)
            assert model.weights.shape(name) == want.shape
            np.testing.assert_array_equal(
                model.weights[name], want.astype(model.weights[name].dtype)
            )
    assert len(to_hf(model.config, model.weights)) >= len(model.weights)


def test_padding_is_not_part_of_a_weight(tmp_path):
    path = write(ODD, tmp_path / "model")
    place = kj.Placement(pad=("heads", "experts", "vocab", "dense", "shared"))
    model = kj.load(path, mesh=kj.make_mesh(1, 8), placement=place, dtype="float64")
    assert model.weights["embed"].shape == (ODD.vocab, ODD.hidden)
    tuned = model.with_weights({"embed": model.weights["embed"] * 2})
    np.testing.assert_array_equal(tuned.weights["embed"], 2 * model.weights["embed"])
    assert tuned.params["embed",].shape == model.params["embed",].shape
    assert tuned.params["embed",].sharding == model.params["embed",].sharding


def test_unpacked_experts_compute_the_same(folder, model):
    """Also where layers are walked by group, which `apply` replaces by one program."""
    packed = kj.load(folder, dtype="float64", walk="by_group")
    assert not packed.weights.is_float("layers.1.mlp.experts.w_up")
    assert model.weights["layers.1.mlp.experts.w_up"].dtype == np.float64
    np.testing.assert_allclose(packed.logits(IDS), model.logits(IDS), atol=1e-9)
    np.testing.assert_allclose(packed.apply({}, IDS), model.logits(IDS), atol=1e-9)
    np.testing.assert_allclose(model.apply({}, IDS), model.logits(IDS), atol=1e-12)


def test_gradients_are_slopes(folder):
    """Of a weight of each kind, along a random direction, against a difference quotient. The
    indexer, whose choice has no slope, is not taught here.
    """
    plain = dataclasses.replace(kj.TRAINING, select="plain")
    model = kj.load(folder, dtype="float64", implementations=plain, unpack=True)
    names = ["embed", "norm", "layers.0.attention.w_q", "layers.0.attention.a_log",
             "layers.1.mlp.experts.w_up", "layers.1.mlp.w_router", "layers.1.attention.w_q_a",
             "layers.1.attention_residual.proj"]  # fmt: skip
    weights = {name: model.weights[name] for name in names}
    loss = jax.jit(loss_of(model))
    gradients = jax.grad(loss)(weights)
    rng = np.random.default_rng(0)
    for name in names:
        along = rng.normal(size=weights[name].shape)
        ends = (weights | {name: weights[name] + 1e-5 * sign * along} for sign in (1, -1))
        up, down = map(loss, ends)
        slope = float(up - down) / 2e-5
        assert float((gradients[name] * along).sum()) == pytest.approx(slope, rel=2e-4, abs=1e-7)


def test_the_default_model_says_which_implementations_have_gradients(folder):
    fast = kj.load(folder, dtype="float64")
    with pytest.raises(
        NotImplementedError, match=r"mla='absorbed' and moe='grouped'.*kj\.TRAINING"
    ):
        jax.grad(loss_of(fast))({"norm": fast.weights["norm"]})
    assert np.isfinite(loss_of(fast)({}))


def test_wrong_weights_are_one_error(model):
    good = model.weights["norm"]
    with pytest.raises(kj.RequestError) as error:
        model.apply({"norms": good, "norm": good[:3], "embed": jnp.zeros((80, 48), jnp.int32)}, IDS)
    for part in ("norms: no such weight; did you mean norm?", "norm: shape (3,)", "embed: dtype"):
        assert part in str(error.value)
    with pytest.raises(kj.RequestError, match=r"no weight matches '\*\.w_x'"):
        model.weights.select("*.w_x")
    with pytest.raises(kj.RequestError, match="tokens must be ids"):
        model.apply({}, [1, 2])


@pytest.mark.parametrize(
    "data, model_ranks, place",
    [
        (2, 4, kj.Placement()),
        (2, 2, kj.Placement(experts="local", latent="sharded")),
        (1, 4, kj.Placement(rows="sliced", latent="sharded")),
    ],
    ids=("exchange", "local", "sliced"),
)
def test_a_mesh_has_the_gradients_of_one_device(
    folder, model, one_gradient, data, model_ranks, place
):
    """Also through the messages of bits in which rows travel to their experts."""
    names, want = one_gradient
    mesh = kj.make_mesh(data, model_ranks)
    options = {"dtype": "float64", "implementations": kj.TRAINING, "unpack": True}
    sharded = kj.load(folder, mesh=mesh, placement=place, **options)
    got = jax.jit(jax.grad(loss_of(sharded)))({name: sharded.weights[name] for name in names})
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=1e-12)


@pytest.fixture(scope="module")
def one_gradient(model):
    """The names of all weights that have a gradient, and those on one device."""
    names = [name for name in model.weights if model.weights.is_float(name)]
    return names, jax.jit(jax.grad(loss_of(model)))({name: model.weights[name] for name in names})


def test_a_tuned_model_runs_with_other_implementations(folder, model):
    weights = {"norm": model.weights["norm"] * 1.5}
    fast = kj.load(folder, dtype="float64").with_weights(weights)
    np.testing.assert_allclose(fast.logits(IDS), model.apply(weights, IDS), atol=1e-9)
