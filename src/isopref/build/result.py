"""What a run leaves and shows: the exported model, answers before and after, the report."""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_core.train import Trainer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from isopref.build import spot_checks
from isopref.build.data import sample_prompts
from isopref.build.model import from_host, load_exported
from isopref.build.run import Run
from isopref.build.spot_checks import Measured, Tokenised
from isopref.build.trainer import checkpointer
from isopref.data.surprises import special_token_pattern
from isopref.data.table import PairTable
from isopref.engine.restore import weights_of
from isopref.errors import RunError
from isopref.models import conversion, hf
from isopref.models.finite import bad_weights
from isopref.models.generate import Answer, answers
from isopref.models.parallel import unwrap
from isopref.models.policy import Policy
from isopref.places import write_whole
from isopref.report.html import page
from isopref.report.read import METRICS_FILE, REPORT_FILE, SAMPLES_FILE, read_run
from isopref.types import IntArray

log = logging.getLogger(__name__)

CELL = 400  # characters


def export(run: Run, model: nn.Module, tokenizer: Any) -> None:
    """Gather the trained weights and write them as a Hugging Face folder, or as that of an adapter.

    A native model is written as an OLMo-core checkpoint too.
    """
    state = _gathered(run, model)
    if (native := unwrap(model).native) is not None:
        env = run.env
        conversion.write_checkpoint(native, tokenizer, run.native_folder, is_first=env.is_first, barrier=env.barrier)
    if run.env.is_first:  # last: it is by this folder that a run is finished
        _write(run, model, state, tokenizer, run.model_folder)
    run.env.barrier()


def _gathered(run: Run, model: nn.Module) -> dict[str, Any]:
    """The trained weights, whole, on the first rank."""
    adapted = run.config.model.adapter is not None
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    state: dict[str, Any] = get_model_state_dict(model, options=whole)
    return state


