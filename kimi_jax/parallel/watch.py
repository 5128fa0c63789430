"""Several processes end together: where one fails, is interrupted or dies, the others end too.

A collective waits for every process, inside XLA where no Python exception reaches it. So every
process has a thread that watches the others, through the key-value store that `jax.distributed`
keeps on process 0, and, on the same machine, through the operating system. It ends its own process
where another has ended, with a message and that one's exit code.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the only way to JAX's key-value store
from jax.extend.backend import clear_backends

from ..errors import printable, shortened

PERIOD = 0.25  # seconds between two looks at the other processes
GRACE = 2.0  # seconds in which a process may end by itself, as where all fail alike
LEFT_PATIENCE = 15.0  # seconds of a wait for a process that has left without an error
PATIENCE = 5.0  # seconds that an ending process waits for the others to end
_ENDINGS = "kimi_jax/endings/"
_PIDS = "kimi_jax/pids/"
_LEFT = "kimi_jax/left/"


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a process ended: its number, its exit code and the reason, as a clause of a sentence."""

    process: int
    code: int
    reason: str


def watch_processes() -> None:
    """Watch the other processes of `jax.distributed` from now on. Does nothing where there is one
    process, or where they are watched already.
    """
    global _watch
    client = distributed.global_state.client
    if client is None or distributed.global_state.num_processes == 1:
        return
    with _lock:
        if _watch is None or _watch.client is not client:
            _watch = Watch(client)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A wait for what all processes compute together. It ends this process where it lasts and
    another process has left without an error, as by `sys.exit`.
    """
    if _watch is None:
        yield
        return
    thread = threading.get_ident()
    _watch.waits[thread] = time.monotonic()
    try:
        yield
    finally:
        _watch.waits.pop(thread, None)


def end_all_processes(code: int, reason: str) -> None:
    """End this process with an exit code, once the others have been told to end with it. Returns
    where no other process is watched.
    """
    if _watch is not None and not _watch.stopped:
        _watch.announce(code, reason)
        _watch.leave()


class Peers:
    """What the processes tell each other, and what the operating system says of them."""

    def __init__(self, client: Any, process: int, count: int) -> None:
        self.client = client
        self.process = process
        self.count = count
        self.pidfds: dict[int, int] = {}
        self.tell(_PIDS, json.dumps([_machine(), os.getpid()]))

    def endings(self) -> list[Ending]:
        """The endings of the other processes."""
        endings = [Ending(*json.loads(text)) for _, text in self._get(_ENDINGS)]
        return [ending for ending in endings if ending.process != self.process]

    def left(self) -> set[int]:
        """The other processes that ended without an error, or are about to."""
        processes = {int(key.removeprefix(_LEFT)) for key, _ in self._get(_LEFT)}
        return processes - {self.process}

    def alive(self) -> bool:
        """Whether another process neither has ended nor is about to."""
        ended = {ending.process for ending in self.endings()} | self.dead()
        return len(ended) < self.count - 1

    def dead(self) -> set[int]:
        """The other processes of this machine that no longer exist."""
        if len(self.pidfds) < self.count - 1:
            for key, text in self._get(_PIDS):
                self._open_pid(int(key.removeprefix(_PIDS)), *json.loads(text))
        ready, _, _ = select.select(list(self.pidfds.values()), [], [], 0)
        return {process for process, file in self.pidfds.items() if file in ready}

    def _open_pid(self, process: int, machine: str | None, pid: int) -> None:
        known = process == self.process or process in self.pidfds
        if known or machine is None or machine != _machine():
            return
        with contextlib.suppress(OSError):
            self.pidfds[process] = os.pidfd_open(pid)

    def tell(self, folder: str, text: str) -> None:
        """Write what the others read under this process' number."""
        with contextlib.suppress(RuntimeError):  # process 0 is gone, and JAX ends this process
            self.client.key_value_set(f"{folder}{self.process}", text, allow_overwrite=True)

    def _get(self, folder: str) -> list[tuple[str, str]]:
        try:
            return self.client.key_value_dir_get(folder)
        except RuntimeError:  # likewise
            return []


