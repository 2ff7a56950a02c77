"""Print constraints for the lowest versions that pyproject.toml allows; for torch, the version in constraints.txt."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
extras = [one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra]
for requirement in [*project["dependencies"], *extras]:
    name, version = re.match(r"([\w-]+)(?:\[.*\])?[>=]=([\w.]+)", requirement).groups()
    if name != "torch":
        sys.stdout.write(f"{name}=={version}\n")
sys.stdout.write(re.search(r"^torch==.*\n", (ROOT / "constraints.txt").read_text(), re.M)[0])
