"""`isopref judge`: by a function, a reward model and a language model; what comes out can be trained on."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isopref import remote
from isopref.build.judge import read_records
from support.chat_server import chat_server
from support.forked import start_isopref
from support.project import TIMEOUT_S, Project

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


def test_a_judge_reads_prompts_of_any_form(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "why?"}]
    asked: list[dict[str, Any]] = [{"prompt": turns}]
    asked += [{"prompt": "why?", "system": "Be brief."}, {"prompt": turns, "system": "Be brief."}]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({**one, "responses": ["a", "bb"]}) + "\n" for one in asked))
    user, system = {"role": "user", "content": "why?"}, {"role": "system", "content": "Be brief."}
    assert [one.prompt for one in read_records(path)] == [[user], [system, user], [system, user]]


@pytest.mark.usefixtures("answers")
def test_a_system_column_is_scored_as_a_turn(project: Project) -> None:
    project.train("run", "objective.loss=bradley_terry", "optim.max_steps=1")
    system = {"role": "system", "content": "Be brief."}
    responses = {"responses": ["because", "no"]}
    project.write_pairs("column.jsonl", [{"prompt": "why?", "system": "Be brief.", **responses}])
    project.write_pairs("turn.jsonl", [{"prompt": [system, {"role": "user", "content": "why?"}], **responses}])
    scores = []
    for name in ("column", "turn"):
        outcome = project.isopref("judge", f"{name}.jsonl", "--by", "run", "model.dtype=float64")
        assert outcome.code == 0, outcome.err
        scores += [one["scores"] for one in lines(project.folder / f"{name}.judged.jsonl")]
    assert scores[0] == scores[1]


@pytest.mark.usefixtures("answers")
def test_a_reward_model_gives_the_scores_of_isopref_score(project: Project) -> None:
    project.train("run", "objective.loss=bradley_terry", "optim.epochs=1", "optim.lr=1e-2")
    outcome = project.isopref("judge", "answers.jsonl", "--by", "run", "model.dtype=float64")
    assert outcome.code == 0, outcome.err
    assert re.findall("^wrote (.*):", outcome.out, flags=re.MULTILINE) == ["answers.judged.jsonl"]
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
    monkeypatch.setattr(remote.Server.__init__, "__defaults__", (None, 3.0, 5, lambda s: None))
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


def undecided_about(word: str) -> Callable[[dict[str, Any]], str]:
    """The judge above, which is at a loss when B contains a word."""

    def answer(request: dict[str, Any]) -> str:
        shown_as_b = request["messages"][0]["content"].split("[Answer B]")[1]
        return "Both are lovely." if word in shown_as_b else shorter_wins(request)

    return answer


@pytest.mark.usefixtures("answers")
def test_a_comparison_without_a_verdict_does_not_lose_the_others(project: Project) -> None:
    command = ("judge", "answers.jsonl", "--parallel", "1", "--ties", "keep")
    out = project.folder / "answers.judged.jsonl"
    with chat_server(shorter_wins) as server:
        assert project.isopref(*command, "--by", server.url, "--out", "whole.jsonl").code == 0
    with chat_server(undecided_about("so")) as server:
        outcome = project.isopref(*command, "--by", server.url)
        assert outcome.code == 1
        # One order each of two of the first prompt's three comparisons.
        assert 'gave no verdict on 2 of 5 comparisons, in 3 replies each: record 1 ("why?").' in outcome.err
        assert "ends with 'Both are lovely.'" in outcome.err
        assert not out.exists()
        assert server.answered == 8 + 2 * 3
        # Again: only about what is missing.
        assert project.isopref(*command, "--by", server.url).code == 1
        assert server.answered == 8 + 2 * 3 + 2 * 3
        server.answer = shorter_wins
        outcome = project.isopref(*command, "--by", server.url)
        assert outcome.code == 0, outcome.err
        assert "resume: 8 of 10 comparisons" in outcome.out
        assert server.answered == 8 + 2 * 3 + 2 * 3 + 2
    whole = (project.folder / "whole.jsonl").read_text()
    assert [one["scores"] for one in lines(out)] == [json.loads(line)["scores"] for line in whole.splitlines()]


@pytest.mark.usefixtures("answers")
def test_comparisons_without_a_verdict_are_left_out_if_asked(project: Project) -> None:
    with chat_server(undecided_about("so")) as server:
        command = ("judge", "answers.jsonl", "--by", server.url, "--ties", "keep")
        assert project.isopref(*command).code == 1
        before = server.answered
        outcome = project.isopref(*command, "--skip-failed")
        assert outcome.code == 0, outcome.err
        assert server.answered == before + 2 * 3
    assert "2 comparisons without a verdict, left out" in outcome.out
    assert "1 comparisons decided" in outcome.out
    # Of the first prompt, "because" against "no" remains; the other prompts have only a tie or a disagreement.
    assert [one["scores"] for one in lines(project.folder / "answers.judged.jsonl")] == [[None, 0.0, None, 1.0]]


def test_a_judge_that_never_gives_a_verdict_is_not_asked_for_ever(project: Project) -> None:
    project.write_pairs("many.jsonl", [{"prompt": f"{n}?", "responses": ["a", "b"]} for n in range(40)])
    with chat_server(lambda request: "Both are lovely.") as server:
        outcome = project.isopref("judge", "many.jsonl", "--by", server.url, "--parallel", "1", "--skip-failed")
        assert server.answered == 3 * 32
    assert outcome.code == 1
    assert "gave no verdict on any of the first 32 comparisons" in outcome.err


@pytest.mark.usefixtures("answers")
def test_what_is_refused(project: Project) -> None:
    project.write_pairs("roles.jsonl", [{"prompt": [{"role": "critic", "content": "a"}], "responses": ["a", "b"]}])
    project.write_pairs("more.jsonl", [{"instruction": "Translate", "input": "cat", "responses": ["a", "b"]}])
    (project.folder / "bad.py").write_text(
        "def few(prompt, answers):\n    return [1.0]\ndef alone(answers):\n    return [1.0]\n"
    )
    for arguments, message in (
        (("answers.jsonl", "--by", "nothing:here"), "cannot be imported"),
        (("answers.jsonl", "--by", "bad.py:many"), "has no function 'many'"),
        (("answers.jsonl", "--by", "bad.py"), "names a file, but no function in it. Write bad.py:FUNCTION."),
        (("answers.jsonl", "--by", "bad.py:alone"), "bad.py:alone(answers) cannot be called with a prompt and a list"),
        (("answers.jsonl", "--by", "bad.py:few"), "returned [1.0] for 3 answers"),
        (("more.jsonl", "--by", "my_rewards:brevity"), "the judge would not read input"),
        (("train.jsonl", "--by", "my_rewards:brevity"), "expected prompt and responses"),
        (("answers.jsonl", "--by", str(project.model)), "is not a reward model"),
        (("answers.jsonl", "--by", "~no_such_user/a"), "--by: must be a path in a home folder that exists"),
        (("roles.jsonl", "--by", "my_rewards:brevity"), "roles.jsonl:1: prompt[0] has the role 'critic'"),
        (("answers.jsonl", "--by", "my_rewards:brevity", "--ties", "keep"), "--ties: applies only to a judge at a URL"),
        (
            ("answers.jsonl", "--by", "my_rewards:brevity", "--rubric", "r.txt"),
            "--rubric: applies only to a judge at a URL",
        ),
        (
            ("answers.jsonl", "--by", "my_rewards:brevity", "--skip-failed"),
            "--skip-failed: applies only to a judge at a URL",
        ),
    ):
        outcome = project.isopref("judge", *arguments)
        assert outcome.code == 1
        assert message in outcome.err


@pytest.mark.soak
def test_killed_twenty_times_at_random_the_file_is_the_same(project: Project) -> None:
    """Each kill waits for a random number of replies, then for a random part of the time that the next one takes."""
    num_prompts, num_kills, parallel = 80, 20, 4
    rng = random.Random(0)
    words = ["yes", "no", "perhaps", "certainly not", "who knows"]
    answers = [{"prompt": f"question {n}?", "responses": rng.sample(words, 3)} for n in range(num_prompts)]
    project.write_pairs("answers.jsonl", answers)
    asked = 2 * 3 * num_prompts  # three comparisons of each prompt, in both orders

    def slowly(request: dict[str, Any]) -> str:
        time.sleep(0.05)
        return shorter_wins(request)

    with chat_server(slowly) as server:
        command = ("judge", "answers.jsonl", "--by", server.url, "--ties", "keep", "--parallel", str(parallel))
        assert project.isopref(*command, "--out", "whole.jsonl").code == 0
        assert server.answered == asked
        again = (*command, "--out", "killed.jsonl")
        for part in sorted(rng.sample(range(1, asked - 60), num_kills)):
            process = start_isopref(project, *again)
            give_up = time.monotonic() + TIMEOUT_S
            while server.answered < asked + part and process.is_alive() and time.monotonic() < give_up:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, (project.folder / "forked.err").read_text()
        assert not (project.folder / "killed.jsonl").exists()
        assert project.isopref(*again).code == 0
        # A kill loses the replies that were under way, and no other.
        assert server.answered <= 2 * asked + 2 * num_kills * parallel
    assert (project.folder / "killed.jsonl").read_bytes() == (project.folder / "whole.jsonl").read_bytes()
