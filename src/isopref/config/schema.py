"""What a run can be told: every field, its default and its meaning, once.

Owns the shape of the config and the run id. Combinations that cannot work are conflicts.py's, reading files is
load.py's, and turning a config into objects is build's. Imports no torch.
"""

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from isopref.config.conflicts import conflicts_of
from isopref.config.objective import ObjectiveConfig
from isopref.config.section import Count, Decay, NonNegative, PathText, Positive, Section
from isopref.config.values import AdapterConfig, Sources, SourcesOrShare

NOT_MATH = ("layout", "run")  # sections that cannot change the trained weights, so the run id leaves them out

DType = Literal["float32", "bfloat16", "float64"]
OptimKind = Literal["adamw", "adamw_8bit", "adamw_sr", "adamw_8bit_sr", "adamw_skip", "muon"]
Rows = Literal["shared", "packed", "padded", "padded_separate"]
Parallel = Literal["auto", "single", "ddp", "fsdp", "hsdp"]


class ModelConfig(Section):
    path: PathText = Field(
        description="Model to start from: a Hugging Face folder, a hub name, a .gguf file, "
        "package:PACKAGE/FILE.gguf for one in an installed package, or an OLMo-core checkpoint (docs/olmo-core.md).",
        examples=["HuggingFaceTB/SmolLM2-135M-Instruct"],
    )
    reference: PathText | None = Field(
        default=None,
        description="Model to compare with, named like path, with the same vocabulary. null: the model to start from.",
    )
    dtype: DType = Field(default="float32", description="Number type of the weights and of the optimizer's state.")
    compute_dtype: DType | None = Field(
        default=None,
        description="Number type of the forward and backward pass. null: the same as dtype. "
        "Another one: mixed precision with master weights, which needs layout.parallel auto, fsdp or hsdp. Weights "
        "that an adapter leaves frozen are held in this type.",
    )
    adapter: AdapterConfig | None = Field(
        default=None,
        description="Train an adapter on the frozen model, as in {kind: lora, rank: 16}; docs/config.md has "
        "all it takes. null: train all weights.",
    )
    native: bool = Field(
        default=False,
        description="Compute with OLMo-core's own modules instead of transformers': the same model, for llama, qwen3, "
        "olmo2, olmo3 and gemma3 text. The result is written in both forms.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Only for sources you trust."
    )

    @property
    def is_mixed(self) -> bool:
        """Whether compute and weights differ in their number type."""
        return self.compute_dtype not in (None, self.dtype)


class DataConfig(Section):
    train: Sources = Field(
        description="Preference pairs to train on: a file (JSON lines, JSON, CSV, Parquet or Arrow), a pattern or a "
        "folder of files, a folder written by save_to_disk, package:PACKAGE/FILE, or a hub name, also as in {path: "
        "OWNER/NAME, name: CONFIG, split: train}. A list mixes several sources, as in [{path: a.jsonl, weight: 2}, "
        "{path: b.csv, weight: 1}] or [a.jsonl, b.csv].",
        examples=["train.jsonl"],
    )
    eval: SourcesOrShare | None = Field(
        default=None,
        description="Held-out pairs, evaluated before and after training. Sources in the form of train: pairs of train "
        "with one of their prompts are not trained on. A number, as 0.05: that share of train's prompts, each with all "
        "its pairs, chosen by the prompts alone. null: none.",
    )
    template: PathText | None = Field(
        default=None,
        description="Chat template. null: the tokenizer's own; none: raw text, no template; "
        "or the path of a .jinja file.",
    )
    max_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Most tokens of a prompt with its longer answer. null: no limit."
    )
    truncation: Literal["drop", "keep_start", "keep_end"] = Field(
        default="drop",
        description="What happens to a pair over max_length. drop: leave it out; "
        "keep_start, keep_end: keep the first or the last tokens of the prompt, if whole answers leave room for one.",
    )
    on_bad: Literal["error", "drop"] = Field(
        default="error",
        description="What happens to a record that cannot be used. error: stop; drop: leave it out.",
    )
    compare: Literal["all", "best_worst", "best_rest", "adjacent"] = Field(
        default="all",
        description="Which answers of a list are compared, where records have several answers with scores. all: every "
        "two; best_worst: the best and the worst; best_rest: the best with each other one; adjacent: neighbours in the "
        "order of scores. Each answer is computed once, however many comparisons it is in.",
    )
    min_gap: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Least difference between the scores of two answers that are compared."
    )
    train_on: Literal["assistant", "last", "final"] = Field(
        default="assistant",
        description="Which turns are trained, where answers are conversations. assistant: every assistant turn after "
        "the prompt; last: the last one; final: of the last one what follows its reasoning. All else is context.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of the columns in your data where they differ from ours, as ours: yours, "
        "for example {prompt: question}.",
    )

    @property
    def eval_share(self) -> float | None:
        """The share of train's prompts to hold out, if eval is one."""
        return self.eval if isinstance(self.eval, float) else None

    @property
    def eval_sources(self) -> Sources | None:
        """Where held-out pairs of their own are, if eval says so."""
        return None if isinstance(self.eval, float) else self.eval


