"""Models that change their logits after the head, or call their decoder otherwise: scores and gradients."""

from typing import Any

import pytest
import torch

from isopref.batch.packing import RowKind
from isopref.batch.rows import build_microbatch
from isopref.models.parts import logit_changes
from isopref.models.policy import Policy
from isopref.testing import oracle
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs

PAIRS = [*random_pairs(3, seed=1), *random_pairs(2, seed=2, longest=40)]
MIX = torch.randn(2, len(PAIRS), generator=torch.Generator().manual_seed(0))
BOUND = 1e-5  # relative, in float32
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": {"scale": 0.3},
    "granite": {"scale": 1 / 3},
    "hyperclovax": {"scale": 0.3},
    "minicpm3": {"scale": 0.5},
    "falcon_h1": {"scale": 0.3},
    "inkling_text": {"scale": 1 / 3, "vocabulary": 91},
    "recurrent_gemma": {"softcap": 3.0},
    "gemma2": {"softcap": 30.0},
    "llama4_text": {},
}
PACKED = ("cohere", "granite", "hyperclovax", "minicpm3", "gemma2")


@pytest.mark.parametrize("family", CHANGES)
def test_changes_are_read_from_the_config(family: str) -> None:
    found = logit_changes(tiny_family(family).config)
    assert found == pytest.approx(
        (CHANGES[family].get("scale", 1.0), *map(CHANGES[family].get, ("softcap", "vocabulary")))
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in CHANGES for kind in ("shared", "padded") if kind == "padded" or family in PACKED],
)
def test_scores_and_gradients_are_the_oracles(family: str, kind: RowKind) -> None:
    vocabulary = CHANGES[family].get("vocabulary", 97)
    pairs = [type(pair)(*(side % vocabulary for side in pair)) for pair in PAIRS]
    policy = Policy(tiny_family(family))
    with policy.plain() as model:
        expected = oracle.pair_logps(model, pairs)
        logps = torch.stack([expected.chosen, expected.rejected])
    found = policy(build_microbatch(examples(pairs), kind)).logp.view(2, -1)
    assert float((found - logps).detach().abs().max() / logps.abs().max()) <= BOUND
    gradients = [oracle.gradient(policy.model, (one * MIX).sum()) for one in (found, logps)]
    assert oracle.relative_error(*gradients) <= BOUND
