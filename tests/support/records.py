"""Records of preference pairs in every shape that is read, and what each is as a pair."""

from __future__ import annotations

from typing import Any

from isopref.data.shapes import PreferencePair, detect_shape, to_pair
from isopref.data.sources import Record


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair_of(fields: dict[str, Any], *, raw: bool = False) -> PreferencePair:
    record = Record(fields, "file:7")
    return to_pair(record, detect_shape([record], raw=raw), raw=raw)


Q, GOOD, BAD = user("why?"), assistant("because"), assistant("dunno")
SYSTEM = {"role": "system", "content": "be brief"}
TEXT = {"prompt": "why?", "chosen": "because", "rejected": "dunno"}
HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: because",
    "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: dunno",
}
HH_PROMPT = HH["chosen"].removesuffix(" because")
HH_TURNS = [user("hi"), assistant("hello"), Q]
SHAREGPT = {
    "conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "why?"}],
    "chosen": {"from": "gpt", "value": "because"},
    "rejected": {"from": "gpt", "value": "dunno"},
}
ULTRAFEEDBACK = {
    "prompt": "why?",
    "prompt_id": "x",
    "messages": [Q, GOOD],
    "chosen": [Q, GOOD],
    "rejected": [Q, BAD],
    "score_chosen": 9.0,
}

# shape, record, prompt, chosen, rejected
SHAPED: list[tuple[str, dict[str, Any], Any, Any, Any]] = [
    ("text", TEXT, "why?", "because", "dunno"),
    ("messages", {"prompt": [SYSTEM, Q], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, Q], [GOOD], [BAD]),
    ("messages", {"prompt": [Q], "chosen": GOOD, "rejected": BAD}, [Q], [GOOD], [BAD]),
    ("messages", {"prompt": [Q], "chosen": "because", "rejected": "dunno"}, [Q], "because", "dunno"),
    ("messages", {"prompt": "why?", "chosen": [GOOD], "rejected": [BAD]}, "why?", [GOOD], [BAD]),
    ("conversations", {"chosen": [Q, GOOD], "rejected": [Q, BAD]}, [Q], [GOOD], [BAD]),
    ("conversations", {"chosen": [*HH_TURNS, GOOD], "rejected": [*HH_TURNS, BAD]}, HH_TURNS, [GOOD], [BAD]),
    ("ultrafeedback", ULTRAFEEDBACK, [Q], [GOOD], [BAD]),
    ("sharegpt", SHAREGPT, [SYSTEM, Q], [GOOD], [BAD]),
    ("hh", HH, HH_TURNS, [GOOD], [BAD]),
    ("hh", {"prompt": HH_PROMPT, "chosen": " because", "rejected": " dunno"}, HH_TURNS, [GOOD], [BAD]),
    ("hh", {"prompt": HH_PROMPT, **HH}, HH_TURNS, [GOOD], [BAD]),
]
