"""Kernels of flash-linear-attention (the package `fla`), and why they cannot be used here."""

from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A function of the package; or None, and why."""

    run: Any
    fault: str = ""
    way_out: str = ""
    refuses: bool = False  # installed, but not for this card


@cache
def load(module: str, name: str, *, has_tiles: bool) -> Kernel:
    """The function `name` of fla.ops.`module`, for the current CUDA card.

    `has_tiles`: if Triton miscompiles the backward pass, TileLang's version of it can be used. It needs a compiler.
    """
    if find_spec("fla") is None:
        return Kernel(None, "flash-linear-attention is not installed", "pip install 'isopref[linear]'")
    about = import_module("fla.utils")
    # The condition under which the package's backward pass raises an error (its issue 640).
    miscompiled = about.IS_NVIDIA_HOPPER and about.TRITON_ABOVE_3_4_0 and not about.TRITON_ABOVE_3_7_1
    if miscompiled and not (has_tiles and find_spec("tilelang") is not None and about.has_usable_nvcc()):
        fault = f"flash-linear-attention refuses Hopper GPUs with Triton {version('triton')}"
        newer = "upgrade Triton to 3.7.1 or newer"
        way_out = f"install tilelang (with pip) and CUDA's nvcc, or {newer}" if has_tiles else newer
        return Kernel(None, fault, way_out, refuses=True)
    return Kernel(getattr(import_module(f"fla.ops.{module}"), name))
