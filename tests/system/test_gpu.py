"""What only GPUs can show: the ragged exchange itself, and a model on a mesh of them.

Tests run on CPU by default. On a machine with GPUs:

    JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/system/test_gpu.py

One GPU is enough for most of it: exchanges and sums of a single rank with itself, and the model on
one GPU against the same model on the CPU. Tests run at XLA's default optimisation level. Where JAX
has fewer GPUs than a test needs, the test is skipped and says so.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import BOTH, C, X, groups, loads, per_device, same_bits
from jax.sharding import AxisType, Mesh
from models import AWKWARD, prompts, write
from oracles import close
from tolerances import LOGITS, VISION
from visions import IMAGES, entry

import kimi_jax as kj
from kimi_jax.parallel import collectives
from kimi_jax.parallel.mesh import MODEL
from kimi_jax.parallel.reductions import Reduction, emulate

pytestmark = pytest.mark.gpu
PAD = ("heads", "experts", "vocab", "dense", "shared")


@pytest.fixture(scope="module", params=[1, 2, 8])
def gpus(request):
    """How many GPUs a test uses."""
    found = jax.device_count() if jax.default_backend() == "gpu" else 0
    if found < request.param:
        pytest.skip(f"needs {request.param} GPUs, JAX has {found} ({jax.default_backend()})")
    return request.param


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "bfloat16", "float32"])
@pytest.mark.parametrize("axis", [MODEL, BOTH], ids=str)
def test_the_ragged_exchange_equals_the_padded_one(gpus, axis, dtype):
    """There and back, at counts from none to full."""
    data = 2 if axis == BOTH and gpus > 1 else 1
    model = gpus // data
    (group,) = groups(data, model, axis)
    assert len(group) == gpus

    def both_ways(blocks, dirty, counts):
        padded = collectives.all_to_all_blocks(blocks, None, axis)
        ragged = collectives.all_to_all_blocks(dirty, counts, axis)
        return padded, ragged, collectives.all_to_all_blocks(ragged, counts.T, axis)

    run = jax.jit(per_device(both_ways, data, model))
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    dirty = rng.integers(1, 100, (gpus, gpus, C, X)).astype(dtype)
    for load, counts in loads(gpus):
        real = (np.arange(C) < counts[..., None])[..., None]
        blocks = np.where(real, dirty, np.zeros((), dtype))
        everywhere = np.broadcast_to(counts.astype(np.int32), (gpus, gpus, gpus))
        padded, ragged, back = jax.device_get(run(blocks, dirty, everywhere))
        print(load)  # what a failure was about
        same_bits(padded, blocks.swapaxes(0, 1))
        same_bits(ragged, padded)
        same_bits(back, blocks)


@pytest.fixture(scope="module")
def one_device(gpus, tmp_path_factory):
    """A folder of random weights, and what one GPU makes of it; what a CPU does for one GPU."""
    folder = write(AWKWARD, tmp_path_factory.mktemp("gpu") / "awkward")
    tokens, lengths = prompts(AWKWARD, [37, 5, 18])
    device = jax.devices("cpu" if gpus == 1 else "gpu")[0]
    mesh = Mesh(np.array([[device]]), BOTH, axis_types=(AxisType.Auto, AxisType.Auto))
    model = kj.load(folder, mesh, dtype="float32")
    return folder, tokens, lengths, jax.device_get(model.logits(tokens, lengths))


@pytest.mark.parametrize("experts", ["exchange", "local"])
@pytest.mark.parametrize("latent", ["whole", "sharded"])
def test_a_model_on_several_gpus_equals_one_device(gpus, one_device, experts, latent):
    """Nothing of it divides by the ranks; rows travel by the ragged exchange."""
    folder, tokens, lengths, expected = one_device
    place = kj.Placement(pad=PAD, experts=experts, latent=latent)
    model = kj.load(folder, kj.make_mesh(1, gpus), place, dtype="float32")
    assert model.program.implementations.transport == "ragged"
    logits = jax.device_get(model.logits(tokens, lengths))
    for row, length in enumerate(lengths):
        close(logits[row, :length], expected[row, :length], LOGITS)
    state = model.new_state(len(lengths), 64)
    last, _ = model.prefill(state, tokens, lengths)
    close(last, expected[np.arange(len(lengths)), lengths - 1], LOGITS)


SLICED = [
    kj.Placement(pad=PAD, rows="sliced", keys="helix", helix_block=4),
    kj.Placement(
        pad=PAD, rows="sliced", keys="helix", helix_block=1, exchange="values", shared="sliced"
    ),
    kj.Placement(pad=PAD, rows="auto", sliced_from=9, experts="local"),
]


@pytest.mark.parametrize("place", SLICED, ids=["latents", "values", "auto"])
def test_helix_keys_and_sliced_rows_on_several_gpus_equal_one_device(gpus, one_device, place):
    """Prefill, and a state that moves to one GPU and goes on there."""
    folder, tokens, lengths, expected = one_device
    model = kj.load(folder, kj.make_mesh(1, gpus), place, dtype="float32")
    last, state = model.prefill(model.new_state(len(lengths), 64), tokens, lengths)
    close(last, expected[np.arange(len(lengths)), lengths - 1], LOGITS)
    alone = kj.load(folder, kj.make_mesh(1, 1), dtype="float32")
    moved = kj.move(state, alone.placement, alone.mesh)
    close(model.decode(state, tokens[:, 0])[0], alone.decode(moved, tokens[:, 0])[0], LOGITS)


HOWS = [
    Reduction("two_shot"),
    Reduction("ring_fp32"),
    Reduction("ring_bf16"),
    Reduction("ring_bf16", pieces=2, granule_rows=4),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_chosen_sum_has_the_bits_of_its_definition(gpus, how):
    partials = np.random.default_rng(0).normal(size=(gpus, 64, 128)).astype(jnp.bfloat16)
    run = jax.jit(per_device(lambda x: collectives.all_reduce(x, how), 1, gpus))
    expected = emulate(partials, how)
    for one in jax.device_get(run(partials)):
        same_bits(one, expected)


def test_images_are_encoded_as_the_golden_ones(gpus, golden):
    """The vision tower in float32, its images over all GPUs."""
    folder, expected = golden("vision")
    model = kj.load(folder, kj.make_mesh(data=gpus), dtype="float32")
    rows = model.encode_images([entry(expected, name) for name in IMAGES])
    for name, got in zip(IMAGES, rows, strict=True):
        want = expected[f"{name}.projected_f64"]
        np.testing.assert_allclose(got, want, atol=VISION["float32"], rtol=0)
