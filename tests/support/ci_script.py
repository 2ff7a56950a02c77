"""The scripts in .ci, which belong to no package."""

from importlib import util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def ci_script(name: str) -> ModuleType:
    """The module .ci/NAME.py."""
    spec = util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
