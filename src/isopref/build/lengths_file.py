"""Lengths of pairs from a file, for a plan without data."""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from isopref.errors import DataError
from isopref.examples import Lengths


def read_lengths(path: Path) -> Lengths:
    """Lengths from a .npy file: one row per pair with the tokens of prompt, chosen and rejected. Raises DataError."""
    try:
        lengths = np.load(path)
        if not isinstance(lengths, np.ndarray):
            raise ValueError("an archive of arrays")
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(f"--lengths {path}: cannot be read ({error}). Pass a .npy file with three columns.") from error
    right = lengths.ndim == 2 and lengths.shape[1:] == (3,) and len(lengths) > 0
    if not right or not np.issubdtype(lengths.dtype, np.integer) or lengths.min() < 1:
        raise DataError(
            f"--lengths {path}: expected positive whole numbers in three columns (tokens of prompt, chosen and "
            f"rejected), found {lengths.dtype} of shape {lengths.shape}."
        )
    return Lengths.of_pairs(lengths)
