"""Small random models with awkward sizes, written as released folders and loaded through the front
door.
"""

import dataclasses
import shutil

import jax
import numpy as np

import kimi_jax as kj
from kimi_jax.checkpoint import random_tensors, save_hf
from kimi_jax.files import SHIPPED
from kimi_jax.model.mxfp4 import expert_quantization

# K3.1 with nothing round: 6 heads, K != V, 10 experts in 2 groups, two dense layers, a gate bound
# other than -5.
AWKWARD = kj.Config(
    hidden=72, layers=5, vocab=83, mla_layers=(2, 4), residual_block=3, norm_eps=1e-5,
    max_positions=4096, tie_embeddings=False, kda_heads=6, kda_key_dim=12, kda_value_dim=20,
    conv_width=4, decay_lower_bound=-3.5, full_rank_gate=True, heads=6, q_rank=40, kv_rank=28,
    nope_dim=12, rope_dim=6, value_dim=20, mla_output_gate=True, mla_norm_eps=1e-6, dense_ffn=104,
    dense_layers=2, moe_layer_freq=1, experts=10, active_experts=3, shared_experts=1, expert_ffn=32,
    latent=96, latent_norm=True, router="sigmoid", renormalize=True, routed_scale=2.446,
    expert_groups=2, groups_kept=1, situ_beta=3.0, situ_linear_beta=7.0, index_heads=2, index_dim=8,
    index_topk=9, quantized=True, bos=1, eos=(2,), pad=0,
)  # fmt: skip

# The same in two layers, which compile in half the time: KDA with a dense MLP, MLA with experts.
SHALLOW = dataclasses.replace(AWKWARD, layers=2, mla_layers=(1,), dense_layers=1)

# The other answers: softplus and low-rank gates, softmax router, no selection, tied head, no MLA
# gate, no latent norm.
FAMILY = dataclasses.replace(
    AWKWARD, layers=4, mla_layers=(2,), decay_lower_bound=None, full_rank_gate=False,
    router="softmax", renormalize=False, expert_groups=1, groups_kept=1, index_heads=0, index_dim=0,
    index_topk=0, tie_embeddings=True, mla_output_gate=False, latent_norm=False, mla_norm_eps=1e-5,
    dense_layers=1, shared_experts=2, quantized=False,
)  # fmt: skip

# Period 4 against a residual block of 3, a dense first layer and two full-attention layers at the
# end.
DEEP = dataclasses.replace(
    AWKWARD, layers=17, mla_layers=(3, 7, 11, 15, 16), dense_layers=1, hidden=48, vocab=61,
    kda_heads=2, heads=2, latent=32, dense_ffn=40, index_topk=5,
)  # fmt: skip

# Every cut size divides by 8: one layer of each kind, KDA dense, KDA with experts, MLA with
# experts.
MESHED = dataclasses.replace(
    AWKWARD, layers=3, mla_layers=(2,), residual_block=2, dense_layers=1, hidden=48, vocab=80,
    kda_heads=8, heads=8, dense_ffn=48, experts=16, active_experts=4, latent=64, index_topk=5,
    shared_experts=1, max_positions=512,
)  # fmt: skip

# The same in two layers, which compile faster: KDA with a dense MLP, MLA with experts.
SHALLOW_MESHED = dataclasses.replace(MESHED, layers=2, mla_layers=(1,))

# MESHED with sizes that divide by nothing.
ODD = dataclasses.replace(
    MESHED, vocab=83, kda_heads=6, heads=5, dense_ffn=41, experts=10, active_experts=3,
)  # fmt: skip


# The shallow model with the shipped tokenizer's vocabulary: it reads and writes text.
_SHIPPED = kj.Config.from_hf(SHIPPED)
TALKING = dataclasses.replace(
    SHALLOW, vocab=_SHIPPED.vocab, bos=_SHIPPED.bos, eos=_SHIPPED.eos, pad=_SHIPPED.pad
)


def write_talking(folder) -> str:
    """A checkpoint folder of TALKING with its tokenizer."""
    write(TALKING, folder)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    return str(folder)


def write(config: kj.Config, folder, seed: int = 0) -> str:
    """A checkpoint folder of random weights."""
    if not folder.exists():
        save_hf(
            folder,
            config.to_hf(),
            random_tensors(config, seed, expert_quantization(config.quantized)),
        )
    return str(folder)


def prompts(config: kj.Config, lengths, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random right-padded ids [B, T] and their lengths."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab, (len(lengths), max(lengths))).astype(np.int32), np.array(
        lengths, np.int32
    )


def compilations(action):
    """How many programs an action compiles, and what it returns."""
    names = []
    listen = lambda name, *_, **__: names.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        done = action()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return names.count("/jax/core/compile/backend_compile_duration"), done
