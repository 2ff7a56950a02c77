"""Shapes in which a column holds the prompt, and `chosen` and `rejected` hold only the answers."""

from __future__ import annotations

from isopref.data.columns import SIDES
from isopref.data.known_shapes.shape import Fields, Kinds, Parts, Shape, begins_whole, is_long, kinds_of
from isopref.data.messages import Turns, kind, read_answer, read_history, read_prompt, read_text
from isopref.data.plain_text import is_hh


class Text(Shape):
    name = "text"
    looks = "prompt, chosen, rejected: text"
    columns = ("prompt", *SIDES)
    prompt_from = "the column 'prompt'"
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        return kinds_of(fields) == Kinds(prompt="text", sides="text") and not is_hh(fields["prompt"])

    def split(self, fields: Fields) -> Parts:
        prompt, chosen, rejected = (read_text(fields[key], key) for key in self.columns)
        return prompt, chosen, rejected


class Alpaca(Shape):
    """Records like Alpaca's, joined as in LLaMA-Factory: the non-empty parts, one line each."""

    name = "alpaca"
    looks = "instruction, chosen, rejected: text; input: text or empty; history: [user, assistant] turns or empty"
    columns = ("instruction", "input", "history", *SIDES)
    prompt_from = "the columns 'instruction' and 'input', after the turns of 'history'"
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        is_alpaca = kinds_of(fields) == Kinds(sides="text") and kind(fields.get("instruction")) == "text"
        return is_alpaca and not all(is_hh(fields[key]) for key in SIDES)

    def split(self, fields: Fields) -> Parts:
        chosen, rejected = (read_text(fields[key], key) for key in SIDES)
        return alpaca_prompt(fields), chosen, rejected


class Messages(Shape):
    name = "messages"
    looks = "prompt: messages or text; chosen, rejected: an assistant turn, and perhaps more turns"
    columns = ("prompt", *SIDES)
    prompt_from = "the column 'prompt'"

    def fits(self, fields: Fields) -> bool:
        kinds = kinds_of(fields)
        if kinds == Kinds(prompt="text", sides="messages"):
            return not (is_long(fields["chosen"]) and begins_whole(fields["chosen"]))
        return kinds in (Kinds(prompt="messages", sides="messages"), Kinds(prompt="messages", sides="text"))

    def split(self, fields: Fields) -> Parts:
        prompt = fields["prompt"]
        prompt = read_text(prompt, "prompt") if isinstance(prompt, str) else read_prompt(prompt, "prompt")
        chosen, rejected = (
            read_text(fields[key], key) if isinstance(fields[key], str) else read_answer(fields[key], key)
            for key in SIDES
        )
        return prompt, chosen, rejected

    def objection(self, fields: Fields) -> str | None:
        return _whole_beside("prompt", fields)


class ShareGPT(Shape):
    name = "sharegpt"
    looks = "conversations, chosen, rejected: turns with from and value"
    columns = ("conversations", *SIDES)
    prompt_from = "the column 'conversations'"

    def fits(self, fields: Fields) -> bool:
        return kinds_of(fields) == Kinds(conversations="messages", sides="messages")

    def split(self, fields: Fields) -> Parts:
        chosen, rejected = (read_answer(fields[key], key) for key in SIDES)
        return read_prompt(fields["conversations"], "conversations"), chosen, rejected

    def objection(self, fields: Fields) -> str | None:
        return _whole_beside("conversations", fields)


def alpaca_prompt(fields: Fields) -> Turns:
    """`instruction` and `input`, one line each, after the turns of `history`. Raises DefectError."""
    parts = [read_text(fields[key], key) for key in ("instruction", "input") if fields.get(key)]
    prompt = "\n".join(parts)
    history = read_history(fields.get("history"))
    return [*history, {"role": "user", "content": prompt}] if history else prompt


def _whole_beside(column: str, fields: Fields) -> str | None:
    """An objection to whole conversations in a record with a prompt: answers must begin with the turn after it."""
    if not all(is_long(fields[side]) and begins_whole(fields[side]) for side in SIDES):
        return None
    return (
        f"'chosen' and 'rejected' are whole conversations, but next to the column '{column}' they must begin with the "
        f"assistant turn after it. Remove the column '{column}' from the data, or the turns before the answers."
    )
