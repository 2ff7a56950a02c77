"""What other trainers, and earlier versions, call our fields and values, for errors.

docs/coming-from.md has the names by trainer.
"""

from typing import Any

# Names under which the same value means the same.
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
    "optim.batch_size is the number of pairs per step over all GPUs: per-device batch x accumulation steps x GPUs. "
    "isopref chooses how to cut them to fit (layout.microbatch_tokens), which changes no result"
)
_BETAS = "optim.betas takes both, as in [0.9, 0.95]"
_DIVERGENCE = "objective.divergence takes the kind, or the alpha of the alpha-divergence as a number"
_EVAL_EVERY = "Set run.eval_every to the steps between two; without it, before training and at its end"
_HALF = "Set model.compute_dtype: bfloat16 to compute in it, or model.dtype: bfloat16 to hold the weights in it too"
_LABEL_WEIGHTS = "The loss kto takes it as desirable_weight for good and undesirable_weight for bad answers"
_MOVES = "objective.reference_moves takes steps and share, as in [64, 0.6]"
_NLL = "objective.nll_weight is the weight of that term, per token over the global batch"
_SHARDED = "Set layout.parallel: fsdp, and layout.offload for the host's memory"
_SHARE = "data.eval takes a share of the prompts, as 0.05, or held-out data of its own"
_SOURCES = "data.train takes files, patterns, folders or hub names; a list mixes them"
_HUB = "A source takes name, split and revision, as in data.train: {path: OWNER/NAME, name: CONFIG, split: train}"
_STAGE = "Nothing to set: objective.loss says what is trained"
_TARGETS = "model.adapter.targets takes a list, as in [q_proj, v_proj]; auto is every linear layer"
_WORKERS = "Nothing to set: all cores tokenise, and steps are built ahead"

# Names of what is said in another way here, or not at all.
OTHERWISE: dict[str, str] = {
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "attn_implementation": "Nothing to set: attention is chosen by the rows, the device and what is installed",
    "bf16": _HALF,
    "chat_template": "data.template takes null for the tokenizer's own, none, or the path of a .jinja file",
    "dataloader_num_workers": _WORKERS,
    "dataset": _SOURCES,
    "dataset_config": _HUB,
    "dataset_num_proc": _WORKERS,
    "dataset_train_split": _HUB,
    "datasets": _SOURCES,
    "deepspeed": _SHARDED,
    "desirable_weight": _LABEL_WEIGHTS,
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
    "gradient_checkpointing": "layout.checkpointing takes auto, none or full",
    "kto_chosen_weight": _LABEL_WEIGHTS,
    "kto_ftx": _NLL,
    "kto_rejected_weight": _LABEL_WEIGHTS,
    "load_best_model_at_end": "run.keep_best writes that model too, as model_best beside the last one",
    "load_in_4bit": "Set model.adapter.quantize: nf4",
    "lora_dropout": "Nothing to set: there is no dropout, whose draw would depend on the layout",
    "lora_target": _TARGETS,
    "lora_target_modules": _TARGETS,
    "loss_weights": "objective.loss takes names with weights, as in {sigmoid: 1.0, hinge: 0.5}",
    "max_prompt_length": "data.max_length is that of a prompt with its longer answer",
    "max_samples": "A source takes a count, as in data.train: {path: pairs.jsonl, count: 1000}",
    "micro_batch_size": _BATCH,
    "mixer_list": _SOURCES,
    "overwrite_cache": "Nothing to set: what is kept is found by its content, so it is never stale",
    "overwrite_output_dir": "Nothing is overwritten: set another run.folder, or remove that one",
    "padding_free": "layout.rows: shared, the default, and packed have no padding",
    "per_device_eval_batch_size": "layout.score_tokens is its counterpart, in tokens",
    "per_device_train_batch_size": _BATCH,
    "precompute_ref_log_probs": "Nothing to set: that is always done, and kept in the cache",
    "pref_ftx": _NLL,
    "preprocessing_num_workers": _WORKERS,
    "ref_model_mixup_alpha": _MOVES,
    "ref_model_sync_steps": _MOVES,
    "reference_free": "Choose an objective.loss that needs no reference: simpo, orpo or cpo",
    "resume_from_checkpoint": "Write isopref train --resume",
    "rpo_alpha": _NLL,
    "stage": _STAGE,
    "sync_ref_model": _MOVES,
    "truncation_mode": "data.truncation is its counterpart, and cuts prompts only",
    "undesirable_weight": _LABEL_WEIGHTS,
    "use_peft": _ADAPTER,
    "val_set_size": _SHARE,
    "val_size": _SHARE,
    "warmup_steps": "optim.warmup is a share of all steps: N steps are N / steps",
}

# Names of earlier versions.
EARLIER: dict[str, str] = {
    "batch_pairs": "It is now called optim.batch_size",
    "microbatch_pairs": "Set layout.microbatch_tokens; for one pair at a time, to the tokens of the longest pair",
    "sample_tokens": "Nothing to set: answers are cut at 64 tokens",
}
ADVICE = {**OTHERWISE, **EARLIER}

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "bfloat16 (there is no float16)",
    "float16": "bfloat16 (there is no float16)",
    "fp32": "float32",
}
# Values of others, by our field, and what to write for them.
VALUES: dict[str, dict[str, str]] = {
    "model.dtype": _DTYPES,
    "model.compute_dtype": _DTYPES,
    "model.adapter": {"lora": "{kind: lora}", "dora": "{kind: dora}", "qlora": "{kind: lora, quantize: nf4}"},
    "objective.loss": {
        "apo_zero_unpaired": "apo_zero, on pairs, or a loss of labelled answers",
        "dpo": "sigmoid",
        "sigmoid_norm": "dpo_norm",
    },
    "objective.weighting": {"pair": "example"},  # of earlier versions
    "optim.kind": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
    },
    "optim.schedule": {"constant_with_warmup": "constant, and the warm-up in optim.warmup"},
    "run.loggers": {"wandb": "[wandb]", "tensorboard": "[tensorboard]", "comet_ml": "[comet]", "none": "[]"},
}


def instead(field: str, value: Any) -> str | None:
    """What to write in place of a value, such as other trainers have, of a field; None where that is not known."""
    if field == "optim.warmup" and isinstance(value, int | float) and value > 1:
        return f"a share of all steps: {value:g} of them are {value:g} / steps"
    return VALUES.get(field, {}).get(value) if isinstance(value, str) else None
