"""Keeps libraries from writing between our lines. Imports nothing heavy: it comes before what it keeps quiet."""

import logging
import os


def quiet_engine() -> None:
    """Keep the engine's log off the terminal, and bars of libraries."""
    # The engine logs before the run has its log file, and prints where the root logger has no handler.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("olmo_core").setLevel(logging.INFO)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of enums in torchao 0.18, once it is imported
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries; ours say what a run does
