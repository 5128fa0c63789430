"""Compile a step of the decoder for GPUs that are not there; report its memory and collectives.

    python scripts/aot.py k3.1 --mesh 1x8 --batch 12 --context 131072
    python scripts/aot.py k3 --mesh 4x8 --batch 4 --step prefill --rows 4096 --json
    python scripts/aot.py k3.1 --mesh 1x8 --placement '{"rows": "sliced"}' --hlo step.hlo

No weight exists: the step is traced from shapes, on a CPU. XLA's compiler for CUDA must be there,
`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt` in jaxlib's version; a driver need not.

    python scripts/aot.py k3.1 --mesh 1x8 --batch 64 --context 131072 --bill

Bytes are those of one device. A collective's payload is the larger of what goes in and what comes
out, in the type that the optimized program gives it: that is what travels. `sent` is what one
device then sends if all form a ring (for a ragged exchange: at most). Every turn of the loops
around a collective counts. One in a branch counts as if the branch ran.

`--bill` adds, by named scope, the bytes that kernels read and write, launches (in CUDA graphs and
not), host waits, products and elementwise operations; loops that do not say their turns and
branches, with what counts for them; weights and states that are copied; and the floor: weights,
states and new rows touched once. `scripts/bill/report.py` has the constants of the estimated time.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from bill import floor, rules
from bill import report as bill_report
from bill.buffers import in_command_buffers
from bill.collectives import collectives
from bill.hlo import parse as parse_hlo
from bill.walk import Walk, joined
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import kimi_jax as kj
from kimi_jax.model.implementations import fast_on
from kimi_jax.model.mxfp4 import expert_quantization
from kimi_jax.parallel.mesh import DATA, MODEL
from kimi_jax.runtime.model_on_mesh import WALKS
from kimi_jax.runtime.probes import CompiledPart, compile_decode_steps, compile_parts, compile_step
from kimi_jax.runtime.program import Program, make_program
from kimi_jax.speculation.verify import VerifyParts

TARGET = """\
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


# Compiling a step.


def make_mesh(data: int, model: int, target: str) -> Mesh:
    """A mesh of devices that exist only for the compiler."""
    shape = f"1x1x{data * model}"  # one host, one block of devices
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=target, topology=shape)
    except NotImplementedError as error:
        raise SystemExit(f"XLA's compiler for CUDA is missing ({error}): see --help") from error
    devices = np.array(topology.devices).reshape(data, model)
    return Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def memory_bytes(compiled: Any) -> dict[str, int]:
    """Bytes of one device by use; an output that aliases an argument takes no more."""
    sizes = compiled.memory_analysis()
    return {
        "arguments": sizes.argument_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "aliases": sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
    }


# The command.


def named_config(name: str) -> kj.Config:
    """k3, k3.1, or the config at a path."""
    named = {"k3": kj.Config.k3, "k3.1": kj.Config.k3_1}
    return named[name]() if name in named else kj.Config.from_hf(name)


