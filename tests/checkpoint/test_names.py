"""Released names: each weight comes from the right tensor, in every shape a release may have."""

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
    assert_same,
    make_config,
    read_all,
)

from kimi_jax.checkpoint import Checkpoint, hf_shapes, random_tensors, save_hf, to_hf
from kimi_jax.config.config import Config
from kimi_jax.model.mxfp4 import MXFP4

config, tensors, saved, folder, write = FIXTURES


def test_weights_come_from_the_right_tensors(saved, config, tensors):
    with Checkpoint(saved, config) as checkpoint:
        weights = read_all(checkpoint)
    attention, moe = "layers.2.attention.", "layers.3.mlp."
    heads = tensors[f"{MLA}kv_b_proj.weight"].reshape(6, 30, 28)
    expected = {
        "embed": tensors[EMBED],
        "head": tensors[HEAD],
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


def test_the_float32_set_is_widened(write, config, tensors):
    narrow = {name: tensors[name].astype(BF16) for name in (f"{KDA}dt_bias", f"{KDA}o_norm.weight")}
    with Checkpoint(write(narrow), config) as checkpoint:
        bias = checkpoint.read("layers.0.attention.dt_bias")
        assert bias.dtype == np.float32 and checkpoint.bytes_read == bias.size * 2
        np.testing.assert_array_equal(bias, narrow[f"{KDA}dt_bias"].astype(np.float32))


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


def test_the_released_model_has_497220_tensors():
    released = hf_shapes(Config.k3(), quantization=MXFP4)
    assert len(released) == 497_220 - 168
    assert released[
        "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"
    ] == ((3584, 96), "uint8")
    widths = {"bfloat16": 2, "float32": 4, "uint8": 1}
    total = sum(int(np.prod(shape)) * widths[dtype] for shape, dtype in released.values())
    assert 1.40e12 < total < 1.57e12
