"""`isopref rounds` and `isopref eval --win-rate`: stages that resume, models that follow each other, one report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from isopref import remote
from isopref.build import rounds as build_rounds
from isopref.build.judge import JudgeOptions
from isopref.build.win_rate import contest
from isopref.errors import DataError
from isopref.judge.comparing import NoVerdictError
from support.chat_server import chat_server
from support.project import Project

REWARD = "def short(prompt, answers):\n    return [-len(one) for one in answers]\n"
SAMPLING = ("--by", "my_rewards.py:short", "--max-tokens", "8")
ROUNDS = ("rounds", "my.yaml", "run.folder=out", "optim.max_steps=1", *SAMPLING, "--answers", "3", "--rounds")


@pytest.fixture
def ready(project: Project) -> Project:
    project.write_pairs("prompts.jsonl", [{"prompt": f"question {n}?"} for n in range(4)])
    (project.folder / "my_rewards.py").write_text(REWARD)
    path = project.folder / "my.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"]["train"] = "prompts.jsonl"
    path.write_text(yaml.safe_dump(config))
    return project


def config_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "run" / "config.yaml").read_text())


def test_rounds_follow_each_other_and_resume(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ready.isopref(*ROUNDS, "1")
    assert outcome.code == 0, outcome.err
    out = ready.folder / "out"
    first = (out / "round-1" / "judged.jsonl").read_bytes()
    # Stopped in the second round, after sampling: what is there is not done again.

    def fails(*_: Any) -> None:
        raise DataError("the judge has gone home")

    with monkeypatch.context() as patched:
        patched.setattr(build_rounds, "judge_file", fails)
        outcome = ready.isopref(*ROUNDS, "2")
    assert outcome.code == 1
    assert "the judge has gone home" in outcome.err
    sampled = (out / "round-2" / "sampled.jsonl").stat().st_mtime_ns
    outcome = ready.isopref(*ROUNDS, "2")
    assert outcome.code == 0, outcome.err
    assert (out / "round-1" / "judged.jsonl").read_bytes() == first
    assert (out / "round-2" / "sampled.jsonl").stat().st_mtime_ns == sampled
    one, two = config_of(out / "round-1"), config_of(out / "round-2")
    assert one["model"]["path"] == two["model"]["reference"] == str(ready.model)
    assert one["model"]["reference"] is None
    assert two["model"]["path"] == str(Path("out/round-1/run/model"))
    figures = json.loads((out / "figures.json").read_text())
    assert list(figures) == ["start model", "round 1", "round 2"]
    for name in ("round 1", "round 2"):
        assert 0 <= figures[name]["win_rate"]["low"] <= figures[name]["win_rate"]["value"] <= 1
        assert figures[name]["accuracy"] is not None
    page = (out / "report.html").read_text()
    assert "win rate against the start model" in page
    assert "round 2" in page
    outcome = ready.isopref(*ROUNDS, "2", "--reference", "previous")
    assert outcome.code == 1
    assert "has rounds with other settings" in outcome.err


def test_held_out_prompts_alone_are_judged_for_accuracy(ready: Project) -> None:
    ready.write_pairs("held.jsonl", [{"prompt": f"held out {n}?"} for n in range(4)])
    options = ("--reference", "previous", "--temperature", "0.9")
    outcome = ready.isopref(*ROUNDS, "1", "data.eval=held.jsonl", "model.adapter.rank=2", *options)
    assert outcome.code == 0, outcome.err
    out = ready.folder / "out"
    assert config_of(out / "round-1")["data"]["eval"] == str(Path("out/start/judged.jsonl"))
    assert (out / "round-1" / "run" / "model" / "adapter_config.json").exists()
    figures = json.loads((out / "figures.json").read_text())["round 1"]
    assert figures["accuracy"] is not None
    assert figures["kl"] is None  # of temperature 1 alone


def test_an_adapter_continues_over_rounds(ready: Project) -> None:
    """Its rank is set for the first round; later ones find it in the adapter."""
    ready.train("before", "data.train=train.jsonl", "optim.epochs=1", "optim.lr=0.05", "model.adapter.rank=2")
    outcome = ready.isopref(*ROUNDS, "2", "model.adapter.rank=2")
    assert outcome.code == 0, outcome.err
    second = config_of(ready.folder / "out" / "round-2")["model"]
    assert second["adapter"]["path"] == str(Path("out/round-1/run/model"))
    assert second["reference"] == second["path"] == str(ready.model)
    # An adapter to start from is part of the start model: the first round samples from both.
    more = ("model.adapter.path=before/model", "run.folder=other")
    outcome = ready.isopref(*ROUNDS, "1", *more)
    assert outcome.code == 0, outcome.err
    (sampled, *_) = (ready.folder / "other" / "round-1" / "sampled.jsonl").read_text().splitlines()
    assert set(json.loads(sampled)["models"]) == {"before/model"}


def test_held_out_pairs_with_other_column_names(ready: Project) -> None:
    renamed = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    for name in ("prompts.jsonl", "eval.jsonl"):
        records = [json.loads(line) for line in (ready.folder / name).read_text().splitlines()]
        ready.write_pairs(name, [{renamed.get(key, key): one[key] for key in one} for one in records])
    outcome = ready.isopref(*ROUNDS, "1", "data.columns={prompt: q, chosen: good, rejected: bad}")
    assert outcome.code == 0, outcome.err
    assert json.loads((ready.folder / "out" / "figures.json").read_text())["round 1"]["accuracy"] is not None


def test_another_question_for_the_judge_is_another_setting(ready: Project) -> None:
    rubric = ready.folder / "rubric.txt"
    rubric.write_text("{prompt} {a} {b}: which is shorter?")
    command = ("rounds", "my.yaml", "run.folder=out", "--max-tokens", "8", "--by", "http://127.0.0.1:9/v1")
    asked = (*command, "--rubric", "rubric.txt", "--judge-model", "one")
    with mock.patch.object(build_rounds, "_sample", side_effect=DataError("far enough")):
        assert "far enough" in ready.isopref(*asked).err
        assert "far enough" in ready.isopref(*asked).err
        rubric.write_text("{prompt} {a} {b}: which is longer?")
        assert "has rounds with other settings" in ready.isopref(*asked).err
        assert "has rounds with other settings" in ready.isopref(*command, "--judge-model", "two").err


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs fails a test in seconds: a time-out of 3 s, two attempts, no pause."""
    monkeypatch.setattr(remote.Server.__init__, "__defaults__", (None, 3.0, 2, lambda s: None))


