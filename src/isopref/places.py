"""Where isopref keeps what it may need again. Everything there can be computed anew."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for what is kept between runs: ISOPREF_CACHE, or ~/.cache/isopref."""
    return Path(os.environ.get("ISOPREF_CACHE") or Path.home() / ".cache" / "isopref")


def reference_folder() -> Path:
    """Where the stores of reference log-probabilities are, one folder for each."""
    return cache_folder() / "reference"
