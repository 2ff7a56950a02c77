"""CPU ranks for tests: processes with a gloo group over loopback, kept alive to run one function after another."""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 120
CALL_S = 240


class RankError(Exception):
    """A rank failed, or did not answer in time."""


class RankDiedError(RankError):
    """The process of a rank ended without an answer."""


class Ranks:
    """`Ranks(4)` starts four processes; calling it runs a function on all of them and returns their results by rank.

    The function must be importable, and its arguments and results picklable. After a failure the ranks may be out of
    step, so they are killed, and the next call starts new ones.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Raises RankError."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank, timeout_s) for rank in range(self.world_size)]
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            died = any(process.exitcode is not None for process in self._processes)
            self.close()
            raise (RankDiedError if died else RankError)("\n".join(failed))
        return [result for _, result in answers]

    def _answer(self, rank: int, timeout_s: float) -> tuple[bool, Any]:
        try:
            if self._pipes[rank].poll(timeout_s):
                answer: tuple[bool, Any] = self._pipes[rank].recv()
                return answer
        except (EOFError, OSError):
            self._processes[rank].join(START_S)
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return False, f"no answer in {timeout_s} s"

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["isopref.testing.exactness"])  # torch and OLMo-core, once for all ranks
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in range(self.world_size):
            ok, text = self._answer(rank, START_S)
            if not ok:
                self.close()
                raise RankError(f"rank {rank} did not start: {text}")

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
        OLMO_SHARED_FS="1",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a crash in native code then prints the Python stack
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=CALL_S)
    )
    gc.freeze()  # runs collect garbage often; without this, every collection would scan all imported code
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
