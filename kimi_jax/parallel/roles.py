"""The named roles by which dims of weights and states are sharded; `Placement.axes` says which mesh
axes split each role.
"""

import dataclasses
import enum


class Role(enum.Enum):
    """What the things along a sharded dim are. A dim without a role is replicated."""

    REQUESTS = "requests"  # rows of a batch
    HEADS = "heads"  # of KDA; of MLA's output and gate
    QUERY_HEADS = "query heads"  # of MLA: replicated where cached keys are sharded
    VALUE_HEADS = "value heads"  # of MLA: so too where ranks exchange values
    CACHED_KEYS = "cached keys"  # latent rows and index keys
    FFN_WIDTH = "feed-forward width"  # of the dense layers
    SHARED_WIDTH = "shared width"  # of the shared experts
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    LATENT = "latent projections"  # and the router's rows


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dim of `count` things of `size` places each, as `count` heads of width `size`; sharded
    between things, never inside one.
    """

    count: int
    size: int = 1
    role: Role | None = None

    @property
    def places(self) -> int:
        """The size of the dim in an array."""
        return self.count * self.size
