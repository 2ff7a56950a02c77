"""Runs as one self-contained HTML page that needs no network and no library. sections.py has its parts."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from isopref import __version__
from isopref.errors import RunError
from isopref.report import sections
from isopref.report.curves import curves
from isopref.report.elements import Html, element, join
from isopref.report.figures import entries
from isopref.report.overview import overview
from isopref.runs.read import RunRecord

MOST_RUNS = 6  # as many as there are colours that can be told apart


def page(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several overlaid. Raises RunError for more than MOST_RUNS."""
    if len(runs) > MOST_RUNS:
        raise RunError(f"{len(runs)} runs are too many for one report, which shows up to {MOST_RUNS}. Pass fewer runs.")
    every = entries(runs)
    over_steps, data = curves(every)
    body = join(
        overview(every),
        sections.math_that_differs(every),
        sections.evaluation(every),
        sections.cost(every),
        over_steps,
        sections.rewards(every),
        sections.answers(every),
        sections.config(every),
        element("footer", f"Made by isopref {__version__}. 95% intervals: Wilson for accuracies, otherwise bootstrap."),
    )
    return document(", ".join(entry.label for entry in every), body, data)


def document(title: str, body: Html, data: dict[str, Any]) -> str:
    """A self-contained page. `data` has the values that its charts show under the pointer."""
    style, script = _asset("page.css"), _asset("page.js")
    # The page contains text from models, so the browser may run only our script and fetch nothing.
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


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
