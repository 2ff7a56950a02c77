"""Keeps libraries from printing between our lines. Imports nothing heavy: it runs before they are imported."""

import logging
import os


def quiet_engine() -> None:
    """Keep the engine's log and the progress bars of libraries off the terminal."""
    # The engine logs before the run has its log file, and prints if the root logger has no handler.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("olmo_core").setLevel(logging.INFO)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns about enums in torchao 0.18
    os.environ.setdefault("TQDM_DISABLE", "1")  # we show our own progress bars
