"""Data that a script passes in a config where a file has a path: data.train, data.eval, or a source in either.

YAML cannot hold records, so each data set is taken out of the config and replaced by its name, `memory:DIGEST`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from isopref.config.describe import source_fields
from isopref.config.schema import Config
from isopref.config.values import SourceConfig
from isopref.data.columns import SIDES
from isopref.data.memory import MemoryData, hold
from isopref.errors import ConfigError

FIELDS = ("train", "eval")


def take_records(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, MemoryData]]:
    """The config with names in place of records in memory, and those records by name. `config` is not changed.

    Raises ConfigError for a container that cannot be read repeatedly, DataError for one that holds no records.
    """
    found: dict[str, MemoryData] = {}

    def take(value: Any, label: str) -> Any:
        if _is_records(value, label):
            data = hold(label, value)
            return found.setdefault(data.name, data).name
        if isinstance(value, list):
            return [take(one, f"{label}[{index}]") for index, one in enumerate(value)]
        if isinstance(value, Mapping) and "path" in value:
            return {**value, "path": take(value["path"], label)}
        return value

    section = config.get("data")
    if not isinstance(section, Mapping):
        return dict(config), {}
    taken = {name: take(section[name], f"data.{name}") for name in FIELDS if name in section}
    return {**config, "data": {**section, **taken}}, found


def still_named(memory: Mapping[str, MemoryData], config: Config) -> dict[str, MemoryData]:
    """The records that a config still names: an override may have replaced some of them."""
    fields = [getattr(config.data, name) for name in FIELDS]
    sources = [one for field in fields for one in (field if isinstance(field, list) else [field])]
    paths = [one.path if isinstance(one, SourceConfig) else one for one in sources]
    return {name: data for name, data in memory.items() if name in paths}


def _is_records(value: Any, label: str) -> bool:
    """Whether a value is data, not the name of a source. Raises ConfigError for data of an unsupported type."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping) and not _is_source(value[0])
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == "pandas":
        raise ConfigError(f"{label}: is a pandas {kind.__name__}. Pass a list of dicts: frame.to_dict('records').")
    if package != "datasets":
        return False
    if isinstance(value, sys.modules["datasets"].Dataset):
        return True
    raise ConfigError(
        f"{label}: expected a Dataset, found a {kind.__name__}. From several splits, pass one, as in splits['train']; "
        "from a stream, pass a list of its records."
    )


def _is_source(value: Mapping[str, Any]) -> bool:
    """Whether a mapping in a list describes a source. A record, too, may have a column named `path`."""
    return not set(SIDES) & value.keys() and ("path" in value or value.keys() <= source_fields().keys())
