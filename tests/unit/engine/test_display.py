"""What a run shows: a bar with figures on a terminal, a line now and then elsewhere, nothing on other ranks."""

import io
import re
import time

import pytest
from rich.console import Console

from isopref.engine.display import Display, brief


def test_long_work_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("isopref.engine.display.time.monotonic", lambda: clock[0])
    with Display().bar("score reference", 4000) as advance:
        for _ in range(20):  # ten seconds for a hundred pairs
            clock[0] += 10
            advance(100, "10.0 pairs/s")
    # After 30 s there are 3700 left, at ten a second.
    assert capsys.readouterr().out.splitlines()[:2] == [
        "score reference  300/4000  10.0 pairs/s  0:06:10 left",
        "score reference  600/4000  10.0 pairs/s  0:05:40 left",
    ]


def test_without_a_total(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr("isopref.engine.display.time.monotonic", lambda: clock[0])
    with Display().bar("tokenise", None) as advance:
        clock[0] = 31
        advance(7, "")
    assert capsys.readouterr().out == "tokenise  7  \n"


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display().bar("score reference", 10) as advance:
        advance(10, "")
    with Display().bar("train", 10, lines=False) as advance:
        advance(10, "")
    assert capsys.readouterr().out == ""


def test_cells_are_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Models write what looks like markup, and what would steer a terminal."""
    Display().table("[red]title", ("[b]", "x"), [("[INST] hi [/INST]", "[/b] \x1b[31mred")])
    out = capsys.readouterr().out
    for text in ("[red]title", "[b]", "[INST] hi [/INST]", "[/b]"):
        assert text in out
    assert "\x1b[31m" not in out


METRICS = {
    "train/loss": 0.43512, "train/accuracy": 0.875, "train/margin": 6.0927, "speed/pairs_per_s": 1.254,
    "speed/mfu": 0.451, "speed/peak_memory_gib": 12.34,
}  # fmt: skip


def test_figures_of_a_step_on_one_line() -> None:
    assert brief(METRICS) == "loss 0.4351  accuracy 0.88  margin 6.09  1.25 pairs/s  MFU 45%  12.3 GiB"


def test_a_narrow_terminal_shows_progress_and_every_figure() -> None:
    """Beside the bar they would be cut to fit; below it they are whole, and wrap if they must."""
    screen = io.StringIO()
    display = Display()
    display.console = Console(file=screen, force_terminal=True, width=60, color_system=None, soft_wrap=True)
    with display.bar("train", 30, lines=False, below=True) as advance:
        advance(12, brief(METRICS))
        with display.bar("score held-out", 8) as inner:
            inner(3, "2.0 pairs/s")
            time.sleep(0.25)  # a frame or two
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "12/30" in text
    assert "score held-out" in text
    assert "loss 0.4351 accuracy 0.88 margin 6.09 1.25 pairs/s MFU 45% 12.3 GiB" in " ".join(text.split())


def test_ranks_other_than_the_first_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(quiet=True)
    display.say("hello")
    display.table("title", ("a",), [("b",)])
    with display.bar("train", 10) as advance:
        advance(10, "note")
    assert capsys.readouterr() == ("", "")
