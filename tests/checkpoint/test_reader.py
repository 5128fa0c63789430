"""Reading: any part of a weight, bit for bit and only its bytes; bad values are refused by name."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    BF16,
    EMBED,
    FIXTURES,
    HEAD,
    KDA,
    MLA,
    MOE,
    ROOT,
    assert_same,
    make_config,
    problems,
    read_all,
)
from safetensors.numpy import save_file

from kimi_jax.checkpoint import Checkpoint, hf_shapes, random_tensors, save_hf, shapes, to_hf
from kimi_jax.errors import CheckpointError
from kimi_jax.model import mxfp4
from kimi_jax.model.mxfp4 import MXFP4, PLAIN

config, tensors, saved, folder, write = FIXTURES


def test_what_is_written_is_read_back(saved, config, tensors):
    with Checkpoint(saved, config) as checkpoint:
        weights = read_all(checkpoint)
        assert checkpoint.quantization is MXFP4 and checkpoint.root == ROOT
        assert len(checkpoint.tensors) == len(tensors) + 2
        tensor = checkpoint.tensors[f"{KDA}q_proj.weight"]
        assert tensor[:3] == ((60, 36), "BF16", 60 * 36 * 2)
        assert tensor.shard in {path.name for path in saved.iterdir()}
    assert_same(to_hf(config, weights), tensors)
    declared = {name: (array.shape, array.dtype.name) for name, array in weights.items()}
    assert declared == shapes(config, quantization=MXFP4)
    stored = {name: (array.shape, array.dtype.name) for name, array in tensors.items()}
    assert stored == hf_shapes(config, quantization=MXFP4)


def test_a_part_equals_the_same_part_of_the_whole_and_costs_its_bytes(saved, config):
    rng = np.random.default_rng(0)
    with Checkpoint(saved, config) as checkpoint:
        for name in checkpoint.names:
            whole = checkpoint.read(name)
            ends = [sorted(rng.integers(0, n + 1, 2)) for n in whole.shape]
            part = tuple(slice(int(start), int(stop)) for start, stop in ends)
            before = checkpoint.bytes_read
            array = checkpoint.read(name, part)
            np.testing.assert_array_equal(array, whole[part], err_msg=name)
            last = name.endswith("a_log") and array.size > 0 and part[0].stop == 6
            padding = (128 - 6) * 4 if last else 0  # is looked at once, with the last head
            assert checkpoint.bytes_read - before == array.nbytes + padding, name


@pytest.mark.parametrize("form", [(128,), (1, 128), (1, 1, 128, 1)])
def test_the_padding_of_a_log_is_read_with_the_last_head_alone(form, write, config, tensors):
    values = tensors[f"{KDA}A_log"].copy()
    values[6] = 1  # the first after the heads
    name = "layers.0.attention.a_log"
    with Checkpoint(write({f"{KDA}A_log": values.reshape(form)}), config) as checkpoint:
        for start, stop in [(0, 5), (3, 4), (5, 5), (6, 6)]:
            before = checkpoint.bytes_read
            part = checkpoint.read(name, (slice(start, stop),))
            np.testing.assert_array_equal(part, values[start:stop])
            assert checkpoint.bytes_read - before == part.nbytes == (stop - start) * 4
        with pytest.raises(CheckpointError, match="after the 6 heads"):
            checkpoint.read(name, (slice(5, 6),))
        assert checkpoint.bytes_read - before == (128 - 5) * 4


def test_opening_copies_nothing_and_reading_all_copies_each_byte_once(saved, config, tensors):
    with Checkpoint(saved, config) as checkpoint:
        assert checkpoint.bytes_read == 0
        read_all(checkpoint)
        assert checkpoint.bytes_read == sum(array.nbytes for array in tensors.values())


def test_a_part_may_leave_out_dims_and_must_not_step(saved, config):
    with Checkpoint(saved, config) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.read("layers.2.attention.w_v_b", (slice(4, None),)),
            checkpoint.read("layers.2.attention.w_v_b")[4:],
        )
        with pytest.raises(ValueError, match="step 2"):
            checkpoint.read("embed", (slice(None, None, 2),))
        with pytest.raises(ValueError, match="3 slices"):
            checkpoint.read("embed", (slice(1),) * 3)
        with pytest.raises(KeyError):
            checkpoint.read("layers.9.embed")


def test_a_single_file_without_a_root(config, tensors, tmp_path):
    bare = {name.removeprefix(ROOT): array for name, array in tensors.items()}
    save_file({**bare, "vision_tower.x": np.ones(2, np.int64)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, config) as checkpoint:
        assert checkpoint.root == ""
        assert_same(to_hf(config, read_all(checkpoint), root=""), bare)


def test_plain_experts(config, tensors, tmp_path):
    plain = random_tensors(config, seed=3, quantization=PLAIN)
    save_hf(tmp_path / "plain", config.to_hf(), plain)
    with Checkpoint(tmp_path / "plain", config) as checkpoint:
        assert checkpoint.quantization is PLAIN
        weights = read_all(checkpoint)
        part = checkpoint.read("layers.1.mlp.experts.w_down", (slice(2, 5), slice(0, 7)))
    assert_same(to_hf(config, weights), plain)
    np.testing.assert_array_equal(part, weights["layers.1.mlp.experts.w_down"][2:5, :7])
    assert {name: a.shape for name, a in weights.items()} == {
        n: s for n, (s, _) in shapes(config, PLAIN).items()
    }
    expert = f"{MOE}experts.4.w2.weight"
    unpacked = mxfp4.unpack_numpy(tensors[f"{expert}_packed"], tensors[f"{expert}_scale"])
    np.testing.assert_allclose(unpacked, plain[expert].astype(np.float64), atol=0.2)


def test_an_indexer_in_fp8_and_without_bias(write, config, tensors):
    name = f"{MLA}indexer.wq_b.weight"
    small = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    with Checkpoint(write({name: small, f"{MLA}indexer.k_norm.bias": None}), config) as checkpoint:
        assert not checkpoint.read("layers.2.attention.indexer.k_bias").any()
        part = checkpoint.read("layers.2.attention.indexer.w_q", (slice(5, 9), slice(3, 20)))
        assert type(part) is np.ndarray and part.dtype == small.dtype
        assert part.tobytes() == small[5:9, 3:20].tobytes()
        assert checkpoint.bytes_read == 4 * 17


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A config that ties the head to the embedding, its tensors, and a writer of folders."""
    config = make_config(tie_word_embeddings=True)
    tensors = random_tensors(config, seed=0)
    folder = tmp_path_factory.mktemp("tied")

    def write(name, **extra):
        save_hf(folder / name, config.to_hf(), {**tensors, **extra.get("tensors", {})})
        return folder / name

    return config, tensors, write


