"""`isopref data`, and runs on several sources: what a user sees, with and without a terminal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.project import Project

SHARED = Path(__file__).parents[3] / "shared" / "data" / "dpo_en_demo.json"  # beside the checkout, where it is
COLOURS = {"prompt": "36", "chosen": "32", "rejected": "31"}


@pytest.fixture
def no_weights(project: Project) -> Project:
    """A project whose model has a tokenizer and nothing else."""
    folder = project.folder / "tokenizer"
    shutil.copytree(project.model, folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    config = (project.folder / "my.yaml").read_text().replace(str(project.model), str(folder))
    (project.folder / "my.yaml").write_text(config)
    return project


def report(project: Project, *arguments: str) -> dict[str, Any]:
    outcome = project.isopref("data", "my.yaml", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_what_is_shown(no_weights: Project) -> None:
    records = [json.loads(line) for line in (no_weights.folder / "train.jsonl").read_text().splitlines()]
    records[0] = {"prompt": "a?", "chosen": "yes", "rejected": "no", "note": "x"}
    records[4] = {"prompt": "a?", "chosen": "no", "rejected": "no"}
    records[5] = {"prompt": "a?", "chosen": "yes", "rejected": ""}
    held = json.loads((no_weights.folder / "eval.jsonl").read_text().splitlines()[0])
    records[6] = {**records[6], "prompt": held["prompt"]}
    no_weights.write_pairs("train.jsonl", records)
    outcome = no_weights.isopref("data", "my.yaml", "data.on_bad=drop")
    assert (outcome.code, outcome.err) == (0, "")
    lines = lines_of(outcome.out)
    at = lines.index("data.train train.jsonl")
    assert lines[at : at + 7] == [
        "data.train train.jsonl",
        "format jsonl, shape text",
        "prompt the column 'prompt'",
        "records 23 read; dropped: 1 tie, 1 empty",
        "pairs 21 kept, 20 to train on",
        "columns not used: note",
        "",
    ]
    at = lines.index("data.eval eval.jsonl")
    assert lines[at + 3 : at + 6] == ["records 8 read", "pairs 8 held out", ""]
    note = "note: 1 pair of data.train is excluded from training, because data.eval has the same prompt"
    assert note in lines
    assert "20 pairs to train on" in lines
    assert "8 pairs held out" in lines
    assert sum(line.startswith("longest: train.jsonl:") for line in lines) == 1
    assert "\x1b" not in outcome.out


def test_what_happened_is_counted_and_what_did_not_is_not_mentioned(no_weights: Project) -> None:
    pairs = [{"prompt": f"why {n % 9}?", "chosen": "yes", "rejected": "no"} for n in range(10)]
    pairs[9] = {"prompt": "why 0?", "chosen": "no", "rejected": "yes"}
    pairs[8] = pairs[7]
    no_weights.write_pairs("train.jsonl", pairs)
    share = no_weights.isopref("data", "my.yaml", "data.eval=0.3", "data.train=[{path: train.jsonl, count: 10}]")
    whole = no_weights.isopref("data", "my.yaml", "data.eval=null")
    assert (share.code, whole.code) == (0, 0), share.err + whole.err
    lines = lines_of(whole.out)
    assert "pairs 10 to train on" in lines
    assert "10 pairs to train on, 8 different prompts, 1 repeated pairs" in lines
    assert "warning: 2 pairs contradict another one: the same two answers in the opposite order" in lines
    (uses,) = [line for line in lines_of(share.out) if re.match(r"pairs \d", line)]
    match = re.fullmatch(r"pairs 10 kept, (\d+) to train on, (\d+) held out", uses)
    assert match
    assert int(match[1]) + int(match[2]) == 10
    for told in ("dropped", "in the mix", "not used", "truncated", "BOS", "end token", "left out", " 0 "):
        assert told not in share.out.split("pairs to train on")[0]


def test_warnings_come_last(no_weights: Project) -> None:
    no_weights.write_pairs("train.jsonl", [{"prompt": "a?", "chosen": "yes", "rejected": "no"}])
    outcome = no_weights.isopref("data", "my.yaml", "data.eval=null", "optim.batch_size=4")
    last = "\n\nwarning: optim.batch_size: 4 exceeds the number of pairs to train on, 1: an epoch is one step\n"
    assert outcome.out.endswith(f"[[rejected]]no<|im_end|>{last}")
    assert outcome.out.count("warning: ") == 1


def test_data_without_what_the_loss_learns_from_is_warned_of(no_weights: Project) -> None:
    settings = ("objective.loss=odpo", "data.eval=null")
    why = no_weights.isopref("train", "my.yaml", *settings).err.removeprefix("error: ").removesuffix("\n")
    assert why.startswith("objective.loss: odpo: 23 of 23 comparisons have no score gap")
    assert report(no_weights, *settings)["warnings"] == [f"isopref train refuses this data: {why}"]


def test_a_long_text_is_shown_without_its_middle(no_weights: Project) -> None:
    pair = {"prompt": f"first {'a' * 3000} last", "chosen": "yes", "rejected": f"no{'b' * 1180}no"}
    no_weights.write_pairs("train.jsonl", [pair])
    outcome = no_weights.isopref("data", "my.yaml", "data.eval=null", "optim.batch_size=1")
    assert (outcome.code, outcome.err) == (0, "")
    prompt = f"<|im_start|>user\n{pair['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert f"[[prompt]]{prompt[:800]}\n[... {len(prompt) - 1200:,} characters ...]\n{prompt[-400:]}" in outcome.out
    assert f"[[rejected]]{pair['rejected']}<|im_end|>\n" in outcome.out  # 1,194 characters
    assert report(no_weights, "data.eval=null")["samples"][0]["prompt"] == prompt


def test_three_pairs_with_markers_where_there_is_no_terminal(no_weights: Project) -> None:
    no_weights.write_pairs("train.jsonl", [{"prompt": "a\x1b[2Jb?\r", "chosen": "yes\n", "rejected": "no"}])
    outcome = no_weights.isopref("data", "my.yaml", "data.eval=null", "optim.batch_size=1")
    # What a terminal would obey is written out; the line feed before the end token is the answer's own.
    text = (
        "[[prompt]]<|im_start|>user\na\\x1b[2Jb?\\x0d<|im_end|>\n<|im_start|>assistant\n"
        "[[chosen]]yes\n<|im_end|>\n[[rejected]]no<|im_end|>\n"
    )
    assert outcome.out.endswith("\n" + text)
    assert "\ntrain.jsonl:1: " in outcome.out


@pytest.mark.parametrize("no_color", [False, True])
def test_three_pairs_in_colour_on_a_terminal(no_weights: Project, no_color: bool) -> None:
    no_weights.write_pairs("train.jsonl", [{"prompt": f"a{n}?", "chosen": "yes", "rejected": "no"} for n in range(9)])
    no_weights.extra_env |= {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
    if no_color:
        no_weights.extra_env["NO_COLOR"] = "1"
    outcome = no_weights.isopref("data", "my.yaml", "data.eval=null")
    assert outcome.code == 0, outcome.err
    assert re.search(r"tokenise train\.jsonl \S*━+\S* \S*9/9", outcome.out)  # the bar, where a terminal is
    again = no_weights.isopref("data", "my.yaml", "data.eval=null")
    assert again.out == outcome.out[outcome.out.index("\n", outcome.out.index("9/9")) + 1 :].removeprefix("\x1b[?25h")
    painted = {part: f"\x1b[{code}m" in outcome.out for part, code in COLOURS.items()}
    assert painted == dict.fromkeys(COLOURS, not no_color)
    assert ("[[chosen]]" in outcome.out) == no_color
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.out).replace("[[chosen]]", "").replace("[[rejected]]", "")
    assert plain.count("<|im_start|>assistant\nyes<|im_end|>\nno<|im_end|>\n") == 3
    if not no_color:
        assert "\x1b[32myes<|im_end|>\x1b[0m\n\x1b[31mno<|im_end|>\x1b[0m\n" in outcome.out


def test_json_has_the_same_figures(no_weights: Project) -> None:
    no_weights.write_pairs(
        "train.jsonl", [{"prompt": "a" * n, "chosen": "yes", "rejected": "no!!"} for n in range(1, 21)]
    )
    found = report(no_weights, "data.eval=null")
    (source,) = found["sources"]
    assert (source["field"], source["path"], source["train"]) == ("data.train", "train.jsonl", 20)
    assert (source["found"]["format"], source["found"]["shape"], source["found"]["read"]) == ("jsonl", "text", 20)
    train = found["train"]
    # One token for a byte: of n letters, the prompt has n + 5 ("user\n") + 1 ("\n") + 10 ("assistant\n") + 3 special.
    prompt = [n + 19 for n in range(1, 21)]
    assert train["lengths"]["prompt"]["percentiles"]["0"] == 20
    assert train["lengths"]["prompt"]["percentiles"]["50"] == 29  # the tenth of twenty
    assert train["lengths"]["prompt"]["mean"] == pytest.approx(sum(prompt) / 20)
    assert train["tokens_shared"] == sum(prompt) + 20 * (4 + 5)
    assert train["tokens"] == 2 * sum(prompt) + 20 * (4 + 5)
    assert [one["origin"] for one in train["longest"]] == [f"train.jsonl:{line}" for line in range(20, 10, -1)]
    assert found["held_out"] is None
    assert len(found["samples"]) == 3
    assert found["samples"][0]["answers"]["chosen"] == "yes<|im_end|>"


def test_answers_end_where_the_folder_says_that_the_model_stops(no_weights: Project) -> None:
    folder = no_weights.folder / "tokenizer"
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<pad>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    no_weights.write_pairs("train.jsonl", [{"prompt": "a?", "chosen": "yes", "rejected": "no"}])
    for stops, end in (([2], "<|im_end|>"), ([2, 0], "<pad>")):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        found = report(no_weights, "data.eval=null")
        assert (found["samples"][0]["answers"]["chosen"], found["sources"][0]["found"]["added_ends"]) == (
            f"yes{end}",
            1,
        )


def test_pairs_over_the_context_length_are_warned_of(no_weights: Project) -> None:
    # As above: n letters are a prompt of n + 19 tokens, the longer answer has 5, and the model takes 256.
    for name, letters in (("train.jsonl", (5, 233, 240, 232)), ("eval.jsonl", (3, 239))):
        pairs = [{"prompt": str(n)[0] * n, "chosen": "yes", "rejected": "no!!"} for n in letters]
        no_weights.write_pairs(name, pairs)
    outcome = no_weights.isopref("data", "my.yaml", "optim.batch_size=4")
    assert (outcome.code, outcome.err) == (0, "")
    assert [line.removeprefix("warning: ") for line in lines_of(outcome.out) if line.startswith("warning: ")] == [
        "2 pairs are longer than the model's context length, 256 tokens; the longest, train.jsonl:3, has 264 in "
        "prompt and longest answer. isopref train refuses that. data.max_length: 256 drops longer pairs; with "
        "data.truncation: keep_end or keep_start it truncates their prompts.",
        "1 pair is longer than the model's context length, 256 tokens; the longest, eval.jsonl:2, has 263 in "
        "prompt and longest answer. isopref train refuses that. data.max_length: 256 drops longer pairs; with "
        "data.truncation: keep_end or keep_start it truncates their prompts.",
    ]
    found = report(no_weights)
    longest = {"origin": "train.jsonl:3", "prompt": 259, "answers": {"chosen": 4, "rejected": 5}}
    assert (found["context_length"], found["train"]["over_context"]) == (256, {"examples": 2, "longest": longest})
    assert found["held_out"]["over_context"]["examples"] == 1
    mended = report(no_weights, "data.max_length=256")
    assert (mended["train"]["examples"], mended["train"]["over_context"], mended["held_out"]["over_context"]) == (
        2, None, None,
    )  # fmt: skip


def test_pairs_that_are_too_long_for_a_card(no_weights: Project) -> None:
    outcome = no_weights.isopref("data", "my.yaml", "model.dtype=float32", "--card", "H100")
    assert (outcome.code, outcome.err) == (0, "")
    lines = lines_of(outcome.out)
    assert "on 1 x H100" in lines
    (line,) = [line for line in lines if line.startswith("and mlp_tile_tokens=4096 ")]
    assert line.endswith(" 0 pairs")
    found = report(no_weights, "model.dtype=float32", "--card", "H100")
    assert len(found["reaches"]) == 4
    assert report(no_weights)["reaches"] is None


def test_a_model_without_a_context_length(no_weights: Project) -> None:
    path = no_weights.folder / "tokenizer" / "config.json"
    config = json.loads(path.read_text())
    del config["n_positions"]
    path.write_text(json.dumps({**config, "model_type": "mamba"}))
    no_weights.write_pairs("train.jsonl", [{"prompt": "a" * 5000, "chosen": "yes", "rejected": "no!!"}])
    found = report(no_weights, "data.eval=null")
    assert (found["context_length"], found["train"]["over_context"]) == (None, None)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("data.train=nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("data.train=[train.jsonl, {path: eval.jsonl, count: 9}]", "'eval.jsonl': count must be 1 to 8, the number of"),
        (
            "data.train=[{path: train.jsonl, columns: {prompt: ask}}]",
            "no record has the columns ['ask']. Fix ",
        ),
        ("data.eval=train.jsonl", "data.eval: contains the prompts of all 23 pairs of data.train"),
        ("data.max_length=5", "train.jsonl: none of 23 records is usable; dropped: 23 too_long."),
        ("model.path=/nowhere/model", "model.path: there is no folder /nowhere/model"),
        ("data.train[0]=x", "data.train[0]: no such field. Did you mean data.train?"),
    ],
)
def test_a_mistake_is_one_message(no_weights: Project, argument: str, says: str) -> None:
    for flag in ((), ("--json",)):
        outcome = no_weights.isopref("data", "my.yaml", *flag, argument)
        assert (outcome.code, outcome.out) == (1, "")
        assert re.fullmatch(r"error: .+\n", outcome.err)
        assert says in outcome.err


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data folder")
def test_a_real_file(no_weights: Project) -> None:
    found = report(no_weights, f"data.train={SHARED}", "data.eval=0.1")
    (source,) = found["sources"]
    assert (source["found"]["shape"], source["found"]["read"], source["found"]["kept"]) == ("sharegpt", 300, 300)
    assert source["train"] + source["held_out"] == 300
    assert source["held_out"] == found["held_out"]["examples"] > 0


# --- runs ----------------------------------------------------------------------------------------------


def test_a_run_on_several_sources_with_a_held_out_share(project: Project) -> None:
    outcome = project.isopref(
        "train",
        "my.yaml",
        "run.folder=run",
        "data.train=[{path: train.jsonl, count: 18}, {path: eval.jsonl, count: 6}]",
        "data.eval=0.4",
    )
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[1:3] == [
        "data  train.jsonl: 23 pairs (jsonl, text), 18 in the mix",
        "data  eval.jsonl: 8 pairs (jsonl, text), 6 in the mix",
    ]
    match = re.fullmatch(r"data  (\d+) pairs to train on, (\d+) held out \(data\.eval\)", lines[3])
    assert match
    train, held_out = int(match[1]), int(match[2])
    assert train + held_out == 24
    assert json.loads((project.folder / "run" / "evaluation.json").read_text())["after"]["pairs"] == held_out
    (same,) = report(project, "data.train=[train.jsonl]", "data.eval=null")["sources"]
    assert same["train"] == 23
    metrics = [json.loads(line) for line in (project.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["train/pair_count"] for line in metrics) == 2 * train  # two epochs
