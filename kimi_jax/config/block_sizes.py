"""How much work is done at a time, by platform: blocks of queries, keys and tokens. One table, so
that nothing measured on CPUs is used on GPUs.

CPUs want blocks that stay in their caches and loops that end with the data. GPUs want few large
kernels and loops whose number of turns is known when compiling: every unknown one waits for the
host.
"""

import dataclasses
from collections.abc import Mapping

from ..numerics import is_whole


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of blocks, in bytes of the largest array that a block makes unless said otherwise.
    Raises one ValueError with every size that is not a positive whole number.
    """

    prefill_tokens: int  # most tokens of a row in one prefill program
    kda_chunk: int  # tokens of a KDA chunk
    keys: int  # cached keys read at a time, in slots
    dense_bytes: int  # scores of a block of queries and keys, attention to all keys
    select_bytes: int  # scores, or gathered latents, of a block of queries that select
    narrowest_slots: int  # slots that selection always ranks, whether they hold keys or not

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a positive whole number, got {value!r}"
            for name, value in vars(self).items()
            if not is_whole(value, 1)
        ]
        if problems:
            raise ValueError("\n".join(problems))


BLOCK_SIZES: Mapping[str, BlockSizes] = {
    "cpu": BlockSizes(
        prefill_tokens=512,
        kda_chunk=16,
        keys=512,
        dense_bytes=2**28,
        select_bytes=2**25,
        narrowest_slots=4096,
    ),
    "gpu": BlockSizes(
        prefill_tokens=4096,
        kda_chunk=128,
        keys=4096,
        dense_bytes=2**29,
        select_bytes=2**29,
        narrowest_slots=4096,
    ),
}


def block_sizes(platform: str) -> BlockSizes:
    """The sizes for a mesh of devices of this platform: those of "gpu" for all but CPUs."""
    return BLOCK_SIZES["cpu" if platform == "cpu" else "gpu"]
