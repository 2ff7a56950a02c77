"""The parts of a report below its overview, besides the curves, each for one run or several."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isopref.report import charts, compare
from isopref.report.charts import Scale, Side
from isopref.report.cost import cost_of
from isopref.report.elements import Html, card, element, fixed, join
from isopref.report.figures import (
    Entry,
    FieldRow,
    FigureRow,
    Interval,
    field_rows,
    figure_rows,
    held_out_title,
    is_default,
    range_text,
    shown,
)
from isopref.report.overview import key
from isopref.runs.read import Rewards


def math_that_differs(every: Sequence[Entry]) -> Html | None:
    """The parts of the math that differ between runs."""
    if len(every) == 1:
        return None
    rows = compare.math_that_differs([entry.run for entry in every])
    if not rows:
        text = "All runs have the same math. They differ only in layout and run."
        return join(element("h2", "The math"), element("p", text))
    return join(element("h2", "The math that differs"), _field_table(rows, every))


def evaluation(every: Sequence[Entry]) -> Html | None:
    """The figures of held-out pairs before and after, with their intervals on a scale that all runs share."""
    evaluated = [entry for entry in every if entry.run.evaluation]
    if not evaluated:
        return None
    rows = [{row.label: row for row in figure_rows(entry.run)} for entry in evaluated]
    body = []
    for label in dict.fromkeys(label for of_run in rows for label in of_run):
        found = [(entry, of_run[label]) for entry, of_run in zip(evaluated, rows, strict=True) if label in of_run]
        scale = _scale([row for _, row in found])
        if len(every) > 1:
            axis = element("td", charts.intervals([], scale), class_="axis")
            body.append(element("tr", element("th", element("b", label), colspan=3), axis, class_="group"))
        for entry, row in found:
            name = label if len(every) == 1 else key(entry)
            body.append(_figure_row(name, row, entry.style, scale, labelled=len(every) == 1))
    columns = element("tr", *(element("th", text) for text in ("", "before", "after", "95% intervals")))
    table = element("table", element("thead", columns), element("tbody", *body), class_="figures")
    titles = {entry.label: _held_out(entry.run.evaluation["after"]) for entry in evaluated}
    title, told = next(iter(titles.values())), None
    if len(set(titles.values())) > 1:
        numbers = " ".join(f"{label}: {count}." for label, count in titles.items())
        title, told = "Held-out metrics", element("p", numbers, class_="soft")
    return join(element("h2", title), told, element("div", table, class_="wide"))


def _held_out(after: Mapping[str, Any]) -> str:
    return held_out_title(after["pairs"], after.get("lists", 0), after.get("answers", 0))


def cost(every: Sequence[Entry]) -> Html | None:
    """Spot checks before and after, with the answers that were lost."""
    checked = [entry for entry in every if entry.run.spot_checks]
    if not checked:
        return None
    body, lost = [], []
    for entry in checked:
        found = cost_of(entry.run.spot_checks)
        if len(every) > 1:
            body.append(element("tr", element("th", key(entry), colspan=3)))
        body += [_cells(*row) for row in found.rows()]
        if found.lost and len(every) > 1:
            lost.append(element("tr", element("th", key(entry), colspan=3)))
        lost += [_cells(one["prompt"], " or ".join(one["expect"]), one["after"]) for one in found.lost]
    rule = "Questions with known answers, and plain text. An answer is correct if it contains the expected text."
    return join(
        element("h2", "What it cost"),
        element("p", rule, class_="soft"),
        element(
            "div",
            _plain_table(("", "before", "after"), body),
            _plain_table(("answers lost", "expected", "answer after"), lost) if lost else None,
            class_="beside",
        ),
    )


def _cells(name: str, *cells: str) -> Html:
    return element("tr", element("th", name), *(element("td", cell) for cell in cells))


def _plain_table(columns: Sequence[str], rows: Sequence[Html]) -> Html:
    head = element("thead", element("tr", *(element("th", text) for text in columns)))
    return element("div", element("table", head, element("tbody", *rows)), class_="wide spaced")


def _figure_row(name: str, row: FigureRow, style: str, scale: Scale, *, labelled: bool) -> Html:
    both = [(figure, of) for figure, of in ((row.before, "was"), (row.after, style)) if figure and _is_finite(figure)]
    cells = [_interval_cell(figure, row.sign) for figure in (row.before, row.after)]
    return element("tr", element("th", name), *cells, element("td", charts.intervals(both, scale, labelled=labelled)))


def _interval_cell(figure: Interval | None, sign: str) -> Html:
    if figure is None:
        return element("td", "-")
    return element("td", fixed(figure["value"], 3, sign), element("small", range_text(figure, sign)))


def _scale(rows: Sequence[FigureRow]) -> Scale:
    """The range that a figure's strip spans, the same for all runs: its possible range, or that of its values."""
    bounds = rows[0].bounds
    if bounds is not None:
        return charts.fitted(bounds, *charts.STRIP)
    figures = [figure for row in rows for figure in (row.before, row.after) if figure and _is_finite(figure)]
    ends = [figure[end] for figure in figures for end in ("low", "high")]
    return charts.fitted([*ends, 0.0] if rows[0].sign else ends, *charts.STRIP)


def _is_finite(figure: Interval) -> bool:
    return all(map(math.isfinite, figure.values()))


