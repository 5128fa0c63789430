"""What to run first on a machine with a GPU: numbers that must be right, then times by part.

    JAX_PLATFORMS=cuda,cpu python scripts/gpu_check.py --json check.json
    JAX_PLATFORMS=cpu python scripts/gpu_check.py --tiny

Nothing is downloaded. Checked against CPUs and numpy: logits of the shipped model in bfloat16
against float64, every MXFP4 byte, ties of top-k, the ragged exchange of a rank with itself. Timed:
a decode step and a prefill of four layers with the shapes that one of 8 and of 16 ranks of K3.1
holds, by the profiler's events of each kernel, beside what the bill of the same program estimates.
Ends with 1 where a number is wrong. `--tiny` takes shapes that a CPU runs in seconds.
"""

import argparse
import dataclasses
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bill import floor, hlo, report, rules
from bill.walk import Walk
from jaxtyping import Array

import kimi_jax as kj
from kimi_jax.model import indexer
from kimi_jax.model.attention.selection import best_slots
from kimi_jax.model.implementations import fast_on
from kimi_jax.model.mxfp4 import expert_quantization, unpack, unpack_numpy
from kimi_jax.model.state import State
from kimi_jax.parallel import collectives
from kimi_jax.parallel.mesh import MODEL
from kimi_jax.parallel.on_mesh import on_model_ranks
from kimi_jax.runtime.probes import compile_step
from kimi_jax.runtime.program import Program, make_program

ROOT = Path(__file__).parents[1]
PROMPT = "Alice was beginning to get very tired of sitting by her sister on the bank"
FORWARD_ERROR = 0.05  # of the largest logit: what rounding to bfloat16 may cost
REPEATS = 5
_FLOAT64 = """\
import sys
import jax
import numpy as np
jax.config.update("jax_enable_x64", True)
import kimi_jax as kj
model = kj.load(sys.argv[1], dtype="float64")
np.save(sys.argv[2], np.asarray(model.logits([model.tokenizer.encode(sys.argv[3])])))
"""


# Numbers that must be right. Each check returns what it measured and whether that is right.


def check_forward() -> tuple[dict[str, float], bool]:
    """Logits of the shipped model in bfloat16 here against float64 on a CPU of another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logits.npy"
        command = [sys.executable, "-c", _FLOAT64, str(kj.SHIPPED), str(path), PROMPT]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=environment, cwd=ROOT)
        expected = np.load(path)
    model = kj.load(kj.SHIPPED, kj.make_mesh(1, 1), dtype="bfloat16")
    logits = np.asarray(model.logits([model.tokenizer.encode(PROMPT)]), np.float64)
    error = float(np.abs(logits - expected).max() / np.abs(expected).max())
    same = float((logits.argmax(-1) == expected.argmax(-1)).mean())
    return {"largest_error": error, "same_best_token": same}, error < FORWARD_ERROR


def check_mxfp4() -> tuple[dict[str, int], bool]:
    """Every packed byte under every scale that bfloat16 and float32 can hold, bit for bit."""
    scales = np.arange(127 - 100, 127 + 100, dtype=np.uint8)
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), (1, len(scales), 1))
    scale = np.tile(scales[None, :, None], (16, 1, 1))
    expected = unpack_numpy(packed, scale)
    wrong = 0
    for dtype in (jnp.bfloat16, jnp.float32):
        decoded = jax.jit(lambda p, s, dtype=dtype: unpack(p, s, dtype))(packed, scale)
        wrong += int((np.asarray(decoded).astype(np.float64) != expected).sum())
    return {"weights": expected.size, "wrong": wrong}, not wrong


def check_ties(slots: int, keep: int) -> tuple[dict[str, int], bool]:
    """The kept keys of scores with many equal ones, by top-k and by radix search: the lowest slots,
    as by a stable sort.
    """
    scores = np.random.default_rng(0).integers(0, 50, (2, 3, slots)).astype(np.float32)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :keep]
    _, sorted_slots = jax.jit(lambda x: indexer.candidates(x, keep))(scores)
    found = jax.jit(lambda x: best_slots(x, keep))(scores)  # in the order of slots
    wrong = int((np.asarray(sorted_slots) != order).sum())
    wrong_by_radix = int((np.asarray(found) != np.sort(order, axis=-1)).sum())
    measured = {"slots": slots, "kept": keep, "wrong": wrong, "wrong_by_radix": wrong_by_radix}
    return measured, not wrong + wrong_by_radix


def check_exchange() -> tuple[dict[str, Any], bool]:
    """A rank's rows sent to itself: those that count arrive, and zeros fill the block."""
    if jax.default_backend() == "cpu":
        return {"not_run": "CPUs have no ragged_all_to_all"}, True
    blocks = np.random.default_rng(0).integers(1, 1000, (1, 1024, 3584)).astype(np.uint16)
    counts = np.array([[700]], np.int32)
    run = on_model_ranks(
        kj.make_mesh(1, 1), lambda rows: collectives.all_to_all_blocks(rows, counts, MODEL)
    )
    arrived = np.asarray(run(blocks))
    expected = np.where(np.arange(1024)[None, :, None] < 700, blocks, np.uint16(0))
    wrong = int((arrived != expected).sum())
    return {"rows": 700, "wrong": wrong}, not wrong


