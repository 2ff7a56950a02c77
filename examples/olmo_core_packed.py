"""Packed rows with shared prompts in your own training script, on OLMo-core's Trainer.

ExampleLoader packs pairs into rows without padding, storing each prompt once for both answers. The gradient is the same
as with padded batches (olmo_core_trainer.py), but training is faster.

    python examples/olmo_core_packed.py /path/to/model pairs.jsonl out/            # one process
    torchrun --nproc_per_node 2 examples/olmo_core_packed.py ...                   # several processes

Each line of pairs.jsonl has the strings `prompt`, `chosen` and `rejected`. The script logs the metrics of every step
and writes checkpoints and out/model, which `from_pretrained` loads.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.distributed.utils import get_rank, get_world_size, is_distributed
from olmo_core.optim import LinearWithWarmup
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import CheckpointerCallback, ConsoleLoggerCallback
from olmo_core.utils import get_default_device
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref import (
    Budget,
    DPOTrainModule,
    ExampleLoader,
    ExampleTable,
    PairTokens,
    Policy,
    pair_loss,
    parallelize,
    score_table,
)


def read_pairs(path: Path, tokenizer: Any) -> ExampleTable:
    """Tokenise the pairs in a file: the prompt with the chat template, each answer with an end token."""

    def tokens(text: str) -> np.ndarray:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenise(pair: dict[str, str]) -> PairTokens:
        turns = [{"role": "user", "content": pair["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        chosen, rejected = (pair[side] + tokenizer.eos_token for side in ("chosen", "rejected"))
        return PairTokens(tokens(prompt), tokens(chosen), tokens(rejected))

    return ExampleTable.from_tokens(tokenise(json.loads(line)) for line in path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--microbatch-tokens", type=int, default=8192, help="per rank; does not affect the result")
    arguments = parser.parse_args()
    prepare_training_environment(seed=0, backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = get_default_device()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    table = read_pairs(arguments.pairs, tokenizer)
    budget = Budget("shared", tokens=arguments.microbatch_tokens)
    loader = ExampleLoader(table, batch_size=8, budget=budget, weighting="example", work_dir=str(arguments.folder))

    policy = Policy(AutoModelForCausalLM.from_pretrained(arguments.model)).to(device)
    reference = score_table(policy, table, budget, device=device)  # the model before training; ranks share the work
    spread = parallelize(policy, "ddp" if is_distributed() else "single", device=device, world_size=get_world_size())
    train_module = DPOTrainModule(
        spread,
        torch.optim.AdamW(spread.parameters(), lr=1e-5),
        objective=pair_loss("sigmoid", beta=0.1, nll_weight=0.2),
        reference=reference,
        weighting="example",
        scheduler=LinearWithWarmup(warmup=2, alpha_f=0.0),
        max_grad_norm=1.0,
    )
    trainer = TrainerConfig(
        save_folder=str(arguments.folder),
        save_overwrite=True,
        max_duration=Duration.epochs(2),
        metrics_collect_interval=1,
        callbacks={
            "checkpointer": CheckpointerCallback(pre_train_checkpoint=False, save_async=False),
            "console_logger": ConsoleLoggerCallback(metrics=["train/*", "optim/*"]),
        },
    ).build(train_module, loader)
    trainer.fit()

    if get_rank() == 0:
        with policy.plain() as model:  # with the model's own attention, not ours
            model.save_pretrained(arguments.folder / "model")
        tokenizer.save_pretrained(arguments.folder / "model")
    teardown_training_environment()


if __name__ == "__main__":
    main()
