"""Which tokens to cut from a prompt that is too long, so that what is left still reads as a conversation.

One stretch is cut. It begins in the text of one turn and ends in the same text or in that of a later turn of the same
role, so what the template writes before the first and after the last of them stays. The prompt therefore keeps its
opening (BOS, tools, the first header) and its closing (the end of the turn, the generation prompt), and each remaining
piece of text keeps its role.

keep_end: the text after the stretch is the longest that fits, so what is left is the system turn and then the last
turns, the first of them perhaps without its start. keep_start is the mirror image. If no cut that starts in the first
turn after the system turn is enough (for keep_start: that ends in the last one), the next turn is tried, for example a
long tool result after a short question. The system turn is cut only if nothing else is enough.
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
    """Start and end of the stretch to cut so that the prompt has at most `room` tokens; None if there is none."""
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
