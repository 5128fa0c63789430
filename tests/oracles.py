"""What every operation must compute, in float64 numpy with plain loops; small modules to compare.

The oracles know no JAX and share no code with the package: each is the equation, token by token and
head by head. `w` is a dict of a module's weights by name, as `weights_of` returns it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from kimi_jax.config.block_sizes import BLOCK_SIZES, BlockSizes
from kimi_jax.config.config import Config
from kimi_jax.model import mxfp4
from kimi_jax.model.experts.weights import Experts
from kimi_jax.model.implementations import Implementations
from kimi_jax.model.layers import Expert
from kimi_jax.model.mla import MLA
from kimi_jax.model.state import KDAState, MLAState, cache_dtype
from kimi_jax.model.step import Step
from kimi_jax.numerics import at_least_float32
from kimi_jax.parallel.mesh import make_mesh

# Norms, convolution, SiTU


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def layer_norm(x, w, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps) * w + bias


def l2_norm(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def situ(gate, up, b1, b2):
    return b1 * np.tanh(gate / b1) * sigmoid(gate) * b2 * np.tanh(up / b2)


def mlp(x, w_gate, w_up, w_down, b1, b2):
    return situ(x @ w_gate.T, x @ w_up.T, b1, b2) @ w_down.T


def convolve(x, window, taps):
    """One row: x [T, C], the W - 1 inputs before it, taps [C, W] -> y and the last W - 1 inputs."""
    joined = np.concatenate([window, x])
    W = taps.shape[1]
    y = np.zeros(x.shape)
    for t in range(len(x)):
        for i in range(W):
            y[t] += joined[t + i] * taps[:, i]
    return silu(y), joined[len(joined) - (W - 1) :]


# KDA


def log_decay(raw, a_log, dt_bias, lower_bound):
    """raw [..., H, K], a_log [H], dt_bias [H, K]."""
    out = np.zeros(raw.shape)
    for h in range(len(a_log)):
        rate, shifted = math.exp(a_log[h]), raw[..., h, :] + dt_bias[h]
        if lower_bound is None:
            out[..., h, :] = -rate * np.log1p(np.exp(shifted))
        else:
            out[..., h, :] = lower_bound * sigmoid(rate * shifted)
    return out


def delta_rule(state, q, k, v, decay, beta):
    """state [B, H, K, V]; q, k, decay [B, T, H, K]; v [B, T, H, V]; beta [B, T, H]."""
    state, o = np.array(state, np.float64), np.zeros(v.shape)
    B, T, H, _ = k.shape
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(T):
                S = np.diag(np.exp(decay[b, t, h])) @ S
                S = S + beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - S.T @ k[b, t, h])
                o[b, t, h] = S.T @ q[b, t, h]
            state[b, h] = S
    return state, o


def kda(w, x, config):
    """The KDA sublayer on one prompt x [T, D] -> y [T, D], memory [H, K, V]."""
    H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
    T, W1 = len(x), config.conv_width - 1

    def heads(name, size):
        y = convolve(x @ w["w_" + name].T, np.zeros((W1, H * size)), w["conv_" + name])[0]
        return y.reshape(T, H, size)

    q, k, v = l2_norm(heads("q", K)) * K**-0.5, l2_norm(heads("k", K)), heads("v", V)
    raw = (x @ w["w_decay_a"].T @ w["w_decay_b"].T).reshape(T, H, K)
    decay = log_decay(raw, w["a_log"], w["dt_bias"].reshape(H, K), config.decay_lower_bound)
    beta = sigmoid(x @ w["w_beta"].T)
    one = [a[None] for a in (q, k, v, decay, beta)]
    memory, o = delta_rule(np.zeros((1, H, K, V)), *one)
    narrow = x if config.full_rank_gate else x @ w["w_gate_a"].T
    gate = narrow @ w["w_gate" if config.full_rank_gate else "w_gate_b"].T
    y = rms_norm(o[0], w["o_norm"], config.norm_eps).reshape(T, H * V) * sigmoid(gate)
    return y @ w["w_o"].T, memory[0]


# Attention residuals


def mix(values, norm, proj, eps):
    """values [N + 1, P, D] -> the mixture [P, D] and its weights [N + 1, P]."""
    count, P, _ = values.shape
    weights, out = np.zeros((count, P)), np.zeros(values.shape[1:])
    for p in range(P):
        scores = np.zeros(count)
        for j in range(count):
            key = values[j, p] / np.sqrt(np.mean(values[j, p] ** 2) + eps)
            scores[j] = np.sum(key * (norm * proj))
        weights[:, p] = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        for j in range(count):
            out[p] += weights[j, p] * values[j, p]
    return out, weights


def decoder(x, mixers, sublayers, block, eps):
    """The decoder's skeleton: a pair of sublayers a layer, 2 layers + 1 mixers (norm, proj)."""
    bank, mixers = [], iter(mixers)
    for i, (attend, feed) in enumerate(sublayers):
        norm, proj = next(mixers)
        h = mix(np.stack([*bank, x]), norm, proj, eps)[0] if bank else x
        if i % block == 0:
            bank.append(x)
            x = None
        x = attend(h) if x is None else x + attend(h)
        norm, proj = next(mixers)
        x = x + feed(mix(np.stack([*bank, x]), norm, proj, eps)[0])
    norm, proj = next(mixers)
    return mix(np.stack([*bank, x]), norm, proj, eps)[0], len(bank)


