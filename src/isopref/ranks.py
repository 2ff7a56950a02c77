"""Which rank this process is, and of how many: 0 of 1 where there is no process group."""

import torch.distributed as dist


def own_rank(group: dist.ProcessGroup | None = None) -> int:
    """The number of this process in a group; None: in that of all."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1
