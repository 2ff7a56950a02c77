"""The config: what is refused and in which words, the run id, and the texts made from the schema."""

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
from isopref.errors import ConfigError
from isopref.objectives import OBJECTIVES

MINIMAL = "model: {path: m}\ndata: {train: d}\n"  # two lines; what a test adds begins in line 3
CONFIG = Config(model=ModelConfig(path="m"), data=DataConfig(train="d"))
ALL_FIELDS = [(section, name) for section in sections() for name in fields(section)]
LOSS = f"objective.loss: must be one of {', '.join(OBJECTIVES)}, or a non-empty mapping from these to a number, above 0"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def problems(file: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error for a file's text, with the file's path cut to its name."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    lines = str(caught.value).replace(str(file), file.name).split("\n")
    if len(lines) == 1:
        return lines
    assert lines[0] == f"{file.name}: {len(lines) - 1} problems:"
    return [line.removeprefix("  ") for line in lines[1:]]


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


# --- errors ----------------------------------------------------------------------------------------


def test_missing_file_says_how_to_get_one(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}: there is no such file. To write a starter: isopref init {file}"


def test_folder_and_binary_file_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("model:\n  path: [a\noptim: 1\n", "c.yaml:3: not valid YAML: "),
        ("model:\n\tpath: a\n", "c.yaml:2: not valid YAML: "),
        ("model: 1\n---\nmodel: 2\n", "c.yaml:2: not valid YAML: "),
        ("model:\n  path: !!python/name:os.system x\n", "c.yaml:2: not valid YAML: "),
        ("model:\n  path: !!int x\n", "c.yaml: not valid YAML: "),
        ("model: \x07", "c.yaml: not valid YAML: "),
    ],
)
def test_broken_yaml_names_the_line(file: Path, text: str, start: str) -> None:
    (line,) = problems(file, text)
    assert line.startswith(start)


@pytest.mark.parametrize("text", ["- a", "just text", "3"])
def test_file_without_sections(file: Path, text: str) -> None:
    (line,) = problems(file, text)
    assert line.startswith("c.yaml: expected sections with fields (model, data, objective, optim, layout, run)")


def test_empty_file_names_the_required_fields(file: Path) -> None:
    model, data = problems(file, "")
    assert model.startswith("c.yaml: model.path: is required. Model to start from")
    assert data.startswith("c.yaml: data.train: is required. Preference pairs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objective: {betta: 1}", "objective.betta: there is no such field. Did you mean objective.beta?"),
        ("layout: {lr: 1}", "layout.lr: there is no such field. Did you mean optim.lr?"),
        (
            "optim: {beta: 1}",
            "optim.beta: there is no such field. Did you mean optim.betas or objective.beta?",
        ),
        (
            "objective: {zzz: 1}",
            f"objective.zzz: there is no such field. Known: {', '.join(fields('objective'))}.",
        ),
        ("optimizer: {lr: 1}", "optimizer: there is no such section. Did you mean optim?"),
        ("learning_rate: 1e-6", "learning_rate: there is no such section. Did you mean optim.lr?"),
        ("optim: {num_train_epochs: 3}", "optim.num_train_epochs: there is no such field. Did you mean optim.epochs?"),
        ("run: {max_prompt_length: 3}", "run.max_prompt_length: there is no such field. Did you mean data.max_length?"),
        (
            "layout: {per_device_train_batch_size: 3}",
            "layout.per_device_train_batch_size: there is no such field. Did you mean layout.microbatch_tokens or "
            "layout.microbatch_pairs or optim.batch_pairs?",
        ),
        ("beta: 0.1", "beta: there is no such section. Did you mean objective.beta?"),
        ("7: {}", "7: there is no such section. Known: model, data, objective, optim, layout, run."),
        (
            "objective: 3",
            f"objective: must be a section with fields ({', '.join(fields('objective'))}); found 3.",
        ),
        ("optim: {lr: fast}", 'optim.lr: must be a number, at least 0; found "fast".'),
        ("optim: {lr: .inf}", "optim.lr: must be a number, at least 0; found .inf."),
        ("optim: {lr: true}", "optim.lr: must be a number, at least 0; found true."),
        ("optim: {lr: null}", "optim.lr: must be a number, at least 0; found null."),
        ("optim: {lr: &a [*a]}", "optim.lr: must be a number, at least 0; found &id001 [*id001]."),
        ("optim: {lr: '1e-6'}", 'optim.lr: must be a number, at least 0; found "1e-6".'),
        ("optim: {epochs: 1.5}", "optim.epochs: must be a whole number, at least 1; found 1.5."),
        ("optim: {max_steps: 0}", "optim.max_steps: must be a whole number, at least 1, or null; found 0."),
        ("optim: {warmup: 1.1}", "optim.warmup: must be a number, at least 0, at most 1; found 1.1."),
        (
            "optim: {betas: [1, 2]}",
            "optim.betas: must be a list of 2, each a number, at least 0, below 1; found [1, 2].",
        ),
        (
            "objective: {reference_moves: [8, 1.5]}",
            "objective.reference_moves: must be [a whole number, at least 1; a number, above 0, at most 1], or null; "
            "found [8, 1.5].",
        ),
        ("optim: {schedule: step}", 'optim.schedule: must be one of linear, cosine, constant; found "step".'),
        (
            "objective: {loss: dpo}",
            f'{LOSS}; found "dpo".',
        ),
        ("objective: {loss: {}}", f"{LOSS}; found {{}}."),
        ("objective: {loss: {sigmoid: 1, dpo: 1}}", f"{LOSS}; found {{sigmoid: 1, dpo: 1}}."),
        ("objective: {beta: 0}", "objective.beta: must be a number, above 0, or null; found 0."),
        (
            "objective: {label_smoothing: 0.5}",
            "objective.label_smoothing: must be a number, at least 0, below 0.5, or null; found 0.5.",
        ),
        (
            "objective: {divergence: 1.0}",
            "objective.divergence: must be one of reverse_kl, forward_kl, jensen_shannon, or a number, above 0, below "
            "1, or null; found 1.0.",
        ),
        ("run: {export: 1}", "run.export: must be true or false; found 1."),
        (
            "run: {folder: 12}",
            'run.folder: must be non-empty text or null; found 12. Put it in quotes: "12".',
        ),
        ("run: {folder: ''}", 'run.folder: must be non-empty text or null; found "".'),
    ],
)
def test_wrong_names_and_values(file: Path, text: str, message: str) -> None:
    assert problems(file, MINIMAL + text) == [f"c.yaml:3: {message}"]


