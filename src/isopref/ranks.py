"""This process's rank and the number of ranks: 0 of 1 without a process group."""

import torch.distributed as dist


def own_rank(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process in a group; None: the default group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1
