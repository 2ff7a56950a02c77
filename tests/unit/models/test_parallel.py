"""Which numbers of ranks can split the rows of a model."""

from typing import Any

import pytest

from isopref.errors import ConfigError
from isopref.models.parallel import check_context, divisible_heads
from isopref.models.policy import Policy
from isopref.testing.models import tiny_model


@pytest.mark.parametrize(
    ("architecture", "changes", "heads"),
    [
        ("llama", {}, 4),  # of queries; two of keys
        ("bamba", {}, 4),  # of attention and of Mamba2; two groups
        ("bamba", {"mamba_n_heads": 2, "mamba_d_head": 32}, 2),
        ("bamba", {"num_attention_heads": 8, "mamba_n_groups": 1}, 4),
        ("olmo_hybrid", {}, 4),
        ("lfm2", {}, 4),
        ("lfm2", {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}, 6),
    ],
)
def test_heads_that_ranks_can_divide(architecture: str, changes: dict[str, Any], heads: int) -> None:
    assert divisible_heads(Policy(tiny_model(architecture, **changes))) == heads


def test_degrees_that_a_layer_with_a_state_does_not_allow() -> None:
    policy = Policy(tiny_model("bamba", mamba_n_heads=2, mamba_d_head=32))
    check_context(policy, 2, 4)
    with pytest.raises(ConfigError) as refusal:
        check_context(policy, 4, 4)
    assert str(refusal.value) == (
        "layout.context_parallel: 4 does not divide the heads of the model, 2. Use one of 1, 2."
    )
