"""What a chat template omits of a conversation: a system turn, tools, tool calls, the reasoning in an answer.

A template is third-party code and may ignore what it was not written for. Training would silently proceed without it,
so isopref looks for each part of a pair in the rendered text. White space is ignored (templates trim it and add line
breaks). How strict:

- Answers are what is trained on, and user turns are what was asked: all their text must be there.
- Other turns of the prompt may be rewritten, because the model sees them that way at inference too: tool results as
  JSON, earlier answers without their reasoning, a switch in the system turn obeyed. They may not be ignored: if the
  text is not there verbatim, a mark placed after it must appear.
- Templates render tools and tool calls in their own format, so isopref can only detect if they are ignored: the text is
  then the same without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from isopref.data.marks import MARK, common, marked_behind, without_last_call
from isopref.data.messages import REASONING, THINK_END, DefectError, Message, shown

SPOKEN = ("content", REASONING)  # all text of an answer

HINT = "(to use another template, set data.template: path.jinja)"


class Given(NamedTuple):
    """What a template receives besides messages."""

    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = {}


NOTHING = Given()


class Omissions:
    """Looks for the parts of a conversation in its text. `render` is ChatTemplate's."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render

    def of_context(
        self,
        turns: list[Message],
        some: Sequence[int],
        given: Given,
        written: str,
        answer: str | None = None,
    ) -> Iterator[str]:
        """What is missing from turns that are not trained: of the prompt, or inside an answer of this name."""
        same = partial(self._same, written=written, add_generation_prompt=answer is None)
        whole = rest = squeezed(written)
        for index in sorted(some, key=lambda index: -len(turns[index]["content"])):
            role, said = turns[index]["role"], squeezed(turns[index]["content"])
            of = "of the prompt" if answer is None else f"of '{answer}' (turn {index + 1})"
            if said in rest:
                rest = rest.replace(said, MARK, 1)  # so that it is not matched again for a shorter turn
            elif (role == "user" and said not in whole) or same(marked_behind(turns, index), given):
                yield f"the {role} turn {of}, {shown(turns[index]['content'])}"
            if turns[index].get("tool_calls") and same(without_last_call(turns, index), given):
                yield f"a tool call {of}, {shown(turns[index]['tool_calls'][-1])}"
        if given.tools and answer is None and same(turns, given._replace(tools=None)):
            yield f"'tools', {shown(given.tools)}"

    def of_answer(
        self, where: str, messages: list[Message], index: int, given: Given, prompt: str, written: str
    ) -> Iterator[str]:
        """What is missing from a trained turn, `where`; `written` is the text up to its end."""
        answer = messages[index]
        spoken = {key: answer[key] for key in SPOKEN if isinstance(answer.get(key), str)}
        several = sum(1 for key in (*SPOKEN, "tool_calls") if answer.get(key)) > 1
        if not written.startswith(prompt) or any(
            text.strip() not in written[len(prompt) :] for text in spoken.values()
        ):
            # Not verbatim; try again without white space.
            start, whole = squeezed(prompt), squeezed(written)
            begin = len(start) if whole.startswith(start) else common(start, whole)
            for key, text in spoken.items():
                # A template may frame what follows the reasoning. The start of the answer ("<think>") may be in the
                # generation prompt, so search there, too.
                thought, end, said = squeezed(text).rpartition(THINK_END)
                first, then = (thought + end, said) if end else (said, "")
                found = whole.find(first, max(0, begin - len(first)))
                if found < 0 or whole.find(then, found + len(first)) < 0:
                    yield f"some of {where}, whose {key} is {shown(text)}"
                several = several or bool(then)
        if not several and not answer.get("tool_calls"):
            return
        same = partial(self._same, written=self._render(messages, given), add_generation_prompt=False)
        if answer.get("tool_calls") and same(without_last_call(messages, index), given):
            yield f"a tool call of {where}, {shown(answer['tool_calls'][-1])}"
        for key, text in spoken.items() if several else ():
            # It may still be found above as part of another text, such as a word of the reasoning in a call.
            marked = {**answer, key: text + MARK}
            if text.strip() and same([*messages[:index], marked, *messages[index + 1 :]], given):
                yield f"some of {where}, whose {key} is {shown(text)}"

    def _same(self, messages: list[Message], given: Given, written: str, *, add_generation_prompt: bool = True) -> bool:
        """Whether the template renders another conversation the same way, and so ignores the difference."""
        try:
            return self._render(messages, given, add_generation_prompt=add_generation_prompt) == written
        except DefectError:
            return False  # it refuses the other conversation, so it does not ignore the difference


def refuse(left_out: Iterator[str]) -> None:
    """Raise DefectError for the first part that the template omits, if any."""
    if (first := next(left_out, None)) is not None:
        raise DefectError("left_out", f"the chat template leaves out {first}, so it would not be trained on {HINT}")


def squeezed(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())
