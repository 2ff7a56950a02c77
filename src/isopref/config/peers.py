"""Names of our fields and values in other trainers and earlier versions, for error messages.

docs/coming-from.md lists the names by trainer.
"""

from typing import Any

# Different name, same meaning of the value.
SAME: dict[str, str] = {
    "adam_epsilon": "optim.eps",
    "base_model": "model.path",
    "checkpointing_steps": "run.save_every",
    "cutoff_len": "data.max_length",
    "dataset_name": "data.train",
    "dpo_beta": "objective.beta",
    "dpo_label_smoothing": "objective.label_smoothing",
    "eval_steps": "run.eval_every",
    "keep_last_n_checkpoints": "run.keep",
    "learning_rate": "optim.lr",
    "logging_steps": "run.log_every",
    "lora_alpha": "model.adapter.alpha",
    "lora_r": "model.adapter.rank",
    "lora_rank": "model.adapter.rank",
    "loss_type": "objective.loss",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "max_seq_length": "data.max_length",
    "max_train_steps": "optim.max_steps",
    "model_name_or_path": "model.path",
    "num_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "output_dir": "run.folder",
    "pref_beta": "objective.beta",
    "pref_loss": "objective.loss",
    "ref_model": "model.reference",
    "report_to": "run.loggers",
    "rl": "objective.loss",
    "rl_beta": "objective.beta",
    "router_aux_loss_coef": "objective.balance_weight",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "sequence_len": "data.max_length",
    "simpo_gamma": "objective.gamma",
    "torch_compile": "layout.compile",
    "torch_dtype": "model.dtype",
    "use_weighting": "objective.wpo",
    "warmup_ratio": "optim.warmup",
}

_ADAPTER = "Set model.adapter: {kind: lora} for an adapter, null to train all weights"
_BATCH = (
    "optim.batch_size is the number of pairs per step across all GPUs: per-device batch x accumulation steps x GPUs. "
    "isopref splits it to fit (layout.microbatch_tokens), which does not change the result"
)
_BETAS = "optim.betas takes both, e.g. [0.9, 0.95]"
_DIVERGENCE = "objective.divergence takes the kind, or a number: the alpha of the alpha-divergence"
_EVAL_EVERY = (
    "Set run.eval_every to the number of steps between evaluations; by default, evaluation runs before and "
    "after training"
)
_HALF = (
    "Set model.compute_dtype: bfloat16 to compute in bfloat16, or model.dtype: bfloat16 to store the weights in it too"
)
_LABEL_WEIGHTS = "The loss kto takes desirable_weight for good answers and undesirable_weight for bad ones"
_MOVES = "objective.reference_moves takes steps and share, e.g. [64, 0.6]"
_NLL = "objective.nll_weight is the weight of that term, per token over the global batch"
_SHARDED = "Set layout.parallel: fsdp, and layout.offload to use host memory"
_SHARE = "data.eval takes a share of the prompts, e.g. 0.05, or separate held-out data"
_SOURCES = "data.train takes files, glob patterns, folders or hub names; a list mixes them"
_HUB = "A source takes name, split and revision, e.g. data.train: {path: OWNER/NAME, name: CONFIG, split: train}"
_STAGE = "Nothing to set: objective.loss determines what is trained"
_TARGETS = "model.adapter.targets takes a list, e.g. [q_proj, v_proj]; auto means every linear layer"
_WORKERS = "Nothing to set: tokenisation uses all cores, and steps are built ahead"

