"""Preference tuning of language models: the global batch defines the math, the layout never changes it.

The names below are imported when they are first used, so that `import isopref` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isopref.threads import limit_spinning

if TYPE_CHECKING:
    from isopref.batch.packing import Budget
    from isopref.data.table import ExampleTable
    from isopref.engine.loader import ExampleLoader
    from isopref.engine.moving import MovingReference
    from isopref.engine.padded import DataCollatorForSeq2SeqDPO, split_batch_dpo
    from isopref.engine.train_module import DPOTrainModule
    from isopref.examples import Example, PairTokens
    from isopref.models.parallel import parallelize
    from isopref.models.policy import Policy
    from isopref.objectives.loss import pair_loss
    from isopref.score import TableLogps, score_table
    from isopref.script import train

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "DPOTrainModule",
    "DataCollatorForSeq2SeqDPO",
    "Example",
    "ExampleLoader",
    "ExampleTable",
    "MovingReference",
    "PairTokens",
    "Policy",
    "TableLogps",
    "pair_loss",
    "parallelize",
    "score_table",
    "split_batch_dpo",
    "train",
]

_HOME = {
    "Budget": "batch.packing",
    "DPOTrainModule": "engine.train_module",
    "DataCollatorForSeq2SeqDPO": "engine.padded",
    "MovingReference": "engine.moving",
    "ExampleLoader": "engine.loader",
    "ExampleTable": "data.table",
    "Example": "examples",
    "PairTokens": "examples",
    "Policy": "models.policy",
    "TableLogps": "score",
    "pair_loss": "objectives.loss",
    "parallelize": "models.parallel",
    "score_table": "score",
    "split_batch_dpo": "engine.padded",
    "train": "script",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'isopref' has no attribute '{name}'")
    limit_spinning()
    return getattr(import_module(f"isopref.{_HOME[name]}"), name)
