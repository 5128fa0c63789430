"""Which implementation of each hard operation a model runs, by the names of the operations' tables.

To add one: write it in the operation's module, give it a name in the table there, and hold it
against the definition in the operation's tests.
"""

import dataclasses
from collections.abc import Callable, Mapping

from ..numerics import is_whole
from . import indexer, kda, mla
from .attention import rollback
from .experts import dispatch
from .step import ImplementationNames

TABLES: Mapping[str, Mapping[str, Callable]] = {
    "kda": kda.IMPLEMENTATIONS,
    "mla": mla.IMPLEMENTATIONS,
    "moe": dispatch.IMPLEMENTATIONS,
    "transport": dispatch.TRANSPORTS,
    "rollback": rollback.ROLLBACKS,
    "select": indexer.SELECTIONS,
}


@dataclasses.dataclass(frozen=True)
class Implementations(ImplementationNames):
    """The implementation of each hard operation: a plain definition or a fast one. They agree;
    tests hold them to it. Raises one ValueError with every name that no table has.

    The fast ones of attention and experts loop as often as the data says and have no gradient:
    training uses `TRAINING`.
    """

    def __post_init__(self) -> None:
        problems = [
            f"{operation} must be one of {', '.join(table)}, got {getattr(self, operation)!r}"
            for operation, table in TABLES.items()
            if getattr(self, operation) not in tuple(table)
        ]
        if self.chunk is not None and not is_whole(self.chunk, 1):
            problems.append(f"chunk must be a positive whole number, got {self.chunk!r}")
        if problems:
            raise ValueError("\n".join(problems))


def fast_on(platform: str) -> Implementations:
    """The fast implementations for devices of a platform."""
    if platform == "cpu":
        return Implementations()
    return Implementations(kda="transitions", mla="static", moe="slots", transport="ragged")


DEFINITIONS = Implementations(kda="recurrent", mla="expanded", moe="dense", rollback="checkpoints")
TRAINING = Implementations(mla="expanded", moe="dense", chunk=16, select="teach")
