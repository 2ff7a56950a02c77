"""The reference cache from the command line: what hits it, what misses it, and how it is looked after."""

from __future__ import annotations

import json
import math
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isopref.build.model import load_policy
from isopref.data.schedule import epoch_order
from isopref.examples import PairTokens
from isopref.models.policy import Policy
from isopref.reference.store import Store
from isopref.testing import oracle
from isopref.testing.models import byte_tokenizer, tiny_folder
from support.project import MakeProject, Project, Weights

NUM_TRAIN, NUM_EVAL = 23, 8
NO_EVAL = ("data.eval=null", "optim.max_steps=1", "run.export=false")
ReadMetrics = Callable[[Path], list[dict[str, float]]]
LoadWeights = Callable[[Path], "Weights"]


class Scored:
    """Counts the pairs that go through a model without gradients; the probe, which trains, is not among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.num_pairs = 0.0
        original = Policy.forward

        def forward(policy: Policy, microbatch: Any, *needs: Any) -> Any:
            if not policy.training:
                self.num_pairs += microbatch.num_answers / 2
            return original(policy, microbatch, *needs)

        monkeypatch.setattr(Policy, "forward", forward)

    def by(self, run: Callable[[], Any]) -> float:
        before = self.num_pairs
        run()
        return self.num_pairs - before


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Scored:
    return Scored(monkeypatch)


def stores(project: Project) -> list[Path]:
    return sorted((project.folder / "cache" / "reference").iterdir())


def tables(project: Project) -> list[Path]:
    return sorted((project.folder / "cache" / "tables").glob("*.arrow"))


# --- hits ------------------------------------------------------------------------------------------

SAME_REFERENCE = [
    ["optim.lr=0.5", "optim.seed=3"],
    ["objective.beta=2", "objective.weighting=example", "objective.label_smoothing=0.2", "objective.wpo=true"],
    ["optim.batch_size=3", "optim.epochs=1"],
    ["layout.rows=packed"],
    ["layout.rows=padded", "layout.microbatch_tokens=90"],
    ["layout.score_tokens=300", "layout.microbatch_tokens=200"],
    ["layout.parallel=ddp"],
    ["layout.parallel=fsdp", "layout.checkpointing=full"],
]


def test_nothing_that_leaves_the_reference_alone_scores_it_again(project: Project, scored: Scored) -> None:
    assert scored.by(lambda: project.train("first", *NO_EVAL)) == NUM_TRAIN
    for number, settings in enumerate(SAME_REFERENCE):
        assert scored.by(lambda: project.train(f"run{number}", *NO_EVAL, *settings)) == 0, settings  # noqa: B023
    assert len(stores(project)) == 1


def test_held_out_pairs_share_the_store(project: Project, scored: Scored) -> None:
    """Their policy is scored at the end of every run; their reference once."""
    settings = ("optim.max_steps=1", "run.export=false")
    assert scored.by(lambda: project.train("first", *settings)) == NUM_TRAIN + NUM_EVAL + NUM_EVAL
    assert scored.by(lambda: project.train("second", *settings)) == NUM_EVAL
    assert (
        scored.by(lambda: project.train("swapped", *settings, "data.train=eval.jsonl", "data.eval=train.jsonl")) == 23
    )


def test_the_model_under_another_name(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    model: Any = AutoModelForCausalLM.from_pretrained(project.model, dtype="auto")
    model.save_pretrained(project.folder / "copy", max_shard_size="30KB")
    AutoTokenizer.from_pretrained(project.model).save_pretrained(project.folder / "copy")
    assert len(list((project.folder / "copy").glob("*.safetensors"))) > 1
    assert scored.by(lambda: project.train("second", *NO_EVAL, "model.path=copy")) == 0


def test_data_under_another_name_in_another_order(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    lines = (project.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (project.folder / "other.jsonl").write_text("".join(reversed(lines)))
    assert scored.by(lambda: project.train("second", *NO_EVAL, "data.train=other.jsonl")) == 0
    (project.folder / "more.jsonl").write_text("".join(lines + (project.folder / "eval.jsonl").open().readlines()))
    assert scored.by(lambda: project.train("third", *NO_EVAL, "data.train=more.jsonl")) == NUM_EVAL


# --- misses ----------------------------------------------------------------------------------------


def test_one_other_weight(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    shutil.copytree(project.model, project.folder / "changed")
    file = project.folder / "changed" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1e-12
    save_file(tensors, file, metadata={"format": "pt"})
    assert scored.by(lambda: project.train("second", *NO_EVAL, "model.path=changed")) == NUM_TRAIN
    assert len(stores(project)) == 2


def test_one_other_character(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    path = project.folder / "train.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[7]["rejected"] += "!"
    project.write_pairs("train.jsonl", records)
    assert scored.by(lambda: project.train("second", *NO_EVAL)) == 0.5  # one of the two answers


def test_another_template(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    assert scored.by(lambda: project.train("second", *NO_EVAL, "data.template=none")) == NUM_TRAIN
    (project.folder / "same.jinja").write_text(AutoTokenizer.from_pretrained(project.model).chat_template)
    assert scored.by(lambda: project.train("third", *NO_EVAL, "data.template=same.jinja")) == 0


def test_another_precision(project: Project, scored: Scored) -> None:
    mixed = ["model.dtype=float32", "model.compute_dtype=bfloat16"]
    for expected in (NUM_TRAIN, 0):
        for number, precision in enumerate((["model.dtype=float64"], ["model.dtype=float32"], mixed)):
            run = f"run{number}-{expected}"
            assert scored.by(lambda: project.train(run, *NO_EVAL, *precision)) == expected  # noqa: B023


# --- damage ----------------------------------------------------------------------------------------


def test_damage_is_named_and_repaired(project: Project, scored: Scored) -> None:
    project.train("first", *NO_EVAL)
    (store,) = stores(project)
    (shard,) = store.glob("*.shard")
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + bytes([content[100] ^ 255]) + content[101:])
    verified = project.isopref("cache", "verify")
    assert verified.code == 1
    assert f"{store.name[:12]}  damaged\n" in verified.out
    assert verified.err == f"error: {shard}: damaged: its content does not match its name\n"
    before = scored.num_pairs
    outcome = project.isopref("train", "my.yaml", "run.folder=second", *NO_EVAL)
    assert outcome.code == 0, outcome.err
    assert (
        f"warning: {shard}: damaged: its content does not match its name. Its answers will be looked up" in outcome.out
    )
    assert scored.num_pairs - before == NUM_TRAIN
    assert project.isopref("cache", "verify").code == 0
    assert shard.read_bytes() == content


@pytest.mark.parametrize("in_use", [False, True])
def test_a_damaged_token_table_is_named_and_built_again(
    project: Project, load_weights: LoadWeights, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    """When it is opened, or, where it is too large to be checked then, when the damaged pairs are first used."""
    options = ("data.eval=null", "optim.max_steps=2")
    expected = load_weights(project.train("first", *options) / "model")
    (table,) = tables(project)
    content = table.read_bytes()
    token = content.index(np.array(byte_tokenizer().encode("yes "), np.int32).tobytes())
    table.write_bytes(content[:token] + bytes([content[token] ^ 1]) + content[token + 1 :])
    damage = f"{table}: damaged: the digest of section 2 of 2 does not match"

    verified = project.isopref("cache", "verify")
    assert verified.code == 1
    assert f"{table.stem[:12]}  damaged  token table\n" in verified.out
    assert verified.err == f"error: {damage}. Delete it; a run that needs it will rebuild it\n"

    if in_use:
        starts: list[Any] = []
        monkeypatch.setattr("isopref.data.pairs.CHECKED_AT_ONCE", 0)
        monkeypatch.setattr("isopref.cli.main.start_again", starts.append)
        stopped = project.isopref("train", "my.yaml", "run.folder=second", *options)
        assert stopped.err.startswith(f"warning: {damage}. isopref deleted it and rebuilds it on restart.")
        assert len(starts) == 1
    outcome = project.isopref("train", "my.yaml", "run.folder=second", *options, "--resume", "auto")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("damaged: ") == (0 if in_use else 1)
    assert in_use or f"warning: {damage}. Building it again\n" in outcome.out
    assert table.read_bytes() == content
    trained = load_weights(project.folder / "second" / "model")
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
    assert project.isopref("cache", "verify").code == 0


def test_values_that_do_not_fit_the_model_are_told_with_the_way_out(project: Project) -> None:
    """What no checksum can see: values of a model whose score path was another one."""
    project.train("first", *NO_EVAL)
    (folder,) = stores(project)
    store = Store(folder)
    wrong = store.read()[0].copy()
    wrong["logp"] += 0.1
    (shard,) = store.shards()
    shard.unlink()
    store.write(wrong)
    message = project.refused("second", *NO_EVAL)
    assert message.startswith("first step: policy and reference are the same model")
    assert message.endswith(f"To score the reference again: isopref cache rm {folder.name}")
    assert project.isopref("cache", "rm", folder.name).code == 0
    project.train("third", *NO_EVAL)


def test_a_folder_that_cannot_be_written(project: Project) -> None:
    (project.folder / "cache").mkdir()
    (project.folder / "cache" / "reference").write_text("a file")
    assert project.refused("run", *NO_EVAL).startswith(f"{project.folder}/cache/reference/")


# --- resuming --------------------------------------------------------------------------------------


def test_a_resumed_run_never_takes_the_trained_policy_for_its_reference(
    project: Project, make_project: MakeProject, load_weights: LoadWeights
) -> None:
    """Even if the cache is gone meanwhile."""
    settings = ("data.eval=null", "optim.lr=0.01", "run.save_every=1")
    run = project.train("run", *settings)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step10")
    shutil.rmtree(project.folder / "cache")
    project.train("run", *settings, "--resume")
    whole = make_project().train("whole", *settings)
    found, expected = load_weights(run / "model"), load_weights(whole / "model")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_model_where_the_first_one_was(project: Project, load_weights: LoadWeights) -> None:
    """A run whose result was put in the place of its starting model would take itself for its reference."""
    settings = ("data.eval=null", "run.save_every=1", "model.path=start")
    shutil.copytree(project.model, project.folder / "start")
    run = project.train("run", *settings)
    shutil.rmtree(project.folder / "start")
    (run / "model").rename(project.folder / "start")
    assert project.refused("run", *settings, "--resume").startswith(
        "--resume: the reference start is a different model than when the run in run began"
    )
    shutil.rmtree(project.folder / "start")
    shutil.copytree(project.model, project.folder / "start")
    project.train("run", *settings, "--resume")


# --- another model as the reference ----------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("other"), "gpt2", dtype=torch.float64, seed=1)


def test_another_reference(
    project: Project, other: Path, scored: Scored, read_metrics: ReadMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is the oracle's, with each model in its place; and there are never two models at a time."""
    loaded: list[weakref.ref[Policy]] = []
    alive = []

    def load(*arguments: Any, **options: Any) -> Policy:
        alive.append(sum(one() is not None for one in loaded))
        policy = load_policy(*arguments, **options)
        loaded.append(weakref.ref(policy))
        return policy

    monkeypatch.setattr("isopref.build.reference.load_policy", load)
    monkeypatch.setattr("isopref.build.train.load_policy", load)
    run = project.train("run", "optim.max_steps=2", "run.samples=1", f"model.reference={other}")
    assert alive == [0, 0]
    assert read_metrics(run)[0]["train/loss"] == pytest.approx(first_loss(project, other), rel=1e-6)
    figures = json.loads((run / "evaluation.json").read_text())
    assert figures["before"]["loss"]["value"] != pytest.approx(math.log(2), abs=1e-3)
    # A second run finds the reference; its policy is scored on the held-out pairs before and after.
    again = scored.by(lambda: project.train("again", "optim.max_steps=1", "run.samples=0", f"model.reference={other}"))
    assert again == 2 * NUM_EVAL
    assert len(stores(project)) == 1


