"""The config schema: every field, its default and its meaning, defined once.

Owns the structure of the config and the run id. conflicts.py checks combinations, load.py reads files, and build turns
a config into objects. Imports no torch.
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

NOT_MATH = ("layout", "run")  # sections that cannot change the trained weights, so they are not part of the run id

DType = Literal["float32", "bfloat16", "float64"]
ComputeDType = Literal["float32", "bfloat16", "float64", "float8"]
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
        description="Reference model, in any form that path takes, with the same vocabulary. null: the starting model.",
    )
    dtype: DType = Field(default="float32", description="Dtype of the weights and the optimizer state.")
    compute_dtype: ComputeDType | None = Field(
        default=None,
        description="Dtype of the forward and backward pass. null: same as dtype. If it differs, training uses mixed "
        "precision with master weights, which needs layout.parallel auto, fsdp or hsdp. With an adapter, frozen "
        "weights are held in this dtype. float8: bfloat16, with the linear layers' products in float8 (Hopper GPUs and "
        "newer).",
    )
    adapter: AdapterConfig | None = Field(
        default=None,
        description="Train an adapter on the frozen model, e.g. {kind: lora, rank: 16}; docs/config.md lists its "
        "fields. null: train all weights.",
    )
    native: bool = Field(
        default=False,
        description="Compute with OLMo-core's own modules instead of transformers': the same model, for llama, qwen3, "
        "olmo2, olmo3 and gemma3 text. The result is written in both formats.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that ships with the model. Only for sources you trust."
    )

    @property
    def is_mixed(self) -> bool:
        """Whether the compute dtype differs from the weights' dtype."""
        return self.pass_dtype != self.dtype

    @property
    def is_float8(self) -> bool:
        return self.compute_dtype == "float8"

    @property
    def pass_dtype(self) -> DType:
        """The dtype of activations. With float8, only operands of products have 8 bits."""
        if self.compute_dtype == "float8":
            return "bfloat16"
        return self.compute_dtype or self.dtype


class DataConfig(Section):
    train: Sources = Field(
        description="Preference data to train on: a file (JSON Lines, JSON, CSV, Parquet or Arrow), a glob pattern, a "
        "folder of files, a folder written by save_to_disk, package:PACKAGE/FILE, or a hub name, optionally as {path: "
        "OWNER/NAME, name: CONFIG, split: train}. A list mixes several sources: [{path: a.jsonl, weight: 2}, "
        "{path: b.csv, weight: 1}] or [a.jsonl, b.csv].",
        examples=["train.jsonl"],
    )
    eval: SourcesOrShare | None = Field(
        default=None,
        description="Held-out pairs, evaluated before and after training. Sources, in the same form as train: training "
        "pairs that share a prompt with them are excluded. A number such as 0.05: hold out that share of train's "
        "prompts, each with all its pairs, selected by the prompts alone. null: none.",
    )
    template: PathText | None = Field(
        default=None,
        description="Chat template. null: the tokenizer's own; none: raw text without a template; "
        "or the path to a .jinja file.",
    )
    max_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Maximum tokens in a prompt plus its longest answer. null: no limit."
    )
    truncation: Literal["drop", "keep_start", "keep_end"] = Field(
        default="drop",
        description="What to do with a pair over max_length. drop: skip it; keep_start, keep_end: truncate the prompt "
        "to its first or last tokens, provided the full answers leave room for at least one.",
    )
    on_bad: Literal["error", "drop"] = Field(
        default="error",
        description="What to do with an unusable record. error: stop; drop: skip it and count it.",
    )
    compare: Literal["all", "best_worst", "best_rest", "adjacent"] = Field(
        default="all",
        description="Which answers to compare if records have several scored answers. all: all pairs of answers; "
        "best_worst: the best with the worst; best_rest: the best with each of the others; adjacent: neighbours in the "
        "ranking. Each answer is computed once, however many comparisons it is in.",
    )
    min_gap: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Minimum score difference for two answers to be compared."
    )
    group_by_prompt: bool = Field(
        default=False,
        description="Group all records of a source with the same prompt into one example: pairs become comparisons of "
        "its distinct answers, labelled answers stay as they are. Each prompt is computed once, and optim.batch_size "
        "counts prompts.",
    )
    train_on: Literal["assistant", "last", "final"] = Field(
        default="assistant",
        description="Which turns to train on if answers are conversations. assistant: every assistant turn after the "
        "prompt; last: only the last one; final: the last one without its reasoning. Everything else is context.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Maps isopref's column names to yours, for example {prompt: question}.",
    )

    @property
    def eval_share(self) -> float | None:
        """The share of train's prompts to hold out, if eval is a number."""
        return self.eval if isinstance(self.eval, float) else None

    @property
    def eval_sources(self) -> Sources | None:
        """Sources of held-out pairs, if eval names any."""
        return None if isinstance(self.eval, float) else self.eval


