"""Reading a checkpoint back without running anything that is in it.

The engine's own way unpickles whatever a checkpoint holds. Here its index may name only the classes that make up an
index, and all else is read as plain data.
"""

import io
import pickle  # for an Unpickler that refuses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.train import Trainer
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from isopref.errors import RunError

INDEX_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
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
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = folder / "train" / f"rank{rank}.pt"
    # On more ranks than before there is none for the last ones; the random state is then not restored anyway.
    path = own if own.exists() else folder / "train" / "rank0.pt"
    reader = _Reader(folder / "model_and_optim")
    module = trainer.train_module
    try:
        with torch.serialization.safe_globals(NUMPY_STATE):
            state: Any = torch.load(path, weights_only=True)
        trainer.data_loader.load_state_dict(state["data_loader"])  # first: it refuses other data
        weights = module.state_dict_to_load(reader.read_metadata(), optim=True)
        load(weights, storage_reader=reader, planner=_Planner())
    except pickle.UnpicklingError as error:
        raise RunError(
            f"{folder}: holds more than data ({' '.join(str(error).split())[:200]}), so it is not read. Is it a "
            "checkpoint of isopref? Remove it to go on from an earlier one."
        ) from error
    module.load_state_dict(weights)
    trainer.load_state_dict(state)


class _Index(pickle.Unpickler):
    """Knows the classes of an index, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in INDEX_CLASSES:
            return getattr(metadata, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        if (module, name) == ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo  # torch's, which torch's reader takes; the engine's has the same fields
        raise pickle.UnpicklingError(f"its index names {module}.{name}")


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: metadata.Metadata = _Index(file).load()
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where it is more than data; torch's own way would run that
        value.seek(0)
        super().load_bytes(read_item, value)
