"""Which layouts are measured, and the table they make: `python -m isopref.testing.matrix docs/exactness.md`.

The tests run the same cells and hold them to BOUNDS.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

from isopref.models.adapter import Kind
from isopref.normalize import Weighting
from isopref.testing.equations import ALL_CASES, LABEL_CASES, LIST_CASES
from isopref.testing.exactness import KINDS, Cell, Cut, Found, measure
from isopref.testing.ranks import Ranks

# Largest relative error of the gradient, by how a model computes. That of float32 is for the batch of exactness.py, not
# for any batch: of 13 others with answers as long, 6 exceeded it, by a factor of 2 at most. A sum of 200 nats rounds by
# 2e-5 there, in the oracle too; the same batches in float64 agree to 1e-7 in gradients and 1e-13 in metrics.
BOUNDS = {"float64 throughout": 1e-10, "float32 inside": 1e-6, "float32": 1e-5}
FLOAT32_INSIDE = ("llama", "qwen3", "olmo2", "olmo3", "mistral", "gemma3")
NATIVE = ("llama", "qwen3", "olmo2", "olmo3", "gemma3")
MOE = "qwen3_moe"
WEIGHTINGS: tuple[Weighting, ...] = ("token", "completion", "example")  # of pairs and lists alike
# One model for each kind of layer beyond plain attention: sinks, Gated DeltaNet, short convolutions, Mamba2; and one
# whose layers are not handed the segments.
LAYER_KINDS = ("gpt_oss", "olmo_hybrid", "lfm2", "bamba", "stablelm")
CHUNK = 40  # cells a rank measures before it answers
SPREADS: dict[int, tuple[str, ...]] = {1: ("single",), 2: ("ddp", "fsdp", "hsdp"), 4: ("ddp", "fsdp", "hsdp")}


def bound(cell: Cell) -> float:
    """What the cell's gradient error may be."""
    return BOUNDS[precision(cell)]


def precision(cell: Cell) -> str:
    if cell.dtype == "float32":
        return "float32"
    return "float64 throughout" if cell.architecture == "gpt2" else "float32 inside"


def cells(ranks: int) -> list[Cell]:
    """Every cell that is measured on so many ranks."""
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
            found.update(dict.fromkeys(_tensor(base)))
        found.update(dict.fromkeys(_objectives(base)))
        found.update(dict.fromkeys(_labels(base)))
        found.update(dict.fromkeys(_rewards(base)))
        found.update(dict.fromkeys(_adapters(base)))
    return list(found)


def _full(base: Cell) -> Iterator[Cell]:
    """GPT-2 in float64: every kind of row with every cut and weighting."""
    for rows in KINDS:
        for cut in ("pair", "tokens", "whole"):
            for weighting in ("token", "completion", "example"):
                yield replace(base, rows=rows, cut=cut, weighting=weighting)


def _one_by_one(base: Cell) -> Iterator[Cell]:
    """Everything else a layout can be, each beside every kind of row."""
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
        yield replace(kind, num_pairs=3)  # a short last batch; fewer pairs than ranks on four
        if base.ranks > 1:
            yield replace(kind, split="uneven")
            yield replace(kind, split="uneven", nll_weight=0.7)
            yield replace(kind, split="idle")
        if base.parallel in ("fsdp", "hsdp"):
            yield replace(kind, offload=True)


def _trees(base: Cell) -> Iterator[Cell]:
    """Examples of one to eight answers: every kind of row and every cut, and whatever follows comparisons."""
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
    """Answers with turns that are not trained: every kind of row, cut and weighting, and whatever counts tokens."""
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
    """Batches of a script's collator: every cut and weighting, with whatever has a denominator of its own."""
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
    """Other models and float32: every kind of row, three settings of all the rest. HSDP and four ranks take turns."""
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
    """Other kinds of layers: pairs, and trees with recomputed layers, in every kind of row (in turns on ranks)."""
    for n, architecture in enumerate(LAYER_KINDS):
        model = replace(base, architecture=architecture, dtype="float32")
        for rows in KINDS if base.ranks == 1 else [KINDS[n % 2]]:
            yield replace(model, rows=rows)
            yield replace(model, rows=rows, trees=True, cut="tokens", checkpointing=True)
        yield replace(model, cut="pair", weighting="example", own_weights=True, grad_sync="every", num_pairs=3)


def _native(base: Cell) -> Iterator[Cell]:
    """OLMo-core's own models: every kind of row, with recomputed layers, with gradients reduced every time."""
    for n, architecture in enumerate(NATIVE):
        model = replace(base, architecture=architecture, dtype="float32", native=True)
        for rows in KINDS if base.ranks == 1 else [KINDS[n % len(KINDS)], KINDS[(n + 2) % len(KINDS)]]:
            yield replace(model, rows=rows)
        yield replace(model, checkpointing=True, weighting="example", own_weights=True)
        yield replace(model, cut="pair", grad_sync="every", num_pairs=3)


def _tensor(base: Cell) -> Iterator[Cell]:
    """Layers computed by two ranks together, with one and with two parts of data."""
    for n, architecture in enumerate(NATIVE):
        model = replace(base, architecture=architecture, dtype="float32", native=True, tensor_parallel=2)
        yield replace(model, rows="packed" if n % 2 else "shared")
        yield replace(model, cut="pair", grad_sync="every", checkpointing=True, weighting="example", own_weights=True)
        yield replace(model, num_pairs=3, nll_weight=0.7)
        yield replace(model, trees=True)
    llama = replace(base, architecture="llama", dtype="float32", native=True, tensor_parallel=2)
    yield replace(llama, objective="aot", cut="pair")
    yield replace(llama, ld_alpha=0.4, wpo=True)


