"""The command line in processes that start at once: on several ranks without a launcher, or to be killed many times.

A process that a shell or `--nproc` starts first imports torch and the engine, which takes most of such a test. These
are forked from a server that has imported both.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from support.project import TIMEOUT_S, Outcome, Project


def isopref_on_ranks(
    project: Project,
    *arguments: str,
    num_ranks: int = 2,
    stop: tuple[Path, signal.Signals] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Outcome:
    """Run `isopref ARGUMENTS` on every rank. Once one of them fails, the others are ended, as torchrun does.

    `prepare`, an importable function, runs first in the process of every rank.

    With `stop`, a file and a signal, every rank gets the signal once the file exists, and ends by itself.
    """
    context = server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [project.folder / f"rank{rank}" for rank in range(num_ranks)]
    processes: list[Any] = []
    for rank, file in enumerate(files):
        env = {**project.env, **_rank_env(rank, num_ranks, port)}
        processes.append(context.Process(target=_run, args=(arguments, project.folder, env, file, prepare)))
        processes[-1].start()
    running = {process.sentinel: process for process in processes}
    try:
        if stop is not None:
            _send_once_there(processes, *stop)
        while running:
            ended = [running.pop(one) for one in wait(list(running), TIMEOUT_S)]
            for process in ended:
                process.join()
            if not ended or (stop is None and any(process.exitcode for process in ended)):
                break
    finally:
        for process in running.values():
            process.kill()
            process.join()
    code = max((abs(process.exitcode) for process in processes if process not in running.values()), default=1)
    out, err = ("".join(file.with_suffix(kind).read_text() for file in files) for kind in (".out", ".err"))
    return Outcome(code, out, err)


def start_isopref(project: Project, *arguments: str, prepare: Callable[[], None] | None = None) -> BaseProcess:
    """Start `isopref ARGUMENTS`, after `prepare` in its process. It prints to the files forked.out and forked.err."""
    target = (arguments, project.folder, project.env, project.folder / "forked", prepare)
    process = server().Process(target=_run, args=target)
    process.start()
    return process


def run_script(project: Project, path: Path) -> Outcome:
    """Run a Python file, in the project's folder and environment."""
    file = project.folder / "script"
    process = server().Process(target=_run_script, args=(path, project.folder, project.env, file))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    out, err = (file.with_suffix(kind).read_text() for kind in (".out", ".err"))
    return Outcome(1 if process.exitcode is None else abs(process.exitcode), out, err)


def slow_answers() -> None:
    """Make `isopref sample` wait after each answer that it has kept, so that there is time to kill it."""
    from isopref.build import sample

    add = sample._Out.add

    def slowly(self: Any, answers: Any) -> None:
        add(self, answers)
        time.sleep(0.05)

    sample._Out.add = slowly  # type: ignore[method-assign]


def second_rank_elsewhere() -> None:
    """Let rank 1 run in the folder `second`: a disk of its own, as on another machine."""
    if os.environ["RANK"] == "1":
        os.chdir("second")


def second_rank_lacks_memory() -> None:
    """Give rank 1 room for microbatches of 150 tokens while it trains."""
    import torch

    from isopref.engine import train_module
    from isopref.score import score

    def limited(model: Any, microbatch: Any, needs: Any) -> Any:
        if model.training and microbatch.passes[0].input_ids.numel() > 150:
            raise torch.OutOfMemoryError("planted")
        return score(model, microbatch, needs)

    if os.environ["RANK"] == "1":
        mock.patch.object(train_module, "score", limited).start()


def server() -> ForkServerContext:
    """Starts processes that have imported the engine. A pytest process has one such server, whoever asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isopref.testing.exactness", "isopref.build.train", "isopref.cli.main"])
    return context


def _send_once_there(processes: Sequence[BaseProcess], path: Path, number: signal.Signals) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert all(process.is_alive() for process in processes), f"a rank ended before {path} was there"
        assert time.monotonic() < give_up, f"no {path}"
        time.sleep(0.02)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, number)


def _rank_env(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {**{name: str(value) for name, value in numbers.items()}, **meeting}


def _run(
    arguments: tuple[str, ...],
    folder: Path,
    env: dict[str, str],
    file: Path,
    prepare: Callable[[], None] | None = None,
) -> None:
    _enter(folder, env, file)
    sys.argv = ["isopref", *arguments]
    from isopref.cli.main import main

    if prepare is not None:
        prepare()
    main()


def _run_script(path: Path, folder: Path, env: dict[str, str], file: Path) -> None:
    _enter(folder, env, file)
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def _enter(folder: Path, env: dict[str, str], file: Path) -> None:
    """Print to files, in a folder and an environment of this process's own, with one thread."""
    for number, kind in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # see conftest.py
