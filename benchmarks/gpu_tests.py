"""Files of tests/gpu as runs of bench.py: how many of their tests pass on this GPU, and which fail."""

from collections import Counter
from typing import Any

import pytest
import torch  # noqa: F401 -- so that worker.py checks for a GPU


class Outcomes:
    """A pytest plugin that counts how tests end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.outcome == "failed":
            self.failed.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:200]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self.counts["failed"] += 1
            self.failed.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:200]}")


def measure(file: str, *, tiny: bool = False) -> dict[str, Any]:
    """The outcomes of a file of tests. `tiny` changes nothing: without a GPU, all of them are skipped."""
    outcomes = Outcomes()
    # With -s: pytest's capture would leave the process's log handlers writing to a closed file.
    status = pytest.main([file, "-q", "-s", "-p", "no:cacheprovider"], plugins=[outcomes])
    counts = {name: outcomes.counts[name] for name in ("passed", "failed", "skipped")}
    return {"exit_status": int(status), **counts, "failures": outcomes.failed}
