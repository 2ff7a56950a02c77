"""How long OpenMP's threads spin: our value unless the user has one, set before torch is imported."""

import os
import subprocess
import sys

import pytest

from isopref.threads import SPINS

REPORT = "import os, sys; assert 'torch' in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin_count(code: str, **settings: str) -> str:
    """What GOMP_SPINCOUNT is in a new process once `code` has imported torch."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", f"{code}\n{REPORT}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**inherited, **settings}, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


COMMAND = """
import sys
sys.argv = ["isopref", "--version"]
from isopref.cli.main import main
try:
    main()
except SystemExit:
    pass
import torch
"""


@pytest.mark.parametrize("code", ["import isopref; isopref.pair_loss", COMMAND], ids=["library", "command"])
def test_threads_sleep_early(code: str) -> None:
    assert spin_count(code) == str(SPINS)


def test_the_users_own_setting_stays() -> None:
    code = "import isopref; isopref.pair_loss"
    assert spin_count(code, GOMP_SPINCOUNT="7") == "7"
    assert spin_count(code, OMP_WAIT_POLICY="ACTIVE") == "None"


def test_nothing_is_set_too_late() -> None:
    assert spin_count("import torch, isopref; isopref.pair_loss") == "None"
