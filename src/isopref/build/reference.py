"""The reference of a run, before training: looked up in its store, or scored into it."""

import gc
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

import isopref
from isopref.build.beginning import Beginning, NamedTable, check_fits, items_of
from isopref.build.data import Tables
from isopref.build.model import answer_progress, load_policy, spread
from isopref.build.run import Run, check_score_budget
from isopref.config.schema import Config
from isopref.engine.moving import MovingReference
from isopref.errors import CacheError
from isopref.examples import Lengths
from isopref.models import hf
from isopref.models.policy import Policy
from isopref.places import reference_folder
from isopref.reference.fill import Known, fill, find, proven
from isopref.reference.key import identity
from isopref.reference.store import Identity, Store, key_of
from isopref.score import TableLogps


class Reference(NamedTuple):
    """The reference's log-probabilities of some tables, and its content identity (None: no reference)."""

    identity: Identity | None
    logps: list[TableLogps]

    @property
    def key(self) -> str | None:
        """The key of the store that holds the log-probabilities."""
        return None if self.identity is None else key_of(self.identity)


def scored_tables(run: Run, tables: Tables) -> list[NamedTable]:
    """The pairs to score ahead of time: training pairs, unless the reference moves, and held-out pairs, if any."""
    moves = run.config.objective.reference_moves is not None
    named = [] if moves else [NamedTable("training", tables.train)]
    if tables.held_out is not None:
        named.append(NamedTable("held-out", tables.held_out))
    for one in named:
        check_score_budget(run, one.pairs)
    return named


def path_of(config: Config) -> tuple[str | None, str]:
    """The path of a config's reference (None: the starting model), and the setting that names it."""
    given = config.model.reference
    return (None, "model.path") if given is None else (given, "model.reference")


def open_store(run: Run, policy: Policy, path: str) -> Store:
    """The store of a model that is fully on this rank. `path` is only recorded for people."""
    hints = {
        "reference": path,
        "dtype": run.config.model.dtype,
        "written_by": f"isopref {isopref.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, on {platform.node()}",
    }
    return Store.open(reference_folder(), policy_identity(run, policy), hints)


def frozen_identity(run: Run, policy: Policy) -> Identity | None:
    """The identity of the model under an adapter, which no checkpoint contains."""
    return None if run.config.model.adapter is None else policy_identity(run, policy)


def policy_identity(run: Run, policy: Policy) -> dict[str, Any]:
    """The content identity of a model that is complete on this rank."""
    with policy.plain() as model:  # its config must not name our attention
        return identity(model, compute_dtype=run.compute_dtype, narrow=policy.narrow)


def look_up_or_score(
    run: Run, store: Store, table: NamedTable, model: Callable[[], nn.Module], beginning: Beginning | None
) -> TableLogps:
    """The reference's log-probabilities of a table, verified complete. `model` is called only if some are missing."""
    items = items_of(run, table.pairs)
    kept = None
    if beginning is not None:
        kept = beginning.known(table, store.key)
        if not len(kept.missing):
            _say_known(run, table, kept, str(beginning.folder))
            return proven(kept, items)
    known = find(store, items, device=run.env.device, kept=kept)
    for text in known.damage:
        run.display.say(f"warning: {text}.")
    _say_known(run, table, known, f"store {store.key[:12]}")
    if not len(known.missing):
        return proven(known, items)
    spread_model = model().eval()
    with answer_progress(run, f"score {table.name}", len(known.missing)) as progress:
        filled = fill(store, items, known, spread_model, run.score_budget, device=run.env.device, progress=progress)
    logps = proven(filled, items)
    left = find(store, items, device=run.env.device, kept=kept).missing  # reread from disk
    if len(left):
        raise CacheError(
            f"{store.folder}: {len(left)} of {len(items)} answers were written but cannot be read back. Check the "
            "disk, or set ISOPREF_CACHE to another folder."
        )
    return logps


def of_other_model(
    run: Run,
    tokenizer: Any,
    tables: Sequence[NamedTable],
    path: str | None,
    *,
    setting: str,
    beginning: Beginning | None = None,
) -> Reference:
    """The log-probabilities of a model that is loaded only to score, and freed again.

    `path` None: the starting model. `beginning`: the beginning of the run that needs the log-probabilities, if any.
    """
    found = _load_and_look_up(run, tokenizer, tables, path, setting, beginning)
    gc.collect()
    if run.env.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _load_and_look_up(
    run: Run,
    tokenizer: Any,
    tables: Sequence[NamedTable],
    path: str | None,
    setting: str,
    beginning: Beginning | None,
) -> Reference:
    name, trust = path or run.config.model.path, run.config.model.trust_remote_code
    hf.check_same_vocabulary(
        tokenizer, name, hf.load_tokenizer(name, trust_remote_code=trust, setting=setting), setting=setting
    )
    policy = load_policy(run, path, setting=setting)
    for table in tables:
        check_fits(run, policy.model, tokenizer, table.pairs)
    store = open_store(run, policy, name)
    if beginning is not None:
        beginning.check_reference(store.identity)  # before hours are spent on scoring with the wrong model
    model = cache(lambda: spread(run, policy, trained=False))
    return in_store(run, store, tables, model, beginning)


def in_store(
    run: Run,
    store: Store,
    tables: Sequence[NamedTable],
    model: Callable[[], nn.Module],
    beginning: Beginning | None,
) -> Reference:
    """The reference's log-probabilities of some tables, from its store. `model` returns it ready to score the rest."""
    logps = [look_up_or_score(run, store, table, model, beginning) for table in tables]
    return Reference(store.identity, logps)


def moving(run: Run) -> MovingReference:
    """A second model that starts as the reference and moves."""
    model, moves = run.config.model, run.config.objective.reference_moves
    assert moves is not None
    path, setting = (model.path, "model.path") if model.reference is None else (model.reference, "model.reference")
    every, mix = moves
    run.display.say(
        f"reference: moves {mix:g} of the way to the model every {every} steps; keeps a second model in memory"
    )
    return MovingReference(spread(run, load_policy(run, path, setting=setting), trained=False), every=every, mix=mix)


def none_needed(tables: Sequence[NamedTable]) -> Reference:
    """Zeros, if the objective has no reference."""

    def zeros(lengths: Lengths) -> TableLogps:
        return TableLogps(np.zeros(len(lengths.answer)), np.zeros((2, len(lengths.compared))))

    return Reference(None, [zeros(table.pairs.lengths) for table in tables])


def _say_known(run: Run, table: NamedTable, known: Known, where: str) -> None:
    items = items_of(run, table.pairs)
    num_known = len(table.pairs) - items.num_examples(np.flatnonzero(np.isnan(known.logps)))
    scoring = f"; scoring {items.num_examples(known.missing)}" if len(known.missing) else ""
    run.display.say(
        f"cache {num_known} of {len(table.pairs)} {table.name} {table.pairs.unit}s have their reference "
        f"({where}){scoring}"
    )
