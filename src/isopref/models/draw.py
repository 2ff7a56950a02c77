"""The next token of an answer: the most likely one, or a draw that depends only on its seed and position.

Every answer has a seed, and the draw of its n-th token uses the n-th number of a counter-based generator with that
seed. So an answer does not depend on what else is in the batch, beyond the rounding of the logits.

Dimensions: R answers, V tokens of the vocabulary, N tokens of an answer.
"""

import numpy as np
import torch
from torch import Tensor

from isopref.types import FloatArray

MOST = 1 - 2.0**-23  # below 1 in float32 too, even after multiplication by a sum of probabilities


def noise(seed: int, count: int) -> FloatArray:
    """The uniform numbers of an answer, one for each of its tokens. A longer answer begins with the same ones."""
    return np.minimum(np.random.Generator(np.random.Philox(seed)).random(count), MOST)


def draw(logits_RV: Tensor, uniform_R: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """One token for each row of logits: R. Temperature 0 takes the most likely one.

    `top_p` keeps the most likely tokens that together reach this probability (Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits_RV.argmax(dim=-1)
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    probability = (logits_RV.to(wide) / temperature).softmax(dim=-1)
    order = None
    if top_p < 1:
        probability, order = probability.sort(dim=-1, descending=True, stable=True)
        before = probability.cumsum(dim=-1) - probability
        probability = probability.where(before < top_p, 0)
    upto = probability.cumsum(dim=-1)
    target = uniform_R.to(wide)[:, None] * upto[:, -1:]
    # The first token whose cumulative probability is larger: never one with probability zero.
    found = torch.searchsorted(upto, target, right=True).clamp(max=upto.shape[-1] - 1)
    return (found if order is None else order.gather(1, found))[:, 0]
