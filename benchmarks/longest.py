"""The longest pair that trains on this card, the cost of offloading, and the speed of long pairs; compared with TRL.

    python benchmarks/bench.py --only long long-trl
    python benchmarks/longest.py 8b-lora 65536/offload=full,tile=4096      # one trial
    python benchmarks/longest.py trl-8b-lora 32768/cudnn=true

A pair of N tokens has a prompt of N/2 and two answers of N/4. So isopref computes N tokens, and TRL, which repeats the
prompt, 1.5 N. Models have random weights in bfloat16. A trial takes two steps (`steps=`) of one pair each through the
complete trainer; the first, which compiles, does not count. TRL gets gradient checkpointing, its chunked head and
Liger's layers. `cudnn=true` lets torch use cuDNN's attention, and `offload=full` moves TRL's checkpoints to the host;
TRL's fastest setting counts. No time is spent on references: isopref trains SimPO, which has none, and TRL's DPO gets
zeros instead.

With a long pair, attention takes most of the time, but an attention window does not change the memory. So
`window=4096` finds the longest pair that fits without the time for full attention. TRL gets torch's FlashAttention with
that window.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import workload
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel
from trl_peer import own_attention

from isopref.build.microbatch import settle_layout
from isopref.build.model import add_adapter, spread
from isopref.build.run import Run
from isopref.build.trainer import build_trainer
from isopref.config.schema import Config
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.engine.environment import environment
from isopref.errors import UserError
from isopref.examples import Example
from isopref.models.policy import Policy
from isopref.models.tiles import tile_mlps
from isopref.ops.memory import ran_out
from isopref.score import TableLogps

LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True)
class Kind:
    """A model, and which of its weights are trained."""

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
}
TINY_TOKENS = 512  # per trial, with --tiny


@dataclass(frozen=True)
class Trial:
    """One length, and how it is computed. The defaults, `auto`, are what a user gets."""

    tokens: int
    window: int | None = None
    checkpointing: str = "auto"
    offload: str = "auto"
    tile: int | str | None = "auto"
    cudnn: bool = False  # TRL's attention
    steps: int = 2

    @classmethod
    def of(cls, text: str) -> "Trial":
        """A trial from text such as "65536/offload=full,tile=4096"."""
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


def model(kind: Kind, trial: Trial, device: torch.device) -> PreTrainedModel:
    """A Mistral model: like Llama, but its config can give attention a window."""
    widths = {**workload.SHAPES[kind.shape], "max_position_embeddings": 2**20, "sliding_window": trial.window}
    return workload.made(MistralForCausalLM, MistralConfig(**widths), dtype=getattr(torch, kind.dtype), device=device)


class Heard(Display):
    """A display that also keeps the messages of a run, such as what `auto` chose."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)
        super().say(text)