def _write(run: Run, model: nn.Module, state: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    with unwrap(model).saved_form(state) as (inner, weights):
        hf.export(inner, weights, tokenizer, folder, base=run.config.model.path)


def export_best(run: Run, trainer: Trainer, model: nn.Module, tokenizer: Any) -> None:
    """Write the model of the lowest eval/loss, where run.keep_best asks for it, from its checkpoint."""
    best, folder = checkpointer(trainer).best(), run.best_folder
    if best is None:
        return
    checkpoint, problem = best
    if problem is not None:
        run.display.say(f"warning: run.keep_best: {checkpoint} has the lowest eval/loss, but {problem}: no {folder}")
        return
    run.display.say(f"best  {checkpoint.name} has the lowest eval/loss; its model is {folder}")
    with weights_of(trainer.train_module, checkpoint):
        if bad := bad_weights(unwrap(model).model, trained_only=True):  # of a version that did not look before it saved
            raise RunError(
                f"run.keep_best: the weights in {checkpoint} contain NaN or Inf ({bad[0]}). Remove that checkpoint and "
                "use --resume again."
            )
        state = _gathered(run, model)
        if run.env.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here, and now goes on
            _write(run, model, state, tokenizer, folder)


@dataclass(frozen=True)
class Before:
    """What the model says before it is trained: to some held-out prompts, and to the spot checks."""

    prompts: list[IntArray]
    answers: list[Answer]
    checks: Tokenised | None
    measured: Measured | None  # on the first rank


def first_answers(run: Run, policy: Policy, tokenizer: Any, held_out: PairTable | None) -> Before:
    """Answers before training; none of a model that is never whole."""
    prompts, checks = sample_prompts(run, held_out), spot_checks.tokenised(run, policy, tokenizer)
    asked = [what for what, given in (("sample answers", prompts), ("spot checks", checks)) if given]
    if asked and from_host(run, policy):
        run.display.say(f"note: skipping {' and '.join(asked)}: the full model does not fit on one device")
        prompts, checks = [], None
    with policy.plain() as model:
        answers = sample(run, model, tokenizer, prompts)
    measured = None
    if checks is not None and run.env.is_first:
        measured = spot_checks.measure(run, policy, tokenizer, checks)
    return Before(prompts, answers, checks, measured)


def say_answers(run: Run, model: nn.Module, tokenizer: Any, before: Before) -> None:
    """Answers of the exported model, loaded as a user would load it, beside those from before; and the spot checks.

    The model that was trained leaves the device to it.
    """
    if not run.env.is_first or not (before.prompts or before.checks):
        return
    model.to("cpu")
    exported: Any = load_exported(run)
    exported.to(run.env.device)
    if before.prompts:
        _say_samples(run, exported, tokenizer, before)
    if before.checks is not None and before.measured is not None:
        after = spot_checks.measure(run, Policy(exported), tokenizer, before.checks)
        spot_checks.say_cost(run, before.checks, before.measured, after)


def _say_samples(run: Run, exported: Any, tokenizer: Any, before: Before) -> None:
    after = sample(run, exported, tokenizer, before.prompts)
    questions = [last_turn(tokenizer, prompt) for prompt in before.prompts]
    every = list(zip(questions, before.answers, after, strict=True))
    with (run.folder / SAMPLES_FILE).open("w", encoding="utf-8") as file:
        for question, old, new in every:
            line = {
                "prompt": question,
                "greedy_before": old.greedy,
                "greedy_after": new.greedy,
                "sampled_before": old.sampled,
                "sampled_after": new.sampled,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    rows = [(_end_of(question), old.greedy, new.greedy) for question, old, new in every]
    run.display.table("greedy answers to held-out prompts", ("prompt", "before", "after"), rows)


def sample(run: Run, model: Any, tokenizer: Any, prompts: Sequence[IntArray]) -> list[Answer]:
    """Answers to some prompts, as the config asks for them."""
    config = run.config
    return answers(model, tokenizer, prompts, max_new_tokens=config.run.sample_tokens, seed=config.optim.seed)


def write_report(run: Run) -> None:
    """A page that shows the run, in its folder. The run is done: no fault of the page may look like one of it."""
    if not run.env.is_first:
        return
    try:
        write_whole(run.folder / REPORT_FILE, page([read_run(run.folder)]).encode())
    except Exception as error:
        log.exception("the report could not be made")
        run.display.say(
            f"warning: no {REPORT_FILE} ({type(error).__name__}: {error}). The run itself is complete; see engine.log."
        )


def say_end(run: Run, seconds: float) -> None:
    """How long it took, where everything is, and what to type next."""
    run.display.say(f"\nDone in {int(seconds) // 60} min {int(seconds) % 60} s.")
    if (run.folder / REPORT_FILE).exists():
        run.display.say(f"  report      {run.folder / REPORT_FILE}, for a browser")
    run.display.say(f"  metrics     {run.folder / METRICS_FILE}")
    if run.config.run.export:
        adapted = run.config.model.adapter is not None
        what = "an adapter in peft's format" if adapted else "a Hugging Face folder"
        load = f":\n              AutoModelForCausalLM.from_pretrained({str(run.model_folder)!r})"
        if adapted and hf.locate(run.config.model.path, setting="model.path").gguf_file:
            load = ", on a GGUF file, which others do not load an adapter on"
        merge = f"  one model   isopref merge {run.model_folder} FOLDER\n" if adapted else ""
        if run.config.model.native:
            run.display.say(f"  model       {run.native_folder}, an OLMo-core checkpoint")
        init = "" if Path("my.yaml").exists() else "; isopref init my.yaml, for a config of your own"
        run.display.say(
            f"  model       {run.model_folder}, {what}{load}\n{merge}"
            f"  next        isopref ls; isopref compare {run.folder} OTHER_RUN{init}"
        )


def last_turn(tokenizer: Any, prompt: IntArray) -> str:
    """What was asked last in a prompt: the last text between special tokens that is not the role which is to answer."""
    special, text = special_token_pattern(tokenizer), str(tokenizer.decode(prompt))
    turns = [part.strip().partition("\n") for part in (special.split(text) if special else [text])]
    asked = [(role, rest) for role, _, rest in turns if role not in ("", "assistant", "model")]
    role, rest = asked[-1] if asked else ("", text)
    return (rest if role in ("user", "human") else f"{role}\n{rest}").strip()


def _end_of(text: str) -> str:
    """As much of a text as a cell of the terminal's table should hold."""
    return text if len(text) <= CELL else f"...{text[-CELL:]}"