def rewards(every: Sequence[Entry]) -> Html | None:
    """The distribution of held-out rewards, and rewards by length, before and after."""
    parts: list[Html] = []
    for entry in every:
        if entry.run.rewards is not None:
            parts += [element("h3", key(entry))] * (len(every) > 1)
            styles = ("slot0", "slot1") if len(every) == 1 else (entry.style, "was")
            parts += _reward_charts(entry.run.rewards, styles)
    return join(element("h2", "Rewards of held-out answers"), *parts) if parts else None


def _reward_charts(rewards: Rewards, styles: tuple[str, str]) -> Iterator[Html]:
    finite_N = np.isfinite(np.concatenate([rewards.before, rewards.after], axis=1)).all(axis=1)
    num_left_out = int((~finite_N).sum())
    if num_left_out:
        yield element("p", f"{num_left_out:,} pairs with non-finite rewards are left out.")
    if not finite_N.any():
        return
    tokens, before, after = (values[finite_N] for values in (rewards.tokens, rewards.before, rewards.after))
    if not before.any():
        yield element("p", "Before training the model is its own reference, so every reward is 0.", class_="soft")
    ends = [float(end) for values in (before, after) for end in (values.min(), values.max())]
    across, up = charts.fitted(ends, 0, 1), charts.fitted(ends, charts.BOTTOM, charts.TOP)
    sides = {
        when: list(map(Side, ("chosen", "rejected"), tokens.T, values.T, styles))
        for when, values in (("before", before), ("after", after))
    }
    figures = [charts.histogram(f"Rewards, {when}", sides[when], across.low, across.high) for when in sides]
    figures += [charts.scatter(f"Reward by length, {when}", sides[when], up) for when in sides]
    yield element("div", *figures, class_="charts pairs")


def answers(every: Sequence[Entry]) -> Html | None:
    """Every prompt with its answers before and after. An earlier answer that several runs share is shown once."""
    prompts = dict.fromkeys(sample["prompt"] for entry in every for sample in entry.run.samples)
    if not prompts:
        return None
    parts = [element("h2", "Answers to held-out prompts")]
    for prompt in prompts:
        greedy, drawn = (list(_cards(prompt, how, every)) for how in ("greedy", "sampled"))
        parts += [element("p", prompt, class_="prompt"), element("div", *greedy, class_="answers")]
        if drawn:
            summary = element("summary", "sampled answers")
            parts.append(element("details", summary, element("div", *drawn, class_="answers")))
    return join(*parts)


def _cards(prompt: str, how: str, every: Sequence[Entry]) -> Iterator[Html]:
    before: set[str] = set()
    for entry in every:
        for sample in entry.run.samples:
            if sample["prompt"] != prompt or f"{how}_after" not in sample:
                continue
            old, new = sample[f"{how}_before"], sample[f"{how}_after"]
            if old not in before:
                yield card("before", old, "was")
            before.add(old)
            yield card("after" if len(every) == 1 else f"after, {entry.label}", new, entry.style)


def config(every: Sequence[Entry]) -> Html:
    """Every config field, the math apart from the rest, defaults in a paler colour; and each run's environment."""
    runs = [entry.run for entry in every]
    tables = [
        ("The math", field_rows(runs, math=True)),
        ("Layout and run (not the math)", field_rows(runs, math=False)),
        ("Environment", _environment(every)),
    ]
    parts = [element("div", element("h3", title), _field_table(rows, every)) for title, rows in tables if rows]
    ids = dict.fromkeys(str(run.start("run_id")) for run in runs if run.starts)
    known = f"Run id {', '.join(ids)}. " if ids else ""
    columns = element("div", *parts, class_="columns" if len(every) == 1 else None)
    return join(element("h2", "Config"), element("p", f"{known}Default values are paler.", class_="soft"), columns)


def _field_table(rows: Sequence[FieldRow], every: Sequence[Entry]) -> Html:
    body = []
    for row in rows:
        cells = [
            element(
                "td",
                element("code", _breakable(shown(value))),
                class_="default" if is_default(row.name, value) else None,
            )
            for value in row.values
        ]
        name = element("th", _breakable(row.name), class_="field")
        body.append(element("tr", name, *cells, class_="differs" if row.differs else None))
    columns = None
    if len(every) > 1:
        columns = element("thead", element("tr", element("th"), *(element("th", key(entry)) for entry in every)))
    return element("div", element("table", columns, element("tbody", *body)), class_="wide")


def _breakable(text: str) -> Html:
    """A name, a path or a digest that may wrap only after punctuation, or after 16 characters without any."""
    return Html(re.sub(r"(?<=[._/,-])(?=[^\s._/,-])|(?<=[^\s._/,&;-]{16})(?=[^\s._/,&;-])", "<wbr>", join(text)))


def _environment(every: Sequence[Entry]) -> list[FieldRow]:
    """What each run recorded at its last start."""
    runs = [entry.run for entry in every]
    known = list(dict.fromkeys(name for run in runs if run.starts for name in run.starts[-1]))
    if not known:
        return []
    names = {name: name.replace("_", " ") for name in known} | {"pairs": "examples"}  # of any unit
    rows = [FieldRow(names[name], [run.start(name) for run in runs]) for name in known]
    return [*rows, FieldRow("starts", [len(run.starts) for run in runs])]
