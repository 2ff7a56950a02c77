"""Several training processes on this machine, started by torchrun. Knows nothing of what they run."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def torchrun(num_processes: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs `python -m module arguments` in so many processes of one group."""
    launcher = [sys.executable, "-m", "isopref.cli.elastic", "--standalone", "--nproc_per_node"]
    return [*launcher, str(num_processes), "-m", module, *arguments]


def launch(command: Sequence[str]) -> int:
    """Run a command, passing signals on. Returns its exit code, or 128 + N for a failure after signal N.

    (torchrun itself ends with 1 after any signal.)
    """
    child: subprocess.Popen[bytes] | None = None
    passed_on: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(signum)
            passed_on.append(signum)

    before = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        # A process group of its own: Ctrl-C in a terminal goes to a whole group; the child must get it once.
        child = subprocess.Popen(command, process_group=0)
        code = child.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if code and passed_on:
        return 128 + passed_on[0]
    return code if code >= 0 else 128 - code
