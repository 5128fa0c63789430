"""Where a conversation is written: on a terminal all of it, thinking and remarks dimmed; a file or
a pipe gets the answers alone, and standard error the rest.
"""

import re

from rich.cells import cell_len
from rich.console import Console

from ..output import console

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Words:
    """Text in pieces, with a line break before a word that would pass the edge of the screen. The
    word at the end of a piece is held back: the next piece may go on with it.
    """

    def __init__(self, width: int) -> None:
        self._width, self._column, self._word = width, 0, ""

    def push(self, text: str) -> str:
        """The text that can be written now."""
        written = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part.isspace():
                written += [self.flush(), part]
                self._column = 0 if part == "\n" else self._column + cell_len(part)
            else:
                self._word += part
        return "".join(written)

    def flush(self) -> str:
        """The word that was held back."""
        word, self._word = self._word, ""
        width = cell_len(word)
        is_broken = self._column > 0 and self._column + width >= self._width > width
        self._column = width if is_broken else (self._column + width) % self._width
        return f"\n{word}" if is_broken else word


class Screen:
    """Where answers and remarks are written."""

    def __init__(self) -> None:
        self._out = console()
        self.is_terminal = self._out.is_terminal
        err = console(stderr=True)
        self._aside = self._out if self.is_terminal else err
        self._words, self._style = Words(self._out.width), None

    def answer(self, text: str) -> None:
        """A piece of an answer."""
        self._write_words(self._out, text, None)

    def aside(self, text: str) -> None:
        """A piece of thinking."""
        self._write_words(self._aside, text, "dim")

    def remark(self, text: str) -> None:
        """A remark of complete lines, if any."""
        self._write(self._out, self._words.flush(), self._style)
        if text:
            self._write(self._aside, f"{text}\n", "dim")

    def end_answer(self) -> None:
        """Ends the line of an answer."""
        self._write_words(self._out, "\n", None)

    def _write_words(self, console: Console, text: str, style: str | None) -> None:
        if not console.is_terminal:
            return self._write(console, text, style)
        if style != self._style:
            self._write(console, self._words.flush(), self._style)
            self._style = style
        self._write(console, self._words.push(text), style)

    def _write(self, console: Console, text: str, style: str | None) -> None:
        if console.is_terminal:
            text = _CONTROLS.sub("\ufffd", text)  # what a model writes must not steer a terminal
        with console.capture() as captured:  # rich would end the program where a pipe is closed
            console.print(text, end="", style=style, soft_wrap=True)
        console.file.write(captured.get())
        console.file.flush()
