"""isopref in your own training script, on OLMo-core's Trainer and without isopref's command line.

You provide a Hugging Face model, batches of padded pairs and a data loader for OLMo-core. isopref provides the policy,
the collator, the train module, and gradients that do not depend on `rank_microbatch_size`.

    python examples/olmo_core_trainer.py /path/to/model out/           # one process
    torchrun --nproc_per_node 2 examples/olmo_core_trainer.py ...      # several processes

The script logs the metrics of every step and writes checkpoints and out/model, which `from_pretrained` loads.
The pairs are random tokens to keep the script short; what matters is their format.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.data import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size, is_distributed
from olmo_core.optim import LinearWithWarmup
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import CheckpointerCallback, ConsoleLoggerCallback
from olmo_core.utils import get_default_device
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref import (
    Budget,
    DataCollatorForSeq2SeqDPO,
    DPOTrainModule,
    ExampleTable,
    PairTokens,
    Policy,
    TableLogps,
    pair_loss,
    parallelize,
    score_table,
)

Instance = dict[str, Any]


def make_pairs(count: int, vocabulary: int) -> list[Instance]:
    """Tokenised pairs. Labels are -100 up to the completion; `index` is the pair's row in the reference's table."""
    rng = random.Random(0)

    def tokens(longest: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, longest))]

    pairs = []
    for index in range(count):
        prompt, chosen, rejected = tokens(12), tokens(8), tokens(8)
        one: Instance = {"index": index}
        for side, completion in (("chosen", chosen), ("rejected", rejected)):
            one[f"{side}_input_ids"] = prompt + completion
            one[f"{side}_labels"] = [-100] * len(prompt) + completion
        pairs.append(one)
    return pairs


class PaddedPairs(DataLoaderBase):
    """Every rank takes its share of each global batch; the shares may differ in size."""

    def __init__(self, pairs: list[Instance], batch_size: int, work_dir: str):
        super().__init__(
            work_dir=work_dir, global_batch_size=batch_size, dp_world_size=get_world_size(), dp_rank=get_rank()
        )
        self.pairs = pairs
        self.collate = DataCollatorForSeq2SeqDPO()

    @property
    def total_batches(self) -> int:
        return -(-len(self.pairs) // self.global_batch_size)

    def reshuffle(self, epoch: int | None = None, **_kwargs: Any) -> None:
        self._epoch = epoch
        self.order = random.Random(epoch).sample(range(len(self.pairs)), len(self.pairs))

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for number in range(self.batches_processed, self.total_batches):
            batch = self.order[number * self.global_batch_size : (number + 1) * self.global_batch_size]
            yield self.collate([self.pairs[i] for i in batch[self.dp_rank :: self.dp_world_size]])

    def get_mock_batch(self) -> dict[str, Any]:
        return self.collate(self.pairs[:1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self.batches_processed = state_dict["epoch"], state_dict["batches_processed"]


def score_reference(policy: Policy, pairs: list[Instance]) -> TableLogps:
    """Log-probabilities under the starting model, computed as in training."""
    parts = []
    for one in pairs:
        start = one["chosen_labels"].count(-100)
        sides = (one["chosen_input_ids"][:start], one["chosen_input_ids"][start:], one["rejected_input_ids"][start:])
        parts.append(PairTokens(*(np.array(side) for side in sides)))
    return score_table(
        policy, ExampleTable.from_tokens(parts), Budget("padded", tokens=4096), device=get_default_device()
    )


def save_model(policy: Policy, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder. Under DDP every rank has the full model."""
    if get_rank() == 0:
        with policy.plain() as model:  # with the model's own attention, not ours
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--rank-microbatch-size", type=int, default=256, help="tokens")
    arguments = parser.parse_args()
    prepare_training_environment(seed=0, backend="gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")

    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    pairs = make_pairs(20, model.config.vocab_size)
    policy = Policy(model).to(get_default_device())
    reference = score_reference(policy, pairs)
    spread = parallelize(
        policy, "ddp" if is_distributed() else "single", device=get_default_device(), world_size=get_world_size()
    )
    optim = torch.optim.AdamW(spread.parameters(), lr=1e-3)
    train_module = DPOTrainModule(
        spread,
        optim,
        objective=pair_loss("sigmoid", beta=0.1),
        rank_microbatch_size=arguments.rank_microbatch_size,
        reference=reference,
        weighting="token",
        scheduler=LinearWithWarmup(warmup=2, alpha_f=0.0),
        max_grad_norm=1.0,
    )
    trainer = TrainerConfig(
        save_folder=arguments.folder,
        save_overwrite=True,
        max_duration=Duration.epochs(2),
        metrics_collect_interval=1,
        callbacks={
            "checkpointer": CheckpointerCallback(pre_train_checkpoint=False, save_async=False),
            "console_logger": ConsoleLoggerCallback(metrics=["train/*", "optim/*"]),
        },
    ).build(train_module, PaddedPairs(pairs, batch_size=6, work_dir=arguments.folder))
    trainer.fit()
    save_model(policy, AutoTokenizer.from_pretrained(arguments.model), Path(arguments.folder) / "model")
    teardown_training_environment()


if __name__ == "__main__":
    main()
