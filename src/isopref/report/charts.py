"""Charts as inline SVG. They work without the page's script, which only adds values under the pointer.

Colours are CSS classes of the page: slot0 to slot5, and `was` for background data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from isopref.report.elements import Html, element, join, number
from isopref.types import FloatArray, IntArray

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 302, 10, 164  # of the plot area; labels are around it
MOST_POINTS = 2000  # of a line; a longer one keeps the minimum and maximum of each interval
TREND_FROM, TREND_PARTS = 120, 25  # a line with TREND_FROM points gets a trend, over a window of 1/TREND_PARTS of them
MOST_DOTS = 1500
LABEL_HEIGHT = 11.0
NUM_BINS = 30
STRIP = (9.0, 91.0)  # percent of a strip's width between which intervals are drawn; the ends leave room for numbers


@dataclass(frozen=True)
class Line:
    """A series in a chart. `style` is the class of its colour."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = ""
    dashed: bool = False
    marks: bool = False  # a dot at each value
    noisy: bool = False  # a long line gets a trend

    @property
    def trend(self) -> list[float] | None:
        """The moving average, if the line is noisy and long enough to need one."""
        return _means_around(self.y) if self.noisy and len(self.y) >= TREND_FROM else None


class Side(NamedTuple):
    """A set of points, such as the tokens and rewards of all chosen answers."""

    label: str
    x: IntArray
    y: FloatArray
    style: str


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def fitted(values: Sequence[float], start: float, end: float, *, wanted: int = 4) -> Scale:
    """A scale for some values that begins and ends on a tick."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{step * n:.9g}") for n in range(first, last + 1)]
    return Scale(first * step, last * step, start, end, ticks)


def over_steps(
    title: str, lines: Sequence[Line], key: str, *, legend: Sequence[Line] = (), unit: str = ""
) -> tuple[Html, dict[str, Any]]:
    """A chart of lines over steps, and what the script needs to show the values under the pointer."""
    steps = [step for line in lines for step in line.x]
    x = Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT)
    y = fitted([value for line in lines for value in line.y], BOTTOM, TOP)
    parts = [
        _grid(x, y),
        _step_labels(x),
        _axis_title("step"),
        *(_line(line, x, y) for line in lines),
        *_end_labels(lines, y),
    ]
    svg = element(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", tabindex="0", aria_label=f"{title} over steps",
        data_chart=key,
    )  # fmt: skip
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "lines": [
            {"label": line.label, "style": line.style, "x": list(line.x), "y": [_finite(value) for value in line.y]}
            for line in map(_thinned, lines)
        ],
    }
    return _figure(title, svg, unit, legend), data


def histogram(title: str, sides: Sequence[Side], low: float, high: float) -> Html:
    """The distribution of each set's y between `low` and `high`: the share of the set in each bin."""
    edges = np.linspace(low, high, NUM_BINS + 1)
    shares = [np.histogram(side.y, edges)[0] / max(1, len(side.y)) for side in sides]
    x = Scale(low, high, LEFT, WIDTH - 8)
    y = fitted([0.0, *(float(share.max()) for share in shares)], BOTTOM, TOP)
    parts = [_grid(x, y, percent=True), _value_labels(x), _axis_title("reward")]
    for side, share in zip(sides, shares, strict=True):
        tops = "".join(
            f"L{x(left):.1f} {y(top):.1f}L{x(right):.1f} {y(top):.1f}"
            for left, right, top in zip(edges[:-1], edges[1:], share, strict=True)
        )
        parts.append(
            element("path", d=f"M{x(low):.1f} {BOTTOM}{tops}L{x(high):.1f} {BOTTOM}Z", class_=f"area {side.style}")
        )
    return _static(title, parts, sides, "share of answers")


def scatter(title: str, sides: Sequence[Side], y: Scale) -> Html:
    """A dot for each (x, y) of a few sets; if there are more than MOST_DOTS, for every n-th."""
    every = max(1, math.ceil(sum(len(side.x) for side in sides) / MOST_DOTS))
    x = fitted([float(end) for side in sides for end in (side.x.min(), side.x.max())], LEFT, WIDTH - 8)
    parts = [_grid(x, y), _value_labels(x), _axis_title("tokens of the answer")]
    for side in sides:
        some = zip(side.x[::every], side.y[::every], strict=True)
        dots = "".join(f"M{x(a):.1f} {y(b):.1f}h0" for a, b in some)
        parts.append(element("path", d=dots, class_=f"dots {side.style}"))
    return _static(title, parts, sides, "reward")


def intervals(figures: Sequence[tuple[dict[str, float], str]], x: Scale, *, labelled: bool = True) -> Html:
    """A strip with a dot and a whisker for each figure, one below the other. A figure comes with its colour's class.

    `x` is in percent of the width, so nothing is stretched. Every tick has a line, and a number if `labelled`.
    """
    row = 11
    bottom = row * len(figures) + 2
    parts = []
    for tick in x.ticks:
        at = f"{x(tick):.2f}%"
        parts.append(element("line", x1=at, x2=at, y1=0, y2=bottom, class_="zero" if tick == 0 else "tick"))
        if labelled:
            parts.append(element("text", number(tick), x=at, y=bottom + 9, text_anchor="middle"))
    for place, (figure, style) in enumerate(figures):
        y = row * place + row / 2 + 1
        whisker = element("line", x1=f"{x(figure['low']):.2f}%", x2=f"{x(figure['high']):.2f}%", y1=y, y2=y)
        dot = element("circle", cx=f"{x(figure['value']):.2f}%", cy=y, r=3)
        parts.append(element("g", whisker, dot, class_=f"whisker {style}"))
    height = bottom + (11 if labelled else 0)
    return element("svg", *parts, class_="strip", style=f"height:{height}px", aria_hidden="true")


