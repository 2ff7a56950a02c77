"""OLMo-core's own models on ranks: what they leave on disk, what they score."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.models.conversion import from_hf, write_checkpoint
from isopref.models.hf import export
from isopref.models.parallel import Parallel, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.score import TableLogps, score_table
from isopref.testing.models import byte_tokenizer, random_pairs, tiny_model


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
