"""Where in a conversation's text a turn ends that is not the last one, proven in one of two ways.

The template's own {% generation %} tags show it if they enclose the turn completely; otherwise a mark in the message
does. What ends the turn, such as an end token, is whatever the template writes after it when it is the last turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isopref.data.marks import MARK, marked_at_end
from isopref.data.messages import DefectError, Message
from isopref.data.omissions import HINT, Given

if TYPE_CHECKING:
    from isopref.data.templates import ChatTemplate

Tagged = tuple[str, list[tuple[int, int]]] | None  # a conversation's text, and the span of each of its answers


def end_of_turn(
    template: ChatTemplate,
    where: str,
    messages: list[Message],
    index: int,
    given: Given,
    text: str,
    tagged: Callable[[], Tagged],
) -> int:
    """Where a turn ends in the text, including its end token. Raises DefectError if that cannot be proven.

    `tagged` gives the text of all messages and what tags enclose in it. `where` names the turn in errors.
    """
    end = _tagged_end(template, messages, index, given, tagged)
    if end is None:
        end = _marked_end(template, messages, index, given, text)
    if end is None:
        raise DefectError(
            "boundary",
            f"the chat template writes {where} differently once other turns follow, so where it ends cannot be "
            f"proven {HINT}",
        )
    return end


def _marked_end(template: ChatTemplate, messages: list[Message], index: int, given: Given, text: str) -> int | None:
    """The end of a turn, proven by a mark at the end of what it says.

    What the template writes after the mark when the turn is the last one must also follow it when other turns come
    after. These may repeat the mark: gpt-oss writes the name of the called function before its result.
    """
    for message in marked_at_end(messages[index]):
        marked = [*messages[:index], message]
        *alone, closing = template.unclosed(template.render(marked, given)).split(MARK)
        if alone:
            break
    pieces = template.render([*marked, *messages[index + 1 :]], given).split(MARK)
    own = len(alone)  # marks of the turn itself
    before, rest = "".join(pieces[:own]), "".join(pieces[own:])
    closing = closing.rstrip()
    written = text.removesuffix(rest)
    as_marked = text.endswith(rest) and written.rstrip() == before.rstrip()
    proven = own and own < len(pieces) and as_marked and rest.startswith(closing)
    return len(written) + len(closing) if proven else None


def _tagged_end(
    template: ChatTemplate, messages: list[Message], index: int, given: Given, tagged: Callable[[], Tagged]
) -> int | None:
    """The end of a turn, proven by the template's own {% generation %} tags.

    Tags are believed if they enclose each assistant turn once, include all that the template writes at the end of
    the turn when it is the last one, and enclose the same text when other turns follow.
    """
    following = tagged()
    alone = following and template.tagged(messages[: index + 1], given)
    if not (alone and following):
        return None
    text, spans = alone
    start, end = spans[-1]
    turn = text[start:end].rstrip()
    whole, others = following
    start = others[len(spans) - 1][0]
    all_of_it = text[:end].rstrip() == template.unclosed(text).rstrip()
    return start + len(turn) if all_of_it and whole[start:].startswith(turn) else None
