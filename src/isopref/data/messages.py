"""The fields of a record: text, messages with their roles, tools, weight. Each is read strictly or refused.

Owns roles and what counts as a message. Does not know how fields make a pair: see shapes.
"""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

Message = dict[str, Any]  # role and content; a template may also read tool_calls, name, ...
Turns = str | list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}
WRITTEN = re.compile(r"\s*\[?\s*\{\s*[\"']")
WRITTEN_KEYS = tuple(
    tuple(re.compile(rf"[\"']{key}[\"']\s*:") for key in keys) for keys in (("role", "content"), ("from", "value"))
)
STRING_OR_GAP = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\}\s+\{""")


class DefectError(Exception):
    """(reason, what): why a record gives no pair. Whoever knows the record's origin makes it a BadPairError."""


class WrongColumnError(DefectError):
    """A value that shows that a column is not what it was taken for: to leave out the record would not help."""


def kind(value: Any) -> str:
    """What a field holds: "absent", "text", "messages", or the name of its Python type."""
    if value is None:
        return "absent"
    if isinstance(value, str):
        return "text"
    items = [value] if isinstance(value, dict) else value
    if isinstance(items, list) and all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items):
        return "messages"
    return type(value).__name__


def is_written(text: str) -> bool:
    """Whether a text looks like messages that were written as text."""
    return WRITTEN.match(text) is not None and any(all(key.search(text) for key in keys) for keys in WRITTEN_KEYS)


def parse_written(text: str) -> list[Any] | dict[str, Any] | None:
    """The messages in such a text: JSON, or what Python or numpy print, as pandas writes to CSV. None: not messages."""
    if not is_written(text):
        return None
    value = _parse(text)
    if value is text:
        # numpy sets no comma between objects; in a string the same characters stay.
        value = _parse(STRING_OR_GAP.sub(lambda found: "}, {" if found[0][0] == "}" else found[0], text))
    return value if kind(value) == "messages" else None


def _parse(text: str) -> Any:
    """The value that a text writes, as JSON or as Python prints it; the text itself if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def shown(value: Any) -> str:
    """A value for a message: its type, and its start."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DefectError("type", f"'{name}' is not text but {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can say "\ud800", which no tokenizer takes
        raise DefectError("type", f"'{name}' holds half a surrogate pair, which is no character") from None
    return value


def read_messages(value: Any, name: str) -> list[Message]:
    """A message or a list of them, in our form."""
    turns = [value] if isinstance(value, dict) else value
    return [_read_message(turn, f"{name}[{index}]") for index, turn in enumerate(turns)]


def read_prompt(value: Any, name: str) -> list[Message]:
    """Messages that an answer can follow."""
    messages = read_messages(value, name)
    if not messages:
        raise DefectError("empty", f"there is no prompt in '{name}'")
    if messages[-1]["role"] == "assistant":
        raise DefectError("role", "the prompt ends with an assistant turn, so the answer would continue it")
    return messages


def read_answer(value: Any, name: str) -> list[Message]:
    """One assistant turn. More would train on the user's or a tool's words, for a pair carries no mask."""
    messages = read_messages(value, name)
    roles = [message["role"] for message in messages]
    if roles != ["assistant"]:
        raise DefectError("role", f"'{name}' must hold one assistant turn after the prompt, not {roles}")
    return messages


def read_history(value: Any) -> list[Message]:
    """Earlier turns as [user, assistant] pairs of text, also where those are written as text, as in CSV."""
    turns = _parse(value) if isinstance(value, str) else value
    if turns is None or turns == "" or turns == []:
        return []
    if not isinstance(turns, list):
        raise DefectError("type", f"'history' is not a list of [user, assistant] turns but {shown(value)}")
    messages = []
    for index, turn in enumerate(turns):
        if not (isinstance(turn, list | tuple) and len(turn) == 2):
            raise DefectError("type", f"'history[{index}]' is not a [user, assistant] turn but {shown(turn)}")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": read_text(text, f"history[{index}]")})
    return messages


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DefectError("tools", f"'tools' is text but not JSON: {shown(value)}") from None
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DefectError("tools", f"'tools' is not a list of objects but {shown(value)}")
    return value


def read_weight(value: Any) -> float:
    if value is None:
        return 1.0
    try:
        weight = math.nan if isinstance(value, bool) else float(value)  # also of text: CSV has nothing else
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise DefectError("weight", f"'weight' must be a positive number, not {shown(value)}")
    return weight


def _read_message(turn: dict[str, Any], name: str) -> Message:
    message = _from_sharegpt(turn, name) if "role" not in turn else _from_roles(turn, name)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DefectError("tools", f"{name}: 'tool_calls' is not a list of calls but {shown(calls)}")
    message["content"] = "" if calls and "content" not in message else _read_content(message.get("content"), name)
    return message


def _read_content(value: Any, name: str) -> str:
    """The text of a message: as such, or in parts, as OpenAI's API takes it."""
    if not (value and isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return read_text(value, name)
    for part in value:
        if part.get("type") != "text":
            raise DefectError(
                "type", f"{name} has a part of type {part.get('type')!r}, and only text can be trained on"
            )
    return "".join(read_text(part.get("text"), name) for part in value)


def _from_roles(turn: dict[str, Any], name: str) -> Message:
    if turn["role"] not in ROLES:
        raise DefectError("role", f"{name} has the role {turn['role']!r}, which is none of {', '.join(ROLES)}")
    # A key with None says what its absence says: {"content": null, "tool_calls": [...]}.
    return {key: value for key, value in turn.items() if value is not None}


def _from_sharegpt(turn: dict[str, Any], name: str) -> Message:
    sender = turn["from"]
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise DefectError("role", f"{name} is from {sender!r}, which is none of {', '.join(SHAREGPT_ROLES)}")
    if sender == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _function_calls(turn.get("value"), name)}
    return {"role": SHAREGPT_ROLES[sender], "content": turn.get("value")}


def _function_calls(value: Any, name: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(read_text(value, name))
    except (ValueError, RecursionError):
        raise DefectError("tools", f"{name}: a function call must be JSON, not {shown(value)}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DefectError("tools", f"{name}: a function call needs a 'name', this is {shown(value)}")
    return [{"type": "function", "function": call} for call in calls]