class OptimConfig(Section):
    kind: OptimKind = Field(
        default="adamw",
        description="Optimizer. adamw; adamw_8bit: its state in 8 bits; adamw_sr, adamw_8bit_sr: the same, bfloat16 "
        "weights rounded up or down at random, so that small updates count; adamw_skip: leaves out a step whose loss "
        "or gradient stands out by six standard deviations; muon: orthogonal updates of the layers' matrices, AdamW "
        "for the rest.",
    )
    lr: NonNegative = Field(default=1e-6, description="Highest learning rate, reached at the end of warm-up.")
    # Not strict: YAML has lists where Python has tuples. The two numbers in it stay strict.
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="Decay of AdamW's two running averages. muon: the first is its momentum.",
    )
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW's weight decay.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear",
        description="Learning rate after warm-up. linear, cosine: falls towards 0, reached one step after the last.",
    )
    warmup: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="Fraction of all steps over which the learning rate rises from 0."
    )
    max_grad_norm: Positive | None = Field(
        default=1.0, description="The gradient's norm is clipped to this. null: no clipping."
    )
    batch_size: Count = Field(
        default=64,
        description="Examples (preference pairs) per optimizer step, over all processes: the size of a global batch.",
    )
    epochs: Count = Field(default=1, description="Passes over the training pairs.")
    max_steps: Count | None = Field(
        default=None,
        description="Stop after this many steps, even inside an epoch. null: when the epochs are done.",
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="Seed of all that is random, such as the order of the pairs."
    )


class LayoutConfig(Section):
    rows: Rows = Field(
        default="shared",
        description="How pairs become sequences. shared: packed rows, the prompt computed once for both "
        "answers; packed: packed rows, the prompt repeated; padded: chosen and rejected right-padded in one "
        "forward pass; padded_separate: the same in two.",
    )
    microbatch_tokens: Count | Literal["auto"] = Field(
        default="auto",
        description="Tokens of one forward and backward pass on one rank: the main setting for memory. "
        "auto: measured on a GPU, as many as fit and make it faster; on the CPU 4096, or the longest pair.",
    )
    parallel: Parallel = Field(
        default="auto",
        description="How ranks work together. single: one process; ddp: a whole model on every rank; "
        "fsdp: the model sharded over all ranks; hsdp: sharded inside groups, copied between them.",
    )
    hsdp_shard: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Ranks in one shard group. With parallel: hsdp, and only then."
    )
    tensor_parallel: Count = Field(
        default=1,
        description="Ranks that compute every layer together, next to each other. With model.native, packed rows and "
        "FSDP or HSDP over the groups of so many ranks. 1: each rank computes alone.",
    )
    grad_sync: Literal["auto", "last", "every"] = Field(
        default="auto",
        description="When ranks add up gradients, and FSDP gathers weights. last: once a step (fast); "
        "every: for each microbatch (less memory with FSDP).",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the decoder layers (torch.compile). null: CUDA, bfloat16 and packed rows, not native.",
    )
    checkpointing: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="Recompute activations in the backward pass: less memory, more compute. full: in every layer; "
        "auto: on a GPU in as many layers as memory asks for, which may be none; on the CPU in none.",
    )
    offload: bool = Field(
        default=False,
        description="Keep weights, gradients and the optimizer's state in the host's memory, and step there: less GPU "
        "memory, slower. Needs CUDA and parallel auto, fsdp or hsdp.",
    )
    score_tokens: Count | None = Field(
        default=None,
        description="Tokens of one forward-only microbatch (reference and evaluation). "
        "null: twice microbatch_tokens; 16384 for a reference of its own that is scored before that is known.",
    )


