"""Marks in messages: where a mark appears in the rendered text, it shows what the template does with a message."""

from __future__ import annotations

from collections.abc import Sequence

from isopref.data.messages import Message

MARK = "\ue000"  # from Unicode's private use area, so texts do not contain it


def marked_at_end(message: Message) -> list[Message]:
    """A message with a mark at its end, in each way that may show: after its text, or in its last call.

    Most templates write the name of a call, and some (Kimi) only its id.
    """
    calls = message.get("tool_calls")
    if not calls:
        return [{**message, "content": message["content"].rstrip() + MARK}]
    *others, last = calls
    function = last.get("function", {})
    marked = [{**last, "function": {**function, "name": f"{function.get('name')}{MARK}"}}]
    if "id" in last:
        marked.append({**last, "id": f"{last['id']}{MARK}"})
    return [{**message, "tool_calls": [*others, one]} for one in marked]


def marked_behind(messages: list[Message], index: int, before: str = "") -> list[Message]:
    """The messages with a mark after the text of one, and optionally one before it."""
    marked = {**messages[index], "content": before + messages[index]["content"] + MARK}
    return [*messages[:index], marked, *messages[index + 1 :]]


def without_last_call(messages: list[Message], index: int) -> list[Message]:
    message = dict(messages[index])
    calls = message.pop("tool_calls")[:-1]
    return [*messages[:index], {**message, "tool_calls": calls} if calls else message, *messages[index + 1 :]]


def common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the common prefix."""
    differing = (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))
