"""Ctrl-C in a pseudo-terminal: while programs are compiled, a command ends at once."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.usefixtures("heeds_interrupts")
CTRL_C = "\x03"
# The terminal sends signals to the session that it controls.
LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, tmp_path, *words):
        environment = {
            **os.environ,
            **{"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)},
            **{"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        }
        environment.pop("XLA_FLAGS", None)  # the compiler is to take its time
        self.screen = ""
        self._file, theirs = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        command = [sys.executable, "-c", LEAD, sys.executable, "-m", "kimi_jax", *words]
        self._process = subprocess.Popen(command, env=environment, **streams)
        os.close(theirs)

    def wait_for(self, pattern, seconds=120):
        """Read until the screen shows a pattern after what was waited for before."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline and self._read(), self.screen
        self.screen = self.screen[found.end() :]

    def type(self, text):
        os.write(self._file, text.encode())

    def end(self):
        """The exit code, once the command has ended; a signal's number is negative."""
        with contextlib.suppress(OSError):
            while self._read(5):
                pass
        os.close(self._file)
        return self._process.wait(60)

    def _read(self, patience=120):
        ready, _, _ = select.select([self._file], [], [], patience)
        text = os.read(self._file, 65536).decode(errors="replace") if ready else ""
        self.screen += text
        return text


def test_an_interrupted_compilation_ends_the_command(tmp_path):
    terminal = Terminal(tmp_path, "generate", "Alice was")
    terminal.wait_for(r"\r[|/\\-] compiling [^\r]*\(first time; kept in ")
    begun = time.monotonic()
    terminal.type(CTRL_C)
    assert terminal.end() == 130 and time.monotonic() - begun < 30
    assert "Traceback" not in terminal.screen
    assert not list(tmp_path.glob("prefill*"))


def test_a_chat_goes_on_after_an_interrupted_compilation_and_can_be_left(tmp_path):
    """The programs are compiled while a turn is typed; Python's own end would crash in them."""
    terminal = Terminal(tmp_path, "chat")
    terminal.wait_for(">")
    terminal.type("Who are you?\r")
    terminal.wait_for(r"\r[|/\\-] compiling ")
    terminal.type(CTRL_C)
    terminal.wait_for(r"\[interrupted\]")
    terminal.wait_for(">")
    begun = time.monotonic()
    terminal.type("/quit\r")
    assert terminal.end() == 0 and time.monotonic() - begun < 30
    assert "Traceback" not in terminal.screen
