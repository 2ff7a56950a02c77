"""Shapes in which `chosen` and `rejected` each hold the whole conversation, so isopref must find the prompt in them."""

from __future__ import annotations

from isopref.data.columns import SIDES, column_like, quoted
from isopref.data.conversations import split_whole
from isopref.data.known_shapes.shape import Fields, Kinds, Parts, Shape, begins_whole, is_long, kinds_of
from isopref.data.messages import DefectError, Message, read_answer, read_messages, read_prompt, read_text, shown
from isopref.data.plain_text import HH, Marks, find_marks, is_hh, prompt_end, read_turns, split_at_last_mark


class Conversations(Shape):
    name = "conversations"
    looks = "chosen, rejected: conversations that begin alike"
    columns = SIDES
    prompt_from = "the turns that both begin with"

    def fits(self, fields: Fields) -> bool:
        return kinds_of(fields) == Kinds(sides="messages")

    def split(self, fields: Fields) -> Parts:
        return _split_conversations(fields)


class UltraFeedback(Shape):
    name = "ultrafeedback"
    looks = "prompt: text; chosen, rejected: conversations with it"
    columns = ("prompt", *SIDES)
    prompt_from = "the turns that both begin with"

    def fits(self, fields: Fields) -> bool:
        kinds, chosen = kinds_of(fields), fields.get("chosen")
        return kinds == Kinds(prompt="text", sides="messages") and is_long(chosen) and begins_whole(fields["chosen"])

    def split(self, fields: Fields) -> Parts:
        asked = read_text(fields["prompt"], "prompt")
        users = [turn for turn in read_messages(fields["chosen"], "chosen") if turn["role"] == "user"]
        if not users or users[0]["content"] != asked:
            raise DefectError("shape", "'prompt' is not the first user turn of 'chosen', as it must be in this shape")
        return _split_conversations(fields)


class AnthropicHH(Shape):
    """Anthropic's HH data. Some versions have a separate prompt, and some of these repeat it in each side.

    Without a template, as in the DPO authors' code: the prompt is everything up to the last "Assistant:", unchanged.
    """

    name = "hh"
    looks = r"chosen, rejected: text, '\n\nHuman: ... \n\nAssistant: ...'"
    columns = ("prompt", *SIDES)
    prompt_from = "all up to the last 'Assistant:'"
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        kinds = kinds_of(fields)
        if kinds == Kinds(prompt="text", sides="text"):
            return is_hh(fields["prompt"])
        return kinds == Kinds(sides="text") and all(is_hh(fields[key]) for key in SIDES)

    def split(self, fields: Fields) -> Parts:
        chosen, rejected = (read_turns(text, HH) for text in self._texts(fields))
        return _split_whole(chosen, rejected)

    def split_raw(self, fields: Fields) -> Parts:
        return split_at_last_mark(*self._texts(fields), HH)

    @staticmethod
    def _texts(fields: Fields) -> tuple[str, str]:
        """Both transcripts, each with the prompt."""
        chosen, rejected = (read_text(fields[key], key) for key in SIDES)
        if not (is_hh(chosen) and is_hh(rejected)):
            prompt = read_text(fields["prompt"], "prompt")
            chosen, rejected = (text if is_hh(text) else prompt + text for text in (chosen, rejected))
        return chosen, rejected


class Transcript(Shape):
    """Dialogues as text with role marks of other kinds (see plain_text.py)."""

    name = "transcript"
    looks = "chosen, rejected: text with marks of turns, as in 'User: ... Assistant: ...'"
    columns = SIDES
    prompt_from = "all up to the last mark of the assistant, as in 'Assistant:'"
    has_raw = True

    def fits(self, fields: Fields) -> bool:
        marks = _common_marks(fields)
        return marks is not None and not marks.of_template

    def split(self, fields: Fields) -> Parts:
        texts = _texts(fields)
        marks = find_marks(texts[0])
        assert marks is not None
        chosen, rejected = (read_turns(text, marks) for text in texts)
        return _split_whole(chosen, rejected)

    def split_raw(self, fields: Fields) -> Parts:
        return _split_marked(fields)

    def objection(self, fields: Fields) -> str | None:
        return _no_common_turns(fields)


class Templated(Shape):
    """Text that a chat template has already written."""

    name = "templated"
    looks = "chosen, rejected: text with the marks of a chat template, as in '<|im_start|>assistant'"
    columns = SIDES
    prompt_from = "all up to the last mark of the assistant, as in '<|im_start|>assistant'"
    has_raw = True
    has_template = False

    def fits(self, fields: Fields) -> bool:
        marks = _common_marks(fields)
        return marks is not None and marks.of_template

    def split(self, fields: Fields) -> Parts:
        return _split_marked(fields)

    def objection(self, fields: Fields) -> str | None:
        return _no_common_turns(fields)


