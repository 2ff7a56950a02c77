"""Starts processes on this machine: several via torchrun, or a restart of this one. Independent of what they run."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

PARENT = "ISOPREF_PARENT"  # tells a child process which process it must not outlive
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def torchrun(num_processes: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs `python -m module arguments` in `num_processes` processes of one group."""
    launcher = [sys.executable, "-m", "isopref.cli.elastic", "--standalone", "--nproc_per_node"]
    return [*launcher, str(num_processes), "-m", module, *arguments]


def launch(command: Sequence[str]) -> int:
    """Run a command, forwarding signals. Returns its exit code, or 128 + N if signal N killed it."""
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(signum)

    before = {signum: signal.signal(signum, forward) for signum in stop_signals()}
    try:
        # Its own process group: Ctrl-C in a terminal goes to the entire group, and the child must get it only once.
        child = subprocess.Popen(command, process_group=0, env={**os.environ, PARENT: str(os.getpid())})
        code = child.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


def start_again(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with a new one running the same command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop. SIGHUP is not one of them under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def end_with_parent() -> None:
    """Have this process killed when the process named by PARENT ends, however it ends. Linux only.

    A killed launcher cannot notify its ranks, and ranks that keep running without it would hold their GPUs.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    # The kernel treats the thread that started this process as its parent; here and in torchrun that is the main
    # thread.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)
