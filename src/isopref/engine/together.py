"""What all ranks decide alike: one small message between their processes, which no device waits for."""

import torch
import torch.distributed as dist

from isopref.engine.environment import TIMEOUT


class Together:
    """Ranks that ask one another. All of them make it, and call it, at the same points."""

    def __init__(self) -> None:
        many = dist.is_initialized() and dist.get_world_size() > 1
        # A group of its own: the engine's threads use the others.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if many else None

    def any(self, *mine: bool) -> list[bool]:
        """For each question, whether a rank says yes."""
        if self._group is None:
            return list(mine)
        answers = torch.tensor(mine, dtype=torch.int32)
        dist.all_reduce(answers, dist.ReduceOp.MAX, group=self._group)
        return [bool(answer) for answer in answers.tolist()]
