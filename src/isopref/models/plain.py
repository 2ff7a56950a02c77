"""Reads a torch checkpoint folder without running any code in it.

Torch itself unpickles whatever a folder holds. Here, the index may name only the classes that make up an index, and
everything else is read as plain data. Raises NotPlainError for anything more.
"""

import io
import pickle  # for an Unpickler that refuses unknown classes
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

NotPlainError = pickle.UnpicklingError  # torch.load raises it, too

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
    """Torch's reader, with a restricted unpickler for the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: metadata.Metadata = _Index(file).load()
        return found


class PlainPlanner(DefaultLoadPlanner):
    """Torch's planner, which unpickles values that are not tensors, with a check before that."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for anything but data, which the line below would run
        value.seek(0)
        super().load_bytes(read_item, value)


class _Index(pickle.Unpickler):
    """Accepts the classes of an index, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in INDEX_CLASSES:
            return getattr(metadata, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        if (module, name) == ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo  # OLMo-core's class has the same fields, and torch's reader needs its own
        raise NotPlainError(f"its index names {module}.{name}, which could run code")