def read_mesh(text: str) -> tuple[int, int]:
    """2x8 as a pair."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not DATAxMODEL such as 1x8")
    data, model = map(int, text.split("x"))
    return data, model


def parse() -> argparse.Namespace:
    """The options of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = p.add_argument
    add("config", help="k3, k3.1, or the path of a config.json or of its folder")
    add("--mesh", type=read_mesh, default=(1, 1), metavar="DxM", help="data x model devices (1x1)")
    add("--placement", type=json.loads, default={}, metavar="JSON", help="fields of a Placement")
    add(
        "--step",
        choices=("decode", "decode_steps", "prefill", "verify"),
        default="decode",
        help="what to compile (decode)",
    )
    add("--batch", type=int, default=1, metavar="N", help="requests, padded to a multiple of D (1)")
    add("--context", type=int, default=4096, metavar="N", help="slots for each request (4096)")
    add("--rows", type=int, default=4096, metavar="N", help="tokens of all requests of a prefill")
    add("--drafts", type=int, default=7, metavar="K", help="drafts a request of a verify step (7)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    add("--transport", choices=("padded", "ragged"), default="ragged", help="to experts (ragged)")
    add("--walk", choices=WALKS, default="by_group", help="over the layers (by_group)")
    add("--alike", action="store_true", help=_ALIKE_HELP)
    add("--memory-gb", type=float, metavar="N", help=_MEMORY_HELP)
    add("--target", type=Path, metavar="FILE", help="text that describes the GPU (an H200)")
    add("--hlo", type=Path, metavar="FILE", help="write the optimized program, or each one, here")
    add("--bill", action="store_true", help="bytes, launches, waits and products by part")
    help_cached = "tokens a request has cached, a bill for each number (all slots but the new ones)"
    add("--cached", type=int, nargs="+", metavar="N", help=help_cached)
    add("--json", action="store_true", help="print one JSON object")
    return p.parse_args()


_ALIKE_HELP = """by_group: compile once the programs that differ only in where residual blocks
start; the first stands for all of them"""
_MEMORY_HELP = """what a device has (what the target says, or more where the arguments do not fit):
XLA schedules for it, and recomputes and complains where the arguments alone exceed it"""


def report(options: argparse.Namespace) -> dict[str, Any]:
    """All that is said about a step."""
    target = options.target.read_text() if options.target else TARGET
    real = int(re.findall(r"device_memory_size: *(\d+)", target)[0])
    (data, model), config = options.mesh, named_config(options.config)
    needed = kj.plan(
        config, {DATA: data, MODEL: model}, kj.Placement(**options.placement),
        batch=options.batch, context=options.context, dtype=options.dtype,
    ).total_bytes  # fmt: skip
    memory = round(options.memory_gb * 1e9) if options.memory_gb else memory_for(needed, real)
    target = re.sub(r"device_memory_size: *\d+", f"device_memory_size: {memory}", target)
    program = make_program(
        config,
        make_mesh(data, model, target),
        kj.Placement(**options.placement),
        options.dtype,
        quantization=expert_quantization(config.quantized),
        walk=options.walk,
        implementations=dataclasses.replace(fast_on("gpu"), transport=options.transport),
    )
    batch = -(-options.batch // data) * data
    tokens = {"prefill": -(-options.rows // batch), "verify": 1 + options.drafts}.get(
        options.step, 1
    )
    if options.bill:  # a program out of the cache is not dumped
        jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as dump:
        parts, seconds = compile_for(program, options, batch, tokens, Path(dump))
        buffered = {
            part.name: in_command_buffers(Path(dump, part.name)) if options.bill else frozenset()
            for part in parts
        }
    texts = {part.name: part.compiled.as_text() for part in parts}
    if options.hlo:
        write_texts(texts, options.hlo)
    bills = {
        cached: bill_of(
            program, parts, texts, floor.Load(batch, tokens, cached), options.context, buffered
        )
        for cached in (options.cached or [options.context - tokens])
        if options.bill
    }
    return {
        **{name: getattr(options, name) for name in ("config", "step", "context", "dtype")},
        "mesh": {DATA: data, MODEL: model},
        "placement": options.placement,
        "tokens": [batch, tokens],
        "seconds": seconds,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory": memory,
        "memory_of_target": real,
        "programs": {part.name: part.calls for part in parts},
        "bytes": step_bytes(program, parts, batch, options.context),
        "collectives": [
            {**dataclasses.asdict(found), "calls": found.calls * part.calls, "sent": found.sent}
            for part in parts
            for found in collectives(texts[part.name], data * model)
        ],
        "bills": bills,
    }


def memory_for(needed: int, real: int) -> int:
    """The memory to compile for: the target's, or one in which the arguments fit with as much
    beside them. XLA told less than its arguments take computes again and makes collectives wait.
    """
    return real if needed < 0.9 * real else round(1.25 * needed) + 2 * 10**10


def compile_for(
    program: Program, options: argparse.Namespace, batch: int, tokens: int, dump: Path
) -> tuple[list[CompiledPart], dict[str, float]]:
    """The programs of the step that the options ask for, compiled, and the seconds of each phase.
    For a bill, what XLA says of the launches of each is dumped into a folder of its name.
    """

    def flags(name: str) -> dict[str, Any]:
        if not options.bill:
            return {}
        return {"xla_dump_to": str(dump / name), "xla_dump_hlo_as_text": True}

    samples = options.step == "decode_steps"
    if program.walk == "by_group":
        return compile_parts(
            *(program, batch, tokens, options.context, flags),
            samples=samples,
            alike=options.alike,
            by_group=VerifyParts(program, None) if options.step == "verify" else None,
        )
    if options.step == "verify":
        raise SystemExit("--step verify is for --walk by_group")
    if samples:
        compiled, seconds = compile_decode_steps(program, batch, options.context, flags("step"))
    else:
        compiled, seconds = compile_step(program, batch, tokens, options.context, flags("step"))
    return [CompiledPart("step", 1, compiled)], seconds


def write_texts(texts: dict[str, str], path: Path) -> None:
    """Write the text of one program to a path, of several to paths that name the program too."""
    for name, text in texts.items():
        suffix = f".{name.replace(' ', '_')}{path.suffix}"
        (path if len(texts) == 1 else path.with_suffix(suffix)).write_text(text)


def step_bytes(
    program: Program, parts: list[CompiledPart], batch: int, slots: int
) -> dict[str, int]:
    """`memory_bytes` of a step. Of several programs: weights and state, the logits, and the most
    that one program takes beside them, results that replace a state among that.
    """
    if len(parts) == 1:
        return memory_bytes(parts[0].compiled)
    held = jax.tree.leaves((program.weight_shapes, program.state_shapes(batch, slots)))
    arguments = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held)
    used = [memory_bytes(part.compiled) for part in parts]
    most = max(one["temporaries"] + one["outputs"] - one["aliases"] for one in used)
    last = used[-1]
    return {
        "arguments": arguments,
        "outputs": last["outputs"] - last["aliases"],
        "aliases": 0,
        "temporaries": most,
    }


def bill_of(
    program: Program,
    parts: list[CompiledPart],
    texts: dict[str, str],
    load: floor.Load,
    slots: int,
    buffered: dict[str, frozenset[str]],
) -> dict[str, Any]:
    """The bill of a step's compiled programs beside the floor of the step."""
    bills = []
    for part in parts:
        walk = Walk(
            parse_hlo(texts[part.name]),
            rules.loop_rule(program, load),
            rules.branch_rule(program, load, slots),
            buffered[part.name],
            devices=program.mesh.size,
        )
        bills.append((walk.bill(), part.calls))
    return bill_report.as_json(joined(bills), floor.floor(program, load))


def print_report(found: dict[str, Any]) -> None:
    """The report for people; all figures are of one device."""
    (batch, tokens), mesh, used = found["tokens"], found["mesh"], found["bytes"]
    print(
        f"{found['config']} {found['step']}: tokens [{batch}, {tokens}], {found['context']} slots,"
        f" data {mesh[DATA]} x model {mesh[MODEL]}, {found['dtype']}, {found['placement']}"
    )
    print(*(f"{phase} {seconds:.2f} s," for phase, seconds in found["seconds"].items()), end=" ")
    print(f"peak host memory {found['peak_rss'] / 1e9:.2f} GB")
    if found["memory"] != found["memory_of_target"]:
        print(
            f"COMPILED FOR {found['memory'] / 1e9:.6g} GB OF MEMORY: "
            f"the target has {found['memory_of_target'] / 1e9:.6g} GB"
        )
    if len(found["programs"]) > 1:
        print("  calls:", ", ".join(f"{n} x {name}" for name, n in found["programs"].items()))
    needs = used["arguments"] + used["outputs"] - used["aliases"] + used["temporaries"]
    for name, count in {**used, "in all": needs}.items():
        print(f"  {name:<12}{count:>20,}")
    if needs > found["memory_of_target"]:
        print("  MORE THAN THE TARGET HOLDS")
    print_collectives(found["collectives"], batch * tokens // mesh[DATA])
    for cached, bill in found["bills"].items():
        print(f"bill with {cached:,} tokens cached")
        bill_report.print_bill(bill)


def print_collectives(found: list[dict[str, Any]], rows: int) -> None:
    """A row for each collective, and the sums of each kind and type; `a row` is what one call sends
    for each of a data rank's rows.
    """
    if not found:
        print("no collectives")
        return
    print(
        "  kind               type      ranks  payload of a call    a row   calls  sent in a step"
        "  scope"
    )
    total: dict[tuple[str, str], list[int]] = {}
    for row in found:
        sent = row["calls"] * row["sent"]
        calls = f"{'' if row['bounded'] else '>='}{row['calls']}"
        print(
            f"  {row['kind']:<18} {row['dtype']:<9} {row['ranks']:>5} {row['payload']:>18,} "
            f"{row['sent'] / rows:>8,.0f} {calls:>7} {sent:>15,}  {row['scope']}"
        )
        sums = total.setdefault((row["kind"], row["dtype"]), [0, 0, 0])
        for at, count in enumerate((row["calls"] * row["payload"], row["calls"], sent)):
            sums[at] += count
    for (kind, dtype), (payload, calls, sent) in total.items():
        print(f"  {kind:<18} {dtype:<9} total {payload:>18,} {'':>8} {calls:>7} {sent:>15,}")


def main() -> None:
    """Compile, then print."""
    options = parse()
    found = report(options)
    print(json.dumps(found)) if options.json else print_report(found)


if __name__ == "__main__":
    main()
