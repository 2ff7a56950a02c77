"""Scores from a Python function: `module:function` or `file.py:function`, (prompt, answers) -> one number each."""

import importlib
import importlib.util
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
        raise ConfigError(f"--by: {module_name} cannot be imported ({error}). Pass module:function.") from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"--by: {module_name} has no function '{attribute}'. Name one of its functions, as module:function."
        )
    score: Score = found
    return score


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
    found = list(given) if isinstance(given, Iterable) else [given]
    numbers = [isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in found]
    if len(found) != len(answers) or not all(numbers):
        raise DataError(
            f"--by {name}: returned {given!r} for {len(answers)} answers. Return one finite number for each, "
            "higher for better."
        )
    return [float(one) for one in found]
