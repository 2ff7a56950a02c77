"""How long OpenMP's threads spin before they sleep. Owns one environment variable, which torch reads on import."""

import os
import sys

# About a third of a millisecond. GNU OpenMP's default of 300,000 exceeds a scheduler time slice: if another program
# takes one core, the thread on the other core wastes its entire slice spinning, and training slows down many times
# over. benchmarks/busy_cores.py measures this value on an idle machine and next to busy processes.
SPINS = 10_000
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if either is set, the user has chosen


def limit_spinning() -> None:
    """Let waiting threads sleep early, unless the user has set how long they spin. Call it before torch is imported."""
    if "torch" not in sys.modules and not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
