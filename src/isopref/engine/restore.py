"""Reading a run's checkpoint back without running anything that is in it, as the engine's own way would."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.train import Trainer
from torch.distributed.checkpoint.state_dict_loader import load

from isopref.errors import RunError
from isopref.models.plain import NotPlainError, PlainPlanner, PlainReader
from isopref.ranks import own_rank

_SEED = np.zeros(1, np.uint32)
NUMPY_STATE: list[Any] = [
    np.ndarray,
    np.dtype,
    type(_SEED.dtype),
    _SEED.__reduce__()[0],
]  # what numpy's random state is made of


def restore(trainer: Trainer, folder: Path) -> None:
    """Load weights, optimizer and the state of a trainer from a checkpoint. All ranks call this together.

    Raises RunError for a checkpoint of other data, or one that holds more than data.
    """
    own = folder / "train" / f"rank{own_rank()}.pt"
    # On more ranks than before there is none for the last ones; the random state is then not restored anyway.
    path = own if own.exists() else folder / "train" / "rank0.pt"
    reader = PlainReader(folder / "model_and_optim")
    module = trainer.train_module
    try:
        with torch.serialization.safe_globals(NUMPY_STATE):
            state: Any = torch.load(path, weights_only=True)
        trainer.data_loader.load_state_dict(state["data_loader"])  # first: it refuses other data
        weights = module.state_dict_to_load(reader.read_metadata(), optim=True)
        load(weights, storage_reader=reader, planner=PlainPlanner())
    except NotPlainError as error:
        raise RunError(
            f"{folder}: holds more than data ({' '.join(str(error).split())[:200]}), so it is not read. Is it a "
            "checkpoint of isopref? Remove it to go on from an earlier one."
        ) from error
    module.load_state_dict(weights)
    trainer.load_state_dict(state)
