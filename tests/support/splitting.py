"""What ranks that split rows do, for tests on ranks."""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isopref.batch.packing import Budget
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.examples import PairTokens
from isopref.models.parallel import parallelize
from isopref.models.policy import Policy
from isopref.ops import exchange
from isopref.ops.attention import segment_attention
from isopref.ops.exchange import from_heads, to_heads
from isopref.score import TableLogps, score_table
from isopref.testing.models import random_pairs, tiny_model
from isopref.types import ContextGroup, Segments


def whole_group() -> ContextGroup:
    """All ranks as one group."""
    group = dist.group.WORLD
    assert group is not None
    return ContextGroup(group.group_name, dist.get_rank(), dist.get_world_size())


def mine(x_T: Tensor, group: ContextGroup, dim: int = 0) -> Tensor:
    """This rank's tokens."""
    index = torch.arange(group.rank, x_T.shape[dim], group.size)
    return x_T.index_select(dim, index).clone().requires_grad_(x_T.is_floating_point())


def there_and_back(x_THE: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank has between the two exchanges, and after them."""
    group = whole_group()
    (heads,) = to_heads([mine(x_THE, group)], group)
    return heads.detach(), from_heads(heads, group).detach()


def compiled(x_THE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradient of both exchanges around an operation: as one compiled graph, and as it is."""
    group = whole_group()

    def operation(x: Tensor) -> Tensor:
        (heads,) = to_heads([x], group)
        return from_heads(heads.cumsum(dim=0).sin(), group)

    found: list[Tensor] = []
    for function in (torch.compile(operation, backend="aot_eager", fullgraph=True), operation):
        own = mine(x_THE, group)
        out = function(own)
        (gradient,) = torch.autograd.grad((out * out.detach().cos()).sum(), own)
        found += [out.detach(), gradient]
    return found[0], found[1], found[2], found[3]


def attended(
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    segments: Segments,
    weight: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, list[Tensor]]:
    """Attention of this rank's tokens, and the gradients of a weighted sum of it."""
    group = whole_group()
    own = [mine(x, group, dim=1) for x in qkv]
    trained = own if sinks is None else [*own, sinks.clone().requires_grad_()]
    split = Segments(**{**vars(segments), "context": group})
    q, k, v = own
    out = segment_attention(q, k, v, split, sinks=None if sinks is None else trained[3], **options)
    gradients = torch.autograd.grad((out * mine(weight, group).detach()).sum(), trained)
    return out.detach(), list(gradients)


def scores() -> tuple[TableLogps, list[int]]:
    """Log-probabilities of a table by two ranks to each row, and which pairs this rank was asked to store."""
    device, stored = torch.device("cpu"), list[int]()
    policy = Policy(tiny_model("qwen3"))
    model = parallelize(policy, "fsdp", device=device, world_size=dist.get_world_size(), context_parallel=2)
    found = score_table(
        model,
        ExampleTable.from_tokens(random_pairs(9)),
        Budget("shared", 60),
        device=device,
        scored=lambda index, _: stored.extend(index.tolist()),
    )
    return found, stored


def exchanged_bytes(architecture: str, tokens: int) -> list[int]:
    """Bytes in each exchange between ranks during a forward and a backward pass of a row of `tokens`."""
    model = parallelize(
        Policy(tiny_model(architecture)),
        "ddp",
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
        context_parallel=dist.get_world_size(),
    )
    sizes: list[int] = []
    own = exchange._all_to_all

    def counted(x: Tensor, name: Any) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return own(x, name)

    prompt, answer = np.full(tokens // 2, 5), np.full(tokens // 4, 6)
    pair = PairTokens(prompt, answer, answer + 1)
    with patch.object(exchange, "_all_to_all", counted):
        model(build_microbatch([pair.example], "shared")).logp.sum().backward()
    return sizes


def wrong_heads() -> str:
    """What is said of heads that the ranks do not divide."""
    group = whole_group()
    try:
        to_heads([torch.zeros(4, group.size + 1, 2)], group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
