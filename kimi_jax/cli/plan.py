"""`kimi-jax plan`: what each device would hold."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import CommandError
from .devices import make_placement, named_config
from .options import DTYPES, HELP, add_command, add_place, gigabytes, mesh_shape, positive
from .output import print_json

EXAMPLES = """\
  kimi-jax plan k3.1 --mesh 1x8 --context 131072 --batch 64 --hbm 141,288
  kimi-jax plan k3.1 --mesh 4x8 --place expert_axes=data,model --hbm 80
  kimi-jax plan /path/to/checkpoint --mesh 1x2 --place latent=sharded

Temporaries of a step, about 2 GB at full size, are not in the table; --hbm sets 2 GB aside."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "plan memory: the bytes of each device, from shapes alone, and what fits"
    command = add_command(commands, "plan", run, about, EXAMPLES)
    add = command.add_argument
    help_config = "k3, k3.1, or the path of a config or checkpoint folder (k3.1)"
    add("config", nargs="?", metavar="CONFIG", help=help_config)
    add("--model", metavar="CONFIG", help="the same")
    help_mesh = "D data-parallel x M model-parallel ranks (1x1)"
    add("--mesh", type=mesh_shape, default=(1, 1), metavar="DxM", help=help_mesh)
    help_batch = "requests that decode together, on the whole mesh (1)"
    add("--batch", "--users", type=positive, default=1, metavar="B", help=help_batch)
    add("--context", type=positive, metavar="S", help="tokens of each request (4096)")
    add("--dtype", choices=DTYPES, default="bfloat16", help=f"{HELP['dtype']} (bfloat16)")
    help_hbm = "device memories to try, in GB"
    add("--hbm", type=gigabytes, default=[], metavar="GB,GB", help=help_hbm)
    add_place(command)
    add("--json", action="store_true", help="print bytes by term as a line of JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..runtime.fitting import verdict
    from ..runtime.memory import plan

    if options.config and options.model:
        hint = f"; ranks are --mesh 1x{options.model}" if options.model.isdecimal() else ""
        raise CommandError(f"the model is given twice, as CONFIG and as --model{hint}")
    config = named_config(options.config or options.model or "k3.1")
    place = make_placement(options)
    mesh = dict(zip(("data", "model"), options.mesh, strict=True))
    if options.context is not None and options.context > config.max_positions:
        raise CommandError(
            f"--context {options.context} is over the model's {config.max_positions} tokens"
        )
    planned = plan(
        config, mesh, place, batch=options.batch, context=options.context, dtype=options.dtype
    )
    if options.json:
        totals = {
            "weights": planned.weight_bytes,
            "state": planned.state_bytes,
            "all": planned.total_bytes,
        }
        fits = {f"{size:g}": planned.fits(size * 1e9) for size in options.hbm}
        print_json({"terms": planned.terms, "bytes": totals, "fits": fits})
        return 0
    print(planned)
    for size in options.hbm:
        print(f"\n{size:g} GB a device: {verdict(planned, size * 1e9)}")
    return 0
