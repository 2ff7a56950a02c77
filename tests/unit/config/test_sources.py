"""Sources in the config: text, lists, a share, what is refused and at which place, the run id, the way back to YAML."""

from pathlib import Path

import pytest

from isopref.config.load import dump_config, load_config
from isopref.config.schema import DataConfig, run_id
from isopref.config.values import SourceConfig
from isopref.errors import ConfigError

HEAD = "model: {path: m}\ndata:\n"  # two lines; what a test adds begins in line 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def data(file: Path, text: str, *overrides: str) -> DataConfig:
    file.write_text(HEAD + text)
    return load_config(file, overrides).data


def problems(file: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        data(file, text, *overrides)
    lines = str(caught.value).replace(str(file), file.name).split("\n")
    return [line.removeprefix("  ") for line in lines if not line.endswith("problems:")]


@pytest.mark.parametrize("text", ["*.jsonl", "*a", "&a.jsonl", "& b", "!a.jsonl", "@a", "`a`", "%a", "#a"])
def test_an_override_that_begins_with_a_sign_of_yaml_is_text(file: Path, text: str) -> None:
    assert data(file, "  train: d\n", f"data.train={text}").train == text


def test_an_override_may_still_have_a_tag(file: Path) -> None:
    assert data(file, "  train: d\n", "data.train=!!str 3").train == "3"


@pytest.mark.parametrize("text", ["*.jsonl", "*a", "&a.jsonl", "!a.jsonl", "@a", "`a`"])
def test_text_that_needs_quotes(file: Path, text: str) -> None:
    way_out = f'Quote text that starts with {text[0]}: "{text[0]}...".'
    (line,) = problems(file, "  train: d\n", f"data.train=[{text}, b.jsonl]")
    assert line.startswith(f"override 'data.train=[{text}, b.jsonl]': not valid YAML: ")
    assert line.endswith(way_out)
    (line,) = problems(file, f"  train: {text}\n")
    assert line.startswith("c.yaml:3: not valid YAML: ")
    assert line.endswith(way_out)


def test_a_source_is_text_or_a_list(file: Path) -> None:
    assert data(file, "  train: a.jsonl\n").train == "a.jsonl"
    assert data(file, "  train: [a.jsonl, b.csv]\n  eval: [c]\n").eval == ["c"]
    hub = data(file, "  train: {path: o/n, name: en, split: test, revision: v1}\n  eval: {path: a, count: 2}\n")
    assert hub.train == SourceConfig(path="o/n", name="en", split="test", revision="v1")
    assert (hub.eval, hub.eval_sources) == (SourceConfig(path="a", count=2),) * 2
    listed = data(file, "  train:\n    - path: a\n      weight: 2\n    - {path: b, weight: 1, columns: {chosen: x}}\n")
    assert listed.train == [
        SourceConfig(path="a", weight=2.0),
        SourceConfig(path="b", weight=1.0, columns={"chosen": "x"}),
    ]


@pytest.mark.parametrize("text", ["  train: a\n", "  train: [a, b]\n", "  train: [{path: a, count: 1}]\n"])
@pytest.mark.parametrize(
    ("override", "train"),
    [
        ("x.jsonl", "x.jsonl"),
        ("{path: x}", SourceConfig(path="x")),
        ("[x, y]", ["x", "y"]),
        ("[{path: x, count: 3}]", [SourceConfig(path="x", count=3)]),
    ],
)
def test_an_override_replaces_the_whole_field(file: Path, text: str, override: str, train: object) -> None:
    assert data(file, text, f"data.train={override}").train == train


@pytest.mark.parametrize(
    "text",
    [
        "  train: a\n  eval: 0.25\n",
        "  train: a\n  eval: '0.25'\n",
        "  train: {path: a, split: 'train[:5%]', revision: '1e5'}\n  eval: [{path: b, name: en}]\n",
        "  train: [a, '1e5', 'null']\n  eval: [{path: '2', count: 7}]\n",
        "  train: [{path: a, weight: 0.1, columns: {prompt: '1e5'}}, {path: b, weight: 3}]\n",
    ],
)
def test_dump_reads_back_to_an_equal_config(file: Path, text: str) -> None:
    file.write_text(HEAD + text)
    config = load_config(file)
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert run_id(load_config(file)) == run_id(config)


def test_the_run_id_follows_every_field_of_a_source(file: Path) -> None:
    file.write_text(HEAD + "  train: a\n")
    values = ["[{path: a}]", "[{path: b}]", "[{path: a, count: 1}]", "[{path: a, weight: 1}, {path: b, weight: 2}]"]
    values += [
        "[{path: a, weight: 1}, {path: b, weight: 3}]",
        "[{path: a, columns: {prompt: q}}]",
        "{path: a}",
        "{path: a, name: x}",
        "{path: a, split: x}",
        "{path: a, revision: x}",
        "[{path: a}, b]",
        "[b, {path: a}]",
    ]
    ids = {run_id(load_config(file, [f"data.train={value}"])) for value in values}
    assert len(ids) == len(values)
    held_out = ["null", "0.1", "0.2", "'0.1'", "['0.1']"]
    assert len({run_id(load_config(file, [f"data.eval={value}"])) for value in held_out}) == len(held_out)


FIELDS = "path, name, split, revision, weight, count, columns"
SOURCE = f"must be non-empty text or a source ({FIELDS})"
SOURCES = f"must be non-empty text, or a source ({FIELDS}), or a non-empty list of sources"
HELD_OUT = f"{SOURCES}, or a number, above 0, below 1, or null"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  train: []\n", f"c.yaml:3: data.train: {SOURCES}; found []."),
        (
            "  train: {path: a, splt: b}\n",
            "c.yaml:3: data.train.splt: no such field. Did you mean data.train.split?",
        ),
        (
            "  train:\n    path: a\n    revision: 7\n",
            'c.yaml:5: data.train.revision: must be non-empty text or null; found 7. Put it in quotes: "7".',
        ),
        ("  train: {path: a, weight: 2}\n", "c.yaml:3: data.train.weight: has no effect with a single source."),
        (
            "  train: a\n  eval:\n    path: a\n    weight: 2\n    count: 1\n",
            "c.yaml:7: data.eval.count: 1 pairs, but the source also has a weight. Remove one of them.",
        ),
        ("  train: 7\n", f'c.yaml:3: data.train: {SOURCES}; found 7. Put it in quotes: "7".'),
        ("  train: a\n  eval: {count: 1}\n", "c.yaml:4: data.eval.path: is required. Where the pairs are"),
        ("  train: a\n  eval: []\n", f"c.yaml:4: data.eval: {HELD_OUT}; found []."),
        ("  train:\n  - a\n  - 7\n", f'c.yaml:5: data.train[1]: {SOURCE}; found 7. Put it in quotes: "7".'),
        ("  train: [a, ['b']]\n", f"c.yaml:3: data.train[1]: {SOURCE}; found [b]."),
        (
            "  train:\n  - path: a\n    wieght: 1\n",
            "c.yaml:5: data.train[0].wieght: no such field. Did you mean data.train[0].weight?",
        ),
        (
            "  train:\n  - {path: a, zzz: 1}\n",
            f"c.yaml:4: data.train[0].zzz: no such field. Known fields: {FIELDS}.",
        ),
        (
            "  train:\n  - weight: 1\n",
            "c.yaml:4: data.train[0].path: is required. Where the pairs are: any string that data.train takes.",
        ),
        (
            "  train: [{path: a,\n    weight: 0}]\n",
            "c.yaml:4: data.train[0].weight: must be a number, above 0, or null; found 0.",
        ),
        (
            "  train: a\n  eval:\n  - path: a\n    count: 0\n",
            "c.yaml:6: data.eval[0].count: must be a whole number, at least 1, or null; found 0.",
        ),
        (
            "  train:\n  - path: a\n    columns:\n      prompt: q\n      chosen: 1\n",
            "c.yaml:7: data.train[0].columns: must be a mapping from text to text or null; found {prompt: q,",
        ),
        (
            "  train:\n  - path: a\n    path: b\n",
            "c.yaml:5: data.train[0].path: given twice, first on line 4. Remove one of them.",
        ),
        (
            "  train: a\n  eval_fraction: 0.1\n",
            "c.yaml:4: data.eval_fraction: no such field. Did you mean data.eval?",
        ),
        ("  train: a\n  val_size: 0.1\n", "c.yaml:4: data.val_size: no such field. data.eval takes a share"),
        (
            "  train: [{path: a, columns: {}}]\n  eval: 0.1\n  columns: {prompt: q}\n",
            "c.yaml:5: data.columns: has no effect: every source sets its own columns. Remove it, or theirs.",
        ),
        (
            "  train:\n  - path: a\n    weight: 1\n    count: 2\n",
            "c.yaml:6: data.train[0].count: 2 pairs, but the source also has a weight. Remove one of them.",
        ),
        (
            "  train: [a, b]\n  eval:\n  - path: c\n    weight: 2\n",
            "c.yaml:6: data.eval[0].weight: has no effect with a single source. Remove it.",
        ),
        (
            "  train:\n  - path: a\n    weight: 1\n  - b\n",
            "c.yaml:6: data.train[1]: has no weight, but other sources in the list do. Set a weight for all of them",
        ),
        (
            "  train: [{path: a, columns: {}}]\n  columns: {prompt: q}\n",
            "c.yaml:4: data.columns: has no effect: every source sets its own columns. Remove it, or theirs.",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(file: Path, text: str, message: str) -> None:
    (line,) = problems(file, text)
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("value", "share", "sources"),
    [
        ("0.05", 0.05, None),
        ("1e-3", 0.001, None),
        ("held_out.jsonl", None, "held_out.jsonl"),
        ("'0.05'", None, "0.05"),
        ("'3'", None, "3"),
        ("[a, b]", None, ["a", "b"]),
        ("null", None, None),
    ],
)
def test_held_out_pairs_are_a_share_or_sources(
    file: Path, value: str, share: float | None, sources: str | list[str] | None
) -> None:
    for found in (data(file, f"  train: a\n  eval: {value}\n"), data(file, "  train: a\n", f"data.eval={value}")):
        assert (found.eval_share, found.eval_sources) == (share, sources)


@pytest.mark.parametrize("value", ["0", "0.0", "1", "1.0", "1.5", "-0.1", "3", "true", ".nan", ".inf"])
def test_a_share_is_above_0_and_below_1(file: Path, value: str) -> None:
    text = f"  train: a\n  eval: {value}\n"
    assert problems(file, text) == [f"c.yaml:4: data.eval: {HELD_OUT}; found {value}."]


def test_the_run_id_of_a_source_is_that_of_before_hub_fields(file: Path) -> None:
    """Worked out from the values that a config had then."""
    file.write_text(HEAD + "  train: [{path: a, count: 3}]\n")
    config = load_config(file)
    assert config.model_dump(mode="json")["data"]["train"] == [
        {"path": "a", "weight": None, "count": 3, "columns": None}
    ]


def test_a_field_of_a_source_can_be_overridden(file: Path) -> None:
    found = data(file, "  train: {path: o/n}\n", "data.train.split=test", "data.train.revision=v2")
    assert found.train == SourceConfig(path="o/n", split="test", revision="v2")


def test_an_override_s_mistake_is_not_said_of_the_file(file: Path) -> None:
    text = "  train:\n  - path: a\n    count: 1\n"
    (line,) = problems(file, text, "data.train=[{weight: 1}]")
    assert line.startswith("override 'data.train=[{weight: 1}]': data.train[0].path: is required.")
    (line,) = problems(file, text, "data.train.path=b")
    assert line == "override 'data.train.path=b': data.train is [{path: a, count: 1}], which has no fields."


def test_every_problem_of_every_source_is_reported(file: Path) -> None:
    text = "  train:\n  - {path: a, weight: -1}\n  - {count: x}\n  - 3\n  eval: [{path: b, lr: 1}]\n"
    assert [line.split(": ")[:2] for line in problems(file, text)] == [
        ["c.yaml:4", "data.train[0].weight"],
        ["c.yaml:5", "data.train[1].path"],
        ["c.yaml:5", "data.train[1].count"],
        ["c.yaml:6", "data.train[2]"],
        ["c.yaml:7", "data.eval[0].lr"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "  train: [{path: a, count: 1}, b]\n",
        "  train: [{path: a, columns: {prompt: q}}, b]\n  columns: {prompt: r}\n",
        "  train: a\n  eval: 0.1\nrun: {eval_every: 3, samples: 2}\n",
    ],
)
def test_possible_combinations(file: Path, text: str) -> None:
    data(file, text)
