"""torchrun as a run needs it: after a signal, ranks finish their step; a failure is reported by the rank that failed.

torchrun itself kills ranks thirty seconds after a signal, always exits with 1, and prints its own traceback.
`python -m isopref.cli.elastic` takes torchrun's arguments. Its exit code is 128 + N if signal N stopped or killed the
ranks. Ranks that exit with StartAgainError.exit_code are restarted.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

from isopref.cli.launch import PARENT, end_with_parent, stop_signals
from isopref.errors import StartAgainError

SIGNALS = 128  # exit codes above this mean a signal


def pass_on(signum: int, _frame: FrameType | None) -> None:
    """Ask every rank to save and stop. If there are no ranks yet, exit."""
    ranks = list(children())
    if not ranks:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    for child in ranks:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM if signum == signal.SIGHUP else signum)


def children() -> Iterator[int]:
    """Processes started by this one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(path.parent.name)


def main() -> None:
    """Run torchrun. Importing it (and torch) takes seconds; a signal during that time ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would print a traceback
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())  # of the ranks
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for one in stop_signals():
        signal.signal(one, pass_on)
    while True:
        try:
            torchrun(["--signals-to-handle", "SIGQUIT", *sys.argv[1:]])  # stop signals are handled here
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if failure.exitcode == StartAgainError.exit_code:  # each time with smaller microbatches, down to one pair
                os.environ[StartAgainError.variable] = "1"
                continue
            # A rank stopped by a signal has said so; the others may have been killed because of it.
            stopped = [one.exitcode for one in failed.failures.values() if one.exitcode > SIGNALS]
            if stopped:
                sys.exit(stopped[0])
            if failure.exitcode < 0:  # it could not report the cause itself
                sys.stderr.write(f"error: rank {rank} was killed by signal {-failure.exitcode}.\n")
                sys.exit(SIGNALS - failure.exitcode)
            sys.exit(1)
        break


if __name__ == "__main__":
    main()
