"""Which cells are measured, and their bounds. The tests and docs/exactness.md (exactness_page.py) share them."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from isopref.models.adapter import Kind
from isopref.normalize import Weighting
from isopref.testing.cells import FLOAT32_INSIDE, KINDS, LAYER_KINDS, MOE, NATIVE, WEIGHTINGS, Cell, Cut
from isopref.testing.equations import ALL_CASES, LABEL_CASES
from isopref.testing.list_equations import LIST_CASES
from isopref.testing.matrix_together import split_rows, tensor

# The largest relative error allowed for the gradient, by the precision a model computes in. The bound for float32 holds
# for the batch of exactness.py, not for any batch: of 13 others with answers of the same length, 6 exceeded it, by a
# factor of 2 at most. A sum of 200 nats rounds by 2e-5 in float32, in the oracle too; in float64 the same batches agree
# to 1e-7 in gradients and 1e-13 in metrics. In float8, a difference of 1e-7 before a product can change its input by
# 6e-2; and the gradient of a shared prompt is rounded once, but once per sequence if sequences are separate.
BOUNDS = {"float64 throughout": 1e-10, "float32 inside": 1e-6, "float32": 1e-5, "float8 products": 1e-1}
SPREADS: dict[int, tuple[str, ...]] = {1: ("single",), 2: ("ddp", "fsdp", "hsdp"), 4: ("ddp", "fsdp", "hsdp")}


def bound(cell: Cell) -> float:
    """The largest gradient error allowed for a cell."""
    return BOUNDS[precision(cell)]


def value_bound(cell: Cell) -> float:
    """The largest error allowed for loss and metrics. Only the backward pass rounds sums over tokens to float8."""
    return BOUNDS["float32"] if cell.float8 else bound(cell)


def precision(cell: Cell) -> str:
    if cell.float8:
        return "float8 products"
    if cell.dtype == "float32":
        return "float32"
    return "float64 throughout" if cell.architecture == "gpt2" else "float32 inside"


def thinned(ranks: int) -> list[Cell]:
    """The cells that `make test` measures on this many ranks; `make exactness` measures all of them.

    On several ranks, DDP, FSDP and HSDP take turns: each layout runs in one of them, chosen by its digest. All three
    run every objective, and on two ranks every layout of GPT-2 in float64, which has the tightest bound.
    """
    every = cells(ranks)
    modes: dict[Cell, list[Cell]] = {}
    for cell in every:
        modes.setdefault(replace(cell, parallel="single"), []).append(cell)
    kept: set[Cell] = set()
    for layout, choice in modes.items():
        digest = hashlib.blake2b(str(layout).encode(), digest_size=8).digest()
        kept.add(choice[int.from_bytes(digest, "little") % len(choice)])
    for parallel in SPREADS[ranks]:
        kept.update(_objectives(Cell(ranks=ranks, parallel=parallel)))  # type: ignore[arg-type]
    return [cell for cell in every if cell in kept or (ranks == 2 and precision(cell) == "float64 throughout")]


def cells(ranks: int) -> list[Cell]:
    """Every cell that is measured on this many ranks."""
    found: dict[Cell, None] = {}
    for parallel in SPREADS[ranks]:
        base = Cell(ranks=ranks, parallel=parallel)  # type: ignore[arg-type]
        found.update(dict.fromkeys(_full(base)))
        found.update(dict.fromkeys(_one_by_one(base)))
        found.update(dict.fromkeys(_trees(base)))
        found.update(dict.fromkeys(_context(base)))
        found.update(dict.fromkeys(_collated(base)))
        found.update(dict.fromkeys(_architectures(base)))
        found.update(dict.fromkeys(_layer_kinds(base)))
        found.update(dict.fromkeys(_native(base)))
        if parallel == "fsdp" or (parallel, ranks) == ("hsdp", 4):
            found.update(dict.fromkeys(tensor(base)))
        if ranks > 1:
            found.update(dict.fromkeys(split_rows(base)))
        found.update(dict.fromkeys(_long_rows(base)))
        found.update(dict.fromkeys(_objectives(base)))
        found.update(dict.fromkeys(_labels(base)))
        found.update(dict.fromkeys(_rewards(base)))
        found.update(dict.fromkeys(_adapters(base)))
        found.update(dict.fromkeys(_float8(base)))
    return list(found)


def _full(base: Cell) -> Iterator[Cell]:
    """GPT-2 in float64: every kind of row with every cut and weighting."""
    for rows in KINDS:
        for cut in ("pair", "tokens", "whole"):
            for weighting in ("token", "completion", "example"):
                yield replace(base, rows=rows, cut=cut, weighting=weighting)


def _one_by_one(base: Cell) -> Iterator[Cell]:
    """Every other field of a layout, one at a time, with every kind of row."""
    for rows in KINDS:
        kind = replace(base, rows=rows)
        yield replace(kind, reverse=True)
        yield replace(kind, own_weights=True)
        yield replace(kind, own_weights=True, weighting="example")
        yield replace(kind, own_weights=True, weighting="gap")
        yield replace(kind, nll_weight=0.7, cut="pair")
        yield replace(kind, nll_weight=0.7, own_weights=True, weighting="example")
        yield replace(kind, ld_alpha=0.4, nll_weight=0.7)
        yield replace(kind, wpo=True, cut="pair", own_weights=True)
        yield replace(kind, checkpointing=True)
        yield replace(kind, grad_sync="every", cut="pair")
        yield replace(kind, num_pairs=3)  # a short last batch; on four ranks, fewer pairs than ranks
        if base.ranks > 1:
            yield replace(kind, split="uneven")
            yield replace(kind, split="uneven", nll_weight=0.7)
            yield replace(kind, split="idle")
        if base.parallel in ("fsdp", "hsdp"):
            yield replace(kind, offload=True)


def _trees(base: Cell) -> Iterator[Cell]:
    """Examples of one to eight answers: every kind of row and cut, and all settings that depend on comparisons."""
    trees = replace(base, trees=True)
    cuts: tuple[Cut, ...] = get_args(Cut)
    for n, rows in enumerate(KINDS):
        kind = replace(trees, rows=rows)
        for turn, cut in enumerate(cuts):
            yield replace(kind, cut=cut, weighting=WEIGHTINGS[(n + turn) % len(WEIGHTINGS)], own_weights=turn == 1)
        yield replace(kind, ld_alpha=0.4, wpo=True, nll_weight=0.7, own_weights=True)
        yield replace(kind, objective="aot", cut="pair")
        yield replace(kind, objective="odpo", weighting="gap", cut="pair", own_weights=True)
        yield replace(kind, architecture="mistral", checkpointing=True)  # with a sliding window
        for objective in LIST_CASES:
            yield replace(kind, objective=objective, cut="pair", at_start=True)
        if base.ranks > 1:
            yield replace(kind, split="uneven", nll_weight=0.7)
            yield replace(kind, split="idle")
    yield replace(trees, architecture=MOE, dtype="float32", balance_weight=20.0)
    yield replace(trees, architecture="llama", dtype="float32", native=True)
    yield replace(trees, adapter="lora", grad_sync="every", cut="pair")
    for dtype in ("float64", "float32"):
        yield replace(trees, architecture="llama", dtype=dtype, objective="lipo", at_start=True)


def _context(base: Cell) -> Iterator[Cell]:
    """Answers with untrained turns: every kind of row, cut and weighting, and all settings that depend on tokens."""
    weightings: tuple[Weighting, ...] = get_args(Weighting)
    cuts: tuple[Cut, ...] = get_args(Cut)
    for n, rows in enumerate(KINDS):
        kind = replace(base, rows=rows, context="weights")
        for turn, cut in enumerate(cuts):
            for weighting in weightings if base.ranks == 1 else [weightings[(n + turn) % len(weightings)]]:
                yield replace(kind, cut=cut, weighting=weighting)
        yield replace(kind, context="turns", objective="simpo", cut="pair")
        yield replace(kind, nll_weight=0.7, ld_alpha=0.4, wpo=True, own_weights=True)
        yield replace(kind, trees=True, cut=cuts[n % len(cuts)])
        yield replace(kind, trees=True, objective=list(LIST_CASES)[n % len(LIST_CASES)], weighting="completion")
        if base.ranks > 1:
            yield replace(kind, split="uneven", nll_weight=0.7)
            yield replace(kind, split="idle", context="turns")
    yield replace(base, context="weights", architecture="mistral", checkpointing=True, trees=True)
    yield replace(base, context="turns", architecture=MOE, dtype="float32", balance_weight=20.0)
    yield replace(base, context="weights", architecture="llama", dtype="float32", native=True)
    for cut in cuts:
        yield replace(base, rows="padded", collated=True, context="turns", cut=cut, nll_weight=0.7)
    yield replace(base, rows="padded", collated=True, context="turns", weighting="completion", own_weights=True)


def _collated(base: Cell) -> Iterator[Cell]:
    """Batches of a script's collator: every cut and weighting, with everything that has its own denominator."""
    script = replace(base, rows="padded", collated=True)
    for cut in ("pair", "tokens", "whole"):
        for weighting in ("token", "completion", "example"):
            yield replace(script, cut=cut, weighting=weighting, nll_weight=0.7, own_weights=True)
    yield script
    yield replace(script, nll_weight=0.7)
    yield replace(script, own_weights=True)
    yield replace(script, num_pairs=3, nll_weight=0.7, own_weights=True)
    yield replace(script, objective="aot", own_weights=True)
    yield replace(script, ld_alpha=0.4, wpo=True, nll_weight=0.7, own_weights=True)
    if base.ranks > 1:
        yield replace(script, split="uneven", nll_weight=0.7, own_weights=True)
        yield replace(script, split="idle", nll_weight=0.7, own_weights=True)


