"""Checkpoints: what is written is read back bit for bit, in parts; every fault is named at once."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kimi_jax.checkpoint import Checkpoint, hf_shapes, random_tensors, save_hf, shapes, to_hf
from kimi_jax.config.config import Config
from kimi_jax.errors import CheckpointError
from kimi_jax.model import mxfp4

ROOT = "language_model."
KDA = "language_model.model.layers.0.self_attn."
MLA = "language_model.model.layers.2.self_attn."
MOE = "language_model.model.layers.3.block_sparse_moe."
INDEX = "model.safetensors.index.json"
BF16 = ml_dtypes.bfloat16


def make_config(**changes):
    """Four layers of awkward sizes: 6 heads, 10 experts, K != V, one dense, sparse selection."""
    linear = {
        "num_heads": 6,
        "head_dim": 10,
        "head_v_dim": 14,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
    } | changes.pop("linear", {})
    return Config.from_hf(
        {
            **{
                "hidden_size": 36,
                "num_hidden_layers": 4,
                "vocab_size": 51,
                "max_position_embeddings": 512,
            },
            **{"rms_norm_eps": 1e-5, "attn_res_block_size": 2, "linear_attn_config": linear},
            **{
                "num_attention_heads": 6,
                "q_lora_rank": 20,
                "kv_lora_rank": 28,
                "qk_nope_head_dim": 12,
            },
            **{
                "qk_rope_head_dim": 6,
                "v_head_dim": 18,
                "mla_use_nope": True,
                "mla_use_output_gate": True,
            },
            **{
                "intermediate_size": 44,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "num_experts": 10,
            },
            **{"num_experts_per_token": 3, "num_shared_experts": 1, "moe_intermediate_size": 32},
            **{
                "routed_expert_hidden_size": 96,
                "latent_moe_use_norm": True,
                "moe_renormalize": True,
            },
            **{
                "routed_scaling_factor": 2.446,
                "moe_router_activation_func": "sigmoid",
                "use_grouped_topk": True,
            },
            **{
                "num_expert_group": 2,
                "topk_group": 1,
                "hidden_act": "situ",
                "tie_word_embeddings": False,
            },
            **{"activation_situ_beta": 3.0, "activation_situ_linear_beta": 7.0},
            "dsa_config": {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config, seed=3)


@pytest.fixture(scope="module")
def saved(config, tensors, tmp_path_factory):
    """A sharded checkpoint with vision tensors, not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    vision = {
        "vision_tower.blocks.0.weight": np.ones((3, 2), BF16),
        "mm_projector.bias": np.ones(2, BF16),
    }
    save_hf(folder, config.to_hf(), {**tensors, **vision}, shard_bytes=60_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 4
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to plant faults in."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.fixture
def write(config, tensors, tmp_path):
    """Writes the tensors with changes, None to leave one out, and returns the folder."""

    def written(changes, base=tensors):
        changed = {name: array for name, array in {**base, **changes}.items() if array is not None}
        save_hf(tmp_path / "changed", config.to_hf(), changed, shard_bytes=100_000)
        return tmp_path / "changed"

    return written


def problems(folder, config):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, config)
    return caught.value.problems


def read_all(checkpoint):
    return {name: checkpoint.read(name) for name in checkpoint.names}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


# What is read.


def test_what_is_written_is_read_back(saved, config, tensors):
    with Checkpoint(saved, config) as checkpoint:
        weights = read_all(checkpoint)
        assert checkpoint.packed and checkpoint.root == ROOT
        assert len(checkpoint.tensors) == len(tensors) + 2
        tensor = checkpoint.tensors[f"{KDA}q_proj.weight"]
        assert tensor[:3] == ((60, 36), "BF16", 60 * 36 * 2)
        assert tensor.shard in {path.name for path in saved.iterdir()}
    assert_same(to_hf(config, weights), tensors)
    declared = {name: (array.shape, array.dtype.name) for name, array in weights.items()}
    assert declared == shapes(config, packed=True)
    stored = {name: (array.shape, array.dtype.name) for name, array in tensors.items()}
    assert stored == hf_shapes(config, packed=True)


