"""What a report says that training cost: answers kept, lost and gained, and the likelihood of plain text."""

from pathlib import Path
from typing import Any

import pytest

from isopref.report.cost import cost_of
from isopref.report.html import page
from isopref.report.markdown import markdown
from isopref.runs.read import read_run
from support.runs import make_run

MINUS = "\N{MINUS SIGN}"
HOSTILE = "<img src=x onerror=alert(1)> | `code`"


def question(name: str, before: bool, after: bool) -> dict[str, Any]:
    said = {True: "yes", False: "no"}
    return {
        "prompt": f"{name}?",
        "expect": ["yes"],
        "before": said[before],
        "after": f"{said[after]} {HOSTILE}",
        "correct_before": before,
        "correct_after": after,
    }


QUESTIONS = [
    question("kept", True, True),
    question("lost", True, False),
    question("also kept", True, True),
    question("gained", False, True),
    question("never known", False, False),
]
TEXT = {"tokens": 120, "logp_before": -3.1, "logp_after": -3.16}
CHECKS = {"questions": QUESTIONS, "text": TEXT}


def test_rows() -> None:
    cost = cost_of(CHECKS)
    assert [one["prompt"] for one in cost.lost] == ["lost?"]
    assert (cost.num_kept, len(cost.known), cost.num_gained) == (2, 3, 1)
    assert cost.text_change == pytest.approx(-0.06)
    assert list(cost.rows()) == [
        ("correct answers", "3 of 5", "3 of 5"),
        ("still correct", "", "2 of 3"),
        ("text, log-prob per token", f"{MINUS}3.100", f"{MINUS}3.160 ({MINUS}0.060)"),
    ]


def test_rows_without_one_kind() -> None:
    assert [row[0] for row in cost_of({"questions": QUESTIONS, "text": None}).rows()] == [
        "correct answers",
        "still correct",
    ]
    assert [row[0] for row in cost_of({"questions": [], "text": TEXT}).rows()] == ["text, log-prob per token"]
    assert list(cost_of({}).rows()) == []


def test_reports_show_the_cost_and_what_was_lost(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", [{"step": 1, "train/loss": 0.7}], spot_checks=CHECKS))
    html, text = page([run]), markdown([run])
    for report in (html, text):
        assert "What it cost" in report
        assert "2 of 3" in report
        assert "lost?" in report
        assert "gained?" not in report  # only what was lost is listed
        assert "<img" not in report
    assert "| still correct |  | 2 of 3 |" in text
    assert "<dt>answers still correct</dt><dd>2 of 3" in html


def test_reports_of_runs_without_spot_checks(tmp_path: Path) -> None:
    lines = [{"step": 1, "train/loss": 0.7}]
    without, with_them = make_run(tmp_path / "a", lines), make_run(tmp_path / "b", lines, spot_checks=CHECKS)
    assert "What it cost" not in page([read_run(without)])
    assert "What it cost" not in markdown([read_run(without)])
    both = [read_run(without), read_run(with_them)]
    assert page(both).count("What it cost") == 1
    assert "### What it cost: b" in markdown(both)
