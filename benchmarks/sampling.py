"""Speed of `isopref sample`, compared with transformers' `generate` with padding, on one GPU.

    python benchmarks/bench.py --only sampling
    python benchmarks/sampling.py generate sorted/cudnn        # one system, in one setting

A Llama shape with random bfloat16 weights writes four answers to each of some prompts with the lengths of a chat data
set. Answers end at the lengths of the data's answers, so both systems write the same number of tokens. `generate` gets
batches of as many answers as isopref writes at a time, with prompts padded on the left, in the order of the data (file)
or sorted by length, with and without cuDNN attention, which builds a plan for every new length.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import workload
from transformers import StoppingCriteria, StoppingCriteriaList
from trl_peer import own_attention

from isopref.models.policy import Policy
from isopref.models.slots import check_slots
from isopref.models.writer import Choice, Request, write

ANSWERS = 4
SETTINGS = {"generate": ("file", "sorted", "file/cudnn", "sorted/cudnn"), "isopref": ("128", "256")}
ROWS = 128  # answers that generate writes at a time
PROMPTS, LONGEST, SECONDS = 128, 512, 25  # prompts per run, maximum tokens of prompt or answer, time limit of generate


def make_requests(num_prompts: int, vocabulary: int, longest: int) -> list[Request]:
    rng = np.random.default_rng(0)
    table = np.load(workload.LENGTHS / "chat_lengths.npy")
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
    """Tokens written (without padding) and seconds, for as many batches as fit into the time limit."""
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


def measure(system: str, setting: str, *, tiny: bool = False) -> dict[str, Any]:
    """Tokens per second. `setting`: for generate, the order of prompts; for isopref, the answers at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = workload.model("tiny" if tiny else "1b", dtype=dtype, device=device).eval()
    policy = Policy(model).eval()
    check_slots(policy)
    prompts, longest = (8, 16) if tiny else (PROMPTS, LONGEST)
    requests = make_requests(prompts, model.config.vocab_size, longest)
    if system == "isopref":
        rows = int(setting)
        run_isopref(policy, requests[:4], rows)  # warm
        tokens, seconds = run_isopref(policy, requests, rows)
    else:
        order, _, kernel = setting.partition("/")
        rows = ROWS
        if order == "sorted":
            requests = sorted(requests, key=lambda one: len(one.prompt))
        with policy.plain() as plain, own_attention():
            torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
            run_generate(plain, [Request(one.prompt, one.seeds, (4,) * ANSWERS) for one in requests[:4]], rows, 0)
            tokens, seconds = run_generate(plain, requests, rows, time.perf_counter() + SECONDS)
    found = {"tokens_per_s": tokens / seconds, "step_s": 1000 * seconds / tokens, "tokens": tokens, "seconds": seconds}
    return {**found, "rows": rows, "prompts": prompts, "longest": longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SETTINGS)
    parser.add_argument("setting", choices=[one for some in SETTINGS.values() for one in some])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and prompts, to try this on a CPU")
    args = parser.parse_args()
    print(json.dumps({**measure(args.system, args.setting, tiny=args.tiny), "about": workload.versions()}))


if __name__ == "__main__":
    main()