def shorter_wins(request: dict[str, Any]) -> str:
    a, b = answers_shown(request)
    if len(a) == len(b):
        return "VERDICT: TIE"
    return f"VERDICT: {'A' if len(a) < len(b) else 'B'}"


def answers_shown(request: dict[str, Any]) -> list[str]:
    parts = r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\nThink it over"
    found = re.search(parts, request["messages"][0]["content"], re.DOTALL)
    assert found
    return list(found.groups())


def judged_by(url: str) -> tuple[str, ...]:
    options = ("--by", url, "--judge-parallel", "1", "--max-tokens", "8", "--answers", "3", "--rounds", "2")
    return ("rounds", "my.yaml", "run.folder=out", "optim.max_steps=1", "optim.lr=0.05", *options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(folder: Path) -> dict[str, str]:
    """All that the judge decided, and the figures."""
    names = ["figures.json"]
    names += [f"round-{n}/{name}" for n in (1, 2) for name in ("judged.jsonl", "contest/judged.jsonl")]
    return {name: (folder / name).read_text() for name in names}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stage", ["round-2", "round-2/contest"])
def test_a_language_model_judges_two_rounds_and_is_asked_nothing_twice(ready: Project, stage: str) -> None:
    out, whole = ready.folder / "out", ready.folder / "whole"
    num_kept = 3

    def locked_out_later(request: dict[str, Any]) -> str:
        """In one stage, the server accepts `num_kept` requests and refuses the next."""
        partial = out / stage / ".judged.jsonl.partial"
        if partial.exists() and len(lines(partial)) == num_kept - 1:
            server.faults = ["401"]
        return shorter_wins(request)

    with chat_server(shorter_wins) as server:
        outcome = ready.isopref(*judged_by(server.url))
        assert outcome.code == 0, outcome.err
        num_asked = server.answered
        out.rename(whole)
        server.answer = locked_out_later
        outcome = ready.isopref(*judged_by(server.url))
        assert outcome.code == 1
        assert "the server refuses the request, status 401" in outcome.err
        assert len(lines(out / stage / ".judged.jsonl.partial")) == num_kept
        assert not (out / stage / "judged.jsonl").exists()
        server.answer = shorter_wins
        outcome = ready.isopref(*judged_by(server.url))
        assert outcome.code == 0, outcome.err
        assert f"resume: {num_kept} of" in outcome.out
        assert server.answered == 2 * num_asked
    assert results(out) == results(whole)
    assert not list(out.rglob(".judged.jsonl*"))


@pytest.mark.usefixtures("impatient")
def test_scores_by_a_language_model_are_shares_of_comparisons_won(ready: Project) -> None:
    with chat_server(shorter_wins) as server:
        outcome = ready.isopref(*judged_by(server.url))
    assert outcome.code == 0, outcome.err
    figures = json.loads((ready.folder / "out" / "figures.json").read_text())
    for n in (1, 2):
        folder = ready.folder / "out" / f"round-{n}"
        assert lines(folder / "judged.jsonl")
        for one in lines(folder / "judged.jsonl"):
            assert one["scores"] == shares_won([len(text) for text in one["responses"]])
        won = [one["won"] for one in lines(folder / "contest" / "judged.jsonl") if one["won"] is not None]
        assert figures[f"round {n}"]["win_rate"]["value"] == pytest.approx(sum(won) / len(won))
        assert figures[f"round {n}"]["failed"] == 0
        assert figures[f"round {n}"]["reward"] is None  # a judge that compares gives none


def shares_won(lengths: list[int]) -> list[float | None]:
    """Of each answer: the share of the others of another length that are longer; an empty one is not compared."""
    shares: list[float | None] = []
    for mine in lengths:
        others = [other for other in lengths if other not in (0, mine)]
        shares.append(sum(other > mine for other in others) / len(others) if mine and others else None)
    return shares


@pytest.mark.usefixtures("impatient")
def test_rounds_with_comparisons_that_have_no_verdict(ready: Project) -> None:
    """The judge says nothing about one of the prompts and one of the held-out ones, until --skip-failed."""
    silent = ("question 0?", lines(ready.folder / "eval.jsonl")[0]["prompt"])

    def undecided(request: dict[str, Any]) -> str:
        content = request["messages"][0]["content"]
        about = any(f"[Conversation]\n{prompt}\n\n[Answer A]" in content for prompt in silent)
        return "Well." if about else shorter_wins(request)

    with chat_server(undecided) as server:
        outcome = ready.isopref(*judged_by(server.url))
        assert outcome.code == 1
        assert "gave no verdict on 3 of 12 comparisons" in outcome.err
        assert not (ready.folder / "out" / "round-1" / "judged.jsonl").exists()
        outcome = ready.isopref(*judged_by(server.url), "--skip-failed")
        assert outcome.code == 0, outcome.err
    assert "3 comparisons without a verdict, left out" in outcome.out
    figures = json.loads((ready.folder / "out" / "figures.json").read_text())
    assert [figures[f"round {n}"]["failed"] for n in (1, 2)] == [1, 1]
    assert "prompts without a verdict" in (ready.folder / "out" / "report.html").read_text()


def test_skip_failed_can_be_turned_on_and_not_off(ready: Project) -> None:
    command = ("rounds", "my.yaml", "run.folder=out", "--by", "http://127.0.0.1:9/v1")
    with mock.patch.object(build_rounds, "_sample", side_effect=DataError("far enough")):
        assert "far enough" in ready.isopref(*command).err
        assert "has rounds with other settings" in ready.isopref(*command, "--skip-failed", "--seed", "2").err
        assert "far enough" in ready.isopref(*command).err
        assert "far enough" in ready.isopref(*command, "--skip-failed").err
        assert "far enough" in ready.isopref(*command, "--skip-failed").err
        assert "has rounds with other settings" in ready.isopref(*command).err


def test_a_contest_in_which_nothing_counts_has_no_win_rate(tmp_path: Path) -> None:
    """A judge that prefers whatever it reads first decides nothing. Rounds report the rest of their figures."""
    for name in ("mine", "theirs"):
        lines = [{"prompt": f"{n}?", "responses": [f"{name} {n}"], "tokens": [2]} for n in range(3)]
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    with chat_server(lambda request: "VERDICT: A") as server:
        found = contest(tmp_path / "mine", tmp_path / "theirs", JudgeOptions(server.url), tmp_path / "out")
    assert (found.rate, found.dropped) == (None, 3)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert figures["win_rate"] is None
    assert figures["length_controlled"] is None
    assert figures["tokens"] == [2.0, 2.0]


def test_a_contest_with_a_prompt_without_a_verdict(tmp_path: Path) -> None:
    """The win rate is that of the other prompts, also if ties count."""
    for name in ("mine", "theirs"):
        lines = [{"prompt": f"{n}?", "responses": [f"{name} {n}"], "tokens": [2]} for n in range(3)]
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))

    def mine_wins(request: dict[str, Any]) -> str:
        a = request["messages"][0]["content"].split("[Answer A]")[1].split("[Answer B]")[0]
        if "mine 1" in a:
            return "Who am I to judge?"
        return "VERDICT: A" if "mine" in a else "VERDICT: B"

    files = tmp_path / "mine", tmp_path / "theirs"
    with chat_server(mine_wins) as server:
        with pytest.raises(NoVerdictError, match=r'1 of 3 comparisons, in 3 replies each: record 2 \("1\?"\)'):
            contest(*files, JudgeOptions(server.url, ties="keep"), tmp_path / "out")
        assert not (tmp_path / "out" / "figures.json").exists()
        before = server.answered
        found = contest(*files, JudgeOptions(server.url, ties="keep", skip_failed=True), tmp_path / "out")
        assert server.answered == before + 3  # the missing order
    assert found.rate is not None
    assert (found.rate.prompts, found.rate.wins, found.dropped, found.failed) == (2, 2, 0, 1)
    assert json.loads((tmp_path / "out" / "figures.json").read_text())["failed"] == 1