def test_columns_must_be_text(file: Path) -> None:
    text = "model: {path: m}\ndata:\n  train: d\n  columns:\n    prompt: q\n    chosen: 1\n"
    message = "data.columns: must be a mapping from text to text; found {prompt: q, chosen: 1}."
    assert problems(file, text) == [f"c.yaml:6: {message}"]


def test_duplicate_keys_are_refused_at_every_depth(file: Path) -> None:
    text = (
        "model:\n  path: a\n  path: b\n"
        "data:\n  train: d\n  columns:\n    prompt: a\n    prompt: b\n"
        "optim: {lr: 1}\noptim: {lr: 2}\n"
    )
    way_out = "Remove one of the two."
    assert problems(file, text) == [
        f"c.yaml:3: model.path: given twice, the first time in line 2. {way_out}",
        f"c.yaml:8: data.columns.prompt: given twice, the first time in line 7. {way_out}",
        f"c.yaml:10: optim: given twice, the first time in line 9. {way_out}",
    ]


def test_all_problems_are_reported_at_once(file: Path) -> None:
    text = "model: {path: m, path: m}\noptim:\n  lr: fast\n  eps: 0\nlayuot: {}\n"
    lines = problems(file, text, "lr=1", "run.keep=0")
    assert [line.split(": ")[:2] for line in lines] == [
        ["c.yaml:1", "model.path"],
        ["override 'lr=1'", "write section.field=value, as in optim.lr=1e-6. Did you mean optim.lr=1?"],
        ["c.yaml", "data.train"],
        ["c.yaml:3", "optim.lr"],
        ["c.yaml:4", "optim.eps"],
        ["override 'run.keep=0'", "run.keep"],
        ["c.yaml:5", "layuot"],
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "write section.field=value, as in optim.lr=1e-6."),
        ("=3", "write section.field=value, as in optim.lr=1e-6."),
        ("optim.=3", "write section.field=value, as in optim.lr=1e-6."),
        ("rl_beta=3", "write section.field=value, as in optim.lr=1e-6. Did you mean objective.beta=3?"),
        ("beta=3", "write section.field=value, as in optim.lr=1e-6. Did you mean objective.beta=3?"),
        ("optim.lr=fast", 'optim.lr: must be a number, at least 0; found "fast".'),
        ("optim.lr=", "optim.lr: must be a number, at least 0; found null."),
        ("optim.lr.x=1", "optim.lr: must be a number, at least 0; found {x: 1}."),
        ("model.path.x=1", 'model.path is "m", which has no fields.'),
        ("optim.epoch=1", "optim.epoch: there is no such field. Did you mean optim.epochs?"),
        ("optin.lr=1", "optin: there is no such section. Did you mean optim?"),
        ("data.columns={a: b, a: c}", "data.columns.a: given twice. Remove one of the two."),
        ("data.columns.a=1", "data.columns: must be a mapping from text to text; found {a: 1}."),
    ],
)
def test_wrong_overrides(file: Path, override: str, message: str) -> None:
    assert problems(file, MINIMAL, override) == [f"override '{override}': {message}"]


