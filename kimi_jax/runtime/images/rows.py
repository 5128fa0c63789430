"""Rows that stand in a prompt where no embedding is looked up, as those of an image do."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped

from ...errors import RequestError
from ...model.decoder import Embedded
from ...parallel.processes import to_mesh
from ..model_on_mesh import BY_ROW, ModelOnMesh


@dataclasses.dataclass(frozen=True, eq=False)
class PromptRows:
    """The rows of one prompt: row i replaces the embedding of its token `positions[i]`."""

    positions: Shaped[np.ndarray, " n"]  # of tokens, ascending
    rows: Shaped[np.ndarray, "m D"]  # as many: `check_rows`

    def piece(self, first: int, stop: int) -> "PromptRows":
        """Those of the tokens `first` to `stop`, positions counted from `first`."""
        begin, end = np.searchsorted(self.positions, (first, stop))
        return PromptRows(self.positions[begin:end] - first, self.rows[begin:end])


GivenRows = Sequence[PromptRows | None]  # of each prompt of a batch; None: only tokens


def embedded_piece(
    program: ModelOnMesh, given: GivenRows, first: int, shape: tuple[int, int]
) -> tuple[()] | tuple[Embedded]:
    """On the mesh, the rows given for a piece of prompts that begins at token `first`, whose tokens
    are padded to `shape` [B, T]; nothing where no prompt has rows there.
    """
    B, T = shape
    pieces = [(b, own.piece(first, first + T)) for b, own in enumerate(given) if own is not None]
    if not any(len(piece.positions) for _, piece in pieces):
        return ()
    is_given = np.zeros(shape, bool)
    rows = np.zeros((B, T, program.config.hidden), jnp.dtype(program.dtype))
    for b, piece in pieces:
        is_given[b, piece.positions], rows[b, piece.positions] = True, piece.rows
    sharding = NamedSharding(program.mesh, BY_ROW)
    return (Embedded(to_mesh(is_given, sharding), to_mesh(rows, sharding)),)


def check_rows(given: GivenRows, lengths: np.ndarray, D: int) -> None:
    """Raise one `RequestError` with everything that is wrong with the rows of prompts of these
    lengths.
    """
    problems = []
    if len(given) not in (0, len(lengths)):
        problems.append(f"rows are given for {len(given)} prompts, tokens for {len(lengths)}")
    for b, own in enumerate(given[: len(lengths)]):
        if own is not None:
            problems += [f"rows of prompt {b}: {p}" for p in _problems(own, int(lengths[b]), D)]
    if problems:
        raise RequestError("\n".join(problems))


def _problems(own: PromptRows, length: int, D: int) -> Iterator[str]:
    at, shape = own.positions, own.rows.shape
    if at.dtype.kind not in "iu" or shape != (len(at), D):
        yield f"{len(at)} positions ({at.dtype}) need {len(at)} rows of {D}, got shape {shape}"
    elif len(at) and (at[0] < 0 or at[-1] >= length or (np.diff(at) < 1).any()):
        yield f"positions must ascend within its {length} tokens"
