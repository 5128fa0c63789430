"""Compile a step of the decoder for GPUs that are not there; report its memory and collectives.

    python scripts/aot.py k3.1 --mesh 1x8 --batch 12 --context 131072
    python scripts/aot.py k3 --mesh 4x8 --batch 4 --step prefill --rows 4096 --json
    python scripts/aot.py k3.1 --mesh 1x8 --placement '{"rows": "sliced"}' --hlo step.hlo

No weight exists: the step is traced from shapes, on a CPU. XLA's compiler for CUDA must be there,
`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt` in jaxlib's version; a driver need not.

Bytes are those of one device. A collective's payload is the larger of what goes in and what comes
out, in the type that the optimized program gives it: that is what travels. `sent` is what one
device then sends if all form a ring (for a ragged exchange: at most). Every turn of the loops
around a collective counts. One in a branch counts as if the branch ran.
"""

import argparse
import dataclasses
import json
import os
import re
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import kimi_jax as kj
from kimi_jax.model.implementations import Implementations
from kimi_jax.model.mxfp4 import expert_quantization
from kimi_jax.parallel.mesh import DATA, MODEL
from kimi_jax.runtime.probes import compile_step
from kimi_jax.runtime.program import make_program

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


# What the text of an optimized program says that it sends.

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-broadcast"),
    *("all-to-all", "ragged-all-to-all", "collective-permute"),
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_TYPE_TOKEN = re.compile(r"[()]|\w+\[[\d,]*\]")
_LISTED_RANKS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED_RANKS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PLUMBING = re.compile(r"jit\(.*\)|shard_map|while|body|closed_call|cond|branch_\d+_fun")


class Instruction(NamedTuple):
    """A line of HLO text: the type of the result, what is done, and operands and attributes."""

    type: str
    opcode: str
    rest: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction and the bytes of one call."""

    kind: str
    dtype: str  # what travels; several types are joined by +
    payload: int
    ranks: int  # devices that take part together
    scope: str  # where in the decoder it was written
    calls: int = 1  # in one step
    bounded: bool = True  # or some loop around it has no known number of turns and counts as one

    @property
    def sent(self) -> int:
        """Bytes that a device of a ring sends in one call."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload * (self.ranks - 1) // self.ranks


def collectives(hlo: str, devices: int) -> list[Collective]:
    """Every collective of a program on `devices` devices, equal collectives counted as calls."""
    bodies, entry = computations(hlo)
    calls: dict[Collective, int] = defaultdict(int)
    for name, (times, bounded) in call_counts(bodies, entry).items():
        for instruction in bodies[name]:
            found = read_collective(instruction, devices)
            if found is not None:
                calls[dataclasses.replace(found, bounded=bounded)] += times
    return [dataclasses.replace(found, calls=times) for found, times in calls.items()]


