"""bench.py survives runs that hang, fail or end, measures nothing twice, and writes medians to the measured files."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = ("trl", "liger_kernel")  # which need not be installed

# What a benchmark does in this file: no torch, and a line in a log for every time it is measured.
RUNS = """
import os, subprocess, sys, time
from pathlib import Path
from records import UnavailableError

def note(name):
    with open(os.environ["BENCH_LOG"], "a") as log:
        log.write(f"{name} {os.getpid()}\\n")

def quick(name, seconds=0.0, tiny=False):
    note(name)
    time.sleep(seconds)
    return {"step_s": 1.0 + len(Path(os.environ["BENCH_LOG"]).read_text().splitlines())}

def hang(name, tiny=False):
    note(name)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(f"child:{child.pid}")
    time.sleep(600)

def fail(name, tiny=False):
    note(name)
    raise ValueError("broken")

def end(name, tiny=False):
    os._exit(3)

def mark(name, tiny=False):
    note(name)
    seen = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    return {"step_s": 1.0, "seen": seen}

def missing(name, tiny=False):
    raise UnavailableError("it is not installed")
"""

# bench.py with other measurements. Arguments: runs as FUNCTION:NAME[:SECONDS], comma-separated, their limit, its own.
DRIVER = """
import sys
import bench
def run(text):
    function, name, *seconds = text.split(":")
    process = "apart" if name.startswith("apart") else "shared"
    return bench.Run(f"runs.{function}", {"name": name, **({"seconds": float(seconds[0])} if seconds else {})}, process)
