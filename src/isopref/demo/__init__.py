"""The demo's data: questions with a short, correct, direct answer (chosen) and a rambling one (rejected).

The questions and the chosen answers were written for this purpose; the rejected ones are what SmolLM2-135M-Instruct,
the model that the demo tunes, says by itself (see `rejected`). `spot_checks.jsonl` shows what the training costs: facts
that the model knows, and plain text.

What keeps the files apart: no prompt of the held-out pairs or of the spot checks has four consecutive words in common
with a prompt that is trained on.

`examples/demo` has the same files. This module knows nothing of models and training.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

FILES = ("train.jsonl", "eval.jsonl", "spot_checks.jsonl")


def records(name: str) -> list[dict[str, Any]]:
    """The records of one of `FILES`."""
    return [json.loads(line) for line in _content(name).decode("utf-8").splitlines()]


def write(folder: Path) -> None:
    """Write all of `FILES` into the folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_bytes(_content(name))


def _content(name: str) -> bytes:
    return resources.files(__name__).joinpath(name).read_bytes()
