"""Kernels of flash-linear-attention (the package `fla`), and why they cannot be used here."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from packaging.version import Version

HOPPER = 9  # major compute capability
# Triton miscompiles a backward kernel for Hopper cards, so the package refuses to run it
# (github.com/fla-org/flash-linear-attention/issues/640): from the first of these versions, before the second.
MISCOMPILED = Version("3.4"), Version("3.7.1")


class Kernel(NamedTuple):
    """A function of the package; or None, and why."""

    run: Any
    fault: str = ""
    way_out: str = ""
    refuses: bool = False  # installed, but not for this card


@cache
def load(module: str, name: str, *, has_tiles: bool) -> Kernel:
    """The function `name` of fla.ops.`module`. `has_tiles`: TileLang has a version of its backward kernel."""
    if find_spec("fla") is None:
        return Kernel(None, "flash-linear-attention is not installed", "pip install 'isopref[linear]'")
    if _is_miscompiled() and not (has_tiles and find_spec("tilelang") is not None):
        fault = f"flash-linear-attention refuses Hopper GPUs with Triton {version('triton')}"
        newer = f"use Triton {MISCOMPILED[1]} or newer"
        return Kernel(None, fault, f"pip install tilelang, or {newer}" if has_tiles else newer, refuses=True)
    return Kernel(getattr(import_module(f"fla.ops.{module}"), name))


def _is_miscompiled() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    try:
        triton = Version(version("triton"))
    except PackageNotFoundError:
        return False
    return MISCOMPILED[0] <= triton < MISCOMPILED[1]
