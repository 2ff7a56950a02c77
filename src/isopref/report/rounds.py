"""Rounds of sampling, judging and training: one table, and answers side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

from isopref.report.elements import card, element, fixed, join, number
from isopref.report.html import MOST_RUNS, document

Interval = Mapping[str, float]


@dataclass(frozen=True)
class Round:
    """What is known about the model after a round. Intervals have value, low and high."""

    name: str
    answers: list[tuple[Any, str]]  # prompts and answers, held out
    tokens: float  # mean of an answer
    ended: float  # share of answers that ended by themselves
    reward: float | None = None
    win_rate: Interval | None = None  # against the start model
    length_controlled: Interval | None = None
    failed: int = 0  # held-out prompts on which the judge gave no verdict
    kl: Interval | None = None  # to the start model, nats per answer
    accuracy: Interval | None = None
    accuracy_before: Interval | None = None
    correct: tuple[int, int] | None = None  # spot checks answered correctly, and their number
    correct_before: tuple[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        left_out = ("name", "answers", "accuracy_before", "correct_before")
        return {name: value for name, value in vars(self).items() if name not in left_out}


def table(rounds: Sequence[Round]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: one row per figure, one column per round."""
    rows = [
        ["mean reward of held-out answers", *(number(one.reward) for one in rounds)],
        ["win rate against the start model", *(_interval(one.win_rate, 2) for one in rounds)],
        ["the same, length-controlled", *(_interval(one.length_controlled, 2) for one in rounds)],
        ["prompts without a verdict", *(str(one.failed or "-") for one in rounds)],
        ["KL from the start model, nats per answer", *(_interval(one.kl, 1) for one in rounds)],
        ["mean tokens per answer", *(fixed(one.tokens, 1) for one in rounds)],
        ["answers that ended by themselves", *(f"{100 * one.ended:.0f}%" for one in rounds)],
        ["held-out accuracy", *(_interval(one.accuracy, 2) for one in rounds)],
        ["spot checks, correct", *("-" if one.correct is None else "{} of {}".format(*one.correct) for one in rounds)],
    ]
    known = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return ["", *(one.name for one in rounds)], known


def page(title: str, rounds: Sequence[Round], most_prompts: int) -> str:
    """The report of all rounds as one HTML page."""
    columns, rows = table(rounds)
    head = element("thead", element("tr", *(element("th", column) for column in columns)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    figures = element("div", element("table", head, body), class_="wide")
    parts = [element("h1", title), figures, element("h2", "Answers to held-out prompts")]
    for place, (prompt, _) in enumerate(rounds[0].answers[:most_prompts]):
        answers = [one.answers[place][1] for one in rounds]
        cards = (card(one.name, text, style) for one, text, style in zip(rounds, answers, _styles(), strict=False))
        parts += [element("p", _shown(prompt), class_="prompt"), element("div", *cards, class_="answers")]
    parts.append(element("footer", "95% intervals: Wilson for win rates and accuracies, otherwise bootstrap."))
    return document(title, join(*parts), {})


def _styles() -> Iterator[str]:
    """The colours of the models: grey for the start model, then the colours of runs, repeated as needed."""
    return chain(["was"], cycle(f"slot{slot}" for slot in range(MOST_RUNS)))


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _interval(value: Interval | None, digits: int) -> str:
    if value is None:
        return "-"
    low, high = (fixed(value[side], digits) for side in ("low", "high"))
    return f"{fixed(value['value'], digits)} [{low}, {high}]"
