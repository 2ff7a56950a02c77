"""The optimizers that a run can choose from. Each is correct with and without sharded parameters (DTensor).

AdamW is torch's. Its 8-bit and stochastically rounded variants are torchao's, the one that skips steps is OLMo-core's.
Muon is our own: OLMo-core's accepts only OLMo-core's models, and torch's orthogonalises in bfloat16 in any case.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from olmo_core.optim import SkipStepAdamW
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from isopref import optional
from isopref.models.parallel import decoder_layers, unwrap
from isopref.models.policy import full

Kind = Literal["adamw", "adamw_8bit", "adamw_sr", "adamw_8bit_sr", "adamw_skip", "muon"]

HISTORY = 128  # earlier steps that a step is compared with, to decide whether to skip it
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon (2024): five rounds bring singular values near 1
UPDATE_RMS = 0.2  # Liu et al., Muon is scalable (2025), eq. 4: the size of AdamW's updates, so the same rates work


def build_optimizer(
    kind: Kind,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
    compute_dtype: torch.dtype,
) -> Optimizer:
    """The optimizer for the trained parameters of `model`. Norms and biases get no weight decay."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    common: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
    groups = _groups(trained, weight_decay)
    match kind:
        case "adamw":
            return AdamW(groups, **common, fused=all(p.is_cuda for p in trained.values()))
        case "adamw_skip":
            return SkippingAdamW(groups, **common, rolling_interval_length=HISTORY)
        case "muon":
            in_layers = {id(p) for layer in decoder_layers(unwrap(model)) for p in layer.parameters()}
            matrices = {n: p for n, p in trained.items() if id(p) in in_layers and p.ndim == 2 and _decays(n, p)}
            rest = {name: p for name, p in trained.items() if name not in matrices}
            orthogonalised = {"params": list(matrices.values()), "weight_decay": weight_decay, "orthogonal": True}
            return Muon([orthogonalised, *_groups(rest, weight_decay)], **common, compute_dtype=compute_dtype)
    torchao = _torchao(f"optim.kind is {kind}")
    rounded = kind.endswith("_sr")
    make = torchao.AdamW8bit if "8bit" in kind else torchao._AdamW
    optimizer: Optimizer = make(groups, **common, bf16_stochastic_round=rounded)
    if rounded:
        optimizer.register_step_pre_hook(_seed_by_step(seed))
    return optimizer


def _groups(params: Mapping[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for name, p in params.items() if _decays(name, p)]
    rest = [p for name, p in params.items() if not _decays(name, p)]
    return [{"params": some, "weight_decay": decay} for some, decay in ((decayed, weight_decay), (rest, 0.0)) if some]


def _decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to norms and biases. The biases of fused experts form a matrix."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _torchao(why: str) -> Any:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warns about missing kernels that we do not use
    optim = optional.require("torchao.optim", extra="adapters", why=why)
    state = optional.require("torchao.optim.subclass_8bit", extra="adapters", why=why).OptimState8bit
    state.implements(torch.ops.aten.clone.default)(_clone_8bit)
    return optim


def _clone_8bit(_operation: Any, _types: Any, args: Any, _options: Any) -> Any:
    """Clone 8-bit state: torchao 0.18 does not implement this, and the engine does it before it writes a checkpoint."""
    state = args[0]
    parts = (part.clone() for part in (state.codes, state.scale, state.qmap))
    return type(state)(*parts, state.signed, dtype=state.dtype)


def _seed_by_step(seed: int) -> Callable[..., None]:
    """A hook that seeds by the step alone, so draws are the same on all replicas, and again after a resume."""

    def before(optimizer: Optimizer, *_args: Any) -> None:
        steps = (int(state["step"]) for state in optimizer.state.values())  # on the CPU, in torchao
        torch.manual_seed(seed + 1_000_003 * (1 + next(steps, 0)))

    return before


class SkippingAdamW(SkipStepAdamW):
    """OLMo-core's optimizer, with a history that fits into a checkpoint. Call `observe` before each step."""

    def observe(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record loss and gradient norm of the global batch, the same on all ranks; the last ones if not finite."""
        # self.device is the CPU if weights are offloaded.
        self.latest_loss = _finite(loss.to(self.device, torch.float64), self._losses)
        self.latest_grad_norm = _finite(grad_norm.to(self.device, torch.float64), self._grad_norms)

    def history(self) -> Tensor:
        """The recorded losses and norms, oldest first, padded with NaN: 2, HISTORY + 1."""
        found = torch.full((2, HISTORY + 1), torch.nan, dtype=torch.float64)
        for row, values in zip(found, (self._losses, self._grad_norms), strict=True):
            row[: len(values)] = torch.stack(values).cpu() if values else row[:0]
        return found

    def restore(self, history: Tensor) -> None:
        losses, norms = ([one for one in row.to(self.device).unbind() if not one.isnan()] for row in history)
        self._losses, self._grad_norms = losses, norms


def _finite(value: Tensor, before: list[Tensor]) -> Tensor:
    return torch.where(value.isfinite(), value, before[-1] if before else torch.zeros_like(value))


class Muon(AdamW):
    """AdamW, except in groups with `orthogonal`, whose update is the orthogonalised momentum.

    A sharded matrix is gathered first, so the update does not depend on the sharding.
    """

    def __init__(self, groups: list[dict[str, Any]], *, compute_dtype: torch.dtype, **common: Any):
        super().__init__([{"orthogonal": False, **group} for group in groups if group["params"]], **common)
        self.compute_dtype = compute_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is not None:
                    self._orthogonal_step(parameter, group)
                    parameter.grad = None  # so that AdamW skips it
        return super().step(closure)

    def _orthogonal_step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), momentum=torch.zeros_like(parameter))  # AdamW expects a step
        momentum: Tensor = state["momentum"]
        momentum.mul_(group["betas"][0]).add_(parameter.grad)
        update = orthogonal(full(momentum).to(self.compute_dtype)).to(parameter.dtype)
        update *= UPDATE_RMS * max(update.shape) ** 0.5
        if isinstance(parameter, DTensor):
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximately U V^T for a matrix U S V^T: a Newton-Schulz iteration brings its singular values close to 1."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x: Tensor = matrix if wide else matrix.mT
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x if wide else x.mT
    return result
