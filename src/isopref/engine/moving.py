"""A reference that moves towards the policy (TR-DPO, Gorbatovski et al. 2024): a second model in memory."""

from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as checkpoint_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isopref.batch.step import MismatchedWork, Work
from isopref.errors import ConfigError
from isopref.models.parallel import reshard, unwrap
from isopref.score import score
from isopref.types import Needs, Readout


class MovingReference:
    """Scores answers with a second model, whose weights move towards the policy's at regular steps.

    :param model: a `Policy` of the same shape as the trained one, sharded in the same way; under DDP, a plain `Policy`
        on every rank. It gets no gradients.
    :param every: steps between two moves.
    :param mix: how far each move goes: the new weights are mix * policy + (1 - mix) * reference.
    """

    def __init__(self, model: nn.Module, *, every: int, mix: float):
        if every < 1 or not 0 < mix <= 1:
            raise ConfigError(f"a moving reference needs every >= 1 and 0 < mix <= 1; found {every} and {mix}.")
        self.model = model.requires_grad_(False).eval()
        self.every, self.mix = every, mix

    @torch.no_grad()
    def logps(self, work: Work, policy: Readout) -> Readout:
        """Log-probabilities of the answers of a microbatch; see `Reference` in references.py."""
        return score(self.model, work.microbatch, Needs(heads=policy.head_logp is not None))

    @torch.no_grad()
    def mismatched(self, work: MismatchedWork, _policy: Readout) -> Tensor:
        """Log-probabilities of prompts with other examples' answers: E."""
        return score(self.model, work.microbatch).logp

    def check(self, policy: nn.Module) -> None:
        """Raise ConfigError if the reference cannot follow this policy."""
        reshard(self.model)
        own, other = (_shapes(model) for model in (self.model, unwrap(policy)))
        different = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        if different:
            raise ConfigError(
                f"objective.reference_moves: the reference cannot move towards the model, because '{different[0]}' "
                "differs between them in shape or sharding. Set model.reference to a model of the same shape, or keep "
                "the reference fixed (objective.reference_moves: null)."
            )

    @torch.no_grad()
    def follow(self, policy: nn.Module, *, step: int) -> None:
        """Move if a move is due after `step`."""
        if step % self.every:
            return
        reshard(self.model)  # otherwise its parameters may still be gathered copies of the shards
        for own, other in zip(self.model.parameters(), unwrap(policy).parameters(), strict=True):
            _local(own).lerp_(_local(other), self.mix)

    def state_dict(self) -> dict[str, Any]:
        reshard(self.model)
        options = checkpoint_state.StateDictOptions(full_state_dict=False, cpu_offload=True)
        return checkpoint_state.get_model_state_dict(self.model, options=options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        reshard(self.model)
        checkpoint_state.set_model_state_dict(self.model, state, options=checkpoint_state.StateDictOptions(strict=True))


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """The shape of each parameter, and whether it is sharded."""
    return {name: (one.shape, isinstance(one, DTensor)) for name, one in model.named_parameters()}


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
