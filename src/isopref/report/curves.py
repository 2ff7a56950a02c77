"""The report's charts over steps: which metrics they show, and how several runs share a chart."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from isopref.report import charts
from isopref.report.charts import Line
from isopref.report.elements import Html, element, join
from isopref.report.figures import Entry, trains_rewards


class Curve(NamedTuple):
    """A chart: its metrics with their names. If it shows several runs, the second metric is dashed."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    unit: str = ""
    noisy: bool = True


CURVES = (
    Curve("Loss", (("train/loss", "training"), ("eval/loss", "held out")), "as minimised"),
    Curve("Accuracy", (("train/accuracy", "training"), ("eval/accuracy", "held out")), "share won"),
    Curve("Margin", (("train/margin", "margin"),), "nats, without beta"),
    Curve("Log-probabilities", (("train/logps_chosen", "chosen"), ("train/logps_rejected", "rejected")), "nats"),
    Curve("Rewards", (("train/rewards_chosen", "chosen"), ("train/rewards_rejected", "rejected")), "nats times beta"),
    Curve("Gradient norm", (("optim/grad_norm", "norm"),), "before clipping"),
    Curve("Learning rate", (("optim/lr", "rate"),), noisy=False),
    Curve("Speed", (("speed/pairs_per_s", "per second"),), "examples per second"),
    Curve("MFU", (("speed/mfu", "MFU"),), "share of peak FLOPs"),
    Curve("Peak memory", (("speed/peak_memory_gib", "GiB"),), "GiB, first rank", noisy=False),
)


OF_REWARD_MODELS = {"Margin": "of rewards", "Rewards": "of the model"}  # units: their rewards are not in nats


def curves(every: Sequence[Entry]) -> tuple[Html | None, dict[str, Any]]:
    """All charts, and the values that the page's script shows."""
    figures, data = [], {}
    units = OF_REWARD_MODELS if all(trains_rewards(entry.run) for entry in every) else {}
    for curve in CURVES:
        lines = list(_lines(curve, every))
        if lines:
            key = curve.title.lower().replace(" ", "-")
            figure, data[key] = charts.over_steps(
                curve.title, lines, key, legend=list(_legend(curve, every)), unit=units.get(curve.title, curve.unit)
            )
            figures.append(figure)
    if not figures:
        return None, data
    longest = max(len(series.steps) for entry in every for series in entry.run.metrics.values())
    hints = []
    if longest >= charts.TREND_FROM:
        hints.append("Bold lines are moving averages.")
    if longest > charts.MOST_POINTS:
        hints.append(f"Of {longest:,} logged steps, the minimum and maximum of each interval are drawn.")
    runs = [element("span", entry.label, class_=f"key {entry.style}") for entry in every]
    return join(
        element("h2", "Over steps"),
        element("p", *runs, class_="runs") if len(every) > 1 else None,
        element(
            "p",
            element("span", "Point at a chart, or use the arrow keys, for values. ", class_="mouse"),
            element("span", "Tap a chart for values. ", class_="touch"),
            " ".join(hints),
            class_="soft",
        ),
        element("div", *figures, class_="charts"),
    ), data


def _lines(curve: Curve, every: Sequence[Entry]) -> Iterator[Line]:
    """The lines of a chart. With one run, each metric has its colour; with several, each run has."""
    several = len(every) > 1
    for entry in every:
        for place, (metric, side) in enumerate(curve.metrics):
            series = entry.run.metrics.get(metric)
            if series is None:
                continue
            held_out = metric.startswith("eval/")
            start = entry.run.figure(metric.removeprefix("eval/"), "before") if held_out else None
            before = [] if start is None else [start["value"]]
            yield Line(
                side if not several else entry.label if len(curve.metrics) == 1 else f"{entry.label}, {side}",
                [0] * len(before) + series.steps,
                before + series.values,
                entry.style if several else f"slot{place}",
                dashed=several and place > 0,
                marks=held_out,
                noisy=curve.noisy and not held_out,
            )


def _legend(curve: Curve, every: Sequence[Entry]) -> Iterator[Line]:
    if len(curve.metrics) == 1:
        return
    several = len(every) > 1
    for place, (metric, side) in enumerate(curve.metrics):
        if any(metric in entry.run.metrics for entry in every):
            yield Line(side, (), (), "" if several else f"slot{place}", dashed=several and place > 0)
