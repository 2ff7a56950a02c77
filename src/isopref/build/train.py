"""Training a config from start to finish: `train` reads as the stages of a run, in order."""

import time
from collections.abc import Mapping
from dataclasses import replace
from signal import Signals
from typing import Any, NamedTuple

from olmo_core.train import Trainer
from torch import nn

from isopref.build import export, reference, samples, spot_checks, summary
from isopref.build.beginning import Beginning, Models, NamedTable, check_fits
from isopref.build.data import NO_MEMORY, Tables, pair_tables, read_tokenizer, say_tables
from isopref.build.folder import Resume, claim_folder, is_finished, open_folder, resumes
from isopref.build.hardware import check_hardware, say_attention
from isopref.build.held_out import HeldOut
from isopref.build.loggers import check_loggers
from isopref.build.microbatch import check_train_budget, settle_layout
from isopref.build.model import (
    add_adapter,
    load_policy,
    say_unused,
    score_all,
    settle_padding,
    spread,
)
from isopref.build.record import recorded
from isopref.build.reference import Reference
from isopref.build.run import Run, check_scores, opened_run, with_longest
from isopref.build.trainer import build_trainer, checkpointer, train_steps
from isopref.config.schema import Config
from isopref.data.memory import MemoryData
from isopref.data.template_files import NO_TEMPLATE, read_template
from isopref.errors import FirstStepError
from isopref.models.experts import check_routers
from isopref.models.policy import Policy
from isopref.models.reward import RewardModel
from isopref.reference.store import Store
from isopref.score import TableLogps


class Data(NamedTuple):
    """What a run trains on and holds out."""

    tokenizer: Any
    tables: Tables
    scored: list[NamedTable]  # what the reference scores before training


class Evaluated(NamedTuple):
    """Held-out pairs, and the model's scores on them before training."""

    pairs: HeldOut
    start: TableLogps


def train(
    config: Config, *, name: str, resume: Resume = "no", memory: Mapping[str, MemoryData] = NO_MEMORY
) -> Signals | None:
    """Run a config from beginning to end. `name` is the config file's, for the default folder.

    `memory` is data passed by a script, keyed by its name in the config.
    Returns the signal that stopped the run before its last step; None if the run is finished.
    """
    started = time.perf_counter()
    with opened_run(config, name) as opened:
        run = replace(opened, memory=memory)
        again = resumes(run, resume)
        if again and resume == "auto" and is_finished(run):
            run.display.say(f"{run.folder} already contains this run, finished; nothing to do")
            return None
        with open_folder(run, again):
            stopped_by = _train(run, again)
            if stopped_by is None:
                summary.write_report(run)
                summary.say_end(run, time.perf_counter() - started)
        if stopped_by is not None:
            # The launcher kills all ranks as soon as one exits with an error, so the first rank must be done writing.
            run.env.barrier()
        return stopped_by


def _train(run: Run, resume: bool) -> Signals | None:
    """Returns the signal that stopped the run before its last step, if one did."""
    _check_settings(run)
    run, data = _read_data(run)
    beginning = Beginning(run, resume)
    ref = _separate_reference(run, data, beginning)
    policy = _load_policy(run, data)
    store = reference.open_store(run, policy, run.config.model.path) if ref is None else None
    models = _models(run, policy, ref, store)
    beginning.check(models)
    add_adapter(run, policy)  # after the store, whose key is that of the model without the adapter
    before = samples.first_answers(run, policy, data.tokenizer, data.tables.held_out)
    model = spread(run, policy)
    moving = None if run.config.objective.reference_moves is None else reference.moving(run)
    run = settle_layout(run, model, data.tables.train)
    if store is not None:
        # Before a checkpoint is restored: the reference is always the starting model.
        ref = reference.in_store(run, store, data.scored, lambda: model, beginning)
    assert ref is not None
    held_out = _held_out(run, model, data, ref)
    pairs = None if held_out is None else held_out.pairs
    trainer = build_trainer(run, model, data.tables.train, moving or ref.logps[0], pairs, resume)
    beginning.write(models, data.scored, ref.logps)
    claim_folder(run)
    with recorded(run, trainer, data.tables.train, ref.key):
        stopped_by = _fit(run, trainer, store, beginning)
        if stopped_by is None:
            _finish(run, trainer, model, data, held_out, before)
    return stopped_by


