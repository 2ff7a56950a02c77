"""Runs as one HTML page that needs nothing but itself: no network, no library."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

from isopref import __version__
from isopref.errors import RunError
from isopref.report import charts
from isopref.report.charts import Line, Side
from isopref.report.compare import math_that_differs
from isopref.report.elements import Html, element, fixed, join, number
from isopref.report.figures import (
    LABELS,
    FieldRow,
    FigureRow,
    Interval,
    duration,
    field_rows,
    figure_rows,
    is_default,
    names,
    range_text,
    shown,
)
from isopref.report.read import Rewards, RunRecord, Series

MOST_RUNS = 6  # as many as there are colours that can be told apart


class Curve(NamedTuple):
    """A chart over steps: its metrics with their names, the second of which is drawn dashed or as marks."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    unit: str = ""
    noisy: bool = True


CURVES = (
    Curve("Loss", (("train/loss", "training"), ("eval/loss", "held out"))),
    Curve("Accuracy", (("train/accuracy", "training"), ("eval/accuracy", "held out")), "share of pairs"),
    Curve("Margin", (("train/margin", "margin"),), "nats, without beta"),
    Curve("Log-probabilities", (("train/logps_chosen", "chosen"), ("train/logps_rejected", "rejected")), "nats"),
    Curve("Rewards", (("train/rewards_chosen", "chosen"), ("train/rewards_rejected", "rejected")), "nats times beta"),
    Curve("Gradient norm", (("optim/grad_norm", "norm"),), "before clipping"),
    Curve("Learning rate", (("optim/lr", "rate"),), noisy=False),
    Curve("Speed", (("speed/pairs_per_s", "pairs/s"),), "pairs per second"),
    Curve("MFU", (("speed/mfu", "MFU"),), "useful share of the hardware"),
    Curve("Peak memory", (("speed/peak_memory_gib", "GiB"),), "GiB, first rank", noisy=False),
)


def page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several laid over each other. Raises RunError for more than can be told apart."""
    if len(runs) > MOST_RUNS:
        raise RunError(f"{len(runs)} runs are too many for one report, which tells {MOST_RUNS} apart. Name fewer.")
    labels = names(runs)
    curves, data = _curves(runs, labels)
    title = labels[0] if len(runs) == 1 else " · ".join(labels)
    body = join(
        _head(runs, labels),
        _math_that_differs(runs, labels) if len(runs) > 1 else None,
        _evaluation(runs, labels),
        curves,
        _rewards(runs, labels),
        _answers(runs, labels),
        _config(runs, labels),
        _environment(runs, labels),
        element("footer", f"Made by isopref {__version__}. Intervals: 95%, by bootstrap over the held-out pairs."),
    )
    return _document(title, body, data)


def _document(title: str, body: Html, data: dict[str, Any]) -> str:
    style, script = (resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _ASSETS)
    # Only this script may run and nothing may be fetched, whatever text of a model is on the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    series = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("title", title),
        element("style", Html(style)),
    )
    scripts = join(
        element("script", Html(series), type="application/json", id="series"),
        element("script", Html(script)),
    )
    document = element("html", element("head", head), element("body", body, scripts), lang="en")
    return f"<!doctype html>\n{document}\n"


_ASSETS = ("page.css", "page.js")


def _head(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html:
    if len(runs) == 1:
        return join(element("h1", labels[0]), _about(runs[0]), _tiles(runs[0]))
    parts = [element("h1", f"{len(runs)} runs")]
    for slot, (run, label) in enumerate(zip(runs, labels, strict=True)):
        parts += [element("h3", element("span", label, class_=f"key slot{slot}")), _about(run), _tiles(run)]
    return join(*parts)


def _about(run: RunRecord) -> Html:
    """One line: what was trained on what, and how it is."""
    objective = run.config.get("objective", {})
    pairs = run.start("pairs")
    parts = [
        str(run.config.get("model", {}).get("path", "")),
        f"{objective.get('loss', '')}, weighting by {objective.get('weighting', '')}",
        f"{pairs:,} pairs" if pairs else "",
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
    loss = run.metrics.get("train/loss")
    if loss is not None:
        tiles.append(_tile("training loss", number(loss.values[-1]), f"from {number(loss.values[0])}"))
    speed, mfu = (run.metrics.get(name) for name in ("speed/pairs_per_s", "speed/mfu"))
    if speed is not None:
        note = "" if mfu is None else f"MFU {100 * _median(mfu):.0f}%, "
        tiles.append(_tile("pairs per second", number(_median(speed)), f"{note}median of all steps"))
    steps = run.state.steps if run.state is not None else run.last_step
    note = duration(run.state.seconds) if run.state is not None and run.state.seconds else ""
    tiles.append(_tile("steps", f"{run.last_step:,}", f"of {steps:,}{f', {note}' if note else ''}"))
    return element("dl", *tiles, class_="tiles")


def _tile(title: str, value: str, note: str) -> Html:
    return element("div", element("dt", title), element("dd", value, element("small", note)))


def _median(series: Series) -> float:
    return sorted(series.values)[len(series.values) // 2]


def _math_that_differs(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html:
    rows = math_that_differs(list(runs))
    if not rows:
        return join(
            element("h2", "The math"), element("p", "All of them have the same math: only layout and run differ.")
        )
    return join(element("h2", "The math that differs"), _field_table(rows, labels))


def _curves(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[Html | None, dict[str, Any]]:
    """All charts over steps, and the values that the page's script shows."""
    figures, data = [], {}
    for curve in CURVES:
        lines = list(_lines(curve, runs, labels))
        if lines:
            key = curve.title.lower().replace(" ", "-")
            keys = [] if len(curve.metrics) == 1 else list(_legend(curve, runs))
            figure, data[key] = charts.over_steps(curve.title, lines, key, legend=keys, unit=curve.unit)
            figures.append(figure)
    if not figures:
        return None, data
    longest = max(len(series.steps) for run in runs for series in run.metrics.values())
    note = f" Drawn from {longest:,} logged steps, the extremes of every stretch kept." * (longest > charts.MOST_POINTS)
    trend = " A bold line is the mean around each step." * (longest >= charts.TREND_FROM)
    legend = [element("span", label, class_=f"key slot{slot}") for slot, label in enumerate(labels)]
    return join(
        element("h2", "Over steps"),
        element("p", *legend, class_="runs") if len(runs) > 1 else None,
        element("p", f"Point at a chart, or use the arrow keys, for values.{trend}{note}", class_="soft"),
        element("div", *figures, class_="charts"),
    ), data


