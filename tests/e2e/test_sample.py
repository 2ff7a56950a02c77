"""`isopref sample`: the list shape, resumed wherever it was stopped; from models, runs and servers, also bad ones."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from isopref import remote
from isopref.build import sample as build_sample
from isopref.errors import ConfigError
from isopref.ledger import Ledger
from isopref.sample.answers import Asked, Sampling
from isopref.sample.prompts import Prompt
from support.chat_server import Fault, chat_server
from support.forked import slow_answers, start_isopref
from support.project import TIMEOUT_S, Project

COMMAND = ("sample", "my.yaml", "--prompts", "prompts.jsonl", "--answers", "3", "--max-tokens", "12")


@pytest.fixture
def prompts(project: Project) -> Path:
    """Different forms of a prompt, one of them twice."""
    records: list[dict[str, Any]] = [
        {"prompt": "why?"},
        {"prompt": "why not?", "system": "Be brief."},
        {"prompt": "a longer question, with a comma?"},
        {"prompt": "why?"},
    ]
    project.write_pairs("prompts.jsonl", records)
    return project.folder / "prompts.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled(project: Project, out: str, *more: str) -> list[dict[str, Any]]:
    outcome = project.isopref(*COMMAND, "--out", out, *more)
    assert outcome.code == 0, outcome.err
    return lines(project.folder / out)


@pytest.mark.usefixtures("prompts")
def test_answers_are_a_list_that_can_be_judged_and_sampled_again(project: Project) -> None:
    found = sampled(project, "a.jsonl")
    assert [len(one["responses"]) for one in found] == [3, 3, 3]
    assert found[0]["prompt"] == "why?"
    assert found[1]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert len({key for one in found for key in one["keys"]}) == 9
    assert all(
        tokens == 12 or ended for one in found for tokens, ended in zip(one["tokens"], one["ended"], strict=True)
    )
    assert sampled(project, "b.jsonl", "--parallel", "2") == found
    assert sampled(project, "c.jsonl", "--seed", "1") != found
    greedy = sampled(project, "d.jsonl", "--temperature", "0")
    assert all(len(set(one["responses"])) == 1 for one in greedy)
    again = project.isopref("sample", "my.yaml", "--prompts", "a.jsonl", "--answers", "3", "--max-tokens", "12")
    assert again.code == 0, again.err
    assert lines(project.folder / "a.answers.jsonl") == found


def test_more_prompts_and_answers_add_to_what_is_there(project: Project, prompts: Path) -> None:
    first = sampled(project, "a.jsonl")
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "new?"}) + "\n")
    written: list[str] = []
    add = build_sample._Out.add

    def counted(self: Any, answers: Any) -> None:
        written.extend(answers)
        add(self, answers)

    with mock.patch.object(build_sample._Out, "add", counted):
        more = sampled(project, "a.jsonl", "--answers", "5")
        assert len(written) == 3 * 2 + 5
        assert sampled(project, "a.jsonl", "--answers", "5") == more
        assert len(written) == 3 * 2 + 5  # nothing was sampled twice
    assert [one["responses"][:3] for one in more[:3]] == [one["responses"] for one in first]
    assert more == sampled(project, "b.jsonl", "--answers", "5")
    outcome = project.isopref(*COMMAND, "--out", "a.jsonl", "--temperature", "0.5")
    assert outcome.code == 1
    assert "with other settings" in outcome.err


@pytest.mark.usefixtures("prompts")
def test_a_run_and_an_adapter_stand_for_their_models(project: Project) -> None:
    run = project.train("run", "optim.epochs=1")
    by_run, by_folder = (
        sampled(project, "a.jsonl", "--model", "run"),
        sampled(project, "b.jsonl", "--model", "run/model"),
    )
    assert by_run == by_folder
    both = sampled(project, "c.jsonl", "--model", str(run), "--model", str(project.model))
    own = sampled(project, "d.jsonl")
    assert [one["responses"] for one in both] == [
        [*new["responses"], *old["responses"]] for new, old in zip(by_run, own, strict=True)
    ]
    assert both[0]["models"] == [str(run / "model")] * 3 + [str(project.model)] * 3
    project.train("adapted", "model.adapter.rank=2", "optim.epochs=1", "optim.lr=0.05")
    assert sampled(project, "e.jsonl", "--model", "adapted") != own


@pytest.mark.usefixtures("prompts")
def test_what_is_refused(project: Project) -> None:
    (project.folder / "there.jsonl").write_text('{"a": 1}\n')
    (project.folder / "no.jsonl").write_text('{"colour": "red"}\n')
    (project.folder / "long.jsonl").write_text(json.dumps({"prompt": "why? " * 100}) + "\n")
    shutil.copytree(project.model, project.folder / "copy")
    for more, message in (
        (("--out", "there.jsonl"), "was not written by isopref sample"),
        (("--out", "copy"), "--out: copy is a folder"),
        (("--model", "~no_such_user/a"), "--model: must be a path in a home folder that exists"),
        (("--prompts", "no.jsonl"), "no prompt in the columns colour"),
        (("--prompts", "long.jsonl"), "no room for an answer"),
        (("--url", "nowhere"), "--url: must be a URL"),
        (("--model", "a/b/c"), "--model: there is no folder"),
        (("--model", str(project.model), "--model", "copy"), "have the same weights"),
        (("--temperature", "inf"), "--temperature: must be 0"),
        (("--temperature", "1e-40"), "--temperature: must be 0"),
        (
            ("--prompts", "long.jsonl", "--url", "http://127.0.0.1:9/v1", "data.template=none"),
            "a server uses its own chat template",
        ),
    ):
        outcome = project.isopref(*COMMAND, *more)
        assert outcome.code == 1, outcome.out
        assert message in outcome.err


@pytest.mark.usefixtures("prompts")
def test_a_server_that_misbehaves_costs_no_answer(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(remote.Server.__init__, "__defaults__", (None, 3.0, 4, lambda s: None))
    project.extra_env["ISOPREF_API_KEY"] = "sk-very-secret"
    faults: list[Fault] = ["500", "429", "truncated", "slow", "cut", "no choices"]
    with chat_server() as server:
        whole = sampled(project, "a.jsonl", "--url", server.url)
        assert whole[0]["models"] == ["first"] * 3
        server.faults = list(faults)
        assert sampled(project, "b.jsonl", "--url", server.url) == whole
        # A failure in the middle: what was answered is kept, and paid for once.
        before = server.answered
        server.faults = [None, None, *(["500"] * 40)]  # type: ignore[list-item]
        outcome = project.isopref(*COMMAND, "--out", "c.jsonl", "--url", server.url, "--parallel", "1")
        assert outcome.code == 1
        assert "no usable reply after 4 attempts" in outcome.err
        assert not (project.folder / "c.jsonl").exists()
        server.faults = []
        assert sampled(project, "c.jsonl", "--url", server.url) == whole
        assert server.answered == before + 9
        assert set(server.keys) == {"Bearer sk-very-secret"}
    for path in project.folder.rglob("*"):
        assert not path.is_file() or b"sk-very-secret" not in path.read_bytes()


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("torn", ["", '{"key": "12', '{"key": 3}\nnonsense'])
def test_stopped_again_and_again_the_file_is_the_same(project: Project, torn: str) -> None:
    whole = sampled(project, "whole.jsonl")
    add, partial = build_sample._Out.add, project.folder / ".again.jsonl.partial"
    for stop_after in (1, 3, 0, 2):
        written = 0

        def killed(self: Any, answers: Any, stop_after: int = stop_after) -> None:
            nonlocal written
            if written == stop_after:
                with partial.open("a") as file:
                    file.write(torn)
                raise MemoryError("killed")
            written += 1
            add(self, answers)

        with mock.patch.object(build_sample._Out, "add", killed), pytest.raises(MemoryError):
            project.isopref(*COMMAND, "--out", "again.jsonl")
    assert not (project.folder / "again.jsonl").exists()
    outcome = project.isopref(*COMMAND, "--out", "again.jsonl", "--seed", "1")
    assert "with another model, other data or other settings" in outcome.err
    outcome = project.isopref(*COMMAND, "--out", "again.jsonl")
    assert "resume: 6 of 9 answers" in outcome.out
    assert lines(project.folder / "again.jsonl") == whole
    assert not partial.exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_numbers_that_no_answer_can_be_drawn_with(number: float) -> None:
    with pytest.raises(ConfigError, match="--temperature: must be 0"):
        Sampling(number, 1.0, 4, 0)
    with pytest.raises(ConfigError, match="--top-p: must be a number"):
        Sampling(1.0, number, 4, 0)


@pytest.mark.usefixtures("prompts")
def test_one_command_at_a_time_writes_a_file(project: Project) -> None:
    """Two of them would take each other's answers for left-overs of other settings, or miss their own."""
    with Ledger(project.folder / "a.jsonl").alone():
        outcome = project.isopref(*COMMAND, "--out", "a.jsonl")
        assert outcome.code == 1
        assert "a.jsonl is being written by another command (process " in outcome.err
        sampled(project, "b.jsonl")
    sampled(project, "a.jsonl")
    assert not list(project.folder.glob(".*.lock"))


