"""Metrics of a run's held-out pairs, as a table, as JSON and for the metrics log."""

from collections.abc import Iterator

from torch import nn

from isopref.build.model import score_all
from isopref.build.run import Run
from isopref.data.table import ExampleTable
from isopref.evaluate import Evaluation, Figure, evaluate, rewards
from isopref.report.figures import LABELS, OF_LABELS, OF_LISTS, OF_ONE_READOUT, held_out_title
from isopref.runs.files import EVALUATION_FILE
from isopref.runs.write import write_json, write_rewards
from isopref.score import TableLogps

MOST_SUBSETS = 100


class HeldOut:
    """Held-out pairs with their reference, ready to be evaluated at any time."""

    def __init__(self, run: Run, table: ExampleTable, reference: TableLogps):
        self.run, self.table, self.reference = run, table, reference
        self.subsets = _subsets(run, table)
        self._last: tuple[int, TableLogps] | None = None

    def logps_at(self, step: int, model: nn.Module) -> TableLogps:
        """Scores of the current model, after `step`; computed once per step."""
        if self._last is None or self._last[0] != step:
            self._last = step, score_all(self.run, model, self.table, "held-out")
        return self._last[1]

    def of(self, policy: TableLogps) -> Evaluation:
        """The metrics of a policy that has already been scored."""
        return evaluate(
            policy,
            self.reference,
            self.table.lengths,
            self.table.weights,
            loss=self.run.loss,
            weighting=self.run.config.objective.weighting,
            sources=self.table.sources,
            source_names=self.table.source_names,
            subsets=self.subsets,
            scores=self.table.scores,
            gaps=self.table.gaps,
        )

    def say_effect(self, policy_before: TableLogps, policy_after: TableLogps) -> None:
        """Print the metrics before and after training as a table, and save them with the rewards of every pair."""
        before, after = self.of(policy_before), self.of(policy_after)
        old, new = dict(_cells(before)), dict(_cells(after))
        rows = [(label, old.get(label, ""), cell) for label, cell in new.items()]
        self.run.display.table(
            f"{held_out_title(after.pairs, after.lists, after.answers)}, with 95% intervals",
            ("", "before", "after"),
            rows,
        )
        if self.run.env.is_first:
            folder, lengths = self.run.folder, self.table.lengths
            write_json(folder / EVALUATION_FILE, {"before": before.as_json(), "after": after.as_json()})
            if not len(lengths.compared):
                return
            of_pairs = (
                rewards(policy, self.reference, lengths, self.run.loss) for policy in (policy_before, policy_after)
            )
            write_rewards(folder, lengths.compared_tokens.T, *of_pairs)


def say_figures(run: Run, found: Evaluation) -> None:
    """The metrics of one model, as a table."""
    title = f"{held_out_title(found.pairs, found.lists, found.answers)}, with 95% intervals"
    run.display.table(title, ("", "value"), list(_cells(found)))


def _cells(found: Evaluation) -> Iterator[tuple[str, str]]:
    figures = found.figures()
    for name, (label, sign) in LABELS.items():
        if name in figures:
            yield label, _cell(figures[name], sign)
        elif found.pairs and name not in (*OF_LISTS, *OF_LABELS, *OF_ONE_READOUT):
            yield label, "-"
    for bucket in found.by_length:
        shortest, longest = f"{bucket.shortest:g}", f"{bucket.longest:g}"
        tokens = shortest if shortest == longest else f"{shortest}-{longest}"
        yield f"accuracy, {tokens} tokens", _cell(bucket.accuracy)
    for part, of_part in (*found.by_source.items(), *found.by_subset.items()):
        name, one = of_part.headline
        if one is not None:
            yield f"{'AUC' if name == 'auc' else name}, {part}", _cell(one)


def _subsets(run: Run, table: ExampleTable) -> list[str | None]:
    """The subset of every example; none if there are too many subsets to report."""
    found = [table.subset(index) for index in range(len(table))]
    count = len({name for name in found if name is not None})
    if count > MOST_SUBSETS:
        run.display.say(
            f"note: the column 'subset' of the held-out data has {count:,} values, more than {MOST_SUBSETS}, so there "
            "are no figures by subset. To use another column, set data.columns: {subset: COLUMN}."
        )
        return []
    return found


def _cell(figure: Figure, sign: str = "") -> str:
    return f"{figure.value:{sign}.3f} [{figure.low:{sign}.2f}, {figure.high:{sign}.2f}]"
