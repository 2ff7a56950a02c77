"""Pairs too long for one GPU, on paper: a section of docs/scaling.md, from the performance model of `isopref plan`.

scaling.py writes the section into the page; `python benchmarks/scaling_long.py` prints it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import workload
from transformers import LlamaConfig, LlamaForCausalLM

from isopref.batch.packing import Budget
from isopref.build import resolve
from isopref.cards import CARDS, GIB
from isopref.engine.microbatch_probe import HEADROOM, TILE_TOKENS
from isopref.examples import Lengths
from isopref.models.shape import ModelShape, shape_of
from isopref.plan.layout import ONE_GPU
from isopref.plan.network import Network
from isopref.plan.scale import Forecast, forecast

TOKENS = tuple(2**n for n in range(17, 21))  # 131,072 to 1,048,576
GPUS = (8, 16, 32, 64)
PAIRS, FEW_PAIRS = 64, 16  # per step
CARD = CARDS["H100"]
FSDP = replace(
    ONE_GPU, parallel="fsdp", grad_sync="every", weight_bytes=4, state_bytes=8, compiled=False, tile=TILE_TOKENS
)

SECTION = """\
## Long pairs on several GPUs

This section is about pairs of {first:,} to {last:,} tokens, half of them in the prompt and a quarter in each answer,
with {pairs} pairs per step and the same model and cards under FSDP. `layout.context_parallel` ranks split each row.
Every layer recomputes its activations and keeps its input in host memory, and MLPs compute {tile:,} tokens at a time.
No GPU has run context parallelism yet: memory is counted, compute time follows from the rates at which one H200 ran
shorter rows, and exchange times follow from the links' data sheets.

The columns "per row" give GiB per GPU; a run may use {usable:.1f}, and loading the model takes {loading:.0f}. Bold
marks the fewest ranks per row that fit; the last three columns refer to that number.

{memory}

Almost all of the time is attention (FlashAttention 2), so speed hardly depends on how rows are split, unless a step has
fewer pairs than GPUs: then splitting rows gives work to GPUs that would otherwise be idle. Pairs per hour with {few}
pairs per step on {gpus} GPUs, and the share of the time in which ranks exchange tokens for heads:

{speed}
"""


def eight_b() -> ModelShape:
    with torch.device("meta"):
        return shape_of(LlamaForCausalLM(LlamaConfig(**workload.SHAPES["8b"])))


def of(shape: ModelShape, gpus: int, tokens: int, context: int, pairs: int = PAIRS) -> Forecast:
    """A forecast for pairs of `tokens` tokens, with rows split over `context` ranks."""
    layers = shape.layers
    layout = replace(FSDP, ranks=gpus, shard=gpus, context=context, recompute=layers, offloaded=layers - 1)
    return forecast(
        shape,
        layout,
        CARD,
        Network.of(CARD),
        [Lengths.of_pairs(np.array([[tokens // 2, tokens // 4, tokens // 4]] * pairs))],
        Budget("shared", tokens),
        answers=2 * pairs,
        attention_share=resolve.attention_share(shape.width),
        room=usable(),
    )


def usable() -> float:
    return (1 - HEADROOM) * CARD.memory


def contexts(shape: ModelShape, gpus: int) -> list[int]:
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if gpus % n == 0 and shape.row_parts % n == 0]


def section(shape: ModelShape) -> str:
    return SECTION.format(
        first=TOKENS[0],
        last=TOKENS[-1],
        pairs=PAIRS,
        few=FEW_PAIRS,
        gpus=GPUS[-1],
        tile=TILE_TOKENS,
        usable=usable() / GIB,
        loading=of(shape, GPUS[0], TOKENS[0], 1).loading / GIB,
        memory=_memory(shape),
        speed=_speed(shape),
    )


def _memory(shape: ModelShape) -> str:
    most = contexts(shape, GPUS[-1])
    rows = []
    for gpus in GPUS:
        for tokens in TOKENS:
            found = {n: of(shape, gpus, tokens, n) for n in contexts(shape, gpus)}
            size = {n: f"{max(one.memory.total, one.loading) / GIB:.0f}" for n, one in found.items()}
            fewest = min(n for n, one in found.items() if one.fits)
            best = found[fewest]
            in_host = (shape.layers - 1) * tokens / fewest * shape.width * FSDP.compute_bytes
            rows.append(
                [
                    f"{gpus}",
                    f"{tokens:,}",
                    *(f"**{size[n]}**" if n == fewest else size.get(n, "") for n in most),
                    f"{3600 * best.examples_per_s:,.1f}",
                    f"{in_host * Network.of(CARD).ranks_per_node / GIB:,.0f}",
                    f"{best.exchanged_bytes * gpus / fewest / PAIRS / 1e9:,.0f}",
                ]
            )
    head = ["GPUs", "tokens", *(f"{n} per row" for n in most)]
    return table([*head, "pairs/hour", "host GiB per machine", "GB sent by a rank per pair"], rows)


def _speed(shape: ModelShape) -> str:
    every = contexts(shape, GPUS[-1])
    rows = []
    for tokens in TOKENS:
        found = [of(shape, GPUS[-1], tokens, n, FEW_PAIRS) for n in every]
        cells = [
            f"{3600 * one.examples_per_s:,.1f} ({one.time.exchange / one.time.total:.1%})"
            if one.fits
            else "does not fit"
            for one in found
        ]
        rows.append([f"{tokens:,}", *cells])
    return table(["tokens", *(f"{n} per row" for n in every)], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    print(section(eight_b()))


if __name__ == "__main__":
    main()
