"""Records that a script passes: named by content, read as a file would be, and taken out of the config."""

from __future__ import annotations

import copy
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from isopref.build.data import Tables, pair_tables
from isopref.config.in_memory import still_named, take_records
from isopref.config.load import dump_config, load_config
from isopref.data.memory import hold, memory_source
from isopref.data.sources import read_source
from isopref.engine.display import Display
from isopref.errors import ConfigError, DataError
from isopref.testing.tokenizers import tiny_tokenizer

ROOT = Path(__file__).parents[2]
TURN = [{"role": "user", "content": "why?"}]
ROWS: list[dict[str, Any]] = [{"prompt": f"why {n}?", "chosen": "yes", "rejected": "no"} for n in range(6)]


def config(**data: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, "data": data, "optim": {"batch_size": 2}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISOPREF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def load(**data: Any) -> Tables:
    content, memory = take_records(config(**data))
    return pair_tables(load_config(content), tiny_tokenizer("chatml"), Display(quiet=True), memory=memory)


# --- names and content ---------------------------------------------------------------------------------


def test_the_same_records_have_the_same_name_in_any_container_and_process() -> None:
    name = hold("data.train", ROWS).name
    assert hold("data.eval", copy.deepcopy(ROWS)).name == name
    assert hold("data.train", datasets.Dataset.from_list(ROWS)).name == name
    assert hold("data.train", datasets.Dataset.from_list([*ROWS, ROWS[0]]).select(range(6))).name == name
    code = f"from isopref.data.memory import hold; print(hold('x', {ROWS!r}).name)"
    elsewhere = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert elsewhere.stdout == name + "\n"
    others = [ROWS[::-1], ROWS[:5], [*ROWS[:5], {**ROWS[5], "chosen": "yes!"}], [*ROWS[:5], {**ROWS[5], "weight": 2}]]
    assert len({name, *(hold("x", other).name for other in others)}) == 5


def test_a_list_that_changes_has_another_digest() -> None:
    rows = copy.deepcopy(ROWS)
    source = memory_source(hold("data.train", rows), {})
    first = source.digest()
    rows[3]["chosen"] = "never"
    assert source.digest() != first


def test_records_are_read_as_plain_values() -> None:
    row = {
        "prompt": np.array(TURN, dtype=object),
        "chosen": ("a", np.int64(3)),
        "weight": np.float32(0.5),
        "n": {"x": ()},
    }
    ((fields, place),) = memory_source(hold("data.train", [row]), {}).read()
    assert (fields, place) == ({"prompt": TURN, "chosen": ["a", 3], "weight": 0.5, "n": {"x": []}}, "[0]")
    assert type(fields["weight"]) is float


@pytest.mark.parametrize("form", ["numpy", "pandas"])
def test_the_format_of_a_data_set_is_left_aside(folder: Path, form: str) -> None:
    rows = [{"prompt": TURN, "chosen": "yes", "rejected": "no", "weight": 2.0}]
    formatted = datasets.Dataset.from_list(rows).with_format(form)
    assert [record.fields for record in memory_source(hold("data.train", formatted), {})] == rows
    formatted.save_to_disk("saved")
    assert [record.fields for record in read_source("saved")] == rows


def test_other_columns_may_hold_what_prints_the_same_everywhere() -> None:
    rows = [{**ROWS[0], "at": datetime.datetime(2026, 1, 31), "raw": b"x", "n": float("nan")}]
    assert hold("x", rows).digest == hold("x", copy.deepcopy(rows)).digest


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("why?", "data.train[1]: a record must be a dict, but this is a str. Convert it."),
        ({"prompt": object()}, "data.train[1]: holds a builtins.object. A record in memory may hold text, numbers,"),
        ({"prompt": {1, 2}}, "data.train[1]: holds a builtins.set. A record"),
        ({0: "why?", "chosen": "yes"}, "data.train[1]: a column's name must be text, this is 0. Rename it."),
    ],
)
def test_what_is_no_record_is_named(row: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        hold("data.train", [ROWS[0], row])
    assert str(caught.value).startswith(message)


# --- in a config ---------------------------------------------------------------------------------------


def test_tables_are_those_of_a_file(folder: Path) -> None:
    from_file, from_list, from_set = (
        load(train="a.jsonl"),
        load(train=ROWS),
        load(train=datasets.Dataset.from_list(ROWS)),
    )
    assert from_file.train.digest == from_list.train.digest == from_set.train.digest
    (use,) = from_list.sources
    assert (use.path, use.found.format, use.found.shape, use.train) == ("data.train", "in memory", "text", 6)
    assert from_list.train.origin(3) == "data.train[3]"
    assert len(list((folder / "cache" / "tables").glob("*.arrow"))) == 2  # a list and a data set share one
    load(train=[*ROWS[:5], {**ROWS[5], "chosen": "never"}])
    assert len(list((folder / "cache" / "tables").glob("*.arrow"))) == 3


def test_records_stand_wherever_a_path_may() -> None:
    more = [{**row, "prompt": f"who {n}?"} for n, row in enumerate(ROWS)]
    mixed = load(train=[{"path": ROWS, "count": 2}, datasets.Dataset.from_list(more), "a.jsonl"], eval=[ROWS[0]])
    assert [(use.field, use.path, use.mixed) for use in mixed.sources] == [
        ("data.train", "data.train[0]", 2),
        ("data.train", "data.train[1]", 6),
        ("data.train", "a.jsonl", 6),
        ("data.eval", "data.eval", 1),
    ]
    assert mixed.train.origin(len(mixed.train) - 1) == "a.jsonl:6"
    renamed = [{"path": "x", "ask": row["prompt"], "chosen": "yes", "rejected": "no"} for row in ROWS]
    columns = load(train={"path": renamed, "columns": {"prompt": "ask"}})
    assert columns.sources[0].found.unused_columns == ("path",)


def test_a_bad_record_is_named_by_its_place(folder: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.train\[2\]: 'chosen' equals 'rejected'"):
        load(train=[*ROWS[:2], {**ROWS[2], "chosen": "no"}])
    with pytest.raises(DataError, match=r"^data\.eval\[0\]: no shape fits the columns question \(text\)"):
        load(train=ROWS, eval=[{"question": "why?"}])


def test_the_config_has_names_in_place_of_records() -> None:
    given = config(train=ROWS, eval=0.5)
    before = copy.deepcopy(given)
    content, memory = take_records(given)
    assert given == before
    (name,) = memory
    settings = load_config(content)
    assert (settings.data.train, settings.data.eval) == (name, 0.5)
    assert name == f"memory:{memory[name].digest}"
    assert (memory[name].label, memory[name].count) == ("data.train", 6)
    assert still_named(memory, settings) == memory
    assert still_named(memory, load_config(content, ["data.train=a.jsonl"])) == {}
    assert still_named(memory, load_config(content, [f"data.train=[a.jsonl, {{path: '{name}'}}]"])) == memory
    Path("c.yaml").write_text(dump_config(settings, ["A note " * 30]))
    assert load_config(Path("c.yaml")) == settings
    assert Path("c.yaml").read_text().startswith("# A note A note")


def test_sources_and_mistakes_stay_what_they_are() -> None:
    for train in ("a.jsonl", ["a.jsonl"], [{"path": "a.jsonl", "count": 1}], [{"count": 1}], [], 7, None):
        assert take_records(config(train=train)) == (config(train=train), {})
    assert take_records({"model": 3}) == ({"model": 3}, {})
    assert take_records({"data": 3}) == ({"data": 3}, {})


def test_containers_that_are_not_taken() -> None:
    pandas = pytest.importorskip("pandas")
    whole = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    for value in (whole, datasets.Dataset.from_list(ROWS).to_iterable_dataset()):
        with pytest.raises(ConfigError, match=rf"^data\.eval: expected a Dataset, found a {type(value).__name__}\."):
            take_records(config(train=ROWS, eval=value))
    with pytest.raises(ConfigError, match=r"^data\.train: is a pandas DataFrame\. .* frame\.to_dict\('records'\)"):
        take_records(config(train=pandas.DataFrame(ROWS)))
    load(train=pandas.DataFrame(ROWS).to_dict("records"))


def test_a_name_without_its_records_says_how_to_go_on() -> None:
    with pytest.raises(DataError, match=r"^memory:0a: this data was passed to isopref\.train by a script.*same data"):
        read_source("memory:0a")
