"""`isopref eval`: a trained model on the held-out pairs of a config."""

from pathlib import Path

from isopref.build import reference
from isopref.build.beginning import NamedTable, check_fits
from isopref.build.data import held_out_table
from isopref.build.hardware import check_hardware, say_attention
from isopref.build.held_out import HeldOut, say_figures
from isopref.build.model import load_policy, score_all, spread
from isopref.build.run import check_score_budget, check_scores, opened_run, quiet_libraries, with_longest
from isopref.build.sample import model_path
from isopref.config.schema import Config
from isopref.errors import ConfigError
from isopref.models import hf
from isopref.models.reward import is_reward_model
from isopref.objectives.registry import weights
from isopref.runs.write import write_json


def evaluate_model(
    config: Config, *, name: str, model: str, reference_model: str | None = None, json_file: Path | None = None
) -> None:
    """Evaluate a model on a config's held-out pairs, against its reference or another one.

    A run folder stands for the model in it.
    """
    model = model_path(model)
    reference_model = None if reference_model is None else model_path(reference_model)
    with opened_run(config, name) as run:
        quiet_libraries()
        check_hardware(run)
        say_attention(run)
        if json_file is not None and run.env.is_first:
            _check_writable(json_file)
        trust = config.model.trust_remote_code
        if run.loss.readout == "reward" and not is_reward_model(model, trust_remote_code=trust, setting="--model"):
            names = ", ".join(weights(config.objective.loss))
            raise ConfigError(
                f"--model: {model} is not a reward model, but objective.loss: {names} needs one. Pass the folder of a "
                "sequence-classification model."
            )
        tokenizer = hf.load_tokenizer(model, trust_remote_code=trust, setting="--model")
        pairs = held_out_table(config, tokenizer, run.display, is_first=run.env.is_first)
        run = with_longest(run, [pairs])
        table = NamedTable("held-out", pairs)
        check_score_budget(run, table.pairs)
        check_scores(config, [pairs])
        path, setting = reference.path_of(config) if reference_model is None else (reference_model, "--reference")
        used = (path or config.model.path) if run.loss.needs_reference else None
        run.display.say(f"model {model}")
        run.display.say(f"reference {used}" if used else "no reference")
        run.display.say(f"data  {len(pairs)} held-out {pairs.unit}s of {', '.join(pairs.source_names)}")
        if run.loss.needs_reference:
            ref = reference.of_other_model(run, tokenizer, [table], path, setting=setting)
        else:
            ref = reference.none_needed([table])
        policy = load_policy(run, model, setting="--model")
        check_fits(run, policy.model, tokenizer, pairs)
        logps = score_all(run, spread(run, policy, trained=False), table.pairs, "model")
        found = HeldOut(run, table.pairs, ref.logps[0]).of(logps)
        say_figures(run, found)
        if json_file is not None and run.env.is_first:
            what = {"model": model, "reference": used, "data": list(pairs.source_names)}
            write_json(json_file, {**what, **found.as_json()})


def _check_writable(path: Path) -> None:
    """Raise ConfigError early if a file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written ({error}). Choose another location.") from error
