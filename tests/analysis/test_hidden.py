"""The residual stream after layers: against layers run one by one, in chunks, scans and meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import DEEP, SHALLOW_MESHED, write

import kimi_jax as kj
from kimi_jax.model.layers import Expert, rms_norm
from kimi_jax.runtime.model_on_mesh import BY_ROW, BY_SECOND, WEIGHTS

# Three equal groups of two layers; block starts at layers 0 and 3 do not line up with them.
SIX = dataclasses.replace(DEEP, layers=6, mla_layers=(1, 3, 5), dense_layers=0, max_positions=64)
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2, 7] + [0] * 17]
LENGTHS = [19, 2]


def streams(model):
    """By the definition: layer after layer, then what the next one reads of bank and sum. Two
    arrays [layers, B, T, D].
    """
    program, config = model.program, model.config

    def device_fn(weights, tokens, lengths):
        kimi, (B, T) = program.merge(weights), tokens.shape
        step = program.step_info(jnp.zeros(B, jnp.int32), lengths, T)
        (stack,), (states,) = kimi.stacks, program.empty(B, T).layers
        graph, experts, rest = nnx.split(stack.layers, Expert, ...)
        layers = nnx.merge(graph, experts, jax.tree.map(lambda w: w[0], rest))
        x, bank = kimi.begin(tokens, step)
        sums, mixtures = [], []
        for i, layer in enumerate(layers):
            mixtures.append(layer.attention_residual(x, bank, -(-i // config.residual_block))[0])
            x, bank, *_ = layer(x, bank, states[i], step, i)
            sums.append(x)
        mixtures.append(kimi.residual(x, bank, config.bank_rows)[0])
        return tuple(jnp.stack(rows).reshape(-1, B, T, config.hidden)
                     for rows in (sums, mixtures[1:]))  # fmt: skip

    run = program.shard(device_fn, (WEIGHTS, BY_ROW, BY_ROW), (BY_SECOND, BY_SECOND))
    return jax.jit(run)(model.params, np.array(IDS, np.int32), np.array(LENGTHS, np.int32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(SIX, tmp_path_factory.mktemp("hidden") / "model")


@pytest.fixture(scope="module")
def wanted(folder):
    """Both streams by the definition, by name."""
    found = streams(kj.load(folder, dtype="float64", scan=False))
    return dict(zip(("sum", "mixture"), map(np.asarray, found), strict=True))


def assert_streams(got, want):
    assert got.shape == want.shape
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(got[:, row, :n], want[:, row, :n], atol=1e-9)


@pytest.mark.parametrize("stream", ["sum", "mixture"])
def test_streams_are_those_of_layers_run_one_by_one(folder, wanted, stream):
    """Chunk by chunk, in any order of layers, the rows of a ragged batch, where layers are scanned;
    and the last mixture gives the logits.
    """
    model = kj.load(folder, dtype="float64", chunk=16, scan=True)
    assert max(span.groups for span in model.program.stacks) > 1
    layers = [5, 0, 2, 3]
    got = np.asarray(model.hidden(IDS, layers, LENGTHS, stream=stream))
    assert_streams(got, wanted[stream][layers])
    if stream == "mixture":
        normed = rms_norm(jnp.asarray(got[0, 0]), model.weights["norm"], SIX.norm_eps)
        logits = np.asarray(normed) @ np.asarray(model.weights["head"]).T
        np.testing.assert_allclose(logits, np.asarray(model.logits(IDS, LENGTHS))[0], atol=1e-9)


def test_unrolled_layers_have_the_same_streams(folder, wanted):
    model = kj.load(folder, dtype="float64", scan=False)
    assert_streams(np.asarray(model.hidden(IDS, 4, LENGTHS)), wanted["sum"][4:5])


@pytest.mark.parametrize("rows, data, stream", [("full", 2, "sum"), ("sliced", 1, "mixture")])
def test_a_mesh_gives_what_one_device_gives(tmp_path, rows, data, stream):
    """Also of a batch that is padded to the data ranks, and of sliced rows."""
    path = write(SHALLOW_MESHED, tmp_path / "model")
    mesh, place = kj.make_mesh(data, 8 // data), kj.Placement(rows=rows)
    one = kj.load(path, dtype="float64", chunk=16)
    many = kj.load(path, mesh=mesh, placement=place, dtype="float64", chunk=16)
    got, want = (model.hidden(IDS[:1], [0, 1], stream=stream) for model in (many, one))
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_what_cannot_be_asked_is_one_error(folder):
    model = kj.load(folder, dtype="float64", scan=False)
    with pytest.raises(
        kj.RequestError, match=r"(?s)layers must be numbers in 0\.\.5.*sum, mixture"
    ):
        model.hidden(IDS, [0, 9], stream="both")
    for tokens in (5, [5], [[1, 2], [3]]):
        with pytest.raises(kj.RequestError, match="tokens must be"):
            model.hidden(tokens, 0)
    for layers in ([], -1):
        with pytest.raises(kj.RequestError, match="layers must"):
            model.hidden(IDS, layers)