# Times by part.


def rank_config(ranks: int, layers: int = 4) -> kj.Config:
    """Four layers of K3.1 as one of `ranks` model ranks holds them: a share of heads, experts,
    vocabulary and dense width, and as many experts a token as fall to one rank on average.
    """
    full = kj.Config.k3_1()
    shared = {
        name: getattr(full, name) // ranks
        for name in ("heads", "kda_heads", "vocab", "dense_ffn", "experts", "active_experts")
    }
    return dataclasses.replace(
        full, layers=layers, mla_layers=(layers - 1,), bos=None, eos=(), pad=None, **shared
    )


def tiny_config(ranks: int) -> kj.Config:
    """`rank_config` in sizes that a CPU compiles and runs in seconds."""
    return dataclasses.replace(
        rank_config(ranks, layers=2),
        **{"hidden": 64, "vocab": 128, "heads": 2, "kda_heads": 2, "dense_ffn": 64},
        **{"kda_key_dim": 16, "kda_value_dim": 16, "q_rank": 32, "kv_rank": 32, "nope_dim": 16},
        **{"rope_dim": 8, "value_dim": 16, "experts": 8, "active_experts": 2, "latent": 32},
        **{"expert_ffn": 32, "index_heads": 2, "index_dim": 16, "index_topk": 16},
    )


