"""The sums that a policy makes of what its head says of tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from isopref.batch.rows import build_microbatch
from isopref.examples import PairTokens
from isopref.models.policy import Policy
from isopref.testing.models import tiny_model
from isopref.types import Needs, Pass


@pytest.mark.parametrize("kind", ["shared", "padded_separate"])
def test_the_sum_over_a_long_answer_is_as_exact_as_its_number_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of 100,000 and 20,000 tokens; the model itself would take too long."""
    pair = PairTokens(np.array([3]), *(np.arange(count) % 50 for count in (100_000, 20_000)))
    microbatch = build_microbatch([pair.example], kind)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    said = [-3 * torch.rand(len(one.target), generator=generator) ** 3 for one in microbatch.passes]
    answers = [one.answer for one in microbatch.passes]
    expected = torch.zeros(2, dtype=torch.float64)
    for values, answer in zip(said, answers, strict=True):
        for number in (0, 1):
            expected[number] += values[answer == number].double().sum()
    policy, saying = Policy(tiny_model("gpt2", dtype=torch.float32)), iter(said)

    def tokens(_hidden: Tensor, _one: Pass, _confidence: bool) -> tuple[Tensor, Tensor]:
        values = next(saying)
        return values, values

    monkeypatch.setattr(policy, "_hidden", lambda _one, _routed: (torch.zeros(1, 1, 1), ()))
    monkeypatch.setattr(policy, "_tokens", tokens)
    found = policy(microbatch, Needs(confidence=True))
    assert found.logp.dtype == torch.float32
    assert torch.equal(found.logp, expected.float())
    torch.testing.assert_close(found.confidence, (expected / microbatch.num_tokens).float(), rtol=1e-6, atol=0)