def _architectures(base: Cell) -> Iterator[Cell]:
    """Other models and float32: every kind of row, with three settings of the other fields.

    With HSDP and on four ranks, the kinds of rows take turns.
    """
    models = [
        *((name, "float64") for name in FLOAT32_INSIDE),
        *((name, "float32") for name in ("gpt2", *FLOAT32_INSIDE, MOE)),
    ]
    in_turns = base.ranks == 4 or base.parallel == "hsdp"
    for n, (architecture, dtype) in enumerate(models):
        model = replace(base, architecture=architecture, dtype=dtype)
        settings = [
            model,
            replace(model, cut="pair", weighting="example", own_weights=True, grad_sync="every"),
            replace(model, cut="whole", weighting="completion", checkpointing=True, num_pairs=3),
        ]
        if architecture == MOE:
            settings.append(replace(model, balance_weight=20.0))
            settings.append(replace(settings[-1], cut="pair", objective="aot", checkpointing=True))
        for turn, cell in enumerate(settings):
            for rows in [KINDS[(n + turn) % len(KINDS)]] if in_turns else KINDS:
                yield replace(cell, rows=rows)


def _layer_kinds(base: Cell) -> Iterator[Cell]:
    """Other kinds of layers: pairs, and trees with recomputed layers, in every kind of row (on ranks, in turns)."""
    for n, architecture in enumerate(LAYER_KINDS):
        model = replace(base, architecture=architecture, dtype="float32")
        for rows in KINDS if base.ranks == 1 else [KINDS[n % 2]]:
            yield replace(model, rows=rows)
            yield replace(model, rows=rows, trees=True, cut="tokens", checkpointing=True)
        yield replace(model, cut="pair", weighting="example", own_weights=True, grad_sync="every", num_pairs=3)


