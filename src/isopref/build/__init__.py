"""From a config to a run: the only place that knows both. Everything below takes plain arguments.

`train` is the whole story: data, reference, policy, trainer, result. `fill_cache` is its first half, `evaluate_model`
its end with a model that is trained already.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from signal import Signals

from olmo_core.train import Trainer

from isopref.build import evaluation, export, reference, samples, summary
from isopref.build.beginning import Beginning, Models, NamedTable
from isopref.build.data import Tables, held_out_table, pair_tables, say_tables
from isopref.build.folder import Resume, claim_folder, goes_on, is_finished, open_folder
from isopref.build.loggers import check_loggers
from isopref.build.microbatch import check_train_budget, settle_layout
from isopref.build.model import (
    add_adapter,
    check_parallel,
    load_policy,
    say_attention,
    say_unused,
    score_all,
    spread,
)
from isopref.build.record import recorded
from isopref.build.run import Run, quiet_libraries, say_trust
from isopref.build.trainer import build_trainer, checkpointer, fit
from isopref.config.load import to_yaml
from isopref.config.schema import Config
from isopref.data.packing import check_budget, tokens_alone
from isopref.data.table import PairTable
from isopref.data.templates import NO_TEMPLATE, read_template
from isopref.engine.display import Display
from isopref.engine.environment import environment
from isopref.engine.oom_retry import ran_out
from isopref.errors import ConfigError, FirstStepError, RunError
from isopref.models import hf
from isopref.models.experts import check_routers
from isopref.reference.store import Store
from isopref.runs.folder import run_folder
from isopref.runs.write import write_json


def train(config: Config, *, name: str, resume: Resume = "no") -> Signals | None:
    """Run a config from beginning to end. `name` is the config file's, for the default folder.

    Returns the signal that stopped the run before its last step; None if the run is finished.
    """
    started = time.perf_counter()
    with _run(config, name) as run:
        again = goes_on(run, resume)
        if again and resume == "auto" and is_finished(run):
            run.display.say(f"{run.folder} holds this run, finished: there is nothing to do")
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


def fill_cache(config: Config, *, name: str) -> None:
    """Score all pairs of a config with its reference, so that a later run finds them."""
    with _run(config, name) as run:
        quiet_libraries()
        check_parallel(run)
        say_attention(run)
        if not run.loss.needs_reference:
            raise ConfigError(
                f"objective.loss: {to_yaml(config.objective.loss)} has no reference, so there is nothing to fill. "
                "Go on with isopref train."
            )
        if config.objective.reference_moves is not None:
            raise ConfigError(
                f"objective.reference_moves is {list(config.objective.reference_moves)}: what a moving reference says "
                "of the training pairs cannot be known ahead of time. Go on with isopref train."
            )
        tokenizer = hf.load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        path, setting = _reference_path(config)
        tables = pair_tables(config, tokenizer, run.display, is_first=run.env.is_first)
        say_tables(tables, run.display)
        run = _with_longest(run, tables.all)
        found = reference.of_other_model(run, tokenizer, _scored(run, tables), path, setting=setting)
        pairs = sum(map(len, tables.all))
        run.display.say(f"cache complete: the reference of all {pairs} pairs is in store {str(found.key)[:12]}")


def evaluate_model(
    config: Config, *, name: str, model: str, reference_model: str | None = None, json_file: Path | None = None
) -> None:
    """Evaluate a model on a config's held-out pairs, against its reference or another one."""
    with _run(config, name) as run:
        quiet_libraries()
        check_parallel(run)
        say_attention(run)
        if json_file is not None and run.env.is_first:
            evaluation.check_writable(json_file)
        trust = config.model.trust_remote_code
        tokenizer = hf.load_tokenizer(model, trust_remote_code=trust, setting="--model")
        pairs = held_out_table(config, tokenizer, run.display, is_first=run.env.is_first)
        run = _with_longest(run, [pairs])
        table = NamedTable("held-out", pairs)
        _check_score_budget(run, table)
        path, setting = _reference_path(config) if reference_model is None else (reference_model, "--reference")
        used = (path or config.model.path) if run.loss.needs_reference else None
        run.display.say(f"model {model}")
        run.display.say(f"with  {used or 'no reference'}")
        run.display.say(f"data  {len(pairs)} held-out pairs of {', '.join(pairs.source_names)}")
        if run.loss.needs_reference:
            ref = reference.of_other_model(run, tokenizer, [table], path, setting=setting)
        else:
            ref = reference.none_needed([table])
        policy = load_policy(run, model, setting="--model")
        hf.check_fits(policy.model, tokenizer, table.pairs.lengths, table.pairs.origin)
        logps = score_all(run, spread(run, policy), table.pairs, "model")
        found = evaluation.HeldOut(run, table.pairs, ref.logps[0]).of(logps)
        evaluation.say_figures(run, found)
        if json_file is not None and run.env.is_first:
            what = {"model": model, "reference": used, "data": list(pairs.source_names)}
            write_json(json_file, {**what, **found.as_json()})


