"""Steps of tiny models of any architecture, spread over ranks."""

import torch

from isopref.batch.rows import build_microbatch
from isopref.models.parallel import Parallel, gradient_sync, parallelize
from isopref.models.policy import Policy
from isopref.testing.families import tiny_family
from isopref.testing.models import examples, random_pairs


def gradient_norms(family: str, parallel: Parallel, ranks: int, steps: int = 2) -> list[float]:
    """The norm of all gradients after each of several steps. All ranks call this together."""
    model = parallelize(Policy(tiny_family(family)), parallel, device=torch.device("cpu"), world_size=ranks)
    row = build_microbatch(examples(random_pairs(4, seed=1)), "shared")
    norms = []
    for _ in range(steps):
        model.zero_grad()
        with gradient_sync(model, "last", last=True):
            model(row).logp.sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(found)))
    return norms
