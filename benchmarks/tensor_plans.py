"""How exact transformers' tensor-parallel plans are, on CPU ranks: python benchmarks/tensor_plans.py

Each line compares a tiny model that several ranks compute together with the same model in one process: its outputs, and
its gradient for one batch, in one piece and in two microbatches, with FSDP2 reducing after the second or after each.
The result led to the decision in docs/decisions.md.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils.logging import disable_progress_bar

from isopref.batch.rows import build_microbatch
from isopref.models.parallel import decoder_layers
from isopref.models.policy import Policy, full
from isopref.testing.models import examples, random_pairs, tiny_folder
from isopref.testing.ranks import Ranks

ARCHITECTURES = ("llama", "qwen2", "qwen3", "olmo2", "gemma3", "qwen3_moe")
SEQUENCES, TOKENS = 4, 24


def _load(folder: Path, **how: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    model.eval()
    return model


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tensor"))


def plan(folder: Path) -> PreTrainedModel:
    """the plan"""
    return _load(folder, distributed_config=DistributedConfig(tp_plan="auto"))


def plan_on_mesh(folder: Path) -> PreTrainedModel:
    """the plan, on a mesh of 2"""
    return _load(folder, tp_plan="auto", device_mesh=_mesh()["tensor"])


def plan_then_fsdp(folder: Path) -> PreTrainedModel:
    """the plan, then FSDP2"""
    model = plan(folder)
    fully_shard(model, mesh=_mesh()["shard"])
    return model


def config(folder: Path) -> PreTrainedModel:
    """DistributedConfig, 2 by 2"""
    return _load(folder, distributed_config=DistributedConfig(tp_size=2, fsdp_size=dist.get_world_size() // 2))


def applied(folder: Path) -> Policy:
    """applied by us, rows with shared prompts"""
    policy, mesh = Policy(_load(folder)), _mesh()
    apply_tensor_parallelism(policy.model, mesh["tensor"])
    policy.model.tie_weights()
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(policy, mesh=mesh["shard"])
    return policy


def _outputs(model: nn.Module, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The model's outputs for some sequences (for pairs, if it is a policy), and its loss."""
    if isinstance(model, Policy):
        some = examples(random_pairs(SEQUENCES)[first : first + count])
        logps = model(build_microbatch(some, "shared")).logp
        return logps.view(2, -1).T, -logps.sum() / SEQUENCES
    ids = torch.randint(3, 90, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))[first : first + count]
    logits = full(model(input_ids=ids, use_cache=False).logits)
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    return logits, -logp.sum() / SEQUENCES


def _gradient(
    model: nn.Module, first: int, count: int, *, microbatches: int = 1, every: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradient for `count` sequences. FSDP reduces after the last microbatch, or after every one."""
    model.zero_grad()
    size, outputs = count // microbatches, []
    for number in range(microbatches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(every or number == microbatches - 1)
        output, loss = _outputs(model, first + number * size, size)
        loss.backward()
        outputs.append(output.detach())
    return torch.cat(outputs), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _worst(model: nn.Module, found: dict[str, Tensor], expected: dict[str, Tensor], data_size: int) -> str:
    """The largest error of a parameter's gradient, and the parameter if the error is more than rounding."""
    # FSDP averages over the groups, but the loss is a sum over them.
    scale = data_size if isinstance(model, FSDPModule) else 1
    errors = {name: _off(found[name] * scale, gradient) for name, gradient in expected.items()}
    name = max(errors, key=lambda name: errors[name])
    return f"{errors[name]:.0e}" + (f" ({name.split('.')[-2]})" if errors[name] > 1e-3 else "")


def measure(build: Callable[[Path], nn.Module], folder: Path, data_size: int) -> str:
    """One line of the table. The batch is divided over `data_size` groups of ranks."""
    _quiet()
    one: nn.Module = Policy(_load(folder)) if build is applied else _load(folder)
    expected, gradient = _gradient(one, 0, SEQUENCES)
    share = SEQUENCES // data_size
    first = share * (dist.get_rank() * data_size // dist.get_world_size())
    try:
        model = build(folder)
        outputs, found = _gradient(model, first, share)
    except RuntimeError as error:
        return f"RuntimeError: {' '.join(str(error).split())[:80]}... | | | |"
    spread = max(p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor))
    words = [str(spread), f"{_off(outputs, expected[first : first + share]):.0e}"]
    words.append(_worst(model, found, gradient, data_size))
    for every in (False, True):
        _, found = _gradient(model, first, share, microbatches=2, every=every)
        meant = every is False or isinstance(model, FSDPModule)
        words.append(_worst(model, found, gradient, data_size) if meant else "")
    return " | ".join(words)


def _quiet() -> None:
    warnings.simplefilter("ignore")
    disable_progress_bar()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


HEADER = """\
| ranks | model | how | weights over ranks | outputs off by | gradient off by | in 2 microbatches | reduced after each |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    _quiet()
    print(HEADER)
    with TemporaryDirectory() as root, Ranks(2) as two, Ranks(4) as four:
        for name in ARCHITECTURES:
            folder = tiny_folder(Path(root) / name, name)
            for ranks, build, data_size in ((two, plan, 1), (four, config, 2), (four, applied, 2)):
                _print(name, ranks, build, folder, data_size)
        folder = tiny_folder(Path(root) / "heads", num_key_value_heads=4)
        for build, data_size in ((plan_on_mesh, 1), (plan_then_fsdp, 2)):
            _print("llama", four, build, folder, data_size)


def _print(name: str, ranks: Ranks, build: Callable[[Path], nn.Module], folder: Path, data_size: int) -> None:
    found = ranks(measure, build, folder, data_size)[0]
    print(f"| {ranks.world_size} | {name} | {build.__doc__} | {found} |", flush=True)


if __name__ == "__main__":
    main()
