"""Whole runs against recorded ones: twenty steps in float32 end where they ended before a refactoring.

`recorded/trajectories.json` holds the losses and the exported weights of runs on one machine, by the code before rows
were built from examples. On that machine all but those with `ld` in their names are the same bits; there the discounted
sums are added up in another order. On other processors rounding differs, hence the tolerance.

The two-rank runs, and most of the others, are left to `make trajectories`. After a change that is meant to move
numbers, record them again: RECORD=1 make trajectories.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.forked import isopref_on_ranks
from support.project import MakeProject, Project

RECORDED = Path(__file__).parent / "recorded" / "trajectories.json"
LOSSES = (
    *("ipo", "simpo", "orpo", "cpo", "dpo_norm", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "discopop"),
    *("bco_pair", "aot", "aot_unpaired"),
)
WEIGHTINGS = ("token", "completion", "example")
ROWS = ("shared", "packed", "padded", "padded_separate")
LORA, MOVES, BALANCE = "model.adapter.rank=4", "objective.reference_moves=[4, 0.5]", "objective.balance_weight=0.05"
ONE_RANK = {
    **{f"{w}-{r}": (f"objective.weighting={w}", f"layout.rows={r}") for w in WEIGHTINGS for r in ROWS},
    **{f"loss-{loss}": (f"objective.loss={loss}",) for loss in LOSSES},
    "loss-mix": ("objective.loss={sigmoid: 1.0, ipo: 0.1}",),
    "js": ("objective.divergence=jensen_shannon",),
    "nll": ("objective.nll_weight=0.5",),
    "ld": ("objective.ld_alpha=0.3",),
    "wpo": ("objective.wpo=true",),
    "ld-wpo-nll-padded": (
        *("objective.ld_alpha=0.3", "objective.wpo=true", "objective.nll_weight=0.2", "layout.rows=padded"),
    ),
    "moves": (MOVES,),
    "aot-moves": ("objective.loss=aot", MOVES),
    "lora": (LORA,),
    "lora-ld": (LORA, "objective.ld_alpha=0.3"),
    "moe-balance": (BALANCE,),
    "moe-balance-aot": (BALANCE, "objective.loss=aot"),
}  # fmt: skip
TWO_RANKS = {
    **{f"2-ddp-{r}": (f"layout.rows={r}", "layout.parallel=ddp") for r in ROWS},
    **{f"2-fsdp-{w}": (f"objective.weighting={w}", "layout.parallel=fsdp") for w in WEIGHTINGS},
    "2-lora": (LORA,),
    "2-aot": ("objective.loss=aot",),
    "2-moves": (MOVES, "layout.parallel=fsdp"),
}
IN_EVERY_SUITE = (
    "token-shared",
    "example-packed",
    "completion-padded",
    "loss-aot",
    "ld",
    "wpo",
    "moves",
    "lora",
    "moe-balance",
)
COMMON = ("model.dtype=float32", "optim.epochs=4", "layout.microbatch_tokens=128", "objective.weighting=token")
TOLERANCE = 1e-4


def found_in(run: Path) -> dict[str, Any]:
    """Losses by step, and of the exported weights a digest, their norm and a projection."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = [run / "model" / name for name in ("model.safetensors", "adapter_model.safetensors")]
    weights = load_file(next(file for file in files if file.exists()))
    digest, norm, probe = hashlib.blake2b(digest_size=16), 0.0, 0.0
    for name in sorted(weights.keys() - {"lm_head.weight"}):  # tied where it is a copy of the embedding
        flat = weights[name].contiguous().flatten()
        digest.update(flat.numpy().tobytes())
        norm += float(flat.double().square().sum())
        probe += float(flat.double() @ torch.linspace(-1, 1, len(flat), dtype=torch.float64))
    return {
        "loss": [line["train/loss"] for line in lines],
        "eval_loss": [line["eval/loss"] for line in lines if "eval/loss" in line],
        "weights": {"digest": digest.hexdigest(), "norm": norm**0.5, "probe": probe},
    }


def compare(name: str, run: Path) -> None:
    recorded, found = json.loads(RECORDED.read_text()), found_in(run)
    if os.environ.get("RECORD"):
        recorded[name] = found
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items())
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    expected = recorded[name]
    assert found["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TOLERANCE)
    for figure in ("norm", "probe"):
        assert found["weights"][figure] == pytest.approx(expected["weights"][figure], rel=TOLERANCE, abs=TOLERANCE)


def project_of(name: str, make_project: MakeProject) -> Project:
    return make_project("qwen3_moe" if "moe" in name else "llama")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_SUITE else pytest.mark.soak) for name in ONE_RANK]
)
def test_one_rank(name: str, make_project: MakeProject) -> None:
    compare(name, project_of(name, make_project).train("run", *COMMON, *ONE_RANK[name]))


@pytest.mark.soak
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, make_project: MakeProject) -> None:
    project = project_of(name, make_project)
    outcome = isopref_on_ranks(project, "train", "my.yaml", "run.folder=run", *COMMON, *TWO_RANKS[name])
    assert outcome.code == 0, outcome.err
    compare(name, project.folder / "run")


def test_every_recorded_run_is_compared() -> None:
    assert json.loads(RECORDED.read_text()).keys() == ONE_RANK.keys() | TWO_RANKS.keys()