def computations(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation by its name, and the name of the entry."""
    bodies: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            body = bodies[opened[2]] = []
            entry = opened[2] if opened[1] else entry
        elif read := _INSTRUCTION.match(line):
            body.append(Instruction(*read.groups()))
    return bodies, entry


def call_counts(bodies: dict[str, list[Instruction]], entry: str) -> dict[str, tuple[int, bool]]:
    """How often one run of the entry runs each computation, and whether all loops around it say
    their turns.
    """
    counts: dict[str, tuple[int, bool]] = {}

    def visit(name: str, times: int, bounded: bool) -> None:
        so_far, all_bounded = counts.get(name, (0, True))
        counts[name] = so_far + times, all_bounded and bounded
        for instruction in bodies[name]:
            trips = turns(instruction)
            for called in called_by(instruction):
                visit(called, times * (trips or 1), bounded and trips is not None)

    visit(entry, 1, True)
    return counts


def called_by(instruction: Instruction) -> Iterator[str]:
    """The computations that an instruction runs; the end of an asynchronous one runs nothing."""
    if not instruction.opcode.endswith(("-done", "-update")):
        for names in _CALLED.findall(instruction.rest):
            yield from re.findall(r"[\w.-]+", names)


def turns(instruction: Instruction) -> int | None:
    """How often an instruction runs what it calls: once unless it is a loop, None if unknown."""
    if instruction.opcode != "while":
        return 1
    known = _TRIPS.search(instruction.rest)
    return int(known[1]) if known else None


def read_collective(instruction: Instruction, devices: int) -> Collective | None:
    """The collective that an instruction is or starts, None for any other instruction."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    type_, ranks = read_type(instruction.type), read_ranks(instruction.rest, devices)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        sides = [arrays(side) for side in type_[:2]]  # operands, results; then what XLA works with
    else:
        scattered = kind == "reduce-scatter"
        sides = [arrays(type_) * (ranks if scattered else 1)]
    if kind == "ragged-all-to-all":
        sides = [side[:1] for side in sides]  # the other operands say who gets which rows
    travels = max(sides, key=lambda side: sum(map(array_bytes, side)))
    dtypes = sorted({array.partition("[")[0] for array in travels})
    payload = sum(map(array_bytes, travels))
    return Collective(kind, "+".join(dtypes), payload, ranks, read_scope(instruction.rest))


def read_type(text: str) -> Any:
    """A type as nested lists of arrays such as "bf16[8,128]"; other types as they are."""
    open_: list[list] = [[]]
    for token in _TYPE_TOKEN.findall(_LAYOUT.sub("", text)):
        if token == "(":
            open_.append([])
        else:
            open_[-1].append(token) if token != ")" else open_[-2].append(open_.pop())
    return open_[0][0]


def arrays(type_: Any) -> list[str]:
    """All arrays in a type, in order."""
    return (
        [type_] if isinstance(type_, str) else [array for part in type_ for array in arrays(part)]
    )


def array_bytes(array: str) -> int:
    """The bytes of "bf16[8,128]"."""
    dtype, _, dims = array.removesuffix("]").partition("[")
    bits = re.match(r"[a-z]+(\d+)", dtype)
    size = int(np.prod([int(dim) for dim in dims.split(",") if dim], dtype=object))
    return -(-size * (int(bits[1]) if bits else 8) // 8)


def read_ranks(attributes: str, devices: int) -> int:
    """How many devices take part in a collective together."""
    if listed := _LISTED_RANKS.search(attributes):
        return listed[1].count(",") + 1
    counted = _COUNTED_RANKS.search(attributes)
    return int(counted[1]) if counted else devices


def read_scope(attributes: str) -> str:
    """The named scopes of the decoder that an instruction comes from."""
    name = _OP_NAME.search(attributes)
    parts = name[1].split("/") if name else []
    return "/".join(part for part in parts if not _PLUMBING.fullmatch(part))


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
    add("--step", choices=("decode", "prefill"), default="decode", help="what to compile (decode)")
    add("--batch", type=int, default=1, metavar="N", help="requests, padded to a multiple of D (1)")
    add("--context", type=int, default=4096, metavar="N", help="slots for each request (4096)")
    add("--rows", type=int, default=4096, metavar="N", help="tokens of all requests of a prefill")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(bfloat16)")
    add("--transport", choices=("padded", "ragged"), default="ragged", help="to experts (ragged)")
    add("--memory-gb", type=float, metavar="N", help=_MEMORY_HELP)
    add("--target", type=Path, metavar="FILE", help="text that describes the GPU (an H200)")
    add("--hlo", type=Path, metavar="FILE", help="write the optimized program here")
    add("--json", action="store_true", help="print one JSON object")
    return p.parse_args()


_MEMORY_HELP = """what a device has, instead of what the target says: XLA schedules for it, and
recomputes and complains where the arguments alone exceed it"""


def report(options: argparse.Namespace) -> dict[str, Any]:
    """All that is said about a step."""
    target = options.target.read_text() if options.target else TARGET
    real = int(re.findall(r"device_memory_size: *(\d+)", target)[0])
    memory = round(options.memory_gb * 1e9) if options.memory_gb else real
    target = re.sub(r"device_memory_size: *\d+", f"device_memory_size: {memory}", target)
    (data, model), config = options.mesh, named_config(options.config)
    program = make_program(
        config,
        make_mesh(data, model, target),
        kj.Placement(**options.placement),
        options.dtype,
        quantization=expert_quantization(config.quantized),
        scan=True,
        implementations=Implementations(transport=options.transport),
    )
    batch = -(-options.batch // data) * data
    tokens = 1 if options.step == "decode" else -(-options.rows // batch)
    compiled, seconds = compile_step(program, batch, tokens, options.context)
    hlo = compiled.as_text()
    if options.hlo:
        options.hlo.write_text(hlo)
    return {
        **{name: getattr(options, name) for name in ("config", "step", "context", "dtype")},
        "mesh": {DATA: data, MODEL: model},
        "placement": options.placement,
        "tokens": [batch, tokens],
        "seconds": seconds,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory": memory,
        "memory_of_target": real,
        "bytes": memory_bytes(compiled),
        "collectives": [
            {**dataclasses.asdict(found), "sent": found.sent}
            for found in collectives(hlo, data * model)
        ],
    }


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
            f"compiled for {found['memory'] / 1e9:.6g} GB of memory; "
            f"the target has {found['memory_of_target'] / 1e9:.6g} GB"
        )
    needs = used["arguments"] + used["outputs"] - used["aliases"] + used["temporaries"]
    for name, count in {**used, "in all": needs}.items():
        print(f"  {name:<12}{count:>20,}")
    if needs > found["memory_of_target"]:
        print("  more than the target holds")
    print_collectives(found["collectives"], batch * tokens // mesh[DATA])


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
