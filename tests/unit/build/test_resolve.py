"""What a layout becomes: rules by hand, and the same for a run and for its plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from isopref.build import resolve
from isopref.build.model import _compiles, _parallel
from isopref.build.planner import Planner
from isopref.build.run import Run
from isopref.build.run_plan import Hardware
from isopref.config.schema import Config
from isopref.engine.display import Display
from isopref.engine.environment import Environment
from isopref.examples import Lengths
from isopref.models.policy import Policy
from isopref.models.shape import shape_of
from isopref.plan.layout import Layout
from isopref.testing.models import tiny_model

GIB = 2.0**30


@pytest.mark.parametrize(("weights", "sharded", "expected"), [(65, True, True), (64, True, False), (65, False, False)])
def test_a_model_comes_whole_or_from_the_host(weights: int, sharded: bool, expected: bool) -> None:
    """64 of 80 GiB is the most that a device takes whole; what is not sharded can come in no other way."""
    assert resolve.from_host(weights * GIB, 80 * GIB, sharded=sharded) is expected


@pytest.mark.parametrize(
    ("layout", "fitted", "expected"),
    [
        ({}, None, 16384),
        ({}, 3000, 9030),  # twice what was fitted to the training pairs holds no held-out pair of 9030
        ({}, 8000, 16000),
        ({"microbatch_tokens": 3000}, 3000, 6000),
        ({"score_tokens": 500}, 3000, 500),
    ],
)
def test_tokens_that_are_scored_at_once(layout: dict[str, int], fitted: int | None, expected: int) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "layout": layout})
    env, display = Environment(0, 1, torch.device("cpu")), Display(quiet=True)
    run = Run(config, Path("run"), env, display, longest=9030, microbatch_tokens=fitted)
    assert run.score_budget.tokens == expected


# --- a run and its plan ----------------------------------------------------------------------------


def config_of(**sections: dict[str, Any]) -> Config:
    model = {"path": "m", "compute_dtype": "bfloat16", **sections.pop("model", {})}
    return Config.model_validate({"model": model, "data": {"train": "d"}, **sections})


def run_of(config: Config, ranks: int) -> Run:
    return Run(config, Path("run"), Environment(0, ranks, torch.device("cuda")), Display(quiet=True))


def planned(config: Config, model: PreTrainedModel, room: float, ranks: int) -> Layout:
    hardware = Hardware.named("h100", ranks, None, 400.0)
    hardware = replace(hardware, card=replace(hardware.card, memory=room))
    lengths = Lengths.of_pairs(np.full((40, 3), 5))
    return Planner(config, hardware, shape_of(model), lengths).layout(ranks)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"layout": {"compile": False}}, False),
        ({"layout": {"compile": True}}, True),
        ({"layout": {"rows": "padded"}}, False),
        ({"model": {"compute_dtype": None}}, False),
    ],
)
def test_a_plan_compiles_what_its_run_does(sections: dict[str, Any], expected: bool) -> None:
    config, model = config_of(**sections), tiny_model("llama")
    assert _compiles(run_of(config, 1), Policy(model)) is expected
    assert planned(config, model, 80 * GIB, 1).compiled is expected


def test_a_plan_compiles_no_model_without_layers() -> None:
    """As its run: transformers must say which blocks are layers."""
    config, model = config_of(), tiny_model("llama")
    model._no_split_modules = []
    assert _compiles(run_of(config, 1), Policy(model)) is False
    assert planned(config, model, 80 * GIB, 1).compiled is False


@pytest.mark.parametrize("moves", [None, [10, 0.5]])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_a_plan_shards_what_its_run_does(
    compute_dtype: str | None, ranks: int, moves: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients and two averages, 16 bytes for each number, may take 0.4 of a rank; a second model 4 more."""
    config, model = (
        config_of(model={"compute_dtype": compute_dtype}, objective={"reference_moves": moves}),
        tiny_model("llama"),
    )
    state = (16 if moves is None else 20) * sum(p.numel() for p in model.parameters())
    for room, many in ((state / 0.39, "fsdp" if compute_dtype else "ddp"), (state / 0.41, "fsdp")):
        monkeypatch.setattr("isopref.build.model.device_memory", lambda _device, room=room: room)
        expected = many if ranks > 1 or compute_dtype else "single"
        assert _parallel(run_of(config, ranks), Policy(model)) == expected
        assert planned(config, model, room, ranks).parallel == expected


@pytest.mark.parametrize(("max_steps", "steps"), [(None, 6), (4, 4), (9, 6)])  # 17 pairs are 3 batches of 8, twice
def test_steps_of_a_run(max_steps: int | None, steps: int) -> None:
    optim = config_of(optim={"batch_size": 8, "epochs": 2, "max_steps": max_steps}).optim
    assert resolve.num_steps(optim, 17) == steps
