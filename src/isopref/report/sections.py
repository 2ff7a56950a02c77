"""The parts of a report besides its curves, each for one run or several."""

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from isopref.report import charts, compare
from isopref.report.charts import Side
from isopref.report.cost import cost_of
from isopref.report.elements import Html, element, fixed, join, number
from isopref.report.figures import (
    LABELS,
    Entry,
    FieldRow,
    FigureRow,
    Interval,
    duration,
    field_rows,
    figure_rows,
    held_out_title,
    is_default,
    range_text,
    shown,
    unit,
)
from isopref.runs.read import Rewards, RunRecord, Series


def head(every: Sequence[Entry]) -> Html:
    """What runs these are, with the few figures one looks for first."""
    if len(every) == 1:
        return join(element("h1", every[0].label), _about(every[0].run), _tiles(every[0].run))
    parts = [element("h1", f"{len(every)} runs")]
    for entry in every:
        parts += [element("h3", _key(entry)), _about(entry.run), _tiles(entry.run)]
    return join(*parts)


def _key(entry: Entry) -> Html:
    return element("span", entry.label, class_=f"key {entry.style}")


def _about(run: RunRecord) -> Html:
    """One line: what was trained on what, and how it is."""
    objective = run.config.get("objective", {})
    pairs = run.start("pairs")
    parts = [
        str(run.config.get("model", {}).get("path", "")),
        f"{objective.get('loss', '')}, weighting by {objective.get('weighting', '')}",
        f"{pairs:,} {unit(run)}s" if pairs else "",
        run.status,
    ]
    error = element("p", f"It failed: {run.state.error}") if run.state is not None and run.state.error else None
    return join(element("p", " · ".join(part for part in parts if part), class_="soft"), error)


def _tiles(run: RunRecord) -> Html:
    """The few figures one looks for first."""
    tiles = []
    for name, title in (("accuracy", "held-out accuracy"), ("reward_margin", "held-out reward margin")):
        after, before = run.figure(name), run.figure(name, "before")
        if after is not None:
            sign = LABELS[name][1]
            was = f"from {fixed(before['value'], 2, sign)}; " if before is not None else ""
            tiles.append(_tile(title, fixed(after["value"], 2, sign), f"{was}95%: {range_text(after, sign, digits=2)}"))
    tiles += _cost_tiles(run)
    loss = run.metrics.get("train/loss")
    if loss is not None:
        tiles.append(_tile("training loss", number(loss.values[-1]), f"from {number(loss.values[0])}"))
    speed, mfu = (run.metrics.get(name) for name in ("speed/pairs_per_s", "speed/mfu"))
    if speed is not None:
        note = "" if mfu is None else f"MFU {100 * _median(mfu):.0f}%, "
        tiles.append(_tile(f"{unit(run)}s per second", number(_median(speed)), f"{note}median of all steps"))
    steps = run.state.steps if run.state is not None else run.last_step
    took = f", {duration(run.state.seconds)}" if run.state is not None and run.state.seconds else ""
    since = " since the last start" * bool(took and len(run.starts) > 1)
    tiles.append(_tile("steps", f"{run.last_step:,}", f"of {steps:,}{took}{since}"))
    return element("dl", *tiles, class_="tiles")


def _cost_tiles(run: RunRecord) -> Iterator[Html]:
    found = cost_of(run.spot_checks)
    if found.known:
        yield _tile("answers still correct", f"{found.num_kept} of {len(found.known)}", "of those correct before")
    if found.text is not None and found.text_change is not None:
        before, after = (fixed(found.text[name], 2) for name in ("logp_before", "logp_after"))
        yield _tile("text log-prob per token", fixed(found.text_change, 3, "+"), f"from {before} to {after}")


def _tile(title: str, value: str, note: str) -> Html:
    return element("div", element("dt", title), element("dd", value, element("small", note)))


