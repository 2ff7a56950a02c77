"""Scores from a Python function: `module:function` or `file.py:function`, (prompt, answers) -> one number each."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from isopref.data.messages import Turns
from isopref.errors import ConfigError, DataError

Score = Callable[[Turns, list[str]], Sequence[float]]


def is_function(name: str) -> bool:
    """Whether --by names a function, not a folder or a URL."""
    return ":" in name and "://" not in name and not Path(name).expanduser().exists()


def load_function(name: str) -> Score:
    """The named function. Modules in the working directory are found, too. Raises ConfigError."""
    module_name, _, attribute = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            module = _from_file(Path(module_name).expanduser())
        else:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(module_name)
    except (ImportError, OSError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"--by: {module_name} cannot be imported ({error}). Expected module:function, or a URL such as "
            "http://localhost:8000/v1."
        ) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"--by: {module_name} has no function '{attribute}'. Name one of its functions, as module:function."
        )
    _check_takes(found, name)
    score: Score = found
    return score


def _check_takes(found: Callable[..., Any], name: str) -> None:
    """Raise ConfigError for a function that cannot be called with a prompt and its answers."""
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):  # of a function in C, which may have none
        return
    try:
        signature.bind("", [])
    except TypeError as error:
        raise ConfigError(
            f"--by: {name}{signature} cannot be called with a prompt and a list of answers ({error}). Define it as "
            "function(prompt, answers)."
        ) from error


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"isopref_judge_{path.stem}", path)  # a name that no other module has
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path.absolute()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    return module


def scores_of(function: Score, name: str, prompt: Turns, answers: Sequence[str]) -> list[float]:
    """The scores of some answers, checked. Raises DataError."""
    given: Any = function(prompt, list(answers))
    plain = _as_python(given)
    found = [_as_python(one) for one in plain] if isinstance(plain, Iterable) else [plain]
    numbers = [isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in found]
    if len(found) != len(answers) or not all(numbers):
        raise DataError(
            f"--by {name}: returned {given!r} for {len(answers)} answers. Return one finite number for each, "
            "higher for better."
        )
    return [float(one) for one in found]


def _as_python(value: Any) -> Any:
    """An array, tensor or number of numpy or torch as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
