"""Training speed on CPU cores, alone and next to busy programs, by how long OpenMP's waiting threads spin.

    python benchmarks/busy_cores.py                       # isopref's setting and OpenMP's default, on all cores
    python benchmarks/busy_cores.py --spins 0 3000 30000  # other settings and the default

Each setting has its own process, which trains a model of SmolLM2-135M's shape on pairs with hh lengths. The processes
take turns, step by step, on the same pairs, so a drift in the machine's speed affects all settings alike. There is one
busy program per core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import workload
from olmo_core.train.callbacks import Callback

from isopref.threads import SETTINGS, SPINS

DEFAULT = 300_000  # of GNU OpenMP
CELL = "cpu-hh"
MARK = "seconds: "  # what a training process prints before the time of a step, among the lines of the run


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run `count` processes that use as much of a core as they get, and end if this process ends."""
    spin = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    programs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


class Training:
    """A process that trains step by step; its waiting OpenMP threads spin `spins` times."""

    def __init__(self, spins: int, threads: int, steps: int) -> None:
        others = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        env = {**others, "GOMP_SPINCOUNT": str(spins), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--train", "--steps", str(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> float:
        """Take the next step. Returns how many seconds it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise RuntimeError(f"the training process ended with {self._process.wait()}")


class OnRequest(Callback):
    """Takes a step for each line of standard input, and prints its seconds."""

    def pre_step(self, batch: object) -> None:
        del batch
        if not sys.stdin.readline():  # the process that asks for steps is gone
            os._exit(0)
        self.begun = time.perf_counter()

    def post_step(self) -> None:
        print(f"{MARK}{time.perf_counter() - self.begun}", flush=True)


def train(steps: int) -> None:
    """Train in this process, on request."""
    from ready import ready_trainer
    from vs_trl import CELLS

    cell = CELLS[CELL]
    with ready_trainer(replace(cell, warmup=1, steps=steps - 1)) as ready:
        ready.trainer.add_callback("on_request", OnRequest())
        ready.trainer.fit()


def report(busy: int, seconds: dict[int, list[float]], batch_size: int) -> None:
    """Print each setting's speed, and its share of the default's at every step."""
    for spins, own in seconds.items():
        shares = sorted(default / one for one, default in zip(own, seconds[DEFAULT], strict=True))
        print(
            f"busy programs {busy}  spins {spins:>8}  {batch_size * len(own) / sum(own):.3f} pairs/s  of the default: "
            f"median {statistics.median(shares):.3f} ({shares[0]:.2f} to {shares[-1]:.2f}), {len(own)} steps",
            flush=True,
        )


def compare(settings: Sequence[int], threads: int, alone: int, beside: int) -> None:
    """Time `alone` steps of every setting on an idle machine, then `beside` steps next to busy programs."""
    from vs_trl import CELLS

    batch_size = CELLS[CELL].batch_size
    with ExitStack() as stack:
        trainings = {one: stack.enter_context(Training(one, threads, 1 + alone + beside)) for one in settings}
        for training in trainings.values():
            training.step()  # warm-up
        for busy, steps in ((0, alone), (threads, beside)):
            seconds: dict[int, list[float]] = {spins: [] for spins in settings}
            for number in range(steps):
                for spins in sorted(settings, reverse=number % 2 == 1):  # neither always comes first
                    with busy_programs(busy):
                        seconds[spins].append(trainings[spins].step())
            report(busy, seconds, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", type=int, default=[SPINS])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each setting on an idle machine")
    parser.add_argument("--busy-steps", type=int, default=4, help="timed steps of each setting next to busy programs")
    parser.add_argument("--train", action="store_true", help="train --steps steps in this process, on request")
    args = parser.parse_args()
    if args.train:
        train(args.steps)
        return
    compare([*args.spins, DEFAULT], args.threads, args.steps, args.busy_steps)
    print(workload.versions())


if __name__ == "__main__":
    main()
