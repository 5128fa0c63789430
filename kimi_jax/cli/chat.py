"""`kimi-jax chat`: hold a conversation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import CommandError
from .devices import check_folder, load_model, use_compilation_cache
from .options import SHIPPED, SHIPPED_MODEL, add_command, add_mesh, add_sampling, sampling_options
from .output import note

EXAMPLES = """\
  kimi-jax chat /path/to/checkpoint
  kimi-jax chat /path/to/checkpoint --system "Answer in one sentence." --temperature 0.6
  kimi-jax chat /path/to/checkpoint --no-thinking < questions.txt > answers.txt

Thinking is shown dimmed. /help lists what can be typed beside text: /reset, /stats, /quit. A line
that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn. Ctrl-C ends
a reply, and leaves at the prompt, as Ctrl-D does. Without a terminal each line of standard input is
a turn; answers go to standard output, thinking to standard error. The small model of the package
has read one book and no conversation: it goes on in the manner of that book."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    from ..generation.chat import EFFORTS, MAX_NEW_TOKENS, TEMPERATURE, TOP_P

    command = add_command(commands, "chat", run, "hold a conversation", EXAMPLES)
    add_mesh(command)
    add = command.add_argument
    add(
        "path",
        nargs="?",
        type=Path,
        default=SHIPPED,
        metavar="PATH",
        help=f"folder ({SHIPPED_MODEL})",
    )
    add("--system", metavar="TEXT", help="a system prompt")
    add(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the model think before it answers (on)",
    )
    add("--thinking-effort", choices=EFFORTS, help="tell the model how much to think (nothing)")
    add_sampling(command, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..generation.chat import Markup
    from ..text.tokenizer import Tokenizer
    from .terminal import Conversation

    if options.processes and options.processes > 1:
        raise CommandError(
            "chat reads what one person types: with several processes use Model.chat"
        )
    settings = sampling_options(options)
    check_folder(options.path)
    has_text = Tokenizer.is_in(options.path)
    Markup.of(Tokenizer.from_folder(options.path) if has_text else None)  # before weights are read
    use_compilation_cache()
    model = load_model(options.path, options)
    if options.path == SHIPPED:
        note("note: the small model of the package has read one book and no conversation")
    settings |= {"thinking": options.thinking, "thinking_effort": options.thinking_effort}
    Conversation(model, options.system, **settings).run()
    return 0