def random_arrays(shapes: Any) -> Any:
    """Random arrays of these shapes, made on the device: small numbers; of bytes, those whose
    scales are near one.
    """

    def make(key: Array, shape: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 118, 123, jnp.int32).astype(shape.dtype)
        return jax.random.normal(key, shape.shape, shape.dtype) * jnp.asarray(0.02, shape.dtype)

    leaves, tree = jax.tree.flatten(shapes)
    jitted = jax.jit(make, static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([jitted(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])


def time_step(config: kj.Config, B: int, T: int, slots: int) -> dict[str, Any]:
    """Milliseconds of a step of B rows of T tokens behind `slots` - T cached ones: measured for the
    whole step and by named scope, and as the bill of the same program estimates them.
    """
    transport = "padded" if jax.default_backend() == "cpu" else "ragged"
    program = make_program(
        config,
        kj.make_mesh(1, 1),
        dtype="bfloat16",
        quantization=expert_quantization(config.quantized),
        walk="unrolled",
        implementations=dataclasses.replace(fast_on("gpu"), transport=transport),
    )
    compiled, seconds = compile_step(program, B, T, slots)
    walk = bill_walk(program, compiled.as_text(), B, T, slots)
    bill = walk.bill()
    estimated = {scope: 1e3 * report.seconds(part) for scope, part in bill.parts.items()}
    call = step_caller(program, compiled, B, T, slots)
    call(1)  # warm
    begin = time.perf_counter()
    call(REPEATS)
    whole = 1e3 * (time.perf_counter() - begin) / REPEATS
    measured = events_by_scope(lambda: call(REPEATS), walk.scope_of_instruction())
    return {
        "rows": [B, T],
        "slots": slots,
        "compile_seconds": seconds["compile"],
        "measured_ms": whole,
        "estimated_ms": sum(estimated.values()),
        "kernels_ms": sum(measured.values()) / REPEATS,
        "parts": {
            scope: {"measured_ms": measured.get(scope, 0) / REPEATS, "estimated_ms": estimate}
            for scope, estimate in estimated.items()
        },
    }


def bill_walk(program: Program, text: str, B: int, T: int, slots: int) -> Walk:
    """The walk over a compiled step."""
    load = floor.Load(B, T, slots - T)
    loops, branches = rules.loop_rule(program, load), rules.branch_rule(program, load, slots)
    return Walk(hlo.parse(text), loops, branches)


def step_caller(
    program: Program, compiled: Any, B: int, T: int, slots: int
) -> Callable[[int], None]:
    """A function that runs the step n times, each from the same length, and waits for the last."""
    weights = random_arrays(program.weight_shapes)
    state = random_arrays(program.state_shapes(B, slots))
    ids = np.random.default_rng(0).integers(0, program.config.vocab, (B, T)).astype(np.int32)
    lengths = np.full(B, T, np.int32)
    held: list[State] = [state]

    def call(times: int) -> None:
        logits = None
        for _ in range(times):
            start = jnp.full(B, slots - T, jnp.int32)
            from_start = dataclasses.replace(held.pop(), length=start)
            logits, following = compiled(weights, from_start, ids, lengths)
            held.append(following)
        jax.block_until_ready((logits, held))

    return call


def events_by_scope(run: Callable[[], None], scopes: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds of the profiler's events of instructions, by scope, while `run` runs. Of events
    inside each other only the innermost instruction counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (trace,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    total: dict[str, float] = defaultdict(float)
    for event in events:
        name = event.get("args", {}).get("hlo_op") or event.get("name", "")
        if event.get("ph") == "X" and name in scopes:
            total[scopes[name]] += event["dur"] / 1e3
    return dict(total)


# The command.


def times(is_tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every timed step by its name."""
    make = tiny_config if is_tiny else rank_config
    steps = [(2, 1, 64), (1, 32, 64)] if is_tiny else [(12, 1, 131072), (1, 4096, 32768)]
    for ranks in (8,) if is_tiny else (8, 16):
        for B, T, slots in steps:
            kind = "decode" if T == 1 else "prefill"
            yield f"{kind}, 1 of {ranks} ranks", time_step(make(ranks), B, T, slots)


def run(is_tiny: bool) -> dict[str, Any]:
    """All checks and times."""
    slots, keep = (300, 40) if is_tiny else (131072, 2048)
    checks = {
        "bfloat16 forward": check_forward,
        "MXFP4 bits": check_mxfp4,
        "ties of top-k": lambda: check_ties(slots, keep),
        "ragged exchange": check_exchange,
    }
    begin = time.perf_counter()
    found: dict[str, Any] = {"device": str(jax.devices()[0]), "checks": {}, "times": {}}
    for name, check in checks.items():
        measured, is_right = check()
        found["checks"][name] = {**measured, "right": is_right}
        print(f"{'right' if is_right else 'WRONG'}  {name}: {measured}", flush=True)
    for name, step in times(is_tiny):
        found["times"][name] = step
        print_times(name, step)
    found["right"] = all(check["right"] for check in found["checks"].values())
    found["seconds"] = time.perf_counter() - begin
    print(f"{found['seconds']:.0f} s on {found['device']}")
    return found


def print_times(name: str, step: dict[str, Any]) -> None:
    """A table of one timed step."""
    print(
        f"\n{name}: rows {step['rows']}, {step['slots']} slots: {step['measured_ms']:.3f} ms a step"
        f" ({step['kernels_ms']:.3f} in kernels), estimated {step['estimated_ms']:.3f}"
    )
    if not step["kernels_ms"]:
        print("  the profiler told no kernel of this program: no times by part")
    print(f"  {'part':<34}{'measured ms':>12}{'estimated':>11}{'ratio':>8}")
    for scope, part in sorted(step["parts"].items(), key=lambda item: -item[1]["measured_ms"]):
        ratio = part["measured_ms"] / max(part["estimated_ms"], 1e-9)
        print(
            f"  {scope:<34}{part['measured_ms']:>12.3f}{part['estimated_ms']:>11.3f}{ratio:>8.2f}"
        )


def main() -> None:
    """Check, time, print, and write the JSON."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--tiny", action="store_true", help="shapes that a CPU runs in seconds")
    p.add_argument("--json", type=Path, metavar="FILE", help="write all of it here too")
    options = p.parse_args()
    found = run(options.tiny)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(not found["right"])


if __name__ == "__main__":
    main()
