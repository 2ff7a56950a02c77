"""Speed of `isopref sample` beside transformers' `generate` with padding, on one GPU.

A Llama shape with random weights in bfloat16 answers prompts with the lengths of a chat data set, four answers to each.
The data's own answer lengths say where answers end, so both systems write the same number of tokens. `generate` gets
batches of as many answers as isopref writes at a time, prompts padded on the left, in the order of the data and sorted
by length.

    python benchmarks/sampling.py --out sampling.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from isopref.models.policy import Policy
from isopref.models.slots import check_slots
from isopref.models.writer import Choice, Request, write

LENGTHS = Path(__file__).parent / "lengths" / "chat_lengths.npy"
ANSWERS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
}  # fmt: skip


def make_requests(num_prompts: int, vocabulary: int, longest: int) -> list[Request]:
    rng = np.random.default_rng(0)
    table = np.load(LENGTHS)
    rows = table[rng.permutation(len(table))[:num_prompts]].clip(2, longest)
    answers = table[rng.integers(0, len(table), (num_prompts, ANSWERS)), 1].clip(1, longest)
    return [
        Request(
            rng.integers(3, vocabulary, int(row[0])).astype(np.int32),
            tuple(int(one) for one in rng.integers(0, 2**62, ANSWERS)),
            tuple(int(one) for one in limits),
        )
        for row, limits in zip(rows, answers, strict=True)
    ]


class AtLimits(StoppingCriteria):  # type: ignore[misc,unused-ignore]
    """Ends each answer at its own length."""

    def __init__(self, limits: torch.Tensor, width: int):
        self.limits, self.width = limits, width

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] - self.width >= self.limits


def run_generate(model: Any, requests: list[Request], rows: int, until: float) -> tuple[int, float]:
    """Tokens that count and seconds, for as many batches as fit into the time."""
    device, tokens, started = model.device, 0, time.perf_counter()
    each = rows // ANSWERS
    for start in range(0, len(requests), each):
        batch = requests[start : start + each]
        width = max(len(one.prompt) for one in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, width - len(one.prompt) :] = torch.from_numpy(one.prompt.astype(np.int64))
            mask[row, width - len(one.prompt) :] = 1
        limits = torch.tensor([limit for one in batch for limit in one.limits], device=device)
        model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=int(limits.max()),
            do_sample=True,
            num_return_sequences=ANSWERS,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([AtLimits(limits, width)]),
        )
        tokens += int(limits.sum())
        if time.perf_counter() > until:
            break
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tokens, time.perf_counter() - started


def run_isopref(policy: Policy, requests: list[Request], rows: int, *, graphs: bool = True) -> tuple[int, float]:
    started = time.perf_counter()
    choice = Choice(1.0, 1.0, (-1,))
    tokens = sum(len(one.tokens) for one in write(policy, requests, choice, rows=rows, graphs=graphs))
    return tokens, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=25, help="most time for each order of generate")
    parser.add_argument("--orders", nargs="+", choices=["file", "sorted"], default=["file", "sorted"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=8192, tie_word_embeddings=True)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    policy = Policy(model).eval()
    check_slots(policy)
    requests = make_requests(args.prompts, config.vocab_size, args.longest)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": args.shape,
        "rows": args.rows,
        "prompts": len(requests),
        "prompt_tokens": sum(len(one.prompt) for one in requests),
        "answer_tokens": sum(sum(one.limits) for one in requests),
    }

    def measured(name: str, tokens: int, seconds: float) -> None:
        found[name] = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
        print(name, found[name], flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=2) + "\n")

    with policy.plain() as plain:
        run_generate(plain, [Request(one.prompt, one.seeds, (4,) * ANSWERS) for one in requests[:4]], args.rows, 0)
        for order in args.orders:
            some = requests if order == "file" else sorted(requests, key=lambda one: len(one.prompt))
            measured(f"generate_{order}", *run_generate(plain, some, args.rows, time.perf_counter() + args.seconds))
    run_isopref(policy, requests[:4], args.rows)  # warm
    for rows in (args.rows, 2 * args.rows):
        measured(f"isopref_{rows}", *run_isopref(policy, requests, rows))
    best = max(found[f"generate_{order}"]["tokens_per_s"] for order in args.orders)
    found["ratio"] = found[f"isopref_{args.rows}"]["tokens_per_s"] / best
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
