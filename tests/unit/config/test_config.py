"""The config: how it is read and written, the run id, and the texts made from the schema."""

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from isopref.config.describe import adapter_fields, choices, expected, fields, sections, source_fields
from isopref.config.load import dump_config, load_config, to_yaml
from isopref.config.schema import NOT_MATH, Config, DataConfig, ModelConfig, run_id
from isopref.config.starter import demo, reference, starter
from isopref.objectives.registry import PARAMS

MINIMAL = "model: {path: m}\ndata: {train: d}\n"
CONFIG = Config(model=ModelConfig(path="m"), data=DataConfig(train="d"))
ALL_FIELDS = [(section, name) for section in sections() for name in fields(section)]
OWN_FIELDS = [field for field in ALL_FIELDS if field[1] not in PARAMS]  # without those that objectives declare


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


# --- loading ---------------------------------------------------------------------------------------


def test_required_fields_are_enough(file: Path) -> None:
    file.write_text(MINIMAL)
    assert load_config(file) == CONFIG


def test_empty_section_means_its_defaults(file: Path) -> None:
    file.write_text(MINIMAL + "optim:\n  # lr: 1\n")
    assert load_config(file) == CONFIG


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", "10e-7", ".1e-5", "+1e-6", "1.0e-06", "0.000001"])
def test_every_way_to_write_a_small_number(file: Path, text: str) -> None:
    file.write_text(MINIMAL + f"optim: {{lr: {text}}}")
    assert load_config(file).optim.lr == 1e-6
    file.write_text(MINIMAL)
    assert load_config(file, [f"optim.lr={text}"]).optim.lr == 1e-6


def test_text_that_looks_like_a_date_stays_text(file: Path) -> None:
    file.write_text(MINIMAL)
    assert load_config(file, ["run.folder=2026-01-31"]).run.folder == "2026-01-31"


def test_overrides_replace_add_and_the_last_one_wins(file: Path) -> None:
    file.write_text("model: {path: m}\ndata: {train: d, eval: e, columns: {prompt: a, chosen: b}}\n")
    overrides = ["optim.lr=3", "optim.lr=2e-6", "optim.betas=[0.5, 0]", "data.eval=null"]
    overrides += ["data.columns.prompt=q", "data.columns.rejected=c", "model.path=package:p/f=g.gguf"]
    config = load_config(file, overrides)
    assert config.optim.lr == 2e-6
    assert config.optim.betas == (0.5, 0.0)
    assert config.data.eval is None
    assert config.data.columns == {"prompt": "q", "chosen": "b", "rejected": "c"}
    assert config.model.path == "package:p/f=g.gguf"


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CONFIG.optim.lr = 1.0


@pytest.mark.parametrize("folder", ["1e5", "1_0", "yes", "null", "2026-01-31", "a: b", "#", "é", " x", "0x1f", "12:30"])
def test_dump_reads_back_to_an_equal_config(file: Path, folder: str) -> None:
    run = CONFIG.run.model_copy(update={"folder": folder, "keep": 7})
    data = CONFIG.data.model_copy(update={"columns": {folder: "x"}})
    config = CONFIG.model_copy(update={"run": run, "data": data})
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config
    file.write_text(MINIMAL + f"run: {{folder: {to_yaml(folder)}}}", encoding="utf-8")
    assert load_config(file).run.folder == folder


def test_merge_keys_put_in_what_is_not_given(file: Path) -> None:
    file.write_text(MINIMAL + "optim:\n  <<: {lr: 1e-3, epochs: 2}\n  lr: 1e-4\n")
    optim = load_config(file).optim
    assert (optim.lr, optim.epochs) == (1e-4, 2)


# --- run id ----------------------------------------------------------------------------------------


def another(section: str, name: str, value: Any) -> Any:
    """Some other value for a field: what counts is that it differs, so it need not be a valid one."""
    others = [choice for choice in choices(fields(section)[name]) if choice != value]
    match value:
        case str() | None:
            return others[0] if others else f"{value}-other"
        case bool():
            return not value
        case int() | float():
            return value + 1
        case []:
            return ["other"]
        case tuple():
            return value[::-1]
        case dict():
            return {**value, "prompt": "question"}
        case list():
            return [*value, "other"]
    raise AssertionError(f"{section}.{name}: {value!r}")


@pytest.mark.parametrize(("section", "name"), OWN_FIELDS)
def test_run_id_hashes_the_math_and_nothing_else(section: str, name: str) -> None:
    part = getattr(CONFIG, section)
    value = getattr(part, name)
    changed = CONFIG.model_copy(update={section: part.model_copy(update={name: another(section, name, value)})})
    assert changed != CONFIG
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Pydantic serializer warnings")  # the value may be invalid
        assert (run_id(changed) == run_id(CONFIG)) == (section in ("layout", "run"))


def test_run_id_is_short_hex_and_does_not_see_how_a_number_is_written(file: Path) -> None:
    assert len(run_id(CONFIG)) == 12
    int(run_id(CONFIG), 16)
    file.write_text(MINIMAL)
    assert run_id(load_config(file, ["optim.lr=1"])) == run_id(load_config(file, ["optim.lr=1.0"]))


# --- texts made from the schema --------------------------------------------------------------------


def test_starter_is_the_default_config_with_every_field(file: Path) -> None:
    file.write_text(starter())
    assert load_config(file, ["model.path=m", "data.train=d"]) == CONFIG
    written = yaml.safe_load(starter())
    assert [(section, name) for section in written for name in written[section]] == ALL_FIELDS


def test_starter_explains_every_field_and_names_its_choices() -> None:
    text = starter()
    for section, name in ALL_FIELDS:
        above = text.split(f"\n{section}:\n")[1].split(f"  {name}: ")[0].splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("  # "), reversed(above))
        words = " ".join(comment)
        assert words, (section, name)
        assert all(choice in words for choice in choices(fields(section)[name]) if choice != "auto"), (
            section,
            name,
        )


def test_starter_keeps_math_and_layout_apart() -> None:
    math, rest = starter().split("NOT THE MATH")
    assert re.findall(r"^(\w+):$", math, re.MULTILINE) == ["model", "data", "objective", "optim"]
    assert re.findall(r"^(\w+):$", rest, re.MULTILINE) == ["layout", "run"] == list(NOT_MATH)


def test_reference_has_one_row_for_each_field() -> None:
    inside = {"model": adapter_fields(), "data": source_fields()}
    known = [one for section in sections() for one in [*fields(section).items(), *inside.get(section, {}).items()]]
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    for row, (name, field) in zip(rows, known, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert cells[:2] == [f"`{name}`", expected(field)]
        assert all(cells)


@pytest.mark.parametrize("folder", ["demo", "my: folder #1"])
def test_demo_reads_its_data_from_the_folder(file: Path, folder: str) -> None:
    file.write_text(demo(Path(folder)))
    config = load_config(file)
    named = config.data.train, config.data.eval, config.run.spot_checks
    assert named == (f"{folder}/train.jsonl", f"{folder}/eval.jsonl", f"{folder}/spot_checks.jsonl")
    assert "examples/demo" not in file.read_text()


def test_every_field_is_described_and_there_are_not_too_many() -> None:
    assert len(OWN_FIELDS) <= 63
    every = [field for section in sections() for field in fields(section).items()]
    for name, field in [*every, *source_fields().items(), *adapter_fields().items()]:
        description = field.description or ""
        assert description.endswith("."), name
        assert "|" not in description
        assert "\n" not in description
