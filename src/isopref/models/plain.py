"""Reading a torch checkpoint folder without running anything that is in it.

Torch's own way unpickles whatever a folder holds. Here its index may name only the classes that make up an index, and
all else is read as plain data. Raises NotPlainError for more than that.
"""

import io
import pickle  # for an Unpickler that refuses
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

NotPlainError = pickle.UnpicklingError  # what torch raises, too

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


class PlainReader(filesystem.FileSystemReader):
    """Torch's reader, but for the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: metadata.Metadata = _Index(file).load()
        return found


class PlainPlanner(DefaultLoadPlanner):
    """Torch's planner, but for what is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where it is more than data; torch's own way would run that
        value.seek(0)
        super().load_bytes(read_item, value)


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
        raise NotPlainError(f"its index names {module}.{name}")
