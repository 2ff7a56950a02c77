"""Summarises the runs of hh_training.py, in figures and as a picture."""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from statistics import mean, median
from typing import Any

from isopref.report.charts import Scale, fitted

COLOURS = {"isopref": "#4269d0", "trl-liger": "#ff725c", "trl": "#efb118", "isopref-float8": "#3ca951"}
NAMES = {"isopref": "isopref", "trl-liger": "TRL with Liger", "trl": "TRL", "isopref-float8": "isopref, float8"}
WIDTH, HEIGHT = 330, 190  # of a panel, without its labels
LEFT, TOP, GAP_X, GAP_Y = 62, 52, 70, 66


def summary(runs: Sequence[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """Speed, start-up time, distance between the curves, and when each system reaches the same accuracy."""
    by_system = {
        name: [one for one in runs if one["system"] == name] for name in dict.fromkeys(r["system"] for r in runs)
    }
    found: dict[str, Any] = {name: _of_system(some, batch_size) for name, some in by_system.items()}
    ours = by_system["isopref"]
    found["beside_isopref"] = {name: _beside(ours, some) for name, some in by_system.items() if name != "isopref"}
    return found


def _beside(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    accuracy = min(mean(one["evaluations"][-1]["accuracy"] for one in some) for some in (ours, theirs))
    return {
        "train_s_ratio": median(one["train_s"] for one in theirs) / median(one["train_s"] for one in ours),
        "loss_difference": _difference(ours, theirs, "steps", "loss"),
        "eval_loss_difference": _difference(ours, theirs, "evaluations", "loss"),
        "eval_accuracy_difference": _difference(ours, theirs, "evaluations", "accuracy"),
        "accuracy": accuracy,
        "seconds_to_accuracy": {"isopref": _until(ours, accuracy), "theirs": _until(theirs, accuracy)},
    }


def _of_system(runs: Sequence[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    final = [one["evaluations"][-1] for one in runs]
    return {
        "train_s": [one["train_s"] for one in runs],
        "startup_s": [one["startup_s"] for one in runs],
        "eval_s": [one["eval_s"] for one in runs],
        "pairs_per_s": median(len(one["steps"]) * batch_size / one["train_s"] for one in runs),
        "steady_pairs_per_s": median(_steady(one, batch_size) for one in runs),
        "peak_memory_gib": max(one["peak_memory_gib"] for one in runs),
        "final_loss": [one["loss"] for one in final],
        "final_accuracy": [one["accuracy"] for one in final],
    }


def _steady(run: dict[str, Any], batch_size: int) -> float:
    """Pairs per second over the second half of the steps."""
    half = run["steps"][len(run["steps"]) // 2 - 1 :]
    return float((len(half) - 1) * batch_size) / float(half[-1]["seconds"] - half[0]["seconds"])


def _difference(ours: Sequence[Any], theirs: Sequence[Any], what: str, figure: str) -> dict[str, float]:
    """Mean and maximum of the absolute differences between both systems at the same step and seed."""
    apart = [
        abs(mine[figure] - other[figure])
        for one, two in zip(ours, theirs, strict=False)  # the last seeds may be missing
        for mine, other in zip(one[what], two[what], strict=True)
    ]
    return {"mean": mean(apart), "max": max(apart)}


def _until(runs: Sequence[dict[str, Any]], accuracy: float) -> float:
    """Seconds of training until the mean accuracy over all seeds reaches `accuracy`."""
    for evaluations in zip(*(one["evaluations"] for one in runs), strict=True):
        if mean(one["accuracy"] for one in evaluations) >= accuracy:
            return float(mean(one["seconds"] for one in evaluations))
    raise AssertionError("every system reaches the lower of the two last accuracies")


def picture(runs: Sequence[dict[str, Any]]) -> str:
    """Held-out loss and accuracy over steps and over seconds, one thin line per seed, one thick line for their mean.

    Systems with fewer seeds than isopref are left out.
    """
    seeds = Counter(one["system"] for one in runs)
    runs = [one for one in runs if seeds[one["system"]] >= seeds["isopref"]]
    panels = [(row, column) for row in ("loss", "accuracy") for column in ("step", "seconds")]
    width, height = LEFT + 2 * WIDTH + GAP_X + 30, TOP + 2 * HEIGHT + GAP_Y + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Held-out loss and accuracy over steps and over time, isopref and TRL</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(runs),
    ]
    for number, (figure, over) in enumerate(panels):
        left = LEFT + (number % 2) * (WIDTH + GAP_X)
        top = TOP + (number // 2) * (HEIGHT + GAP_Y)
        parts += _panel(runs, figure, over, left, top)
    return "\n".join([*parts, "</svg>", ""])


def _legend(runs: Sequence[dict[str, Any]]) -> list[str]:
    parts, left = [], LEFT
    for system in dict.fromkeys(one["system"] for one in runs):
        colour = COLOURS[system]
        parts.append(f'<line x1="{left}" y1="22" x2="{left + 26}" y2="22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 32}" y="26" fill="#222">{escape(NAMES[system])}</text>')
        left += 150
    parts.append(f'<text x="{left}" y="26" fill="#555">thin: one seed; thick: their mean</text>')
    return parts


def _panel(runs: Sequence[dict[str, Any]], figure: str, over: str, left: int, top: int) -> list[str]:
    every = [point for one in runs for point in one["evaluations"]]
    x_axis = fitted([0.0, *(point[over] for point in every)], left, left + WIDTH, wanted=5)
    y_axis = fitted([point[figure] for point in every], top + HEIGHT, top)
    label = {"step": "step", "seconds": "seconds of training"}[over]
    parts = [f'<text x="{left}" y="{top - 10}" fill="#222">held-out {figure}</text>']
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:g}</text>')
    for tick in x_axis.ticks:
        parts.append(
            f'<text x="{x_axis(tick):.1f}" y="{top + HEIGHT + 16}" text-anchor="middle" fill="#555">{tick:g}</text>'
        )
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{top + HEIGHT + 34}" text-anchor="middle" fill="#222">{label}</text>'
    )
    line = _drawn(x_axis, y_axis)
    for system, colour in COLOURS.items():
        curves = [[(p[over], p[figure]) for p in one["evaluations"]] for one in runs if one["system"] == system]
        parts += [line(curve, colour, 'stroke-width="1" opacity="0.4"') for curve in curves]
        if curves:
            together = [(mean(x for x, _ in at), mean(y for _, y in at)) for at in zip(*curves, strict=True)]
            dash = ' stroke-dasharray="7 5"' if system.startswith("trl") and over == "step" else ""
            parts.append(line(together, colour, f'stroke-width="2.5"{dash}'))
    return parts


def _drawn(x_axis: Scale, y_axis: Scale) -> Callable[[Sequence[tuple[float, float]], str, str], str]:
    def line(points: Sequence[tuple[float, float]], colour: str, style: str) -> str:
        places = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>'

    return line
