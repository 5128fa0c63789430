"""The vision tower and its projector in float64 numpy, patch by patch in the order of the grid; and
the mistakes that implementations of it have shipped, each as one changed step.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from oracles import rms_norm

THETA = 10_000.0


def erf_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# The position table, resized along its first dim.


def linear_taps(at, n_in):
    low = int(at)
    return {low: 1 - (at - low), min(low + 1, n_in - 1): at - low} if low + 1 < n_in else {low: 1.0}


def bilinear(table, n_out):
    n_in = len(table)
    rows = []
    for i in range(n_out):
        taps = linear_taps(max((i + 0.5) * n_in / n_out - 0.5, 0.0), n_in)
        rows.append(sum(weight * table[at] for at, weight in taps.items()))
    return np.stack(rows)


def corners_aligned(table, n_out):
    n_in = len(table)
    at = [i * (n_in - 1) / max(n_out - 1, 1) for i in range(n_out)]
    return np.stack([sum(w * table[j] for j, w in linear_taps(a, n_in).items()) for a in at])


def bicubic(table, n_out, a=-0.75):
    n_in = len(table)

    def weight(d):
        d = abs(d)
        if d <= 1:
            return (a + 2) * d**3 - (a + 3) * d**2 + 1
        return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0

    rows = []
    for i in range(n_out):
        source = (i + 0.5) * n_in / n_out - 0.5
        low = math.floor(source)
        taps = range(low - 1, low + 3)
        rows.append(sum(weight(source - j) * table[min(max(j, 0), n_in - 1)] for j in taps))
    return np.stack(rows) if n_in != n_out else table


# The rotation: the angle of every pair at a row and a column, and which channels are pairs.


def width_first(row, column, K):
    waves = [THETA ** (-4 * i / K) for i in range(K // 4)]
    return np.array([at * wave for wave in waves for at in (column, row)])


def height_first(row, column, K):
    return width_first(column, row, K)


def widths_then_heights(row, column, K):
    pairs = width_first(row, column, K)
    return np.concatenate([pairs[::2], pairs[1::2]])


def no_angle(row, column, K):
    return np.zeros(K // 2)


def neighbours(x, turn):
    a, b = x[..., ::2], x[..., 1::2]
    y = np.empty_like(x)
    y[..., ::2] = a * np.cos(turn) - b * np.sin(turn)
    y[..., 1::2] = a * np.sin(turn) + b * np.cos(turn)
    return y


def halves(x, turn):
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(turn), np.sin(turn)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# What is added for frames.


def times(frames, C):
    waves = THETA ** (-np.arange(C // 2) / (C // 2))
    angles = np.arange(frames)[:, None] * waves
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def no_time_of_images(frames, C):
    return times(frames, C) if frames > 1 else np.zeros((1, C))


def rows_of_pairs(groups):
    """[h/2, 2, w/2, 2, C] -> the four patches of a group side by side, row by row."""
    return groups.swapaxes(1, 2)


def columns_of_pairs(groups):
    return groups.transpose(0, 2, 3, 1, 4)


@dataclasses.dataclass(frozen=True)
class Steps:
    """One choice for each step that implementations have got wrong; the right ones by default."""

    resize: Callable = bilinear
    angles: Callable = width_first
    rotate: Callable = neighbours
    frames: Callable = no_time_of_images
    tower_gelu: Callable = tanh_gelu
    projector_gelu: Callable = erf_gelu
    pair: Callable = rows_of_pairs
    eps: float = 2.0**-23
    norm_before_projector: bool = False


RIGHT = Steps()
MISTAKES = {  # as the notes of the golden numbers call them
    "tower eps 2^-7": Steps(eps=2.0**-7),
    "tower eps 1e-5": Steps(eps=1e-5),
    "tower eps 1e-6": Steps(eps=1e-6),
    "erf GELU in the tower": Steps(tower_gelu=erf_gelu),
    "tanh GELU in the projector": Steps(projector_gelu=tanh_gelu),
    "rotary: height first": Steps(angles=height_first),
    "rotary: widths, then heights, not interleaved": Steps(angles=widths_then_heights),
    "no rotary": Steps(angles=no_angle),
    "rotary on halves instead of pairs": Steps(rotate=halves),
    "no time embedding (videos)": Steps(frames=lambda frames, C: np.zeros((frames, C))),
    "position table: corners aligned": Steps(resize=corners_aligned),
    "position table: bicubic": Steps(resize=bicubic),
    "merge: column by column": Steps(pair=columns_of_pairs),
    "time embedding of images": Steps(frames=times),
    "a norm before the projector": Steps(norm_before_projector=True),
}


def attend(q, k, v):
    """[S, H, K] each: every patch of an entry over all of them."""
    scores = np.einsum("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shk->thk", weights / weights.sum(-1, keepdims=True), v)


def encode(w, config, patches, grids, steps=RIGHT, joined=False):
    """Every array on the way from patches [L, 3, p, p] of some entries to their rows, by name.
    `joined`: the mistake of one attention over all entries.
    """
    bounds = np.cumsum([math.prod(grid) for grid in grids])[:-1]
    x = patches.reshape(len(patches), -1) @ w["tower.w_patch"].reshape(config.width, -1).T
    arrays = {"pos_emb": np.concatenate([position(w, config, grid, steps) for grid in grids])}
    x = arrays["embedded"] = x + arrays["pos_emb"]
    turn = np.concatenate([turns(config, grid, steps) for grid in grids])
    arrays["rope_cos"], arrays["rope_sin"] = np.cos(turn), np.sin(turn)
    for i in range(config.blocks):
        b = {name: w[f"tower.blocks.{i}.{name}"] for name in NAMES}
        heads = rms_norm(x, b["attention_norm"], steps.eps) @ b["w_qkv"].T
        q, k, v = heads.reshape(len(x), 3, config.heads, -1).swapaxes(0, 1)
        q, k = (steps.rotate(part, turn[:, None]) for part in (q, k))
        arrays[f"block{i}.q"], arrays[f"block{i}.k"] = q, k
        split = [[part] if joined else np.split(part, bounds) for part in (q, k, v)]
        parts = zip(*split, strict=True)
        out = np.concatenate([attend(*part) for part in parts])
        x = x + out.reshape(len(x), -1) @ b["w_o"].T
        hidden = steps.tower_gelu(rms_norm(x, b["mlp_norm"], steps.eps) @ b["w_in"].T)
        x = arrays[f"block{i}"] = x + hidden @ b["w_out"].T
    x = arrays["final"] = rms_norm(x, w["tower.norm"], steps.eps)
    parts = zip(np.split(x, bounds), grids, strict=True)
    merged = arrays["merged"] = np.concatenate([merge(*part, steps) for part in parts])
    return {**arrays, **project(w, config, merged.reshape(len(merged), -1), steps)}


NAMES = ("attention_norm", "w_qkv", "w_o", "mlp_norm", "w_in", "w_out")


def position(w, config, grid, steps):
    frames, rows, columns = grid
    tall = steps.resize(w["tower.table"], rows)
    table = steps.resize(tall.swapaxes(0, 1), columns).swapaxes(0, 1).reshape(-1, config.width)
    return np.concatenate([table + time for time in steps.frames(frames, config.width)])


def turns(config, grid, steps):
    frames, rows, columns = grid
    K = config.qkv_width // config.heads
    turn = [steps.angles(row, column, K) for row in range(rows) for column in range(columns)]
    return np.tile(np.stack(turn), (frames, 1))


def merge(x, grid, steps):
    frames, rows, columns = grid
    mean = x.reshape(frames, rows // 2, 2, columns // 2, 2, -1).mean(0)
    return steps.pair(mean).reshape(rows * columns // 4, 4, -1)


def project(w, config, merged, steps):
    if steps.norm_before_projector:
        merged = rms_norm(merged, 1.0, config.projector_eps)
    hidden = steps.projector_gelu(merged @ w["projector.w_in"].T)
    y = hidden @ w["projector.w_out"].T
    return {"proj2": y, "projected": rms_norm(y, w["projector.norm"], config.projector_eps)}