# MLA and its indexer


def attention(q, latents, w_k_b, w_v_b, allowed, scale):
    """One row: q [T, H, N + rope], latents [S, C + rope], allowed [T, S] -> [T, H, V]."""
    T, H, _ = q.shape
    C = w_k_b.shape[-1]
    out = np.zeros((T, H, w_v_b.shape[1]))
    for t in range(T):
        keys = np.flatnonzero(allowed[t])
        for h in range(H):
            scores = []
            for s in keys:
                key = np.concatenate([w_k_b[h] @ latents[s, :C], latents[s, C:]])
                scores.append(q[t, h] @ key * scale)
            probs = np.exp(np.array(scores) - max(scores))
            probs /= probs.sum()
            for p, s in zip(probs, keys, strict=True):
                out[t, h] += p * (w_v_b[h] @ latents[s, :C])
    return out


def index_scores(q, w, keys):
    """One row: q [T, J, I], w [T, J] (already times J^-0.5), keys [S, I] -> [T, S]."""
    T, J, I = q.shape  # noqa: E741
    out = np.zeros((T, len(keys)))
    for t in range(T):
        for s in range(len(keys)):
            for j in range(J):
                out[t, s] += w[t, j] * max(q[t, j] @ keys[s] * I**-0.5, 0)
    return out


def select(scores, keep):
    """The `keep` best of each query as a mask [..., S]; ties: lowest position; -inf: not a key."""
    flat = np.asarray(scores, np.float64).reshape(-1, scores.shape[-1])
    mask = np.zeros(flat.shape, bool)
    for row, out in zip(flat, mask, strict=True):
        keys = [s for s in range(len(row)) if row[s] > -np.inf]
        out[sorted(keys, key=lambda s: (-row[s], s))[:keep]] = True
    return mask.reshape(scores.shape)


def mla(w, x, config):
    """The MLA sublayer on one prompt x [T, D] -> y [T, D] and each token's keys, a mask [T, T]."""
    T, H, C = len(x), config.heads, config.kv_rank
    latent = rms_norm(x @ w["w_q_a"].T, w["q_norm"], config.mla_norm_eps)
    q = (latent @ w["w_q_b"].T).reshape(T, H, config.nope_dim + config.rope_dim)
    row = x @ w["w_kv_a"].T
    c = rms_norm(row[:, :C], w["kv_norm"], config.mla_norm_eps)
    allowed = np.tril(np.ones((T, T), bool))
    if config.sparse:
        J, I = config.index_heads, config.index_dim  # noqa: E741
        keys = x @ w["indexer.w_k"].T
        keys = layer_norm(keys, w["indexer.k_norm"], w["indexer.k_bias"], config.norm_eps)
        q_index = (latent @ w["indexer.w_q"].T).reshape(T, J, I)
        scores = index_scores(q_index, x @ w["indexer.w_weights"].T * J**-0.5, keys)
        allowed = select(np.where(allowed, scores, -np.inf), config.index_topk)
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    latents = np.concatenate([c, row[:, C:]], -1)
    o = attention(q, latents, w["w_k_b"], w["w_v_b"], allowed, scale).reshape(T, -1)
    if config.mla_output_gate:
        o = o * sigmoid(x @ w["w_gate"].T)
    return o @ w["w_o"].T, allowed