def _objectives(base: Cell) -> Iterator[Cell]:
    """Every objective in three layouts, in one on several ranks; kinds of rows, cuts and weightings take turns."""
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
    """Losses of labels, on pairs and on labelled answers: every kind of row and cut, and whatever has a denominator."""
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
    """LoRA with every kind of row and every cut (on four ranks they take turns); all else a layout can be once."""
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


def run(ranks: int, parallel: str, group: Ranks | None = None) -> dict[Cell, Found]:
    """Measure the cells of so many ranks and one parallel mode, on the ranks given or in this process.

    Raises RankError, also where a rank crashes.
    """
    wanted = [cell for cell in cells(ranks) if cell.parallel == parallel]
    found: list[Found] = []
    for start in range(0, len(wanted), CHUNK):
        some = wanted[start : start + CHUNK]
        found += _measure_all(some) if group is None else group(_measure_all, some)[0]
    return dict(zip(wanted, found, strict=True))


def _measure_all(wanted: list[Cell]) -> list[Found]:
    return [measure(cell) for cell in wanted]


def group(cell: Cell) -> tuple[str, str, int, str]:
    """The line of the table that a cell counts in: precision, model, ranks and parallel mode."""
    name = f"{cell.architecture} in OLMo-core" if cell.native else cell.architecture
    mode = f"{cell.parallel} x tensor {cell.tensor_parallel}" if cell.tensor_parallel > 1 else cell.parallel
    return precision(cell), name, cell.ranks, mode


def table(found: dict[Cell, Found]) -> str:
    """Markdown: the largest errors by precision, architecture, ranks and parallel mode."""
    groups: dict[tuple[str, str, int, str], list[Found]] = {}
    for cell, result in found.items():
        groups.setdefault(group(cell), []).append(result)
    lines = [
        "| computes in | model | ranks | parallel | runs | gradient | loss | metrics | bound |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (kind, name, ranks, mode), results in sorted(groups.items(), key=lambda item: _order(item[0])):
        worst = (max(getattr(r, error) for r in results) for error in ("gradient_error", "loss_error", "metric_error"))
        errors = " | ".join(f"{value:.1e}" for value in worst)
        lines.append(f"| {kind} | {name} | {ranks} | {mode} | {len(results)} | {errors} | {BOUNDS[kind]:.0e} |")
    return "\n".join(lines)


def _order(key: tuple[str, str, int, str]) -> tuple[int, str, int, str]:
    return (list(BOUNDS).index(key[0]), *key[1:])


PAGE = """# Exactness

The global batch defines the math; the layout never changes it. This page is that promise, measured. It is written by
`make exactness`; do not edit it.

One global batch of eight pairs (three for the short batch) goes through the train module {count} times: packed
rows with and without a shared prompt, padded batches in one forward and in two; cut into single pairs, by tokens, not
at all; a batch of examples with one to eight answers likewise, nested beginnings and prompts in common included; on
1, 2 and 4 ranks under DDP, FSDP2 and HSDP; split evenly, three pairs against the rest, with an idle rank;
gradients reduced at the end or after every microbatch; shards on the device or offloaded; activations kept or
recomputed; pairs in order and in reverse; answers with turns of context that are not trained, and with turns of any
weight; weighted by token, completion, example and the gap between scores, with and without weights of their own; every
objective in some of these layouts, also those that couple a batch; reward models in all kinds of rows; the likelihood
of chosen answers and the balance of experts added; LD-DPO's and WPO's weights; all weights trained, or an adapter
(LoRA, DoRA, rsLoRA) on a model that is whole or in four bits; models with attention sinks, state-space layers, linear
attention or short convolutions; some models in OLMo-core's own modules too, and with two ranks that compute every layer
together; padded batches from a script's collator. The oracle computes one
sequence at a time with the model's own forward pass, takes each objective from its paper's equation once more, and
sums by the definition.

Each figure is the largest error in its group: of the gradient, ||g - oracle|| / ||oracle|| over all parameters; of the
loss, relative; of the metrics, relative to the larger of 1 and the value. Rows *float32 inside* are models in float64
whose norms and rotary embeddings compute in float32, so that a rounding there can flip.

The bound of *float32* is a matter of rounding and of this batch. Of 13 other random batches with answers as long, in
43 float32 cells on one rank, 6 exceeded 1e-5 somewhere and 2 reached it, the worst at 1.9e-5. The oracle in float32 is
itself off by 2e-5 nats in an answer of 200. The 6 in float64, with five models: at most 7.5e-8 for gradients and
3.5e-14 for metrics.

{table}

Measured with torch {torch}, transformers {transformers}, tiny models with random weights, gloo ranks on one CPU.
"""


def main() -> None:
    import torch
    import transformers

    found = run(1, "single")
    for ranks in (2, 4):
        with Ranks(ranks) as group:
            for parallel in SPREADS[ranks]:
                found |= run(ranks, parallel, group)
    page = PAGE.format(
        count=len(found), table=table(found), torch=torch.__version__, transformers=transformers.__version__
    )
    Path(sys.argv[1]).write_text(page, encoding="utf-8")
    over = [
        f"{cell}: {one.gradient_error:.1e}, {one.loss_error:.1e}, {one.metric_error:.1e}"
        for cell, one in found.items()
        if not all(error <= bound(cell) for error in (one.gradient_error, one.loss_error, one.metric_error))  # or NaN
    ]
    if over:
        sys.exit("over the bound:\n" + "\n".join(over))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
