"""Starting several processes: the command, exit codes, signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from isopref.cli.launch import launch, torchrun


def test_torchrun_command() -> None:
    assert torchrun(4, "isopref.cli.main", ["train", "c.yaml", "optim.lr=1"]) == [
        sys.executable, "-m", "isopref.cli.elastic", "--standalone", "--nproc_per_node", "4",
        "-m", "isopref.cli.main", "train", "c.yaml", "optim.lr=1",
    ]  # fmt: skip


def test_launch_returns_the_exit_code() -> None:
    assert launch([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert launch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + 9


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [0, 1, 143])
def test_launch_passes_signals_on_once(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    """The child writes down what it gets, then ends; its own exit code says how."""
    started = tmp_path / "started"
    child = (
        "import pathlib, signal, time\n"
        "got = []\n"
        f"signal.signal({int(signum)}, lambda *_: got.append(1))\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        f"pathlib.Path({str(started)!r}).write_text(str(len(got)))\n"
        f"raise SystemExit({code})\n"
    )

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    threading.Thread(target=interrupt, daemon=True).start()
    assert launch([sys.executable, "-c", child]) == code
    assert started.read_text() == "1"
    assert signal.getsignal(signum) is before


def test_launch_under_nohup_passes_no_hang_up_on() -> None:
    child = (
        "import os, signal, time\n"
        "got = []\n"
        "signal.signal(signal.SIGHUP, lambda *_: got.append(1))\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "time.sleep(0.3)\n"
        "raise SystemExit(len(got))\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch([sys.executable, "-c", child]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"


@pytest.mark.parametrize("where", ["torch/__init__.py", "torch/distributed/run.py"])
def test_ctrl_c_before_there_are_ranks_is_the_end(tmp_path: Path, where: str) -> None:
    """While torch is imported, or before torchrun has started a process. It is neither lost nor a traceback."""
    files = {
        "torch/__init__.py": "",
        "torch/distributed/__init__.py": "",
        "torch/distributed/elastic/__init__.py": "",
        "torch/distributed/elastic/multiprocessing/__init__.py": "",
        "torch/distributed/elastic/multiprocessing/errors.py": "class ChildFailedError(Exception): ...",
        "torch/distributed/run.py": "def main(arguments):\n    " + INTERRUPT.replace("\n", "\n    "),
    }
    if where == "torch/__init__.py":
        files[where] = INTERRUPT
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "isopref.cli.elastic"], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""
