"""Sources read with the `datasets` package: folders written by save_to_disk, and data sets of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import ENDPOINT

from isopref.data.file_sources import inside
from isopref.data.formats import SUFFIXES, Places, digest_files, without_filling
from isopref.data.source import Source
from isopref.errors import DataError
from isopref.hub import unreachable
from isopref.optional import require

FILE_SUFFIXES = {*SUFFIXES, ".gz", ".txt"}  # names that end like this are files, not hub names
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by save_to_disk."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def saved_source(spec: str, folder: Path, split: str | None, columns: Mapping[str, str]) -> Source:
    """A folder written by save_to_disk; with several splits, this one or "train". Raises DataError."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        wanted = split or "train"
        if wanted not in splits:
            raise DataError(
                f"{spec}: there is no split '{wanted}'. Choose one of {splits}, as split: SPLIT or '{folder}:SPLIT'."
            )
        folder = folder / wanted
    elif split:
        raise DataError(f"{spec}: the folder has no splits written by save_to_disk. {inside(folder)}")
    datasets = require("datasets", extra="datasets", why=f"the source '{spec}' is a folder written by save_to_disk")
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds of errors for a damaged folder
        raise DataError(f"{spec}: cannot be read ({_first_lines(error)}). Write it again.") from error
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _dataset_source(spec, dataset, "saved data set", lambda: digest_files(files), columns)


@dataclass(frozen=True)
class HubName:
    """A request to the hub: a data set, one of its configs, a split, and a branch, tag or commit."""

    path: str
    name: str | None
    split: str
    revision: str | None

    def __str__(self) -> str:
        config = "" if self.name is None else f", config '{self.name}'"
        revision = "" if self.revision is None else f", revision '{self.revision}'"
        return f"'{self.path}' with split '{self.split}'{config}{revision}"


def hub_source(spec: str, label: str, asked: HubName, columns: Mapping[str, str]) -> Source:
    """A data set of the hub. `spec`, which is not a local path, must be a hub name; `label` is the source's name.

    Raises DataError.
    """
    tried, hint = Path(spec).expanduser().absolute(), _hint(spec)
    if hint or not HUB_NAME.fullmatch(asked.path) or Path(asked.path).suffix in FILE_SUFFIXES:
        way_out = f"Check the path; a relative path starts from the folder in which the command runs.{hint}"
        raise DataError(f"{spec}: no such file or folder ({tried}). {way_out}")
    datasets = require(
        "datasets", extra="datasets", why=f"'{spec}' is not a local path ({tried}), so it is read as a hub name"
    )
    no_network = unreachable()
    try:
        with _cache_only(datasets.config, no_network is not None):
            dataset = datasets.load_dataset(asked.path, asked.name, split=asked.split, revision=asked.revision)
    except Exception as error:  # network, authentication, unknown name or split: each has its own class
        if no_network and isinstance(error, ConnectionError):  # other errors are about a data set in the cache
            raise DataError(_without_network(label, tried, asked, no_network)) from error
        raise DataError(
            f"{label}: there is no local path {tried}, and the Hugging Face hub returned no data set {asked} "
            f"({_first_lines(error)}). Check the path or the name on the hub: data.train: {{path: OWNER/NAME, name: "
            "CONFIG, split: SPLIT, revision: REVISION}."
        ) from error
    # The fingerprint is the library's own content key: it depends on the files and on every transformation.
    return _dataset_source(label, dataset, "hub", lambda: str(dataset._fingerprint), columns)


@contextmanager
def _cache_only(settings: Any, offline: bool) -> Iterator[None]:
    """If `offline`, make the library use only its cache: without a network, it would retry for half a minute."""
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


def _without_network(label: str, tried: Path, asked: HubName, reason: str) -> str:
    given = {"name": asked.name, "split": asked.split, "revision": asked.revision}
    arguments = ", ".join([repr(asked.path), *(f"{name}={value!r}" for name, value in given.items() if value)])
    return (
        f"{label}: there is no local path {tried}, data set {asked} is not in the local cache, and the hub "
        f"({ENDPOINT}) cannot be reached ({reason}). Check the name and the network, or name a local file or folder. "
        f'To make one on a machine with a network: python -c "import datasets; datasets.load_dataset({arguments})'
        ".save_to_disk('FOLDER')\""
    )


def _dataset_source(
    spec: str, dataset: Any, kind: str, digest: Callable[[], str], columns: Mapping[str, str]
) -> Source:
    def read() -> Places:
        as_written = without_filling(dataset.features.arrow_schema)
        plain = dataset.with_format(None)  # a saved data set keeps the effect of set_format("numpy")
        return ((as_written(row), f":row {number}") for number, row in enumerate(plain))

    return Source(spec, kind, read, digest, columns, count=lambda: len(dataset))


def _hint(spec: str) -> str:
    """A hint, for the message, if a path that does not exist was probably meant as something else."""
    if re.fullmatch(r"[\d.]+%?", spec):
        return " A share of the prompts to hold out is a number without quotes, as in data.eval: 0.05."
    if "://" in spec:
        return " isopref does not download from URLs: download the file yourself, or name a hub data set as owner/name."
    return ""


def _first_lines(error: Exception) -> str:
    """The start of an error's message. Its second line may list the available names."""
    lines = (str(error).strip() or "no message").splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