def test_weights_come_from_the_right_tensors(saved, config, tensors):
    with Checkpoint(saved, config) as checkpoint:
        weights = read_all(checkpoint)
    attention, moe = "layers.2.attention.", "layers.3.mlp."
    heads = tensors[f"{MLA}kv_b_proj.weight"].reshape(6, 30, 28)
    expected = {
        "embed": tensors["language_model.model.embed_tokens.weight"],
        "head": tensors["language_model.lm_head.weight"],
        "residual.proj": tensors["language_model.model.output_attn_res_proj.weight"][0],
        "layers.3.mlp_residual.norm": tensors["language_model.model.layers.3.mlp_res_norm.weight"],
        "layers.0.attention.a_log": tensors[f"{KDA}A_log"][:6],
        "layers.0.attention.conv_v": tensors[f"{KDA}v_conv1d.weight"][:, 0],
        "layers.0.attention.w_decay_b": tensors[f"{KDA}f_b_proj.weight"],
        "layers.0.mlp.w_up": tensors["language_model.model.layers.0.mlp.up_proj.weight"],
        f"{attention}w_k_b": heads[:, :12],
        f"{attention}w_v_b": heads[:, 12:],
        f"{attention}indexer.k_bias": tensors[f"{MLA}indexer.k_norm.bias"],
        f"{moe}w_router": tensors[f"{MOE}gate.weight"],
        f"{moe}shared.w_down": tensors[f"{MOE}shared_experts.down_proj.weight"],
        f"{moe}experts.w_gate": np.stack(
            [tensors[f"{MOE}experts.{e}.w1.weight_packed"] for e in range(10)]
        ),
        f"{moe}experts.s_up": np.stack(
            [tensors[f"{MOE}experts.{e}.w3.weight_scale"] for e in range(10)]
        ),
        f"{moe}experts.w_down": np.stack(
            [tensors[f"{MOE}experts.{e}.w2.weight_packed"] for e in range(10)]
        ),
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


def test_exactly_the_float32_set_is_float32(saved, config):
    endings = ("a_log", "dt_bias", "conv_q", "conv_k", "conv_v", "o_norm", "router_bias")
    with Checkpoint(saved, config) as checkpoint:
        wide = {name for name, array in read_all(checkpoint).items() if array.dtype == np.float32}
        assert wide == {name for name in checkpoint.names if name.endswith(endings)}


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


# Forms a checkpoint may have.


def test_a_single_file_without_a_root(config, tensors, tmp_path):
    bare = {name.removeprefix(ROOT): array for name, array in tensors.items()}
    save_file({**bare, "vision_tower.x": np.ones(2, np.int64)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, config) as checkpoint:
        assert checkpoint.root == ""
        assert_same(to_hf(config, read_all(checkpoint), root=""), bare)


def test_plain_experts(config, tensors, tmp_path):
    plain = random_tensors(config, seed=3, packed=False)
    save_hf(tmp_path / "plain", config.to_hf(), plain)
    with Checkpoint(tmp_path / "plain", config) as checkpoint:
        assert not checkpoint.packed
        weights = read_all(checkpoint)
        part = checkpoint.read("layers.1.mlp.experts.w_down", (slice(2, 5), slice(0, 7)))
    assert_same(to_hf(config, weights), plain)
    np.testing.assert_array_equal(part, weights["layers.1.mlp.experts.w_down"][2:5, :7])
    assert {name: a.shape for name, a in weights.items()} == {
        n: s for n, (s, _) in shapes(config, False).items()
    }
    expert = f"{MOE}experts.4.w2.weight"
    unpacked = mxfp4.unpack_numpy(tensors[f"{expert}_packed"], tensors[f"{expert}_scale"])
    np.testing.assert_allclose(unpacked, plain[expert].astype(np.float64), atol=0.2)


def test_tied_embeddings(tmp_path):
    config = make_config(tie_word_embeddings=True)
    tensors = random_tensors(config, seed=0)
    assert "language_model.lm_head.weight" not in tensors
    save_hf(tmp_path / "absent", config.to_hf(), tensors)
    spare = {"language_model.lm_head.weight": tensors["language_model.model.embed_tokens.weight"]}
    save_hf(tmp_path / "present", config.to_hf(), {**tensors, **spare})
    for form in ("absent", "present"):
        with Checkpoint(tmp_path / form, config) as checkpoint:
            weights = read_all(checkpoint)
        np.testing.assert_array_equal(
            weights["head"], tensors["language_model.model.embed_tokens.weight"]
        )
        assert_same(to_hf(config, weights), tensors)
    weights["head"] = weights["head"] + BF16(1)
    with pytest.raises(ValueError, match="head differs"):
        to_hf(config, weights)


@pytest.mark.parametrize("form", [(6,), (7,), (128,), (1, 1, 6, 1), (1, 128)])
def test_a_log_is_the_first_value_of_each_head_in_any_form(form, write, config, tensors):
    values = tensors[f"{KDA}A_log"][:6]
    padded = np.zeros(np.prod(form), np.float32)
    padded[:6] = values
    with Checkpoint(write({f"{KDA}A_log": padded.reshape(form)}), config) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("layers.0.attention.a_log"), values)
        np.testing.assert_array_equal(
            checkpoint.read("layers.0.attention.a_log", (slice(3, 6),)), values[3:]
        )


def test_convs_and_residual_rows_with_and_without_their_unit_axis(write, config, tensors):
    conv, proj = f"{KDA}k_conv1d.weight", "language_model.model.output_attn_res_proj.weight"
    with Checkpoint(
        write({conv: tensors[conv][:, 0], proj: tensors[proj][0]}), config
    ) as checkpoint:
        part = checkpoint.read("layers.0.attention.conv_k", (slice(10, 20), slice(1, 3)))
        np.testing.assert_array_equal(part, tensors[conv][10:20, 0, 1:3])
        np.testing.assert_array_equal(checkpoint.read("residual.proj"), tensors[proj][0])


def test_the_float32_set_is_widened(write, config, tensors):
    narrow = {name: tensors[name].astype(BF16) for name in (f"{KDA}dt_bias", f"{KDA}o_norm.weight")}
    with Checkpoint(write(narrow), config) as checkpoint:
        bias = checkpoint.read("layers.0.attention.dt_bias")
        assert bias.dtype == np.float32 and checkpoint.bytes_read == bias.size * 2
        np.testing.assert_array_equal(bias, narrow[f"{KDA}dt_bias"].astype(np.float32))


def test_an_indexer_in_fp8_and_without_bias(write, config, tensors):
    name = f"{MLA}indexer.wq_b.weight"
    small = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    with Checkpoint(write({name: small, f"{MLA}indexer.k_norm.bias": None}), config) as checkpoint:
        assert not checkpoint.read("layers.2.attention.indexer.k_bias").any()
        part = checkpoint.read("layers.2.attention.indexer.w_q", (slice(5, 9), slice(3, 20)))
        assert type(part) is np.ndarray and part.dtype == small.dtype
        assert part.tobytes() == small[5:9, 3:20].tobytes()
        assert checkpoint.bytes_read == 4 * 17


def test_low_rank_gates_no_mla_gate_no_latent_norm_and_no_indexer(tmp_path):
    config = make_config(
        linear={"use_full_rank_gate": False},
        mla_use_output_gate=False,
        latent_moe_use_norm=False,
        dsa_config=None,
    )
    tensors = random_tensors(config, seed=1)
    names = "\n".join(tensors)
    assert f"{KDA}g_a_proj.weight" in tensors and f"{KDA}g_b_proj.weight" in tensors
    assert "g_proj" not in names and "indexer" not in names and "routed_expert_norm" not in names
    save_hf(tmp_path / "other", config.to_hf(), tensors)
    with Checkpoint(tmp_path / "other", config) as checkpoint:
        assert_same(to_hf(config, read_all(checkpoint)), tensors)


# What is refused when a checkpoint is opened.


def spoil_json(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def spoil_header(path, change):
    """Rewrites a shard's header and leaves its data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def first(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


def shift(header):
    entry = first(header)
    entry["data_offsets"] = [at + 2 for at in entry["data_offsets"]]


SHARD_FAULTS = {
    "missing": (lambda path: path.unlink(), "cannot be read, No such file"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "cut in its header": (lambda path: path.write_bytes(path.read_bytes()[:50]), "truncated"),
    "cut in its data": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
    "too long": (
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "corrupt, its tensors end",
    ),
    "of a huge header": (
        lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
        "truncated or corrupt",
    ),
    "not JSON": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"{", b"[", 1)),
        "corrupt header",
    ),
    "not UTF-8": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"', b"\xff", 1)),
        "corrupt header",
    ),
    "a list": (lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]"), "not a table"),
    "nested without end": (
        lambda path: path.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
        "corrupt header",
    ),
    "of a shape unlike its bytes": (
        lambda path: spoil_header(path, lambda h: first(h).update(shape=[5])),
        "corrupt",
    ),
    "of an unknown dtype": (
        lambda path: spoil_header(path, lambda h: first(h).update(dtype="F3")),
        "corrupt header",
    ),
    "of a negative shape": (
        lambda path: spoil_header(path, lambda h: first(h).update(shape=[-1])),
        "corrupt header",
    ),
    "without offsets": (
        lambda path: spoil_header(path, lambda h: first(h).pop("data_offsets")),
        "corrupt header",
    ),
    "with a gap": (lambda path: spoil_header(path, shift), "corrupt header"),
}


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_a_bad_shard_is_named_and_its_tensors_are_not(fault, folder, config):
    plant, expected = SHARD_FAULTS[fault]
    path = sorted(folder.glob("model-00002-*"))[0]
    plant(path)
    (problem,) = problems(folder, config)
    assert problem.startswith(path.name) and expected in problem


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_a_bad_single_file_is_named(fault, config, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    plant, expected = SHARD_FAULTS[fault]
    plant(path)
    (problem,) = problems(tmp_path, config)
    assert expected in problem or "neither" in problem


def test_no_folder_and_no_index(config, tmp_path):
    assert "no such folder" in problems(tmp_path / "nowhere", config)[0]
    assert f"neither {INDEX} nor" in problems(tmp_path, config)[0]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "{}",
            '{"weight_map": 3}',
            '{"weight_map": {}}',
            '{"weight_map": {"a": "../b"}}',
        ),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_bad_index(text, folder, config):
    (folder / INDEX).write_text(text)
    (problem,) = problems(folder, config)
    assert INDEX in problem


def test_index_and_shards_that_disagree(folder, config):
    name, other = "language_model.model.norm.weight", "language_model.model.embed_tokens.weight"
    shard = {}
    spoil_json(folder, lambda listed: shard.update({name: listed.pop(name), other: listed[other]}))
    spoil_json(
        folder,
        lambda listed: listed.update({"language_model.ghost": shard[name], other: shard[name]}),
    )
    found = problems(folder, config)
    assert f"language_model.ghost: not in {shard[name]}, where the index has it" in found
    assert f"{name}: in {shard[name]}, where the index does not have it" in found
    assert f"{other}: not in {shard[name]}, where the index has it" in found
    assert f"{other}: in {shard[other]}, where the index does not have it" in found
    assert len(found) == 4


def test_a_shard_that_the_index_points_to_is_missing(folder, config):
    spoil_json(
        folder,
        lambda listed: listed.update({"language_model.model.norm.weight": "model-9.safetensors"}),
    )
    found = problems(folder, config)
    assert found[0] == "model-9.safetensors: cannot be read, No such file or directory"
    assert len(found) == 2 and "norm.weight: in model-" in found[1]


INVENTORY_FAULTS = {  # a tensor that is put in, or None to leave it out, and what is said of it
    f"{KDA}o_proj.weight": (None, "missing, shape [36, 84] is expected"),
    f"{MLA}kv_b_proj.weight": (np.zeros((180, 29), BF16), "shape [180, 29], expected [180, 28]"),
    f"{KDA}q_conv1d.weight": (
        np.zeros((60, 4, 1), np.float32),
        "shape [60, 4, 1], expected [60, 1, 4]",
    ),
    f"{KDA}A_log": (np.zeros(5, np.float32), "shape [5], expected [128]"),
    f"{KDA}b_proj.weight": (
        np.zeros((6, 36), np.float64),
        "dtype F64, expected BF16 or F32 or F16",
    ),
    f"{KDA}f_a_proj.weight": (
        np.zeros((10, 36), ml_dtypes.float8_e4m3fn),
        "dtype F8_E4M3, expected BF16",
    ),
    f"{MOE}experts.7.w2.weight_packed": (None, "missing, shape [96, 16] is expected"),
    f"{MOE}experts.7.w3.weight_scale": (np.zeros((32, 3), np.int8), "dtype I8, expected U8"),
    f"{MOE}experts.2.w1.weight_scale": (
        np.zeros((32, 6), np.uint8),
        "shape [32, 6], expected [32, 3]",
    ),
    f"{MOE}experts.10.w1.weight_packed": (
        np.zeros((32, 48), np.uint8),
        "unknown tensor of shape [32, 48]",
    ),
    f"{MOE}experts.1.w1.weight_shape": (np.zeros(2, np.int64), "unknown tensor of shape [2]"),
    "language_model.model.layers.4.input_layernorm.weight": (np.zeros(36, BF16), "unknown tensor"),
    "vision_towers.weight": (np.zeros(36, BF16), "unknown tensor"),
}


@pytest.mark.parametrize("name", INVENTORY_FAULTS)
def test_a_tensor_that_does_not_belong_is_named(name, write, config):
    array, expected = INVENTORY_FAULTS[name]
    (problem,) = problems(write({name: array}), config)
    assert problem.startswith(f"{name}: {expected}")


def test_all_faults_stand_in_one_error(write, config):
    folder = write({name: array for name, (array, _) in INVENTORY_FAULTS.items()})
    shard = sorted(folder.glob("model-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    lost = {
        name
        for name, at in json.loads((folder / INDEX).read_text())["weight_map"].items()
        if at == shard.name
    }
    found = problems(folder, config)
    assert len(found) == 1 + len(INVENTORY_FAULTS.keys() - lost) > 5
    assert found[0].startswith(shard.name)
    for name, (_, expected) in INVENTORY_FAULTS.items():
        assert name in lost or any(problem.startswith(f"{name}: {expected}") for problem in found)


def test_experts_packed_and_plain_are_not_mixed(write, config, tensors):
    odd = f"{MOE}experts.5.w1"
    plain = {
        f"{odd}.weight_packed": None,
        f"{odd}.weight_scale": None,
        f"{odd}.weight": np.zeros((32, 96), BF16),
    }
    assert problems(write(plain), config) == (f"{odd}: plain, unlike most experts",)


def test_a_packed_expert_among_plain_ones_is_named(write, config, tensors):
    odd = f"{MOE}experts.5.w1"
    packed = {f"{odd}.weight": None} | {
        f"{odd}.{f}": tensors[f"{odd}.{f}"] for f in ("weight_packed", "weight_scale")
    }
    folder = write(packed, base=random_tensors(config, seed=3, packed=False))
    assert problems(folder, config) == (f"{odd}: packed, unlike most experts",)


def test_an_expert_with_both_forms_is_named(write, config):
    both = f"{MOE}experts.5.w1"
    found = problems(write({f"{both}.weight": np.zeros((32, 96), BF16)}), config)
    assert found == (f"{both}: plain, unlike most experts",)


def test_experts_of_one_weight_have_one_dtype(write, config):
    plain = random_tensors(config, seed=3, packed=False)
    name = f"{MOE}experts.5.w1.weight"
    found = problems(write({name: plain[name].astype(np.float32)}, base=plain), config)
    assert found == ("layers.3.mlp.experts.w_gate: experts differ in dtype, BF16 and F32",)


def test_long_lists_of_problems_are_cut_when_printed(tmp_path, config):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path, config)
    count = len(hf_shapes(config, packed=False))  # the bias may be absent, x may not be there
    assert len(caught.value.problems) == count
    text = str(caught.value).splitlines()
    assert (
        len(text) == 42
        and text[0].startswith(f"{count} problems")
        and text[-1].endswith(f"and {count - 40} more")
    )


# What is refused when a weight is read.

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
        "language_model.model.embed_tokens.weight",
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
    spoiled = tensors["language_model.model.embed_tokens.weight"].copy()
    spoiled.flat[at] = np.nan
    folder = write({"language_model.model.embed_tokens.weight": spoiled})
    with Checkpoint(folder, config) as checkpoint, pytest.raises(CheckpointError, match="NaN"):
        checkpoint.read("embed")


# Writing.


def test_to_hf_refuses_what_it_cannot_place(config):
    with pytest.raises(ValueError) as caught:
        to_hf(
            config,
            {
                "layers.2.attention.w_k_b": np.zeros((6, 12, 28), BF16),
                "norm": np.zeros(35, BF16),
                "nothing": np.zeros(1),
            },
        )
    assert str(caught.value).splitlines() == [
        "nothing: no such weight",
        "norm: shape (35,), expected (36,)",
        "layers.2.attention.w_v_b: missing, it shares a tensor with a weight that is given",
    ]


def test_to_hf_takes_a_few_weights_and_keeps_their_dtype(config):
    bias = np.ones(10, BF16)
    tensors = to_hf(config, {"norm": np.ones(36, np.float32), "layers.3.mlp.router_bias": bias})
    assert tensors["language_model.model.norm.weight"].dtype == np.float32
    assert tensors[f"{MOE}gate.e_score_correction_bias"].dtype == np.float32
    assert len(tensors) == 2


def test_saving_is_all_or_nothing_and_overwrites_only_when_asked(config, tensors, tmp_path):
    target = tmp_path / "deep" / "checkpoint"
    save_hf(target, {"a": 1}, tensors)
    assert [path.name for path in target.glob("*.safetensors")] == [
        "model-00001-of-00001.safetensors"
    ]
    assert json.loads((target / INDEX).read_text())["metadata"]["total_size"] == sum(
        a.nbytes for a in tensors.values()
    )
    with pytest.raises(FileExistsError, match="exists"):
        save_hf(target, {"a": 2}, tensors)
    with pytest.raises(SafetensorError, match="object"):
        save_hf(target, {"a": 2}, {"x": np.zeros(3), "y": object()}, shard_bytes=1, overwrite=True)
    assert json.loads((target / "config.json").read_text()) == {"a": 1}
    save_hf(target, {"a": 3}, {"x": np.zeros(3)}, overwrite=True)
    assert json.loads((target / "config.json").read_text()) == {"a": 3}
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]
    assert load_file(target / "model-00001-of-00001.safetensors")["x"].shape == (3,)


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        save_hf(tmp_path / "mine", {}, {"x": np.zeros(3)}, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


# Random weights and the full size.


def test_random_weights_depend_on_the_seed_and_are_of_sane_sizes(config, tensors):
    assert_same(random_tensors(config, seed=3), tensors)
    other = random_tensors(config, seed=4)
    for name, array in tensors.items():
        assert np.isfinite(array.astype(np.float32)).all()
        assert name.endswith("_scale") or not np.array_equal(array, other[name]), name
    q = tensors[f"{KDA}q_proj.weight"].astype(np.float32)
    assert abs(q.std() * 6 - 1) < 0.1
    a_log = tensors[f"{KDA}A_log"]
    assert (
        a_log.shape == (128,)
        and (a_log[:6] > 0).all()
        and (a_log[:6] < np.log(16)).all()
        and not a_log[6:].any()
    )
    assert abs(tensors["language_model.model.norm.weight"].astype(np.float32).mean() - 1) < 0.1


def test_the_released_model_has_497220_tensors():
    released = hf_shapes(Config.k3(), packed=True)
    assert len(released) == 497_220 - 168
    assert released[
        "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"
    ] == ((3584, 96), "uint8")
    widths = {"bfloat16": 2, "float32": 4, "uint8": 1}
    total = sum(int(np.prod(shape)) * widths[dtype] for shape, dtype in released.values())
    assert 1.40e12 < total < 1.57e12
