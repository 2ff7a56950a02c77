"""OLMo-core's own models on ranks: what they leave on disk, what they score."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from isopref.batch.packing import Budget
from isopref.batch.rows import build_microbatch
from isopref.data.table import ExampleTable
from isopref.models.conversion import from_hf, write_checkpoint
from isopref.models.hf import export
from isopref.models.parallel import Parallel, checkpoint_layers, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.score import TableLogps, score_table
from isopref.testing.models import byte_tokenizer, examples, random_pairs, tiny_model


def write_both(folder: str, architecture: str, parallel: Parallel) -> None:
    """Spread a model over the ranks that call this, and write it as a Hugging Face folder and a checkpoint."""
    tokenizer = byte_tokenizer()
    policy = Policy(from_hf(tiny_model(architecture, vocab_size=len(tokenizer))))
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    model = parallelize(policy, parallel, device=torch.device("cpu"), world_size=ranks)
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if first:
        with unwrap(model).saved_form(state) as (whole, weights):
            export(whole, weights, tokenizer, Path(folder) / "hf")
    native = unwrap(model).native
    assert native is not None
    write_checkpoint(native, tokenizer, Path(folder) / "olmo_core", is_first=first, barrier=dist.barrier)


def tensor_parallel_scores() -> tuple[TableLogps, list[int]]:
    """Log-probabilities of a table by two ranks to each layer, and which pairs this rank was asked to store."""
    policy = Policy(from_hf(tiny_model("qwen3")))
    device = torch.device("cpu")
    model = parallelize(policy, "fsdp", device=device, world_size=dist.get_world_size(), tensor_parallel=2)
    stored: list[int] = []
    scores = score_table(
        model,
        ExampleTable.from_tokens(random_pairs(9)),
        Budget("shared", 60),
        device=device,
        scored=lambda index, _: stored.extend(index.tolist()),
    )
    return scores, stored


EVEN_VOCABULARY = 96  # so that two ranks have halves of the head, too


class Exchanges(TorchDispatchMode):
    """Records the numbers of every tensor that two ranks gather, or reduce and scatter, in full."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[int] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("_c10d_functional.all_gather"):
            self.numbers.append(2 * args[0].numel())
        elif name.startswith("_c10d_functional.reduce_scatter"):
            self.numbers.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def exchanges_of_two(architecture: str, recompute: int) -> list[int]:
    """What two ranks to each layer exchange in one microbatch of 128 tokens, forward and backward."""
    policy = Policy(from_hf(tiny_model(architecture, vocab_size=EVEN_VOCABULARY))).train()
    model = parallelize(policy, "fsdp", device=torch.device("cpu"), world_size=2, tensor_parallel=2)
    checkpoint_layers(policy, recompute)
    pairs = random_pairs(4, seed=1, longest=20, vocabulary=EVEN_VOCABULARY)
    microbatch = build_microbatch(examples(pairs), "shared", row_tokens=128)
    exchanges = Exchanges()
    with exchanges:
        model(microbatch).logp.sum().backward()
    return exchanges.numbers
