"""Whole runs on a tiny model, against the oracle's loop and against figures worked out by hand."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from olmo_core.distributed.checkpoint import load_state_dict
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref.config.load import load_config
from isopref.config.schema import run_id
from isopref.data.schedule import epoch_order
from isopref.examples import PairTokens
from isopref.testing import oracle
from isopref.types import PairLogps
from support.project import MakeProject, Project, Weights

BETA, LR, SEED, STEPS = 0.1, 1e-3, 0, 10
# The default schedule on ten steps by hand: one step of warm-up, then down by a tenth each.
LINEAR = [LR * (1 - k / 10) for k in range(10)]

TRAIN_METRICS = (
    "loss", "logps_chosen", "logps_rejected", "rewards_chosen", "rewards_rejected", "margin", "accuracy",
    "token_count", "pair_count", "padding_fraction",
)  # fmt: skip
METRICS = {"step", *(f"train/{name}" for name in TRAIN_METRICS), "optim/grad_norm", "optim/lr"}


def read_pairs(project: Project, name: str) -> tuple[list[PairTokens], list[float]]:
    """Tokens and weights of a file by hand: ChatML, one token a byte, answers end with <|im_end|>."""
    tokenizer: Any = AutoTokenizer.from_pretrained(project.model)
    records = [json.loads(line) for line in (project.folder / name).read_text().splitlines()]

    def tokens(text: str) -> Any:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])

    pairs = [
        PairTokens(
            tokens(f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n"),
            tokens(f"{record['chosen']}<|im_end|>"),
            tokens(f"{record['rejected']}<|im_end|>"),
        )
        for record in records
    ]
    return pairs, [record["weight"] for record in records]


def sigmoid_loss(policy: PairLogps, ref: PairLogps) -> torch.Tensor:
    """Eq. 7 of the DPO paper, for each pair."""
    return -logsigmoid(BETA * ((policy.chosen - ref.chosen) - (policy.rejected - ref.rejected)))


def train_by_oracle(
    project: Project, lrs: Sequence[float], *, max_norm: float = math.inf, decay: float = 0.0, eps: float = 1e-8
) -> tuple[Weights, list[float], list[float]]:
    """The slow, obvious loop. Returns the weights, and the loss and the gradient's norm of every step."""
    model: Any = AutoModelForCausalLM.from_pretrained(project.model, dtype=torch.float64).eval()
    pairs, own = read_pairs(project, "train.jsonl")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=eps)
    with torch.no_grad():
        ref = oracle.pair_logps(model, pairs)
    batches = [
        order[start : start + 5]
        for order in (epoch_order(len(pairs), seed=SEED, epoch=epoch).tolist() for epoch in (1, 2))
        for start in range(0, len(pairs), 5)
    ]
    losses, norms = [], []
    for batch, lr in zip(batches, lrs, strict=False):
        some = [pairs[i] for i in batch]
        weight = oracle.weights(some, "example", [own[i] for i in batch])
        part = PairLogps(*(x[batch] for x in (ref.chosen, ref.rejected, ref.num_chosen, ref.num_rejected)))
        loss, gradient = oracle.whole_batch(model, some, sigmoid_loss, part, weight)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name] * min(1.0, max_norm / (norm + 1e-6))
        for group in optim.param_groups:
            group["lr"] = lr
        optim.step()
        losses.append(float(loss))
        norms.append(norm)
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


# --- one run, from all sides -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(make_project: MakeProject) -> Project:
    """Nothing is written in it but runs, each in a folder of its own."""
    return make_project()


@pytest.fixture(scope="module")
def run(shared: Project) -> Path:
    """The run that the tests of this part look at."""
    return shared.train("run", "run.samples=3", "run.eval_every=4")


def test_files(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "reference.json", "starts.jsonl", "state.json", "engine.log", "metrics.jsonl", "evaluation.json",
        "reference", "rewards.npz", "samples.jsonl", "report.html", "model", "checkpoints", "last_checkpoint.json",
    }  # fmt: skip
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step{STEPS}"]


