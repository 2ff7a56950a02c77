"""What a run leaves and shows: held-out figures, the exported model, answers before and after."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from isopref.build.model import score_all
from isopref.build.run import Run
from isopref.data.table import PairTable
from isopref.evaluate import Evaluation, evaluate
from isopref.models import hf
from isopref.models.generate import answers
from isopref.models.parallel import unwrap
from isopref.score import TableLogps
from isopref.types import IntArray


class HeldOut:
    """Held-out pairs with their reference, ready to be evaluated at any time."""

    def __init__(self, run: Run, table: PairTable, reference: TableLogps):
        self.run, self.table, self.reference = run, table, reference
        self.at_start = self._evaluate(reference)

    def now(self, model: nn.Module) -> Evaluation:
        return self._evaluate(score_all(self.run, model, self.table, "held-out"))

    def _evaluate(self, policy: TableLogps) -> Evaluation:
        objective = self.run.config.objective
        return evaluate(
            policy,
            self.reference,
            self.table.lengths,
            self.table.weights,
            loss=self.run.loss,
            beta=objective.beta,
            weighting=objective.weighting,
        )


def export(run: Run, model: nn.Module, tokenizer: Any) -> None:
    """Gather the weights and write them as a Hugging Face folder."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=whole)
    if run.env.is_first:
        names = {name.removeprefix("model."): tensor for name, tensor in state.items()}  # without the policy's prefix
        with unwrap(model).plain() as inner:  # the folder must not name our attention
            hf.export(inner, names, tokenizer, run.model_folder)
    run.env.barrier()


def say_effect(run: Run, before: Evaluation, after: Evaluation) -> None:
    """The held-out figures as a table and as JSON."""
    rows = [
        ("preference accuracy", f"{before.accuracy:.3f}", f"{after.accuracy:.3f}"),
        ("mean reward margin", f"{before.reward_margin:+.3f}", f"{after.reward_margin:+.3f}"),
        ("accuracy by log-prob per token", f"{before.logp_accuracy:.3f}", f"{after.logp_accuracy:.3f}"),
        ("loss", f"{before.loss:.4f}", f"{after.loss:.4f}"),
    ]
    run.display.table(f"{after.pairs} held-out pairs", ("", "before", "after"), rows)
    if run.env.is_first:
        text = json.dumps({"before": asdict(before), "after": asdict(after)}, indent=2)
        (run.folder / "evaluation.json").write_text(text + "\n", encoding="utf-8")


def say_answers(run: Run, tokenizer: Any, prompts: Sequence[IntArray], before: Sequence[str]) -> None:
    """Answers of the exported model, loaded as a user would load it, beside those from before."""
    if not prompts or not run.env.is_first:
        return
    model: Any = AutoModelForCausalLM.from_pretrained(
        run.model_folder, trust_remote_code=run.config.model.trust_remote_code
    )
    after = answers(model.to(run.env.device), tokenizer, prompts, max_new_tokens=run.config.run.sample_tokens)
    questions = [_last_turn(tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in prompts]
    rows = list(zip(questions, before, after, strict=True))
    run.display.table("greedy answers to held-out prompts", ("prompt", "before", "after"), rows)
    lines = [json.dumps(dict(zip(("prompt", "before", "after"), row, strict=True)), ensure_ascii=False) for row in rows]
    (run.folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def say_end(run: Run, seconds: float) -> None:
    """How long it took, where everything is, and what to type next."""
    run.display.say(f"\nDone in {int(seconds) // 60} min {int(seconds) % 60} s.")
    run.display.say(f"  metrics     {run.folder / 'metrics.jsonl'}")
    if run.config.run.export:
        run.display.say(
            f"  model       {run.model_folder}, a Hugging Face folder:\n"
            f"              AutoModelForCausalLM.from_pretrained({str(run.model_folder)!r})\n"
            "  your turn   isopref init my.yaml, set model.path and data.train in it, isopref train my.yaml"
        )


def _last_turn(text: str) -> str:
    """The last line of a prompt that says something, without the name of the role that is to answer."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line not in ("assistant", "model")), "")
