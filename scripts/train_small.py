"""Train the small K3.1-shaped model that the package ships, on the first nine tenths of a book, on
a CPU.

    python scripts/train_small.py    # writes kimi_jax/shipped (under an hour on two cores)
    python scripts/train_small.py --minutes 3 --out /tmp/quick

Every step runs through the decoder of this package (its implementations that have a gradient).
Experts are rounded to MXFP4 in the forward pass from the start, so that packing them at the end
costs nothing.
The result is a folder in the released layout: config.json, safetensors shards, tiktoken.model and
tokenizer_config.json, and training.json with the figures.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import regex
from book import BATCH, BOOK, SHIPPED, split, windows
from train_tokenizer import train_ranks

import kimi_jax as kj
from kimi_jax.checkpoint import save_hf, shapes, to_hf
from kimi_jax.model import mxfp4
from kimi_jax.model.declared import declare
from kimi_jax.model.implementations import TRAINING
from kimi_jax.model.mxfp4 import MXFP4, PLAIN
from kimi_jax.runtime.program import make_program
from kimi_jax.text import tokenizer

RANKS = 448
SPECIAL = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip
VOCAB = 512


def small_config() -> kj.Config:
    """Every part of K3.1 at a size that two cores train: 7 layers, 3 banked blocks, 16 experts, all
    dims divide by 8.
    """
    return kj.Config(
        hidden=128, layers=7, vocab=VOCAB, mla_layers=(3, 6), residual_block=3, norm_eps=1e-5,
        max_positions=65536, tie_embeddings=False, kda_heads=8, kda_key_dim=16, kda_value_dim=16,
        conv_width=4, decay_lower_bound=-5.0, full_rank_gate=True, heads=8, q_rank=64, kv_rank=32,
        nope_dim=16, rope_dim=8, value_dim=16, mla_output_gate=True, mla_norm_eps=1e-6,
        dense_ffn=512, dense_layers=1, moe_layer_freq=1, experts=16, active_experts=4,
        shared_experts=2, expert_ffn=32, latent=64, latent_norm=True, router="sigmoid",
        renormalize=True, routed_scale=1.0, expert_groups=1, groups_kept=1, situ_beta=4.0,
        situ_linear_beta=25.0, index_heads=4, index_dim=16, index_topk=64, quantized=True,
        bos=RANKS, eos=(RANKS + 2,), pad=RANKS + len(SPECIAL) - 1,
    )  # fmt: skip


class Segmenter:
    """Byte-pair encoding in which each merge is skipped with some probability (BPE-dropout, arXiv
    1910.13267).

    A small book read in many segmentations is a larger book.
    """

    def __init__(self, text: str, ranks: dict[bytes, int], seed: int):
        self.words = [w.encode() for w in regex.findall(tokenizer.PATTERN, text, flags=regex.V1)]
        self.ranks, self.random = ranks, random.Random(seed)

    def encode(self, skip: float) -> np.ndarray:
        """The full text as ids."""
        return np.array([i for word in self.words for i in self._word(word, skip)], np.int32)

    def _word(self, word: bytes, skip: float) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            pairs = [
                (rank, i)
                for i in range(len(parts) - 1)
                if (rank := self.ranks.get(parts[i] + parts[i + 1])) is not None
                and self.random.random() >= skip
            ]
            if not pairs:
                return [self.ranks[part] for part in parts]
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


def initial(program, seed: int) -> dict[tuple, jax.Array]:
    """Random weights by name: unit norms, matrices scaled by their input width, outputs of
    sublayers smaller still.
    """
    rng = np.random.default_rng(seed)
    depth = 1 / math.sqrt(2 * program.config.layers)

    def initial_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        role = name.rsplit(".", 1)[-1]
        if role in (
            "norm",
            "attention_norm",
            "mlp_norm",
            "o_norm",
            "q_norm",
            "kv_norm",
            "k_norm",
            "latent_norm",
        ):
            return np.ones(shape)
        if role in ("proj", "k_bias", "a_log"):
            return np.zeros(shape)
        if role == "dt_bias":
            return rng.uniform(-7.0, -1.0, shape)
        if role == "router_bias":
            return rng.uniform(-0.05, 0.05, shape)
        scale = (
            depth if role in ("w_o", "w_down", "w_latent_up") else 0.3 if role == "embed" else 1.0
        )
        fan = 1 if role == "embed" else shape[-1]
        return rng.normal(0, scale / math.sqrt(fan), shape)

    return {
        w.path: jnp.asarray(initial_value(w.names[0], w.shape), jnp.float32)
        for w in declare(program.declared)
    }


def is_expert(path: tuple) -> bool:
    """Whether a weight belongs to the routed experts."""
    return "experts" in path


def fake_quantize(w: jax.Array) -> jax.Array:
    """w rounded as `mxfp4.pack` rounds it; its gradient passes straight through."""
    groups = w.reshape(*w.shape[:-1], -1, mxfp4.GROUP)
    low = jnp.floor(jnp.log2(jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-30))) - 2
    borders = jnp.asarray((mxfp4.MAGNITUDES[:-1] + mxfp4.MAGNITUDES[1:]) / 2)

    def rounded(exponent: jax.Array) -> jax.Array:
        scaled = jnp.abs(groups) * jnp.exp2(-exponent)
        codes = jnp.asarray(mxfp4.MAGNITUDES, w.dtype)[(scaled[..., None] > borders).sum(-1)]
        return jnp.sign(groups) * codes * jnp.exp2(exponent)

    near, far = rounded(low), rounded(low + 1)
    error = lambda r: jnp.square(r - groups).sum(-1, keepdims=True)  # noqa: E731
    best = jnp.where(error(far) < error(near), far, near).reshape(w.shape)
    return w + jax.lax.stop_gradient(best - w)


def quantized(weights: dict) -> dict:
    """The weights with every expert rounded to MXFP4."""
    return {path: fake_quantize(w) if is_expert(path) else w for path, w in weights.items()}


def dropped(weights: dict, key: jax.Array, rate: float) -> dict:
    """Matrices with a random part of their entries at zero (DropConnect), the rest grown to make up
    for it.
    """
    keys = jax.random.split(key, len(weights))
    keep = lambda w, k: w * jax.random.bernoulli(k, 1 - rate, w.shape) / (1 - rate)  # noqa: E731
    matrix = lambda path, w: w.ndim >= 3 and path[-1][:2] == "w_"  # noqa: E731
    return {
        p: keep(w, k) if matrix(p, w) else w
        for (p, w), k in zip(weights.items(), keys, strict=True)
    }


def cross_entropy(program, weights: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """-log P of each target, in nats, [B, T]."""
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    logits = program.logits(weights, tokens, lengths)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def make_update(program, optimizer, options):
    """An optimisation step and the running average of the weights, compiled."""

    @jax.jit
    def update(weights, average, moments, key, batch, decay):
        noise, drop = jax.random.split(key)
        which, what = jax.random.split(noise)
        swap = jax.random.bernoulli(which, options.corrupt, batch[:, :-1].shape)
        inputs = jnp.where(swap, jax.random.randint(what, swap.shape, 0, RANKS), batch[:, :-1])

        def loss(weights):
            return cross_entropy(
                program, dropped(quantized(weights), drop, options.drop), inputs, batch[:, 1:]
            ).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        step, moments = optimizer.update(gradient, moments, weights)
        weights = optax.apply_updates(weights, step)
        average = jax.tree.map(lambda a, w: a * decay + w * (1 - decay), average, weights)
        return weights, average, moments, value

    return update


def make_measure(program, held_out: list[int], byte_count: int):
    """Bits per byte of the held-out ids, in windows of which the first half is context."""
    rows, counted = windows(held_out, program.config.bos)

    @jax.jit
    def nats(weights, rows, counted):
        return jnp.sum(cross_entropy(program, weights, rows[:, :-1], rows[:, 1:]) * counted)

    def measure(weights: dict) -> float:
        pieces = [slice(at, at + BATCH) for at in range(0, len(rows), BATCH)]
        total = sum(float(nats(weights, rows[piece], counted[piece])) for piece in pieces)
        return total / math.log(2) / byte_count

    return measure


def export(program, weights: dict, out: Path, ranks: dict[bytes, int], figures: dict) -> None:
    """Write the released layout, experts packed; an existing folder is replaced once the new
    folder is complete.
    """
    ours = {}
    for w in declare(program.declared):
        value = np.asarray(weights[w.path])
        for g, name in enumerate(w.names):
            ours[name] = value[g] if w.dims[0] == "G" else value
    released = shapes(program.config, MXFP4)
    for name, value in list(ours.items()):
        if ".experts.w_" in name:
            ours[name], ours[name.replace(".w_", ".s_")] = mxfp4.pack(value)
        else:
            ours[name] = value.astype(released[name][1])
    save_hf(out, program.config.to_hf(), to_hf(program.config, ours), overwrite=True)
    tokenizer.write_tokenizer(out, ranks, {content: RANKS + i for i, content in enumerate(SPECIAL)})
    (out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--out",
        type=Path,
        default=SHIPPED,
        help="folder to write (default: the one the package ships)",
    )
    p.add_argument(
        "--minutes",
        type=float,
        default=45,
        help="training time; the learning rate falls to zero over it",
    )
    p.add_argument("--batch", type=int, default=8, help="windows a step")
    p.add_argument("--window", type=int, default=256, help="tokens a window")
    p.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    p.add_argument("--decay", type=float, default=0.1, help="weight decay")
    p.add_argument(
        "--skip", type=float, default=0.1, help="probability that a BPE merge is skipped"
    )
    p.add_argument(
        "--corrupt",
        type=float,
        default=0.05,
        help="part of the input tokens replaced by random ones",
    )
    p.add_argument(
        "--drop", type=float, default=0.1, help="part of the matrices' entries dropped each step"
    )
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def make_optimizer(weights: dict, options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW with clipped gradients; norms, biases and gates' constants do not decay."""
    decayed = {path: w.ndim >= 3 or path[0] in ("embed", "head") for path, w in weights.items()}
    adamw = optax.inject_hyperparams(optax.adamw, static_args="mask")(
        learning_rate=0.0, b1=0.9, b2=0.98, weight_decay=options.decay, mask=decayed
    )
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def rate_at(share: float, options: argparse.Namespace) -> jax.Array:
    """The learning rate after a share of the time: a short rise, then a half cosine to zero."""
    rise = min(share / 0.03, 1)
    return jnp.float32(options.rate * rise * (0.5 + 0.5 * math.cos(math.pi * share)) + 1e-6)


