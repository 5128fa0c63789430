"""`kimi-jax chat`: hold a conversation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import CommandError
from ...generation.options import (
    CHAT_MAX_NEW_TOKENS,
    CHAT_TEMPERATURE,
    CHAT_THINKING_EFFORT,
    CHAT_TOP_P,
)
from ...text.messages import EFFORTS, RESPONSE_FORMATS, TOOL_CHOICES
from ...waiting import waiting
from ..devices import check_folder, load_model, use_compilation_cache
from ..options import (
    SHIPPED,
    OnceSwitch,
    add_command,
    add_mesh,
    add_model,
    add_sampling,
    model_folder,
    sampling_options,
    utf8_text,
)
from ..output import check_standard_input, note

EXAMPLES = """\
  kimi-jax chat /path/to/checkpoint
  kimi-jax chat /path/to/checkpoint --system "Answer in one sentence." --temperature 0.6
  kimi-jax chat /path/to/checkpoint --no-thinking < questions.txt > answers.txt
  kimi-jax chat /path/to/checkpoint --tools tools.json --tool-choice required
  kimi-jax chat /path/to/checkpoint --thinking-effort low --response-format schema.json

Thinking is shown dimmed. Tool calls are shown and not run; a format is asked for, not enforced.
/help lists what can be typed beside text: /system, /undo, /retry, /save, /image and more. A line
that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn. Ctrl-C ends
a reply; at the prompt it clears the line, and then leaves, as Ctrl-D does. Without a terminal each
line of standard input is a turn; answers go to standard output, thinking to standard error. The
small model of the package has read one book and no conversation: it goes on in the manner of that
book."""


def add(commands: Any) -> None:
    """Add the command and its options to a parser."""
    command = add_command(commands, "chat", run, "hold a conversation in the terminal", EXAMPLES)
    add = command.add_argument
    add_model(command)
    add("--system", type=utf8_text, metavar="TEXT", help="system prompt")
    help_thinking = "let the model think before it answers (on, but for the small model)"
    add("--thinking", action=OnceSwitch, help=help_thinking)
    efforts = (*EFFORTS, "unsaid")
    help_effort = f"tell the model how much to think ({CHAT_THINKING_EFFORT})"
    add("--thinking-effort", choices=efforts, default=CHAT_THINKING_EFFORT, help=help_effort)
    add("--tools", type=Path, metavar="FILE", help="declare tools: a JSON list of functions")
    add("--tool-choice", choices=TOOL_CHOICES, help="whether it must or must not call tools (auto)")
    help_format = "ask for JSON: json_object, or a file that holds a JSON schema (text)"
    add("--response-format", default="text", metavar="FORMAT", help=help_format)
    add_sampling(command, CHAT_MAX_NEW_TOKENS, CHAT_TEMPERATURE, CHAT_TOP_P)
    command.set_defaults(seed=None)  # drawn, and told
    add_mesh(command)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ...text.chat_format import render
    from ...text.tokenizer import Tokenizer
    from .terminal import Conversation

    if options.processes and options.processes > 1:
        raise CommandError(
            "chat reads what one person types: with several processes use Model.chat"
        )
    check_standard_input()
    settings = sampling_options(options)
    folder = model_folder(options)
    check_folder(folder)
    wishes = _wishes(options, folder)
    tokenizer = Tokenizer.from_folder(folder) if Tokenizer.is_in(folder) else None
    greeting = [{"role": "system", "content": options.system or ""}]
    render(tokenizer, greeting, **wishes)  # what cannot be is refused before weights are read
    with waiting("loading the model"):
        use_compilation_cache()
        model = load_model(folder, options)
    if folder == SHIPPED:
        note("note: the small model of the package has read one book and no conversation")
    Conversation(model, options.system, **settings, **wishes).run()
    return 0


def _wishes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the model is told beside the conversation."""
    from .terminal import read_json_file

    response_format = options.response_format
    if response_format not in RESPONSE_FORMATS:
        schema = read_json_file(response_format)
        response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {
        "tools": read_json_file(options.tools) if options.tools else None,
        "thinking": folder != SHIPPED if options.thinking is None else options.thinking,
        "thinking_effort": None if options.thinking_effort == "unsaid" else options.thinking_effort,
        "tool_choice": options.tool_choice,
        "response_format": response_format,
    }
