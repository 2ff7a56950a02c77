"""Which pairs form each global batch: a pure function of (number of pairs, seed, epoch, batch size).

It does not depend on ranks, rows or torch, so every layout trains on the same batches in the same order. The last batch
of an epoch may be short; it is trained on like the others, and no pair is ever dropped or repeated.
"""

import numpy as np

from isopref.types import IntArray


def num_batches(num_pairs: int, batch_size: int) -> int:
    """Global batches in one epoch, including a short last one."""
    return -(-num_pairs // batch_size)


def epoch_order(num_pairs: int, *, seed: int, epoch: int) -> IntArray:
    """The order of all pairs in one epoch (1-based).

    RandomState's stream is frozen by numpy's policy, so a run resumed years later still sees the same order.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_pairs)


def batch(order: IntArray, batch_size: int, number: int) -> IntArray:
    """The pairs of global batch `number` (0-based) of an epoch."""
    return order[number * batch_size : (number + 1) * batch_size]
