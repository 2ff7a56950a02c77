"""Training on agent runs with tools and reasoning that diverge late: from the file to weights and figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref.data.chat import TokenizeOptions
from isopref.data.pairs import SourceSpec, build_table
from isopref.data.table import ExampleTable
from isopref.testing import oracle
from isopref.testing.models import tiny_folder
from support.chat_templates import QWEN3
from support.forked import isopref_on_ranks
from support.project import Project, Weights

LoadWeights = Callable[[Path], "Weights"]

BETA = 0.1
TOOL = {"name": "price", "description": "of fruit", "parameters": {"type": "object", "properties": {}}}
LAYOUTS = [
    ("layout.rows=shared", "layout.microbatch_tokens=1100"),
    ("layout.rows=packed",),
    ("layout.rows=padded", "layout.microbatch_tokens=2200"),
    ("layout.rows=padded_separate",),
]


def openai_run(number: int) -> dict[str, Any]:
    """Messages with tool calls and reasoning: the runs part after a common call and its result."""
    call = {"type": "function", "function": {"name": "price", "arguments": json.dumps({"n": number})}}
    start = [
        {"role": "user", "content": f"Buy {number} figs?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"SECRET{number}"},
        {"role": "assistant", "content": f"They cost {number}."},
        {"role": "user", "content": "Go on."},
    ]
    good = [
        {"role": "assistant", "content": "", "reasoning_content": f"Ask {number}.", "tool_calls": [call]},
        {"role": "tool", "content": f"RESULT{number}"},
        {"role": "assistant", "content": f"yes, {number} it is", "reasoning_content": "It fits."},
    ]
    bad = [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": f"WRONG{number}"},
        {"role": "tool", "content": "again"},
        {"role": "assistant", "content": "no idea", "weight": 0.5},
    ]
    return {"chosen": [*start, *good], "rejected": [*start, *bad], "tools": [{"type": "function", "function": TOOL}]}


def sharegpt_run(number: int) -> dict[str, Any]:
    """The same with ShareGPT's turns and tools as text."""
    start = [
        {"from": "human", "value": f"Price of {number}?"},
        {"from": "function_call", "value": json.dumps({"name": "price", "arguments": {"n": number}})},
        {"from": "observation", "value": f"SECRET{number}"},
    ]
    good = {"from": "gpt", "value": f"yes, {number}"}
    bad = [
        {"from": "function_call", "value": json.dumps({"name": "price", "arguments": {"n": -number}})},
        {"from": "observation", "value": f"WRONG{number}"},
        {"from": "gpt", "value": "no, it is not"},
    ]
    return {"chosen": [*start, good], "rejected": [*start, *bad], "tools": json.dumps([TOOL])}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project on both kinds of records, with a model that takes long sequences."""
    folder = tmp_path_factory.mktemp("agents")
    model = tiny_folder(folder / "model", "gpt2", dtype=torch.float64, n_positions=2048)
    project = Project(folder, model, {"optim": {"batch_size": 4, "epochs": 1}, "objective": {"beta": BETA}})
    project.write_pairs("messages.jsonl", [openai_run(n) for n in range(6)])
    project.write_pairs("turns.jsonl", [sharegpt_run(n) for n in range(5)])
    project.write_pairs("eval.jsonl", [openai_run(n) for n in range(10, 14)])
    (folder / "agents.jinja").write_text(QWEN3)
    return project


SETTINGS = ("data.train=[messages.jsonl, turns.jsonl]", "data.template=agents.jinja", f"objective.beta={BETA}")


def held_out(project: Project) -> ExampleTable:
    options = TokenizeOptions(
        template=str(project.folder / "agents.jinja"), max_length=None, truncation="drop", on_bad="error"
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(project.model)
    source = SourceSpec(str(project.folder / "eval.jsonl"))
    return build_table([source], tokenizer, folder=project.folder / "expected", options=options)


def test_data_shows_what_is_trained_and_what_is_context(agents: Project) -> None:
    outcome = agents.isopref("data", "my.yaml", *SETTINGS)
    assert outcome.code == 0, outcome.err
    assert "answers contain context" in outcome.out
    shown = outcome.out.replace("\n", "")
    contexts = [piece.split("}}")[0] for piece in shown.split("{{context:")[1:]]
    assert any("RESULT" in one or "WRONG" in one for one in contexts)
    trained = "".join(piece.split("}}", 1)[-1] for piece in shown.split("{{context:"))
    assert "RESULT" not in trained
    assert "WRONG" not in trained
    assert "no idea" in trained or "no, it is not" in trained
    figures = json.loads(agents.isopref("data", "my.yaml", "--json", *SETTINGS).out)["train"]
    assert figures["with_context"] == 6 * 2 + 5  # both sides of the first file, rejected of the second
    assert 0 < figures["trained_tokens"] < figures["answer_tokens"]


@pytest.fixture(scope="module")
def trained(agents: Project) -> Path:
    return agents.train("run", *SETTINGS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_the_layout_does_not_change_the_weights(
    agents: Project, trained: Path, load_weights: LoadWeights, layout: tuple[str, ...]
) -> None:
    other = agents.train(f"run-{layout[0].partition('=')[2]}", *SETTINGS, *layout)
    assert oracle.relative_error(load_weights(other / "model"), load_weights(trained / "model")) <= 1e-9


@pytest.mark.xdist_group("ranks")
def test_two_processes(agents: Project, trained: Path, load_weights: LoadWeights) -> None:
    outcome = isopref_on_ranks(agents, "train", "my.yaml", *SETTINGS, "run.folder=two", "layout.parallel=fsdp")
    assert outcome.code == 0, outcome.err
    assert oracle.relative_error(load_weights(agents.folder / "two" / "model"), load_weights(trained / "model")) <= 1e-9


@torch.no_grad()
def test_figures_are_those_of_transformers_on_the_trained_tokens(agents: Project, trained: Path) -> None:
    """Every sequence alone through the models before and after; a token counts with its weight, context with none."""
    table = held_out(agents)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        for folder in (agents.model, trained / "model")
    )
    margins = []
    for index in range(len(table)):
        example = table.example(index)
        assert example.weights, "some of every answer is context"
        gains = [
            float(oracle.sequence_logp(after, example.prompt, answer, weights))
            - float(oracle.sequence_logp(before, example.prompt, answer, weights))
            for answer, weights in zip(example.answers, example.token_weights, strict=True)
        ]
        margins.append(BETA * (gains[0] - gains[1]))
    found = json.loads((trained / "evaluation.json").read_text())["after"]
    assert found["pairs"] == 4
    assert found["reward_margin"]["value"] == pytest.approx(float(np.mean(margins)), rel=1e-9)
    assert found["accuracy"]["value"] == float(np.mean([margin > 0 for margin in margins]))
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-7)
    assert len(metrics) == 3  # 11 examples, four per step
    assert f"{found['pairs']} held-out pairs" in (trained / "report.html").read_text()


def test_the_last_turn_alone_trains_other_weights(agents: Project, trained: Path, load_weights: LoadWeights) -> None:
    last = agents.train("last", *SETTINGS, "data.train_on=last")
    assert oracle.relative_error(load_weights(last / "model"), load_weights(trained / "model")) > 1e-3
