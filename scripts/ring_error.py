"""How far sums over ranks are from exact: relative RMS error against float64.

    python scripts/ring_error.py                        # the table, beside published figures
    python scripts/ring_error.py --plot ring_error.png  # and a picture of it
    python scripts/ring_error.py --bits                 # JAX against the definitions, full shapes
    python scripts/ring_error.py --model                # what they do to the shipped model

The table needs no devices: it comes from the definitions in numpy, in bfloat16. --bits runs the
algorithms on 8 virtual CPU devices at 2048 and 3072 rows of 3584 and 7168 columns, and reports the
elements that differ from the definitions. It takes some minutes and 4 GB.

--model runs the shipped model in bfloat16 over 2, 4 and 8 virtual CPU devices. Ten prompts taken
out of the book are prefilled with each reduction; their first tokens are compared with those of
two_shot, the exact path: whether the best token is the same, and the KL divergence in nats, both
distributions limited to the 20 best tokens of the exact path and renormalised. The noise of the
ring itself is its divergence from rings that pass the same ranks in another order. Bits per byte
are of held-out text. It compiles some 20 programs; this makes that several times faster:

    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from book import BOOK, SHIPPED, split
from eval_small import evaluate
from jax.sharding import PartitionSpec

import kimi_jax as kj
from kimi_jax import make_mesh
from kimi_jax.model.implementations import Implementations
from kimi_jax.parallel import collectives
from kimi_jax.parallel.collectives import all_reduce
from kimi_jax.parallel.reductions import Reduction, emulate
from kimi_jax.text.tokenizer import Tokenizer

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Independent normal partials."""
    return rng.standard_normal(shape, dtype=np.float32)


def student_t(freedom: float) -> Draw:
    """Heavy tails: the fewer degrees of freedom, the heavier."""
    return lambda rng, shape: rng.standard_t(freedom, shape)


