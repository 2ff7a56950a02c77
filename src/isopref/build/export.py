"""The exported model of a run: trained weights, gathered and written as a folder that others can load."""

import shutil
from pathlib import Path
from typing import Any

from olmo_core.train import Trainer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from isopref.build.run import Run
from isopref.build.trainer import checkpointer
from isopref.engine.restore import weights_of
from isopref.errors import RunError
from isopref.models import conversion, hf
from isopref.models.finite import bad_weights
from isopref.models.parallel import unwrap


def export_model(run: Run, model: nn.Module, tokenizer: Any) -> None:
    """Gather the trained weights and write them as a Hugging Face folder, or as an adapter folder.

    A native model is written as an OLMo-core checkpoint too.
    """
    state = _gathered(run, model)
    if (native := unwrap(model).native) is not None:
        env = run.env
        conversion.write_checkpoint(native, tokenizer, run.native_folder, is_first=env.is_first, barrier=env.barrier)
    if run.env.is_first:  # last: this folder marks a run as finished
        _write(run, model, state, tokenizer, run.model_folder)
    run.env.barrier()


def _gathered(run: Run, model: nn.Module) -> dict[str, Any]:
    """The full trained weights, on the first rank."""
    adapted = run.config.model.adapter is not None
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapted)
    state: dict[str, Any] = get_model_state_dict(model, options=whole)
    return state


def _write(run: Run, model: nn.Module, state: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    with unwrap(model).saved_form(state) as (inner, weights):
        hf.export(inner, weights, tokenizer, folder, base=run.config.model.path)


def export_best(run: Run, trainer: Trainer, model: nn.Module, tokenizer: Any) -> None:
    """Export the model with the lowest eval/loss from its checkpoint, if run.keep_best is set."""
    best, folder = checkpointer(trainer).best(), run.best_folder
    if best is None:
        return
    checkpoint, problem = best
    if problem is not None:
        run.display.say(
            f"warning: run.keep_best: {checkpoint} has the lowest eval/loss, but {problem}; not writing {folder}"
        )
        return
    run.display.say(f"best  {checkpoint.name} has the lowest eval/loss; exporting it to {folder}")
    with weights_of(trainer.train_module, checkpoint):
        # Earlier versions did not check weights before saving a checkpoint.
        if bad := bad_weights(unwrap(model).model, trained_only=True):
            raise RunError(
                f"run.keep_best: the weights in {checkpoint} contain NaN or Inf ({bad[0]}). Remove that checkpoint and "
                "use --resume again."
            )
        state = _gathered(run, model)
        if run.env.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed here and now resumes
            _write(run, model, state, tokenizer, folder)
