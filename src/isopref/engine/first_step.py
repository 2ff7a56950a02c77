"""Checks the first step: before the first update, policy and reference are the same model and must score alike."""

from collections.abc import Mapping

import torch

from isopref.errors import FirstStepError

# How far policy and reference may differ at the first step, in nats per token: rounding of the compute dtype.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
    torch.float16: 0.02,
    torch.float8_e4m3fn: 0.1,  # of products: a difference in bfloat16 rounding before one can cause a larger float8 one
}


def check_first_step(means: Mapping[str, float], compute_dtype: torch.dtype) -> None:
    """Raise FirstStepError unless the loss is that of a zero margin and rewards are 0. `means`: the step's metrics."""
    if not means["gap_per_token"] <= TOLERANCE[compute_dtype]:
        raise FirstStepError(
            "first step: policy and reference are the same model, so the loss should be "
            f"{means['loss_at_reference']:.6f} and rewards 0. But the loss is {means['loss']:.6f}, and their "
            f"log-probabilities differ by {means['gap_per_token']:.2g} nats per token. Something scores the two "
            "differently: rows that this model does not support, weights that changed, or randomness in the "
            "forward pass.",
            "Try padded rows. If the reference is another model on purpose, pass check_first_step=False.",
        )