class RunConfig(Section):
    folder: PathText | None = Field(
        default=None,
        description="Folder for checkpoints, metrics and the result. "
        "null: runs/NAME-ID, from the config file's name and the run id.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute. auto: a CUDA GPU where there is one, else the CPU."
    )
    log_every: Count = Field(default=1, description="Steps between two lines of metrics.")
    loggers: list[Literal["tensorboard", "wandb", "comet"]] = Field(
        default_factory=list,
        description="Where metrics go besides metrics.jsonl and the terminal. tensorboard: event files in the run's "
        "folder; wandb: Weights & Biases (with WANDB_MODE=offline into that folder); comet: Comet. Each needs the "
        "extra of its name.",
    )
    save_every: Count = Field(default=250, description="Steps between two checkpoints.")
    save_minutes: Positive | None = Field(
        default=None, description="Also save where this many minutes passed since the last checkpoint. null: do not."
    )
    keep: Count = Field(default=2, description="Checkpoints kept; older ones are deleted.")
    keep_best: bool = Field(
        default=False,
        description="Besides those, keep the one of the lowest eval/loss, saved when it is found; its model is "
        "exported at the end too, as model_best. Needs eval_every.",
    )
    eval_every: Count | None = Field(
        default=None,
        description="Steps between two evaluations on held-out pairs. null: only before training and at its end.",
    )
    samples: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Held-out prompts that are answered before and after training, greedily and by a draw at "
        "temperature 1 (needs run.export). null: 3 where that is possible; 0: none.",
    )
    spot_checks: PathText | None = Field(
        default=None,
        description="File of questions with known answers and of plain texts, measured before and after training to "
        'show what it cost (docs/reports.md). A record is {"prompt": ..., "expect": ...} or {"text": ...}. null: none.',
    )
    export: bool = Field(default=True, description="Write the tuned model as a Hugging Face folder at the end.")


class Config(Section):
    """A whole run. `model` and `data` have required fields; every other section may be left out."""

    model: ModelConfig = Field(description="The model to tune, and in which precision.")
    data: DataConfig = Field(description="The preference pairs, and how they become tokens.")
    objective: ObjectiveConfig = Field(
        default_factory=ObjectiveConfig, description="What is minimised over a global batch."
    )
    optim: OptimConfig = Field(
        default_factory=OptimConfig, description="How each global batch moves the weights, and for how long."
    )
    layout: LayoutConfig = Field(
        default_factory=LayoutConfig,
        description="How a global batch is cut up to fit the hardware: speed and memory, never the result.",
    )
    run: RunConfig = Field(default_factory=RunConfig, description="Where it runs, and what it writes, logs and keeps.")

    @property
    def only_fsdp_for(self) -> str | None:
        """What FSDP and HSDP alone can do, where the config asks for such."""
        if self.model.is_mixed:
            return "mixed precision"
        if self.layout.offload:
            return "layout.offload"
        return "layout.tensor_parallel" if self.layout.tensor_parallel > 1 else None

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        conflicts = list(conflicts_of(self))
        if conflicts:
            text = "; ".join(f"{field}: {why}" for field, why in conflicts)
            raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": conflicts})
        return self


def run_id(config: Config) -> str:
    """Twelve hex digits that name the math of a run: the same whatever its layout and run sections say."""
    math = config.model_dump(mode="json", exclude=set(NOT_MATH))
    canonical = json.dumps(math, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=6).hexdigest()