class Watch:
    """The thread that watches, and the hooks that tell it how this process ends."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.process = distributed.global_state.process_id
        self.count = distributed.global_state.num_processes
        self.peers = Peers(client, self.process, self.count)
        self.ending: Ending | None = None  # of this process
        self.waits: dict[int, float] = {}  # thread -> when it began to wait for other processes
        self._closing = threading.Event()
        self._following = False  # ends because another process has ended
        self._signals, self._wakeup = socket.socketpair()
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="kimi_jax watch", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether `jax.distributed` was shut down."""
        return distributed.global_state.client is not self.client

    def announce(self, code: int, reason: str) -> None:
        """Tell the other processes that this one ends; the first reason counts."""
        with _lock:
            if self.ending is not None:
                return
            self.ending = Ending(self.process, code, shortened(printable(reason), 500))
        self.peers.tell(_ENDINGS, json.dumps(dataclasses.astuple(self.ending)))

    def leave(self) -> NoReturn:
        """End this process, as announced, after the others or after `PATIENCE` seconds. Nothing of
        `jax.distributed` is shut down: that would wait for processes that are gone.
        """
        assert self.ending is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.peers.alive():
            time.sleep(PERIOD)
        for process in () if self._following else self._died():
            self._say(Ending(process, 1, "died"))
        if self.process == 0:  # JAX aborts those that still run when its store goes
            time.sleep(3 * PERIOD)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(self.ending.code)

    # The thread

    def _run(self) -> None:
        while not self.stopped:
            for number in self._wait():
                self._on_signal(number)
            cause = self._cause()
            if cause is not None:
                self._follow(cause)

    def _wait(self) -> bytes:
        """The signals of the next `PERIOD`, which ends early where one arrives."""
        sources = [self._signals, *self.peers.pidfds.values()]
        ready, _, _ = select.select(sources, [], [], PERIOD)
        if ready and self._signals not in ready:
            self._closing.wait(PERIOD)
        return self._signals.recv(64) if self._signals in ready else b""

    def _cause(self) -> Ending | None:
        """Why this process has to end."""
        endings = self.peers.endings()
        if endings:
            return endings[0]
        for process in self._died():
            return Ending(process, 1, "died")
        now = time.monotonic()
        if any(now - since > LEFT_PATIENCE for since in list(self.waits.values())):
            for process in self.peers.left():
                return Ending(process, 1, "ended, and what is computed with it never will be")
        return None

    def _died(self) -> set[int]:
        """The other processes that ended without a word."""
        told = {ending.process for ending in self.peers.endings()}
        return self.peers.dead() - self.peers.left() - told

    def _follow(self, cause: Ending) -> None:
        """End because another process has ended, unless this one ends by itself just now."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._closing.is_set():
            if self.ending is not None or self.stopped:
                return
            time.sleep(PERIOD)
        if self.ending is None and not self.stopped:
            self._following = True
            self._say(cause)
            self.announce(cause.code, f"ended with process {cause.process}")
            self.leave()

    def _say(self, cause: Ending) -> None:
        text = f"process {cause.process} of {self.count} {cause.reason}"
        print(f"kimi_jax: {text}; process {self.process} ends with it", file=sys.stderr, flush=True)

    def _on_signal(self, number: int) -> None:
        """A signal reached this process, whose main thread may be waiting inside XLA."""
        if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
            self.announce(130, "was interrupted")
            self.leave()  # where the main thread, in which KeyboardInterrupt rises, does not
        if number == signal.SIGTERM and signal.getsignal(number) == self._on_sigterm:
            self._on_sigterm()

    # Hooks of the main thread

    def _catch_signals(self) -> None:
        """Let the thread know of signals at once; end at SIGTERM, which `jax.distributed` would
        take for a mere notice.
        """
        self._wakeup.setblocking(False)
        earlier = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if earlier != -1:  # an event loop's
            signal.set_wakeup_fd(earlier)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        self.announce(128 + signal.SIGTERM, "was terminated")
        self.leave()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """An exception that nothing has caught ends this process."""
        if self._following:
            time.sleep(PATIENCE)  # the error of a collective that another process has left
        if not self.stopped:
            if issubclass(kind, KeyboardInterrupt):
                self.announce(130, "was interrupted")
            else:
                self.announce(1, f"failed with {kind.__name__}: {error}")
        self._hook(kind, error, trace)

    def _at_exit(self) -> None:
        """This process ends. Without an error it waits, inside `jax.distributed.shutdown`, for the
        others, and is still watching; then the thread ends. One that asks JAX's store while Python
        takes itself down would abort the process.
        """
        if self.stopped:
            return
        if self.ending is not None:
            self.leave()
        for array in jax.live_arrays():
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()
        self.peers.tell(_LEFT, "")
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # JAX's own hook, which is next, raises it again
            clear_backends()  # before, as in JAX's hook: a backend may still use the store
            distributed.global_state.shutdown()
        if self.stopped:
            self._thread.join(PATIENCE)


def _machine() -> str | None:
    """What processes that see each other's ids have in common; None where that is not known."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


_lock = threading.Lock()
_watch: Watch | None = None