def test_override_that_is_not_yaml(file: Path) -> None:
    (line,) = problems(file, MINIMAL, "optim.betas=[0.9")
    assert line.startswith("override 'optim.betas=[0.9': not valid YAML: ")


@pytest.mark.parametrize(
    ("overrides", "field", "way_out"),
    [
        (["layout.hsdp_shard=4"], "layout.hsdp_shard", "Use layout.parallel: hsdp, or remove hsdp_shard."),
        (["layout.parallel=hsdp"], "layout.hsdp_shard", "or use layout.parallel: fsdp."),
        (
            ["model.compute_dtype=bfloat16", "layout.parallel=single"],
            "model.compute_dtype",
            "Use layout.parallel: fsdp, or auto.",
        ),
        (
            ["model.compute_dtype=float32", "model.dtype=float64", "layout.parallel=ddp"],
            "model.compute_dtype",
            "Use layout.parallel: fsdp, or auto.",
        ),
        (["data.truncation=keep_end"], "data.truncation", "Set data.max_length, or remove truncation."),
        (["run.eval_every=10"], "run.eval_every", "or remove eval_every."),
        (["objective.gamma=0.5"], "objective.gamma", "or use a loss that has it: simpo."),
        (["objective.loss=simpo", "objective.label_smoothing=0.0"], "objective.label_smoothing", "aot_unpaired."),
        (["objective.loss=aot", "objective.wpo=true"], "objective.wpo", "use another objective.loss."),
        (["objective.loss=simpo", "objective.reference_moves=[8, 0.5]"], "objective.reference_moves", "Remove it."),
        (["objective.loss=exo_pair", "objective.label_smoothing=0.0"], "objective.label_smoothing", "as 0.001."),
    ],
)
def test_impossible_combinations(file: Path, overrides: list[str], field: str, way_out: str) -> None:
    (line,) = problems(file, MINIMAL, *overrides)
    assert f": {field}: " in line
    assert line.endswith(way_out)


def test_combination_is_reported_at_the_field_s_line(file: Path) -> None:
    lines = problems(file, MINIMAL + "layout:\n  hsdp_shard: 2\nrun:\n  eval_every: 3\n")
    assert [line.split(": ")[:2] for line in lines] == [
        ["c.yaml:4", "layout.hsdp_shard"],
        ["c.yaml:6", "run.eval_every"],
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.parallel=hsdp", "layout.hsdp_shard=4"],
        ["model.compute_dtype=bfloat16"],
        ["model.compute_dtype=bfloat16", "layout.parallel=fsdp"],
        ["model.compute_dtype=bfloat16", "layout.parallel=hsdp", "layout.hsdp_shard=4"],
        ["model.compute_dtype=float32", "layout.parallel=ddp"],
        ["data.truncation=keep_end", "data.max_length=128"],
        ["run.eval_every=10", "data.eval=e"],
        ["objective.loss=simpo", "objective.gamma=0.5", "objective.beta=2.5"],
        ["objective.loss=exo_pair"],
        ["objective.wpo=true", "objective.ld_alpha=0.5"],
        ["objective.reference_moves=[8, 1]", "objective.loss={simpo: 1, hinge: 1}"],
        ["objective.loss={sigmoid: 1, simpo: 0.5}", "objective.gamma=0.5"],
        ["objective.loss.aot=1.5", "objective.loss.hinge=1"],
        ["objective.divergence=0.5", "objective.label_smoothing=0.1"],
    ],
)
def test_possible_combinations(file: Path, overrides: list[str]) -> None:
    file.write_text(MINIMAL)
    load_config(file, overrides)


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


@pytest.mark.parametrize(("section", "name"), ALL_FIELDS)
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
    data = load_config(file).data
    assert (data.train, data.eval) == (f"{folder}/train.jsonl", f"{folder}/eval.jsonl")
    assert "examples/demo" not in file.read_text()


def test_every_field_is_described_and_there_are_not_too_many() -> None:
    assert len(ALL_FIELDS) <= 60
    every = [field for section in sections() for field in fields(section).items()]
    for name, field in [*every, *source_fields().items(), *adapter_fields().items()]:
        description = field.description or ""
        assert description.endswith("."), name
        assert "|" not in description
        assert "\n" not in description
