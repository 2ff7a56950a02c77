"""Shared rows compared with padded ones, both in isopref's trainer: models with a state, with sinks, with experts.

    python benchmarks/bench.py --only lfm2 qwen3-next gpt-oss
    python benchmarks/layouts.py lfm2 shared --profile

Shapes of about a billion random weights, chat lengths, bfloat16. Padded rows hold pairs of similar length, as they
always do with `layout.rows: padded`. "padded" is isopref's default, uncompiled; "padded-compiled" sets
`layout.compile: true`. All layouts get the same pairs in the same global batches, and precomputed references. Timing
starts after a step in which torch compiled nothing (`warmup_steps`, `compiled_while_timed`). Kernels of
flash-linear-attention are not tuned: bench.py starts the process with settings for them (fla_kernels.py).
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import fla_kernels
import torch
import workload
from clocks import Clock, EngineClock
from profile_step import StepProfile, kernels_of, seconds_by_kind
from ready import Cell, ready_trainer
from records import UnavailableError
from transformers import PreTrainedModel

from isopref.ops import delta

_ATTENDING = (2, 5, 8, 10, 12, 14)  # of LFM2's 16 layers; the others convolve
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {  # widths of Qwen3-Next, with a dense MLP instead of experts
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 0, "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536,
        "layer_types": ["full_attention" if n in _ATTENDING else "conv" for n in range(16)],
        "tie_word_embeddings": True,
    },
    "mamba2": {  # a Bamba of LFM2's size
        "model_type": "bamba", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "attn_layer_indices": [5, 11],
        "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 1536, "intermediate_size": 1536, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {  # on a CPU
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 97, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {"rows": "shared"},
    "padded": {"rows": "padded"},
    "padded-compiled": {"rows": "padded", "compile": True},
}
PADDED_TOKENS = {"gpt-oss": 8192}  # with sinks, transformers' attention holds all scores, so more would not fit
CELL = Cell("", "chat", 64, microbatch_tokens=24576, trl_batch=0, warmup=2, spare=6, steps=4)
SMALL_CELL = Cell("", "hh", 2, microbatch_tokens=4096, trl_batch=0, dtype="float32", warmup=1, spare=1, steps=1)


def make(name: str, small: bool, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    given = {key: SMALL.get(key, value) if small else value for key, value in MODELS[name].items()}
    return workload.causal_lm(given, dtype=dtype, device=device)


def measure(model: str, layout: str, *, tiny: bool = False, profiled: bool = False) -> dict[str, Any]:
    """One model in one layout."""
    cell = replace(SMALL_CELL if tiny else CELL, shape=model)
    if model == "qwen3-next" and torch.cuda.is_available():
        _require_kernels()

    def of_cell(name: str, **options: Any) -> PreTrainedModel:
        return make(name, tiny, **options)

    settings = dict(LAYOUTS[layout])
    if tiny:
        settings["compile"] = False  # on a CPU, compiling takes longer than everything else
    if layout != "shared" and model in PADDED_TOKENS:
        settings["microbatch_tokens"] = PADDED_TOKENS[model]
    if profiled:  # one step more, which is not timed
        cell = replace(cell, warmup=cell.warmup + cell.spare, spare=0, steps=cell.steps + 1)
    with ready_trainer(cell, layout=settings, make=of_cell) as ready:
        clock = Clock(replace(cell, steps=cell.steps - 1) if profiled else cell)
        ready.trainer.add_callback("clock", EngineClock(clock))
        spy = StepProfile(cell.warmup + cell.steps)
        if profiled:
            ready.trainer.add_callback("profile", spy)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ready.trainer.fit()
        figures = clock.result()
        metrics = ready.metrics()
        fill = 1 - sum(one["train/padding_fraction"] for one in metrics) / len(metrics)
        names = {"following": list(ready.policy.following)[:1], "unfolded": list(ready.policy.unfolded)[:1]}
        weights = sum(parameter.numel() for parameter in ready.policy.parameters())
    if profiled:
        _tell(spy)
    return {**figures, "row_fill": fill, "weights": weights, **names}


def _require_kernels() -> None:
    """Raise UnavailableError where a Gated DeltaNet step takes minutes: in plain PyTorch, and if kernels are tuned."""
    if not fla_kernels.are_fixed():
        raise UnavailableError("flash-linear-attention would tune its kernels for minutes. Use bench.py")
    kernel = delta.kernel()
    if kernel.run is None:
        raise UnavailableError(f"{kernel.fault}: {kernel.way_out}")


def _tell(spy: StepProfile) -> None:
    """Print the kernels of the profiled step, the slowest first."""
    kernels = kernels_of(spy.profile)
    by_kind = seconds_by_kind(kernels)
    print(f"profiled step {spy.seconds:.4f} s, kernels {sum(by_kind.values()):.4f} s of it: {dict(by_kind)}")
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:14]:
        print(f"  {one.self_device_time_total / 1e3:9.2f} ms  {one.count:5}  {one.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one more step")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this on a CPU")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.layout, tiny=args.tiny, profiled=args.profile)))


if __name__ == "__main__":
    main()
