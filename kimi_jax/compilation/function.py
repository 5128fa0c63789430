"""Functions on a mesh that are compiled ahead of their first call.

XLA compiles in a thread, so that a wait for it can be shown, and interrupted by Ctrl-C; programs
that are needed later can be compiled meanwhile. What is compiled is kept on disk (`store`).
"""

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh
from jax.stages import Compiled

from ..parallel.on_mesh import own_mesh
from ..waiting import end_process, waiting
from .cache import find_cache
from .store import Store, settings, with_settings

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")  # which only `jit` obeys
_functions: "weakref.WeakSet[CompiledFunction]" = weakref.WeakSet()
_running: set[threading.Thread] = set()
_waited = threading.local()
_hits = threading.local()


def waited_seconds() -> float:
    """Seconds that this thread has waited for programs: traced, compiled or read."""
    return getattr(_waited, "seconds", 0.0)


def running_seconds() -> float:
    """`time.perf_counter` without the seconds of `waited_seconds`."""
    return time.perf_counter() - waited_seconds()


def clear_programs() -> None:
    """Drop every compiled program of this process, as `jax.clear_caches` does with JAX's own."""
    for function in list(_functions):
        function.clear()


def is_compiling() -> bool:
    """Whether a thread compiles. A process that ends by Python's own means then crashes."""
    return any(thread.is_alive() for thread in list(_running))


class CompiledFunction:
    """`jax.jit(function, **options)`, compiled ahead, one program for each shape of its arguments.

    `name` is what users read; `identity` and it say what the function is: equal ones must compute
    the same. `abstract` gives the shapes, types and shardings of arguments that a program is
    compiled for; the first `fixed` arguments have one shape only. A call with other types or
    shardings, tracers among them, goes to JAX's own `jit`.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        identity: Any,
        mesh: Mesh,
        abstract: Callable[..., tuple],
        fixed: int = 0,
        **options: Any,
    ):
        self.name, self.identity, self.mesh = name, identity, mesh
        self.abstract, self.fixed = abstract, fixed
        self.jitted = jax.jit(function, **options)
        self.trace, self.lower = self.jitted.trace, self.jitted.lower
        self._function, self._options = function, options
        self.jit_calls = 0  # calls that went to JAX's own `jit`
        self._compilations: dict[tuple, _Compilation] = {}
        _functions.add(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run the program for these arguments, once it is there."""
        if any(getattr(jax.config, name) for name in _DEBUGGING):
            return self._call_jitted(arguments)
        compilation = self._compilation(arguments)
        if compilation is None:
            return self._call_jitted(arguments)
        compiled = compilation.result()
        try:
            return compiled(*arguments)
        except (TypeError, ValueError):  # other types or shardings: nothing has run
            return self._call_jitted(arguments)

    def prepare(self, *arguments: Any) -> None:
        """Compile for these arguments, or for arrays of their shapes, in the background. Does
        nothing where several processes must compile in one order.
        """
        compilation = self._compilation(arguments) if jax.process_count() == 1 else None
        if compilation is not None:
            compilation.start()

    @property
    def program_count(self) -> int:
        """Programs compiled so far, but for those of JAX's own `jit`."""
        return len(self._compilations)

    def clear(self) -> None:
        """Drop the programs."""
        self._compilations.clear()

    def named(self, name: str) -> Any:
        """The jitted function under another name: JAX's cache tells programs apart by it."""

        def function(*arguments: Any) -> Any:
            return self._function(*arguments)

        function.__name__ = function.__qualname__ = name
        return jax.jit(function, **self._options)

    def _call_jitted(self, arguments: tuple) -> Any:
        self.jit_calls += 1
        with own_mesh(self.mesh):
            return self.jitted(*arguments)

    def _compilation(self, arguments: tuple) -> "_Compilation | None":
        """The program for these arguments, which may not have begun; None for new tracers."""
        leaves, tree = jax.tree.flatten(arguments[self.fixed :])
        key = (tree, settings(), *[(x.shape, x.dtype) for x in leaves])
        found = self._compilations.get(key)
        if found is not None and not found.has_failed:
            return found
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
            return None
        self._compilations[key] = made = _Compilation(self, arguments)
        return made


class _Compilation:
    """One program of a function: read from disk, or traced and compiled, in a thread."""

    def __init__(self, function: CompiledFunction, arguments: tuple):
        self._function, self._settings = function, settings()
        self._shapes = function.abstract(*arguments)
        self._text = "starting"
        self._compiled: Compiled | None = None
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error, and is worth another try."""
        return self._error is not None

    def start(self) -> None:
        """Begin, where it has not begun."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
                _running.add(self._thread)
                self._thread.start()

    def result(self) -> Compiled:
        """The program, once it is there. Raises what the compiler raised."""
        if not self._is_done.is_set():
            self.start()
            with _counted(), waiting(lambda: self._text):
                self._is_done.wait()
        if self._error is not None:
            raise self._error
        assert self._compiled is not None
        return self._compiled

    def _run(self) -> None:
        try:
            with with_settings(self._settings):
                self._compiled = self._make()
        except BaseException as error:
            self._error = error
        finally:
            self._shapes = ()
            self._is_done.set()
            _running.discard(threading.current_thread())

    def _make(self) -> Compiled:
        """The program that an earlier process kept, or a new one, which is kept.

        It has its key in its name, so that it is not in JAX's cache either: XLA cannot write again
        what it has read.
        """
        function, store = self._function, Store(self._function.mesh)
        place = find_cache()
        if not store.is_open:
            self._text = f"compiling {function.name} ({place})"
            return function.lower(*self._shapes).compile()
        key = store.key(function.name, function.identity, *_described(self._shapes))
        self._text = f"reading the program of {function.name} ({place})"
        if (found := store.get(key)) is not None:
            return found
        self._text = f"compiling {function.name} (first time; {place})"
        hits = _cache_hits()
        compiled = function.named(key).lower(*self._shapes).compile()
        if hits == _cache_hits():
            store.put(key, compiled)
        return compiled


def _described(shapes: tuple) -> Iterator[str]:
    """All that a program depends on in its arguments: their tree, shapes, types and shardings."""
    leaves, tree = jax.tree.flatten(shapes)
    yield str(tree)
    for x in leaves:
        yield f"{x.shape} {x.dtype} {x.sharding}"


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Counts the seconds of a block as `waited_seconds` of this thread."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _waited.seconds = waited_seconds() + time.perf_counter() - begun


def _count_hit(event: str, **_: Any) -> None:
    """Counts what JAX's own cache gives to this thread."""
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = _cache_hits() + 1


def _cache_hits() -> int:
    return getattr(_hits, "count", 0)


def _at_exit() -> None:
    """At once after an interrupt; otherwise once what compiles is compiled and kept."""
    if is_compiling() and getattr(sys, "last_type", None) is KeyboardInterrupt:
        end_process(130)
    for thread in list(_running):
        thread.join()


jax.monitoring.register_event_listener(_count_hit)
atexit.register(_at_exit)
