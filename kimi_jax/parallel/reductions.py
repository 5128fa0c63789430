"""Sums over ranks that you can choose, exact to the bit.

    sum        the backend's own: no order and no rounding is promised
    two_shot   each rank sums its rows of all ranks in rank order 0..n-1, rounds once, then gathers
    ring_fp32  the bits of two_shot by copies between neighbours only, for more bytes (`traffic`)
    ring_bf16  the fewest bytes, 2 (n - 1) / n of the tensor, and one rounding after each addition

This module says which one a step takes, what it costs, and defines each in numpy; those that run
are `collectives.all_reduce` and `reduce_scatter`. Partials [P, X] may have any float dtype: they
are added in at least float32, and sums rounded to it. n ranks split the rows into n chunks of c =
ceil(P / n), zero-padded. Each has a scatter half, after which rank r holds rows r c to (r + 1) c.
XLA on CPU takes subnormal numbers for zero when it adds.
"""

import dataclasses
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from ..errors import shown
from ..numerics import at_least_float32, is_whole

ALGORITHMS = ("sum", "two_shot", "ring_fp32", "ring_bf16")
STEPS = ("prefill", "decode", "verify")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How partial sums are reduced. The options are for ring_bf16.

    `pieces` splits each chunk, so that the copy of one piece can overlap the addition of another,
    and never changes bits. `fp32_hops` additions before the last one are not rounded and travel in
    float32, which leaves n - 1 - fp32_hops roundings. `granule_rows` g deals granules of g rows to
    the chunks in turn (granule b to chunk b mod n): the order of additions then depends only on the
    row modulo n g, so that parts of a batch split there give the bits of the batch. 0: chunks are
    contiguous, and they do not.
    """

    algorithm: str = "sum"
    pieces: int = 1
    fp32_hops: int = 0
    granule_rows: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.algorithm not in ALGORITHMS:
            problems.append(
                f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}"
            )
        for name, low in {"pieces": 1, "fp32_hops": 0, "granule_rows": 0}.items():
            value = getattr(self, name)
            if not is_whole(value, low):
                problems.append(f"{name} must be a whole number >= {low}, got {shown(value)}")
            elif value != low and self.algorithm != "ring_bf16":
                problems.append(f"{name} is for ring_bf16, the algorithm is {self.algorithm!r}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def is_ring(self) -> bool:
        """Whether ranks send to their neighbours only."""
        return self.algorithm in ("ring_fp32", "ring_bf16")

    def check(self, n: int) -> None:
        """ValueError where n > 1 ranks have fewer additions before the last one than fp32_hops."""
        if n > 1 and self.fp32_hops > n - 2:
            raise ValueError(f"fp32_hops must lie in 0..{n - 2} at {n} ranks, got {self.fp32_hops}")


SUM = Reduction()

# What to use, and what it costs: pure functions of sizes.


def deals_of(rows: int, n: int, granule_rows: int) -> tuple[int, int]:
    """Rows that a chunk gets at a time, and how many times."""
    block = min(granule_rows, rows) or -(-rows // n)  # more than all rows are one granule
    return block, -(-rows // (n * block))


def choose(
    how: Reduction,
    step: str,
    *,
    capacity: int,
    chunk: int,
    threshold: int | float,
    n: int,
    demanded: bool = False,
) -> Reduction:
    """What a compiled step of `capacity` rows reduces with, at n >= 1 ranks.

    Prefill steps from `threshold` rows on use `how` and smaller ones two_shot; decode and verify
    steps use the plain sum, always. A threshold of 0 is off: the plain sum everywhere, and programs
    as if there were no choice. One above `chunk`, the most rows of a prefill step, is off as well,
    with a warning. `demanded` asks for `how` at any size. ValueError for a threshold that is not a
    whole number >= 0, fp32_hops that n ranks do not have, a ring demanded outside prefill.
    """
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    if not is_whole(threshold, 0):
        raise ValueError(f"threshold must be a whole number >= 0 (0: off), got {shown(threshold)}")
    how.check(n)
    if demanded and how.is_ring and step != "prefill":
        raise ValueError(f"{how.algorithm} is for prefill, not for a {step} step")
    if demanded:
        return how
    if n == 1 or step != "prefill" or not acting(threshold, chunk):
        return Reduction("sum")
    return how if capacity >= threshold else Reduction("two_shot")


def acting(threshold: int | float, chunk: int) -> int:
    """A threshold as it acts: 0, off, where it is above the chunk, which a warning says."""
    if threshold <= chunk:
        return int(threshold)
    warnings.warn(
        f"prefill_ring_rows={threshold} is above the chunk of {chunk}: the chosen reduction does "
        "nothing; load(chunk=...) raises the chunk",
        stacklevel=3,
    )
    return 0


def two_shot_rows(capacities: Iterable[int], threshold: int) -> int:
    """The rows that the scratch of two_shot is made for: the largest prefill capacity below the
    threshold, 0 where there is none.
    """
    return max((rows for rows in capacities if rows < threshold), default=0)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a reduction costs a rank. With pieces, a step is that many messages side by side."""

    sent: int = 0  # bytes
    steps: int = 0  # communication operations, one after the other
    scratch: int = 0  # bytes of the buffers that messages land in, the result not counted

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.sent + other.sent, self.steps + other.steps, self.scratch + other.scratch
        )


