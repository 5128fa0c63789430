"""What the process waits for, told on standard error once it has lasted a second: on a terminal by
a moving sign with the seconds so far, wiped at the end; elsewhere by one line.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

DELAY = 1.0  # seconds before a wait is told
PERIOD = 0.125  # seconds between two signs
_SIGNS = "|/-\\"


@dataclasses.dataclass(eq=False)
class _Wait:
    text: Callable[[], str]
    begun: float
    is_told: bool = False  # by a line


class Teller:
    """The waits of this process, of which the latest is told, by a thread of its own."""

    def __init__(self) -> None:
        self.is_silent = False  # for all processes but the first, and for tests
        self.bars = 0  # progress bars on the screen: they show that work goes on
        self._waits: list[_Wait] = []
        self._width = 0  # of the sign on the screen
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, text: Callable[[], str]) -> _Wait:
        """A wait begins."""
        wait = _Wait(text, time.monotonic())
        with self._lock:
            self._waits.append(wait)
            if self._thread is None and not self.is_silent:
                self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
                self._thread.start()
        return wait

    def end(self, wait: _Wait) -> None:
        """A wait ends: its sign is wiped before anything else is written."""
        with self._lock:
            self._waits.remove(wait)
            self._wipe()

    def clear(self) -> None:
        """Wipe the sign: something else is written now."""
        with self._lock:
            self._wipe()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD)
            with self._lock:
                if not self._waits:
                    self._thread = None
                    return
                with contextlib.suppress(OSError, ValueError):  # a stream that was closed
                    self._tell(self._waits[0].begun, self._waits[-1])

    def _tell(self, begun: float, wait: _Wait) -> None:
        now = time.monotonic()
        if self.is_silent or sys.stderr is None or now - begun < DELAY:
            return
        if not is_terminal():
            if not wait.is_told and now - wait.begun >= DELAY:
                wait.is_told = True
                print(f"kimi-jax: {wait.text()}", file=sys.stderr, flush=True)
        elif not self.bars:
            seconds = now - wait.begun
            line = f"{_SIGNS[int(now / PERIOD) % 4]} {wait.text()}, {seconds:.0f} s"
            line = line[: max(1, shutil.get_terminal_size().columns - 1)]
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)

    def _wipe(self) -> None:
        if self._width:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r" + " " * self._width + "\r")
                sys.stderr.flush()
            self._width = 0


TELLER = Teller()


@contextlib.contextmanager
def waiting(text: str | Callable[[], str]) -> Iterator[None]:
    """A block in which the process waits for `text`, which may change, told where it lasts."""
    wait = TELLER.begin(text if callable(text) else lambda: text)
    try:
        yield
    finally:
        TELLER.end(wait)


def is_terminal() -> bool:
    """Whether standard error is a terminal on which a line can be written over."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def end_process(code: int) -> NoReturn:
    """End this process at once, its output flushed. Python's own end would run into threads of XLA
    that still compile, and crash.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