@pytest.mark.usefixtures("prompts")
def test_a_full_disk_is_said_and_costs_nothing(project: Project) -> None:
    whole = sampled(project, "whole.jsonl")
    write, room = os.write, [400]

    def full(file: int, content: bytes) -> int:
        if content.startswith((b"{", b"\n{")):  # of the ledger
            content = content[: room[0]]
            room[0] -= len(content)
            if not content:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    with mock.patch.object(os, "write", full):
        outcome = project.isopref(*COMMAND, "--out", "a.jsonl")
    assert outcome.code == 1
    assert "a.jsonl: cannot be written ([Errno 28] No space left on device)" in outcome.err
    assert "resume: " in project.isopref(*COMMAND, "--out", "a.jsonl").out
    assert lines(project.folder / "a.jsonl") == whole


def test_ranks_add_answers_only_once_all_have_seen_what_is_missing(tmp_path: Path) -> None:
    """They share out the missing prompts, so they must agree on them."""
    out = tmp_path / "a.jsonl"
    Ledger(out).append({"first": ["text", True, 1]})
    prompt = Prompt("why?", None, {}, "here")
    asked = [Asked(key, prompt, number, "m") for number, key in enumerate(("first", "second"))]

    def barrier() -> None:
        Ledger(out).append({"second": ["of another rank", True, 1]})

    run = SimpleNamespace(env=SimpleNamespace(barrier=barrier), display=mock.Mock())
    job = build_sample.Job("prompts.jsonl", out, Sampling(1.0, 1.0, 4, 0))
    found = build_sample._Out(run, job, asked)  # type: ignore[arg-type]
    assert [one.key for one in found.missing] == ["second"]
    assert set(Ledger(out).read({"first", "second"})) == {"first", "second"}  # the barrier was reached