@pytest.mark.parametrize("dtype", [None, BF16, np.float32])
def test_a_tied_head_is_the_embedding_and_an_equal_one_may_be_there(dtype, tied):
    config, tensors, write = tied
    assert HEAD not in tensors
    head = {} if dtype is None else {HEAD: tensors[EMBED].astype(dtype)}
    with Checkpoint(write(f"equal {dtype}", tensors=head), config) as checkpoint:
        assert checkpoint.bytes_read == 0
        weights = read_all(checkpoint)
    np.testing.assert_array_equal(weights["head"], tensors[EMBED])
    assert_same(to_hf(config, weights), tensors)
    weights["head"] = weights["head"] + BF16(1)
    with pytest.raises(ValueError, match="head differs"):
        to_hf(config, weights)


def changed_at(array, place, value):
    array = array.copy()
    array[place] = value
    return array


TIED_FAULTS = {
    "first value": (lambda e: changed_at(e, (0, 0), 9), f"differs from {EMBED}"),
    "last value": (lambda e: changed_at(e, (50, 35), 9), f"differs from {EMBED}"),
    "little": (
        lambda e: changed_at(e.astype(np.float32), (7, 7), np.nextafter(np.float32(e[7, 7]), 9)),
        f"differs from {EMBED}",
    ),
    "NaN": (lambda e: changed_at(e, (50, 35), np.nan), "holds NaN or Inf"),
    "Inf": (lambda e: changed_at(e, (0, 0), -np.inf), "holds NaN or Inf"),
    "all": (np.zeros_like, f"differs from {EMBED}"),
    "a row less": (lambda e: e[:-1], "shape [50, 36], expected [51, 36]"),
    "transposed": (lambda e: np.ascontiguousarray(e.T), "shape [36, 51], expected [51, 36]"),
    "flat": (lambda e: e.reshape(-1), "shape [1836], expected [51, 36]"),
    "empty": (lambda e: e[:0], "shape [0, 36], expected [51, 36]"),
    "dtype": (lambda e: e.astype(np.float64), "dtype F64, expected BF16 or F32 or F16"),
    "FP8": (lambda e: e.astype(ml_dtypes.float8_e4m3fn), "dtype F8_E4M3, expected BF16"),
}


