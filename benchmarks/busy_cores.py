"""Training speed on CPU cores, alone and beside busy programs, by how long OpenMP's waiting threads spin.

    python benchmarks/busy_cores.py                      # isopref's setting and OpenMP's default, on all cores
    python benchmarks/busy_cores.py --spins 0 1000 3000  # other settings

Every measurement is a process of its own that trains the shape of SmolLM2-135M on hh lengths. The settings take turns,
so that a machine that changes its speed changes it for all of them. The busy programs, one per core, count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def pairs_per_s(spins: str, threads: int) -> float:
    """Train in a process whose OpenMP threads spin so often; "default": as often as OpenMP likes."""
    others = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    own = {} if spins == DEFAULT else {"GOMP_SPINCOUNT": spins}
    command = [sys.executable, __file__, "--measure"]
    env = {**others, **own, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure() -> float:
    """Pairs per second of a few steps, in this process."""
    from vs_trl import CELLS, run_isopref

    return float(run_isopref(CELLS["cpu-hh"], mixed=False, float8=False, overrides={})["pairs_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", default=[str(SPINS), DEFAULT])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="in this process, with its own environment")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure()))
        return
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.repeat):
        for busy in (0, args.threads):
            for spins in args.spins:
                with busy_programs(busy):
                    speed = pairs_per_s(spins, args.threads)
                found.setdefault((spins, busy), []).append(speed)
                print(f"spins {spins:>8}  busy programs {busy}  {speed:.3f} pairs/s", flush=True)
    alone = statistics.median(found[DEFAULT, 0]) if (DEFAULT, 0) in found else None
    for (spins, busy), speeds in found.items():
        middle = statistics.median(speeds)
        share = "" if alone is None else f"  {middle / alone:.2f} of the default alone"
        print(f"spins {spins:>8}  busy programs {busy}  median {middle:.3f} pairs/s{share}")
    about: dict[str, Any] = workload.versions()
    print(about)


if __name__ == "__main__":
    main()
