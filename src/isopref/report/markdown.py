"""Runs as Markdown, for a pull request: figures, the math, answers. No charts."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from isopref import __version__
from isopref.engine.display import visible
from isopref.report.compare import final_figures, math_that_differs
from isopref.report.elements import fixed, number
from isopref.report.figures import Interval, field_rows, figure_rows, is_default, names, range_text, shown
from isopref.report.read import RunRecord

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_LONGEST = 600  # characters of an answer


def markdown(runs: Sequence[RunRecord]) -> str:
    """One run, or several beside each other."""
    labels = names(runs)
    lines = [f"## {_text(labels[0])}" if len(runs) == 1 else f"## {len(runs)} runs", ""]
    lines += [f"{_text(label)}: {_text(_about(run))}  " for run, label in zip(runs, labels, strict=True)]
    lines += ["", *_finals(runs, labels), ""]
    for run, label in zip(runs, labels, strict=True):
        if run.evaluation:
            title = f"{run.evaluation['after']['pairs']} held-out pairs, with 95% intervals"
            lines += [f"### {title}{f': {_text(label)}' if len(runs) > 1 else ''}", "", *_evaluation(run), ""]
    lines += [*_math(runs, labels), *_answers(runs, labels), f"Made by isopref {__version__}."]
    return "\n".join(lines) + "\n"


def _about(run: RunRecord) -> str:
    versions = [f"{name} {run.start(name)}" for name in ("isopref", "torch", "transformers") if run.start(name)]
    device = f"{run.start('ranks')} x {run.start('device')}" if run.starts else ""
    run_id = f"run id {run.start('run_id')}" if run.starts else ""
    return ", ".join(part for part in (run.status, run_id, device, *versions) if part)


def _finals(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    every = [final_figures(run) for run in runs]
    yield from _table_head(["at the end", *labels])
    for label in every[0]:
        if any(figures[label] is not None for figures in every):
            yield _row([label, *(number(figures[label]) for figures in every)])


def _evaluation(run: RunRecord) -> Iterator[str]:
    yield from _table_head(["", "before", "after"])
    for row in figure_rows(run):
        yield _row([row.label, _cell(row.before, row.sign), _cell(row.after, row.sign)])


def _cell(figure: Interval | None, sign: str) -> str:
    return "-" if figure is None else f"{fixed(figure['value'], 3, sign)} ({range_text(figure, sign)})"


def _math(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    if len(runs) > 1:
        rows = math_that_differs(list(runs))
        yield "### The math that differs" if rows else "### All have the same math"
    else:
        rows = [row for row in field_rows(runs, math=True) if not is_default(row.name, row.values[0])]
        yield "### The math, where it is not the default"
    yield ""
    if rows:
        yield from _table_head(["field", *labels])
        for row in rows:
            yield _row([row.name, *map(shown, row.values)])
        yield ""


def _answers(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterator[str]:
    if not any(run.samples for run in runs):
        return
    yield from ("<details><summary>Answers to held-out prompts</summary>", "")
    for run, label in zip(runs, labels, strict=True):
        yield from _table_head(["prompt", "before", f"after{f', {label}' if len(runs) > 1 else ''}"])
        for sample in run.samples:
            yield _row([_cut(sample[name]) for name in ("prompt", "greedy_before", "greedy_after")])
        yield ""
    yield from ("</details>", "")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _table_head(columns: Sequence[str]) -> Iterator[str]:
    yield _row(columns)
    yield "|---" * len(columns) + "|"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Text that stays text: no markup, no HTML, no mention, on one line."""
    plain = _SPECIAL.sub(r"\\\1", escape(visible(text), quote=False)).replace("@", "@\u200b")
    return "<br>".join(plain.splitlines())
