"""Training speed on CPU cores, alone and beside busy programs, by how long OpenMP's waiting threads spin.

    python benchmarks/busy_cores.py                      # isopref's setting and OpenMP's default, on all cores
    python benchmarks/busy_cores.py --spins 0 1000 3000  # other settings and the default

Every measurement is a process of its own that trains the shape of SmolLM2-135M on hh lengths. The settings take turns,
and each is compared with the default of the same round, since a machine's speed drifts. One busy program per core.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import workload

from isopref.threads import SETTINGS, SPINS

DEFAULT = "default"


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many processes that use as much of a core as they get."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def pairs_per_s(spins: str, threads: int, steps: int) -> float:
    """Train in a process whose OpenMP threads spin so often; "default": as often as OpenMP likes."""
    others = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    own = {} if spins == DEFAULT else {"GOMP_SPINCOUNT": spins}
    command = [sys.executable, __file__, "--measure", "--steps", str(steps)]
    env = {**others, **own, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(steps: int) -> float:
    """Pairs per second of a few steps, in this process."""
    from vs_trl import CELLS, run_isopref

    cell = replace(CELLS["cpu-hh"], steps=steps)
    return float(run_isopref(cell, mixed=False, float8=False, overrides={})["pairs_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", default=[str(SPINS)])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one measurement")
    parser.add_argument("--repeat", type=int, default=5, help="rounds alone; beside busy programs: a third of them")
    parser.add_argument("--measure", action="store_true", help="in this process, with its own environment")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.steps)))
        return
    for busy, rounds in ((0, args.repeat), (args.threads, math.ceil(args.repeat / 3))):
        found: dict[str, list[float]] = {spins: [] for spins in (*args.spins, DEFAULT)}
        for number in range(rounds):
            for spins in sorted(found, reverse=number % 2 == 1):  # neither always comes first
                with busy_programs(busy):
                    found[spins].append(pairs_per_s(spins, args.threads, args.steps))
                print(f"busy programs {busy}  spins {spins:>8}  {found[spins][-1]:.3f} pairs/s", flush=True)
        for spins, speeds in found.items():
            ratios = sorted(one / default for one, default in zip(speeds, found[DEFAULT], strict=True))
            print(
                f"busy programs {busy}  spins {spins:>8}  median {statistics.median(speeds):.3f} pairs/s, "
                f"{statistics.median(ratios):.2f} of the default ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
    print(workload.versions())


if __name__ == "__main__":
    main()
