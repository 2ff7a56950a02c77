"""What a run started with, kept in its folder for resuming: its models and their log-probabilities.

`reference.json` names the models by content. `reference/` holds the reference's log-probabilities, because the cache
may no longer have the same ones: it may have been cleared, or hold values from a concurrent run in another layout,
which differ by rounding.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isopref.build.run import Run
from isopref.data.table import ExampleTable
from isopref.errors import RunError
from isopref.models import hf
from isopref.places import write_whole
from isopref.reference.answers import Items
from isopref.reference.fill import Known, complete, find
from isopref.reference.store import Identity, Store, key_of
from isopref.runs.files import MODELS_FILE, STARTS_FILE, VALUES_FOLDER
from isopref.score import TableLogps


class Models(NamedTuple):
    """Models that must be the same on resume, identified by content: the reference, and the model under an adapter."""

    reference: Identity | None
    frozen: Identity | None = None


class NamedTable(NamedTuple):
    """Pairs and their name: "training" or "held-out"."""

    name: str
    pairs: ExampleTable


@dataclass(frozen=True)
class Beginning:
    """The beginning of one run. `resumed`: it is already in the folder; otherwise it has yet to be written."""

    run: Run
    resumed: bool

    @property
    def folder(self) -> Path:
        """Where the log-probabilities are kept."""
        return self.run.folder / VALUES_FOLDER

    def check(self, models: Models) -> None:
        """Raise RunError if a run would resume with different models than it started with."""
        self.check_reference(models.reference)
        self._check("frozen", f"the model under the adapter, {self.run.config.model.path},", models.frozen)

    def check_reference(self, identity: Identity | None) -> None:
        """Like `check`, for the reference alone: a separate reference model is known before the policy is loaded."""
        model = self.run.config.model
        self._check("reference", f"the reference {model.reference or model.path}", identity)

    def _check(self, name: str, what: str, identity: Identity | None) -> None:
        path = self.run.folder / MODELS_FILE
        if not (self.resumed and path.exists()):
            return
        key, made_of = read_models(path)[name]
        if key != _key(identity):
            difference = _difference(made_of, identity or {}, self.run.folder)
            raise RunError(f"--resume: {what} {difference}, or start a new run in a different run.folder.")

    def known(self, table: NamedTable, key: str) -> Known:
        """The values of a table that the run started with; warns if a resumed run lacks some.

        All ranks call this together.
        """
        found = find(self._store(table, key), self._items(table), device=self.run.env.device)
        for text in found.damage:
            self.run.display.say(f"warning: {text}.")
        lacks = self._items(table).num_examples(np.flatnonzero(np.isnan(found.logps)))
        if self.resumed and lacks:
            self.run.display.say(
                f"warning: {self.folder} lacks the reference of {lacks} of {len(table.pairs)} {table.name} "
                f"{table.pairs.unit}s. Values from "
                "the cache, or scored again, may differ by rounding from those it started with."
            )
        return found

    def write(self, models: Models, tables: Sequence[NamedTable], logps: Sequence[TableLogps]) -> None:
        """Write models and values, unless already written."""
        if not self.run.env.is_first:
            return
        if (key := _key(models.reference)) is not None:
            for table, of_table in zip(tables, logps, strict=True):
                complete(self._store(table, key), self._items(table), of_table.every)
        content: dict[str, Any] = {"key": key}
        if models.reference is not None:
            content |= {"made_of": models.reference}
        if models.frozen is not None:
            content |= {"frozen": _key(models.frozen), "frozen_made_of": models.frozen}
        write_whole(self.run.folder / MODELS_FILE, (json.dumps(content, indent=2) + "\n").encode())

    def forget_values(self) -> None:
        """Discard values that turned out to be wrong."""
        if self.run.env.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _items(self, table: NamedTable) -> Items:
        return items_of(self.run, table.pairs)

    def _store(self, table: NamedTable, key: str) -> Store:
        return Store(self.folder / table.name / key, setting="run.folder")


def items_of(run: Run, table: ExampleTable) -> Items:
    """The parts of a table that a run's reference scores."""
    return Items(table, heads=run.loss.needs.heads, mismatched=run.loss.needs_mismatched)


def check_fits(run: Run, model: Any, tokenizer: Any, table: ExampleTable) -> None:
    """`hf.check_fits` for all that is scored of a table: its answers, heads of them, and mismatched pairs."""
    sharing = run.config.layout.context_parallel
    hf.check_fits(
        model, tokenizer, table.lengths, table.origin, sharing=sharing, shortest=items_of(run, table).shortest
    )


def read_models(path: Path) -> dict[str, tuple[str | None, Identity]]:
    """The keys of a run's models and what went into them (empty if an earlier version wrote the file)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            "reference": (found["key"], dict(found.get("made_of", {}))),
            "frozen": (found.get("frozen"), dict(found.get("frozen_made_of", {}))),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: damaged ({error}). Remove it to continue with the models in the config.") from error


def _key(identity: Identity | None) -> str | None:
    return None if identity is None else key_of(identity)


def _difference(before: Identity, now: Identity, folder: Path) -> str:
    """How a model's content differs, and what to do. Code comes first: it may read the same files differently."""
    then = f"when the run in {folder} began"
    now = json.loads(json.dumps(now))  # in the form in which `before` was read
    other = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if not before:
        return (
            f"is a different model than {then}, or transformers has a different version (see "
            f"{folder / STARTS_FILE}). Restore the original one"
        )
    if "transformers" in other:
        first = before.get("transformers")
        return (
            f"was computed with transformers {first} {then}; the installed version is {now.get('transformers')}, whose "
            f"results may differ. Try: pip install transformers=={first}"
        )
    if "score_version" in other:
        return (
            f"was scored by a different version of isopref {then}, with different numbers. Install that version (see "
            f"{folder / STARTS_FILE})"
        )
    return f"is a different model than {then}: its {' and '.join(other)} differ. Restore the original one"
