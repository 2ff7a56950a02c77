"""TRL's trainers on the examples of a cell: DPO (lists as the pairs they expand to), KTO and reward models.

TRL gets tokens, references and its best plain settings (see vs_trl.py). Work that is not training, such as
hashing all weights to name a cache file, is left out.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
import workload
from clocks import PeerClock
from ready import Cell, uniform_logp
from records import UnavailableError
from transformers import PreTrainedModel

from isopref.examples import Example
from isopref.testing.models import byte_tokenizer


def run_trl(cell: Cell, *, liger: bool, attention: Sequence[bool] = (False, True)) -> dict[str, Any]:
    """`attention`: on a GPU, whether torch may use cuDNN's; with several settings, the fastest counts."""
    if cell.quantised:
        raise UnavailableError("TRL's 4-bit weights come from bitsandbytes, which is not measured here")
    if cell.terms_per_step % cell.trl_batch:
        raise UnavailableError(f"microbatches of {cell.trl_batch} do not divide the {cell.terms_per_step} of a step")
    if liger:
        import liger_kernel  # noqa: F401 -- fails early if it is missing
    from datasets import Dataset
    from trl.trainer import dpo_trainer, kto_trainer

    for module in (dpo_trainer, kto_trainer):
        module.hash_module = lambda _model: uuid4().hex

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = _model(cell, device)
    cudnn_settings = attention if torch.cuda.is_available() else (False,)
    clock = PeerClock(cell, cudnn_settings)
    every = workload.in_order(cell.examples(made.config.vocab_size)) * len(cudnn_settings)
    trainer, config, more = _trainer(cell)
    with tempfile.TemporaryDirectory() as folder, own_attention():
        args = config(
            output_dir=folder,
            per_device_train_batch_size=cell.trl_batch,
            gradient_accumulation_steps=cell.terms_per_step // cell.trl_batch,
            max_steps=len(cudnn_settings) * (cell.warmup + cell.steps),
            learning_rate=1e-6,
            optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
            max_length=None,
            gradient_checkpointing=False,
            bf16=cell.dtype == "bfloat16",
            use_liger_kernel=liger,
            use_cpu=device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataset_num_proc=None,
            train_sampling_strategy="sequential",
            **more,
        )
        _tokenised(cell, trainer)(
            model=made,
            args=args,
            train_dataset=Dataset.from_list([x for one in every for x in _records(cell, one, made.config.vocab_size)]),
            processing_class=byte_tokenizer(),
            callbacks=[clock],
            peft_config=_peft_config(cell),
        ).train()
    return {**clock.result(), "trl_batch": cell.trl_batch}


@contextmanager
def own_attention() -> Iterator[None]:
    """Restore torch's attention setting when the context ends."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _model(cell: Cell, device: torch.device) -> PreTrainedModel:
    dtype = getattr(torch, cell.dtype)
    if cell.is_reward:
        return workload.reward_model(cell.shape, dtype=dtype, device=device)
    return workload.model(cell.shape, dtype=dtype, device=device)


def _trainer(cell: Cell) -> tuple[Any, Any, dict[str, Any]]:
    """TRL's trainer for the cell's loss, its config class, and the arguments that only this config takes."""
    import trl

    reference = {"precompute_ref_log_probs": True}
    if cell.loss == "kto":
        return trl.KTOTrainer, trl.KTOConfig, reference
    if cell.is_reward:
        return trl.RewardTrainer, trl.RewardConfig, {}
    # For a mixture of experts, TRL would add a load-balancing loss, which isopref adds only on request.
    return trl.DPOTrainer, trl.DPOConfig, {**reference, "router_aux_loss_coef": 0.0}


def _tokenised(cell: Cell, trainer: Any) -> Any:
    """The trainer, changed to take tokenised examples, and made-up references, as they are."""

    class Tokenised(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_args: Any, **_kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset if cell.has_made_up_reference else super()._precompute_ref_logps(dataset, *args, **kwargs)

    return Tokenised


def _records(cell: Cell, example: Example, vocabulary: int) -> list[dict[str, Any]]:
    """An example in the format of TRL's trainer for the cell's loss: one record per comparison or labelled answer."""
    prompt, *answers = (part.tolist() for part in example.parts)
    if cell.loss == "kto":
        # For its KL term, TRL scores an answer of another example. This example's other answer takes as long.
        return [
            {
                "prompt_ids": prompt,
                "completion_ids": answer,
                "KL_completion_ids": answers[number - 1],
                "label": bool(label),
            }
            for number, (answer, label) in enumerate(zip(answers, example.scores, strict=True))
        ]
    pairs = [(answers[better], answers[worse]) for better, worse in example.comparisons]
    if cell.is_reward:
        return [{"chosen_ids": prompt + better, "rejected_ids": prompt + worse} for better, worse in pairs]
    return [
        {
            "prompt_ids": prompt,
            "chosen_ids": better,
            "rejected_ids": worse,
            "ref_chosen_logps": uniform_logp(len(better), vocabulary),
            "ref_rejected_logps": uniform_logp(len(worse), vocabulary),
        }
        for better, worse in pairs
    ]


def _peft_config(cell: Cell) -> Any:
    """The cell's adapter in TRL's format: on all linear layers, like isopref's."""
    if cell.adapter is None:
        return None
    from peft import LoraConfig

    rank = cell.adapter["rank"]
    alpha = cell.adapter.get("alpha", 2 * rank)
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
