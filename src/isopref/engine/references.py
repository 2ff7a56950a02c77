"""What a policy is compared with: stored log-probabilities, a moving model (moving.py), or nothing."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isopref.batch.step import MismatchedWork, Work
from isopref.score import TableLogps
from isopref.types import Logps, Readout


class Scored(NamedTuple):
    """Scores of one microbatch by policy and reference: in the form that the objective takes, and as read out."""

    policy: Logps
    ref: Logps
    policy_readout: Readout
    ref_readout: Readout


class Reference(Protocol):
    """Scores the microbatches that the policy scores."""

    def logps(self, work: Work, policy: Readout) -> Readout:
        """Log-probabilities of the answers of a microbatch, and of their heads if `policy` has those."""
        ...

    def mismatched(self, work: MismatchedWork, policy: Readout) -> Tensor:
        """Log-probabilities of prompts with other examples' answers: E."""
        ...


class StoredReference:
    """Log-probabilities of a whole table, on the device."""

    def __init__(self, logps: TableLogps, device: torch.device):
        self.answers: Tensor = torch.from_numpy(logps.answers).to(device)
        self.heads: Tensor | None = None if logps.heads is None else torch.from_numpy(logps.heads).to(device)
        self.mismatches = None if logps.mismatched is None else torch.from_numpy(logps.mismatched).to(device)

    def logps(self, work: Work, policy: Readout) -> Readout:
        dtype = policy.logp.dtype
        found = Readout(self.answers[work.answers].to(dtype))
        if policy.head_logp is None:
            return found
        assert self.heads is not None, "heads were not scored"
        return found._replace(head_logp=self.heads[:, work.comparisons].to(dtype))

    def mismatched(self, work: MismatchedWork, policy: Readout) -> Tensor:
        assert self.mismatches is not None, "mismatched pairs were not scored"
        return self.mismatches[work.index].to(policy.logp.dtype)


class NoReference:
    """Zeros, for a reference-free objective."""

    def logps(self, _work: Work, policy: Readout) -> Readout:
        zeros = Readout(torch.zeros_like(policy.logp))
        return zeros if policy.head_logp is None else zeros._replace(head_logp=torch.zeros_like(policy.head_logp))

    def mismatched(self, _work: MismatchedWork, policy: Readout) -> Tensor:
        return torch.zeros_like(policy.logp)
