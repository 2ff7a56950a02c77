"""The report of a real run, in a real browser; and the commands that look at runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isopref.errors import RunError
from isopref.report.html import page
from isopref.report.rounds import Round
from isopref.report.rounds import page as rounds_page
from isopref.runs.read import read_run
from support.browser import Tab, browser, chromium
from support.project import MakeProject, Project
from support.runs import make_run, noisy_metrics

PHONE = 390
STEPS = 6
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

needs_browser = pytest.mark.skipif(
    chromium() is None, reason="NO BROWSER: install Chromium to test the report (apt-get install chromium)"
)


@pytest.fixture(scope="module")
def project(make_project: MakeProject) -> Project:
    return make_project(optim={"max_steps": STEPS})


@pytest.fixture(scope="module")
def run(project: Project) -> Path:
    """A short run with held-out pairs and answers."""
    return project.train("runs/first", "run.eval_every=3", "run.samples=2")


@pytest.fixture(scope="module")
def other(project: Project) -> Path:
    """The same data, another rate and layout."""
    return project.train("runs/second", "optim.lr=2e-3", "layout.rows=padded", "data.eval=null")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as one:
        yield one


# --- what a run leaves -------------------------------------------------------------------------------


def test_a_run_writes_its_report(run: Path) -> None:
    assert (run / "report.html").read_text() == page([read_run(run)])


def test_rewards_of_every_pair_are_kept(run: Path) -> None:
    """Their means are what the evaluation says, which is worked out from the log-probabilities."""
    figures = json.loads((run / "evaluation.json").read_text())
    with np.load(run / "rewards.npz") as arrays:
        assert arrays["tokens"].shape == arrays["after"].shape == (8, 2)
        assert not arrays["before"].any()  # the model is its own reference
        margins = arrays["after"][:, 0] - arrays["after"][:, 1]
        assert margins.mean() == pytest.approx(figures["after"]["reward_margin"]["value"], rel=1e-5)
        assert (margins > 0).mean() == figures["after"]["accuracy"]["value"]


def test_a_start_is_noted(run: Path) -> None:
    (start,) = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert (start["pairs"], start["ranks"], start["after_step"]) == (23, 1, 0)
    assert start["reference"] == json.loads((run / "reference.json").read_text())["key"]


def test_states(project: Project, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_run(run).status == "finished"

    def full(*arguments: Any) -> None:
        raise RunError("no space left <here>")

    monkeypatch.setattr("isopref.build.export.export_model", full)
    failed = project.folder / "runs" / "failed"
    assert project.refused(str(failed), "optim.max_steps=2") == "no space left <here>"
    state = read_run(failed).state
    assert state is not None
    assert (state.outcome, state.step, state.steps, state.error) == ("failed", 2, 2, "no space left <here>")
    assert "The run failed: no space left &lt;here&gt;" in page([read_run(failed)])


def test_a_report_that_cannot_be_made_does_not_fail_the_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runs: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("isopref.build.summary.page", broken)
    outcome = project.isopref("train", "my.yaml", "run.folder=runs/planted", "optim.max_steps=1", "data.eval=null")
    assert outcome.code == 0
    assert (
        "warning: failed to write report.html (ZeroDivisionError: planted). The run itself is complete" in outcome.out
    )
    assert (project.folder / "runs/planted/model").exists()
    assert "Traceback" in (project.folder / "runs/planted/engine.log").read_text()


# --- the commands ------------------------------------------------------------------------------------


def test_ls(project: Project, run: Path, tmp_path: Path) -> None:
    lines = project.isopref("ls").out.splitlines()
    (found,) = [line.split() for line in lines if line.strip().startswith("runs/first")]
    figures = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert found[1:3] == ["finished", f"{STEPS}/{STEPS}"]
    assert float(found[3]) == pytest.approx(figures["train/loss"], rel=1e-3)
    assert float(found[5]) == pytest.approx(figures["eval/accuracy"], rel=1e-3)
    assert project.isopref("ls", str(tmp_path)).out == f"No runs in {tmp_path}.\n"
    nowhere = project.isopref("ls", "nowhere")
    assert (nowhere.code, nowhere.err) == (
        1, "error: nowhere: no such folder. Pass a folder that contains runs: isopref ls FOLDER\n",
    )  # fmt: skip


def test_compare_runs_of_other_math(project: Project, run: Path, other: Path) -> None:
    out = project.isopref("compare", str(run), str(other)).out
    assert out.startswith("Different math, in 2 places:\n")  # the rate, and what was held out
    assert [line.split() for line in out.splitlines() if line.strip().startswith("optim.lr")] == [
        ["optim.lr", "0.001", "0.002"]
    ]
    assert "The losses diverge at step 2: " in out  # the first update moves them apart


def test_compare_layouts_of_the_same_math(project: Project, run: Path) -> None:
    twin = project.train("runs/twin", "layout.rows=packed", "layout.microbatch_tokens=160", "run.export=false")
    out = project.isopref("compare", str(run), str(twin)).out
    assert out.startswith("Same math: ")
    assert f"rounding in float64 (1e-06). The largest difference at the {STEPS} steps that both logged is " in out


def test_report_command(project: Project, run: Path, other: Path) -> None:
    text = project.isopref("report", str(run), "--markdown").out
    assert "### 8 held-out pairs, with 95% intervals" in text
    outcome = project.isopref("report", str(run), str(other))
    assert (outcome.code, outcome.err) == (
        1, "error: isopref report: several runs need an output file. Try: --out FILE\n",
    )  # fmt: skip
    assert project.isopref("report", str(run), str(other), "--out", "new/both.html").out == "Wrote new/both.html.\n"
    assert (project.folder / "new/both.html").read_text().count("<h1>2 runs</h1>") == 1


# --- in a browser ------------------------------------------------------------------------------------

POINTS = """Object.fromEntries([...document.querySelectorAll("svg[data-chart]")].map(svg => [svg.dataset.chart,
    [...svg.querySelectorAll("path.line")].map(path => path.getAttribute("d").match(/[ML]/g).length)]))"""

# Numbers below the strips of intervals that stick out of their strip, which hides them.
CLIPPED = """[...document.querySelectorAll('svg.strip text')].filter(text => {
    const inner = text.getBoundingClientRect(), outer = text.closest('svg').getBoundingClientRect()
    return inner.left < outer.left - 1 || inner.right > outer.right + 1
}).map(text => text.textContent)"""
HINT = "getComputedStyle(document.querySelector"


def tip(tab: Tab, chart: str) -> str | None:
    """What is shown beside the pointer."""
    text: str | None = tab.value(
        f"(tip => tip.hidden ? null : tip.innerText)(document.querySelector('svg[data-chart=\"{chart}\"] + .tip'))"
    )
    return text


def point_at_step(tab: Tab, chart: str, share: float) -> None:
    """Point so far along the line of a chart, between its first and last step."""
    line = f"document.querySelector('svg[data-chart=\"{chart}\"] path.line')"
    tab.value(f"{line}.scrollIntoView({{block: 'center'}})")
    left, top, width, height = tab.value(f"(b => [b.x, b.y, b.width, b.height])({line}.getBoundingClientRect())")
    tab.point_at(left + share * width, top + height / 2)


def shown(value: float) -> str:
    """A figure of a metrics line as the page writes it, for sizes from a thousandth to a hundred thousand."""
    assert 1e-3 <= abs(value) < 1e5
    return f"{float(f'{value:.4g}'):g}".replace("-", "\N{MINUS SIGN}")


@needs_browser
def test_charts_have_every_logged_step(
    tab: Tab, run: Path, read_metrics: Callable[[Path], list[dict[str, float]]]
) -> None:
    tab.show(run / "report.html")
    assert tab.problems == []
    lines = read_metrics(run)
    held_out = sum("eval/loss" in line for line in lines)
    assert held_out == 2
    points = tab.value(POINTS)
    assert points["loss"] == points["accuracy"] == [STEPS, 1 + held_out]  # and one before training
    assert points["log-probabilities"] == points["rewards"] == [STEPS, STEPS]
    for chart in ("margin", "gradient-norm", "learning-rate", "speed", "peak-memory"):
        assert points[chart] == [STEPS], chart
    assert "mfu" not in points  # on a CPU


@needs_browser
def test_values_under_the_pointer(tab: Tab, run: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    tab.show(run / "report.html")
    lines = read_metrics(run)
    assert tip(tab, "log-probabilities") is None
    for step in (1, 3, STEPS):
        point_at_step(tab, "log-probabilities", (step - 1) / (STEPS - 1))
        found = tip(tab, "log-probabilities")
        chosen, rejected = (shown(lines[step - 1][f"train/logps_{side}"]) for side in ("chosen", "rejected"))
        assert found is not None
        assert found.split() == ["step", str(step), "chosen", chosen, "rejected", rejected]
    tab.point_at(0, 0)
    assert tip(tab, "log-probabilities") is None
    for step, held_out in ((2, []), (3, ["held", "out", shown(lines[2]["eval/loss"])])):
        point_at_step(tab, "loss", (step - 1) / (STEPS - 1))
        training = ["step", str(step), "training", shown(lines[step - 1]["train/loss"])]
        assert (tip(tab, "loss") or "").split() == training + held_out
    assert tab.problems == []


@needs_browser
def test_values_by_the_keyboard(tab: Tab, run: Path) -> None:
    tab.show(run / "report.html")
    tab.value("document.querySelector('svg[data-chart=\"loss\"]').focus()")
    for key, step in (("End", STEPS), ("ArrowLeft", STEPS - 1), ("Home", 0), ("ArrowLeft", 0)):
        tab.press(key)
        assert (tip(tab, "loss") or "").startswith(f"step {step}\n"), key
    tab.press("Escape")
    assert tip(tab, "loss") is None


@needs_browser
def test_a_phone_in_the_dark_and_paper(tab: Tab, run: Path, other: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.html"
    both.write_text(page([read_run(run), read_run(other)]))
    for path in (run / "report.html", both):
        colours = set()
        for dark in (False, True):
            tab.show(path, width=PHONE, height=844, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") == PHONE, path
            assert tab.value(CLIPPED) == [], path
            colours.add(tab.value("getComputedStyle(document.body).backgroundColor"))
            shown_hints = [hint for hint in ("mouse", "touch") if tab.value(f"{HINT}('.{hint}')).display") != "none"]
            assert shown_hints == ["touch"]
        assert len(colours) == 2
        assert tab.pdf().startswith(b"%PDF")
    assert tab.problems == []


@needs_browser
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_rounds_on_a_phone(tab: Tab, tmp_path: Path, num_rounds: int) -> None:
    path = tmp_path / "rounds.html"
    answers = [("Which one?", "x" * 300), ("Why?", "Because it is so. " * 30)]
    names = ["start model", *(f"round {number + 1}" for number in range(num_rounds))]
    rate = {"value": 0.5, "low": 0.25, "high": 0.75}
    path.write_text(rounds_page("my", [Round(name, answers, 300.0, 1.0, 0.5, rate) for name in names], 5))
    tab.show(path, width=PHONE, height=844)
    assert tab.value("document.documentElement.scrollWidth") == PHONE
    assert tab.problems == []


@needs_browser
def test_runs_laid_over_each_other(tab: Tab, run: Path, other: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.html"
    both.write_text(page([read_run(run), read_run(other)]))
    tab.show(both)
    assert tab.value(POINTS)["margin"] == [STEPS, STEPS]
    point_at_step(tab, "margin", 1.0)
    last = [shown(read_run(folder).metrics["train/margin"].values[-1]) for folder in (run, other)]
    assert (tip(tab, "margin") or "").split() == ["step", str(STEPS), "first", last[0], "second", last[1]]
    differing = tab.value(
        "[...document.querySelector('h2 + .wide').querySelectorAll('tr.differs th')].map(th => th.innerText)"
    )
    assert differing == ["data.eval", "optim.lr"]
    assert tab.problems == []


@needs_browser
def test_text_of_models_is_only_text(tab: Tab, tmp_path: Path) -> None:
    sample = dict.fromkeys(("prompt", "greedy_before", "greedy_after", "sampled_before", "sampled_after"), HOSTILE)
    folder = make_run(tmp_path / "run", noisy_metrics(3), settings={"model": {"path": HOSTILE}}, samples=[sample])
    path = tmp_path / "page.html"
    path.write_text(page([read_run(folder)]))
    tab.show(path)
    assert tab.value("document.querySelector('.answers pre').textContent") == HOSTILE
    assert tab.value("window.hacked") is None
    assert tab.value("document.images.length") == 0
    assert tab.problems == []


@needs_browser
def test_two_thousand_steps(tab: Tab, tmp_path: Path) -> None:
    lines = noisy_metrics(2000)
    lines[999]["optim/grad_norm"] = math.nan
    path = tmp_path / "page.html"
    path.write_text(page([read_run(make_run(tmp_path / "run", lines))]))
    tab.show(path)
    points = tab.value(POINTS)
    assert points["loss"] == points["margin"] == [2000]
    assert points["gradient-norm"] == [1999]
    point_at_step(tab, "margin", 1234 / 1999)
    found = tip(tab, "margin")
    assert found is not None
    step = int(found.split()[1])
    assert abs(step - 1235) <= 5  # a pixel is several steps wide
    assert found.split()[-1] == shown(lines[step - 1]["train/margin"])
    assert tab.problems == []
