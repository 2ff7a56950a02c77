"""Two runs side by side: whether they have the same math, where their curves diverge, and how they end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isopref.errors import ConfigError
from isopref.objectives.registry import PARAMS, resolve
from isopref.report.figures import LABELS, OF_LISTS, FieldRow, field_rows
from isopref.runs.read import RunRecord

# How far the losses of two runs with the same math may differ by rounding alone, by compute dtype:
# relative above a loss of 1, absolute below. (Metrics are kept in float32.)
ROUNDING = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float8": 5e-2}

HELD_OUT = ("accuracy", "logp_accuracy", "reward_margin", "loss", *OF_LISTS)  # figures that runs are compared by


@dataclass(frozen=True)
class Parting:
    """The losses of two runs over the steps that both logged."""

    num_steps: int
    tolerance: float
    largest: float  # difference
    step: int | None  # the first at which they differ by more than rounding
    losses: tuple[float, float] | None  # at that step


def math_that_differs(runs: list[RunRecord]) -> list[FieldRow]:
    """Which parts of the math differ between runs: config fields, the pairs, the reference."""
    rows = field_rows(runs, math=True)
    if all(run.starts for run in runs):
        rows += [
            FieldRow(title, [run.start(name) for run in runs])
            for name, title in (("data", "training pairs (digest)"), ("reference", "reference (key)"))
        ]
    return [row for row in rows if row.differs and not _is_default_written_out(row, runs)]


def _is_default_written_out(row: FieldRow, runs: Sequence[RunRecord]) -> bool:
    """Whether runs differ only in spelling out a loss parameter that another leaves at its default."""
    section, _, param = row.name.partition(".")
    if section != "objective" or param not in PARAMS:
        return False
    try:
        resolved = [_loss_params(run, param) for run in runs]
    except (ConfigError, KeyError):  # a config of another version
        return False
    return all(one == resolved[0] for one in resolved)


def _loss_params(run: RunRecord, param: str) -> dict[str, Any]:
    """One parameter as each loss of the run has it."""
    objective = run.config["objective"]
    resolved = resolve(objective["loss"], **{name: objective.get(name) for name in PARAMS})
    return {name: params.get(param) for name, params in resolved.items()}


def parting(a: RunRecord, b: RunRecord) -> Parting | None:
    """The losses of two runs, and where they diverge; None if the runs have no logged step in common."""
    steps = sorted(set(_logged(a)) & set(_logged(b)))
    if not steps:
        return None
    tolerance = max(ROUNDING[compute_dtype(run)] for run in (a, b))
    pairs = list(zip(_between(a, steps), _between(b, steps), strict=True))
    apart = [_distance(x, y) for x, y in pairs]
    first = next((place for place, distance in enumerate(apart) if not distance <= tolerance), None)
    return Parting(
        num_steps=len(steps),
        tolerance=tolerance,
        largest=max((abs(x - y) for x, y in pairs if math.isfinite(x - y)), default=0.0),
        step=None if first is None else steps[first],
        losses=None if first is None else pairs[first],
    )


def _logged(run: RunRecord) -> list[int]:
    return run.metrics["train/loss"].steps if "train/loss" in run.metrics else []


def _between(run: RunRecord, steps: list[int]) -> list[float]:
    """The mean loss between consecutive `steps`. A logged value is the mean since that run's previous line."""
    series = run.metrics["train/loss"]
    sums, found = 0.0, []
    before, wanted = 0, iter(steps)
    begin, end = 0, next(wanted)
    for step, value in zip(series.steps, series.values, strict=True):
        sums += (step - before) * value
        before = step
        if step == end:
            found.append(sums / (end - begin))
            sums, begin, end = 0.0, end, next(wanted, 0)
    return found


def _distance(x: float, y: float) -> float:
    if math.isnan(x) and math.isnan(y):  # a step that both skipped
        return 0.0
    return abs(x - y) / max(1.0, abs(x), abs(y))


def compute_dtype(run: RunRecord) -> str:
    """The dtype that the run computes in."""
    model = run.config.get("model", {})
    return str(model.get("compute_dtype") or model.get("dtype", "float32"))


def final_figures(run: RunRecord) -> dict[str, float | None]:
    """A run's last metrics, by their names for people."""
    held_out = {f"held-out {LABELS[name][0]}": _value(run.figure(name)) for name in HELD_OUT}
    metrics = {
        "training loss": "train/loss",
        "training accuracy": "train/accuracy",
        "training margin": "train/margin",
        "gradient norm": "optim/grad_norm",
        "examples/s": "speed/pairs_per_s",
    }
    return {"steps": run.last_step, **{label: run.last(name) for label, name in metrics.items()}, **held_out}


def last_window(run: RunRecord) -> int:
    """The number of steps over which the last line of training metrics averages."""
    before, last = [0, 0, *_logged(run)][-2:]
    return last - before


def _value(figure: dict[str, float] | None) -> float | None:
    return None if figure is None else figure["value"]
