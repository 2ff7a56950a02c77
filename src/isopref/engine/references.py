"""What a policy is compared with: log-probabilities that were stored, a model that moves (moving.py), or nothing."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isopref.batch.step import Work
from isopref.score import TableLogps
from isopref.types import Logps, Readout


class Scored(NamedTuple):
    """What policy and reference say of one microbatch: as the objective takes its terms, and as they said it."""

    policy: Logps
    ref: Logps
    policy_readout: Readout
    ref_readout: Readout


class Reference(Protocol):
    """Says of a microbatch what the policy says of it."""

    def logps(self, work: Work, policy: Readout) -> Readout:
        """Log-probabilities of the answers of a microbatch, and of their heads where the policy has them."""
        ...


class StoredReference:
    """Log-probabilities of a whole table, on the device."""

    def __init__(self, logps: TableLogps, device: torch.device):
        self.answers: Tensor = torch.from_numpy(logps.answers).to(device)
        self.heads: Tensor | None = None if logps.heads is None else torch.from_numpy(logps.heads).to(device)

    def logps(self, work: Work, policy: Readout) -> Readout:
        dtype = policy.logp.dtype
        found = Readout(self.answers[work.answers].to(dtype))
        if policy.head_logp is None:
            return found
        assert self.heads is not None, "heads were not scored"
        return found._replace(head_logp=self.heads[:, work.comparisons].to(dtype))


class NoReference:
    """Zeros, for an objective without a reference."""

    def logps(self, _work: Work, policy: Readout) -> Readout:
        zeros = Readout(torch.zeros_like(policy.logp))
        return zeros if policy.head_logp is None else zeros._replace(head_logp=torch.zeros_like(policy.head_logp))
