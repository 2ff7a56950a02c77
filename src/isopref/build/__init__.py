"""From a config to a run: the only place that knows both. Everything below takes plain arguments.

`train` is the whole story: data, policy, reference, trainer, result.
"""

import time
from pathlib import Path

from isopref.build import result
from isopref.build.data import pair_tables, sample_prompts, say_tables
from isopref.build.fit import check_train_budget, fit_layout
from isopref.build.model import check_parallel, load_policy, score_all, spread
from isopref.build.run import Run, claim_folder, open_folder
from isopref.build.trainer import build_trainer, fit
from isopref.config.schema import Config, run_id
from isopref.data.packing import check_budget
from isopref.engine.display import Display
from isopref.engine.environment import environment
from isopref.models import hf
from isopref.models.generate import answers


def train(config: Config, *, name: str, resume: bool = False) -> None:
    """Run a config from beginning to end. `name` is the config file's, for the default folder."""
    started = time.perf_counter()
    group = config.model.is_mixed or config.layout.parallel in ("ddp", "fsdp", "hsdp")
    with environment(device=config.run.device, seed=config.optim.seed, process_group=group) as env:
        folder = Path(config.run.folder or f"runs/{name}-{run_id(config)}")
        run = Run(config, folder, env, Display(quiet=not env.is_first))
        open_folder(run, resume)
        _train(run, resume)
        result.say_end(run, time.perf_counter() - started)


def _train(run: Run, resume: bool) -> None:
    config = run.config
    check_parallel(run)
    tokenizer = hf.load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    tables = pair_tables(config, tokenizer, run.display, is_first=run.env.is_first)
    say_tables(tables, run.display)
    table, eval_table = tables.train, tables.held_out
    check_train_budget(run, table)
    for scored in tables.all:
        check_budget(scored.lengths, run.score_budget, setting=run.score_setting, name=scored.origin)
    policy = load_policy(run)
    for scored in tables.all:
        hf.check_fits(policy.model, tokenizer, scored.lengths, scored.origin)
    prompts = sample_prompts(run, eval_table)
    with policy.plain() as plain:
        before = answers(plain, tokenizer, prompts, max_new_tokens=config.run.sample_tokens)
    model = spread(run, policy)
    run = fit_layout(run, model, table)

    # Before a checkpoint can be restored: the reference is the model as it was given, always.
    reference = score_all(run, model, table, "reference")
    held_out = None
    if eval_table is not None:
        held_out = result.HeldOut(run, eval_table, score_all(run, model, eval_table, "held-out"))
    trainer = build_trainer(run, model, table, reference, held_out, resume)
    claim_folder(run)
    fit(trainer)

    if held_out is not None:
        result.say_effect(run, held_out.at_start, held_out.now(model))
    if config.run.export:
        result.export(run, model, tokenizer)
        result.say_answers(run, tokenizer, prompts, before)
