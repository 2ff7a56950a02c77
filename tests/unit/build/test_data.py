"""From a config to the tables of a run: mixed by the seed, and no prompt on both sides."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isopref.build import data as data_building
from isopref.build.data import Tables, held_out_table, pair_tables, say_tables
from isopref.config.load import load_config
from isopref.data import pairs as building
from isopref.data.columns import SIDES
from isopref.data.table import ExampleTable
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError
from isopref.testing.tokenizers import tiny_tokenizer

Load = Callable[..., Tables]


def records(start: int, stop: int, answer: str = "no") -> list[dict[str, Any]]:
    return [{"prompt": f"why {n}?", "chosen": f"yes {n}", "rejected": answer} for n in range(start, stop)]


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: a.jsonl}\noptim: {batch_size: 8}\n")
    (tmp_path / "a.jsonl").write_text(jsonl(records(0, 20)))
    (tmp_path / "b.jsonl").write_text(jsonl(records(20, 60)))
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    def load(*overrides: str) -> Tables:
        return pair_tables(load_config(folder / "c.yaml", overrides), tiny_tokenizer("chatml"), Display(quiet=True))

    return load


def origins(table: ExampleTable | None) -> list[str]:
    assert table is not None
    return [table.origin(index) for index in range(len(table))]


def prompts(table: ExampleTable | None) -> set[bytes]:
    assert table is not None
    return {table.example(index).prompt.tobytes() for index in range(len(table))}


def said(tables: Tables) -> list[str]:
    display = Display()
    with display.console.capture() as captured:
        say_tables(tables, display)
    return captured.get().splitlines()


# --- mixing ------------------------------------------------------------------------------------------


def test_without_weights_and_counts_everything_is_used(load: Load) -> None:
    one, two = load(), load("data.train=[a.jsonl, b.jsonl]")
    assert origins(one.train) == [f"a.jsonl:{line}" for line in range(1, 21)]
    assert origins(two.train) == [*origins(one.train), *(f"b.jsonl:{line}" for line in range(1, 41))]
    assert one.held_out is None


def test_counts_and_weights(load: Load) -> None:
    counted = load("data.train=[{path: a.jsonl, count: 3}, {path: b.jsonl, count: 5}]")
    assert [(use.path, use.mixed, use.train) for use in counted.sources] == [("a.jsonl", 3, 3), ("b.jsonl", 5, 5)]
    assert counted.train.sources.tolist() == [0] * 3 + [1] * 5
    assert counted.train.source_names == ("a.jsonl", "b.jsonl")
    # Of 20 and 40 pairs, one to one: 20 of each is the largest mix in which no pair comes twice.
    even = load("data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 1}]")
    assert [use.mixed for use in even.sources] == [20, 20]
    assert said(even) == [
        "data  a.jsonl: 20 pairs (jsonl, text)",
        "data  b.jsonl: 40 pairs (jsonl, text), 20 in the mix",
    ]


def test_the_seed_decides_which_pairs(load: Load) -> None:
    sources = "data.train=[{path: b.jsonl, count: 10}]"
    first, again, other = load(sources), load(sources), load(sources, "optim.seed=1")
    assert first.train.digest == again.train.digest != other.train.digest
    assert len(other.train) == 10


def test_a_count_that_the_source_cannot_give_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"'a\.jsonl': count must be 1 to 20, the number of its pairs; found 21"):
        load("data.train=[{path: a.jsonl, count: 21}]")


def test_sources_have_formats_shapes_and_columns_of_their_own(load: Load, folder: Path) -> None:
    turn: dict[str, Any] = {"conversations": [{"from": "human", "value": "who?"}]}
    turn |= {side: {"from": "gpt", "value": side} for side in ("good", "bad")}
    (folder / "turns.json").write_text(json.dumps([turn]))
    with gzip.open(folder / "plain.csv.gz", "wt") as file:
        file.write("question,best,worst,weight,id\nhow?,a,b,2.5,7\n")
    tables = load(
        "data.train=[{path: turns.json, columns: {chosen: good, rejected: bad}}, plain.csv.gz]",
        "data.columns={prompt: question, chosen: best, rejected: worst}",
    )
    found = [(use.found.format, use.found.shape, use.found.unused_columns) for use in tables.sources]
    assert found == [("json", "sharegpt", ()), ("csv.gz", "text", ("id",))]
    assert tables.train.weights.tolist() == [1.0, 2.5]
    assert origins(tables.train) == ["turns.json:[0]", "plain.csv.gz:2"]
    assert "      columns not used: id" in said(tables)


def test_columns_the_wrong_way_round(load: Load, folder: Path) -> None:
    (folder / "a.jsonl").write_text(jsonl([{"question": row.pop("prompt"), **row} for row in records(0, 9)]))
    with pytest.raises(ConfigError, match=r"no columns \['question'\].* name comes first.*\{prompt: question\}"):
        load("data.columns={question: prompt}")
    with pytest.raises(DataError, match=r"Set data\.columns=\{prompt: question\}\."):
        load()
    assert len(load("data.columns={prompt: question}").train) == 9


def test_a_pattern_and_a_folder_are_one_source_each(load: Load, folder: Path) -> None:
    by_pattern = load("data.train=*.jsonl")
    assert [(use.path, use.found.format, use.mixed) for use in by_pattern.sources] == [
        ("*.jsonl", "2 files, jsonl", 60)
    ]
    expected = [*(f"a.jsonl:{line}" for line in range(1, 21)), *(f"b.jsonl:{line}" for line in range(1, 41))]
    assert origins(by_pattern.train) == expected
    (folder / "shards").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).rename(folder / "shards" / name)
    by_folder = load("data.train=shards/")
    assert origins(by_folder.train) == [f"shards/{origin}" for origin in expected]
    assert by_folder.train.digest == by_pattern.train.digest
    assert said(by_folder)[0] == "data  shards/: 60 pairs (2 files, jsonl, text)"
    assert origins(by_folder.train.select([59, 0])) == ["shards/b.jsonl:40", "shards/a.jsonl:1"]


def test_a_file_more_or_less_builds_a_table_again(load: Load, folder: Path) -> None:
    assert len(load("data.train=*.jsonl").train) == 60
    (folder / "c.jsonl").write_text(jsonl(records(60, 70)))
    assert len(load("data.train=*.jsonl").train) == 70
    (folder / "c.jsonl").rename(folder / "0.jsonl")
    assert origins(load("data.train=*.jsonl").train)[:11] == [
        *(f"0.jsonl:{line}" for line in range(1, 11)),
        "a.jsonl:1",
    ]
    (folder / "0.jsonl").unlink()
    assert len(load("data.train=*.jsonl").train) == 60


# --- what is held out --------------------------------------------------------------------------------


def test_the_share_held_out_is_told_and_one_that_is_far_off_is_a_warning(load: Load) -> None:
    far = 0
    for share in [percent / 100 for percent in range(20, 90, 2)]:
        tables = load(f"data.eval={share}", "optim.batch_size=1")
        assert tables.held_out is not None
        held_out = len(tables.held_out)
        shown = f"{round(100 * held_out / 20)}%"
        line = f"data  {20 - held_out} pairs to train on, {held_out} held out (data.eval)"
        assert line in said(tables)
        is_far = not 0.8 * share <= held_out / 20 <= 1.2 * share
        assert tables.warnings == is_far * [
            f"data.eval: {share} holds out {held_out} of 20 pairs ({shown}): a hash of each prompt decides, so with "
            "few prompts the share can be far off. Use more data, or a file of held-out data (data.eval: FILE)"
        ]
        far += is_far
    assert 0 < far < 35  # of 35


def test_the_share_is_told_also_where_each_source_is_on_one_side(load: Load, folder: Path) -> None:
    lines = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    tables = load("data.eval=0.5")
    for name, table in (("trained.jsonl", tables.train), ("held.jsonl", tables.held_out)):
        (folder / name).write_text(lines[int(origins(table)[0].removeprefix("a.jsonl:")) - 1])
    split = load("data.train=[trained.jsonl, held.jsonl]", "data.eval=0.5", "optim.batch_size=1")
    assert said(split)[-1] == "data  1 pairs to train on, 1 held out (data.eval)"


def test_a_share_of_the_prompts_is_held_out(load: Load, folder: Path) -> None:
    rows = records(0, 200) + records(0, 200, answer="never")  # two pairs for each prompt
    (folder / "a.jsonl").write_text(jsonl(rows))
    tables = load("data.eval=0.2")
    assert tables.held_out is not None
    assert len(tables.train) + len(tables.held_out) == 400
    assert 40 < len(tables.held_out) < 120  # 80 expected
    assert prompts(tables.train).isdisjoint(prompts(tables.held_out))
    assert len(prompts(tables.held_out)) * 2 == len(tables.held_out)
    assert tables.num_left_out == 0
    last = f"data  {len(tables.train)} pairs to train on, {len(tables.held_out)} held out (data.eval)"
    assert said(tables)[-1] == last
    # The same prompts whatever the seed of training, so that runs can be compared.
    other = load("data.eval=0.2", "optim.seed=3")
    assert origins(other.held_out) == origins(tables.held_out)


def test_the_held_out_part_of_a_mix_knows_its_sources(load: Load) -> None:
    tables = load("data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 1}]", "data.eval=0.4")
    assert tables.held_out is not None
    assert tables.held_out.source_names == ("a.jsonl", "b.jsonl")
    for source, use in enumerate(tables.sources):
        name = tables.held_out.source_names[source]
        assert use.held_out == sum(origin.startswith(name) for origin in origins(tables.held_out)) > 0
        assert use.held_out == tables.held_out.sources.tolist().count(source)
        assert use.train == sum(origin.startswith(name) for origin in origins(tables.train))
        assert use.train + use.held_out == use.mixed == 20


def test_prompts_of_data_eval_are_not_trained_on(load: Load, folder: Path) -> None:
    # Lines 1 and 2 are pairs of a.jsonl, line 3 is a prompt of it with another answer, line 4 is of neither.
    rows = [*records(0, 2), *records(2, 3, answer="never"), *records(100, 101)]
    (folder / "held.jsonl").write_text(jsonl(rows))
    tables = load("data.train=[b.jsonl, a.jsonl]", "data.eval=[{path: held.jsonl, count: 4}]")
    assert origins(tables.held_out) == [f"held.jsonl:{line}" for line in range(1, 5)]
    assert tables.num_left_out == 3
    assert [line for line in origins(tables.train) if line.startswith("a")] == [f"a.jsonl:{n}" for n in range(4, 21)]
    assert prompts(tables.train).isdisjoint(prompts(tables.held_out))
    assert [(use.field, use.mixed, use.train, use.held_out) for use in tables.sources] == [
        ("data.train", 40, 40, 0),
        ("data.train", 20, 17, 0),
        ("data.eval", 4, 0, 4),
    ]
    assert said(tables)[-1] == (
        "data  3 pairs of data.train are excluded from training, because data.eval has the same prompt"
    )


def test_the_same_file_on_both_sides_is_refused(load: Load) -> None:
    with pytest.raises(
        DataError, match=r"prompts of all 20 pairs of data\.train.*share of the prompts: data\.eval: 0\.05"
    ):
        load("data.eval=a.jsonl")


def test_a_share_too_small_for_one_prompt_is_refused(load: Load) -> None:
    with pytest.raises(DataError, match=r"Holding out 1e-06 of 20 pairs leaves 20 to train on and 0 to evaluate on"):
        load("data.eval=1e-6")


def test_errors_about_too_few_pairs_say_what_was_dropped(load: Load, folder: Path) -> None:
    (folder / "a.jsonl").write_text(jsonl(records(0, 1) + records(1, 30, answer="no " * 50)))
    with pytest.raises(DataError) as caught:
        load("data.eval=0.1", "data.max_length=40")
    assert "Holding out 0.1 of 1 pairs" in str(caught.value)
    assert "Of 30 records 29 were dropped: 29 too_long. Raise data.max_length, or cut prompts" in str(caught.value)
    with pytest.raises(DataError, match=r"prompts of all 1 pairs.*Of 30 records 29 were dropped: 29 too_long"):
        load("data.eval=a.jsonl", "data.max_length=40")
    with pytest.raises(ConfigError, match=r"1 to 1, the .* found 9\..*Of 30 records 29 were dropped: 29 too_long"):
        load("data.train=[{path: a.jsonl, count: 9}]", "data.max_length=40")


# --- warnings ----------------------------------------------------------------------------------------


def test_ordinary_data_gives_no_warning(load: Load) -> None:
    assert load().warnings == []


def test_text_that_is_templated_already(load: Load, folder: Path) -> None:
    prompt = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"prompt": prompt, "chosen": f"yes {n}<|im_end|>", "rejected": "no<|im_end|>"} for n in range(8)]
    late = {"prompt": "a", "chosen": "b", "rejected": "c <|eot|>"}
    (folder / "a.jsonl").write_text(jsonl([*rows, late, *records(0, 3)]))
    tables = load()
    assert tables.warnings == [
        "a.jsonl: 9 of 12 records contain the tokenizer's special tokens, such as '<|im_start|>': if a "
        "template was already applied, set data.template: none"
    ]
    assert said(tables)[-1] == f"warning: {tables.warnings[0]}"
    assert tables.sources[0].found.special_tokens == {"<|im_start|>": 8, "<|eot|>": 1}
    assert load("data.template=none").warnings == []


def test_special_tokens_in_turns(load: Load, folder: Path) -> None:
    turns = [{"role": "system", "content": "<s>be brief"}, {"role": "user", "content": "why?"}]
    row = {"prompt": turns} | {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    (folder / "a.jsonl").write_text(jsonl([row] * 9))
    assert load().warnings == [
        "a.jsonl: 9 of 9 records contain the tokenizer's special tokens, such as '<s>': the template writes them "
        "around each message, so remove them from the text"
    ]


def test_answers_that_repeat_the_prompt(load: Load, folder: Path) -> None:
    whole = [{**row, **{side: row["prompt"] + row[side] for side in ("chosen", "rejected")}} for row in records(0, 10)]
    (folder / "a.jsonl").write_text(jsonl(whole + records(10, 19)))
    for template in ("null", "none"):
        assert load(f"data.template={template}").warnings == [
            "a.jsonl: in 10 of 19 records both answers begin with the prompt, which would be learnt as part of the "
            "answer: remove it there"
        ]
    (folder / "a.jsonl").write_text(jsonl(whole + records(10, 20)))
    assert load().warnings == []  # half of them: it may be what is asked


def test_an_input_that_the_prompt_lacks(load: Load, folder: Path) -> None:
    """Beside a prompt it may be in there already, so it is told of; beside an instruction it is read."""
    rows = [{"input": "", **row} for row in records(0, 10)]
    rows[0]["input"], rows[1]["input"] = "a text", rows[1]["prompt"]
    (folder / "a.jsonl").write_text(jsonl(rows))
    warning = (
        " of 10 records have text in the column 'input' or 'history', which is ignored next to a 'prompt' that may "
        "already contain it. If it does not, read the prompt's column as 'instruction', as in Alpaca's data: "
        "data.columns={instruction: COLUMN}"
    )
    assert load().warnings == [f"a.jsonl: 1{warning}"]
    assert load().sources[0].found.unused_columns == ("input",)
    assert load("data.columns={system: input}").warnings == []
    rows[2]["history"], rows[3]["history"] = [["earlier", "yes"]], []
    (folder / "a.jsonl").write_text(jsonl(rows))
    assert load().warnings == [f"a.jsonl: 2{warning}"]
    read = load("data.columns={instruction: prompt}")
    assert (read.warnings, read.sources[0].found.unused_columns) == ([], ())
    turns = {side: [{"role": "user", "content": "why?"}, {"role": "assistant", "content": side}] for side in SIDES}
    (folder / "a.jsonl").write_text(jsonl([{**turns, "input": "why?"}] * 9))
    assert load().warnings == []


def test_a_prompt_that_is_a_guess_is_told_of(load: Load, folder: Path) -> None:
    rows = [{side: f"why {n}?\n{side}" for side in SIDES} for n in range(9)]
    (folder / "a.jsonl").write_text(jsonl(rows))
    tables = load()
    (use,) = tables.sources
    assert use.found.shape == "common_start"
    assert use.prompt_from.startswith("what chosen and rejected both begin with, to the end of a line")
    (warning,) = tables.warnings
    assert warning.startswith("a.jsonl: there is no column 'prompt', so the prompt is guessed: the text that 'chosen'")
    marked = [{side: f"User: why {n}?\nAssistant: {side}" for side in SIDES} for n in range(9)]
    (folder / "a.jsonl").write_text(jsonl(marked))
    assert load().warnings == []
    assert load().sources[0].prompt_from == "all up to the last mark of the assistant, as in 'Assistant:'"


def test_many_dropped_pairs(load: Load, folder: Path) -> None:
    long = "no " * 50
    (folder / "a.jsonl").write_text(jsonl(records(0, 8) + records(8, 10, answer=long)))
    assert load("data.max_length=40").warnings == []  # a fifth
    (folder / "a.jsonl").write_text(jsonl(records(0, 8) + records(8, 10, answer=long) + records(10, 11, answer="")))
    assert load("data.max_length=40", "data.on_bad=drop").warnings == [
        "a.jsonl: 3 of 11 records were dropped, 2 as too_long: set data.truncation: keep_end or keep_start to cut "
        "them, or raise data.max_length"
    ]
    assert load("data.max_length=40", "data.on_bad=drop", "data.truncation=keep_end").warnings == [
        "a.jsonl: 3 of 11 records were dropped, 2 as too_long: their answers alone leave no room for a prompt, so "
        "raise data.max_length"
    ]
    (folder / "a.jsonl").write_text(jsonl(records(0, 8) + records(8, 11, answer="")))
    assert load("data.on_bad=drop").warnings == [
        "a.jsonl: 3 of 11 records were dropped, 3 as empty: set data.on_bad: error to see the first one"
    ]


def test_settings_of_scores_and_lists_where_there_are_none(folder: Path, load: Load) -> None:
    compare = "data.compare: there are no lists of answers, so it has no effect"
    gap = "data.min_gap: the data has no scores, so it has no effect"
    assert load("data.compare=adjacent", "data.min_gap=0.5").warnings == [compare, gap]
    (folder / "a.jsonl").write_text(jsonl([{**row, "margin": 1} for row in records(0, 20)]))
    assert load("data.min_gap=0.5").warnings == []
    lists = [{"prompt": f"why {n}?", "responses": ["yes", "no"], "scores": [1, 0]} for n in range(8)]
    (folder / "a.jsonl").write_text(jsonl(lists))
    assert load("data.compare=adjacent", "data.min_gap=0.5").warnings == []


def test_a_batch_of_more_pairs_than_there_are(load: Load) -> None:
    assert load("optim.batch_size=20").warnings == []
    assert load("optim.batch_size=21").warnings == [
        "optim.batch_size: 21 exceeds the number of pairs to train on, 20: an epoch is one step"
    ]


# --- the cache ---------------------------------------------------------------------------------------


def test_all_cores_tokenise_and_the_first_rank_goes_ahead(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    waits: list[float] = []

    def build_table(*args: Any, **kwargs: Any) -> ExampleTable:
        calls.append(kwargs)
        return building.build_table(*args, **kwargs)

    monkeypatch.setattr(data_building, "build_table", build_table)
    monkeypatch.setattr("isopref.data.pairs.time.sleep", waits.append)
    config = load_config(folder / "c.yaml")
    for _ in range(2):  # built, then found
        pair_tables(config, tiny_tokenizer("chatml"), Display(quiet=True), is_first=False)
    assert waits == [data_building.HEAD_START_S]
    load("data.train=b.jsonl")
    assert waits == [data_building.HEAD_START_S, 0.0]
    assert {call["workers"] for call in calls} == {len(os.sched_getaffinity(0))}


def test_only_what_decides_tokens_builds_a_table_again(load: Load, folder: Path) -> None:
    def built() -> int:
        return len(list((folder / "cache" / "tables").glob("*.arrow")))

    load("data.train=[a.jsonl, b.jsonl]")
    for overrides in (
        ["optim.lr=1"],
        ["optim.seed=5", "objective.beta=3", "layout.rows=padded", "run.keep=1"],
        ["data.eval=0.3"],
    ):
        load("data.train=[a.jsonl, b.jsonl]", *overrides)
    load("data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 2}]")
    load("data.train=[{path: a.jsonl, count: 1}, {path: b.jsonl, count: 2}]")
    assert built() == 1
    load("data.train=[a.jsonl, b.jsonl]", "data.max_length=4096")
    assert built() == 2
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text().replace("why 59?", "why 59!"))
    load("data.train=[a.jsonl, b.jsonl]")
    assert built() == 3


def test_another_models_template_holds_out_the_same(folder: Path) -> None:
    """A model is evaluated on what another one was not trained on, whatever tokenizer it has."""
    config = load_config(folder / "c.yaml", ["data.train=b.jsonl", "data.eval=0.3"])
    held_out = [held_out_table(config, tiny_tokenizer(kind), Display(quiet=True)) for kind in ("chatml", "llama3")]
    assert origins(held_out[0]) == origins(held_out[1])
    assert prompts(held_out[0]) != prompts(held_out[1])


def test_held_out_pairs_of_a_count_are_the_same_for_every_seed(load: Load) -> None:
    found = [load("data.eval=[{path: b.jsonl, count: 10}]", f"optim.seed={seed}") for seed in (0, 1)]
    assert origins(found[0].held_out) == origins(found[1].held_out)


def test_no_held_out_pairs(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is null"):
        held_out_table(load_config(folder / "c.yaml"), tiny_tokenizer("chatml"), Display(quiet=True))


def test_data_that_may_not_be_looked_at_does_not_blame_the_cache(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(PermissionError):  # which the command line reports
        load()


def test_a_cache_folder_that_is_a_file(load: Load, folder: Path) -> None:
    (folder / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .* Set ISOPREF_CACHE"):
        load()