def _median(series: Series) -> float:
    return sorted(series.values)[len(series.values) // 2]


def math_that_differs(every: Sequence[Entry]) -> Html | None:
    """What of the math is not the same in all runs."""
    if len(every) == 1:
        return None
    rows = compare.math_that_differs([entry.run for entry in every])
    if not rows:
        text = "All of them have the same math: only layout and run differ."
        return join(element("h2", "The math"), element("p", text))
    return join(element("h2", "The math that differs"), _field_table(rows, every))


def evaluation(every: Sequence[Entry]) -> Html | None:
    """The figures of held-out pairs before and after, with their intervals."""
    evaluated = [entry for entry in every if entry.run.evaluation]
    if not evaluated:
        return None
    rows = [{row.label: row for row in figure_rows(entry.run)} for entry in evaluated]
    body = []
    for label in dict.fromkeys(label for of_run in rows for label in of_run):
        found = [(entry, of_run[label]) for entry, of_run in zip(evaluated, rows, strict=True) if label in of_run]
        low, high = _range([row for _, row in found])
        if len(every) > 1:
            body.append(element("tr", element("th", element("b", label), colspan=4)))
        for entry, row in found:
            body.append(_figure_row(label if len(every) == 1 else _key(entry), row, entry.style, low, high))
    columns = element("tr", *(element("th", text) for text in ("", "before", "after", "95% intervals")))
    table = element("table", element("thead", columns), element("tbody", *body), class_="figures")
    after = evaluated[0].run.evaluation["after"]
    title = held_out_title(after["pairs"], after.get("lists", 0))
    return join(element("h2", title), element("div", table, class_="wide"))


def cost(every: Sequence[Entry]) -> Html | None:
    """Spot checks before and after, with the answers that were lost."""
    checked = [entry for entry in every if entry.run.spot_checks]
    if not checked:
        return None
    body, lost = [], []
    for entry in checked:
        found = cost_of(entry.run.spot_checks)
        if len(every) > 1:
            body.append(element("tr", element("th", _key(entry), colspan=3)))
        body += [_cells(*row) for row in found.rows()]
        if found.lost and len(every) > 1:
            lost.append(element("tr", element("th", _key(entry), colspan=3)))
        lost += [_cells(one["prompt"], " or ".join(one["expect"]), one["after"]) for one in found.lost]
    rule = "Questions with known answers, and plain text. An answer is correct if it contains what is expected."
    return join(
        element("h2", "What it cost"),
        element("p", rule, class_="soft"),
        _plain_table(("", "before", "after"), body),
        _plain_table(("answers lost", "expected", "answer after"), lost) if lost else None,
    )


def _cells(name: str, *cells: str) -> Html:
    return element("tr", element("th", name), *(element("td", cell) for cell in cells))


def _plain_table(columns: Sequence[str], rows: Sequence[Html]) -> Html:
    head = element("thead", element("tr", *(element("th", text) for text in columns)))
    return element("div", element("table", head, element("tbody", *rows)), class_="wide spaced")


def _figure_row(name: str, row: FigureRow, style: str, low: float, high: float) -> Html:
    both = [(figure, of) for figure, of in ((row.before, "was"), (row.after, style)) if figure and _is_finite(figure)]
    cells = [_interval_cell(figure, row.sign) for figure in (row.before, row.after)]
    return element("tr", element("th", name), *cells, element("td", charts.intervals(both, low, high, row.sign)))


def _interval_cell(figure: Interval | None, sign: str) -> Html:
    if figure is None:
        return element("td", "-")
    return element("td", fixed(figure["value"], 3, sign), element("small", range_text(figure, sign)))


def _range(rows: Sequence[FigureRow]) -> tuple[float, float]:
    """What the strip of a figure spans, in all runs alike."""
    figures = [figure for row in rows for figure in (row.before, row.after) if figure and _is_finite(figure)]
    low = min((figure["low"] for figure in figures), default=0.0)
    high = max((figure["high"] for figure in figures), default=0.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _is_finite(figure: Interval) -> bool:
    return all(map(math.isfinite, figure.values()))


def rewards(every: Sequence[Entry]) -> Html | None:
    """How rewards of held-out answers are spread, and how they go with length, before and after."""
    parts: list[Html] = []
    for entry in every:
        if entry.run.rewards is not None:
            parts += [element("h3", _key(entry))] * (len(every) > 1)
            styles = ("slot0", "slot1") if len(every) == 1 else (entry.style, "was")
            parts += _reward_charts(entry.run.rewards, styles)
    return join(element("h2", "Rewards of held-out answers"), *parts) if parts else None


def _reward_charts(rewards: Rewards, styles: tuple[str, str]) -> Iterator[Html]:
    finite_N = np.isfinite(np.concatenate([rewards.before, rewards.after], axis=1)).all(axis=1)
    num_left_out = int((~finite_N).sum())
    if num_left_out:
        yield element("p", f"{num_left_out:,} pairs with rewards that are not finite are left out.")
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
    figures += [charts.scatter(f"Reward by tokens, {when}", sides[when], up) for when in sides]
    yield element("div", *figures, class_="charts pairs")


def answers(every: Sequence[Entry]) -> Html | None:
    """Every prompt with its answers before and after; of several runs, what came before is shown once."""
    prompts = dict.fromkeys(sample["prompt"] for entry in every for sample in entry.run.samples)
    if not prompts:
        return None
    parts = [element("h2", "Answers to held-out prompts")]
    for prompt in prompts:
        greedy, drawn = (list(_cards(prompt, how, every)) for how in ("greedy", "sampled"))
        parts += [element("p", prompt, class_="prompt"), element("div", *greedy, class_="answers")]
        if drawn:
            summary = element("summary", "drawn answers")
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
                yield _card("before", old, "was")
            before.add(old)
            yield _card("after" if len(every) == 1 else f"after, {entry.label}", new, entry.style)


def _card(title: str, text: str, style: str) -> Html:
    return element("div", element("small", title), element("pre", text or "(nothing)"), class_=style)


def config(every: Sequence[Entry]) -> Html:
    """Every field: what is the math, and what is not. What has its default is paler."""
    runs = [entry.run for entry in every]
    parts = [
        element("div", element("h3", title), _field_table(field_rows(runs, math=is_math), every))
        for title, is_math in (("The math", True), ("Layout and run: not the math", False))
    ]
    ids = dict.fromkeys(str(run.start("run_id")) for run in runs if run.starts)
    known = f"Run id {', '.join(ids)}. " if ids else ""
    columns = element("div", *parts, class_="columns" if len(every) == 1 else None)
    return join(element("h2", "Config"), element("p", f"{known}Pale values are defaults.", class_="soft"), columns)


def _field_table(rows: Sequence[FieldRow], every: Sequence[Entry]) -> Html:
    body = []
    for row in rows:
        cells = [
            element("td", element("code", shown(value)), class_="default" if is_default(row.name, value) else None)
            for value in row.values
        ]
        name = element("th", _breakable(row.name), class_="field")
        body.append(element("tr", name, *cells, class_="differs" if row.differs else None))
    columns = None
    if len(every) > 1:
        columns = element("thead", element("tr", element("th"), *(element("th", _key(entry)) for entry in every)))
    return element("div", element("table", columns, element("tbody", *body)), class_="wide")


def _breakable(name: str) -> Html:
    """The name of a field, which may be broken after a point or an underscore, and nowhere else."""
    return Html(re.sub(r"(?<=[._])(?=.)", "<wbr>", join(name)))


def environment(every: Sequence[Entry]) -> Html | None:
    """What each run was last started with."""
    runs = [entry.run for entry in every]
    known = list(dict.fromkeys(name for run in runs if run.starts for name in run.starts[-1]))
    if not known:
        return None
    rows = [FieldRow(name.replace("_", " "), [run.start(name) for run in runs]) for name in known]
    rows.append(FieldRow("starts", [len(run.starts) for run in runs]))
    return join(element("h2", "Environment"), _field_table(rows, every))
