"""Runs as Markdown, for a pull request: figures, the math, answers. No charts."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from isopref import __version__
from isopref.engine.display import visible
from isopref.report.compare import final_figures, math_that_differs
from isopref.report.cost import cost_of
from isopref.report.degeneration import signs
from isopref.report.elements import fixed, number
from isopref.report.figures import (
    Entry,
    Interval,
    entries,
    field_rows,
    figure_rows,
    held_out_title,
    is_default,
    range_text,
    shown,
)
from isopref.runs.read import RunRecord

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_LONGEST = 600  # characters of an answer


def markdown(runs: Sequence[RunRecord]) -> str:
    """One run, or several side by side."""
    every = entries(runs)
    lines = [f"## {plain(every[0].label)}" if len(every) == 1 else f"## {len(every)} runs", ""]
    lines += [f"{plain(entry.label)}: {plain(_about(entry.run))}  " for entry in every]
    lines += [f"**Warning, {plain(entry.label)}:** {plain(sign)}  " for entry in every for sign in signs(entry.run)]
    lines += ["", *_finals(every), ""]
    for entry in every:
        if entry.run.evaluation:
            whose = f": {plain(entry.label)}" if len(every) > 1 else ""
            after = entry.run.evaluation["after"]
            title = held_out_title(after["pairs"], after.get("lists", 0), after.get("answers", 0))
            lines += [f"### {title}, with 95% intervals{whose}", "", *evaluation_table(entry.run), ""]
    for entry in every:
        if entry.run.spot_checks:
            whose = f": {plain(entry.label)}" if len(every) > 1 else ""
            lines += [f"### What it cost{whose}", "", *cost_table(entry.run), ""]
    lines += [*_math(every), *_answers(every), f"Made by isopref {__version__}."]
    return "\n".join(lines) + "\n"


def _about(run: RunRecord) -> str:
    versions = [f"{name} {run.start(name)}" for name in ("isopref", "torch", "transformers") if run.start(name)]
    device = f"{run.start('ranks')} x {run.start('device')}" if run.starts else ""
    run_id = f"run id {run.start('run_id')}" if run.starts else ""
    return ", ".join(part for part in (run.status, run_id, device, *versions) if part)


def _finals(every: Sequence[Entry]) -> Iterator[str]:
    ends = [final_figures(entry.run) for entry in every]
    yield from table_head(["at the end", *(entry.label for entry in every)])
    for name in ends[0]:
        if any(end[name] is not None for end in ends):
            yield row([name, *(number(end[name]) for end in ends)])


def evaluation_table(run: RunRecord) -> Iterator[str]:
    """Held-out figures before and after, with their intervals."""
    yield from table_head(["", "before", "after"])
    for figure in figure_rows(run):
        yield row([figure.label, _cell(figure.before, figure.sign), _cell(figure.after, figure.sign)])


def cost_table(run: RunRecord) -> Iterator[str]:
    """Spot checks before and after, and the answers that were lost."""
    cost = cost_of(run.spot_checks)
    yield from table_head(["", "before", "after"])
    for cells in cost.rows():
        yield row(cells)
    for one in cost.lost:
        yield row([f"lost: {one['prompt']}", _cut(one["before"]), _cut(one["after"])])


def _cell(figure: Interval | None, sign: str) -> str:
    return "-" if figure is None else f"{fixed(figure['value'], 3, sign)} ({range_text(figure, sign)})"


def _math(every: Sequence[Entry]) -> Iterator[str]:
    runs = [entry.run for entry in every]
    if len(runs) > 1:
        rows = math_that_differs(runs)
        yield "### The math that differs" if rows else "### All runs have the same math"
    else:
        rows = [row for row in field_rows(runs, math=True) if not is_default(row.name, row.values[0])]
        yield "### The math, without defaults"
    yield ""
    if rows:
        yield from table_head(["field", *(entry.label for entry in every)])
        for field in rows:
            yield row([field.name, *map(shown, field.values)])
        yield ""


def _answers(every: Sequence[Entry]) -> Iterator[str]:
    sampled = [entry for entry in every if entry.run.samples]
    if not sampled:
        return
    yield from ("<details><summary>Answers to held-out prompts</summary>", "")
    for entry in sampled:
        yield from table_head(["prompt", "before", "after" if len(every) == 1 else f"after, {entry.label}"])
        for sample in entry.run.samples:
            yield row([_cut(sample[name]) for name in ("prompt", "greedy_before", "greedy_after")])
        yield ""
    yield from ("</details>", "")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def table_head(columns: Sequence[str]) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(columns)
    yield "|---" * len(columns) + "|"


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(plain, cells))} |"


def plain(text: str) -> str:
    """Text on one line, escaped so that nothing in it acts as Markdown, HTML or an @mention."""
    escaped = _SPECIAL.sub(r"\\\1", escape(visible(text), quote=False)).replace("@", "@\u200b")
    return "<br>".join(escaped.splitlines())
