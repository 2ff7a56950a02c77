"""The longest pair that trains on this card, what offloading costs, and how fast long pairs are; beside TRL.

    python benchmarks/longest.py 8b-lora 32768 65536/offload=none 65536/offload=full 262144/window=4096 --out long.json
    python benchmarks/longest.py 1b 524288/window=4096
    python benchmarks/longest.py trl-8b-lora 32768 65536
    python benchmarks/longest.py smoke 512 512/offload=full,tile=64 smoke-trl 512

A pair of N tokens has a prompt of N/2 and two answers of N/4, so isopref computes N tokens, and TRL, which repeats the
prompt, 1.5 N. Each kind is one process: a model with random weights in bfloat16, and for each trial two steps through
the whole trainer, one pair each (`steps=1`: one, which includes what compiles). TRL gets gradient checkpointing, its
chunked head, Liger's layers and the faster of torch's attention kernels. No time is spent on references: isopref trains
SimPO, which has none, and TRL's DPO gets zeros in their place.

Attention takes most of the time of a long pair and no memory that its window would change, so `window=4096` asks how
long a pair fits without paying for attention over all of it. TRL gets torch's FlashAttention with that window.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from isopref.build.microbatch import settle_layout
from isopref.build.model import add_adapter, spread
from isopref.build.run import Run
from isopref.build.trainer import build_trainer
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.environment import environment
from isopref.engine.oom_retry import ran_out
from isopref.errors import UserError
from isopref.examples import Example
from isopref.models.policy import Policy
from isopref.models.tiles import tile_mlps
from isopref.score import TableLogps

LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True)
class Kind:
    """A model and what of it is trained."""

    shape: str
    adapter: dict[str, Any] | None = None
    peer: bool = False  # TRL
    dtype: str = "bfloat16"


KINDS = {
    "8b-lora": Kind("8b", LORA),
    "8b": Kind("8b"),
    "1b": Kind("1b"),
    "trl-8b-lora": Kind("8b", LORA, peer=True),
    "trl-1b": Kind("1b", peer=True),
    "smoke": Kind("tiny", LORA, dtype="float32"),
    "smoke-trl": Kind("tiny", LORA, peer=True, dtype="float32"),
}


@dataclass(frozen=True)
class Trial:
    """One length, and how it is computed. What is `auto` is what a user gets."""

    tokens: int
    window: int | None = None
    checkpointing: str = "auto"
    offload: str = "auto"
    tile: int | str | None = "auto"
    steps: int = 2

    @classmethod
    def of(cls, text: str) -> "Trial":
        """From "65536/offload=full,tile=4096"."""
        tokens, _, more = text.partition("/")
        given = dict(one.split("=") for one in more.split(",")) if more else {}
        read: dict[str, Any] = {
            key: value if key in ("offload", "checkpointing") else json.loads(value) for key, value in given.items()
        }
        if "offload" in read:
            read = {"checkpointing": "full", "tile": None, **read}
        return cls(int(tokens), **read)

    @property
    def layout(self) -> dict[str, Any]:
        auto = self.checkpointing == "auto"
        return {
            "microbatch_tokens": "auto" if auto else self.tokens,
            "checkpointing": self.checkpointing,
            "offload_activations": self.offload,
            "mlp_tile_tokens": self.tile,
        }

    def examples(self, vocabulary: int) -> list[Example]:
        random = np.random.RandomState(1)
        lengths = (self.tokens // 2, self.tokens // 4, self.tokens // 4)
        parts = [[random.randint(3, vocabulary, size) for size in lengths] for _ in range(self.steps)]
        return [Example(prompt, (chosen, rejected), ((0, 1),), (1.0, 0.0)) for prompt, chosen, rejected in parts]


def model(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """As Llama, whose attention a config can give a window."""
    config = MistralConfig(**{**workload.SHAPES[shape], "max_position_embeddings": 2**20, "sliding_window": None})
    return workload.made(MistralForCausalLM, config, dtype=dtype, device=device)


class Stopwatch:
    """Seconds of each step, and the most memory that it took."""

    def __init__(self) -> None:
        self.times: list[float] = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        steps = [round(after - before, 2) for before, after in zip(self.times, self.times[1:], strict=False)]
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {"steps_s": steps, "step_s": steps[-1] if steps else None, "peak_memory_gib": round(memory, 1)}


def run_isopref(kind: Kind, trials: list[Trial], report: Any) -> None:
    from olmo_core.train.callbacks import Callback

    class Ticks(Callback):
        def __init__(self, watch: Stopwatch):
            self.watch = watch

        def pre_train(self) -> None:
            self.watch.tick()

        def post_step(self) -> None:
            self.watch.tick()

    with tempfile.TemporaryDirectory() as folder, environment(device="auto", seed=0, process_group=False) as env:
        begun = time.perf_counter()
        run = Run(_config(kind, trials[0], f"{folder}/0"), Path(folder) / "0", env, Display())
        made = model(kind.shape, dtype=getattr(torch, kind.dtype), device=env.device)
        policy = Policy(made)
        add_adapter(run, policy)
        run_model = spread(run, policy)
        print(f"ready after {time.perf_counter() - begun:.0f} s", flush=True)
        for number, trial in enumerate(trials):
            made.config.sliding_window = trial.window
            for layer in made.model.layers:
                layer.self_attn.config.sliding_window = trial.window
            tile_mlps(policy, trial.tile if isinstance(trial.tile, int) else None)
            own = Path(folder) / str(number)
            own.mkdir(exist_ok=True)
            run = replace(run, config=_config(kind, trial, str(own)), folder=own)
            table = ExampleTable.from_tokens(trial.examples(made.config.vocab_size))
            begun = time.perf_counter()
            watch, trainer = Stopwatch(), None
            try:
                settled = settle_layout(run, run_model, table)
                print(f"settled after {time.perf_counter() - begun:.0f} s", flush=True)
                none = TableLogps(torch.zeros(len(table.lengths.answer)))
                trainer = build_trainer(settled, run_model, table, none, None, False)
                del trainer.callbacks["checkpointer"]
                module: Any = trainer.train_module
                module.oom_retry = None
                trainer.add_callback("ticks", Ticks(watch))
                watch.__init__()  # type: ignore[misc]
                trainer.fit()
                loss = json.loads((own / "metrics.jsonl").read_text().splitlines()[-1])["train/loss"]
                report({**_said(trial), "fits": True, "loss": loss, **watch.result()})
            except (RuntimeError, UserError) as error:
                if isinstance(error, RuntimeError) and not ran_out(error):
                    traceback.print_exc()
                report({**_said(trial), "fits": False, "why": str(error)[:300], **watch.result()})
            del trainer
            for parameter in run_model.parameters():
                parameter.grad = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _config(kind: Kind, trial: Trial, folder: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "random", "dtype": kind.dtype, "adapter": kind.adapter},
            "data": {"train": "random"},
            "objective": {"loss": "simpo"},
            "optim": {"batch_size": 1},
            "layout": trial.layout,
            "run": {"folder": folder, "save_every": 10**6, "export": False},
        }
    )


def _said(trial: Trial) -> dict[str, Any]:
    return {name: value for name, value in vars(trial).items() if value != getattr(Trial(0), name)}


def run_trl(kind: Kind, trials: list[Trial], report: Any) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer
    from trl.trainer import dpo_trainer

    from isopref.testing.models import byte_tokenizer

    cuda = torch.cuda.is_available()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, while the GPU waits

    class Ticks(TrainerCallback):
        def __init__(self, watch: Stopwatch):
            self.watch = watch

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.watch.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.watch.tick()

    class Tokenised(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset  # which has them

    dpo_trainer.hash_module = lambda _model: ""  # of all weights, to name a cache file
    for trial in trials:
        made = model(kind.shape, dtype=getattr(torch, kind.dtype), device=torch.device("cuda" if cuda else "cpu"))
        if trial.window is not None:
            _window_attention(trial.window)
            made.set_attn_implementation("flash_window")
        records = [
            {"prompt_ids": p.tolist(), "chosen_ids": c.tolist(), "rejected_ids": r.tolist()}
            for p, (c, r) in ((one.prompt, one.answers) for one in trial.examples(made.config.vocab_size))
        ]
        for record in records:
            record |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
        watch, trainer = Stopwatch(), None
        try:
            with tempfile.TemporaryDirectory() as folder:
                args = DPOConfig(
                    output_dir=folder,
                    per_device_train_batch_size=1,
                    max_steps=trial.steps,
                    learning_rate=1e-6,
                    optim="adamw_torch_fused" if cuda else "adamw_torch",
                    max_length=None,
                    gradient_checkpointing=True,
                    bf16=kind.dtype == "bfloat16",
                    use_liger_kernel=cuda,
                    use_cpu=not cuda,
                    precompute_ref_log_probs=True,
                    activation_offloading=trial.offload == "full",
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    train_sampling_strategy="sequential",
                )
                lora = None if kind.adapter is None else LoraConfig(
                    r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
                )  # fmt: skip
                trainer = Tokenised(
                    model=made,
                    args=args,
                    train_dataset=Dataset.from_list(records),
                    processing_class=byte_tokenizer(),
                    callbacks=[Ticks(watch)],
                    peft_config=lora,
                )
                watch.__init__()  # type: ignore[misc]
                trainer.train()
            report({**_said(trial), "fits": True, **watch.result()})
        except RuntimeError as error:
            if not ran_out(error):
                traceback.print_exc()
            report({**_said(trial), "fits": False, "why": str(error)[:200], **watch.result()})
        del trainer, made
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def _window_attention(window: int) -> None:
    """Give TRL a FlashAttention with a window: torch's own attention would make a mask of all tokens by all tokens."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    from isopref.ops.attention import GROUPED_HEADS

    def attend(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        batch, _heads, length, _width = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        bounds = (offsets, offsets, length, length)
        out: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(window - 1, 0), **GROUPED_HEADS)
        return out.unflatten(0, (batch, length)), None

    AttentionInterface.register("flash_window", attend)
    AttentionMaskInterface.register("flash_window", lambda *_, **__: None)


def in_a_process(name: str, trials: list[str], seconds: float) -> None:
    """One kind; what it prints is passed on, and what is done when the time is over counts."""
    command = [sys.executable, "-u", __file__, name, *trials, "--here"]
    try:
        subprocess.run(command, env=workload.environment(), timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("trials", nargs="+", metavar="TOKENS[/FIELD=VALUE,...]")
    parser.add_argument("--out", type=Path, default=None, help="also append results to this file, as JSON lines")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if not args.here:
        out = [] if args.out is None else ["--out", str(args.out)]
        in_a_process(args.kind, [*args.trials, *out], args.seconds)
        return
    kind, about = KINDS[args.kind], workload.versions()

    def report(found: dict[str, Any]) -> None:
        line = json.dumps({"kind": args.kind, **found, "about": about})
        print(json.dumps({"kind": args.kind, **found}), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(line + "\n")

    (run_trl if kind.peer else run_isopref)(kind, [Trial.of(one) for one in args.trials], report)


if __name__ == "__main__":
    main()
