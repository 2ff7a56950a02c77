"""The top of a report: which runs it shows, warnings, and the figures to look at first."""

from collections.abc import Iterator, Sequence

from isopref.report.cost import cost_of
from isopref.report.degeneration import signs
from isopref.report.elements import Html, element, fixed, join, number
from isopref.report.figures import LABELS, Entry, duration, range_text, shown, unit
from isopref.runs.read import RunRecord, Series


def overview(every: Sequence[Entry]) -> Html:
    """One run as tiles, several as a table with one row each."""
    if len(every) == 1:
        run = every[0].run
        about = element("p", " · ".join(_about(run)), class_="soft")
        return join(element("h1", every[0].label), about, _failure(every[0]), *_warnings(every[0]), _tiles(run))
    below = [part for entry in every for part in (_failure(entry, entry.label), *_warnings(entry, entry.label))]
    return join(element("h1", f"{len(every)} runs"), _table(every), *below)


def key(entry: Entry) -> Html:
    """A run's name next to its colour."""
    return element("span", entry.label, class_=f"key {entry.style}")


def _about(run: RunRecord) -> list[str]:
    """The model, the objective, the number of pairs and the state of the run."""
    objective, pairs = run.config.get("objective", {}), run.start("pairs")
    parts = [
        str(run.config.get("model", {}).get("path", "")),
        f"{shown(objective.get('loss', ''))}, weighted by {objective.get('weighting', '')}",
        f"{pairs:,} {unit(run)}s" if pairs else "",
        run.status,
    ]
    return [part for part in parts if part]


def _failure(entry: Entry, name: str = "") -> Html | None:
    state = entry.run.state
    if state is None or not state.error:
        return None
    return element("p", f"{name or 'The run'} failed: {state.error}", class_="warning")


def _warnings(entry: Entry, name: str = "") -> Iterator[Html]:
    for sign in signs(entry.run):
        yield element("p", element("b", f"{name}: ") if name else None, sign, class_="warning")


def _figures(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Title, value and note of the figures to look at first."""
    for name, title in (("accuracy", "held-out accuracy"), ("reward_margin", "held-out margin")):
        after, before = run.figure(name), run.figure(name, "before")
        if after is not None:
            sign = LABELS[name][1]
            was = f"from {fixed(before['value'], 2, sign)}; " if before is not None else ""
            yield title, fixed(after["value"], 2, sign), f"{was}95%: {range_text(after, sign, digits=2)}"
    yield from _cost(run)
    loss = run.metrics.get("train/loss")
    if loss is not None:
        yield "training loss", number(loss.values[-1]), f"from {number(loss.values[0])}"
    speed, mfu = (run.metrics.get(name) for name in ("speed/pairs_per_s", "speed/mfu"))
    if speed is not None:
        note = "" if mfu is None else f"MFU {100 * _median(mfu):.0f}%, "
        yield f"{unit(run)}s per second", number(_median(speed)), f"{note}median of all steps"
    steps = run.state.steps if run.state is not None else run.last_step
    took = f", {duration(run.state.seconds)}" if run.state is not None and run.state.seconds else ""
    since = " since the last start" * bool(took and len(run.starts) > 1)
    yield "steps", f"{run.last_step:,}", f"of {steps:,}{took}{since}"


def _cost(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    found = cost_of(run.spot_checks)
    if found.known:
        yield "answers still correct", f"{found.num_kept} of {len(found.known)}", "of those correct before"
    if found.text is not None and found.text_change is not None:
        before, after = (fixed(found.text[name], 2) for name in ("logp_before", "logp_after"))
        yield "text log-prob", fixed(found.text_change, 3, "+"), f"per token, from {before} to {after}"


def _median(series: Series) -> float:
    return sorted(series.values)[len(series.values) // 2]


def _tiles(run: RunRecord) -> Html:
    tiles = [
        element("div", element("dt", title), element("dd", value, element("small", note)))
        for title, value, note in _figures(run)
    ]
    return element("dl", *tiles, class_="tiles")


def _table(every: Sequence[Entry]) -> Html:
    figures = [{title: (value, note) for title, value, note in _figures(entry.run)} for entry in every]
    titles = list(dict.fromkeys(title for of_run in figures for title in of_run))
    rows = []
    for entry, of_run in zip(every, figures, strict=True):
        name = element("th", key(entry), element("small", " · ".join(_about(entry.run))), class_="run")
        cells = [element("td", _cell(of_run.get(title))) for title in titles]
        rows.append(element("tr", name, *cells))
    head = element("thead", element("tr", element("th", "run"), *(element("th", title) for title in titles)))
    return element("div", element("table", head, element("tbody", *rows), class_="overview"), class_="wide")


def _cell(figure: tuple[str, str] | None) -> Html:
    if figure is None:
        return join("-")
    value, note = figure
    return join(element("b", value), element("small", note))
