"""Signs that a run spoilt its model, by hand."""

from pathlib import Path

import numpy as np
import pytest

from isopref.report.degeneration import repetition, signs
from isopref.report.html import page
from isopref.report.markdown import markdown
from isopref.runs.read import read_run
from isopref.runs.write import write_rewards
from support.runs import make_run

PLAIN = "The capital of Russia is Moscow, a city on the river Moskva."
LOOP = "A volcano is " + "a volcano is " * 9


def found(
    folder: Path, chosen: list[float], answers: list[tuple[str, str]], *, chosen_tokens: int | None = None
) -> list[str]:
    metrics = [{"step": step, "train/logps_chosen": value} for step, value in enumerate(chosen, start=1)]
    samples = [{"prompt": "why?", "greedy_before": before, "greedy_after": after} for before, after in answers]
    run = read_run(make_run(folder, metrics, samples=samples))
    if chosen_tokens is not None:
        write_rewards(folder, np.full((4, 2), chosen_tokens), np.zeros((4, 2)), np.ones((4, 2)))
        run = read_run(folder)
    told = list(signs(run))
    assert page([run]).count('<p class="warning">') == len(told)
    assert markdown([run]).count("**Warning, ") == len(told)
    return told


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (PLAIN, 0.0),
        ("", 0.0),
        ("no no no", 0.0),  # too short to tell
        ("no no no no no", 2 / 3),  # three triples, one of them new
        ("a b c a b c", 1 / 4),  # abc, bca, cab, abc
    ],
)
def test_repetition_by_hand(text: str, share: float) -> None:
    assert repetition(text) == pytest.approx(share)


def test_a_healthy_run_has_no_signs(tmp_path: Path) -> None:
    assert found(tmp_path / "run", [-100.0, -105.0, -114.0], [(PLAIN, PLAIN), (LOOP, PLAIN)]) == []
    assert found(tmp_path / "looped", [-100.0], [(LOOP, LOOP)]) == []  # it did so before


def test_chosen_answers_that_become_less_likely(tmp_path: Path) -> None:
    (sign,) = found(tmp_path / "run", [-100.0, -90.0, -116.0], [])
    assert "fell from \N{MINUS SIGN}100.0 to \N{MINUS SIGN}116.0 nats" in sign


def test_steps_that_were_not_finite_are_no_sign(tmp_path: Path) -> None:
    """A step whose gradient is not finite is skipped, and logs null."""
    nan = float("nan")
    for number, chosen in enumerate(([nan, -100.0, -101.0], [-100.0, -101.0, nan], [-100.0, nan], [nan, nan])):
        assert found(tmp_path / f"{number}", chosen, []) == []
    (sign,) = found(tmp_path / "run", [-100.0, -116.0, nan], [])
    assert "fell from \N{MINUS SIGN}100.0 to \N{MINUS SIGN}116.0 nats" in sign


def test_later_batches_with_longer_answers_are_no_sign(tmp_path: Path) -> None:
    """The steps have different pairs. The reward compares each with its own reference, and here it rose."""
    logps, rewards = (-15.0, -36.0, -31.0), (0.0, 0.2, 0.7)
    metrics = [
        {"step": step, "train/logps_chosen": logp, "train/rewards_chosen": reward}
        for step, (logp, reward) in enumerate(zip(logps, rewards, strict=True), start=1)
    ]
    assert list(signs(read_run(make_run(tmp_path / "longer", metrics)))) == []
    metrics[-1]["train/rewards_chosen"] = -0.7
    (sign,) = signs(read_run(make_run(tmp_path / "less_likely", metrics)))
    assert "fell from \N{MINUS SIGN}15.0 to \N{MINUS SIGN}31.0 nats" in sign


@pytest.mark.parametrize(
    ("weight", "advice"),
    [
        (0.0, "; objective.nll_weight counteracts it."),
        (4.0, "; a larger objective.nll_weight (4.0 here) or a smaller optim.lr counteracts it."),
    ],
)
def test_the_advice_knows_the_config(tmp_path: Path, weight: float, advice: str) -> None:
    metrics = [{"step": step, "train/logps_chosen": value} for step, value in enumerate((-100.0, -116.0), start=1)]
    settings = {"objective": {"nll_weight": weight}}
    (sign,) = signs(read_run(make_run(tmp_path / "run", metrics, settings=settings)))
    assert sign.endswith(advice)


def test_answers_that_repeat_themselves(tmp_path: Path) -> None:
    (sign,) = found(tmp_path / "run", [-100.0, -100.0], [(PLAIN, LOOP), (PLAIN, LOOP)])
    assert sign.startswith(
        "Answers repeat themselves: 89% of their word triples are repeats"
    )  # 28 triples, 3 of them new
    assert sign.endswith("up from 0% before training.")


def test_empty_answers(tmp_path: Path) -> None:
    assert found(tmp_path / "run", [-1.0], [(PLAIN, " "), ("", ""), (PLAIN, PLAIN)]) == [
        "2 of 3 answers are empty, up from 1 before training."
    ]


def test_answers_that_collapse_in_length(tmp_path: Path) -> None:
    """PLAIN has 60 letters; a chosen answer of 12 tokens has about 48, one of 2 tokens about 8."""
    answers = [(PLAIN, "Moscow."), (PLAIN, "Yes.")]
    (sign,) = found(tmp_path / "run", [-1.0], answers, chosen_tokens=12)
    assert sign == (
        "Answers collapsed in length: 6 letters on average, from 60 before training, while held-out chosen "
        "answers have 12 tokens."
    )
    assert found(tmp_path / "taught", [-1.0], answers, chosen_tokens=2) == []
    assert found(tmp_path / "short", [-1.0], [("Yes, no.", "Yes.")], chosen_tokens=12) == []  # half as long
