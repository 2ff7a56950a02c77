"""Evaluation on held-out examples: what the log-probabilities of policy and reference say of them.

Pure arithmetic on scored tables; the scoring itself is score.py's. pairs.py has what is known of every comparison,
lists.py the figures of lists, losses.py the loss, intervals.py how certain a figure is; evaluation.py puts them
together.
"""

from isopref.evaluate.evaluation import Evaluation, evaluate, source_labels
from isopref.evaluate.intervals import Figure
from isopref.evaluate.pairs import rewards

__all__ = ["Evaluation", "Figure", "evaluate", "rewards", "source_labels"]
