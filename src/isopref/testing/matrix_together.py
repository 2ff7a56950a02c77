"""The cells of the matrix in which ranks work on the same pairs: they compute layers together, or split rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from isopref.testing.cells import FLOAT32_INSIDE, MOE, NATIVE, PACKED, SPLIT_KINDS, STATES, WEIGHTINGS, Cell, Cut


def tensor(base: Cell) -> Iterator[Cell]:
    """Layers computed by two ranks together, with the batch on one or on two such groups."""
    for n, architecture in enumerate(NATIVE):
        model = replace(base, architecture=architecture, dtype="float32", native=True, tensor_parallel=2)
        yield replace(model, rows="packed" if n % 2 else "shared")
        yield replace(model, cut="pair", grad_sync="every", checkpointing=True, weighting="example", own_weights=True)
        yield replace(model, num_pairs=3, nll_weight=0.7)
        yield replace(model, trees=True)
    llama = replace(base, architecture="llama", dtype="float32", native=True, tensor_parallel=2)
    yield replace(llama, objective="aot", cut="pair")
    yield replace(llama, ld_alpha=0.4, wpo=True)
    yield replace(llama, checkpointing=True, offload_activations=True)


def split_rows(base: Cell) -> Iterator[Cell]:
    """Rows split over ranks: both kinds of packed rows, every denominator, every kind of layer that mixes tokens."""
    sizes = [size for size in (2, 4) if base.ranks % size == 0]
    for n, rows in enumerate(PACKED):
        kind = replace(base, rows=rows, context_parallel=sizes[n % len(sizes)])
        for turn, cut in enumerate(get_args(Cut)):
            yield replace(kind, cut=cut, weighting=WEIGHTINGS[(n + turn) % 3], own_weights=turn == 1)
        yield replace(kind, nll_weight=0.7, ld_alpha=0.4, wpo=True, grad_sync="every", num_pairs=3)
        yield replace(kind, checkpointing=True, offload_activations=True, mlp_tile_tokens=7, trees=True)
        yield replace(kind, context="weights", trees=True, cut="pair")
        yield replace(kind, objective="aot", cut="pair")
        yield replace(kind, objective="lipo", trees=True, at_start=True)
        yield replace(kind, objective="bradley_terry", trees=True)
        yield replace(kind, objective=("kto", "bco")[n], trees=True, nll_weight=0.7)
        yield replace(kind, adapter="lora", grad_sync="every", cut="pair")
        if base.ranks > 2:
            yield replace(kind, context_parallel=2, split="idle")
        if base.parallel in ("fsdp", "hsdp"):
            yield replace(kind, offload=True)
    if (base.parallel, base.ranks) == ("hsdp", 4):
        model = replace(base, dtype="float32", context_parallel=2, grad_sync="every", cut="pair")
        for architecture in STATES:
            yield replace(model, architecture=architecture, trees=True)
        for architecture in NATIVE:
            yield replace(model, architecture=architecture, native=True)
    for n, size in enumerate(sizes if base.parallel == "fsdp" else []):
        model = replace(base, dtype="float32", context_parallel=size)
        for architecture in (*FLOAT32_INSIDE, *SPLIT_KINDS):
            yield replace(model, architecture=architecture, rows=PACKED[n], trees=True, checkpointing=True)
        for architecture in NATIVE:
            yield replace(model, architecture=architecture, native=True, rows=PACKED[n], checkpointing=n == 1)
        yield replace(model, architecture=MOE, balance_weight=20.0, trees=True)
        yield replace(model, architecture="llama", adapter="lora", quantize=True)
        yield replace(model, architecture="llama", float8=True)
