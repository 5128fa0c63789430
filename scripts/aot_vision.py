"""Compile the vision tower for a GPU that is not there; report its memory, launches and bytes.

    python scripts/aot_vision.py                 # an image of 1920 x 1080 through K3's tower
    python scripts/aot_vision.py --places 65536

No weight exists. XLA's compiler for CUDA must be there, as for `scripts/aot.py`. An image of h x w
patches takes the places of its bucket: 12,288 for 1920 x 1080.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import aot
import jax
import jax.numpy as jnp
from bill import report
from bill.buffers import in_command_buffers
from bill.hlo import parse
from bill.walk import Bill, Walk

from kimi_jax.config.vision import VisionConfig
from kimi_jax.errors import bytes_text
from kimi_jax.model.vision.encoder import activation_bytes
from kimi_jax.runtime.images.encoder import encode_function, encoder_shapes


def compile_tower(config: VisionConfig, places: int, dump: Path) -> Any:
    """The program that encodes an image of this many places, for one device of `aot.TARGET`."""
    mesh = aot.make_mesh(1, 1, aot.TARGET)
    function = encode_function(config, mesh, "bfloat16")
    patches = jax.ShapeDtypeStruct((1, 1, places, 3 * config.patch**2), jnp.bfloat16)
    grids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = encoder_shapes(config, mesh, "bfloat16", patches, grids)
    return function.lower(*shapes).compile({"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True})


def bill_of(compiled: Any, dump: Path) -> Bill:
    """Launches, bytes and products by named scope."""
    return Walk(parse(compiled.as_text()), buffered=in_command_buffers(dump)).bill()


def print_report(config: VisionConfig, places: int, memory: dict[str, int], bill: Bill) -> None:
    """A line for each scope, and the sums."""
    estimate = activation_bytes(config, places, "bfloat16", 2**29)
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in memory.items())
    print(f"{places:,} places: {held}; a plan says {bytes_text(estimate)} of temporaries")
    print(f"{'scope':<28}{'moved':>10}{'launches':>10}{'graph':>8}{'TFLOP':>8}{'ms':>9}")
    for scope, part in (*sorted(bill.parts.items()), ("total", bill.total)):
        flop, ms = sum(part.products.values()) / 1e12, report.seconds(part) * 1e3
        print(
            f"{scope:<28}{bytes_text(part.moved):>10}{part.launches:>10,}"
            f"{part.in_buffers:>8,}{flop:>8.2f}{ms:>9.2f}"
        )


def main() -> None:
    """Compile, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", type=int, default=12_288, metavar="L", help="(12288)")
    places = parser.parse_args().places
    jax.config.update("jax_enable_compilation_cache", False)  # what is cached is not dumped
    config = VisionConfig.k3()
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_tower(config, places, Path(dump))
        print_report(config, places, aot.memory_bytes(compiled), bill_of(compiled, Path(dump)))


if __name__ == "__main__":
    main()
