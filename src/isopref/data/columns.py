"""Names of columns: isopref's own, and those of other projects."""

from __future__ import annotations

import json
import re
from typing import Any

SIDES = ("chosen", "rejected")
PROMPTS = ("prompt", "conversations", "instruction")  # each is the prompt of some shape
OPTIONAL = ("system", "tools", "chat_template_kwargs", "weight", "subset")  # read with every shape
# Scores of both sides of a pair, under the names that data sets use, and the difference of two scores.
SIDE_SCORES = (
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
)
MARGIN = "margin"
GAPS = (*(name for names in SIDE_SCORES for name in names), MARGIN)  # read with every shape of pairs
MEDIA = ("image", "images", "audio", "audios", "video", "videos")  # columns with images, audio or video
# Other names for isopref's columns, in lower case, to suggest renames in error messages.
ALIASES = {
    "prompt": ("question", "instruction", "query", "input", "problem", "messages", "conversations", "conversation"),
    "chosen": ("accepted", "accept", "preferred", "better", "best", "good", "positive", "winner", "win", "pos"),
    "rejected": ("reject", "dispreferred", "unpreferred", "worse", "worst", "bad", "negative", "loser", "lose", "neg"),
}
OTHER_WORDS = {"response", "responses", "answer", "answers", "completion", "output", "text", "message", "messages"}


def column_like(ours: str, fields: dict[str, Any]) -> str | None:
    """The column whose name means the same as `ours`, a name of isopref's."""
    names = {_plain(name): name for name, value in fields.items() if value is not None}
    return next((names[alias] for alias in (ours, *ALIASES[ours]) if alias in names), None)


def quoted(name: str) -> str:
    """A name, quoted for YAML if necessary."""
    return name if re.fullmatch(r"[^\W\d]([\w .-]*\w)?", name) else json.dumps(name, ensure_ascii=False)


def _plain(name: str) -> str:
    """A column's name in lower case, with chosen_response and response_chosen reduced to chosen."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[^\W_]+", name)
    telling = [word.lower() for word in words if word.lower() not in OTHER_WORDS] or [name.lower()]
    return "_".join(telling)
