"""Calibration of a reward model: sigmoid(r_c - r_r) is the probability that it assigns to a preference.

N: pairs, B: bins.
"""

import numpy as np

from isopref.evaluate.intervals import Figure, figure_of_size, means
from isopref.types import FloatArray, IntArray

NUM_BINS = 10


def calibration_error(margin_N: FloatArray, won_N: FloatArray, example_N: IntArray) -> Figure:
    """Expected calibration error (Guo et al. 2017): how far accuracy is from confidence, averaged over pairs.

    `example` is the example that each pair belongs to. Confidence is the probability of the answer with the higher
    reward, sigmoid(|r_c - r_r|). Bins have equal numbers of pairs; the error is the sum over bins of
    |sum of (won - confidence) over the pairs of a bin| / N.
    """
    confidence_N = 1 / (1 + np.exp(-np.abs(margin_N)))
    edges = np.quantile(confidence_N, np.arange(1, NUM_BINS) / NUM_BINS, method="inverted_cdf")
    bin_N = np.searchsorted(edges, confidence_N, side="left")
    excess_NB = np.where(bin_N[:, None] == np.arange(NUM_BINS), (won_N - confidence_N)[:, None], 0.0)
    return figure_of_size(np.abs(means(excess_NB, np.ones(len(won_N)), example_N)).sum(axis=1))
