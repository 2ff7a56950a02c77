"""Packages that only some runs need, asked for when the run is built and never inside a step."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from isopref.errors import ConfigError

IN_PACKAGE = "package:"


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import `module`, or raise ConfigError with the command that installs it.

    `extra` is the extra of isopref that brings the package; `why` says which setting asked for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{why}, which needs the package '{module}' ({error}). Install it: pip install 'isopref[{extra}]'"
        ) from error


def package_file(spec: str) -> Path:
    """The file of "package:PACKAGE/FILE". The package is found, not imported. Raises ConfigError."""
    package, _, file = spec.removeprefix(IN_PACKAGE).partition("/")
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"{spec}: no package '{package}' is installed here. Install it, or name a file by its path.")
    for folder in found.submodule_search_locations:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ConfigError(f"{spec}: the package '{package}' has no file '{file}'. Form: package:PACKAGE/FILE.")
