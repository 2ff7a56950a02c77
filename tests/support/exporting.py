"""What a model spread over ranks is written as."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from isopref.models.conversion import from_hf
from isopref.models.hf import export
from isopref.models.parallel import Parallel, parallelize, unwrap
from isopref.models.policy import Policy
from isopref.testing.models import byte_tokenizer, tiny_model


def exported(architecture: str, mode: Parallel, native: bool, folder: Path) -> dict[str, Tensor]:
    """The tensors in the file that the first rank writes; none on the others. All ranks call this together."""
    hf_model = tiny_model(architecture)
    policy = Policy(from_hf(hf_model) if native else hf_model)
    ranks = dist.get_world_size() if mode != "single" else 1
    model = parallelize(policy, mode, device=torch.device("cpu"), world_size=ranks)
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if mode != "single" and dist.get_rank() > 0:
        return {}
    with unwrap(model).saved_form(state) as (inner, weights):
        export(inner, weights, byte_tokenizer(), folder)
    return load_file(folder / "model.safetensors")
