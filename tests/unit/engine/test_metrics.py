"""Sums of metrics between two logs."""

import pytest
import torch

from isopref.engine import metrics
from isopref.engine.metrics import SUMS, MetricWindow

CPU = torch.device("cpu")


def test_a_window_that_is_resumed_on_more_ranks_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    window = MetricWindow(CPU)
    window.add(torch.arange(len(SUMS), dtype=torch.float64))
    window.add(torch.ones(len(SUMS), dtype=torch.float64), (True, False))
    of_ranks = []
    for rank in range(3):
        monkeypatch.setattr(metrics, "own_rank", lambda _group, rank=rank: rank)
        of_ranks.append(MetricWindow(CPU))
        of_ranks[-1].load_state_dict(window.state_dict())
        assert of_ranks[-1].num_steps.tolist() == [2, 2, 1]
    assert torch.equal(torch.stack([one.sums for one in of_ranks]).sum(dim=0), window.sums)
