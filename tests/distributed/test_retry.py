"""A group of ranks that crashes gets one more try, which pytest's summary names; isopref.testing itself gives none."""

import subprocess
import sys
from pathlib import Path

import pytest

from isopref.testing.ranks import RankDiedError, Ranks
from support.retry import RankCrashWarning, crash, retried

ROOT = Path(__file__).parents[2]
CRASHES_ONCE = """
from isopref.testing.ranks import Ranks
from support.retry import crash, retried


def test_it(tmp_path):
    with Ranks(1) as ranks:
        assert retried(ranks, crash, tmp_path, 1) == [1]
"""


def test_a_retried_group_is_listed_in_the_summary(tmp_path: Path) -> None:
    test = tmp_path / "test_crash.py"
    test.write_text(CRASHES_ONCE)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.split("warnings summary")[1]
    assert f"{test}:8: RankCrashWarning: crash(" in summary
    assert "rank 0: died with exit code -9" in summary
    assert "1 passed, 1 warning" in summary


def test_a_second_crash_is_an_error(tmp_path: Path) -> None:
    with Ranks(1) as ranks:
        with pytest.warns(RankCrashWarning), pytest.raises(RankDiedError, match="rank 0: died with exit code -9"):
            retried(ranks, crash, tmp_path, 2)
        assert ranks(crash, tmp_path, 2) == [2]


def test_without_the_retry_the_first_crash_is_an_error(tmp_path: Path) -> None:
    with Ranks(1) as ranks, pytest.raises(RankDiedError, match="rank 0: died with exit code -9"):
        ranks(crash, tmp_path, 1)
