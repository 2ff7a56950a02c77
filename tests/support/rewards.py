"""Rewards of an exported folder: isopref's own, and a check that another model gives the same."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from isopref.batch.packing import Budget
from isopref.data.table import ExampleTable
from isopref.models.reward import RewardModel, load_reward_model
from isopref.score import score_table
from isopref.testing.models import random_pairs


def own_rewards(folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """Sequences, and what isopref's readout gives them in shared rows."""
    pairs = random_pairs(6, seed=7, vocabulary=90)
    table = ExampleTable.from_tokens(pairs)
    policy = RewardModel(load_reward_model(str(folder), dtype="auto"))
    found = score_table(policy, table, Budget("shared", 512), device=torch.device("cpu"))
    return [[*map(int, p.prompt), *map(int, side)] for p in pairs for side in p[1:]], found.answers


@torch.no_grad()
def check_scores(model: Any, pad: int | None, sequences: list[list[int]], expected: np.ndarray) -> None:
    """One sequence at a time, and all of them in a right-padded batch."""
    alone = [float(model(input_ids=torch.tensor([tokens])).logits) for tokens in sequences]
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-5)
    longest = max(map(len, sequences))
    assert pad is not None
    ids = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in sequences])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences])
    together = model(input_ids=ids, attention_mask=mask).logits[:, 0]
    np.testing.assert_allclose(together.numpy(), expected, rtol=1e-5, atol=1e-5)
