"""Progress bars on standard error: shown on a terminal, once the work has lasted a second."""

import shutil
import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from .waiting import TELLER


def terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal, clamped: the environment may say 0, or no number."""
    columns, lines = shutil.get_terminal_size()
    return min(max(columns, 20), 500), min(max(lines, 5), 500)


class Progress:
    """A bar over `total` bytes or tokens. `show=None` shows it on a terminal and after a second,
    `True` always.
    """

    def __init__(self, what: str, total: int, unit: str = "tokens", show: bool | None = None):
        bytes_ = (DownloadColumn(), TransferSpeedColumn())
        columns = bytes_ if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
        width, height = terminal_size()
        console = Console(file=sys.stderr, width=width, height=height)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total)
        self._wanted = console.is_terminal if show is None else show
        self._wait = 1.0 if show is None else 0.0
        self._begun = time.monotonic()
        self._shown = False

    def __enter__(self) -> "Progress":
        return self

    def advance(self, amount: int) -> None:
        """Add `amount` bytes or tokens to the bar."""
        self._bar.advance(self._task, amount)
        if self._wanted and not self._shown and time.monotonic() - self._begun >= self._wait:
            TELLER.bars += 1
            TELLER.clear()
            self._bar.start()
            self._shown = True

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._bar.stop()
            TELLER.bars -= 1