@pytest.mark.parametrize("rows_at_once", [1 << 22, 7 * 36])
@pytest.mark.parametrize("fault", TIED_FAULTS)
def test_a_head_unlike_the_embedding_that_it_is_tied_to(fault, rows_at_once, tied, monkeypatch):
    monkeypatch.setattr("kimi_jax.checkpoint.reader._CHECKED_AT_ONCE", rows_at_once)
    config, tensors, write = tied
    change, expected = TIED_FAULTS[fault]
    folder = write(f"{fault} {rows_at_once}", tensors={HEAD: change(tensors[EMBED])})
    (problem,) = problems(folder, config)
    assert problem.startswith(f"{HEAD}: {expected}")


def test_a_tied_head_and_other_faults_stand_in_one_error(tied):
    config, tensors, write = tied
    changes = {HEAD: np.zeros((51, 36), BF16), "ghost": np.zeros(1, BF16)}
    assert len(problems(write("both", tensors=changes), config)) == 2
    under_another_root = {"lm_head.weight": tensors[EMBED]}
    (problem,) = problems(write("root", tensors=under_another_root), config)
    assert problem.startswith("lm_head.weight: unknown tensor")


# Values.

VALUE_FAULTS = {
    "a_log": (
        "layers.0.attention.a_log",
        f"{KDA}A_log",
        100,
        1e-9,
        "values other than zero after the 6 heads",
    ),
    "scale": (
        "layers.3.mlp.experts.s_up",
        f"{MOE}experts.9.w3.weight_scale",
        (31, 2),
        255,
        "scale byte 255",
    ),
    "bf16 NaN": (
        "embed",
        EMBED,
        (50, 35),
        np.nan,
        "NaN or Inf",
    ),
    "bf16 -Inf": (
        "layers.2.attention.w_v_b",
        f"{MLA}kv_b_proj.weight",
        (29, 27),
        -np.inf,
        "NaN or Inf",
    ),
    "f32 Inf": (
        "layers.0.attention.conv_q",
        f"{KDA}q_conv1d.weight",
        (3, 0, 2),
        np.inf,
        "NaN or Inf",
    ),
}


@pytest.mark.parametrize("fault", VALUE_FAULTS)
def test_a_bad_value_is_refused_where_it_is_read(fault, write, config, tensors):
    ours, name, at, value, expected = VALUE_FAULTS[fault]
    spoiled = tensors[name].copy()
    spoiled[at] = value
    with Checkpoint(write({name: spoiled}), config) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(ours)
        assert caught.value.problems[0].startswith(name) and expected in caught.value.problems[0]


@pytest.mark.parametrize("kind", [np.float16, np.float32, BF16, ml_dtypes.float8_e4m3fn])
def test_nan_is_found_in_each_float_format_and_the_largest_value_is_not_nan(kind, write, config):
    name, ours = f"{MLA}indexer.wk.weight", "layers.2.attention.indexer.w_k"
    array = np.full((16, 36), ml_dtypes.finfo(kind).max, kind)
    array[15, 35] = np.nan
    with Checkpoint(write({name: array}), config) as checkpoint:
        assert checkpoint.read(ours, (slice(0, 15),)).dtype == kind
        with pytest.raises(CheckpointError, match="NaN"):
            checkpoint.read(ours)


@pytest.mark.parametrize("at", [0, 6, 7, 13, 50 * 36 + 35])
def test_nan_is_found_in_each_piece_of_a_large_weight(at, write, config, tensors, monkeypatch):
    monkeypatch.setattr("kimi_jax.checkpoint.reader._CHECKED_AT_ONCE", 7)
    spoiled = tensors[EMBED].copy()
    spoiled.flat[at] = np.nan
    folder = write({EMBED: spoiled})
    with Checkpoint(folder, config) as checkpoint, pytest.raises(CheckpointError, match="NaN"):
        checkpoint.read("embed")
