"""Runs the code cells of a notebook in this process, one after the other, as a kernel would."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAG = "parameters"  # of the cell whose values a test may replace, as papermill has it


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Execute every cell. `parameters` replace values of the cell that is tagged so. Returns what the cells defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path), start=1):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
        if TAG in cell["metadata"].get("tags", ()):
            unknown = set(parameters) - set(names)
            assert not unknown, unknown
            names |= parameters
    return names