def laplace(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Exponential tails on both sides."""
    return rng.laplace(size=shape)


def signed_lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The exponential of a normal number, with a random sign."""
    return rng.lognormal(size=shape) * rng.choice([-1.0, 1.0], shape)


def cancelling(noise: float, apart: int) -> Draw:
    """Pairs of ranks that hold b and -b + noise: what is left is small beside what is added."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        partials = gaussian(rng, shape)
        first = [i for i in range(shape[0]) if i % (2 * apart) < apart]
        for i in first:
            partials[i + apart] = noise * partials[i + apart] - partials[i]
        return partials

    return draw


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers up to 16: every sum of 8 is exact in bfloat16."""
    return rng.integers(-16, 17, shape).astype(np.float32)


class Case(NamedTuple):
    """Partials, and the published errors of the exact sum and of the ring over the exact one."""

    name: str
    n: int
    draw: Draw
    exact: str
    ring: str
    ratio: str


HEAVY = ("1.66e-3", "3.60..3.66e-3", "2.16..2.20")
CASES = (
    Case("Gaussian", 8, gaussian, "1.66e-3", "3.68e-3", "2.21"),
    Case("Student-t 2.5", 8, student_t(2.5), *HEAVY),
    Case("Student-t 3", 8, student_t(3), *HEAVY),
    Case("Student-t 5", 8, student_t(5), *HEAVY),
    Case("Laplace", 8, laplace, *HEAVY),
    Case("signed log-normal", 8, signed_lognormal, *HEAVY),
    Case("pairs i, i + 4, noise 0.2", 8, cancelling(0.2, 4), "1.63e-3", "1.73e-2", "10.7"),
    Case("pairs i, i + 4, noise 0.1", 8, cancelling(0.1, 4), "1.42e-3", "3.41e-2", "24"),
    Case("pairs i, i + 1, noise 0.2", 8, cancelling(0.2, 1), "1.63e-3", "1.10e-2", "6.8"),
    Case("Gaussian", 2, gaussian, "", "", "1.00"),
    Case("Gaussian", 3, gaussian, "", "", "1.36"),
    Case("Gaussian", 4, gaussian, "", "", "1.58"),
)


def draw_partials(case: Case, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """The case's partials [n, rows, width], rounded to bfloat16 as a rank would hold them."""
    rng = np.random.default_rng(seed)
    return case.draw(rng, (case.n, rows, width)).astype(ml_dtypes.bfloat16)


def relative_error(total: np.ndarray, partials: np.ndarray) -> float:
    """RMS of total - sum(partials) over RMS of sum(partials), in float64."""
    exact = partials.astype(np.float64).sum(0)
    return float(np.sqrt(np.mean((total - exact) ** 2) / np.mean(exact**2)))


def errors(case: Case, rows: int, width: int) -> dict[str, float]:
    """The relative error of each algorithm: exact, ring, and the ring with 1, 2, ... fp32 hops."""
    partials = draw_partials(case, rows, width)
    ways = {"exact": Reduction("two_shot"), "ring": Reduction("ring_bf16")}
    ways |= {f"ring, fp32 {h}": Reduction("ring_bf16", fp32_hops=h) for h in range(1, case.n - 1)}
    return {
        name: relative_error(emulate(partials, how).astype(np.float64), partials)
        for name, how in ways.items()
    }


def table(rows: int, width: int) -> Iterator[tuple[Case, dict[str, float]]]:
    """Every case with its errors."""
    return ((case, errors(case, rows, width)) for case in CASES)


def show(measured: list[tuple[Case, dict[str, float]]]) -> None:
    """The measured errors beside the published ones, then the fp32 hops."""
    heads = ("exact", "published", "ring", "published", "ratio", "published")
    print(f"{'partials':26} n {''.join(f'{head:>14}' for head in heads)}")
    for case, found in measured:
        exact, ring = found["exact"], found["ring"]
        cells = (f"{exact:.2e}", case.exact, f"{ring:.2e}", case.ring, f"{ring / exact:.2f}")
        print(f"{case.name:26} {case.n} {''.join(f'{c:>14}' for c in (*cells, case.ratio))}")
    print("\nring over exact by additions before the last that stay in float32 (fp32_hops)")
    print(f"{'partials':26} n {''.join(f'{hops:>8}' for hops in range(7))}")
    for case, found in measured:
        ratios = [error / found["exact"] for name, error in found.items() if name != "exact"]
        print(f"{case.name:26} {case.n} {''.join(f'{ratio:8.2f}' for ratio in ratios)}")


def plot(measured: list[tuple[Case, dict[str, float]]], file: Path) -> None:
    """Errors of each case as bars: exact, ring, and the ring with half and with all hops fp32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    eight = [(case, found) for case, found in measured if case.n == 8]
    names = ("exact", "ring", "ring, fp32 3", "ring, fp32 6")
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for place, name in enumerate(names):
        at = np.arange(len(eight)) + 0.2 * (place - 1.5)
        axes.bar(at, [found[name] for _, found in eight], 0.18, label=name)
    axes.set_xticks(
        np.arange(len(eight)), [case.name for case, _ in eight], rotation=25, ha="right"
    )
    axes.set(yscale="log", ylabel="relative RMS error", title="Sums of 8 bfloat16 partials")
    axes.legend(ncols=4, frameon=False)
    figure.savefig(file, dpi=150)


def check_bits() -> None:
    """JAX on 8 devices against the definitions: elements that differ, on any rank."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    ways = (
        Reduction("sum"), Reduction("two_shot"), Reduction("ring_fp32"), Reduction("ring_bf16"),
        Reduction("ring_bf16", pieces=2, fp32_hops=3, granule_rows=128),
    )  # fmt: skip
    draws = (("Gaussian", gaussian), ("cancelling", cancelling(0.2, 4)), ("integers", integers))
    for rows, width in ((2048, 3584), (2048, 7168), (3072, 3584), (3072, 7168)):
        for name, draw in draws:
            partials = draw_partials(Case(name, 8, draw, "", "", ""), rows, width)
            differing = [count_differing(partials, how) for how in ways]
            print(f"{rows} x {width} {name:10} differing elements: {differing}", flush=True)
    print("in the order of", *ways, sep="\n  ")


@functools.cache
def program(how: Reduction) -> Callable[[np.ndarray], jax.Array]:
    """`reduce` on 8 devices: partials stacked by rank -> the sums, stacked by rank."""
    spec = PartitionSpec("model")
    return jax.jit(
        jax.shard_map(
            lambda partial: all_reduce(partial, how),
            mesh=make_mesh(model=8),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def count_differing(partials: np.ndarray, how: Reduction) -> int:
    """Elements of any rank's sum whose bits are not those of the definition."""
    expected = emulate(partials, how).view(np.uint16)
    sums = np.asarray(program(how)(partials.reshape(-1, partials.shape[-1])))
    return int((sums.view(np.uint16).reshape(partials.shape) != expected).sum())


# The price in the shipped model.

CHUNK = 256  # tokens of a prefill step; the last is zero-padded, so that all share a program
LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
TOP = 20
RING = "ring_bf16"
COLUMNS = ("ranks", "compared", "with", "prompts", "top1", "kl_mean", "kl_worst", "same_bits")


def cut_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of each length, from places spread over the book."""
    text = BOOK.read_text(encoding="utf-8")
    ids = Tokenizer.from_folder(SHIPPED, kj.Config.from_hf(SHIPPED).vocab).encode(text)
    starts = np.linspace(0, len(ids) - max(lengths), len(lengths)).astype(int)
    return [ids[at : at + length] for at, length in zip(starts, lengths, strict=True)]


def orders(n: int) -> dict[str, list[int]]:
    """Rings over the same ranks that go round them in other orders."""
    other = np.random.default_rng(0).permutation(n).tolist()
    return {"backward": [*range(n)][::-1], "shuffled": other} if n > 2 else {"backward": [1, 0]}


@contextlib.contextmanager
def ring_in_order(order: Sequence[int]) -> Iterator[None]:
    """Within it, what is traced passes ring_bf16's chunks round the ranks in this order: position p
    of the ring is rank order[p].
    """
    n, position = len(order), np.argsort(order).astype(np.int32)
    true_rank, around = collectives.rank, collectives._ring_around
    pairs = [(order[i], order[(i + 1) % n]) for i in range(n)]

    def ring_around(*inputs):
        with (
            mock.patch.object(collectives, "rank", lambda a: jnp.asarray(position)[true_rank(a)]),
            mock.patch.object(collectives, "to_next", lambda x, a: jax.lax.ppermute(x, a, pairs)),
        ):
            return around(*inputs)

    with mock.patch.object(collectives, "_ring_around", ring_around):
        yield


def first_logits(n: int, reduce: str, prompts: list[list[int]], order: Sequence[int]) -> np.ndarray:
    """Logits [prompts, vocab] of the token after each prompt at n ranks."""
    place = kj.Placement(prefill_reduce=reduce, prefill_ring_rows=1)
    model = kj.load(SHIPPED, make_mesh(model=n), place, "bfloat16", chunk=CHUNK, progress=False)
    model = dataclasses.replace(model, program=dataclasses.replace(model.program))  # traced again
    room = -(-max(map(len, prompts)) // CHUNK) * CHUNK
    found = []
    with ring_in_order(order):
        for ids in prompts:
            padded = np.pad(ids, (0, -len(ids) % CHUNK))
            logits, _ = model.prefill(model.new_state(1, room), [padded], [len(ids)])
            found.append(np.asarray(logits[0], np.float64))
    return np.stack(found)


def divergence(exact: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(exact || other) in nats of each row of logits, both over exact's TOP best tokens alone."""
    best = np.argsort(-exact, axis=-1)[:, :TOP]
    tops = (np.take_along_axis(logits, best, -1) for logits in (exact, other))
    p, q = (top - np.logaddexp.reduce(top, -1, keepdims=True) for top in tops)
    return (np.exp(p) * (p - q)).sum(-1)


def compare(n: int, names: tuple[str, str], exact: np.ndarray, other: np.ndarray) -> dict:
    """A row of the table: what is compared, with what, and how far they are apart."""
    kl = divergence(exact, other)
    same = int((exact.argmax(-1) == other.argmax(-1)).sum())
    values = (n, *names, len(kl), same, float(kl.mean()), float(kl.max()))
    return dict(zip(COLUMNS, (*values, bool((exact == other).all())), strict=True))


def model_rows(ranks: Sequence[int], prompts: list[list[int]]) -> Iterator[dict]:
    """Each reduction beside the exact path, then rings of other orders beside the ring."""
    for n in ranks:
        exact = first_logits(n, "two_shot", prompts, range(n))
        for reduce in ("sum", "ring_fp32", RING):
            found = first_logits(n, reduce, prompts, range(n))
            yield compare(n, (reduce, "two_shot"), exact, found)
        for name, order in orders(n).items():  # found: of the ring
            other = first_logits(n, RING, prompts, order)
            yield compare(n, (f"ring, {name}", RING), found, other)
            yield compare(n, (f"ring, {name}", "two_shot"), exact, other)


def bits_rows(n: int, characters: int) -> Iterator[dict]:
    """Bits per byte of a part of the held-out text under each reduction."""
    text = split(BOOK.read_text(encoding="utf-8"))[1][:characters]
    for reduce in ("sum", "two_shot", "ring_fp32", RING):
        place = kj.Placement(prefill_reduce=reduce, prefill_ring_rows=1)
        found = evaluate(SHIPPED, "bfloat16", Implementations(), text, make_mesh(model=n), place)
        yield {"ranks": n, "reduce": reduce, **found}


def show_model(options: argparse.Namespace) -> None:
    """Every comparison as soon as it is done, then the bits per byte at the most ranks."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(options.ranks))
    if not options.json:
        print(f"{'ranks':5} {'reduction':15} {'beside':10} {'best token':>10}"
              f" {'mean KL':>9} {'worst KL':>9}  bits")  # fmt: skip
    for row in model_rows(options.ranks, cut_prompts(options.lengths)):
        n, compared, beside, count, top1, mean, worst, same = row.values()
        line = f"{n:5} {compared:15} {beside:10} {f'{top1}/{count}':>10} {mean:9.2e} {worst:9.2e}"
        line += f"  {'the same' if same else 'others'}"
        print(json.dumps(row) if options.json else line, flush=True)
    for row in bits_rows(max(options.ranks), options.characters):
        line = (
            f"{row['reduce']:10} {row['bits_per_byte']:.5f} bits per byte at {row['ranks']} ranks"
        )
        print(json.dumps(row) if options.json else line, flush=True)


def whole_numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    """The options of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, default=512, help="of each partial in the table (512)")
    p.add_argument("--width", type=int, default=2048, help="of each partial in the table (2048)")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the table, .png or .svg")
    p.add_argument("--bits", action="store_true", help="only compare JAX with the definitions")
    p.add_argument("--model", action="store_true", help="only compare them in the shipped model")
    p.add_argument("--ranks", type=whole_numbers, default=[2, 4, 8], help="with --model (2,4,8)")
    p.add_argument(
        "--lengths", type=whole_numbers, default=LENGTHS, help="of prompts, with --model (64..4096)"
    )
    p.add_argument(
        "--characters", type=int, default=8000, help="of text for bits per byte, with --model"
    )
    p.add_argument("--json", action="store_true", help="lines of JSON, with --model")
    return p.parse_args()


def main() -> None:
    """The table, or the comparison of bits, or of what the shipped model says."""
    options = parse()
    if options.model:
        show_model(options)
        return
    if options.bits:
        check_bits()
        return
    measured = list(table(options.rows, options.width))
    show(measured)
    if options.plot:
        plot(measured, options.plot)


if __name__ == "__main__":
    main()
