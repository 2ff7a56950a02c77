"""Run folders made by hand, for tests of what looks at runs: as a run leaves them, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isopref.config.load import dump_config
from isopref.config.schema import Config, run_id
from isopref.runs.files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SPOT_CHECKS_FILE,
    STARTS_FILE,
)
from isopref.runs.state import State, held_state
from isopref.runs.write import write_rewards

Lines = Sequence[Mapping[str, Any]]


def make_run(
    folder: Path,
    metrics: Lines,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    state: State | None = None,
    samples: Lines = (),
    spot_checks: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A folder with these metrics: one line for each step."""
    folder.mkdir(parents=True)
    sections = {"model": {"path": "m"}, "data": {"train": "d"}}
    merged = {name: {**sections.get(name, {}), **dict((settings or {}).get(name, {}))} for name in Config.model_fields}
    config = Config.model_validate(merged)
    (folder / CONFIG_FILE).write_text(dump_config(config))
    _write_lines(folder / METRICS_FILE, metrics)
    _write_lines(folder / SAMPLES_FILE, samples)
    if spot_checks is not None:
        (folder / SPOT_CHECKS_FILE).write_text(json.dumps(spot_checks))
    start = {"time": "2026-01-31T12:00:00+0000", "run_id": run_id(config), "data": "d1", "reference": "r1", "pairs": 64}
    _write_lines(folder / STARTS_FILE, [{**start, "ranks": 1, "device": "CPU", "isopref": "0", "torch": "2"}])
    with held_state(folder) as write:
        write(state or State("finished", len(metrics), len(metrics), 12.0))
    _write_evaluation(folder, seed)
    return folder


def noisy_metrics(num_steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Metrics as a run of so many steps logs them, drawn at random around curves."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, num_steps + 1):
        done = step / num_steps
        noise = rng.normal(size=8).tolist()
        lines.append(
            {
                "step": step,
                "train/loss": 0.1 + 0.6 * float(np.exp(-3 * done)) + 0.05 * noise[0],
                "train/accuracy": float(np.clip(0.5 + 0.4 * done + 0.1 * noise[1], 0, 1)),
                "train/margin": 20 * done + noise[2],
                "train/logps_chosen": -250 - 20 * done + 10 * noise[3],
                "train/logps_rejected": -250 - 80 * done + 10 * noise[4],
                "train/rewards_chosen": -2 * done + 0.2 * noise[5],
                "train/rewards_rejected": -8 * done + 0.2 * noise[6],
                "optim/grad_norm": 5 + noise[7],
                "optim/lr": 1e-6 * (1 - done),
                "speed/pairs_per_s": 70 + noise[0],
                "speed/mfu": 0.6 + 0.01 * noise[1],
                "speed/peak_memory_gib": 39.4,
            }
        )
    return lines


def _write_evaluation(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10, 400, (40, 2))
    write_rewards(folder, tokens, np.zeros((40, 2)), rng.normal([1.0, -2.0], 1.0, (40, 2)))
    figures = {
        when: {
            "pairs": 40,
            **{name: {"value": value, "low": value - 0.05, "high": value + 0.05} for name in ("accuracy", "loss")},
            "by_length": [],
            "by_source": {},
        }
        for when, value in (("before", 0.5), ("after", 0.9))
    }
    (folder / EVALUATION_FILE).write_text(json.dumps(figures))


def _write_lines(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
