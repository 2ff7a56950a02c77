"""Progress where there is no terminal: a line now and then, with what is left."""

import pytest

from isopref.engine.display import Display


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