class CommonStart(Shape):
    """Text without any mark: the common beginning of both sides is taken to be the prompt."""

    name = "common_start"
    looks = "chosen, rejected: text, which begins with the prompt in both"
    columns = SIDES
    prompt_from = "what chosen and rejected both begin with, to the end of a line or else a sentence; a guess"
    has_raw = True
    is_guess = True

    def fits(self, fields: Fields) -> bool:
        filled = {key: value for key, value in fields.items() if value}
        if kinds_of(fields) != Kinds(sides="text") or column_like("prompt", filled):
            return False
        return not any(is_hh(fields[key]) or find_marks(fields[key]) for key in SIDES)

    def split(self, fields: Fields) -> Parts:
        prompt, chosen, rejected = (part.strip() for part in self._parts(fields))
        return prompt, chosen, rejected

    def split_raw(self, fields: Fields) -> Parts:
        return self._parts(fields)

    def objection(self, fields: Fields) -> str | None:
        chosen, rejected = (fields[key] for key in SIDES)
        if chosen == rejected or prompt_end(chosen, rejected) is not None:
            return None
        return (
            f"there is no prompt: 'chosen' and 'rejected' are text, but do not begin with a common line or sentence "
            f"({shown(chosen)}; {shown(rejected)}). {_name_the_prompt(fields)}"
        )

    @staticmethod
    def _parts(fields: Fields) -> tuple[str, str, str]:
        chosen, rejected = _texts(fields)
        if chosen == rejected:
            raise DefectError("tie", "'chosen' equals 'rejected', so the pair has no gradient")
        end = prompt_end(chosen, rejected)
        if end is None:
            raise DefectError("missing", "there is no prompt: the sides do not begin with a common line or sentence")
        return chosen[:end], chosen[end:], rejected[end:]


def _name_the_prompt(fields: Fields) -> str:
    """The way out if no prompt is found in the sides."""
    others = ", ".join(key for key in fields if key not in SIDES) or "none"
    return (
        "Put what was asked into a column 'prompt', or name the column that has it: data.columns={prompt: COLUMN}. "
        f"Other columns: {others}."
    )


def _no_common_turns(fields: Fields) -> str | None:
    """An objection to marks of turns that are not the same in both sides: they may be part of the answers."""
    try:
        _split_marked(fields)
    except DefectError:
        return (
            "there is no prompt: 'chosen' and 'rejected' have marks of turns, but not the same ones before the last "
            f"answer. {_name_the_prompt(fields)}"
        )
    return None


def _texts(fields: Fields) -> tuple[str, str]:
    chosen, rejected = (read_text(fields[key], key) for key in SIDES)
    return chosen, rejected


def _common_marks(fields: Fields) -> Marks | None:
    """The kind of marks that both sides have, if no column is the prompt. None if they have none or different ones."""
    if kinds_of(fields) != Kinds(sides="text") or fields.get("instruction") is not None:
        return None
    chosen, rejected = (fields[key] for key in SIDES)
    if is_hh(chosen) or is_hh(rejected):
        return None
    marks = find_marks(chosen)
    return marks if marks == find_marks(rejected) else None


def _split_marked(fields: Fields) -> Parts:
    """Prompt and answers of two marked texts, unchanged."""
    chosen, rejected = _texts(fields)
    marks = find_marks(chosen)
    assert marks is not None
    return split_at_last_mark(chosen, rejected, marks)


def _split_conversations(fields: Fields) -> Parts:
    chosen, rejected = (read_messages(fields[key], key) for key in SIDES)
    if len(chosen) == 1 and (asked := column_like("prompt", fields)):
        columns = f"data.columns={{prompt: {quoted(asked)}}}"
        raise DefectError("empty", f"there is no prompt in 'chosen', and '{asked}' is not read ({columns} reads it)")
    if chosen == rejected:
        raise DefectError("tie", "'chosen' equals 'rejected', so the pair has no gradient")
    if not chosen or not rejected:
        raise DefectError("empty", f"'{'rejected' if chosen else 'chosen'}' has no turns")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        raise DefectError("empty", "there is no prompt: both sides begin with an assistant turn")
    prompt, answers = split_whole([chosen, rejected])
    for side, answer in zip(SIDES, answers, strict=True):
        if not any(turn["role"] == "assistant" for turn in answer):
            raise DefectError("role", f"'{side}' has no assistant turn after the turns that both sides share")
    return prompt, answers[0], answers[1]


def _split_whole(chosen: list[Message], rejected: list[Message]) -> Parts:
    """Two dialogues in plain text: the turns before the last one are the prompt, and must be the same.

    Dialogues that differ earlier are refused, because the mark of an earlier turn may be part of an answer's text.
    """
    if chosen[:-1] != rejected[:-1]:
        raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
    return (
        read_prompt(chosen[:-1], "chosen"),
        read_answer(chosen[-1:], "chosen"),
        read_answer(rejected[-1:], "rejected"),
    )
