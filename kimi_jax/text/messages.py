"""Input of a chat, checked: messages to turns, tools and options to text.

Nothing here raises: each function adds what is wrong to a list of problems, one line each.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ..errors import shown
from . import strict_json
from .images import PromptImages, SizedImage, is_image_part, read_image

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high", "max")
TOOL_CHOICES = ("auto", "required", "none")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")  # names in use for the same key
_KEYS = {
    "system": ("name", "tools"),
    "user": ("name",),
    "assistant": ("name", *_THINKING_KEYS, "tool_calls"),
    "tool": ("tool_call_id", "name"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call of an assistant's turn. `arguments`: values by name, or a text that is not the
    JSON of an object and is rendered as it stands.
    """

    id: str
    name: str
    arguments: dict[str, Any] | str


@dataclasses.dataclass(frozen=True)
class Turn:
    """A checked message: its place among the messages, and what is rendered of it."""

    place: str
    role: str
    parts: list[str | SizedImage]  # of its content, in order
    name: str | None = None
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    tools: str = ""  # that a system message declares, as JSON
    call_id: str | None = None  # the id of the call whose result this is
    index: int = 0  # of that call, from 1


def call_id(name: str, index: int) -> str:
    """The id of a reply's call number `index`, and of a call that was given without an id."""
    return f"{name}:{index}"


def either(names: Sequence[str]) -> str:
    """Names joined with commas and "or"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def read_turns(
    messages: Any,
    problems: list[str],
    may_end_in_calls: bool = False,
    images: PromptImages | None = None,
) -> list[Turn]:
    """The turns of a conversation, the results of tools in the order of their calls. Every call
    must have its result; with `may_end_in_calls` those of the last message need none. Images are
    read by `images`, or refused.
    """
    if not isinstance(messages, list | tuple) or not messages:
        problems.append(f"messages must be a list of at least one message, got {shown(messages)}")
        return []
    turns = [_read_turn(f"message {i}", m, problems, images) for i, m in enumerate(messages)]
    return _results_in_order([turn for turn in turns if turn], problems, may_end_in_calls)


def read_tools(tools: Any, place: str, problems: list[str]) -> str:
    """The tools as JSON, keys sorted so that equal tools give equal ids; empty without tools."""
    if tools is None or (isinstance(tools, list | tuple) and not tools):
        return ""
    if not isinstance(tools, list | tuple):
        problems.append(f"{place} must be a list of functions, got {shown(tools)}")
        return ""
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        at = f"{place.removesuffix('s')} {i}"
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            problems.append(f"{at} is not a function with a name: {shown(tool)}")
        elif name in functions:
            problems.append(f"{at}: another tool is named {shown(name)} too")
        elif _is_writable(tool, at, problems):
            wrapped = tool if "function" in tool else {"function": tool}
            functions[name] = {"type": "function", **wrapped}
    return compact_json(list(functions.values())) if functions else ""


def read_effort(effort: Any, problems: list[str]) -> str | None:
    """How much to think: one of `EFFORTS`, or None."""
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return effort
    problems.append(f"thinking_effort must be {either(EFFORTS)} or None, got {shown(effort)}")
    return None


def read_tool_choice(choice: Any, problems: list[str]) -> str | None:
    """What the model is told about calling tools: "required", "none", or None for nothing."""
    if choice is None or (isinstance(choice, str) and choice in TOOL_CHOICES):
        return None if choice == "auto" else choice
    problems.append(f"tool_choice must be {either(TOOL_CHOICES)}, got {shown(choice)}")
    return None


def read_response_format(given: Any, problems: list[str]) -> tuple[str, str] | None:
    """The kind of a response format and its schema as JSON (empty for json_object), or None where
    the answer is plain text.
    """
    kind = given.get("type") if isinstance(given, dict) else given
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return "json_object", ""
    if kind != "json_schema":
        problems.append(
            f"response_format must be {either(RESPONSE_FORMATS)}, or a dict with that type; "
            f"got {shown(given)}"
        )
        return None
    schema = _schema(given)
    if schema is None:
        problems.append(f"response_format: json_schema has no schema: {shown(given)}")
    elif _is_writable(schema, "response_format: the schema", problems):
        return "json_schema", compact_json(schema)
    return None


def compact_json(value: Any) -> str:
    """JSON without spaces and with sorted keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _schema(given: Any) -> Any:
    """The schema of a response format, which APIs nest differently."""
    outer = given.get("json_schema") if isinstance(given, dict) else None
    if not isinstance(outer, dict):
        return outer
    return outer.get("schema", outer.get("json_schema", outer))


def _is_writable(value: Any, place: str, problems: list[str]) -> bool:
    problem = strict_json.unwritable(value)
    if problem:
        problems.append(f"{place} cannot be written as JSON: {problem}")
    return problem is None


def _read_turn(
    place: str, message: Any, problems: list[str], images: PromptImages | None
) -> Turn | None:
    """A message read, or None where not even its role can be."""
    if not isinstance(message, dict):
        problems.append(f"{place} is not a dict with role and content: {shown(message)}")
        return None
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        problems.append(f"{place}: role must be {either(ROLES)}, got {shown(role)}")
        return None
    _refuse_other_keys(place, role, message, problems)
    if role == "system" and message.get("tools"):
        tools = read_tools(message["tools"], f"{place}: tools", problems)
        return Turn(place, role, [], tools=tools)
    turn = Turn(place, role, _read_parts(place, message, problems, images))
    if role == "tool":
        return dataclasses.replace(turn, call_id=_read_call_id(place, message, problems))
    turn = dataclasses.replace(turn, name=_read_name(place, message, problems))
    if role != "assistant":
        return turn
    return dataclasses.replace(
        turn,
        thinking=_read_thinking(place, message, problems),
        calls=_read_calls(place, message.get("tool_calls") or [], problems),
    )


