"""A process's environment: rank, device and process group, whether started by torchrun or on its own."""

import gc
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import init_distributed
from olmo_core.utils import seed_all
from torch._C._distributed_c10d import PrefixStore, TCPStore

from isopref.engine.spokesman import announce_failure
from isopref.errors import ConfigError, UserError
from isopref.ranks import own_rank

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Environment:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def ranks_without(self, folder: Path) -> list[int]:
        """Ranks that do not see what the first one writes to a folder. All ranks call this together."""
        name = [uuid.uuid4().hex]
        seen = [True] * self.world_size
        if self.world_size > 1:
            dist.broadcast_object_list(name)
            mark = folder / f".seen-{name[0]}"
            if self.is_first:
                mark.touch()
            self.barrier()
            dist.all_gather_object(seen, mark.exists())
            if self.is_first:
                mark.unlink()
        return [rank for rank, sees in enumerate(seen) if not sees]


def _store(world_size: int) -> dict[str, Any]:
    """Arguments that give ranks restarted by torchrun a store of their own; empty on the first attempt.

    torchrun keeps one store for all attempts (torch 2.13), where restarted ranks would find the addresses of dead ones.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=TIMEOUT)
    own = PrefixStore(f"attempt {attempt}", store)
    return {"store": own, "rank": int(os.environ["RANK"]), "world_size": world_size}


@contextmanager
def environment(*, device: str, seed: int, process_group: bool) -> Iterator[Environment]:
    """Set up device, seeds and, under torchrun or if `process_group` asks for it, the process group.

    `device` is "auto", "cpu" or "cuda"; auto uses CUDA if it is available.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: cuda, but torch sees no CUDA device here. Set run.device: auto or cpu.")
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if cuda and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}. Start at most one "
            "process per GPU (--nproc), or set run.device: cpu."
        )
    if world_size > 1 or process_group:
        # The engine's default backend string needs CUDA; gloo alone serves CPU ranks.
        init_distributed(backend="cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT, **_store(world_size))
    seed_all(seed)
    where = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    try:
        yield Environment(own_rank(), world_size, where)
    except UserError:
        if world_size > 1 and own_rank() == 0:
            announce_failure()
        raise
    finally:
        if dist.is_initialized():
            gc.collect()  # a Trainer that outlives the group can abort the process at exit
            dist.destroy_process_group()
