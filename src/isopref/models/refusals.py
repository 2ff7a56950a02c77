"""Whether all ranks refuse a model, so that they can look for a way out together.

A forward pass of a sharded model is a collective. A rank that refuses the model alone must not start another one.
"""

import itertools
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isopref.models.parallel import unwrap
from isopref.ranks import num_ranks, own_rank

WAIT_S = 60.0  # ranks that compute together refuse a model at almost the same time

_checks = itertools.count()  # of this process


class Refusals:
    """The refusals of one check of a model. All ranks create it together."""

    def __init__(self, model: nn.Module):
        policy = unwrap(model)
        self._joint = num_ranks() > 1 and (isinstance(policy, FSDPModule) or policy.together is not None)
        self._name = f"isopref/refusals/{next(_checks) if self._joint else ''}"
        self._count = 0
        self._alone = False

    def on_all_ranks(self) -> bool:
        """Whether the other ranks refuse, too; True if this rank's forward passes do not need them.

        Asks the process group's store, because a collective would hang if only this rank refuses: the others would
        continue with a forward pass.
        """
        if self._alone or not self._joint:
            return not self._alone
        self._count += 1
        store = dist.distributed_c10d._get_default_store()  # no public function returns it
        store.set(f"{self._name}/{self._count}/{own_rank()}", "")
        everyone = [f"{self._name}/{self._count}/{rank}" for rank in range(num_ranks())]
        try:
            store.wait(everyone, timedelta(seconds=WAIT_S))
        except RuntimeError:  # timed out
            self._alone = True
        return not self._alone