def _lines(curve: Curve, runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[Line]:
    for slot, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for place, (metric, side) in enumerate(curve.metrics):
            series = run.metrics.get(metric)
            if series is None:
                continue
            held_out = metric.startswith("eval/")
            name = side if len(runs) == 1 else label if len(curve.metrics) == 1 else f"{label}, {side}"
            several = len(runs) > 1
            style, dashed = f"slot{slot if several else place}", several and place > 0
            noisy = curve.noisy and not held_out
            yield Line(name, series.steps, series.values, style, dashed, marks=held_out, noisy=noisy)


def _legend(curve: Curve, runs: Sequence[RunRecord]) -> Iterator[Line]:
    for place, (metric, side) in enumerate(curve.metrics):
        if any(metric in run.metrics for run in runs):
            yield Line(side, (), (), f"slot{place}" if len(runs) == 1 else "", len(runs) > 1 and place > 0)


def _evaluation(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html | None:
    every = [(slot, label, run) for slot, (run, label) in enumerate(zip(runs, labels, strict=True)) if run.evaluation]
    if not every:
        return None
    parts = [element("h2", f"{every[0][2].evaluation['after']['pairs']:,} held-out pairs")]
    rows = {slot: {row.label: row for row in figure_rows(run)} for slot, _, run in every}
    wanted = list(dict.fromkeys(label for of_run in rows.values() for label in of_run))
    body = []
    for wanted_label in wanted:
        of_runs = [(slot, label, rows[slot].get(wanted_label)) for slot, label, _ in every]
        low, high = _range([row for _, _, row in of_runs if row is not None])
        if len(runs) > 1:
            body.append(element("tr", element("th", element("b", wanted_label), colspan=4)))
        for slot, label, row in of_runs:
            if row is not None:
                head = wanted_label if len(runs) == 1 else element("span", label, class_=f"key slot{slot}")
                body.append(_figure_row(head, row, slot, low, high))
    head = element("tr", *(element("th", text) for text in ("", "before", "after", "")))
    table = element("table", element("thead", head), element("tbody", *body), class_="figures")
    return join(*parts, element("div", table, class_="wide"))


def _figure_row(head: str, row: FigureRow, slot: int, low: float, high: float) -> Html:
    both = [
        (figure, style) for figure, style in ((row.before, "was"), (row.after, f"slot{slot}")) if figure is not None
    ]
    cells = [_interval_cell(figure, row.sign) for figure in (row.before, row.after)]
    return element("tr", element("th", head), *cells, element("td", charts.intervals(both, low, high)))


def _interval_cell(figure: Interval | None, sign: str) -> Html:
    if figure is None:
        return element("td", "-")
    return element("td", fixed(figure["value"], 3, sign), element("small", range_text(figure, sign)))


def _range(rows: Sequence[FigureRow]) -> tuple[float, float]:
    """What the strip of a figure spans, in all runs alike."""
    figures = [figure for row in rows for figure in (row.before, row.after) if figure is not None]
    low, high = min(figure["low"] for figure in figures), max(figure["high"] for figure in figures)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _rewards(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html | None:
    parts: list[Html] = []
    for slot, (run, label) in enumerate(zip(runs, labels, strict=True)):
        if run.rewards is not None and len(run.rewards.tokens):
            if len(runs) > 1:
                parts.append(element("h3", element("span", label, class_=f"key slot{slot}")))
            parts += _reward_charts(run.rewards, ("slot0", "slot1") if len(runs) == 1 else (f"slot{slot}", "was"))
    return join(element("h2", "Rewards of held-out answers"), *parts) if parts else None


def _reward_charts(rewards: Rewards, styles: tuple[str, str]) -> Iterator[Html]:
    if not rewards.before.any():
        text = "Before training the model is its own reference, so every reward is 0."
        yield element("p", text, class_="soft")
    both = (("before", rewards.before), ("after", rewards.after))
    ends = [float(end) for _, values in both for end in (values.min(), values.max())]
    across, up = charts.fitted(ends, 0, 1), charts.fitted(ends, charts.BOTTOM, charts.TOP)
    labels = ("chosen", "rejected")
    sides = {when: list(map(Side, labels, rewards.tokens.T, values.T, styles)) for when, values in both}
    figures = [charts.histogram(f"Rewards, {when}", sides[when], across.low, across.high) for when in sides]
    figures += [charts.scatter(f"Reward by tokens, {when}", sides[when], up) for when in sides]
    yield element("div", *figures, class_="charts pairs")


def _answers(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html | None:
    """Every prompt with its answers before and after; of several runs, what came before is shown once."""
    prompts = dict.fromkeys(sample["prompt"] for run in runs for sample in run.samples)
    if not prompts:
        return None
    parts = [element("h2", "Answers to held-out prompts")]
    for prompt in prompts:
        parts.append(element("p", prompt, class_="prompt"))
        for how, title in (("greedy", None), ("sampled", "drawn answers")):
            cards = list(_cards(prompt, how, runs, labels))
            if cards:
                answers = element("div", *cards, class_="answers")
                parts.append(answers if title is None else element("details", element("summary", title), answers))
    return join(*parts)


def _cards(prompt: str, how: str, runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[Html]:
    before: set[str] = set()
    for slot, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for sample in run.samples:
            if sample["prompt"] != prompt or f"{how}_after" not in sample:
                continue
            old, new = sample[f"{how}_before"], sample[f"{how}_after"]
            if old not in before:
                yield _card("before", old, "was")
            before.add(old)
            yield _card("after" if len(runs) == 1 else f"after, {label}", new, f"slot{slot}")


def _card(title: str, text: str, style: str) -> Html:
    return element("div", element("small", title), element("pre", text or "(nothing)"), class_=style)


def _config(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html:
    """Every field: what is the math, and what is not. What has its default is paler."""
    parts = []
    for title, math in (("The math", True), ("Layout and run: not the math", False)):
        rows = field_rows(runs, math=math)
        parts.append(element("div", element("h3", title), _field_table(rows, labels)))
    ids = dict.fromkeys(str(run.start("run_id")) for run in runs if run.starts)
    note = f"Run id {', '.join(ids)}. " if ids else ""
    text = f"{note}Pale values are defaults."
    columns = element("div", *parts, class_="columns" if len(runs) == 1 else None)
    return join(element("h2", "Config"), element("p", text, class_="soft"), columns)


def _field_table(rows: Sequence[FieldRow], labels: Sequence[str]) -> Html:
    body = []
    for row in rows:
        cells = [
            element("td", element("code", shown(value)), class_="default" if is_default(row.name, value) else None)
            for value in row.values
        ]
        body.append(element("tr", element("th", row.name), *cells, class_="differs" if row.differs else None))
    head = None
    if len(labels) > 1:
        keys = (element("th", element("span", label, class_=f"key slot{slot}")) for slot, label in enumerate(labels))
        head = element("thead", element("tr", element("th"), *keys))
    return element("div", element("table", head, element("tbody", *body)), class_="wide")


def _environment(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html | None:
    known = list(dict.fromkeys(name for run in runs if run.starts for name in run.starts[-1]))
    if not known:
        return None
    rows = [FieldRow(name.replace("_", " "), [run.start(name) for run in runs]) for name in known]
    again = max(len(run.starts) for run in runs) > 1
    rows += [FieldRow("starts", [len(run.starts) for run in runs])] * again
    return join(element("h2", "Environment"), _field_table(rows, labels))