def _check_settings(run: Run) -> None:
    """Refuse settings that cannot work, before any work is done."""
    check_hardware(run)
    check_loggers(run)
    spot_checks.check_file(run)
    say_attention(run)


def _read_data(run: Run) -> tuple[Run, Data]:
    """The tokenised pairs, and the run updated with their lengths."""
    config = run.config
    tokenizer = read_tokenizer(config, run.display)
    tables = pair_tables(config, tokenizer, run.display, is_first=run.env.is_first, memory=run.memory)
    say_tables(tables, run.display)
    if config.data.template not in (None, NO_TEMPLATE):
        tokenizer.chat_template = read_template(config.data.template)  # exported with the model
    check_train_budget(run, tables.train)
    check_scores(config, tables.all)
    run = with_longest(run, tables.all)
    return run, Data(tokenizer, tables, reference.scored_tables(run, tables))


def _separate_reference(run: Run, data: Data, beginning: Beginning) -> Reference | None:
    """A separate reference model: loaded, scored and freed before the policy is loaded. Zeros if there is no reference.

    Returns None if the policy itself is the reference, before its first step.
    """
    if run.starts_at_reference:
        return None
    if not run.loss.needs_reference:
        return reference.none_needed(data.scored)
    return reference.of_other_model(
        run, data.tokenizer, data.scored, run.config.model.reference, setting="model.reference", beginning=beginning
    )


def _load_policy(run: Run, data: Data) -> Policy:
    """The model to train, without a new adapter, checked against the pairs."""
    policy = load_policy(run)
    say_unused(run, policy)
    if isinstance(policy, RewardModel):
        settle_padding(run, policy, data.tokenizer)
    if run.loss.balance_weight:
        check_routers(policy.model)
    for table in data.tables.all:
        check_fits(run, policy.model, data.tokenizer, table)
    return policy


def _models(run: Run, policy: Policy, ref: Reference | None, store: Store | None) -> Models:
    """What must be unchanged on resume. Without a store, nothing else identifies the model under an adapter."""
    if store is not None:
        return Models(store.identity)
    assert ref is not None
    return Models(ref.identity, reference.frozen_identity(run, policy))


def _held_out(run: Run, model: nn.Module, data: Data, ref: Reference) -> Evaluated | None:
    """The held-out pairs, if any, scored by the model as it is before training."""
    table = data.tables.held_out
    if table is None:
        return None
    pairs = HeldOut(run, table, ref.logps[-1])
    known = run.starts_at_reference
    return Evaluated(pairs, ref.logps[-1] if known else score_all(run, model, table, "held-out"))


def _fit(run: Run, trainer: Trainer, store: Store | None, beginning: Beginning) -> Signals | None:
    """Returns the signal that stopped training before its last step, if one did."""
    try:
        return train_steps(run, trainer)
    except FirstStepError as error:
        beginning.forget_values()
        again = "" if store is None else f" To score the reference again: isopref cache rm {store.key}"
        raise FirstStepError(error.what, f"Try layout.rows: padded.{again}") from error


def _finish(
    run: Run, trainer: Trainer, model: nn.Module, data: Data, held_out: Evaluated | None, before: samples.Before
) -> None:
    """Show what training did, and export the model."""
    if held_out is not None:
        held_out.pairs.say_effect(held_out.start, held_out.pairs.logps_at(trainer.global_step, model))
    if run.config.run.export:
        checkpointer(trainer).check_weights()  # also for a checkpoint restored at the last step
        export.export_best(run, trainer, model, data.tokenizer)
        export.export_model(run, model, data.tokenizer)
        samples.say_answers(run, model, data.tokenizer, before)
