"""The command line on several ranks without a launcher, for tests whose subject is the result and not the processes.

A process that `--nproc` starts first imports torch and the engine, which takes most of such a test. These ranks are
forked from a server that has imported both.
"""

import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from support.project import TIMEOUT_S, Outcome, Project


def isopref_on_ranks(project: Project, *arguments: str, num_ranks: int = 2) -> Outcome:
    """Run `isopref ARGUMENTS` on every rank. Once one of them fails, the others are ended, as torchrun does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isopref.testing.exactness", "isopref.build.train", "isopref.cli.main"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [project.folder / f"rank{rank}" for rank in range(num_ranks)]
    processes: list[Any] = []
    for rank, file in enumerate(files):
        env = {**project.env, **_rank_env(rank, num_ranks, port)}
        processes.append(context.Process(target=_run, args=(arguments, project.folder, env, file)))
        processes[-1].start()
    running = {process.sentinel: process for process in processes}
    try:
        while running:
            ended = [running.pop(one) for one in wait(list(running), TIMEOUT_S)]
            for process in ended:
                process.join()
            if not ended or any(process.exitcode for process in ended):
                break
    finally:
        for process in running.values():
            process.kill()
            process.join()
    code = max((abs(process.exitcode) for process in processes if process not in running.values()), default=1)
    out, err = ("".join(file.with_suffix(kind).read_text() for file in files) for kind in (".out", ".err"))
    return Outcome(code, out, err)


def _rank_env(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {**{name: str(value) for name, value in numbers.items()}, **meeting}


def _run(arguments: tuple[str, ...], folder: Path, env: dict[str, str], file: Path) -> None:
    for number, kind in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["isopref", *arguments]
    import torch

    from isopref.cli.main import main

    torch.set_num_threads(1)
    main()
