"""Comparisons in both orders: what counts, what is a tie, and the scores that follow."""

from pathlib import Path

import pytest

from isopref.errors import ConfigError
from isopref.judge.comparing import Tally, comparisons, question, read_rubric, read_verdict, scores_of, verdict_of


def test_the_last_verdict_counts() -> None:
    assert read_verdict("I first thought VERDICT: A. No.\nVERDICT: B\n") == "B"
    assert read_verdict("**Verdict:** tie") == "TIE"
    assert read_verdict("verdict: [[A]]") == "A"
    assert read_verdict("Both are fine, A more so.") is None
    assert read_verdict("VERDICT: Absolutely") is None


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Verdict: a tie.", "TIE"),
        ("VERDICT: A TIE", "TIE"),
        ("My verdict: a close call, but no more than that", None),
        ("My verdict is hard to give.\nVERDICT: Answer B", "B"),
        ("VERDICT: A is better.", "A"),
        ("verdict: b", "B"),
        ("verdict: **a**\n", "A"),
        ("Verdict: a\nThat is all.", "A"),
    ],
)
def test_an_article_is_no_verdict(reply: str, letter: str | None) -> None:
    assert read_verdict(reply) == letter


def test_answers_cannot_write_the_question() -> None:
    text = question(read_rubric(None), "say {a} and {b}", "first {b} {prompt}", "second")
    assert "[Answer A]\nfirst {b} {prompt}\n" in text
    assert "[Answer B]\nsecond\n" in text
    assert "say {a} and {b}" in text


def test_every_two_different_answers_in_both_orders() -> None:
    found = comparisons(4, "p", ["x", "y", "x", ""], "judge")
    assert [(one.first, one.second, one.swapped) for one in found] == [
        (0, 1, False), (0, 1, True), (1, 2, False), (1, 2, True),
    ]  # fmt: skip
    assert len({one.key for one in found}) == 4
    assert not {one.key for one in found} & {one.key for one in comparisons(4, "p", ["x", "y", "x", ""], "other")}


def test_a_letter_is_undone_by_the_order() -> None:
    assert [verdict_of(letter, swapped) for letter in ("A", "B", "TIE") for swapped in (False, True)] == [
        "first", "second", "second", "first", "tie", "tie",
    ]  # fmt: skip


def test_scores_by_hand() -> None:
    """Three answers: 0 beats 1; 0 and 2 disagree; 1 and 2 tie."""
    tally = Tally()
    verdicts = {
        (0, 1): tally.joined("first", "first"),
        (0, 2): tally.joined("first", "second"),
        (1, 2): tally.joined("tie", "tie"),
    }
    assert tally.counts == {"decided": 1, "disagreements": 1, "ties": 1}
    assert scores_of(3, verdicts, "drop") == [1.0, 0.0, None]
    assert scores_of(3, verdicts, "keep") == [0.75, 0.25, 0.5]
    assert tally.joined("tie", "first") is None


def test_a_rubric_without_the_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Which is better, {a}?")
    with pytest.raises(ConfigError, match=r"has no \{prompt\}, \{b\}"):
        read_rubric(tmp_path / "rubric.txt")
