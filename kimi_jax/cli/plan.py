"""`kimi-jax plan`: what each device would hold."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import CommandError
from .devices import make_placement, named_config
from .options import DTYPES, HELP, add_command, add_place, gigabytes, positive
from .output import print_json

EXAMPLES = """\
  kimi-jax plan k3.1 --model 8 --context 131072 --batch 64 --hbm 141,288
  kimi-jax plan k3.1 --data 4 --model 8 --place expert_axes=data,model --hbm 80
  kimi-jax plan /path/to/checkpoint --model 2 --place latent=sharded

Temporaries of a step, about 2 GB at full size, are not in the table; --hbm sets 2 GB aside."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    about = "plan memory: the bytes of each device, from shapes alone, and what fits"
    command = add_command(commands, "plan", run, about, EXAMPLES)
    add = command.add_argument
    help_config = "k3, k3.1, or the path of a config (k3.1)"
    add("config", nargs="?", default="k3.1", metavar="CONFIG", help=help_config)
    add("--model", type=positive, default=1, metavar="N", help="model-parallel ranks (1)")
    add("--data", type=positive, default=1, metavar="N", help="data-parallel ranks (1)")
    add("--batch", type=positive, default=1, metavar="B", help="requests on the whole mesh (1)")
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

    config = named_config(options.config)
    place = make_placement(options)
    mesh = {"data": options.data, "model": options.model}
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
