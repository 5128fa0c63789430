"""The two released models in the released form, which `hf.read` reads."""

from .hf import quantization_table

_FULL_LAYERS = [*range(4, 93, 4), 93]

K3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "vocab_size": 163840,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "attn_res_block_size": 12,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [i for i in range(1, 94) if i not in _FULL_LAYERS],
        "full_attn_layers": _FULL_LAYERS,
    },
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "quantization_config": quantization_table(),
}
K3_1 = {
    **K3,
    "dsa_config": {
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "dsa_layers": _FULL_LAYERS,
    },
}

# preprocessor_config.json of K3.
K3_PREPROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 65536,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 16384,
        "in_patch_limit_video": 655360,
        "sample_fps": 8.0,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    }
}

RELEASED = {"k3": K3, "k3.1": K3_1}  # by the names that users give them