def _native(base: Cell) -> Iterator[Cell]:
    """OLMo-core's own models: every kind of row, recomputed layers, gradients reduced after every microbatch."""
    for n, architecture in enumerate(NATIVE):
        model = replace(base, architecture=architecture, dtype="float32", native=True)
        for rows in KINDS if base.ranks == 1 else [KINDS[n % len(KINDS)], KINDS[(n + 2) % len(KINDS)]]:
            yield replace(model, rows=rows)
        yield replace(model, checkpointing=True, weighting="example", own_weights=True)
        yield replace(model, cut="pair", grad_sync="every", num_pairs=3)


def _long_rows(base: Cell) -> Iterator[Cell]:
    """Measures for long rows: MLPs in tiles, smaller than any row and not dividing it, and offloaded checkpoints."""
    offloaded = replace(base, checkpointing=True, offload_activations=True)
    for n, rows in enumerate(KINDS):
        yield replace(base, rows=rows, mlp_tile_tokens=7)
        yield replace(offloaded, rows=rows, cut=("pair", "tokens", "whole")[n % 3])
        yield replace(offloaded, rows=rows, mlp_tile_tokens=7, trees=True, nll_weight=0.7, own_weights=True)
    both = replace(offloaded, mlp_tile_tokens=7)
    yield replace(both, cut="pair", grad_sync="every", num_pairs=3)
    yield replace(both, architecture="llama")
    yield replace(both, architecture=MOE, dtype="float32", trees=True)
    yield replace(both, architecture="gpt_oss", dtype="float32")
    yield replace(both, architecture="olmo_hybrid", dtype="float32")
    yield replace(both, architecture="llama", dtype="float32", native=True)
    yield replace(both, adapter="lora", cut="pair", grad_sync="every")
    yield replace(both, adapter="lora", quantize=True, architecture="llama", dtype="float32")
    yield replace(both, objective="bradley_terry", trees=True)
    yield replace(both, objective="aot", cut="pair")
    if base.ranks > 1:
        yield replace(both, split="idle")
        yield replace(both, split="uneven")
    if base.parallel in ("fsdp", "hsdp"):
        yield replace(both, offload=True)