def test_first_loss_is_log_2(run: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    first = read_metrics(run)[0]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["train/accuracy"] == 0.5
    assert first["train/margin"] == pytest.approx(0, abs=1e-4)


def test_metrics(run: Path, shared: Project, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line.keys() >= METRICS for line in lines)
    assert not any("speed/mfu" in line for line in lines)  # of a CPU nobody knows the peak
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert [line["train/pair_count"] for line in lines] == [5, 5, 5, 5, 3] * 2
    pairs, _ = read_pairs(shared, "train.jsonl")
    num_tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    assert sum(line["train/token_count"] for line in lines) == 2 * num_tokens
    assert lines[-1]["train/loss"] < 0.6 * lines[0]["train/loss"]


def test_held_out_pairs(run: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    figures = json.loads((run / "evaluation.json").read_text())
    before, after = figures["before"], figures["after"]
    assert before["pairs"] == after["pairs"] == 8
    assert before["accuracy"]["value"] == 0.5
    assert before["loss"]["value"] == pytest.approx(math.log(2), abs=1e-9)
    assert after["accuracy"]["value"] > 0.9
    assert after["loss"]["value"] < before["loss"]["value"]
    assert after["reward_margin"]["low"] > 0
    during = {line["step"]: line["eval/accuracy"] for line in read_metrics(run) if "eval/accuracy" in line}
    assert list(during) == [4, 8, STEPS]
    assert during[8] > 0.5
    last = read_metrics(run)[-1]  # kept in float32
    assert last["eval/loss_high"] == pytest.approx(after["loss"]["high"], rel=1e-6)
    assert last["eval/accuracy"] == pytest.approx(after["accuracy"]["value"], rel=1e-6)


def test_samples(run: Path, shared: Project) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    prompts = [json.loads(line)["prompt"] for line in (shared.folder / "eval.jsonl").read_text().splitlines()]
    answers = {f"{how}_{when}" for how in ("greedy", "sampled") for when in ("before", "after")}
    assert all(sample.keys() == {"prompt", *answers} for sample in samples)
    assert [sample["prompt"] for sample in samples] == list(dict.fromkeys(prompts))[:3]


def test_export_is_the_last_checkpoint(run: Path, shared: Project, load_weights: Callable[[Path], Weights]) -> None:
    start, exported = load_weights(shared.model), load_weights(run / "model")
    assert all(tensor.dtype == torch.float64 for tensor in exported.values())
    assert all(not torch.equal(exported[name], start[name]) for name in start)
    state = {"model": {f"model.{name}": torch.zeros_like(tensor) for name, tensor in start.items()}}
    with warnings.catch_warnings(action="ignore"):  # that this is one process
        load_state_dict(run / "checkpoints" / f"step{STEPS}" / "model_and_optim", state)
    assert all(torch.equal(exported[name], state["model"][f"model.{name}"]) for name in exported)


def test_export_stands_alone(run: Path, shared: Project) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config._attn_implementation != "isopref_segments"
    assert "isopref" not in (run / "model" / "config.json").read_text()
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (shared.model, run / "model"))
    assert after.chat_template == before.chat_template
    assert after("hello")["input_ids"] == before("hello")["input_ids"]


def test_resolved_config_is_the_same_run(run: Path, shared: Project) -> None:
    given = load_config(shared.folder / "my.yaml", ["run.folder=run", "run.samples=3", "run.eval_every=4"])
    written = load_config(run / "config.yaml")
    assert written == given
    assert run_id(written) == run_id(given)


# --- the math ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(shared: Project) -> tuple[Weights, list[float], list[float]]:
    """Ten steps by the oracle."""
    return train_by_oracle(shared, LINEAR, max_norm=1.0)


def test_metrics_are_the_oracles(
    run: Path,
    expected: tuple[Weights, list[float], list[float]],
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    _, losses, norms = expected
    lines = read_metrics(run)  # kept in float32
    assert [line["train/loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    assert [line["optim/grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-6)
    assert [line["optim/lr"] for line in lines] == pytest.approx(LINEAR, rel=1e-12)


LAYOUTS = [
    [],
    ["layout.microbatch_tokens=200"],
    ["layout.microbatch_tokens=60", "layout.score_tokens=100"],
    ["layout.rows=packed"],
    ["layout.rows=packed", "layout.microbatch_tokens=200", "layout.checkpointing=full"],
    ["layout.checkpointing=full", "layout.offload_activations=full", "layout.mlp_tile_tokens=16"],
    ["layout.rows=padded"],
    ["layout.rows=padded", "layout.microbatch_tokens=180"],
    ["layout.rows=padded_separate"],
    ["layout.rows=padded_separate", "layout.microbatch_tokens=200"],
    ["layout.parallel=ddp", "layout.microbatch_tokens=110"],
    [
        "layout.parallel=fsdp",
        "layout.checkpointing=full",
        "layout.offload_activations=full",
        "layout.mlp_tile_tokens=16",
    ],
    ["layout.parallel=fsdp", "layout.microbatch_tokens=110", "layout.grad_sync=every"],
    ["layout.parallel=fsdp", "layout.rows=padded", "run.eval_every=1", "run.save_every=3"],
]  # layout.context_parallel needs several ranks: see test_context_parallel.py


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_every_layout_ends_in_the_oracles_weights(
    shared: Project,
    tmp_path: Path,
    expected: tuple[Weights, list[float], list[float]],
    load_weights: Callable[[Path], Weights],
    layout: list[str],
) -> None:
    run = shared.train(str(tmp_path / "run"), *layout)
    assert oracle.relative_error(load_weights(run / "model"), expected[0]) <= 1e-8


def test_clipping(
    shared: Project,
    tmp_path: Path,
    expected: tuple[Weights, list[float], list[float]],
    load_weights: Callable[[Path], Weights],
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """Adam hardly sees the size of a gradient, so what clipping does shows only beside an epsilon of its size."""
    first_norm = expected[2][0]
    ends = []
    for limit in (math.inf, 0.05):
        run = shared.train(
            str(tmp_path / str(limit)), f"optim.max_grad_norm={'null' if limit == math.inf else limit}",
            "optim.eps=0.01", "optim.max_steps=3", "optim.schedule=constant", "optim.warmup=0", "data.eval=null",
        )  # fmt: skip
        ends.append(load_weights(run / "model"))
        weights, _, norms = train_by_oracle(shared, [LR] * 3, max_norm=limit, eps=0.01)
        assert oracle.relative_error(ends[-1], weights) <= 1e-8
        logged = [line["optim/grad_norm"] for line in read_metrics(run)]  # before clipping
        assert logged == pytest.approx(norms, rel=1e-6)
        assert logged[0] == pytest.approx(first_norm, rel=1e-6)
    assert first_norm > 1
    assert oracle.relative_error(*ends) > 1e-4


def test_weight_decay_spares_norms_and_biases(
    shared: Project, tmp_path: Path, load_weights: Callable[[Path], Weights]
) -> None:
    run = shared.train(
        str(tmp_path / "run"), "optim.weight_decay=0.5", "optim.max_grad_norm=null", "optim.max_steps=3",
        "optim.schedule=constant", "optim.warmup=0",
    )  # fmt: skip
    weights, _, _ = train_by_oracle(shared, [LR] * 3, decay=0.5)
    assert oracle.relative_error(load_weights(run / "model"), weights) <= 1e-8


# Eight steps with a quarter of warm-up: two steps up to the highest rate, then six down; 0 comes after the last.
DOWN = range(7)
SCHEDULES = {
    "linear": [0.5, *(1 - k / 7 for k in DOWN)],
    "cosine": [0.5, *((1 + math.cos(math.pi * k / 7)) / 2 for k in DOWN)],
    "constant": [0.5, *(1.0 for _ in DOWN)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_with_warmup(
    shared: Project, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]], schedule: str
) -> None:
    run = shared.train(
        str(tmp_path / "run"), f"optim.schedule={schedule}", "optim.warmup=0.25", "optim.max_steps=8",
        "data.eval=null", "run.export=false",
    )  # fmt: skip
    assert [line["optim/lr"] / LR for line in read_metrics(run)] == pytest.approx(SCHEDULES[schedule], rel=1e-12)


def test_no_warmup(shared: Project, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> None:
    run = shared.train(str(tmp_path / "run"), "optim.warmup=0", "optim.max_steps=3", "data.eval=null")
    # From the highest rate in three parts to 0, which the step after the last would have.
    assert [line["optim/lr"] / LR for line in read_metrics(run)] == pytest.approx([1, 2 / 3, 1 / 3], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_of_zero_leaves_the_model_as_it_is(
    shared: Project, tmp_path: Path, load_weights: Callable[[Path], Weights], schedule: str
) -> None:
    run = shared.train(
        str(tmp_path / "run"), "optim.lr=0", "optim.warmup=0.5", f"optim.schedule={schedule}", "optim.max_steps=4",
        "data.eval=null",
    )  # fmt: skip
    start, end = load_weights(shared.model), load_weights(run / "model")
    assert all(torch.equal(end[name], start[name]) for name in start)


def test_label_smoothing_and_weighting_by_hand(
    shared: Project, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]]
) -> None:
    """Smoothing changes the loss of the second step, whatever the first one did, by the equation of cDPO."""
    run = shared.train(
        str(tmp_path / "run"), "objective.label_smoothing=0.2", "objective.weighting=example", "optim.batch_size=1",
        "optim.max_steps=4", "data.eval=null", "run.export=false",
    )  # fmt: skip
    for line in read_metrics(run):  # with one pair a batch, loss and margin are of the same pair
        z = BETA * line["train/margin"]
        expected = 0.8 * math.log1p(math.exp(-z)) + 0.2 * math.log1p(math.exp(z))
        assert line["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_every_path_may_begin_with_the_home_folder(project: Project) -> None:
    home = project.folder / "home"
    home.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(project.model)
    (home / "mine.jinja").write_text(tokenizer.chat_template, encoding="utf-8-sig")  # as Windows writes it
    (project.folder / "train.jsonl").rename(home / "train.jsonl")
    project.extra_env |= {"HOME": str(home), "ISOPREF_CACHE": "~/cache"}
    paths = ("data.train=~/train.jsonl", "data.template=~/mine.jinja", "run.folder=~/run")
    outcome = project.isopref("train", "my.yaml", "data.eval=null", "optim.max_steps=1", *paths)
    assert (outcome.code, outcome.err) == (0, "")
    assert not (project.folder / "~").exists()
    assert sorted(path.name for path in (home / "cache").iterdir()) == ["reference", "tables"]
    assert (home / "run/model/chat_template.jinja").read_text() == tokenizer.chat_template