def _train(run: Run, resume: bool) -> Signals | None:
    """Returns the signal that stopped the run before its last step, if one did."""
    config = run.config
    check_parallel(run)
    check_loggers(run)
    say_attention(run)
    tokenizer = hf.load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    tables = pair_tables(config, tokenizer, run.display, is_first=run.env.is_first)
    say_tables(tables, run.display)
    if config.data.template not in (None, NO_TEMPLATE):
        tokenizer.chat_template = read_template(config.data.template)  # exported with the model
    table, eval_table = tables.train, tables.held_out
    check_train_budget(run, table)
    run = _with_longest(run, tables.all)
    scored = _scored(run, tables)
    beginning = Beginning(run, resume)
    if not run.loss.needs_reference:
        ref = reference.none_needed(scored)
    elif config.model.reference is not None:  # loaded, scored and gone before there is a policy
        ref = reference.of_other_model(
            run, tokenizer, scored, config.model.reference, setting="model.reference", beginning=beginning
        )
    policy = load_policy(run)
    say_unused(run, policy)
    if run.loss.balance_weight:
        check_routers(policy.model)
    for one in tables.all:
        hf.check_fits(policy.model, tokenizer, one.lengths, one.origin)
    store = reference.open_store(run, policy, config.model.path) if run.starts_at_reference else None
    # Without a store nothing else knows the model under an adapter.
    models = Models(ref.identity, reference.frozen_identity(run, policy)) if store is None else Models(store.identity)
    beginning.check(models)
    add_adapter(run, policy)  # after the store: its key is that of the model without
    before = samples.first_answers(run, policy, tokenizer, eval_table)
    model = spread(run, policy)
    moving = None if config.objective.reference_moves is None else reference.moving(run)
    run = settle_layout(run, model, table)

    # Before a checkpoint can be restored: the reference is the model as it was given, always.
    if store is not None:
        ref = reference.in_store(run, store, scored, lambda: model, beginning)
    held_out = None
    if eval_table is not None:
        held_out = evaluation.HeldOut(run, eval_table, ref.logps[-1])
        known = store is not None and run.loss.ld_alpha == 1  # else the store lacks what the likelihood needs
        start = ref.logps[-1] if known else score_all(run, model, eval_table, "held-out")
    trainer = build_trainer(run, model, table, moving or ref.logps[0], held_out, resume)
    beginning.write(models, scored, ref.logps)
    claim_folder(run)
    with recorded(run, trainer, table, ref.key):
        stopped_by = _fit(run, trainer, store, beginning)
        if stopped_by is not None:
            return stopped_by
        if held_out is not None:
            held_out.say_effect(start, held_out.logps_at(trainer.global_step, model))
        if config.run.export:
            checkpointer(trainer).check_weights()  # of a checkpoint that was restored at the last step, too
            export.export_best(run, trainer, model, tokenizer)
            export.export_model(run, model, tokenizer)
            samples.say_answers(run, model, tokenizer, before)
    return None


def _fit(run: Run, trainer: Trainer, store: Store | None, beginning: Beginning) -> Signals | None:
    """Returns the signal that stopped training before its last step, if one did."""
    try:
        return fit(run, trainer)
    except FirstStepError as error:
        beginning.forget_values()
        again = "" if store is None else f" To score the reference again: isopref cache rm {store.key}"
        raise FirstStepError(error.what, f"Try layout.rows: padded.{again}") from error


@contextmanager
def _run(config: Config, name: str) -> Iterator[Run]:
    group = config.only_fsdp_for is not None or config.layout.parallel in ("ddp", "fsdp", "hsdp")
    with environment(device=config.run.device, seed=config.optim.seed, process_group=group) as env:
        folder = run_folder(config, name)
        display = Display(quiet=not env.is_first)
        say_trust(config, display)
        try:
            yield Run(config, folder, env, display)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            what = ". ".join(str(error).split(". ")[:2])  # and how much; the rest is about torch's allocator
            raise RunError(
                f"{what}. A microbatch would be cut smaller, but this is the model, the optimizer or scoring. Ways "
                "out: more GPUs with layout.parallel: fsdp, layout.offload: true, four bits (model.adapter.quantize: "
                "nf4), a smaller layout.score_tokens. isopref plan says what fits."
            ) from error


def _with_longest(run: Run, tables: Sequence[PairTable]) -> Run:
    alone = [tokens_alone(table.lengths, run.config.layout.rows).max() for table in tables]
    return replace(run, longest=int(max(alone)))


def _scored(run: Run, tables: Tables) -> list[NamedTable]:
    """The pairs that the reference scores ahead of time: those to train on, unless it moves; held-out ones, if any."""
    moves = run.config.objective.reference_moves is not None
    named = [] if moves else [NamedTable("training", tables.train)]
    if tables.held_out is not None:
        named.append(NamedTable("held-out", tables.held_out))
    for one in named:
        _check_score_budget(run, one)
    return named


def _check_score_budget(run: Run, table: NamedTable) -> None:
    pairs = table.pairs
    check_budget(pairs.lengths, run.score_budget, setting=run.score_setting, name=pairs.origin)


def _reference_path(config: Config) -> tuple[str | None, str]:
    """Where the reference of a config is (None: it is the model that the run starts from), and what says so."""
    given = config.model.reference
    return (None, "model.path") if given is None else (given, "model.reference")
