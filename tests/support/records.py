"""Records in every shape that is read, and what each is as a pair, a list or a labelled answer."""

from __future__ import annotations

from typing import Any

from isopref.data.judged import LabelledAnswer, PreferencePair, RankedList
from isopref.data.shapes import detect_shape, to_pair
from isopref.data.sources import Record


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair_of(fields: dict[str, Any], *, raw: bool = False) -> PreferencePair:
    record = Record(fields, "file:7")
    found = to_pair(record, detect_shape([record], raw=raw), raw=raw)
    assert isinstance(found, PreferencePair)
    return found


def list_of(fields: dict[str, Any], *, raw: bool = False) -> RankedList:
    record = Record(fields, "file:7")
    found = to_pair(record, detect_shape([record], raw=raw), raw=raw)
    assert isinstance(found, RankedList)
    return found


def label_of(fields: dict[str, Any], *, raw: bool = False) -> LabelledAnswer:
    record = Record(fields, "file:7")
    found = to_pair(record, detect_shape([record], raw=raw), raw=raw)
    assert isinstance(found, LabelledAnswer)
    return found


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
ALPACA = {"instruction": "why?", "input": "", "chosen": "because", "rejected": "dunno"}
HISTORY = [["hi", "hello"]]
TRANSCRIPT = {side: text.replace("\n\nHuman", "\nUser") for side, text in HH.items()}
COMMON_START = {"chosen": "why?\nbecause", "rejected": "why?\ndunno"}

# shape, record, prompt, chosen, rejected
SHAPED: list[tuple[str, dict[str, Any], Any, Any, Any]] = [
    ("text", TEXT, "why?", "because", "dunno"),
    ("alpaca", ALPACA, "why?", "because", "dunno"),
    ("alpaca", ALPACA | {"input": "a text", "history": []}, "why?\na text", "because", "dunno"),
    ("alpaca", ALPACA | {"history": HISTORY}, HH_TURNS, "because", "dunno"),
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
    ("transcript", TRANSCRIPT, HH_TURNS, [GOOD], [BAD]),
    ("common_start", COMMON_START, "why?", "because", "dunno"),
]

LABELLED = {"prompt": "why?", "completion": "because", "label": True}
LABELLED_CHAT = {"messages": [SYSTEM, Q, GOOD], "label": False}
TURNS = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}]

# record, prompt, answer; all of shape label, and good
LABELS: list[tuple[dict[str, Any], Any, Any]] = [
    (LABELLED, "why?", "because"),
    ({"prompt": [SYSTEM, Q], "completion": [GOOD], "label": 1}, [SYSTEM, Q], [GOOD]),
    ({"prompt": "why?", "completion": GOOD, "label": "good"}, "why?", [GOOD]),
    ({"prompt": [Q], "completion": "because", "label": "chosen"}, [Q], "because"),
    *(({"prompt": "why?", name: "because", "kto_tag": True}, "why?", "because") for name in ("response", "output")),
    # What the right answer would be is not what is judged.
    (LABELLED | {"answer": "42"}, "why?", "because"),
    ({"instruction": "why?", "input": "a text", "output": "because", "kto_tag": "true"}, "why?\na text", "because"),
    (
        {"instruction": "why?", "history": HISTORY, "response": "because", "label": "up"},
        [user("hi"), assistant("hello"), Q],
        "because",
    ),
    (LABELLED_CHAT | {"label": True}, [SYSTEM, Q], [GOOD]),
    ({"messages": TURNS, "kto_tag": "thumbs_up"}, [Q], [GOOD]),
    ({"conversations": TURNS, "label": "True"}, [Q], [GOOD]),
    ({"prompt": "why?", "messages": [Q, GOOD], "label": "1"}, [Q], [GOOD]),
]

ANSWERS, SCORES = ["one", "two", "three"], [1.0, 3.0, 2.0]
RESPONSES = {"prompt": "why?", "responses": ANSWERS, "scores": SCORES}
COMPLETIONS = {
    "instruction": "why?",
    "completions": [
        {"response": text, "overall_score": score, "model": "m"} for text, score in zip(ANSWERS, SCORES, strict=True)
    ],
}
# shape, record; all with the same answers and scores
LISTS: list[tuple[str, dict[str, Any]]] = [
    ("list", RESPONSES),
    ("list", {"instruction": "why?", "generations": ANSWERS, "ratings": SCORES, "model": "x"}),
    ("list", {"prompt": "why?", "answers": ANSWERS, "rewards": SCORES}),
    ("list", {"prompt": "why?", "completions": ANSWERS, "scores": ["1", "3.0", "2"]}),
    ("list", RESPONSES | {"label": True, "completion": "one"}),
    ("completions", COMPLETIONS),
]