def test_prompts_that_differ_in_their_template_arguments_are_different(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        lines = [
            {"prompt": "why?", "chat_template_kwargs": {"think": think}, "responses": [f"{name} {think}"]}
            for think in (True, False)
        ]
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "judge.py").write_text(REWARD)
    judge = JudgeOptions(f"{tmp_path / 'judge.py'}:short")
    assert contest(tmp_path / "mine", tmp_path / "theirs", judge, tmp_path / "out").rate.prompts == 2  # type: ignore[union-attr]


def test_win_rate_of_a_run(ready: Project) -> None:
    ready.train("run", "data.train=train.jsonl", "data.eval=null", "optim.max_steps=1", "optim.lr=0.05")
    command = ("eval", "my.yaml", "--model", "run", "--win-rate", *SAMPLING)
    outcome = ready.isopref(*command, "--json", "found.json")
    assert outcome.code == 0, outcome.err
    found = json.loads((ready.folder / "found.json").read_text())
    judged = [json.loads(line) for line in (ready.folder / "my.win-rate" / "judged.jsonl").read_text().splitlines()]
    expected = [0.5 + 0.5 * ((b > a) - (b < a)) for a, b in (map(len, one["responses"]) for one in judged)]
    assert len(expected) == 8
    assert set(expected) != {0.5}
    assert [one["won"] for one in judged] == expected
    assert found["win_rate"]["value"] == pytest.approx(sum(expected) / 8)
    outcome = ready.isopref(*command, "--against", "run")
    assert outcome.code == 1  # the folder has other answers
    outcome = ready.isopref(*command, "--against", "run", "--out", "same")
    assert outcome.code == 0, outcome.err
    assert "0.500 [" in outcome.out


