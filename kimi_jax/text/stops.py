"""Text from a reply's tokens as they come, up to the first stop string. Knows no arrays."""

from collections.abc import Sequence

from .tokenizer import Tokenizer


class StopStrings:
    """Searches text that comes in pieces for strings that end it.

    The stop string that is complete first in the text decides, of several complete at once the one
    that begins first: the result is the same however the text was split into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""  # the end of the text, which may turn into a stop string
        self._ignored = 0  # stop strings that end within these first held characters do not count
        self.found = False

    def push(self, piece: str, armed: bool = True) -> str:
        """The text that is certain after one more piece; `found` turns true once a stop string is
        complete, which is left out with all that follows. One that is complete before `armed` does
        not count.
        """
        if self.found:
            return ""
        self._held += piece
        if not armed:
            self._ignored = len(self._held)
        elif matches := [match for stop in self._stops if (match := self._match(stop))]:
            self.found = True
            return self._held[: min(matches)[1]]
        return self._release(max((overlap(self._held, stop) for stop in self._stops), default=0))

    def finish(self) -> str:
        """What is still held once no more text comes."""
        return "" if self.found else self._release(0)

    def _match(self, stop: str) -> tuple[int, int] | None:
        """(end, start) of the first occurrence that counts."""
        start = self._held.find(stop, max(0, self._ignored + 1 - len(stop)))
        return None if start < 0 else (start + len(stop), start)

    def _release(self, keep: int) -> str:
        """The held text but for its last `keep` characters."""
        count = len(self._held) - keep
        ready, self._held = self._held[:count], self._held[count:]
        self._ignored = max(0, self._ignored - count)
        return ready


class TextBuilder:
    """Text from the tokens of one reply: whole characters only, held back while it may still turn
    into a stop string. Stop strings that are complete before token number `min_tokens` do not
    count. Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int = 0):
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._count = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
        self._count += 1
        return self._stops.push(self._decoder.push(token), self._armed) if self._decoder else ""

    def finish(self) -> str:
        """What is still held once no more tokens come."""
        if self._decoder is None or self.stopped:
            return ""
        return self._stops.push(self._decoder.finish(), self._armed) + self._stops.finish()

    @property
    def _armed(self) -> bool:
        return self._count >= self._min_tokens


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop` and is not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
