"""The largest Llama shape that fits on this card: all weights trained, LoRA, and LoRA on a model in four bits.

    python benchmarks/largest.py --out largest.json --seconds 240

Shapes of a ladder are tried from the largest down, each in a process of its own, with random weights: the first that
does two steps of four pairs through the whole trainer is the answer, and the one before it is known not to fit. Weights
and optimizer state are bfloat16, all layers recompute, and microbatches have 4,096 tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import workload
from ready import Cell, ready_trainer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from isopref.models.adapter import quantize_nf4

COMMON: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 4096, "head_dim": 128}
WIDTHS: dict[str, dict[str, int]] = {  # hidden, MLP, heads, key heads, as in models of about 14B, 70B and 405B
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 8},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8},
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True)
class Kind:
    """A way to train, with the shapes to try: a width and numbers of layers, from the most down."""

    width: str
    layers: tuple[int, ...]
    adapter: dict[str, Any] | None = None


KINDS = {
    "lora": Kind("70b", (80, 79, 78, 76, 72), {"rank": 16}),
    "qlora": Kind("405b", (76, 75, 74, 72, 68), {"rank": 16, "quantize": "nf4"}),
    "full": Kind("14b", (61, 60, 59, 57, 54)),
    "smoke": Kind("tiny", (2,)),
    "smoke-qlora": Kind("tiny", (2,), {"rank": 4, "quantize": "nf4"}),
}


def assembled(config: LlamaConfig, *, quantize: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model made on the device layer by layer, so that it never takes more there than it does in the end."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(dtype)
    with device:
        rotary = type(model.model.rotary_emb)(config)  # its frequencies are computed, not loaded
    model.model.rotary_emb = rotary
    layers = model.model.layers
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _fill(part.to_empty(device=device))
    first = _fill(layers[0].to_empty(device=device))
    if quantize:
        quantize_nf4(first, device)
    for layer in layers[1:]:
        for module, source in zip(layer.modules(), first.modules(), strict=True):
            for key, weight in source.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(_copied(weight), requires_grad=weight.requires_grad))
    assert isinstance(model, PreTrainedModel)
    return model


def _fill(part: Any) -> Any:
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return part


def _copied(weight: Tensor) -> Tensor:
    """The same numbers in memory of their own; a quantised tensor by its parts, as copying would quantise it again."""
    if type(weight) is nn.Parameter:
        return weight.detach().clone()
    names, about = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(weight, name).clone() for name in names}
    copy: Tensor = type(weight).__tensor_unflatten__(parts, about, weight.shape, weight.stride())  # type: ignore[attr-defined]
    return copy


def attempt(name: str, layers: int) -> dict[str, Any]:
    """Two steps of one shape, in this process."""
    kind = KINDS[name]
    config = LlamaConfig(**{**COMMON, **WIDTHS[kind.width]}, num_hidden_layers=layers, tie_word_embeddings=False)
    quantize = bool(kind.adapter and "quantize" in kind.adapter)

    def make(_shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        return assembled(config, quantize=quantize, dtype=dtype, device=device)

    cell = Cell(kind.width, "chat", 4, microbatch_tokens=4096, trl_pairs=1, warmup=0, steps=2, adapter=kind.adapter)
    layout = {"checkpointing": "full", "compile": False}
    started = time.perf_counter()
    with ready_trainer(cell, layout=layout, make=make) as ready:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ready.trainer.fit()
        size = sum(parameter.numel() for parameter in ready.policy.parameters())
        loss = ready.metrics()[-1]["train/loss"]
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    seconds = time.perf_counter() - started
    return {"parameters": size, "peak_memory_gib": memory, "loss": loss, "seconds": seconds}


def in_a_process(name: str, layers: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--attempt", name, str(layers), "--out", file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        about = {"kind": name, "width": KINDS[name].width, "layers": layers}
        if done.returncode:
            print(done.stderr[-1500:], file=sys.stderr)
            return {**about, "error": done.stderr.strip().splitlines()[-1][:300]}
        return {**about, **json.loads(Path(file.name).read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["lora", "qlora", "full"])
    parser.add_argument("--seconds", type=float, default=240, help="begin no attempt after so many")
    parser.add_argument("--out", type=Path, default=Path("largest.json"))
    parser.add_argument("--attempt", nargs=2, metavar=("KIND", "LAYERS"), help="one shape, in this process")
    args = parser.parse_args()
    if args.attempt is not None:
        args.out.write_text(json.dumps(attempt(args.attempt[0], int(args.attempt[1]))))
        return
    started, results = time.perf_counter(), []
    for name in args.kinds:
        for layers in KINDS[name].layers:
            if time.perf_counter() - started > args.seconds:
                break
            results.append(in_a_process(name, layers))
            print(json.dumps(results[-1]), flush=True)
            if "error" not in results[-1]:
                break
    args.out.write_text(json.dumps({"about": workload.versions(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
