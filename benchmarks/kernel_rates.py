"""Rates of the kernels that make up a step, on this card. isopref/plan/speed.py takes its constants from them.

    python benchmarks/kernel_rates.py --out kernel_rates.json

Measures matrix products of decoder layers and output heads of several widths (forward and both backward products, not
compiled), and attention over packed rows with either kernel, for head widths 64 and 128 and two kinds of lengths. None
of these is a complete step; `plan_check.py` compares the plan with complete steps.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import workload
from torch import Tensor

from isopref.batch.packing import Budget, plan_step
from isopref.batch.rows import build_microbatch
from isopref.cards import CARDS
from isopref.examples import Lengths
from isopref.ops import flash
from isopref.ops.attention import segment_attention
from isopref.plan.layout import loads_of
from isopref.plan.speed import ATTENTION_BACKWARD

TOKENS = 16384
WIDTH = 2048  # of all heads together
# Width of the model, of its keys, of its MLP.
LAYERS = {"0.6b": (1024, 1024, 3072), "1b": (2048, 512, 8192), "3b": (3072, 1024, 8192), "8b": (4096, 1024, 14336)}
HEADS = {"1b": (2048, 128256), "qwen": (2048, 151936), "8b": (4096, 128256)}


def seconds(work: Callable[[], Any], *, repeat: int) -> float:
    """Seconds of one call, after two warm-up calls."""
    if not torch.cuda.is_available():
        work()
        return 1.0
    for _ in range(2):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeat


def products(shapes: list[tuple[int, int]], device: torch.device, tokens: int, *, repeat: int = 10) -> float:
    """Operations per second of products with matrices of `shapes`, forward and backward."""
    work: list[tuple[Tensor, Tensor, Tensor]] = [
        tuple(torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((tokens, i), (o, i), (tokens, o)))  # type: ignore[misc]
        for i, o in shapes
    ]

    def run() -> None:
        for x, w, g in work:
            torch.mm(x, w.t())
            torch.mm(g, w)
            torch.mm(g.t(), x)

    return sum(6.0 * tokens * i * o for i, o in shapes) / seconds(run, repeat=repeat)


def layer_shapes(width: int, keys: int, inner: int) -> list[tuple[int, int]]:
    return [(width, width), (width, keys), (width, keys), (width, width), *2 * [(width, inner)], (inner, width)]


def attention(data: str, head_width: int, device: torch.device, tokens: int, *, repeat: int = 10) -> float:
    """Operations per second, forward and backward, counted in full tiles as the plan does."""
    examples = workload.examples(data, tokens // 100, answers=2, vocabulary=1000)
    lengths = Lengths.of(examples)
    group = plan_step(lengths, Budget("shared", tokens), num_ranks=1)[0][0]
    (one,) = build_microbatch([examples[n] for n in group], "shared").to(device).passes
    count, heads = one.input_ids.shape[1], WIDTH // head_width
    query, key, value = (
        torch.randn(size, count, head_width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for size in (heads, max(1, heads // 4), max(1, heads // 4))
    )
    assert one.segments is not None
    segments = one.segments

    def run() -> None:
        out = segment_attention(query, key, value, segments, scale=head_width**-0.5)
        out.backward(torch.ones_like(out))

    scores = float(loads_of(lengths, [[group]], "shared", Counter([None])).scores.sum())
    return (1 + ATTENTION_BACKWARD) * 4 * WIDTH * scores / seconds(run, repeat=repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernel_rates.json"))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = CARDS["H200"].flops
    small = args.tokens < TOKENS  # to try this file on a CPU
    found: dict[str, Any] = {"about": workload.versions(), "products": {}, "head": {}, "attention": {}}
    for name, shape in LAYERS.items():
        scaled = tuple(size // 16 for size in shape) if small else shape
        found["products"][name] = products(layer_shapes(*scaled), device, args.tokens) / peak
    for name, (width, vocabulary) in HEADS.items():
        rows = args.tokens // 2
        found["head"][name] = products([(width, vocabulary // 64 if small else vocabulary)], device, rows) / peak
    for kernel in ("built in", "flash-attn-4"):
        if kernel != "built in" and not (device.type == "cuda" and flash.has_flash(device)):
            continue
        with mock.patch.object(flash, "has_flash", lambda _device, use=kernel != "built in": use):
            for head_width in (64, 128):
                for data in ("chat", "hh"):
                    rate = attention(data, head_width, device, args.tokens) / peak
                    found["attention"][f"{kernel} {head_width} {data}"] = rate
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