class Stopwatch:
    """The seconds of each step, and peak memory."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.restart()

    def restart(self) -> None:
        self.times.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        steps = [round(after - before, 2) for before, after in zip(self.times, self.times[1:], strict=False)]
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {"steps_s": steps, "step_s": median(steps[1:] or steps or [0.0]), "peak_memory_gib": round(memory, 1)}


def run_isopref(kind: Kind, trial: Trial) -> dict[str, Any]:
    from olmo_core.train.callbacks import Callback

    watch = Stopwatch()

    class Ticks(Callback):
        def pre_train(self) -> None:
            watch.tick()

        def post_step(self) -> None:
            watch.tick()

    with tempfile.TemporaryDirectory() as scratch, environment(device="auto", seed=0, process_group=False) as env:
        folder = Path(scratch)
        display = Heard()
        run = Run(_config(kind, trial, scratch), folder, env, display)
        made = model(kind, trial, env.device)
        policy = Policy(made)
        add_adapter(run, policy)
        run_model = spread(run, policy)
        tile_mlps(policy, trial.tile if isinstance(trial.tile, int) else None)
        table = ExampleTable.from_tokens(trial.examples(made.config.vocab_size))
        try:
            settled = settle_layout(run, run_model, table)
            none = TableLogps(torch.zeros(len(table.lengths.answer)))
            trainer = build_trainer(settled, run_model, table, none, None, False)
            del trainer.callbacks["checkpointer"]
            module: Any = trainer.train_module
            module.oom_retry = None  # it would retry the step with smaller microbatches
            trainer.add_callback("ticks", Ticks())
            watch.restart()
            trainer.fit()
        except (RuntimeError, UserError) as error:
            if isinstance(error, RuntimeError) and not ran_out(error):
                raise
            return {"fits": False, "why": str(error)[:300], **watch.result()}
        loss = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["train/loss"]
        del trainer
    auto = [text for text in display.said if "auto is" in text]
    return {"fits": True, "loss": loss, **watch.result(), "auto": auto}


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


def run_trl(kind: Kind, trial: Trial) -> dict[str, Any]:
    from transformers import TrainerCallback
    from trl import DPOTrainer
    from trl.trainer import dpo_trainer

    from isopref.testing.models import byte_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch = Stopwatch()

    class Ticks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.tick()

    class Tokenised(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset  # it already has reference log-probabilities

    dpo_trainer.hash_module = lambda _model: ""  # TRL hashes all weights to name a cache file
    made = model(kind, trial, device)
    if trial.window is not None:
        _window_attention(trial.window)
        made.set_attn_implementation("windowed")
    with tempfile.TemporaryDirectory() as folder, own_attention():
        torch.backends.cuda.enable_cudnn_sdp(trial.cudnn)
        try:
            trainer = Tokenised(
                model=made,
                args=_trl_config(kind, trial, folder),
                train_dataset=_records(trial, made.config.vocab_size),
                processing_class=byte_tokenizer(),
                callbacks=[Ticks()],
                peft_config=_peft_config(kind),
            )
            watch.restart()
            trainer.train()
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return {"fits": False, "why": str(error)[:200], **watch.result()}
    return {"fits": True, **watch.result()}


def _trl_config(kind: Kind, trial: Trial, folder: str) -> Any:
    from trl import DPOConfig

    cuda = torch.cuda.is_available()
    return DPOConfig(
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


def _records(trial: Trial, vocabulary: int) -> Any:
    """The pairs in TRL's format, with zeros as reference log-probabilities."""
    from datasets import Dataset

    records = [
        {"prompt_ids": p.tolist(), "chosen_ids": c.tolist(), "rejected_ids": r.tolist()}
        for p, (c, r) in ((one.prompt, one.answers) for one in trial.examples(vocabulary))
    ]
    return Dataset.from_list([{**one, "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0} for one in records])


def _peft_config(kind: Kind) -> Any:
    from peft import LoraConfig

    if kind.adapter is None:
        return None
    return LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")


def _window_attention(window: int) -> None:
    """Give TRL FlashAttention with a window: torch's default attention would build a full mask, tokens by tokens."""
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

    AttentionInterface.register("windowed", attend)
    AttentionMaskInterface.register("windowed", lambda *_, **__: None)


def measure(kind: str, trial: str, *, tiny: bool = False) -> dict[str, Any]:
    """Whether a pair of this length trains, and with how much time and memory."""
    chosen, tried = KINDS[kind], Trial.of(trial)
    if tiny:
        chosen, tried = replace(chosen, shape="tiny", dtype="float32"), replace(tried, tokens=TINY_TOKENS)
        if chosen.peer:  # neither its window nor its offloading works on a CPU
            tried = replace(tried, window=None, offload="auto")
    return {"tokens": tried.tokens, **(run_trl if chosen.peer else run_isopref)(chosen, tried)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("trial", metavar="TOKENS[/FIELD=VALUE,...]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and pair, to try this on a CPU")
    args = parser.parse_args()
    print(json.dumps({**measure(args.kind, args.trial, tiny=args.tiny), "about": workload.versions()}))


if __name__ == "__main__":
    main()
