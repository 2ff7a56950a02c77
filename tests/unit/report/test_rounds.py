"""The report of rounds: one column per model, and answers side by side."""

from isopref.report.rounds import Round, page

HOSTILE = "<script>alert(1)</script>"


def two_rounds() -> list[Round]:
    return [
        Round("start model", [("Why?", "Because."), ([{"role": "user", "content": "Who?"}], "")], 3.0, 1.0),
        Round("round 1", [("Why?", HOSTILE), ([{"role": "user", "content": "Who?"}], "You.")], 2.0, 0.5),
    ]


def test_answers_are_cards_in_the_colour_of_their_model() -> None:
    html = page("my", two_rounds(), 5)
    assert html.count('<div class="answers">') == 2
    assert '<div class="was"><small>start model</small><pre>Because.</pre></div>' in html
    assert '<div class="slot0"><small>round 1</small><pre>&lt;script&gt;alert(1)&lt;/script&gt;</pre></div>' in html
    assert '<div class="was"><small>start model</small><pre>(nothing)</pre></div>' in html
    assert '<p class="prompt">user: Who?</p>' in html
    assert HOSTILE not in html


def test_prompts_beyond_the_most_are_left_out() -> None:
    assert page("my", two_rounds(), 1).count('<div class="answers">') == 1
