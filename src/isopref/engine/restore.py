"""Restores a run from a checkpoint without executing code in it, which the engine's own loading could do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.train import Trainer
from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_map_only

from isopref.errors import RunError
from isopref.models.plain import NotPlainError, PlainPlanner, PlainReader
from isopref.ranks import own_rank

_SEED = np.zeros(1, np.uint32)
# The types in numpy's random state.
NUMPY_STATE: list[Any] = [np.ndarray, np.dtype, type(_SEED.dtype), _SEED.__reduce__()[0]]


def restore(trainer: Trainer, folder: Path) -> None:
    """Load weights, optimizer and the state of a trainer from a checkpoint. All ranks call this together.

    Raises RunError for a checkpoint of other data, or one that holds more than data.
    """
    own = folder / "train" / f"rank{own_rank()}.pt"
    # On more ranks than before, the last ones have no file; the random state is then not restored anyway.
    path = own if own.exists() else folder / "train" / "rank0.pt"
    with _refusing(folder):
        with torch.serialization.safe_globals(NUMPY_STATE):
            state: Any = torch.load(path, weights_only=True)
        trainer.data_loader.load_state_dict(state["data_loader"])  # first: it refuses other data
        weights = _read(trainer.train_module, folder, optim=True)
    trainer.train_module.load_state_dict(weights)
    trainer.load_state_dict(state)


@contextmanager
def weights_of(module: TrainModule, folder: Path) -> Iterator[None]:
    """Give the model the weights of a checkpoint while the context is open. All ranks call this together."""
    # Cloned: on a CPU, the state dict holds the weights themselves.
    own = tree_map_only(torch.Tensor, torch.clone, module.state_dict(optim=False))
    with _refusing(folder):
        module.load_state_dict(_read(module, folder, optim=False))
    try:
        yield
    finally:
        module.load_state_dict(own)


def _read(module: TrainModule, folder: Path, *, optim: bool) -> dict[str, Any]:
    reader = PlainReader(folder / "model_and_optim")
    state = module.state_dict_to_load(reader.read_metadata(), optim=optim)
    load(state, storage_reader=reader, planner=PlainPlanner())
    return state


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except NotPlainError as error:
        raise RunError(
            f"{folder}: holds more than plain data ({' '.join(str(error).split())[:200]}), and loading it could run "
            "code. Did isopref write it? Remove it to resume from an earlier checkpoint."
        ) from error