class OptimConfig(Section):
    kind: OptimKind = Field(
        default="adamw",
        description="Optimizer. adamw; adamw_8bit: with 8-bit state; adamw_sr, adamw_8bit_sr: the same with stochastic "
        "rounding of bfloat16 weights, so small updates are not lost; adamw_skip: skips a step whose loss or gradient "
        "norm is six standard deviations above recent steps; muon: orthogonalised updates for the layers' matrices, "
        "AdamW for the rest.",
    )
    lr: NonNegative = Field(default=1e-6, description="Peak learning rate, reached at the end of warmup.")
    # Not strict: YAML has lists where Python has tuples. The two numbers in it stay strict.
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="Decay rates of AdamW's two running averages. muon: the first is its momentum.",
    )
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW's weight decay.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear",
        description="Learning rate after warmup. linear, cosine: decays to 0, reached one step after the last.",
    )
    warmup: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="Fraction of all steps during which the learning rate rises from 0."
    )
    max_grad_norm: Positive | None = Field(
        default=1.0, description="Clip the gradient norm to this value. null: no clipping."
    )
    batch_size: Count = Field(
        default=64,
        description="Examples (preference pairs) per optimizer step, across all processes: the global batch size.",
    )
    epochs: Count = Field(default=1, description="Passes over the training pairs.")
    max_steps: Count | None = Field(
        default=None,
        description="Stop after this many steps, even in the middle of an epoch. null: after all epochs.",
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="Seed for everything random, such as the order of the pairs."
    )


class LayoutConfig(Section):
    rows: Rows = Field(
        default="shared",
        description="How pairs become sequences. shared: packed rows, with each prompt computed once for both "
        "answers; packed: packed rows, with the prompt repeated; padded: chosen and rejected right-padded in one "
        "forward pass; padded_separate: the same in two.",
    )
    microbatch_tokens: Count | Literal["auto"] = Field(
        default="auto",
        description="Tokens per forward and backward pass on one rank: the main knob for memory. auto: on a GPU, "
        "the most that fits, up to where speed stops improving; on the CPU, 4096 or the longest pair.",
    )
    parallel: Parallel = Field(
        default="auto",
        description="How ranks share the work. single: one process; ddp: a full model on every rank; fsdp: the model "
        "sharded over all ranks; hsdp: sharded within groups, replicated across them. auto: fsdp for mixed precision, "
        "offload or tensor_parallel; otherwise single for one process, ddp if weights, gradients and optimizer state "
        "fit comfortably, and fsdp if not.",
    )
    hsdp_shard: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="Ranks per shard group. Only with parallel: hsdp, which requires it."
    )
    tensor_parallel: Count = Field(
        default=1,
        description="Number of neighbouring ranks that compute every layer together. Needs model.native, packed rows "
        "and FSDP or HSDP across these groups. 1: off.",
    )
    context_parallel: Count = Field(
        default=1,
        description="Number of neighbouring ranks that split the tokens of every row, for pairs too long for one rank. "
        "Needs packed rows and several processes; microbatch_tokens counts the tokens of all ranks that share a row. "
        "1: off.",
    )
    grad_sync: Literal["auto", "last", "every"] = Field(
        default="auto",
        description="When ranks reduce gradients and FSDP gathers weights. last: once per step (faster); every: for "
        "each microbatch (less memory with FSDP). auto: last, unless that would take too much memory under FSDP.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the decoder layers (torch.compile). null: on CUDA in bfloat16 with packed rows and "
        "without tensor or context parallelism.",
    )
    checkpointing: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="Recompute activations in the backward pass: less memory, more compute. full: in every layer; "
        "auto: on a GPU, in as many layers as memory requires, possibly none; on the CPU, in none.",
    )
    offload_activations: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="Keep the inputs of recomputing layers in host memory, copied while the GPU computes. full: of all "
        "layers but the last (needs checkpointing: full); auto: on a GPU, of as many as the longest pair requires, "
        "possibly none, provided microbatch_tokens or checkpointing is auto too.",
    )
    mlp_tile_tokens: Count | Literal["auto"] | None = Field(
        default="auto",
        description="Compute the layers' MLPs this many tokens at a time, and again in the backward pass, so that long "
        "rows need less memory. null: all tokens at once; auto: like offload_activations, if offloading is not enough.",
    )
    offload: bool = Field(
        default=False,
        description="Keep weights, gradients and optimizer state in host memory and run the optimizer there: less GPU "
        "memory, but slower. Needs CUDA and parallel auto, fsdp or hsdp.",
    )
    score_tokens: Count | None = Field(
        default=None,
        description="Tokens per forward-only microbatch (reference and evaluation). null: twice microbatch_tokens, or "
        "16384 for a separate reference model, which is scored before microbatch_tokens is known.",
    )

    @property
    def ranks_together(self) -> int:
        """Ranks that work on the same pairs: on every layer together, or on a part of every row each."""
        return self.tensor_parallel * self.context_parallel


