"""Functions that judge: files of all kinds are imported, and what they return is checked."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isopref.errors import ConfigError, DataError
from isopref.judge.functions import load_function, scores_of

WITH_A_DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Weights:
    length: float = -1.0

def score(prompt, answers):
    return [Weights().length * len(one) for one in answers]
"""


@pytest.mark.parametrize("name", ["my_weights", "json"])
def test_a_file_with_a_dataclass(tmp_path: Path, name: str) -> None:
    """Dataclasses look up their module by its name. That of the file must not hide another one."""
    path = tmp_path / f"{name}.py"
    path.write_text(WITH_A_DATACLASS)
    function = load_function(f"{path}:score")
    assert sys.modules["json"] is json
    assert scores_of(function, f"{name}.py:score", "why?", ["so", "because"]) == [-2.0, -7.0]


@pytest.mark.parametrize(
    "returned",
    [
        np.array([-2, -7]),
        np.array([-2, -7], np.float32),
        [np.float32(-2), np.int64(-7)],
        torch.tensor([-2.0, -7.0], dtype=torch.bfloat16, requires_grad=True),
        (torch.tensor(length) for length in (-2, -7)),
    ],
    ids=["whole", "float32", "list", "tensor", "generator"],
)
def test_numbers_of_numpy_and_torch(returned: Any) -> None:
    assert scores_of(lambda prompt, answers: returned, "x:y", "why?", ["so", "because"]) == [-2.0, -7.0]


@pytest.mark.parametrize(
    "returned",
    [None, np.array(1.0), np.array([True, False]), 1.0, [1.0], [1.0, float("nan")], [True, False], ["1", "2"]],
)
def test_what_is_not_one_number_for_each_answer(returned: Any) -> None:
    with pytest.raises(DataError, match=r"--by x:y: returned .* for 2 answers"):
        scores_of(lambda prompt, answers: returned, "x:y", "why?", ["so", "because"])


def test_a_url_without_http_is_told_what_a_url_looks_like() -> None:
    with pytest.raises(
        ConfigError, match=r"localhost cannot be imported .* or a URL such as http://localhost:8000/v1\.$"
    ):
        load_function("localhost:8000/v1")
