"""Prompt and answer in one text: where the answer begins.

Role marks ("User: ... Assistant: ...") prove where: the answer follows the last mark, which must be the assistant's and
at the same place in both texts. Without marks, isopref guesses: the prompt is the common beginning of both texts, cut
back to the end of a line or of a sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from isopref.data.messages import DefectError, Message

ROLES = {
    "system": ("system",),
    "user": ("user", "human", "instruction", "question", "q", "[inst]"),
    "assistant": ("assistant", "ai", "bot", "response", "answer", "a", "model", "[/inst]"),
    "tool": ("tool", "ipython"),
}
ROLE_OF = {word: role for role, words in ROLES.items() for word in words}
# The end of a sentence, or a colon. Chinese and Japanese have no space after it.
SENTENCE_END = re.compile(r"[.!?:…][\"'”’)\]]*(?=\s)|[。！？：][」』”’）]*")  # noqa: RUF001


@dataclass(frozen=True)
class Marks:
    """A way to mark turns in text. Group 1 of `pattern` is a word of ROLES; a role's text follows its mark."""

    pattern: re.Pattern[str]
    assistant: tuple[str, ...]  # the end of an assistant's mark, for a quick search before the pattern
    of_template: bool = False  # whether a chat template writes these marks, so that the text is already templated

    def are_in(self, text: str, lower: str) -> bool:
        """Whether a text has the mark of a user's turn, and that of an assistant's after it. `lower`: in lower case."""
        searched = lower if self.pattern.flags & re.IGNORECASE else text
        if not any(end in searched for end in self.assistant):
            return False
        roles = [_role(mark) for mark in self.pattern.finditer(text)]
        return "user" in roles and "assistant" in roles[roles.index("user") :]

    def first(self, text: str) -> int:
        found = self.pattern.search(text)
        assert found is not None
        return found.start()


def _words(pattern: str, *assistant: str) -> Marks:
    return Marks(re.compile(pattern, re.IGNORECASE | re.MULTILINE), assistant)


def _template(pattern: str, assistant: str) -> Marks:
    return Marks(re.compile(pattern), (assistant,), of_template=True)


HH = Marks(re.compile(r"\n\n(Human|Assistant):"), ("Assistant:",))
WORDS = (
    _words(r"^[ \t]*(system|human|user|assistant|ai|bot):", "assistant:", "ai:", "bot:"),
    _words(r"###[ \t]*(system|human|user|instruction|assistant|response):", "assistant:", "response:"),
    Marks(re.compile(r"(?:(?<!\S)|(?<=</s>))(USER|ASSISTANT):"), ("ASSISTANT:",)),
    _words(r"^[ \t]*(question|answer|q|a):", "answer:", "a:"),
)
# Line breaks after these marks belong to the mark, because the generation prompt ends with them.
TEMPLATES = (
    _template(r"<\|im_start\|>(system|user|assistant|tool)\n?", "<|im_start|>assistant"),
    _template(
        r"<\|start_header_id\|>(system|user|assistant|ipython)<\|end_header_id\|>\n{0,2}",
        "<|start_header_id|>assistant<|end_header_id|>",
    ),
    _template(r"<start_of_turn>(user|model)\n?", "<start_of_turn>model"),
    _template(r"<\|(system|user|assistant)\|>\n?", "<|assistant|>"),
    _template(r"<｜(User|Assistant)｜>", "<｜Assistant｜>"),  # noqa: RUF001
    _template(r"(\[INST\]|\[/INST\])", "[/INST]"),
)


def is_hh(text: str) -> bool:
    """Whether a text is a dialogue in the format of Anthropic's HH data, which begins with a mark."""
    return HH.pattern.match(text) is not None and "\n\nAssistant:" in text


def find_marks(text: str) -> Marks | None:
    """The kind of marks that comes first in a text, if there are any. Marks of templates take precedence over words."""
    lower = text.lower()
    for family in (TEMPLATES, WORDS):
        found = [marks for marks in family if marks.are_in(text, lower)]
        if found:
            return min(found, key=lambda marks: marks.first(text))
    return None


def read_turns(text: str, marks: Marks) -> list[Message]:
    """The turns of a marked text, without the spaces around them. Text before the first mark is a system turn."""
    found = [*marks.pattern.finditer(text)]
    ends = [*(mark.start() for mark in found[1:]), len(text)]
    turns = [
        {"role": _role(mark), "content": text[mark.end() : end].strip()} for mark, end in zip(found, ends, strict=True)
    ]
    before = text[: found[0].start()].strip()
    return [{"role": "system", "content": before}, *turns] if before else turns


def split_at_last_mark(chosen: str, rejected: str, marks: Marks) -> tuple[str, str, str]:
    """Prompt and answers of two marked texts, unchanged: the prompt ends with the last mark. Raises DefectError."""
    last, other = ([*marks.pattern.finditer(text)][-1] for text in (chosen, rejected))
    if chosen[: last.end()] != rejected[: other.end()]:
        raise DefectError("diverging", "'chosen' and 'rejected' differ before their last answer")
    if _role(last) != "assistant":
        raise DefectError("role", "the last turn is not the assistant's")
    return chosen[: last.end()], chosen[last.end() :], rejected[other.end() :]


def prompt_end(chosen: str, rejected: str) -> int | None:
    """Where the prompt of two texts without marks may end: after the last line, or else sentence, that they share.

    None if they share neither, or if an answer would be empty.
    """
    shared = chosen[: _first_difference(chosen, rejected)]
    lines = [found.end() for found in re.finditer(r"\n+", shared)]
    # Search both texts completely: what follows decides whether a sentence ends, and it must end in both.
    sentences = sorted(_sentence_ends(chosen, len(shared)) & _sentence_ends(rejected, len(shared)))
    for ends in (lines, sentences):
        for end in reversed(ends):
            if shared[:end].strip() and chosen[end:].strip() and rejected[end:].strip():
                return end
    return None


def _first_difference(first: str, second: str) -> int:
    """The length of the common prefix, by binary search: comparing slices is fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sentence_ends(text: str, last: int) -> set[int]:
    """Where sentences of a text end, up to `last`; white space after a sentence is not part of it."""
    return {found.end() for found in SENTENCE_END.finditer(text, 0, last + 1) if found.end() <= last}


def _role(mark: re.Match[str]) -> str:
    return ROLE_OF[mark[1].lower()]
