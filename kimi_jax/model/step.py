"""Inputs that all layers of a step share: which tokens are new, and how rows, keys and sums are
laid out over the ranks.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..config.block_sizes import BlockSizes, block_sizes
from ..parallel import collectives
from ..parallel.helix import Stripes
from ..parallel.mesh import ONE_DEVICE, Sizes
from ..parallel.placement import Placement
from ..parallel.reductions import SUM, Reduction


@dataclasses.dataclass(frozen=True)
class ImplementationNames:
    """The implementation of each hard operation, by name: what a step carries. `Implementations`
    checks the names against the tables of the operations.
    """

    kda: str = "chunked"  # or "transitions", for GPUs; or "recurrent", the definition
    # or "static", for GPUs; or "expanded", the definition, which selects by a full sort
    mla: str = "absorbed"
    moe: str = "grouped"  # or "slots", for GPUs; or "dense", the definition
    # How rows are sent to experts: "padded" blocks, or "ragged" ones, which CPUs cannot send.
    transport: str = "padded"
    # What verified rows leave of KDA's state; or "checkpoints", the definition, a state a row.
    rollback: str = "replay"
    # "teach": attention's gradient reaches the indexer, whose choice has none.
    select: str = "plain"
    # Blocks of queries, keys and tokens; None: those of the mesh's platform.
    blocks: BlockSizes | None = None
    chunk: int | None = None  # tokens of a KDA chunk, instead of the platform's


@dataclasses.dataclass(frozen=True)
class Tapped:
    """The layers after which a step records the residual stream, 0-based and ascending, and which
    of two streams that is. "sum": the running sum, restarted at every block start, so without the
    blocks in the bank. "mixture": what the next layer's attention reads of bank and sum, before its
    norm; after the last layer, what the output norm reads.
    """

    layers: tuple[int, ...]
    stream: str = "sum"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """Inputs that all layers of a step share. Row b brings `lengths[b]` new tokens after the
    `start[b]` it has seen. Of the B T rows of the residual stream a rank holds P: all, or a slice.
    """

    start: Int[Array, " B"]
    lengths: Int[Array, " B"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    group: int | Int[Array, ""]  # of the stack of layers that runs
    implementations: ImplementationNames = dataclasses.field(metadata={"static": True})
    place: Placement = dataclasses.field(default=Placement(), metadata={"static": True})
    reduction: Reduction = dataclasses.field(default=SUM, metadata={"static": True})
    is_sliced: bool = dataclasses.field(default=False, metadata={"static": True})
    stripes: Stripes = dataclasses.field(default=Stripes(), metadata={"static": True})
    model_ranks: int = dataclasses.field(default=1, metadata={"static": True})
    tapped: Tapped | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls,
        start: Array,
        lengths: Array,
        T: int,
        implementations: ImplementationNames,
        place: Placement = Placement(),  # noqa: B008
        sizes: Sizes = ONE_DEVICE,
        kind: str = "prefill",
    ) -> "Step":
        """A step of at most T new tokens a row on a mesh of these sizes; `kind` is one of
        `reductions.STEPS` and says how partial sums are reduced.
        """
        offsets = jnp.arange(T, dtype=jnp.int32)[None]
        rows = len(start) * T
        return cls(
            start,
            lengths,
            positions=start[:, None] + offsets,
            valid=offsets < lengths[:, None],
            group=0,
            implementations=implementations,
            place=place,
            reduction=place.reduction(kind, rows, sizes),
            is_sliced=place.slices_rows(rows),
            stripes=place.stripes(sizes),
            model_ranks=place.model_ranks(sizes),
        )

    @property
    def blocks(self) -> BlockSizes:
        """How much is done at a time; as on CPUs where no program of a mesh says it."""
        return self.implementations.blocks or block_sizes("cpu")

    @property
    def kda_chunk(self) -> int:
        """Tokens of a KDA chunk."""
        return self.implementations.chunk or self.blocks.kda_chunk

    @property
    def rows(self) -> int:
        """Rows of the residual stream in all, B T."""
        return self.valid.size

    @property
    def total(self) -> Int[Array, " B"]:
        """Tokens that each row will have seen after this step."""
        return self.start + self.lengths

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that split both the experts and the rows."""
        return self.place.row_axes_of_experts(self.is_sliced)

    # Rows of the residual stream: sliced, or replicated on the model ranks.

    def all_rows(self, x: Float[Array, "P D"]) -> Float[Array, "Q D"]:
        """The residual rows that a rank holds -> all B T of them, by a gather where sliced."""
        return collectives.all_rows(x, self.rows) if self.is_sliced else x

    def local_rows(self, x: Float[Array, "P D"]) -> Float[Array, "c D"]:
        """The residual rows that a rank holds -> the slice that only this rank works on."""
        return x if self.is_sliced else collectives.local_rows(x)

    def held_rows(self, x: Array) -> Array:
        """All rows -> those of the residual stream that this rank holds; moves nothing."""
        return collectives.local_rows(x) if self.is_sliced else x

    def attention_rows(self, x: Float[Array, "P D"]) -> Float[Array, "B T D"]:
        """The residual rows that a rank holds -> all rows of its requests."""
        return self.all_rows(x).reshape(*self.valid.shape, -1)

    def reduce(
        self,
        partial: Sequence[Float[Array, "Q D"]],
        local: Sequence[Float[Array, "c D"]] = (),
        how: Reduction | None = None,
    ) -> Float[Array, "P D"]:
        """The residual rows that a rank holds, of sums over ranks: of `partial` sums of all rows,
        and of what each rank computed for its `local` rows alone.
        """
        how = self.reduction if how is None else how
        if self.is_sliced:
            scattered = [collectives.reduce_scatter(_sum(partial), how)] if partial else []
            return _sum([*local, *scattered])
        embedded = [collectives.zero_padded_rows(rows, self.rows) for rows in local]
        return collectives.all_reduce(_sum([*embedded, *partial]), how)

    # Cached keys: replicated, or striped over the model ranks.

    @property
    def key_rank(self) -> int | Int[Array, ""]:
        """This rank's number among those over which cached keys are striped."""
        return 0 if self.stripes.ranks == 1 else collectives.rank()

    @property
    def max_local_keys(self) -> Int[Array, ""]:
        """The most cached keys of a row that this rank holds after this step."""
        return self.stripes.length(jnp.max(self.total), self.key_rank)

    @property
    def most_keys_of_a_rank(self) -> Int[Array, ""]:
        """The most cached keys of a row that any rank holds after this step: the first one does.
        The same on all ranks, so that they take the same branch.
        """
        return self.stripes.length(jnp.max(self.total), 0)

    def positions_of(self, slots: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The positions whose keys this rank's slots hold."""
        return self.stripes.position(slots, self.key_rank)


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, parts)
