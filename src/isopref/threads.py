"""How long OpenMP's threads spin before they sleep. Owns one environment variable, which torch reads on import."""

import os
import sys

# About a tenth of a millisecond. GNU OpenMP's default of 300,000 is longer than a scheduler's time slice: when another
# program takes one core, the thread on the other core spins its whole slice away, and training slows down many times.
# benchmarks/busy_cores.py measures this value alone and beside busy processes.
SPINS = 3000
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # either one is the user's own choice


def limit_spinning() -> None:
    """Let waiting threads sleep early, unless the user has set how long they spin. Call it before torch is imported."""
    if "torch" not in sys.modules and not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
