"""The tower and its projector against golden numbers, against a float64 oracle that the same
numbers prove, and against every mistake that others have shipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerances import VISION, VISION_STORED
from vision_oracle import MISTAKES, RIGHT, encode
from visions import FIXTURES, IMAGES, VIDEOS, entry

from kimi_jax.config.vision import VisionConfig
from kimi_jax.model.declared import declare
from kimi_jax.model.vision import positions
from kimi_jax.model.vision.encoder import Encoder, activation_bytes, merge, weight_bytes
from kimi_jax.model.vision.tower import attend, attend_in_blocks, query_block
from kimi_jax.runtime.model_on_mesh import merged

(vision,) = FIXTURES
PLACES = 96  # of a frame: more than any golden one has
BLOCK_BYTES = 2**14  # a few queries at a time


@pytest.fixture(scope="module")
def oracle(vision):
    """(name, steps) -> every array of the oracle for an entry."""
    _, config, weights, expected = vision
    wide = {name: array.astype(np.float64) for name, array in weights.items()}

    def run(names, steps=RIGHT, **options):
        entries = [entry(expected, name) for name in names]
        patches = np.concatenate([one.patches.astype(np.float64) for one in entries])
        return encode(wide, config, patches, [one.grid for one in entries], steps, **options)

    return run


def stages(encoder: Encoder, patches: jax.Array, grid: jax.Array) -> tuple[dict, dict]:
    """What `Encoder` computes, block by block: arrays of patches [frames, L, ...] and of rows."""
    tower, (frames, L) = encoder.tower, patches.shape[:2]
    row, column = positions.places(L, grid[1])
    embedded = tower.embed(patches, row, column, grid)
    turn = positions.angles(row, column, tower.config.head_dim, embedded.dtype)
    turn = jnp.tile(turn, (frames, 1))
    out = {"pos_emb": tower.position(frames, row, column, grid), "embedded": embedded}
    out |= {"rope_cos": jnp.cos(turn), "rope_sin": jnp.sin(turn)}
    x = embedded.reshape(frames * L, -1)
    valid = jnp.tile(jnp.arange(L, dtype=jnp.int32) < grid[0] * grid[1], frames)
    graph, weights = nnx.split(tower.block)
    for i in range(tower.config.blocks):
        block = nnx.merge(graph, jax.tree.map(lambda w, i=i: w[i], weights))
        out[f"block{i}.q"], out[f"block{i}.k"], _ = block.qkv(x, turn)
        x = out[f"block{i}"] = block(x, turn, valid, BLOCK_BYTES)
    final = out["final"] = tower(patches, grid, BLOCK_BYTES)
    heads = {name: 3 if name[-2:] in (".q", ".k") else 2 for name in out}
    of_patches = {
        name: array.reshape(frames, L, *array.shape[array.ndim - heads[name] + 1 :])
        for name, array in out.items()
    }
    rows = {"merged": merge(final), "projected": encoder(patches, grid, BLOCK_BYTES)}
    return of_patches, rows


@pytest.fixture(scope="module", params=["float64", "float32"])
def run(vision, request):
    """The type, and (name) -> every array of an entry, in the order of its grid."""
    _, config, weights, expected = vision
    encoder = Encoder(config, request.param)
    arrays = {
        w.path: np.reshape([weights[name] for name in w.names], w.shape).astype(w.dtype)
        for w in declare(encoder)
    }
    jitted = jax.jit(lambda arrays, *inputs: stages(merged(encoder, arrays), *inputs))

    def of(name: str) -> dict[str, np.ndarray]:
        one = entry(expected, name)
        frames, rows, columns = one.grid
        order = positions.merge_order(rows, columns)
        patches = one.patches.reshape(frames, rows * columns, -1)[:, order]
        # What stands in padding must not matter.
        padding = ((0, 0), (0, PLACES - rows * columns), (0, 0))
        patches = np.pad(patches, padding, constant_values=7.0).astype(request.param)
        of_patches, of_rows = jitted(arrays, patches, np.array([rows, columns], np.int32))
        by_grid = {
            name: np.asarray(array)[:, np.argsort(order)].reshape(-1, *array.shape[2:])
            for name, array in of_patches.items()
        }
        return by_grid | {name: np.asarray(array)[: one.rows] for name, array in of_rows.items()}

    return request.param, of


# The oracle, and what it would say of mistakes.


@pytest.mark.parametrize("name", IMAGES + VIDEOS)
def test_the_oracle_equals_every_golden_array(vision, oracle, name):
    arrays, compared = oracle([name]), 0
    for key, array in arrays.items():
        for stored in (key, f"{key}_f64"):
            if (want := vision[3].get(f"{name}.{stored}")) is not None:
                atol = VISION["float64"] if want.dtype == np.float64 else VISION_STORED
                np.testing.assert_allclose(array, want, atol=atol, rtol=0, err_msg=key)
                compared += 1
    assert compared >= 9


def test_packed_images_are_single_images(vision, oracle):
    want = vision[3]["packed.projected_f64"]
    packed = oracle(IMAGES)["projected"]
    np.testing.assert_allclose(packed, want, atol=VISION["float64"], rtol=0)
    single = np.concatenate([oracle([name])["projected"] for name in IMAGES])
    np.testing.assert_allclose(packed, single, atol=VISION["float64"], rtol=0)
    assert np.abs(oracle(IMAGES, joined=True)["projected"] - want).max() > 1


MOVES = {  # how far a mistake moves the golden rows, by the notes of the golden numbers
    "tower eps 2^-7": 0.03044306829238755,
    "tower eps 1e-5": 3.837284744578895e-05,
    "tower eps 1e-6": 3.4206292033045482e-06,
    "erf GELU in the tower": 0.001181391536952181,
    "tanh GELU in the projector": 0.0008439671914939328,
    "rotary: height first": 3.6317306766749757,
    "rotary: widths, then heights, not interleaved": 3.3249917598537095,
    "no rotary": 4.866944319555666,
    "rotary on halves instead of pairs": 4.800605410198207,
    "no time embedding (videos)": 5.054821548994562,
    "position table: corners aligned": 2.864275648969034,
    "position table: bicubic": 1.292917523016274,
    "merge: column by column": 4.707773977336468,
    # Not in the notes, measured:
    "time embedding of images": 4.333724051053061,
    "a norm before the projector": 0.11740660002486392,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_known_mistake_moves_the_golden_rows(vision, oracle, mistake):
    """By more than `VISION` allows, and as far as another implementation says: the comparison with
    golden rows would show it.
    """
    moved = 0.0
    for name in IMAGES + VIDEOS:
        wrong = oracle([name], MISTAKES[mistake])["projected"]
        moved = max(moved, np.abs(wrong - vision[3][f"{name}.projected_f64"]).max())
    assert moved == pytest.approx(MOVES[mistake], rel=1e-6) and moved > 1e5 * VISION["float64"]


# The encoder.


@pytest.mark.parametrize("name", IMAGES + VIDEOS)
def test_every_step_equals_the_golden_and_the_oracles_one(vision, oracle, run, name):
    (dtype, of), want = run, oracle([name])
    if dtype == "float32" and name in VIDEOS[1:]:
        return  # a program for each number of frames: one of several is enough
    got = of(name)
    for key, array in got.items():
        expected = want[key].reshape(array.shape)
        np.testing.assert_allclose(array, expected, atol=VISION[dtype], rtol=0, err_msg=key)
    golden = vision[3][f"{name}.projected_f64"]
    np.testing.assert_allclose(got["projected"], golden, atol=VISION[dtype], rtol=0)


def test_blocks_of_queries_equal_the_definition():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((24, 3, 8))) for _ in range(3))
    valid = jnp.asarray(rng.random(24) < 0.7)
    want = attend(q, k, v, valid)
    for size in (1, 6, 24):
        got = attend_in_blocks(q, k, v, valid, size)
        np.testing.assert_allclose(got, want, atol=VISION["float64"], rtol=0)


def test_blocks_of_queries_bound_the_scores():
    assert query_block(96, 3, np.float32, 96 * 3 * 4 * 10) == 8
    assert query_block(96, 3, np.float32, 2**40) == 96
    assert query_block(96, 3, np.float32, 1) == 1
    # The largest released image: scores of a block stay within the bytes, never 65,536 squared.
    assert query_block(65536, 12, jnp.bfloat16, 2**29) * 65536 * 12 * 4 <= 2**29


def test_on_a_grid_of_its_size_the_table_is_taken_bit_for_bit():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 4)), jnp.bfloat16)
    row, column = positions.places(48, jnp.int32(6))
    got = positions.positions(table, row, column, jnp.array([8, 6], jnp.int32))
    np.testing.assert_array_equal(got.astype(jnp.bfloat16), table[row, column])


@pytest.mark.parametrize("rows, columns", [(2, 2), (2, 8), (8, 2), (6, 10)])
def test_places_are_the_inverse_of_merge_order(rows, columns):
    row, column = positions.places(rows * columns, jnp.int32(columns))
    np.testing.assert_array_equal(row * columns + column, positions.merge_order(rows, columns))


def test_weights_are_the_released_count():
    """The tower 401,214,464 numbers, the projector 46,144,512, as a released index counts them."""
    config = VisionConfig.k3()
    assert config.head_dim == 128
    counts = {"tower": 0, "projector": 0}
    for w in declare(Encoder(config, "bfloat16")):
        counts[w.path[0]] += int(np.prod(w.shape))
        assert set(w.roles) == {None}  # replicated
    assert counts == {"tower": 401_214_464, "projector": 46_144_512}
    assert weight_bytes(config, "bfloat16") == 2 * (401_214_464 + 46_144_512)


def test_activations_of_an_image_are_what_the_compiler_reserves():
    """821 MB for 1920 x 1080 at the released size, by `memory_analysis` of XLA for an H200."""
    estimate = activation_bytes(VisionConfig.k3(), 12_288, "bfloat16", 2**29)
    assert estimate == pytest.approx(821_049_200, rel=0.01)
