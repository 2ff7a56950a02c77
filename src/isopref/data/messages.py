"""The fields of a record: text, messages with their roles, tools, weight. Each is parsed strictly or refused.

Owns roles and the definition of a message. shapes.py makes pairs from fields.
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
REASONING = "reasoning_content"  # of an answer; in records also under other names
REASONING_NAMES = (REASONING, "reasoning", "thinking")
THINK_END = "</think>"  # after reasoning in the text of an answer
BESIDE_VALUE = ("weight", "train", *REASONING_NAMES, "tool_calls")  # what a turn of ShareGPT may have, too
# Arguments of apply_chat_template that a record must not set.
RENDERING = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
WRITTEN = re.compile(r"\s*\[?\s*\{\s*[\"']")
WRITTEN_KEYS = tuple(
    tuple(re.compile(rf"[\"']{key}[\"']\s*:") for key in keys) for keys in (("role", "content"), ("from", "value"))
)
STRING_OR_GAP = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\}\s+\{""")


class DefectError(Exception):
    """(reason, what): why a record does not yield a pair. Callers that know the origin turn it into a BadPairError."""


class WrongColumnError(DefectError):
    """A value that shows that a column does not hold what it should: dropping the record would not help."""


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
    """Whether a text looks like serialised messages."""
    return WRITTEN.match(text) is not None and any(all(key.search(text) for key in keys) for keys in WRITTEN_KEYS)


def parse_written(text: str) -> list[Any] | dict[str, Any] | None:
    """The messages in a text: JSON, or printed Python or numpy values, as pandas writes to CSV. None: not messages."""
    if not is_written(text):
        return None
    value = _parse(text)
    if value is text:
        # numpy prints no comma between objects. Strings are matched first, so that their content stays unchanged.
        value = _parse(STRING_OR_GAP.sub(lambda found: "}, {" if found[0][0] == "}" else found[0], text))
    return value if kind(value) == "messages" else None


