"""GPUs as users name them: `16xH200`, `2x8xH200`, `8x141`. Imports nothing heavy."""

import dataclasses
import re

from ..errors import InputError, meant, shown

# GB of one, as sold: less than that is free.
MEMORY = {"A100": 80.0, "H100": 80.0, "H20": 96.0, "H200": 141.0, "B200": 180.0, "B300": 288.0}
NODE = 8  # GPUs of a node where only their number is given
MOST = 1024


@dataclasses.dataclass(frozen=True)
class Gpus:
    """Equal nodes of equal GPUs."""

    nodes: int
    per_node: int
    gigabytes: float  # of one
    name: str

    @property
    def count(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        model = f"{self.name} of {self.gigabytes:g} GB" if self.name else f"{self.gigabytes:g} GB"
        nodes = f" ({self.nodes} nodes of {self.per_node})" if self.nodes > 1 else ""
        return f"{self.count} x {model}{nodes}"


def read_gpus(text: str) -> Gpus:
    """GPUs as COUNTxMODEL or NODESxCOUNTxMODEL; a model is a name of `MEMORY` or a size in GB. Of
    more than 8 without a number of nodes, nodes of 8 are taken. Raises `InputError`.
    """
    parts = text.split("x")
    counts, model = parts[:-1], parts[-1].upper()
    if len(counts) not in (1, 2) or not all(re.fullmatch("[1-9][0-9]{0,3}", c) for c in counts):
        raise InputError(f"{shown(text)} is not of the form 8xH200, 2x8xH200 or 8x141")
    size = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)(?:GB)?", model)
    if size is None and model not in MEMORY:
        names = {name.lower(): name for name in MEMORY}
        known = f"known are {', '.join(MEMORY)}, or a memory in GB{meant(model, names)}"
        raise InputError(f"no GPU {shown(parts[-1])}, {known}")
    gigabytes = float(size[1]) if size else MEMORY[model]
    *nodes, count = map(int, counts)
    if not nodes:
        nodes = [count // NODE if count > NODE and count % NODE == 0 else 1]
        count //= nodes[0]
    gpus = Gpus(nodes[0], count, gigabytes, "" if size else model)
    if gpus.count > MOST or not gigabytes:
        raise InputError(f"{shown(text)} must be at most {MOST} GPUs, with memory")
    return gpus
