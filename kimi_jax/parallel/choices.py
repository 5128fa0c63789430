"""The words that options of a `Placement` take, and what each option does. Imports nothing heavy:
the command shows and checks them before JAX starts.
"""

CHOICES: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "rows": ("full", "sliced", "auto"),
    "keys": ("whole", "helix"),
    "exchange": ("latents", "values"),
    "experts": ("exchange", "local", "auto"),
    "latent": ("whole", "sharded"),
    "shared": ("whole", "sliced"),
    "prefill_reduce": ("sum", "two_shot", "ring_fp32", "ring_bf16"),
    "expert_axes": (("model",), ("data", "model")),
}
PADS = ("heads", "experts", "vocab", "dense", "shared")
ABOUT = {  # every option, in the order in which help lists them
    "keys": "the KV cache: replicated over model ranks, or sharded",
    "helix_block": "positions of a block of a sharded KV cache (64)",
    "exchange": "what helix ranks send: for less work, or in fewer bytes",
    "rows": "rows of the residual stream: replicated, or sharded",
    "sliced_from": "rows=auto shards them in steps of at least N rows",
    "shared": "shared experts beside sharded rows: replicated, or sharded",
    "experts": "rows are sent to experts, or each rank runs its own on all",
    "local_below": "experts=auto: local in steps of fewer than N rows",
    "expert_axes": "the mesh axes that routed experts are sharded over",
    "latent": "latent projections and router: replicated, or sharded",
    "pad": "sizes that may be zero-padded where they do not divide",
    "prefill_reduce": "how large prefill steps sum over ranks",
    "prefill_ring_rows": "prefill_reduce acts from N rows on (0: never)",
    "ring_pieces": "messages of a hop of ring_bf16 (1)",
    "ring_fp32_hops": "last hops of ring_bf16 in float32 (0)",
    "ring_granule_rows": "rows that ring_bf16 deals to ranks at a time (0: all)",
}


def values_text(name: str) -> str:
    """What an option can be, as the command spells it."""
    if name == "pad":
        return "[" + ",".join(PADS) + "]"
    choices = CHOICES.get(name)
    if choices is None:
        return "N"
    return "|".join(choice if isinstance(choice, str) else ",".join(choice) for choice in choices)