def traffic(
    how: Reduction, n: int, rows: int, width: int, dtype: DTypeLike, scatter: bool = False
) -> Traffic:
    """The cost of `reduce`, or of `reduce_scatter`, on a partial [rows, width] at n ranks.

    Of `sum`, the least bytes: what the backend sends is not known.
    """
    if n == 1:
        return Traffic()
    how.check(n)
    block, deals = deals_of(rows, n, how.granule_rows)
    size = jnp.dtype(dtype).itemsize
    part = block * deals * width * size  # bytes of a chunk
    if how.algorithm == "sum" and not scatter:
        return Traffic(2 * (n - 1) * -(-rows * width * size // n), 1)
    first = _scatter_traffic(how, n, part, jnp.dtype(dtype))
    if not scatter or how.granule_rows:
        return first + _gather_traffic(how, n, part)
    return first + Traffic(part, 1) if how.algorithm == "ring_bf16" else first


def _scatter_traffic(how: Reduction, n: int, part: int, dtype: np.dtype) -> Traffic:
    if how.algorithm == "sum":
        return Traffic((n - 1) * part, 1)
    if how.algorithm == "two_shot":
        return Traffic((n - 1) * part, 1, n * part)
    if how.algorithm == "ring_fp32":
        return Traffic(n * (n - 1) // 2 * part, n - 1, n * (n - 1) // 2 * part)
    wide = part * at_least_float32(dtype).itemsize // dtype.itemsize
    sent = (n - 1 - how.fp32_hops) * part + how.fp32_hops * wide
    return Traffic(sent, n - 1, sent)


def _gather_traffic(how: Reduction, n: int, part: int) -> Traffic:
    sent = (n - 1) * part
    return Traffic(sent, 1) if how.algorithm == "two_shot" else Traffic(sent, n - 1, sent)


_COPY_ENGINE = (
    "--xla_gpu_collective_permute_mode=peer --xla_gpu_collective_permute_combine_threshold_bytes=0"
)


_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+COLLECTIVES,+CONDITIONAL,+WHILE"


def copy_engine_flags() -> str:
    """What to put into XLA_FLAGS so that neighbour copies between GPUs of one machine are made from
    peer memory, by copy engines beside the kernels, and stay apart: XLA joins the copies of several
    pieces otherwise, and then no addition runs while one of them travels.

    NotImplementedError where this jaxlib does not know the flags.
    """
    return _known(_COPY_ENGINE)


def command_buffer_flags() -> str:
    """What to put into XLA_FLAGS so that collectives, branches and loops are launched inside
    command buffers (CUDA graphs) with the kernels around them. By default XLA puts kernels alone
    there, and each of the others ends a buffer.

    NotImplementedError where this jaxlib does not know the flag.
    """
    return _known(_COMMAND_BUFFERS)


@functools.cache
def _known(flags: str) -> str:
    """Flags that this jaxlib knows. An unknown one ends the process, which is why another process
    is asked.
    """
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    answer = subprocess.run(asked, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise NotImplementedError(f"this jaxlib does not know {flags}")
    return flags


# The definitions in numpy: all ranks at once, row by row, nothing split or padded.


def emulate(partials: Float[np.ndarray, "n P X"], how: Reduction) -> Float[np.ndarray, "P X"]:
    """The bits that `reduce` gives on every rank. For `sum`, those of XLA on CPU, which adds to
    zero: where all ranks hold -0 the others keep the sign.
    """
    if len(partials) == 1:
        return partials[0]
    how.check(len(partials))
    if how.algorithm == "ring_bf16":
        return emulate_ring(partials, how.fp32_hops, how.granule_rows)
    exact = emulate_exact(partials)
    return exact + exact.dtype.type(0) if how.algorithm == "sum" else exact


def emulate_exact(partials: Float[np.ndarray, "n P X"]) -> Float[np.ndarray, "P X"]:
    """The sum in rank order, rounded once: two_shot and ring_fp32."""
    wide = at_least_float32(partials.dtype)
    total = partials[0].astype(wide)
    for partial in partials[1:]:
        total = total + partial.astype(wide)
    return total.astype(partials.dtype)


def emulate_ring(
    partials: Float[np.ndarray, "n P X"], fp32_hops: int = 0, granule_rows: int = 0
) -> Float[np.ndarray, "P X"]:
    """Chunk i summed in the order i, i + 1, ..., i - 1. The last sum is rounded, and all others but
    the `fp32_hops` before it.
    """
    n, P, _ = partials.shape
    wide = at_least_float32(partials.dtype)
    # Deal: which chunk each row belongs to.
    chunk_of_row = np.arange(P) // (granule_rows or -(-P // n)) % n
    result = np.empty_like(partials[0])
    for i in range(n):
        rows = chunk_of_row == i
        # Start on rank i, then add the part of each next rank.
        total = partials[i, rows]
        for added in range(1, n):
            total = total.astype(wide) + partials[(i + added) % n, rows].astype(wide)
            if added == n - 1 or added < n - 1 - fp32_hops:
                total = total.astype(partials.dtype)
        result[rows] = total
    return result