runs = [run(text) for text in sys.argv.pop(1).split(",")]
limit_s = float(sys.argv.pop(1))
bench.MEASUREMENTS[:] = [bench.Measurement("some", "some runs", runs, limit_s, rounds=2, file="measured_some.json")]
bench.main()
"""


class Driver:
    """bench.py on runs of this file, in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        (folder / "runs.py").write_text(RUNS)
        (folder / "driver.py").write_text(DRIVER)

    def start(self, runs: str, *options: str, limit_s: float = 30) -> "subprocess.Popen[str]":
        paths = [str(self.folder), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BENCH_LOG": str(self.log)}
        command = [sys.executable, str(self.folder / "driver.py"), runs, str(limit_s), "--out", str(self.folder)]
        command += options
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, runs: str, *options: str, limit_s: float = 30) -> str:
        process = self.start(runs, *options, limit_s=limit_s)
        out, _ = process.communicate(timeout=60)  # which waits for all that hold its output
        assert process.returncode == 0, out
        return out

    def records(self) -> dict[str, Any]:
        found = json.loads((self.folder / "bench.json").read_text())["runs"]
        assert len({(one["run"], one["repeat"]) for one in found}) == len(found)
        return {f"{one['given']['name']} {one['repeat']}": one for one in found}

    def noted(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()]

    def processes(self) -> list[int]:
        """Those that measured, and the children that they left."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [int(name.split(":")[1]) if name.startswith("child:") else int(own) for name, own in lines]


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_a_run_that_hangs_is_killed_with_its_children_and_the_next_one_goes_on(driver: Driver) -> None:
    out = driver.run("quick:a,hang:b,end:c,fail:d,quick:e,missing:f", limit_s=6)
    records = driver.records()
    assert {name for name, one in records.items() if "result" in one} == {"a 1", "e 1", "a 2", "e 2"}
    assert records["b 1"]["error"] == "no result within 6 s"
    assert records["c 1"]["error"] == "the process ended with status 3"
    assert records["d 1"]["error"] == "ValueError: broken"
    assert records["f 1"]["skipped"] == "it is not installed"
    assert len(records) == 8, "what failed is not tried again by the same command"
    assert "child" in driver.log.read_text()
    assert gone(driver.processes())
    assert "skipped: it is not installed" in out


def test_runs_take_turns_in_one_process_and_others_have_their_own(driver: Driver) -> None:
    driver.run("quick:a,quick:apart,quick:b")
    assert driver.noted() == ["a", "b", "a", "b", "apart", "apart"]
    pids = driver.processes()
    assert len(set(pids[:4])) == len(set(pids[4:])) == 1
    assert len(set(pids)) == 2


def test_a_run_does_not_see_what_another_left_in_the_environment(driver: Driver) -> None:
    """Such as the rank of a process group, with which TRL would train as one of several processes."""
    driver.run("mark:a,mark:b")
    assert len(set(driver.processes())) == 1
    assert [one["result"]["seen"] for one in driver.records().values()] == 4 * [None]


def test_a_benchmark_that_was_killed_ends_with_everything_measured_once(driver: Driver) -> None:
    runs = "quick:a:0.4,quick:b:0.4,quick:c:0.4"
    process = driver.start(runs)
    until = time.monotonic() + 30
    while len(driver.noted()) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert gone(driver.processes()), "the process that measures outlived bench.py"
    done = driver.records()
    assert 2 <= len(done) < 6
    driver.run(runs)
    assert driver.records().keys() == {f"{name} {repeat}" for name in "abc" for repeat in (1, 2)}
    again = Counter(driver.noted())
    assert sum(again.values()) == 7, "the run under way was measured again, and no other"
    before = driver.log.read_text()
    driver.run(runs)
    assert driver.log.read_text() == before


def test_time_that_is_over_stops_without_an_error(driver: Driver) -> None:
    out = driver.run("quick:a,hang:b", "--minutes", "0.08")
    assert driver.records().keys() == {"a 1"}
    assert "the time of --minutes is over" in out
    assert gone(driver.processes())
    assert "not measured" not in driver.run("quick:a,hang:b", "--list")


def test_medians_are_written_and_other_entries_stay(driver: Driver) -> None:
    old = {"about": {"date": "old"}, "results": [{"name": "z", "step_s": 9.0}, {"name": "a", "step_s": 9.0}]}
    measured = driver.folder / "measured_some.json"
    measured.write_text(json.dumps(old))
    driver.run("quick:a")
    found = json.loads(measured.read_text())
    assert found["results"][0] == {"name": "z", "step_s": 9.0, "about": {"date": "old"}}
    (new,) = found["results"][1:]
    assert new == {"name": "a", "step_s": 3.0, "repeats_s": [2.0, 3.0]}, "of two the slower"
    assert set(found["about"]) == {"commit"}


def test_other_code_measures_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import records

    kept = records.Records(driver.folder)
    for repeat in (1, 2):
        kept.add({"run": "a", "repeat": repeat, "result": {"step_s": float(repeat)}})
    assert kept.done("a", 2)
    monkeypatch.setattr(records, "code_version", lambda: "other")
    later = records.Records(driver.folder)
    assert not later.done("a", 2)
    later.add({"run": "a", "repeat": 1, "result": {"step_s": 5.0}})
    (median,) = later.medians(["a"])
    assert median["result"] == {"step_s": 5.0}, "repeats of other code do not count"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench")


def perform(bench: Any, runs: list[Any]) -> dict[str, dict[str, Any]]:
    """Answers of one process to runs in a tiny size."""
    worker, answers = bench.Worker("shared"), {}
    try:
        for run in runs:
            more: dict[str, Any] = {"data": []} if run.call.startswith("hh_training") else {}
            job = {"call": run.call, "given": {**run.given, **more}, "tiny": True}
            answers[run.name] = worker.answer(job, 200)
    finally:
        worker.end()
    return answers


def check_answer(name: str, answer: dict[str, Any]) -> None:
    """A result, or a peer that is not installed."""
    if "skipped" in answer:
        assert "trl" in name
        assert answer["skipped"] in [f"{package} is not installed" for package in PEERS]
        return
    result = answer.get("result")
    assert result, (name, answer)
    assert result.get("fits", True)
    assert result.get("failed", 0) == 0
    assert result.get("step_s", 1.0) > 0


def test_every_measurement_runs_in_a_tiny_size(bench: Any) -> None:
    """Its first run; the others are the same code with another argument, and run in test_every_run_in_a_tiny_size."""
    first = {one.runs[0].name: one.runs[0] for one in bench.MEASUREMENTS}
    answers = perform(bench, list(first.values()))
    assert answers.keys() == first.keys()
    for name, answer in answers.items():
        check_answer(name, answer)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_run_in_a_tiny_size(bench: Any) -> None:
    every = {run.name: run for one in bench.MEASUREMENTS for run in one.runs}
    for name, answer in perform(bench, list(every.values())).items():
        check_answer(name, answer)


def test_a_step_that_compiles_belongs_to_the_warm_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1, 2 and 4 compile: the warm-up takes one more step each time, as long as there are spare steps."""
    from torch._dynamo.utils import counters

    clocks, ready = importlib.import_module("clocks"), importlib.import_module("ready")

    def warmup(spare: int, compiling: tuple[int, ...]) -> tuple[int, int]:
        cell = ready.Cell("", "hh", 1, microbatch_tokens=1, trl_batch=1, warmup=2, spare=spare, steps=3)
        clock, step = clocks.Clock(cell), 0
        while not clock.is_done:
            counters["stats"]["unique_graphs"] += step in compiling
            clock.tick()
            step += 1
        result = clock.result()
        assert len(result["steps_s"]) == 3
        assert step - 1 == result["warmup_steps"] + 3
        return result["warmup_steps"], result["compiled_while_timed"]

    assert warmup(8, (1,)) == (2, 0)
    assert warmup(8, (1, 2, 4)) == (5, 0)
    assert warmup(2, (1, 2, 4)) == (4, 0)
    assert warmup(0, (1, 2, 4)) == (2, 1)
    assert warmup(1, (2, 5)) == (3, 1)
