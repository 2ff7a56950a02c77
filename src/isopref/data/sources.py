"""Opens a source by its name: a file, a folder, a pattern, a saved data set, a name on the hub.

Owns what a name means. file_sources.py and dataset_sources.py read each kind; shapes.py interprets the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from isopref.data.dataset_sources import HubName, hub_source, is_saved, saved_source
from isopref.data.file_sources import PATTERN, file_source, folder_source, pattern_source
from isopref.data.memory import IN_MEMORY
from isopref.data.source import Record, Source, SourceSpec
from isopref.errors import ConfigError, DataError
from isopref.optional import IN_PACKAGE, package_file

SLICE = re.compile(r"([^:]+):(\w+\[[^\[\]]*\])")  # a split of which a part is asked for: owner/name:train[:100]

__all__ = ["Record", "Source", "SourceSpec", "read_source"]


def read_source(
    spec: str,
    *,
    columns: Mapping[str, str] | None = None,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> Source:
    """Open a source; records are read when it is iterated.

    `spec` is a file, a folder of files or one written by `save_to_disk` ("folder" or "folder:split"), a pattern such as
    "data/*.jsonl", "package:PACKAGE/FILE", or, if no such path exists, a hub name ("owner/name" or "owner/name:split").
    For the hub, `name` is a config, `split` a split and `revision` a branch, tag or commit. Raises DataError, and
    ConfigError if these three do not fit the path.
    """
    columns, path, asked = columns or {}, Path(spec).expanduser(), {"name": name, "split": split, "revision": revision}
    base, _, split_of_path = spec.rpartition(":")
    if (sliced := SLICE.fullmatch(spec)) is not None:
        base, split_of_path = sliced.groups()
    if spec.startswith(IN_MEMORY):
        raise DataError(
            f"{spec}: this data was passed to isopref.train by a script, in memory, and is in no file. Call "
            "isopref.train with the same data, or use a file."
        )
    if spec.startswith(IN_PACKAGE):
        _refuse(spec, "a file", asked)
        return file_source(spec, package_file(spec), columns)
    if path.is_dir() and is_saved(path):
        _refuse(spec, "a folder written by save_to_disk", asked | {"split": None})
        return saved_source(spec if split is None else f"{spec}:{split}", path, split, columns)
    if path.is_dir():
        _refuse(spec, "a folder of files", asked)
        return folder_source(spec, path, columns)
    if path.exists():
        _refuse(spec, "a file", asked)
        return file_source(spec, path, columns)
    if base and Path(base).expanduser().is_dir():
        _refuse(spec, f"the split '{split_of_path}' of a folder", asked)
        return saved_source(spec, Path(base).expanduser(), split_of_path, columns)
    if PATTERN.search(spec) and "://" not in spec and sliced is None:
        _refuse(spec, "a pattern for files", asked)
        return pattern_source(spec, columns)
    if base and split is not None:
        raise ConfigError(f"the source '{spec}': its split is also set as split: {split}. Remove one of them.")
    asked_of_hub = HubName(base or spec, name, split_of_path if base else split or "train", revision)
    # Two sources may differ only in their config or split, so the name includes both.
    label = spec + ("" if name is None else f" ({name})") + ("" if split is None else f":{split}")
    return hub_source(spec, label, asked_of_hub, columns)


def _refuse(spec: str, what: str, asked: Mapping[str, str | None]) -> None:
    """Raise ConfigError if a setting that is only for data sets of the hub is set for another source."""
    for field, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"the source '{spec}': is {what}, but {field}: {value} is for data sets of the hub. Remove {field}."
            )