def test_what_is_refused(ready: Project) -> None:
    for arguments, message in (
        ((*ROUNDS, "1", "data.eval=0.5"), "data.eval: prompts are read from one file"),
        ((*ROUNDS, "1", "model.reference=x/y"), "the rounds choose the reference"),
        ((*ROUNDS, "1", "run.export=false"), "run.export: false leaves no model for the next round"),
        (
            (*ROUNDS, "1", "objective.loss=bradley_terry"),
            "bradley_terry trains a reward model, which writes no answers",
        ),
        ((*ROUNDS, "1", "data.group_by_prompt=true"), "judged answers are grouped by prompt already"),
        ((*ROUNDS, "1", "run.folder=my.yaml"), "run.folder: cannot create the folder my.yaml"),
        (("eval", "my.yaml", "--model", "m", "--win-rate", *SAMPLING, "--out", "my.yaml"), "--out: cannot create the"),
        ((*ROUNDS, "1", "--judge-model", "m"), "--judge-model: applies only to a judge at a URL"),
        ((*ROUNDS, "1", "--judge-parallel", "2"), "--judge-parallel: applies only to a judge at a URL"),
        ((*ROUNDS, "1", "--skip-failed"), "--skip-failed: applies only to a judge at a URL"),
        (("eval", "my.yaml", "--model", "m", "--win-rate"), "--win-rate: needs a judge"),
        (("eval", "my.yaml", "--model", "m", "--by", "x:y"), "--by: needs --win-rate"),
        (("eval", "my.yaml", "--model", "m", "--temperature", "0"), "--temperature: needs --win-rate"),
        (("eval", "my.yaml", "--model", "m", "--max-tokens", "9"), "--max-tokens: needs --win-rate"),
        (("eval", "my.yaml", "--model", "m", "--ties", "keep"), "--ties: needs --win-rate"),
        (("eval", "my.yaml", "--model", "m", "--skip-failed"), "--skip-failed: needs --win-rate"),
    ):
        outcome = ready.isopref(*arguments)
        assert outcome.code == 1
        assert message in outcome.err
    assert not (ready.folder / "out").exists()