def _figure(title: str, svg: Html, unit: str, legend: Sequence[Line]) -> Html:
    keys = [element("span", line.label, class_=f"key {line.style}{' dashed' * line.dashed}") for line in legend]
    head = element("figcaption", element("b", title), element("small", unit) if unit else None, element("span", *keys))
    return element("figure", head, svg)


def _static(title: str, parts: Sequence[Html], sides: Sequence[Side], unit: str) -> Html:
    svg = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return _figure(title, svg, unit, [Line(side.label, (), (), side.style) for side in sides])


def _line(line: Line, x: Scale, y: Scale) -> Html:
    style = f"{line.style}{' dashed' * line.dashed}"
    trend = line.trend  # computed from all points, before thinning
    drawn = element("path", d=_path(_thinned(line), x, y), class_=f"line {style}{' faint' * (trend is not None)}")
    if line.marks or len(line.x) == 1:
        marks = (element("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r=2.5) for a, b in _points(line))
        return element("g", drawn, *marks, class_=f"marks {line.style}")
    if trend is None:
        return drawn
    return join(drawn, element("path", d=_path(_thinned(replace(line, y=trend)), x, y), class_=f"trend {style}"))


def _path(line: Line, x: Scale, y: Scale) -> str:
    """A line through the points, broken where a value is not finite."""
    commands, pen = [], "M"
    for a, b in zip(line.x, line.y, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        commands.append(f"{pen}{x(a):.1f} {y(b):.1f}")
        pen = "L"
    return "".join(commands)


def _points(line: Line) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]


def _means_around(values: Sequence[float]) -> list[float]:
    """The moving average of finite values: for each value, the mean over a window around it."""
    half = max(1, len(values) // TREND_PARTS // 2)
    array = np.array(values, dtype=np.float64)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(array))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(array))
    with np.errstate(invalid="ignore", divide="ignore"):
        means: list[float] = ((sums[last] - sums[first]) / (counts[last] - counts[first])).tolist()
    return means


def _thinned(line: Line) -> Line:
    """The line with at most MOST_POINTS points: the minimum and maximum of each interval, and both ends."""
    count = len(line.x)
    if count <= MOST_POINTS:
        return line
    bounds = np.linspace(0, count, MOST_POINTS // 2).astype(int)
    values = np.nan_to_num(np.array(line.y, dtype=np.float64))
    kept = {0, count - 1}
    for start, stop in pairwise(bounds):
        stretch = values[start:stop]
        kept |= {int(start + stretch.argmin()), int(start + stretch.argmax())}
    places = sorted(kept)
    x, y = ([of[place] for place in places] for of in (line.x, line.y))
    return replace(line, x=x, y=y)


def _grid(x: Scale, y: Scale, *, percent: bool = False) -> Html:
    lines = []
    for tick in y.ticks:
        at = f"{y(tick):.1f}"
        text = f"{100 * tick:g}%" if percent else number(tick)
        lines.append(element("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="zero" if tick == 0 else None))
        lines.append(element("text", text, x=LEFT - 6, y=at, dy="0.32em", text_anchor="end"))
    return element("g", *lines, class_="grid")


def _step_labels(x: Scale) -> Html:
    """Labels for the first and the last step, and for round steps between them, if there is room."""
    inner = [tick for tick in fitted([x.low, x.high], 0, 1, wanted=5).ticks if float(tick).is_integer()]
    apart = [tick for tick in inner if min(x(tick) - x.start, x.end - x(tick)) > 30]
    return _labels(x, [x.low, *apart, x.high], [f"{int(tick):,}" for tick in (x.low, *apart, x.high)])


def _value_labels(x: Scale) -> Html:
    inside = [tick for tick in fitted([x.low, x.high], 0, 1).ticks if x.low <= tick <= x.high]
    return _labels(x, inside, [number(tick) for tick in inside])


def _labels(x: Scale, ticks: Sequence[float], texts: Sequence[str]) -> Html:
    parts = [
        element("text", text, x=f"{x(tick):.1f}", y=BOTTOM + 15, text_anchor="middle")
        for tick, text in zip(ticks, texts, strict=True)
    ]
    return element("g", *parts, class_="grid")


def _axis_title(text: str) -> Html:
    """The title of the horizontal axis."""
    return element("text", text, x=(LEFT + RIGHT) / 2, y=BOTTOM + 31, text_anchor="middle")


def _end_labels(lines: Sequence[Line], y: Scale) -> list[Html]:
    """The last value of every line, or of its trend, as text; moved apart where the texts would overlap."""
    last = [((line.trend or line.y)[-1], line) for line in lines]
    ends = sorted(((y(value), value, line) for value, line in last if math.isfinite(value)), key=lambda end: end[0])
    places: list[float] = []
    for place, *_ in ends:
        places.append(max(place, places[-1] + LABEL_HEIGHT) if places else place)
    over = max(0.0, (places[-1] if places else 0.0) - BOTTOM)
    return [
        element("text", number(value, 3), x=RIGHT + 5, y=f"{place - over:.1f}", dy="0.32em", class_=f"end {line.style}")
        for place, (_, value, line) in zip(places, ends, strict=True)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