def _refuse_other_keys(place: str, role: str, message: dict, problems: list[str]) -> None:
    allowed = ("role", "content", *_KEYS[role])
    for key, value in message.items():
        is_empty = value is None or (isinstance(value, str | list | dict) and not value)
        if key not in allowed and not is_empty:
            problems.append(f"{place}: a {role} message takes no {shown(key)}")


def _read_name(place: str, message: dict, problems: list[str]) -> str | None:
    name = message.get("name")
    if name is None or isinstance(name, str):
        return name
    problems.append(f"{place}: name must be text, got {shown(name)}")
    return None


def _read_call_id(place: str, message: dict, problems: list[str]) -> str:
    given = message.get("tool_call_id")
    if isinstance(given, str) and given:
        return given
    problems.append(f"{place}: tool_call_id must name the call, got {shown(given)}")
    return ""


def _read_parts(
    place: str, message: dict, problems: list[str], images: PromptImages | None
) -> list[str | SizedImage]:
    """The texts and images of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if content is None and message["role"] == "assistant":
        return []
    if not isinstance(content, list | tuple):
        problems.append(f"{place}: content must be text, got {shown(content)}")
        return []
    parts = [
        read_part(part, f"{place}: part {i}", images, problems) for i, part in enumerate(content)
    ]
    return [part for part in parts if part is not None]


def read_part(
    part: Any, place: str, images: PromptImages | None, problems: list[str]
) -> str | SizedImage | None:
    """A part of a content, text or an image; None, and a problem, where it is neither."""
    if is_image_part(part):
        return read_image(part, place, images, problems)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    problems.append(f"{place} is not text: {shown(kind if isinstance(kind, str) else part)}")
    return None


def _read_thinking(place: str, message: dict, problems: list[str]) -> str:
    given = [message[key] for key in _THINKING_KEYS if message.get(key)]
    if wrong := [value for value in given if not isinstance(value, str)]:
        problems.append(f"{place}: {_THINKING_KEYS[0]} must be text, got {shown(wrong[0])}")
        return ""
    if len(set(given)) > 1:
        problems.append(f"{place}: {' and '.join(_THINKING_KEYS)} mean the same, but differ")
    return given[0] if given else ""


def _read_calls(place: str, calls: Any, problems: list[str]) -> tuple[Call, ...]:
    """An assistant's tool calls; one without an id gets the id that a reply would give it."""
    if not isinstance(calls, list | tuple):
        problems.append(f"{place}: tool_calls must be a list, got {shown(calls)}")
        return ()
    read: dict[str, Call] = {}
    for i, call in enumerate(calls):
        at = f"{place}: call {i}"
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            problems.append(f"{at} is not a call of a named function: {shown(call)}")
            continue
        given_id = call.get("id") or call_id(name, i + 1)
        if not isinstance(given_id, str):
            problems.append(f"{at}: id must be text, got {shown(given_id)}")
        elif given_id in read:
            problems.append(f"{at}: another call has the id {shown(given_id)} too")
        else:
            arguments = _read_arguments(at, function.get("arguments"), problems)
            read[given_id] = Call(given_id, name, arguments)
    return tuple(read.values())


def _read_arguments(place: str, arguments: Any, problems: list[str]) -> dict[str, Any] | str:
    """Arguments by name, given as an object or as JSON; what is not an object stays text."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        return _arguments_of_text(arguments)
    if not _is_writable(arguments, f"{place}: arguments", problems):
        return {}
    return arguments if isinstance(arguments, dict) else json.dumps(arguments, ensure_ascii=False)


def _arguments_of_text(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        value = strict_json.parse(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _results_in_order(turns: list[Turn], problems: list[str], may_end_in_calls: bool) -> list[Turn]:
    """The turns with each run of results in the order of the calls before it, every call answered
    once.
    """
    ordered: list[Turn] = []
    asked: dict[str, tuple[int, Call]] = {}
    unanswered: dict[str, str] = {}  # id of a call to the place of its message
    results: list[Turn] = []

    def end_run() -> None:
        ordered.extend(sorted(results, key=lambda turn: turn.index))
        problems.extend(
            f"{place}: call {shown(given)} has no result" for given, place in unanswered.items()
        )
        results.clear()
        unanswered.clear()

    for turn in turns:
        if turn.role != "tool":
            end_run()
            ordered.append(turn)
            asked = {call.id: (i, call) for i, call in enumerate(turn.calls, start=1)}
            unanswered.update(dict.fromkeys(asked, turn.place))
        elif turn.call_id in unanswered:
            index, call = asked[turn.call_id]
            del unanswered[turn.call_id]
            results.append(dataclasses.replace(turn, name=call.name, index=index))
        elif turn.call_id in asked:
            problems.append(f"{turn.place}: call {shown(turn.call_id)} has a result already")
        elif turn.call_id:
            problems.append(
                f"{turn.place}: no call just before it has the id {shown(turn.call_id)}"
            )
    if may_end_in_calls and turns and turns[-1].calls:
        unanswered.clear()
    end_run()
    return ordered
