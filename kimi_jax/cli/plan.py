"""`kimi-jax plan`: what each device would hold."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import CommandError
from .devices import make_placement, named_config
from .options import DTYPES, HELP, add_command, add_place, gigabytes, positive

EXAMPLES = """\
  kimi-jax plan k3.1 --model 8 --context 131072 --batch 64 --hbm 141,288
  kimi-jax plan k3.1 --data 4 --model 8 --place expert_axes=data,model --hbm 80
  kimi-jax plan /path/to/checkpoint --model 2 --place latent=sharded

Temporaries of a step, about 2 GB at full size, are not in the table; --hbm sets 2 GB aside."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    command = add_command(
        commands,
        "plan",
        run,
        "show what each device would hold, from shapes alone, and what fits",
        EXAMPLES,
    )
    add = command.add_argument
    add("config", nargs="?", default="k3.1", metavar="CONFIG", help="k3, k3.1, or a path (k3.1)")
    add("--model", type=positive, default=1, metavar="N", help="ranks of the model axis (1)")
    add("--data", type=positive, default=1, metavar="N", help="ranks of the data axis (1)")
    add("--batch", type=positive, default=1, metavar="B", help="requests on the whole mesh (1)")
    add("--context", type=positive, metavar="S", help="tokens of a request (4096)")
    add("--dtype", choices=DTYPES, default="bfloat16", help=f"{HELP['dtype']} (bfloat16)")
    add("--hbm", type=gigabytes, default=[], metavar="GB,GB", help="device memories to try, in GB")
    add_place(command)
    add("--json", action="store_true", help="print bytes by term as a line of JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..runtime.fitting import verdict
    from ..runtime.memory import plan

    config, place = named_config(options.config), make_placement(options)
    mesh = {"data": options.data, "model": options.model}
    if options.context is not None and options.context > config.max_positions:
        raise CommandError(
            f"--context {options.context} is over the model's {config.max_positions} tokens"
        )
    made = plan(
        config, mesh, place, batch=options.batch, context=options.context, dtype=options.dtype
    )
    if options.json:
        totals = {"weights": made.weight_bytes, "state": made.state_bytes, "all": made.total_bytes}
        fits = {f"{size:g}": made.fits(size * 1e9) for size in options.hbm}
        print(json.dumps({"terms": made.terms, "bytes": totals, "fits": fits}))
        return 0
    print(made)
    for size in options.hbm:
        print(f"\n{size:g} GB a device: {verdict(made, size * 1e9)}")
    return 0
