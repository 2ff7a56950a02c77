"""How much memory of its own a process needs to load a model: not what it maps from files."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from isopref.models import hf
from support.forked import server


def own_bytes_per_weight(folder: str, *, narrow: bool) -> float:
    """Load a model in a process that has imported everything already. Needs Linux's /proc/self/smaps_rollup."""
    context = server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_load, args=(folder, narrow, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(120), "no answer in 120 s"
        kib, weights = ours.recv()
    finally:
        process.kill()
        process.join()
    return float(kib * 1024 / weights)


def _load(folder: str, narrow: bool, answer: Connection) -> None:
    torch.set_num_threads(1)
    before = _own_kib()
    model = hf.load_narrow(folder) if narrow else hf.load_model(folder, dtype=torch.float32)
    assert model is not None
    answer.send((_own_kib() - before, sum(parameter.numel() for parameter in model.parameters())))


def _own_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