@pytest.mark.soak
def test_killed_twenty_times_at_random_the_file_is_the_same(project: Project) -> None:
    """Each kill waits for a random number of answers, then for a random part of the time that the next one takes."""
    num_prompts, num_kills = 80, 20
    project.write_pairs("prompts.jsonl", [{"prompt": f"question {n}?"} for n in range(num_prompts)])
    whole = sampled(project, "whole.jsonl", "--parallel", "4")
    command = (*COMMAND, "--out", "killed.jsonl", "--parallel", "4")
    out, partial = project.folder / "killed.jsonl", project.folder / ".killed.jsonl.partial"
    ledger = project.folder / "ledger"  # a second name for the partial file, which is removed at the end
    rng, progress = random.Random(0), []
    # The last ones early enough that the command does not end first.
    for target in sorted(rng.sample(range(1, 3 * num_prompts - 40), num_kills)):
        process = start_isopref(project, *command, prepare=slow_answers)
        give_up = time.monotonic() + TIMEOUT_S
        while len(kept_keys(partial)) < target and process.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (project.folder / "forked.err").read_text()
        progress.append(len(kept_keys(partial)))
        assert progress[-1] >= target
        if not ledger.exists():
            ledger.hardlink_to(partial)
    assert len(set(progress)) >= num_kills // 2, progress  # spread over the work
    assert not out.exists()
    outcome = project.isopref(*command)
    assert outcome.code == 0, outcome.err
    assert f"resume: {progress[-1]} of {3 * num_prompts} answers" in outcome.out
    assert out.read_bytes() == (project.folder / "whole.jsonl").read_bytes()
    assert not partial.exists()
    # Each answer was kept once: none was sampled again after it was in the ledger.
    assert sorted(kept_keys(ledger)) == sorted(key for one in whole for key in one["keys"])


def kept_keys(ledger: Path) -> list[str]:
    """The keys in a ledger, as often as they are there. A torn line has none."""
    text = ledger.read_text() if ledger.exists() else ""
    return [json.loads(line)["key"] for line in text.splitlines(keepends=True) if line.endswith("}\n")]


@pytest.mark.usefixtures("prompts")
def test_a_config_that_trains_in_float8_writes_in_bfloat16(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_sample, "check_hardware", lambda _run: None)  # which refuses float8 on a CPU
    mixed = ("run.device=auto", "model.dtype=float32", "model.compute_dtype={}")
    half, float8 = (
        sampled(project, f"{dtype}.jsonl", *(one.format(dtype) for one in mixed)) for dtype in ("bfloat16", "float8")
    )
    assert [one["responses"] for one in float8] == [one["responses"] for one in half]
