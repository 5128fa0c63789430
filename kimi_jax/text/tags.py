"""Tags of a reply: the text between an <|open|> or <|close|> and its <|sep|>. Knows no arrays."""

import dataclasses
import re

from ..errors import shown
from .chat_format import unescape

MAX_HEADER = 8_192  # characters of a tag; longer ones are left out
TOO_LONG = f"a tag of more than {MAX_HEADER:,} characters was left out"
DAMAGED = "a special token stands in it where none belongs"
CHANNELS = ("think", "response", "tools")
ATTRIBUTES = {  # of every tag that a reply may hold
    "message": (),
    **dict.fromkeys(CHANNELS, ()),
    "call": ("tool", "index"),
    "argument": ("key", "type"),
    "json": ("type",),
}
_NAME = re.compile(r"\w*")
_ATTRIBUTE = re.compile(r'(?<!\s)\s+([\w-]+)="([^"]*)"')
_HEADER = re.compile(r'\w*(?:\s+[\w-]+="[^"]*")*')
_BEGUN_ATTRIBUTE = re.compile(r'\s*(?:([\w-]+)(=(?:"[^"]*)?)?)?')


@dataclasses.dataclass(frozen=True)
class Header:
    """A parsed tag: its name, its attributes, and what is wrong with it."""

    name: str
    attributes: dict[str, str]
    problem: str | None = None

    @classmethod
    def of(cls, given: "HeaderText") -> "Header":
        """Parse the text between a marker and <|sep|>."""
        text = str(given).strip()
        name = _tag_name(text)
        pairs = _ATTRIBUTE.findall(text, len(name))
        attributes = {key: unescape(value) for key, value in pairs}
        if given.is_damaged:
            return cls(name, attributes, DAMAGED)
        if not _HEADER.fullmatch(text):
            return cls(name, attributes, f"a malformed tag: {shown(text)}")
        if len(attributes) < len(pairs):
            return cls(name, attributes, f"a tag with an attribute twice: {shown(text)}")
        return cls(name, attributes)


class HeaderText:
    """The text since an <|open|> or <|close|>, of bounded length."""

    def __init__(self, opens: bool):
        self.opens = opens
        self.is_long = False
        self.is_damaged = False  # a special token stands in it
        self._parts: list[str] = []
        self._length = 0

    def add(self, text: str) -> None:
        """Add text, which is dropped where the tag gets too long."""
        self._length += len(text)
        self.is_long = self._length > MAX_HEADER
        if self.is_long:
            self._parts.clear()
        else:
            self._parts.append(text)

    def __str__(self) -> str:
        return "".join(self._parts)

    @property
    def loss(self) -> str | None:
        """What is left out where no <|sep|> ends the tag; None where nothing stands in it."""
        if self.is_long:
            return TOO_LONG
        return f"a tag without end was left out: {shown(str(self))}" if str(self).strip() else None

    @property
    def is_unfinished(self) -> bool:
        """Whether it may be the beginning of a tag and nothing else."""
        text = str(self).lstrip()
        name = _tag_name(text)
        end = len(name)
        if end == len(text):
            return any(tag.startswith(name) for tag in ATTRIBUTES) and not self.is_long
        if not self.opens or "=" in text[end:]:
            return False  # an attribute has begun: of a call, or lost with what stands in it
        while attribute := _ATTRIBUTE.match(text, end):
            end = attribute.end()
        begun = _BEGUN_ATTRIBUTE.fullmatch(text, end)
        keys = ATTRIBUTES.get(name)
        if begun is None or keys is None:
            return False
        key, value = begun[1] or "", begun[2]
        return key in keys if value else any(name.startswith(key) for name in (*keys, ""))


def _tag_name(text: str) -> str:
    name = _NAME.match(text)
    return name[0] if name else ""
