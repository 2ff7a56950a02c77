"""Decisions that all ranks make alike, through one small message between processes that no device waits for."""

import torch
import torch.distributed as dist

from isopref.engine.environment import TIMEOUT
from isopref.ranks import num_ranks


class Together:
    """Lets ranks ask one another. All ranks create it, and call its methods, at the same points."""

    def __init__(self) -> None:
        # A separate group, because the engine's threads use the others.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if num_ranks() > 1 else None

    def any(self, *mine: bool) -> list[bool]:
        """For each question, whether any rank says yes."""
        return [bool(answer) for answer in self.most(*mine)]

    def most(self, *mine: int) -> list[int]:
        """For each figure, the maximum over all ranks."""
        if self._group is None:
            return list(mine)
        figures = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(figures, dist.ReduceOp.MAX, group=self._group)
        return [int(figure) for figure in figures.tolist()]
