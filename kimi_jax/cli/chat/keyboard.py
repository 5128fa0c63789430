"""What is typed or piped into a conversation, line by line."""

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ChatError


class Keyboard:
    """Lines of standard input. Where they are typed and prompt_toolkit is installed (the extra
    `chat`) they can be edited, have a history, and a paste of several lines is one turn; otherwise
    `input` reads them, with readline where Python has it.
    """

    def __init__(self, is_typed: bool) -> None:
        self._is_typed = is_typed
        self._was_interrupted = False
        self._editor: Any = None
        if is_typed and sys.stdin is sys.__stdin__ and find_spec("prompt_toolkit"):
            self._editor = _editor()
        elif is_typed and find_spec("readline"):
            importlib.import_module("readline")  # with it, input() has a history

    def line(self, prompt: str) -> str | None:
        """The next line; None at the end of the input. Ctrl-C clears a line, and raises
        KeyboardInterrupt where nothing was typed since the one before.
        """
        while True:
            try:
                read = self._editor.prompt if self._editor else input
                line = read(prompt if self._is_typed else "")
                self._was_interrupted = False
                return line
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                raise ChatError(f"the input is not text: {error}") from error
            except KeyboardInterrupt:
                if self._was_interrupted or self._editor:
                    raise
                self._was_interrupted = True
                print()


def _editor() -> Any:
    """prompt_toolkit's line editor, its history kept in the user's state folder."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c")
    def clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "kimi_jax" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
    except OSError:
        return PromptSession(history=InMemoryHistory(), key_bindings=keys)
    return PromptSession(history=FileHistory(str(file)), key_bindings=keys)