def _parse(text: str) -> Any:
    """The value that a text represents, in JSON or Python syntax; the text itself if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def shown(value: Any) -> str:
    """A value for an error message: its type and its start."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DefectError("type", f"'{name}' is not text but {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can contain "\ud800", which no tokenizer accepts
        raise DefectError("type", f"'{name}' contains half a surrogate pair, which is not a character") from None
    return value


def read_messages(value: Any, name: str) -> list[Message]:
    """A message or a list of them, normalised."""
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
    """What follows a prompt: an assistant turn, and perhaps tool results, user turns and further assistant turns."""
    messages = read_messages(value, name)
    roles = [message["role"] for message in messages]
    if roles[:1] != ["assistant"]:
        raise DefectError(
            "role", f"'{name}' must begin with the assistant turn after the prompt; its turns are {roles}"
        )
    return messages


def read_history(value: Any) -> list[Message]:
    """Earlier turns as [user, assistant] pairs of text, even if the list is stored as text, as in CSV."""
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
    return [tool if "name" not in tool or "function" in tool else _as_function(tool) for tool in value]


def _as_function(bare: dict[str, Any]) -> dict[str, Any]:
    """A tool or a call in OpenAI's format, which templates expect."""
    return {"type": "function", "function": bare}


def read_template_kwargs(value: Any) -> dict[str, Any]:
    """Arguments for the chat template, such as enable_thinking: an object, or JSON text of one."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DefectError("type", f"'chat_template_kwargs' is text but not JSON: {shown(value)}") from None
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise DefectError("type", f"'chat_template_kwargs' is not an object but {shown(value)}")
    reserved = sorted(value.keys() & RENDERING)
    if reserved:
        raise DefectError("type", f"'chat_template_kwargs' sets {', '.join(reserved)}, which isopref sets itself")
    # Arrow and Parquet fill in absent keys with null.
    return {key: given for key, given in value.items() if given is not None}


def read_weight(value: Any) -> float:
    weight = 1.0 if value is None else _number(value)
    if not (math.isfinite(weight) and weight > 0):
        raise DefectError("weight", f"'weight' must be a positive number, not {shown(value)}")
    return weight


def read_subset(value: Any) -> str | None:
    """The name of a subset, or None. Numbers are accepted as names."""
    if value is None or value == "":
        return None
    return str(value) if isinstance(value, bool | int | float) else read_text(value, "subset")


def _number(value: Any) -> float:
    """The number, or NaN if it is not one."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # also from text, for CSV
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _read_message(turn: dict[str, Any], name: str) -> Message:
    message = _from_sharegpt(turn, name) if "role" not in turn else _from_roles(turn, name)
    message |= _read_parts(message.get("content"), name)
    if message["role"] == "assistant":
        message = _with_reasoning(message, name)
    message = _with_function_call(message, name)
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(message["tool_calls"], name)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" not in message and (message.get("tool_calls") or message.get(REASONING)):
        message["content"] = ""
    message["content"] = read_text(message.get("content"), name)
    return _with_weight(message, name)


def _read_parts(value: Any, name: str) -> Message:
    """The fields in a message's content parts, as in OpenAI's API and LLaMA-Factory. Empty if the content is text."""
    if not (value and isinstance(value, list) and all(isinstance(part, dict) for part in value)):
        return {}
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in value:
        if part.get("type") not in texts:
            raise DefectError(
                "type", f"{name} has a part of type {part.get('type')!r}, but only text can be trained on"
            )
        texts[part["type"]].append(read_text(part.get("text", part.get("value")), name))
    found: Message = {"content": "".join(texts["text"])}
    if texts["reasoning"]:
        found[REASONING] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        found["tool_calls"] = [call for text in texts["tool_call"] for call in _function_calls(text, name)]
    return found


def _with_reasoning(message: Message, name: str) -> Message:
    """The message with its reasoning under one name."""
    found = {key: read_text(message[key], key) for key in REASONING_NAMES if message.get(key) is not None}
    texts = {text: key for key, text in found.items() if text}
    if len(texts) > 1:
        raise DefectError("type", f"{name}: {' and '.join(map(repr, texts.values()))} differ; keep one")
    rest = {key: value for key, value in message.items() if key not in found}
    return rest | {REASONING: next(iter(texts), "")} if found else rest


def _with_function_call(message: Message, name: str) -> Message:
    """The message with a call in OpenAI's old form, `function_call`, as a tool call."""
    if "function_call" not in message:
        return message
    call = message.pop("function_call")
    if not call or (isinstance(call, dict) and not any(call.values())):  # Arrow fills in absent keys with null
        return message
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        raise DefectError("tools", f"{name}: 'function_call' needs a 'name', but this is {shown(call)}")
    if message.get("tool_calls"):
        raise DefectError("tools", f"{name} has both 'tool_calls' and 'function_call'; keep one")
    return {**message, "tool_calls": [_as_function(call)]}


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format, with arguments as objects: a template would quote JSON text."""
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DefectError("tools", f"{name}: 'tool_calls' is not a list of calls but {shown(calls)}")
    return [_read_call(call) for call in calls]


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call and isinstance(call.get("name"), str):
        call = _as_function(call)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parse_json(function["arguments"] or "{}")
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_weight(message: Message, name: str) -> Message:
    """The message with its `weight` (or `train`) as a number; without a weight if it is 1."""
    given, train = message.pop("weight", None), message.pop("train", None)
    if train is not None and not isinstance(train, bool):
        raise DefectError("weight", f"{name}: 'train' must be true or false, not {shown(train)}")
    weight = 1.0 if given is None else _number(given)
    if not (math.isfinite(weight) and weight >= 0):
        raise DefectError("weight", f"{name}: 'weight' must be 0 or a positive number, not {shown(given)}")
    if train is not None and given is not None and train != (weight > 0):
        raise DefectError("weight", f"{name}: 'train' is {shown(train)} and 'weight' is {shown(given)}; keep one")
    if train is False:
        weight = 0.0
    if message["role"] != "assistant":
        if train or (given is not None and weight > 0):
            raise DefectError("weight", f"{name} is a {message['role']} turn, but only assistant turns can be trained")
        return message
    return message if weight == 1 else {**message, "weight": weight}


def _from_roles(turn: dict[str, Any], name: str) -> Message:
    role = "tool" if turn["role"] == "function" else turn["role"]  # as results were called with `function_call`
    if role not in ROLES:
        raise DefectError("role", f"{name} has the role {role!r}, which is not one of {', '.join(ROLES)}")
    # A key with None means the same as a missing key: {"content": null, "tool_calls": [...]}.
    return {key: value for key, value in turn.items() if value is not None} | {"role": role}


def _from_sharegpt(turn: dict[str, Any], name: str) -> Message:
    sender = turn["from"]
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        raise DefectError("role", f"{name} is from {sender!r}, which is not one of {', '.join(SHAREGPT_ROLES)}")
    also = {key: turn[key] for key in BESIDE_VALUE if turn.get(key) is not None}
    if sender == "function_call":
        return also | {"role": "assistant", "content": "", "tool_calls": _function_calls(turn.get("value"), name)}
    return also | {"role": SHAREGPT_ROLES[sender], "content": turn.get("value")}


def _function_calls(value: Any, name: str) -> list[dict[str, Any]]:
    calls = _parse_json(read_text(value, name))
    if calls is None:
        raise DefectError("tools", f"{name}: a function call must be JSON, not {shown(value)}")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DefectError("tools", f"{name}: a function call needs a 'name', but this is {shown(value)}")
    return [_read_call(call) for call in calls]


def _parse_json(text: str) -> Any:
    """The parsed JSON, or None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_number(value: Any) -> float | None:
    """A finite number, even if stored as text, as in CSV; None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