class RunConfig(Section):
    folder: PathText | None = Field(
        default=None,
        description="Folder for checkpoints, metrics and the tuned model. "
        "null: runs/NAME-ID, from the config file's name and the run id.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute. auto: a CUDA GPU if there is one, otherwise the CPU."
    )
    log_every: Count = Field(default=1, description="Steps between lines of metrics.")
    loggers: list[Literal["tensorboard", "wandb", "comet", "mlflow", "trackio"]] = Field(
        default_factory=list,
        description="Where to send metrics, in addition to metrics.jsonl and the terminal. tensorboard: event files in "
        "the run folder; wandb: Weights & Biases (in that folder with WANDB_MODE=offline); comet: Comet; mlflow: the "
        "server MLFLOW_TRACKING_URI, else a database in that folder; trackio: Trackio. Each needs the extra of the "
        "same name.",
    )
    profile: Count | None = Field(
        default=None,
        description="Number of steps to trace with torch's profiler on the first rank, after two warm-up steps. Writes "
        "a Chrome trace and a table of operators to profile/ in the run folder. null: off.",
    )
    save_every: Count = Field(default=250, description="Steps between checkpoints.")
    save_minutes: Positive | None = Field(
        default=None, description="Also save once this many minutes have passed since the last checkpoint. null: off."
    )
    keep: Count = Field(default=2, description="Number of checkpoints to keep; older ones are deleted.")
    keep_best: bool = Field(
        default=False,
        description="Also keep the checkpoint with the lowest eval/loss, saved when it is reached, and export its "
        "model at the end as model_best. Needs eval_every.",
    )
    eval_every: Count | None = Field(
        default=None,
        description="Steps between evaluations on held-out pairs. null: only before and after training.",
    )
    samples: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Number of held-out prompts to answer before and after training, greedily and sampled at "
        "temperature 1 (needs run.export). null: 3 if possible; 0: none.",
    )
    spot_checks: PathText | None = Field(
        default=None,
        description="File of questions with known answers and of plain texts, checked before and after training to "
        'show what it cost (docs/reports.md). A record is {"prompt": ..., "expect": ...} or {"text": ...}. null: none.',
    )
    export: bool = Field(default=True, description="Write the tuned model as a Hugging Face folder at the end.")


class Config(Section):
    """A complete config. `model` and `data` have required fields; every other section is optional."""

    model: ModelConfig = Field(description="The model to tune and its precision.")
    data: DataConfig = Field(description="The preference data and how it becomes tokens.")
    objective: ObjectiveConfig = Field(
        default_factory=ObjectiveConfig, description="What is minimised over a global batch."
    )
    optim: OptimConfig = Field(
        default_factory=OptimConfig, description="How each global batch updates the weights, and for how long."
    )
    layout: LayoutConfig = Field(
        default_factory=LayoutConfig,
        description="How a global batch is split to fit the hardware: affects speed and memory, never the result.",
    )
    run: RunConfig = Field(
        default_factory=RunConfig, description="Where the run happens, and what it writes, logs and keeps."
    )

    @property
    def only_fsdp_for(self) -> str | None:
        """The requested feature that only FSDP and HSDP support, if any."""
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
    """Twelve hex digits that identify the math of a run, independent of its layout and run sections."""
    math = config.model_dump(mode="json", exclude=set(NOT_MATH))
    canonical = json.dumps(math, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=6).hexdigest()
