"""Packages that only some runs need, asked for when the run is built and never inside a step."""

import importlib
from types import ModuleType

from isopref.errors import ConfigError


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
