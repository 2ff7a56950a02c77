"""Which tokens of a prompt go where it has to be cut, so that what is left still reads as a conversation.

One stretch goes. It lies between the text of one turn and the text of a turn of the same role, or within one text, and
takes none of what the template writes before the first or after the last of them. So the prompt keeps its opening (BOS,
tools, the first header) and its closing (the end of the turn, the generation prompt), and each piece of text its role.

keep_end: the text after the stretch is the longest that fits, so the prompt is its system turn and then the last turns,
the first of them perhaps without its start. keep_start is the mirror image. Where no cut from the first spoken turn on
fits (or, for keep_start, up to the last one), the next one is tried: long words of a tool after a short question. The
system turn is cut only where nothing else will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

SYSTEM_ROLES = ("system", "developer")


class Span(NamedTuple):
    """The tokens of a turn's text, among those of the prompt."""

    role: str
    start: int
    end: int


def stretch_to_cut(
    num_tokens: int, spans: Sequence[Span], room: int, *, truncation: Literal["keep_start", "keep_end"]
) -> tuple[int, int] | None:
    """Where the stretch begins and ends without which the prompt has at most `room` tokens; None: there is none."""
    if truncation == "keep_start":
        mirrored = [Span(role, num_tokens - end, num_tokens - start) for role, start, end in reversed(spans)]
        cut = stretch_to_cut(num_tokens, mirrored, room, truncation="keep_end")
        return cut and (num_tokens - cut[1], num_tokens - cut[0])
    in_turn = sorted(spans, key=lambda span: span.role in SYSTEM_ROLES)
    for index, (role, start, _) in enumerate(in_turn):
        least = start + num_tokens - room
        for span in in_turn[index:]:
            if span.role == role and span.end > least:
                return start, max(span.start, least)
    return None
