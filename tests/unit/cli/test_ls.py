"""`isopref ls`: runs side by side, on a terminal of any width and without one."""

import re
from pathlib import Path

import pytest

from isopref.cli.report import list_runs
from isopref.runs.state import State
from support.runs import make_run, noisy_metrics

LONG = "llama-3.1-8b-instruct-feedback-1a2b3c4d5e6f"


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One under a long name, and one that was stopped at step 7 of 90, where the last logged step is 5."""
    make_run(tmp_path / "runs" / LONG, noisy_metrics(20))
    make_run(tmp_path / "runs" / "short", noisy_metrics(5), state=State("stopped", 7, 90))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # stands for a terminal


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    list_runs(Path("runs"))
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(
    ("width", "left_out", "name"),
    # The widest cells have 48, 8, 5, 7, 8, 8 and 16 characters; 2 stand between two columns, and 1 at each end.
    [
        (40, ["step", "loss", "accuracy", "held-out accuracy", "started"], "runs/llama-3.…k-1a2b3c4d5e6f"),
        (64, ["accuracy", "started"], "runs/llama-3…-1a2b3c4d5e6f"),
        (80, ["accuracy", "started"], "runs/llama-3.1-8b-in…feedback-1a2b3c4d5e6f"),  # 42 + 8 + 5 + 7 + 8 and 10
        (100, ["started"], f"runs/{LONG}"),  # 48 + 8 + 5 + 7 + 8 + 8 and 12 are 96
        (140, [], f"runs/{LONG}"),
    ],
)
def test_ls_on_a_terminal(
    width: int, left_out: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = listed(capsys)
    long, short = (next(line.split() for line in lines if f"runs/{start}" in line) for start in ("llama", "short"))
    assert long[:2] == [name, "finished"]
    assert short[:3] == ["runs/short", "stopped", *([] if "step" in left_out else ["7/90"])]
    assert len(long) == 8 - len(left_out) - ("started" in left_out)  # a time is two words
    said = [f"Not shown in {width} columns: {', '.join(left_out)}."] if left_out else []
    said += ["To see full names: isopref ls | cat"] if "…" in name else []
    table, notes = lines[: -len(said) or None], lines[len(lines) - len(said) :]
    assert notes == said
    assert not table[-1].strip()
    assert max(map(len, table)) <= width


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize("length", [31, 32, 74, 200])
def test_ls_keeps_figures_beside_a_name_of_any_length(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "runs/".ljust(length, "x")
    make_run(tmp_path / name, noisy_metrics(20))
    (tmp_path / "runs" / LONG).rename(tmp_path / "aside")
    lines = listed(capsys)
    (row,) = [line.split() for line in lines if "xxx" in line]
    assert row[1:3] == ["finished", "20/20"]
    assert len(row) == (6 if length <= 32 else 5)
    assert (row[0] == name) == (length <= 32)
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_ls_names_a_damaged_run_and_lists_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    (Path("runs") / LONG / name).write_text("model: [\n")
    list_runs(Path("runs"))
    said = capsys.readouterr()
    assert said.err.startswith(f"error: runs/{LONG}/{name}:")
    assert "runs/short" in said.out


@pytest.mark.usefixtures("two_runs")
def test_ls_shows_everything_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("COLUMNS", "40")
    list_runs(Path("runs"))
    (long,) = [line.split() for line in capsys.readouterr().out.splitlines() if LONG in line]
    assert len(long) == 8
