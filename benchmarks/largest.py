"""The largest Llama shape that fits on this card: all weights trained, LoRA, and LoRA on a model in four bits.

    python benchmarks/largest.py --out largest.json                     # start at the largest shape by `isopref plan`
    python benchmarks/largest.py --kinds full --layers 61 62            # only these shapes
    python benchmarks/largest.py --kinds smoke smoke-qlora --layers 2   # on any machine

Starting from the largest shape that should fit, shapes grow by a layer until one does not fit, or shrink until one
does. The answer is the last that fits; the next larger one is known not to. Each shape gets its own process and random
weights, and takes two steps through the complete trainer, each of one microbatch of 2,048 tokens: two pairs of 512 +
256 + 256. A step that runs out of memory is not retried with smaller microbatches. Weights and optimizer state are
bfloat16, and all layers recompute. Only 4-bit layers are compiled: uncompiled, unpacking them is slow and takes much
memory. Torch's memory grows in place (PYTORCH_ALLOC_CONF=expandable_segments:True), so that fragmentation does not
fill the card early.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workload
from ready import Cell, ready_trainer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from worker import environment

from isopref.batch.packing import Budget
from isopref.build.model import new_adapter
from isopref.cards import GIB, find_card
from isopref.config.values import AdapterConfig
from isopref.examples import Lengths
from isopref.models.adapter import FourBitLinear, add_adapter, quantize_nf4
from isopref.models.shape import ModelShape, shape_of
from isopref.ops.memory import ran_out
from isopref.plan.layout import ONE_GPU, step_loads
from isopref.plan.memory import NF4_BYTES, loading_memory, peak_memory

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
    """A way to train, and the width of the model. `compile`: the value of layout.compile."""

    width: str
    adapter: dict[str, Any] | None = None
    compile: bool | None = False

    @property
    def quantised(self) -> bool:
        return self.adapter is not None and "quantize" in self.adapter

    def config(self, layers: int) -> LlamaConfig:
        return LlamaConfig(**{**COMMON, **WIDTHS[self.width]}, num_hidden_layers=layers, tie_word_embeddings=False)


KINDS = {
    "full": Kind("14b"),
    "lora": Kind("70b", {"rank": 16}),
    "qlora": Kind("405b", {"rank": 16, "quantize": "nf4"}, compile=None),
    "smoke": Kind("tiny"),
    "smoke-qlora": Kind("tiny", {"rank": 4, "quantize": "nf4"}),
}
PAIRS, TOKENS = 2, 2048  # per step, which is one microbatch
DRIVER_GIB = 1.0  # roughly what the driver and libraries take of a card's memory


def predicted_gib(kind: Kind, layers: int) -> float:
    """Peak memory by `isopref plan`: of a step, or of the probe before it, which unpacks 4-bit layers uncompiled."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(kind.config(layers))
        if kind.adapter is not None:
            new = new_adapter(AdapterConfig.model_validate(kind.adapter))
            add_adapter(model, new, dtype=torch.bfloat16, seed=0)
    shape = shape_of(model)
    layout = replace(
        ONE_GPU,
        compiled=kind.compile is not False,
        recompute=layers,
        frozen_bytes=frozen_bytes(shape, quantised=kind.quantised),
        quantised=kind.quantised,
    )
    load = step_loads(
        Lengths.of_pairs(workload.lengths("even", PAIRS)),
        Budget("shared", TOKENS),
        ranks=1,
        attention_share=0.0,
        windows=shape.flops.windows,
    )
    step = peak_memory(shape, layout, load, answers=4 * PAIRS, only_microbatch=True).total
    return max(step, loading_memory(shape, layout)) / GIB


def frozen_bytes(shape: ModelShape, *, quantised: bool) -> float:
    """Bytes of a frozen number, on average: in 4 bits, except outside the layers."""
    root = shape.root_parameters / shape.parameters
    return NF4_BYTES + root * (2 - NF4_BYTES) if quantised else 2


def edge(kind: Kind, room_gib: float) -> int:
    """The number of layers that should fit. All layers take the same memory."""
    one, two = (predicted_gib(kind, layers) for layers in (1, 2))
    return 1 + int((room_gib - DRIVER_GIB - one) / (two - one))


