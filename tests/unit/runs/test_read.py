"""What is read of a run's folder, what is refused as damaged, and the state that a run holds."""

import json
from pathlib import Path

import pytest

from isopref.errors import RunError
from isopref.runs.files import METRICS_FILE
from isopref.runs.folder import find_runs
from isopref.runs.read import read_run
from isopref.runs.state import State, held_state, read_state
from support.runs import losses, make_run


def test_series_have_the_steps_they_were_logged_at(tmp_path: Path) -> None:
    lines = [{"step": 1, "train/loss": 0.7}, {"step": 5, "train/loss": 0.6, "eval/loss": 0.65}]
    run = read_run(make_run(tmp_path / "run", lines))
    assert (run.metrics["train/loss"].steps, run.metrics["train/loss"].values) == ([1, 5], [0.7, 0.6])
    assert (run.metrics["eval/loss"].steps, run.metrics["eval/loss"].values) == ([5], [0.65])
    assert run.last_step == 5


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", losses([0.7, 0.6]))
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "tra')
    with (folder / "samples.jsonl").open("ab") as file:
        file.write('{"prompt": "ü'.encode()[:-1])  # inside a character
    assert read_run(folder).metrics["train/loss"].steps == [1, 2]


@pytest.mark.parametrize("size", [0, 3, 100, -5])
def test_damaged_rewards_are_named(tmp_path: Path, size: int) -> None:
    folder = make_run(tmp_path / "run", losses([0.7]))
    (folder / "rewards.npz").write_bytes((folder / "rewards.npz").read_bytes()[:size])
    with pytest.raises(RunError, match=r"rewards\.npz: cannot be read"):
        read_run(folder)


def test_line_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    sample = dict.fromkeys(("prompt", "greedy_before", "greedy_after"), "a\u2028b\u0085c")
    folder = make_run(tmp_path / "run", losses([0.7]))
    (folder / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n")
    assert read_run(folder).samples == [sample]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", losses([0.7]))
    with (folder / METRICS_FILE).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: cannot be read"):
        read_run(folder)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run found \(no config\.yaml\)\. Pass a run folder"):
        read_run(tmp_path)


def test_runs_are_found_below_a_folder_but_not_inside_runs(tmp_path: Path) -> None:
    inner = make_run(tmp_path / "a" / "b", losses([0.7]))
    make_run(inner / "checkpoints" / "copy", losses([0.7]))
    outer = make_run(tmp_path / "c", losses([0.7]))
    make_run(outer / "copy", losses([0.7]))
    make_run(tmp_path / "1" / "2" / "3" / "4", losses([0.7]))  # too deep
    assert list(find_runs(tmp_path)) == [inner, outer]


# --- state -------------------------------------------------------------------------------------------


def test_a_run_goes_on_while_it_holds_its_state(tmp_path: Path) -> None:
    with held_state(tmp_path) as write:
        write(State("running", 3, 10))
        assert read_state(tmp_path) == State("running", 3, 10)
    killed = read_state(tmp_path)
    assert killed is not None
    assert (killed.outcome, killed.step) == ("failed", 3)
    assert "without an error message" in killed.error


def test_a_shorter_state_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    with held_state(tmp_path) as write:
        write(State("failed", 3, 10, 1.5, "a long reason"))
        write(State("stopped", 4, 10))
    assert read_state(tmp_path) == State("stopped", 4, 10)