def first_loss(project: Project, other: Path) -> float:
    tokenizer: Any = AutoTokenizer.from_pretrained(project.model)

    def tokens(text: str) -> Any:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])

    records = [json.loads(line) for line in (project.folder / "train.jsonl").read_text().splitlines()]
    batch = [records[i] for i in epoch_order(len(records), seed=0, epoch=1)[:5].tolist()]
    pairs = [
        PairTokens(
            tokens(f"<|im_start|>user\n{record['prompt']}<|im_end|>\n<|im_start|>assistant\n"),
            tokens(f"{record['chosen']}<|im_end|>"),
            tokens(f"{record['rejected']}<|im_end|>"),
        )
        for record in batch
    ]
    logps = []
    for folder in (project.model, other):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.no_grad():
            logps.append(oracle.pair_logps(model, pairs))
    policy, ref = logps
    margin = (policy.chosen - ref.chosen) - (policy.rejected - ref.rejected)
    loss = -torch.nn.functional.logsigmoid(0.1 * margin)
    return float(oracle.global_loss(loss, oracle.weights(pairs, "example", [record["weight"] for record in batch])))


def test_the_model_itself_named_as_the_reference(project: Project, scored: Scored, load_weights: LoadWeights) -> None:
    """By content it is the same reference: nothing is scored again, and nothing is different."""
    settings = ("data.eval=null",)
    first = load_weights(project.train("first", *settings) / "model")
    count = scored.num_pairs
    second = load_weights(project.train("second", *settings, f"model.reference={project.model}") / "model")
    assert scored.num_pairs == count
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_reference_with_another_vocabulary(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_folder(tmp_path_factory.mktemp("foreign"), "gpt2")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    message = project.refused("run", *NO_EVAL, f"model.reference={folder}")
    assert message.startswith(f"model.reference: {folder} has another vocabulary ")
    assert "1 tokens differ, such as '<new>'" in message


def test_a_reference_that_is_not_there(project: Project) -> None:
    message = project.refused("run", *NO_EVAL, "model.reference=./nowhere")
    assert message.startswith("model.reference: there is no folder ")


# --- objectives without a reference ----------------------------------------------------------------


REFERENCE_FREE = ("objective.loss=cpo", "objective.beta=0.2")


def test_an_objective_without_a_reference_scores_none(
    project: Project, scored: Scored, read_metrics: ReadMetrics
) -> None:
    assert scored.by(lambda: project.train("run", *NO_EVAL, *REFERENCE_FREE)) == 0
    assert not (project.folder / "cache" / "reference").exists()
    first = read_metrics(project.folder / "run")[0]
    assert first["train/rewards_chosen"] == pytest.approx(0.2 * first["train/logps_chosen"], rel=1e-6)
    message = project.refused("other", *NO_EVAL, *REFERENCE_FREE, f"model.reference={project.model}")
    assert message.endswith("has no effect with objective.loss: cpo, which uses no reference. Remove it.")
    outcome = project.isopref("cache", "my.yaml", *REFERENCE_FREE)
    assert outcome.code == 1
    assert "nothing to score" in outcome.err


# --- the commands ----------------------------------------------------------------------------------


def test_fill_ahead_of_a_run(project: Project, scored: Scored) -> None:
    outcome = project.isopref("cache", "my.yaml", "layout.rows=padded")
    assert outcome.code == 0, outcome.err
    assert scored.num_pairs == NUM_TRAIN + NUM_EVAL
    (store,) = stores(project)
    short = store.name[:12]
    assert outcome.out.splitlines()[-3:] == [
        f"cache 0 of 23 training pairs have their reference (store {short}); scoring 23",
        f"cache 0 of 8 held-out pairs have their reference (store {short}); scoring 8",
        f"cache complete: the reference scores of all 31 pairs are in store {short}",
    ]
    assert not (project.folder / "runs").exists()
    again = project.isopref("cache", "fill", "my.yaml")
    assert f"cache 23 of 23 training pairs have their reference (store {short})" in again.out
    assert scored.num_pairs == NUM_TRAIN + NUM_EVAL
    assert scored.by(lambda: project.train("run", *NO_EVAL)) == 0


def test_ls_verify_rm(project: Project) -> None:
    root = project.folder / "cache" / "reference"
    for command in ("ls", "verify"):
        assert project.isopref("cache", command).out == f"No stores in {root}.\n"
    project.isopref("cache", "my.yaml")
    project.isopref("cache", "my.yaml", "model.dtype=float32", "data.eval=null")
    listed = project.isopref("cache", "ls")
    assert listed.code == 0
    head, *lines = listed.out.splitlines()
    assert head.split() == ["key", "answers", "size", "last", "use", "reference"]
    found = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in lines}
    assert set(found) == {path.name[:12] for path in stores(project)}
    assert sorted(int(columns[0]) for columns in found.values()) == [2 * NUM_TRAIN, 2 * (NUM_TRAIN + NUM_EVAL)]
    assert all(columns[3] == str(project.model) for columns in found.values())
    whole = [f"{path.name[:12]}  intact\n" for path in stores(project)]
    whole += [f"{path.stem[:12]}  intact  token table\n" for path in tables(project)]
    assert len(whole) == 2 + 2  # the pairs of data.train are one table, those of data.eval another
    assert project.isopref("cache", "verify").out == "".join(whole)
    key = stores(project)[0].name
    assert project.isopref("cache", "verify", key[:8]).out == f"{key[:12]}  intact\n"
    assert project.isopref("cache", "rm", key[:8]).out == f"removed {key}\n"
    assert len(stores(project)) == 1
    (root / "mine").mkdir()
    assert project.isopref("cache", "rm", "--all").code == 0
    assert stores(project) == [root / "mine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm"], "pass the KEY of a store, or --all"),
        (["rm", "abc", "--all"], "pass the KEY of a store, or --all"),
        (["rm", "abc"], "no store 'abc' in "),
        (["verify", "abc"], "no store 'abc' in "),
        (["--nproc", "2", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["my.yaml", "model.reference=3"], "model.reference: must be non-empty text or null; found 3"),
    ],
)
def test_mistakes(project: Project, arguments: list[str], message: str) -> None:
    outcome = project.isopref("cache", *arguments)
    assert outcome.code == 1
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