def _objectives(base: Cell) -> Iterator[Cell]:
    """Every objective in three layouts, on several ranks in one; kinds of rows, cuts and weightings take turns."""
    cuts: tuple[Cut, ...] = get_args(Cut)
    for n, objective in enumerate(ALL_CASES):
        trees = objective in LIST_CASES or objective in LABEL_CASES
        for turn in range(3) if base.ranks == 1 else [n % 3]:
            yield replace(
                base,
                objective=objective,
                trees=trees,
                rows=KINDS[(n + turn) % len(KINDS)],
                cut=cuts[turn],
                weighting=WEIGHTINGS[(n + turn) % len(WEIGHTINGS)],
                split="uneven" if base.ranks > 1 and turn == 2 else "plan",
            )


def _labels(base: Cell) -> Iterator[Cell]:
    """Losses of labels, on pairs and on labelled answers: every kind of row and cut, and every denominator."""
    cuts: tuple[Cut, ...] = get_args(Cut)
    weightings: tuple[Weighting, ...] = get_args(Weighting)
    for n, (objective, rows) in enumerate(product(("kto", "bco"), KINDS)):
        cell = replace(base, objective=objective, rows=rows)
        for turn, cut in enumerate(cuts if base.ranks == 1 else [cuts[n % 3]]):
            weighting = weightings[(n + turn) % 3]
            yield replace(cell, cut=cut, weighting=weighting, trees=True, own_weights=turn == 1)
            yield replace(cell, cut=cut, weighting=weighting, nll_weight=0.7, own_weights=turn != 1)
        if base.ranks > 1:
            yield replace(cell, split="uneven", trees=True)
            yield replace(cell, split="idle", own_weights=True)
    for objective in ("kto", "bco"):
        trees = replace(base, objective=objective, trees=True)
        yield replace(trees, adapter="lora", grad_sync="every", cut="pair")
        yield replace(trees, architecture=MOE, dtype="float32", balance_weight=20.0)
        yield replace(trees, architecture="llama", dtype="float32", native=True, checkpointing=True)


