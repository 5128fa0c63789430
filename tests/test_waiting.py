"""What the process waits for is told after a second: moving on a terminal, one line elsewhere."""

import io
import time

import pytest

from kimi_jax import waiting as module
from kimi_jax.waiting import Teller


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


@pytest.fixture
def teller(monkeypatch):
    """One that tells after a twentieth of a second."""
    monkeypatch.setattr(module, "DELAY", 0.05)
    monkeypatch.setattr(module, "PERIOD", 0.01)
    monkeypatch.setenv("COLUMNS", "30")
    return Teller()


def told(teller, monkeypatch, stream, seconds=0.2):
    monkeypatch.setattr("sys.stderr", stream)
    outer = teller.begin(lambda: "loading")
    inner = teller.begin(lambda: "compiling (first time; kept in /a/folder)")
    time.sleep(seconds)
    teller.end(inner)
    teller.end(outer)
    return stream.getvalue()


def test_a_line_in_a_log(teller, monkeypatch):
    line = "kimi-jax: compiling (first time; kept in /a/folder)\n"
    assert told(teller, monkeypatch, io.StringIO()) == line


def test_a_moving_sign_on_a_terminal(teller, monkeypatch):
    signs = told(teller, monkeypatch, Terminal()).split("\r")
    assert signs[0] == "" and signs[-1] == "" and signs[-2] == " " * 29  # wiped
    assert len({sign[0] for sign in signs[1:-2]}) > 1  # it moves
    assert {sign[1:] for sign in signs[1:-2]} == {" compiling (first time; kept"}


def test_a_terminal_that_cannot_go_back_gets_a_line(teller, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert told(teller, monkeypatch, Terminal()).count("\n") == 1


def test_nothing_is_told_of_a_short_wait_nor_beside_a_bar(teller, monkeypatch):
    assert told(teller, monkeypatch, io.StringIO(), 0.0) == ""
    teller.bars = 1
    assert told(teller, monkeypatch, Terminal()) == ""
    closed = Terminal()
    closed.close()
    teller.bars = 0
    monkeypatch.setattr("sys.stderr", closed)
    wait = teller.begin(lambda: "loading")
    time.sleep(0.1)
    teller.end(wait)
