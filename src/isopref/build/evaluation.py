"""Held-out pairs of a run: their figures, as a table, as JSON and for the metrics log."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from isopref.build.model import score_all
from isopref.build.run import Run
from isopref.data.table import PairTable
from isopref.errors import ConfigError
from isopref.evaluate import Evaluation, Figure, evaluate
from isopref.score import TableLogps

LABELS = {
    "accuracy": ("preference accuracy", ".3f"),
    "logp_accuracy": ("accuracy by log-prob per token", ".3f"),
    "reward_margin": ("mean reward margin", "+.3f"),
    "reward_margin_std": ("spread of the margin (std)", ".3f"),
    "length_correlation": ("correlation of reward and length", "+.3f"),
    "loss": ("loss", ".4f"),
}
Cells = dict[str, str]  # label -> figure with its interval


class HeldOut:
    """Held-out pairs with their reference, ready to be evaluated at any time."""

    def __init__(self, run: Run, table: PairTable, reference: TableLogps):
        self.run, self.table, self.reference = run, table, reference
        self._last: tuple[int, Evaluation] | None = None

    def at_step(self, step: int, model: nn.Module) -> Evaluation:
        """The model as it is now, which is after `step`; scored once for a step."""
        if self._last is None or self._last[0] != step:
            self._last = step, self.of(score_all(self.run, model, self.table, "held-out"))
        return self._last[1]

    def of(self, policy: TableLogps) -> Evaluation:
        """The figures of a policy that was scored already."""
        objective = self.run.config.objective
        return evaluate(
            policy,
            self.reference,
            self.table.lengths,
            self.table.weights,
            loss=self.run.loss,
            beta=objective.beta,
            weighting=objective.weighting,
            sources_N=self.table.sources,
            source_names=self.table.source_names,
        )


def say_effect(run: Run, before: Evaluation, after: Evaluation) -> None:
    """The figures before and after training, as a table and as JSON in the run's folder."""
    old, new = dict(_cells(before)), dict(_cells(after))
    rows = [(label, old.get(label, ""), cell) for label, cell in new.items()]
    run.display.table(f"{after.pairs} held-out pairs (95% intervals)", ("", "before", "after"), rows)
    if run.env.is_first:
        write_json(run.folder / "evaluation.json", {"before": before.as_json(), "after": after.as_json()})


def say_figures(run: Run, found: Evaluation) -> None:
    """The figures of one model as a table."""
    run.display.table(f"{found.pairs} held-out pairs (95% intervals)", ("", "figure"), list(_cells(found)))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}). Choose another place.") from error


def _cells(found: Evaluation) -> Iterator[tuple[str, str]]:
    figures = found.figures()
    for name, (label, spec) in LABELS.items():
        yield label, _cell(figures[name], spec) if name in figures else "none: nothing varies"
    for bucket in found.by_length:
        words = ("shortest", "2nd", "3rd", "longest")[bucket.quarter - 1]
        yield f"accuracy, {words} quarter of answers", _cell(bucket.accuracy, ".3f")
    for source, part in found.by_source.items():
        yield f"accuracy, {source} ({part.pairs} pairs)", _cell(part.accuracy, ".3f")


def _cell(figure: Figure, spec: str) -> str:
    return f"{figure.value:{spec}} ({figure.low:{spec}} to {figure.high:{spec}})"
