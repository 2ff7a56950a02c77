"""Names and metrics of runs, shared by the HTML report, its Markdown and the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from isopref.config.describe import default, fields
from isopref.config.load import to_yaml
from isopref.config.schema import NOT_MATH
from isopref.objectives.registry import PARAMS, readout
from isopref.report.elements import fixed
from isopref.runs.read import RunRecord

LABELS = {  # short enough for a table of three columns, 80 characters wide; "+" if a plus sign is shown
    "accuracy": ("preference accuracy", ""),
    "logp_accuracy": ("log-prob accuracy", ""),
    "reward_margin": ("mean reward margin", "+"),
    "reward_margin_std": ("std of the reward margin", ""),
    "length_correlation": ("reward~length corr.", "+"),
    "loss": ("loss", ""),
    # Only for labelled answers.
    "auc": ("AUC of rewards", ""),
    "reward_good": ("mean reward, good", "+"),
    "reward_bad": ("mean reward, bad", "+"),
    "calibration_error": ("calibration error", ""),
    # Only for lists.
    "top1_accuracy": ("best answer on top", ""),
    "kendall_tau": ("Kendall's tau", "+"),
    "ndcg": ("NDCG", ""),
}
OF_LABELS = ("auc", "reward_good", "reward_bad", "calibration_error")
OF_ONE_READOUT = ("logp_accuracy", "calibration_error")  # the first of a policy, the second of a reward model
OF_LISTS = ("top1_accuracy", "kendall_tau", "ndcg")
# The possible range of a figure, which its interval plot spans; plots of other figures span their values.
BOUNDS = {
    **dict.fromkeys(("accuracy", "logp_accuracy", "auc", "top1_accuracy", "ndcg"), (0.0, 1.0)),
    **dict.fromkeys(("length_correlation", "kendall_tau"), (-1.0, 1.0)),
}
MISSING = object()  # a config field that another version of isopref does not have

Interval = dict[str, float]  # value, low, high


class FigureRow(NamedTuple):
    """A figure of the evaluation before and after training."""

    label: str
    before: Interval | None
    after: Interval | None
    sign: str = ""
    bounds: tuple[float, float] | None = None


class FieldRow(NamedTuple):
    """A field of the config, and its value in each run."""

    name: str
    values: list[Any]

    @property
    def differs(self) -> bool:
        return any(value != self.values[0] for value in self.values[1:])


class Entry(NamedTuple):
    """A run in a report: its name there, and the style of its colour."""

    run: RunRecord
    label: str
    style: str


def held_out_title(pairs: int, lists: int, answers: int = 0) -> str:
    """What was evaluated: "40 held-out pairs", "199 comparisons of 40 held-out lists", "9 held-out labelled ..."."""
    if not pairs and answers:
        return f"{answers:,} held-out labelled answers"
    return f"{pairs:,} comparisons of {lists:,} held-out lists" if lists else f"{pairs:,} held-out pairs"


def unit(run: RunRecord) -> str:
    """What an example of a run is called, such as "pair"."""
    return str(run.start("unit") or "pair")


def trains_rewards(run: RunRecord) -> bool:
    """Whether a run trains a reward model."""
    try:
        return readout(run.config["objective"]["loss"]) == "reward"
    except KeyError:  # a loss of another version
        return False


def entries(runs: Sequence[RunRecord]) -> list[Entry]:
    """The runs with short, distinct names."""
    short = [run.name for run in runs]
    labels = short if len(set(short)) == len(short) else [str(run.folder) for run in runs]
    return [Entry(run, label, f"slot{slot}") for slot, (run, label) in enumerate(zip(runs, labels, strict=True))]


def figure_rows(run: RunRecord) -> Iterator[FigureRow]:
    """The evaluation's figures: over all pairs, then accuracy by length, by source and by subset."""
    before, after = run.evaluation.get("before", {}), run.evaluation.get("after", {})
    for name, (label, sign) in LABELS.items():
        if before.get(name) or after.get(name):
            yield FigureRow(label, before.get(name), after.get(name), sign, BOUNDS.get(name))
    old = {bucket["quarter"]: bucket["accuracy"] for bucket in before.get("by_length", ())}
    for bucket in after.get("by_length", ()):
        shortest, longest = f"{bucket['shortest']:g}", f"{bucket['longest']:g}"
        tokens = shortest if shortest == longest else f"{shortest} to {longest}"
        yield FigureRow(
            f"accuracy, {tokens} tokens", old.get(bucket["quarter"]), bucket["accuracy"], bounds=BOUNDS["accuracy"]
        )
    for parts in ("by_source", "by_subset"):
        for part, figures in after.get(parts, {}).items():
            was = before.get(parts, {}).get(part, {})
            name, label = ("accuracy", "accuracy") if figures["accuracy"] else ("auc", "AUC")
            yield FigureRow(f"{label}, {part}", was.get(name), figures.get(name), bounds=BOUNDS[name])


def field_rows(runs: Sequence[RunRecord], *, math: bool) -> list[FieldRow]:
    """The fields of the configs that belong to the math, or those that do not."""
    sections = dict.fromkeys(section for run in runs for section in run.config if (section not in NOT_MATH) == math)
    rows = []
    for section in sections:
        for name in dict.fromkeys(name for run in runs for name in run.config.get(section, {})):
            # A loss parameter is absent if the run's loss does not take it.
            without = None if section == "objective" and name in PARAMS else MISSING
            values = [run.config.get(section, {}).get(name, without) for run in runs]
            rows.append(FieldRow(f"{section}.{name}", values))
    return rows


def is_default(name: str, value: Any) -> bool:
    """Whether a field has its default value."""
    section, _, field = name.partition(".")
    known = fields(section)
    return field in known and not known[field].is_required() and value == default(known[field])


def shown(value: Any) -> str:
    """A config's value on one line."""
    return "(no such field)" if value is MISSING else to_yaml(value)


def duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def range_text(figure: Interval, sign: str = "", digits: int = 3) -> str:
    """The interval of a figure: "0.917 to 1.000"."""
    return f"{fixed(figure['low'], digits, sign)} to {fixed(figure['high'], digits, sign)}"
