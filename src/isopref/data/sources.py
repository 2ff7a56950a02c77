"""Opening a source by its name: a file, a folder, a pattern, a saved data set, a name on the hub.

Owns what a name means. How each is read is in file_sources and dataset_sources, what a field means in shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from isopref.data.dataset_sources import hub_source, is_saved, saved_source
from isopref.data.file_sources import PATTERN, file_source, folder_source, pattern_source
from isopref.data.source import Record, Source, SourceSpec
from isopref.optional import IN_PACKAGE, package_file

__all__ = ["Record", "Source", "SourceSpec", "read_source"]


def read_source(spec: str, *, columns: Mapping[str, str] | None = None) -> Source:
    """Open a source; records are read when it is iterated.

    `spec` is a file, a folder of files or one written by `save_to_disk` ("folder" or "folder:split"), a pattern such as
    "data/*.jsonl", "package:PACKAGE/FILE", or, where no such path exists, a hub name ("owner/name" or
    "owner/name:split"). Raises DataError.
    """
    columns = columns or {}
    if spec.startswith(IN_PACKAGE):
        return file_source(spec, package_file(spec), columns)
    path = Path(spec).expanduser()
    if path.is_dir():
        return saved_source(spec, path, None, columns) if is_saved(path) else folder_source(spec, path, columns)
    if path.exists():
        return file_source(spec, path, columns)
    base, _, split = spec.rpartition(":")
    if base and Path(base).expanduser().is_dir():
        return saved_source(spec, Path(base).expanduser(), split, columns)
    if PATTERN.search(spec) and "://" not in spec:
        return pattern_source(spec, columns)
    return hub_source(spec, base or spec, split if base else "train", columns)
