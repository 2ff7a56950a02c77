"""Metrics of held-out examples, from the log-probabilities of policy and reference.

Pure arithmetic on scored tables; score.py does the scoring. pairs.py computes what is known about each comparison,
lists.py the metrics of lists, labels.py those of labelled answers, calibration.py the calibration of reward models,
losses.py the loss and intervals.py the intervals; evaluation.py combines them. win_rate.py compares two models.
"""

from isopref.evaluate.evaluation import Evaluation, evaluate, source_labels
from isopref.evaluate.intervals import Figure
from isopref.evaluate.pairs import rewards

__all__ = ["Evaluation", "Figure", "evaluate", "rewards", "source_labels"]