# Names whose setting works differently here, or does not exist.
OTHERWISE: dict[str, str] = {
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "attn_implementation": "Nothing to set: isopref picks attention by row type, device and installed packages",
    "bf16": _HALF,
    "chat_template": "data.template takes null for the tokenizer's own, none, or the path to a .jinja file",
    "dataloader_num_workers": _WORKERS,
    "dataset": _SOURCES,
    "dataset_config": _HUB,
    "dataset_num_proc": _WORKERS,
    "dataset_train_split": _HUB,
    "datasets": _SOURCES,
    "deepspeed": _SHARDED,
    "do_train": _STAGE,
    "eval_strategy": _EVAL_EVERY,
    "f_alpha_divergence_coef": _DIVERGENCE,
    "f_divergence_type": _DIVERGENCE,
    "finetuning_type": _ADAPTER,
    "fp16": f"There is no float16. {_HALF}",
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "gamma_beta_ratio": "objective.gamma is that ratio times beta",
    "gradient_accumulation_steps": _BATCH,
    "activation_offloading": "layout.offload_activations takes auto, none or full",
    "gradient_checkpointing": "layout.checkpointing takes auto, none or full",
    "kto_chosen_weight": _LABEL_WEIGHTS,
    "kto_ftx": _NLL,
    "kto_rejected_weight": _LABEL_WEIGHTS,
    "load_best_model_at_end": "run.keep_best also exports that model, as model_best next to the last one",
    "load_in_4bit": "Set model.adapter.quantize: nf4",
    "lora_dropout": "Nothing to set: dropout is always off, because its noise would depend on the layout",
    "lora_target": _TARGETS,
    "lora_target_modules": _TARGETS,
    "loss_weights": "objective.loss takes names with weights, e.g. {sigmoid: 1.0, hinge: 0.5}",
    "max_prompt_length": "data.max_length limits a prompt plus its longest answer",
    "max_samples": "A source takes a count, e.g. data.train: {path: pairs.jsonl, count: 1000}",
    "micro_batch_size": _BATCH,
    "mixer_list": _SOURCES,
    "overwrite_cache": "Nothing to set: the cache is keyed by content, so it is never stale",
    "overwrite_output_dir": "Nothing is overwritten: set a different run.folder, or remove the old one",
    "padding_free": "layout.rows: shared (the default) and packed use no padding",
    "per_device_eval_batch_size": "Use layout.score_tokens, which is in tokens",
    "per_device_train_batch_size": _BATCH,
    "precompute_ref_log_probs": "Nothing to set: isopref always does this and caches the result",
    "pref_ftx": _NLL,
    "preprocessing_num_workers": _WORKERS,
    "ref_model_mixup_alpha": _MOVES,
    "ref_model_sync_steps": _MOVES,
    "reference_free": "Choose an objective.loss that needs no reference: simpo, orpo or cpo",
    "resume_from_checkpoint": "Write isopref train --resume",
    "rpo_alpha": _NLL,
    "stage": _STAGE,
    "sync_ref_model": _MOVES,
    "truncation_mode": "Use data.truncation, which truncates only prompts",
    "use_peft": _ADAPTER,
    "val_set_size": _SHARE,
    "val_size": _SHARE,
    "warmup_steps": "optim.warmup is a fraction of all steps: for N steps, set N / total steps",
}

# Names from earlier versions.
EARLIER: dict[str, str] = {
    "batch_pairs": "It is now called optim.batch_size",
    "microbatch_pairs": "Set layout.microbatch_tokens; for one pair at a time, use the length of the longest pair",
    "sample_tokens": "Nothing to set: answers are limited to 64 tokens",
}
ADVICE = {**OTHERWISE, **EARLIER}

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "bfloat16 (there is no float16)",
    "float16": "bfloat16 (there is no float16)",
    "fp32": "float32",
}
# Values from other trainers, by our field, and what to write instead.
VALUES: dict[str, dict[str, str]] = {
    "model.dtype": _DTYPES,
    "model.compute_dtype": _DTYPES,
    "model.adapter": {"lora": "{kind: lora}", "dora": "{kind: dora}", "qlora": "{kind: lora, quantize: nf4}"},
    "objective.loss": {
        "apo_zero_unpaired": "apo_zero on pairs, or a loss of labelled answers such as kto",
        "dpo": "sigmoid",
        "sigmoid_norm": "dpo_norm",
    },
    "objective.weighting": {"pair": "example"},  # from earlier versions
    "optim.kind": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
    },
    "optim.schedule": {"constant_with_warmup": "constant, and set optim.warmup"},
    "run.loggers": {
        "wandb": "[wandb]",
        "tensorboard": "[tensorboard]",
        "comet_ml": "[comet]",
        "mlflow": "[mlflow]",
        "trackio": "[trackio]",
        "none": "[]",
    },
}


def instead(field: str, value: Any) -> str | None:
    """What to write instead of another trainer's value for a field; None if unknown."""
    if field == "optim.warmup" and isinstance(value, int | float) and value > 1:
        return f"a fraction of all steps: {value:g} / total steps"
    return VALUES.get(field, {}).get(value) if isinstance(value, str) else None