def assembled(config: LlamaConfig, *, quantize: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model built on the device layer by layer, so that building it never takes more memory than the model itself."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(dtype)
    with device:
        rotary = type(model.model.rotary_emb)(config)  # computes its frequencies, which are not weights
    model.model.rotary_emb = rotary
    layers = model.model.layers
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _fill(part.to_empty(device=device))
    first = _fill(layers[0].to_empty(device=device))
    if quantize:
        quantize_nf4(first, device)
    for layer in layers[1:]:
        for name, source in first.named_modules():
            weights = source.named_parameters(recurse=False)
            own = {key: nn.Parameter(_copied(weight), weight.requires_grad) for key, weight in weights}
            if isinstance(source, FourBitLinear):
                layer.set_submodule(name, FourBitLinear(own["weight"], own.get("bias")))
                continue
            for key, weight in own.items():
                setattr(layer.get_submodule(name), key, weight)
    assert isinstance(model, PreTrainedModel)
    return model


def _fill(part: Any) -> Any:
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return part


def _copied(weight: Tensor) -> Tensor:
    """A copy in separate memory. A quantised tensor is copied part by part: a plain copy would quantise it again."""
    if type(weight) is nn.Parameter:
        return weight.detach().clone()
    names, about = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(weight, name).clone() for name in names}
    copy: Tensor = type(weight).__tensor_unflatten__(parts, about, weight.shape, weight.stride())  # type: ignore[attr-defined]
    return copy


def measure(kind: str, layers: int, *, tiny: bool = False) -> dict[str, Any]:
    """Whether one shape fits, as a run of bench.py."""
    try:
        found = attempt(replace(KINDS[kind], width="tiny"), 2) if tiny else attempt(KINDS[kind], layers)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        return {"fits": False, "why": str(error)[:200]}
    return {"fits": True, **found}


def attempt(kind: Kind, layers: int) -> dict[str, Any]:
    """Two steps of one shape, in this process."""
    started = time.perf_counter()
    times: dict[str, float] = {}

    def passed(what: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[what] = round(time.perf_counter() - started - sum(times.values()), 1)
        print(f"{what}: {times[what]} s", file=sys.stderr, flush=True)

    def make(_shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        passed("begin")
        made = assembled(kind.config(layers), quantize=kind.quantised, dtype=dtype, device=device)
        passed("assemble")
        return made

    cell = Cell(
        kind.width, "even", PAIRS, microbatch_tokens=TOKENS, trl_batch=1, warmup=0, steps=2, adapter=kind.adapter
    )
    with ready_trainer(cell, layout={"checkpointing": "full", "compile": kind.compile}, make=make) as ready:
        passed("prove and score")
        module: Any = ready.trainer.train_module
        module.oom_retry = None  # it would retry a step with smaller microbatches
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ready.trainer.fit()
        passed("train")
        size = sum(parameter.numel() for parameter in ready.policy.parameters())
        loss = ready.metrics()[-1]["train/loss"]
    memory = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    return {"parameters": size, "peak_memory_gib": memory, "loss": loss, "seconds": times}


def in_a_process(name: str, layers: int) -> dict[str, Any]:
    """Attempt one shape in a new process. This process does not use the card, so all of its memory is free."""
    predicted = predicted_gib(KINDS[name], layers)
    shape = {"kind": name, "width": KINDS[name].width, "layers": layers, "predicted_gib": predicted}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--attempt", name, str(layers), "--out", file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if not done.returncode:
            found = json.loads(Path(file.name).read_text())
            return {**found, "result": {**shape, "fits": True, **found["result"]}}
    print(done.stderr[-1500:], file=sys.stderr)
    if "out of memory" not in done.stderr and "CUBLAS_STATUS_ALLOC_FAILED" not in done.stderr:
        raise SystemExit(f"{name} with {layers} layers failed for another reason than memory (see above)")
    return {"result": {**shape, "fits": False}}


def shapes(first: int, fits: Callable[[], bool]) -> Iterator[int]:
    """`first` layers, then one more at a time until they do not fit, or one fewer at a time until they do.

    `fits`: whether the last number of layers did.
    """
    yield first
    up = fits()
    layers = first
    while fits() is up and layers + (1 if up else -1) > 0:
        layers += 1 if up else -1
        yield layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["full", "lora", "qlora"])
    parser.add_argument("--card", default="H200", help="GPU model, as in isopref plan, from which to start")
    parser.add_argument("--layers", nargs="+", type=int, help="try these numbers of layers instead")
    parser.add_argument("--seconds", type=float, default=300, help="start no attempt after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("largest.json"))
    parser.add_argument("--attempt", nargs=2, metavar=("KIND", "LAYERS"), help="try one shape in this process")
    args = parser.parse_args()
    if args.attempt is not None:
        found = attempt(KINDS[args.attempt[0]], int(args.attempt[1]))
        args.out.write_text(json.dumps({"about": workload.versions(), "result": found}))
        return
    started, about = time.perf_counter(), None
    results: list[dict[str, Any]] = []
    for name in args.kinds:
        tried: Iterable[int] = args.layers or shapes(
            edge(KINDS[name], find_card(args.card).memory / GIB), lambda: results[-1]["fits"]
        )
        for layers in tried:
            if time.perf_counter() - started > args.seconds:
                return
            found = in_a_process(name, layers)
            about = found.get("about", about)
            results.append(found["result"])
            print(json.dumps(results[-1]), flush=True)
            args.out.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