# Mixture of experts


def route(logits, bias, config):
    """[P, E] -> ids [P, A], best first, and their weights."""
    E, A, groups = config.experts, config.active_experts, config.expert_groups
    ids, weights = np.zeros((len(logits), A), int), np.zeros((len(logits), A))
    for p, row in enumerate(np.asarray(logits, np.float64)):
        s = sigmoid(row) if config.router == "sigmoid" else np.exp(row) / np.exp(row).sum()
        choice = s + bias
        members = [list(range(g * E // groups, (g + 1) * E // groups)) for g in range(groups)]
        value = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in members]
        best = sorted(range(groups), key=lambda g: (-value[g], g))[: config.groups_kept]
        allowed = sorted(e for g in best for e in members[g])
        ids[p] = sorted(allowed, key=lambda e: (-choice[e], e))[:A]
        weights[p] = s[ids[p]]
        if config.renormalize and A > 1:
            weights[p] /= weights[p].sum() + 1e-20
    return ids, weights * config.routed_scale


def experts(z, ids, weights, w, config):
    """sum of weight * w_down situ(w_gate z, w_up z) over the ids that exist, row by row."""
    out = np.zeros(z.shape)
    for p in range(len(z)):
        for e, weight in zip(ids[p], weights[p], strict=True):
            if 0 <= e < config.experts:
                matrices = w["w_gate"][e], w["w_up"][e], w["w_down"][e]
                betas = config.situ_beta, config.situ_linear_beta
                out[p] += weight * mlp(z[p], *matrices, *betas)
    return out


def moe(w, x, config):
    """The MoE sublayer on x [P, D]."""
    ids, weights = route(x @ w["w_router"].T, w["router_bias"], config)
    held = {name: w["experts." + name] for name in ("w_gate", "w_up", "w_down")}
    routed = experts(x @ w["w_latent_down"].T, ids, weights, held, config)
    if config.latent_norm:
        routed = rms_norm(routed, w["latent_norm"], config.norm_eps)
    y = routed @ w["w_latent_up"].T
    if config.shared_experts:
        shared = [w["shared." + name] for name in ("w_gate", "w_up", "w_down")]
        y = y + mlp(x, *shared, config.situ_beta, config.situ_linear_beta)
    return y


# Small modules, and comparing


def quick_jit(f, **options):
    """`jax.jit`, its results in numpy: outside of it, every operation on a JAX array of a new shape
    is one more program to compile.
    """
    compiled = jax.jit(f, **options)
    return lambda *args, **kwargs: jax.device_get(compiled(*args, **kwargs))


def on_mesh(f, data=1, model=1):
    """f inside a shard_map over so many devices, all of its inputs and outputs whole."""
    mesh, whole = make_mesh(data, model), PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def small_config(**changes) -> Config:
    """Awkward on purpose: K != V, 3 heads, widths of 12 and 5, 10 experts. No sparse attention."""
    config = Config(
        hidden=24, layers=7, vocab=40, mla_layers=(3, 6), residual_block=3, norm_eps=1e-5,
        max_positions=4096, tie_embeddings=False, kda_heads=3, kda_key_dim=12, kda_value_dim=5,
        conv_width=4, decay_lower_bound=-5.0, full_rank_gate=True, heads=3, q_rank=10, kv_rank=8,
        nope_dim=6, rope_dim=4, value_dim=5, mla_output_gate=True, mla_norm_eps=1e-6, dense_ffn=20,
        dense_layers=1, moe_layer_freq=1, experts=10, active_experts=3, shared_experts=2,
        expert_ffn=32, latent=64, latent_norm=True, router="sigmoid", renormalize=True,
        routed_scale=1.0, expert_groups=1, groups_kept=1, situ_beta=4.0, situ_linear_beta=25.0,
        index_heads=0, index_dim=0, index_topk=0, quantized=False, bos=None, eos=(), pad=None,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


SPARSE = dict(index_heads=3, index_dim=4, index_topk=6)
NORMS = ("o_norm", "q_norm", "kv_norm", "k_norm", "latent_norm", "norm")


def filled(module, seed=0):
    """The declared module with random weights, experts with the group dim a stack gives them."""
    rng = np.random.default_rng(seed)
    for path, param in nnx.iter_graph(module):
        if not isinstance(param, nnx.Param):
            continue
        declared, name = param.get_value(), path[-1]
        shape = (*([1] if isinstance(param, Expert) else []), *declared.shape)
        if declared.dtype == jnp.uint8:
            low, high = (122, 126) if name.startswith("s_") else (0, 256)
            value = rng.integers(low, high, shape)
        elif name in NORMS:
            value = rng.uniform(0.5, 1.5, shape)
        elif len(declared.shape) == 1:
            value = rng.normal(0, 0.3, shape)
        else:
            value = rng.normal(0, 1.5 / math.sqrt(shape[-1]), shape)
        param.set_value(jnp.asarray(value.astype(declared.dtype)))
    return module


def weights_of(module) -> dict[str, np.ndarray]:
    """Every weight by its dotted name in float64, experts decoded and without their group dim."""
    weights = {}
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Param) and not isinstance(node, Expert):
            weights[name] = as_float64(node[...])
        if isinstance(node, Experts):
            for kind in ("gate", "up", "down"):
                w = np.asarray(getattr(node, "w_" + kind)[...])[0]
                if node.quantization is mxfp4.MXFP4:
                    w = mxfp4.unpack_numpy(w, np.asarray(getattr(node, "s_" + kind)[...])[0])
                weights[".".join(filter(None, [name, "w_" + kind]))] = w.astype(np.float64)
    return weights


_make_step = jax.jit(Step.of, static_argnums=(2, 3))


def blocks_of(platform="cpu", **changes) -> BlockSizes:
    """A platform's block sizes with some of them changed."""
    return dataclasses.replace(BLOCK_SIZES[platform], **changes)


def step_of(start, lengths, T, **forms) -> Step:
    return _make_step(
        np.asarray(start, np.int32), np.asarray(lengths, np.int32), T, Implementations(**forms)
    )


def step_with(active, step: Step) -> Step:
    """The step of one request, of whose tokens only some are there."""
    positions = jnp.arange(len(active), dtype=jnp.int32)[None]
    sliced = step.place.rows == "sliced"
    return dataclasses.replace(step, positions=positions, valid=active[None], is_sliced=sliced)


def of_type(x, dtype):
    """Random numbers as the numpy array of a model's type."""
    return np.asarray(x).astype(jnp.dtype(dtype))


def fresh_kda(config, B, dtype, fill=0.0) -> KDAState:
    H, K, V = config.kda_heads, config.kda_key_dim, config.kda_value_dim
    full = lambda *shape: np.full((1, B, *shape), fill, jnp.dtype(dtype))  # noqa: E731
    window = lambda size: full(config.conv_width - 1, H * size)  # noqa: E731
    memory = full(H, K, V).astype(at_least_float32(dtype))
    return KDAState(memory, window(K), window(K), window(V))


def fresh_mla(config, B, S, dtype, fill=0.0) -> MLAState:
    """A cache of S slots as `new_state` stores it, every slot holding `fill`."""
    stored = cache_dtype(jnp.dtype(dtype), True)

    def cache(width):
        return np.full((1, B, S, width), fill, jnp.dtype(dtype)).view(stored)

    return MLAState(cache(config.latent_row), cache(config.index_dim) if config.sparse else None)


def mla_pair(seed=0, dtype=jnp.float64, **changes):
    """A sparse MLA and the same weights without selection."""
    sparse = filled(MLA(small_config(**SPARSE, **changes), dtype), seed)
    plain = filled(MLA(small_config(**changes), dtype), seed)
    for name in (path[0] for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.Param))):
        setattr(plain, name, getattr(sparse, name))
    return sparse, plain


def as_float64(x):
    return np.asarray(x).astype(np.float64)


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def close(actual, expected, tolerances):
    """Equal within the absolute tolerance of `actual`'s type; no NaN anywhere."""
    actual = np.asarray(actual)
    expected = as_float64(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected,
        rtol=0,
        atol=tolerances[actual.dtype.name],
        equal_nan=False,
    )