def _adapters(base: Cell) -> Iterator[Cell]:
    """LoRA with every kind of row and every cut (in turns on four ranks), and once with every other layout field."""
    lora = replace(base, adapter="lora")
    cuts: tuple[Cut, ...] = get_args(Cut)
    for n, rows in enumerate(KINDS):
        for cut in cuts if base.ranks < 4 else [cuts[n % 3]]:
            yield replace(lora, rows=rows, cut=cut)
    yield replace(lora, checkpointing=True)
    yield replace(lora, cut="pair", grad_sync="every", weighting="example")
    yield replace(lora, architecture="llama")
    for kind in get_args(Kind):
        yield replace(lora, adapter=kind, architecture="llama", dtype="float32", num_pairs=3)
    yield replace(lora, quantize=True, architecture="llama", dtype="float32")
    if base.ranks > 1:
        yield replace(lora, split="uneven")
        yield replace(lora, split="idle")


def _float8(base: Cell) -> Iterator[Cell]:
    """Linear layers in float8: every kind of row and cut (in turns on ranks); adapters, trees, recomputed layers."""
    model = replace(base, architecture="llama", dtype="float32", float8=True)
    cuts: tuple[Cut, ...] = get_args(Cut)
    for n, rows in enumerate(KINDS):
        for cut in cuts if base.ranks == 1 else [cuts[n % 3]]:
            yield replace(model, rows=rows, cut=cut)
    yield replace(model, checkpointing=True, weighting="example", own_weights=True)
    yield replace(model, trees=True, cut="pair", grad_sync="every")
    yield replace(model, adapter="lora", num_pairs=3)
    yield replace(model, architecture=MOE, num_pairs=3)


def _rewards(base: Cell) -> Iterator[Cell]:
    """Reward models: every kind of row with every cut and weighting (in turns on several ranks), pairs and trees."""
    cuts: tuple[Cut, ...] = get_args(Cut)
    weightings: tuple[Weighting, ...] = get_args(Weighting)
    pairs = replace(base, objective="bradley_terry")
    for n, rows in enumerate(KINDS):
        for turn, cut in enumerate(cuts):
            turns = weightings if base.ranks == 1 else [weightings[(n + turn) % 3]]
            for weighting in turns:
                yield replace(pairs, rows=rows, cut=cut, weighting=weighting)
            yield replace(pairs, trees=True, rows=rows, cut=cut, weighting=weightings[(n + turn) % 3], own_weights=True)
        yield replace(pairs, objective="plackett_luce_reward", trees=True, rows=rows, cut=cuts[n % 3])
        yield replace(pairs, objective="bradley_terry_margin", trees=True, rows=rows, cut=cuts[n % 3])
        if base.ranks > 1:
            yield replace(pairs, rows=rows, split="uneven", grad_sync="every")
            yield replace(pairs, trees=True, rows=rows, split="idle")
    trees = replace(pairs, trees=True)
    yield replace(trees, checkpointing=True, reverse=True)
    yield replace(pairs, rows="padded", collated=True, own_weights=True)
    yield replace(trees, adapter="lora", grad_sync="every", cut="pair")
    yield replace(trees, adapter="lora", quantize=True, architecture="llama", dtype="float32")
    yield replace(trees, architecture=MOE, dtype="float32", balance_weight=20.0)
    for n, architecture in enumerate(FLOAT32_INSIDE):
        yield replace(trees, architecture=architecture, rows=KINDS[n % len(KINDS)])
    if base.parallel in ("fsdp", "hsdp"):
        yield replace(trees, offload=True)
