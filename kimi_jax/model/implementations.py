"""Which implementation of each hard operation a model runs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Forms:
    """Which form of each hard operation runs: the plain definition or the fast one. They agree;
    tests hold them to it.

    The fast forms of attention and experts loop as often as the data says and have no gradient:
    training takes `TRAINING`.
    """

    kda: str = "chunked"  # or "recurrent"
    mla: str = "absorbed"  # or "expanded", which selects by a full sort
    moe: str = "grouped"  # or "dense"
    chunk: int = 64  # tokens of a KDA chunk
    # How rows travel to experts: "padded" blocks, or "ragged" ones, which CPUs cannot send.
    transport: str = "padded"
    # "teach": attention's gradient reaches the indexer, whose choice has none.
    select: str = "plain"

    def __post_init__(self) -> None:
        known = {
            "kda": ("chunked", "recurrent"),
            "mla": ("absorbed", "expanded"),
            "moe": ("grouped", "dense"),
            "transport": ("padded", "ragged"),
            "select": ("plain", "teach"),
        }
        problems = [
            f"{name} must be one of {', '.join(forms)}, got {getattr(self, name)!r}"
            for name, forms in known.items()
            if getattr(self, name) not in forms
        ]
        if self.chunk < 1:
            problems.append(f"chunk must be positive, got {self.chunk}")
        if problems:
            raise ValueError("\n".join(problems))


DEFINITIONS = Forms(kda="recurrent", mla="expanded", moe="dense")
TRAINING = Forms(mla="expanded", moe="dense", chunk=16, select="teach")
