"""What makes two references the same: their numbers, never their names, files or how they are run."""

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from isopref.errors import ModelError
from isopref.ranks import num_ranks, own_rank

SCORE_VERSION = 2  # raise it when the same weights and tokens give different log-probabilities, beyond rounding
HASH_THREADS = 8

# Config fields that cannot change a log-probability. Every field not listed here counts.
NOT_NUMBERS = frozenset(
    {
        "_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "tokenizer_class",
        "dtype", "torch_dtype",  # part of the weights' digest
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
        "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task", "prefix",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping",  # of an adapter
    }
)  # fmt: skip


def identity(model: PreTrainedModel, *, compute_dtype: str, narrow: bool = False) -> dict[str, Any]:
    """What the reference's key is made of, as plain data. `model` is unsharded; all ranks call this and share the work.

    `narrow`: the weights are loaded in 16 bits and will be made float32 (`Policy.widen`). The key is that of float32.
    """
    return {
        "score_version": SCORE_VERSION,
        "transformers": transformers.__version__,  # its model code may change, and with it the numbers
        "architecture": type(model).__name__,
        "code": _own_code(model),
        "weights": weights_digest(model, narrow=narrow),
        "compute_dtype": compute_dtype,
        "config": _numbers(model.config.to_dict()),
        "adapters": {name: _numbers(one.to_dict()) for name, one in getattr(model, "peft_config", {}).items()},
    }


def weights_digest(model: PreTrainedModel, *, narrow: bool = False) -> str:
    """Digest of all tensors, including adapters: names, dtypes, shapes and bytes."""

    def dtype(tensor: Tensor) -> torch.dtype:
        return torch.float32 if narrow and tensor.is_floating_point() else tensor.dtype

    state = dict(_plain_tensors(sorted(model.state_dict().items())))
    # Tied tensors are in the same memory, which is read once.
    distinct = {_memory(tensor): tensor for tensor in state.values()}
    largest_first = sorted(distinct, key=lambda memory: -distinct[memory].nbytes)
    ranks = _ranks_here()
    order = {memory: number for number, memory in enumerate(largest_first)}
    mine = [distinct[memory] for memory in largest_first[ranks.index(own_rank()) :: len(ranks)]]
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing frees the interpreter lock
        digests = list(pool.map(lambda tensor: _content(tensor.to(dtype(tensor))), mine))
    shares: list[list[bytes]] = [digests]
    if dist.is_initialized():
        shares = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(shares, digests)
        _check_machines(shares, len(ranks))
        shares = [shares[rank] for rank in ranks]
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in state.items():
        number = order[_memory(tensor)]
        about = f"{name}\0{dtype(tensor)}\0{tuple(tensor.shape)}\0".encode()
        total.update(about + shares[number % len(ranks)][number // len(ranks)])
    return total.hexdigest()


def _plain_tensors(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are, and quantised ones by their parts."""
    for name, tensor in state:
        if type(tensor) in (Tensor, Parameter):
            yield name, tensor.detach()
        else:
            parts, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            for part in parts:
                yield f"{name}.{part}", getattr(tensor, part).clone(memory_format=torch.contiguous_format)


def _ranks_here() -> list[int]:
    """The ranks of this machine, which share the hashing. Other machines may have another copy of the model."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if dist.is_initialized() else 1
    if num_ranks() % count:
        return [own_rank()]
    first = own_rank() // count * count
    return list(range(first, first + count))


def _check_machines(shares: list[list[bytes]], count: int) -> None:
    """Raise ModelError if machines, with `count` ranks each, have different weights."""
    machines = [shares[first : first + count] for first in range(0, len(shares), count)]
    for number, machine in enumerate(machines):
        if machine != machines[0]:
            raise ModelError(
                f"the machine of ranks {number * count} to {(number + 1) * count - 1} has different weights than rank "
                "0 under the same path. Copy the model to it again, or use a shared folder."
            )


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _content(tensor: Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=32).digest()


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that can change a log-probability, with plain JSON values."""
    kept = {str(name): value for name, value in config.items() if name not in NOT_NUMBERS}
    return {name: _plain(value) for name, value in kept.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _numbers(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(one) for one in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _own_code(model: PreTrainedModel) -> str | None:
    """Digest of code that came with the model (model.trust_remote_code); None for transformers' own classes."""
    module = sys.modules[type(model).__module__]
    if module.__name__.startswith("transformers."):
        return None
    files = sorted(Path(inspect.getfile(module)).parent.glob("*.py"))  # the module may import the others
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()
