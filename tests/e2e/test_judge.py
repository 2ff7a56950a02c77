"""`isopref judge`: by a function, a reward model and a language model; what comes out can be trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isopref import remote
from support.chat_server import chat_server
from support.project import Project

ANSWERS: list[dict[str, Any]] = [
    {"prompt": "why?", "responses": ["because it is so", "because", "", "no"], "models": ["m"] * 4},
    {"prompt": "how?", "responses": ["like this", "like that"], "models": ["m"] * 2},
    {"prompt": [{"role": "user", "content": "when?"}], "responses": ["now", "later today"], "models": ["m"] * 2},
]
FUNCTION = "def brevity(prompt, answers):\n    return [-len(answer) for answer in answers]\n"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def answers(project: Project) -> Path:
    project.write_pairs("answers.jsonl", ANSWERS)
    (project.folder / "my_rewards.py").write_text(FUNCTION)
    return project.folder / "answers.jsonl"


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("by", ["my_rewards:brevity", "my_rewards.py:brevity"])
def test_a_function(project: Project, by: str) -> None:
    outcome = project.isopref("judge", "answers.jsonl", "--by", by)
    assert outcome.code == 0, outcome.err
    assert "1 empty answers" in outcome.out
    assert "1 prompts without two answers of different scores" in outcome.out
    found = lines(project.folder / "answers.judged.jsonl")
    assert [one["scores"] for one in found] == [[-16.0, -7.0, None, -2.0], [-3.0, -11.0]]
    run = project.train("run", "data.train=answers.judged.jsonl", "optim.epochs=1", "optim.batch_size=2")
    assert (run / "model").is_dir()


@pytest.mark.usefixtures("answers")
def test_a_reward_model_gives_the_scores_of_isopref_score(project: Project) -> None:
    project.train("run", "objective.loss=bradley_terry", "optim.epochs=1", "optim.lr=1e-2")
    outcome = project.isopref("judge", "answers.jsonl", "--by", "run", "model.dtype=float64")
    assert outcome.code == 0, outcome.err
    found = lines(project.folder / "answers.judged.jsonl")
    assert len(found) == 3
    pairs = [{"prompt": "why?", "chosen": "because it is so", "rejected": "no"}]
    project.write_pairs("pairs.jsonl", pairs)
    assert project.isopref("score", "pairs.jsonl", "--model", "run/model", "model.dtype=float64").code == 0
    (own,) = lines(project.folder / "pairs.scores.jsonl")
    scores = found[0]["scores"]
    assert scores[2] is None
    assert [scores[0], scores[3]] == pytest.approx(own["rewards"], abs=1e-9)
    assert not list(project.folder.glob(".judging-*"))


def shorter_wins(request: dict[str, Any]) -> str:
    """A judge that likes short answers, cannot decide between two of one length, and A if it reads "now"."""
    text = request["messages"][0]["content"]
    found = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n", text)
    assert found
    a, b = found.groups()
    if "now" in (a, b):
        return "I like the first. VERDICT: A"
    letter = "TIE" if len(a) == len(b) else "A" if len(a) < len(b) else "B"
    return f"One is shorter.\nVERDICT: {letter}"


@pytest.mark.usefixtures("answers")
def test_a_language_model_compares_in_both_orders(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.Server.__init__, "__defaults__", (None, 3.0, 4, lambda s: None))
    project.extra_env["OPENAI_API_KEY"] = "sk-very-secret"
    with chat_server(shorter_wins) as server:
        server.faults = ["500", "cut", "truncated", "429"]
        outcome = project.isopref("judge", "answers.jsonl", "--by", server.url, "--ties", "keep")
        assert outcome.code == 0, outcome.err
        assert server.answered == 2 * (3 + 1 + 1)
        assert "3 comparisons decided" in outcome.out
        assert "1 comparisons in which the orders disagree, kept as ties" in outcome.out
        assert "1 comparisons tied, kept as ties" in outcome.out
        found = lines(project.folder / "answers.judged.jsonl")
        assert [one["scores"] for one in found] == [[0.0, 0.5, None, 1.0]]
        # A judge that fails in the middle loses nothing.
        before = server.answered
        server.faults = [None, None, None, *(["500"] * 40)]  # type: ignore[list-item]
        again = ("judge", "answers.jsonl", "--by", server.url, "--ties", "keep", "--out", "b.jsonl", "--parallel", "1")
        assert project.isopref(*again).code == 1
        server.faults = []
        assert project.isopref(*again).code == 0
        assert lines(project.folder / "b.jsonl") == found
        assert server.answered == before + 10
    for path in project.folder.rglob("*"):
        assert not path.is_file() or b"sk-very-secret" not in path.read_bytes()


@pytest.mark.usefixtures("answers")
def test_a_judge_that_gives_no_verdict(project: Project) -> None:
    with chat_server(lambda request: "Both are lovely.") as server:
        outcome = project.isopref("judge", "answers.jsonl", "--by", server.url)
    assert outcome.code == 1
    assert re.search(r"gave no verdict in 3 replies about answers \d and \d of record \d", outcome.err)


@pytest.mark.usefixtures("answers")
def test_what_is_refused(project: Project) -> None:
    project.write_pairs("more.jsonl", [{"instruction": "Translate", "input": "cat", "responses": ["a", "b"]}])
    (project.folder / "bad.py").write_text("def few(prompt, answers):\n    return [1.0]\n")
    for arguments, message in (
        (("answers.jsonl", "--by", "nothing:here"), "cannot be imported"),
        (("answers.jsonl", "--by", "bad.py:many"), "has no function 'many'"),
        (("answers.jsonl", "--by", "bad.py:few"), "returned [1.0] for 3 answers"),
        (("more.jsonl", "--by", "my_rewards:brevity"), "the judge would not read input"),
        (("train.jsonl", "--by", "my_rewards:brevity"), "expected prompt and responses"),
        (("answers.jsonl", "--by", str(project.model)), "is not a reward model"),
        (("answers.jsonl", "--by", "my_rewards:brevity", "--ties", "keep"), "--ties: is for a judge that compares"),
        (("answers.jsonl", "--by", "my_rewards:brevity", "--rubric", "r.txt"), "--rubric: is for a judge at a URL"),
    ):
        outcome = project.isopref("judge", *arguments)
        assert outcome.code == 1
        assert message in outcome.err