def batches(segmenter: Segmenter, options: argparse.Namespace) -> Iterator[np.ndarray]:
    """Random windows of ids [batch, window + 1], of a text that is tokenized again now and then."""
    rng = np.random.default_rng(options.seed)
    while True:
        ids = segmenter.encode(options.skip)
        for _ in range(40):
            starts = rng.integers(0, len(ids) - options.window - 1, options.batch)
            yield np.stack([ids[s : s + options.window + 1] for s in starts])


def figures(step: int, minutes: float, weights: dict, measure, options) -> dict:
    """What the shipped folder says of its training."""
    return {
        "steps": step,
        "minutes": round(minutes, 1),
        "seed": options.seed,
        "bits_per_byte": round(measure(quantized(weights)), 4),
        "bits_per_byte_experts_not_packed": round(measure(weights), 4),
        "measured": "last tenth of the book, windows of 256 tokens, the first half is context",
    }


def train(options: argparse.Namespace) -> None:
    """Train for the given minutes; measure and write the folder every minute and at the end."""
    training, held_out = split(BOOK.read_text(encoding="utf-8"))
    ranks = train_ranks(training, RANKS)
    special = {content: RANKS + i for i, content in enumerate(SPECIAL)}
    ids = tokenizer.Tokenizer(ranks, special).encode(held_out)
    program = make_program(
        small_config(), dtype="float32", quantization=PLAIN, implementations=TRAINING
    )
    weights = average = initial(program, options.seed)
    optimizer = make_optimizer(weights, options)
    moments = optimizer.init(weights)
    update = make_update(program, optimizer, options)
    measure = make_measure(program, ids, len(held_out.encode()))
    began = last = time.monotonic()
    for step, batch in enumerate(batches(Segmenter(training, ranks, options.seed), options)):
        minutes = (time.monotonic() - began) / 60
        moments[1].hyperparams["learning_rate"] = rate_at(minutes / options.minutes, options)
        decay = min(0.995, step / (step + 10))
        weights, average, moments, loss = update(
            weights, average, moments, jax.random.key(step), batch, decay
        )
        if time.monotonic() - last > 60 or minutes >= options.minutes:
            found = figures(step + 1, minutes, average, measure, options)
            print(f"loss {float(loss):.3f} nats a token", json.dumps(found), flush=True)
            export(program, average, options.out, ranks, found)
            last = time.monotonic()
        if minutes >= options.minutes:
            return


if __name__ == "__main__":
    train(parse())
