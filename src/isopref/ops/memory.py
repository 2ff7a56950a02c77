"""Recognises that a device ran out of memory, whichever library reports it."""

import torch

SIGNS = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")


def ran_out(error: Exception) -> bool:
    """Whether a device ran out of memory. The host, cuBLAS, Triton and NCCL each report it differently."""
    known = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    return known or isinstance(error, torch.OutOfMemoryError)
