"""What a config file or an override is refused for, and in which words."""

import re
from pathlib import Path

import pytest

from isopref.config.describe import fields
from isopref.config.load import load_config
from isopref.config.peers import VALUES
from isopref.errors import ConfigError
from isopref.models.generate import ANSWER_TOKENS
from isopref.objectives.registry import OBJECTIVES

MINIMAL = "model: {path: m}\ndata: {train: d}\n"  # two lines; what a test adds begins in line 3
LOSS = f"objective.loss: must be one of {', '.join(OBJECTIVES)}, or a non-empty mapping from these to a number, above 0"
BATCH = (
    "optim.batch_size is the number of pairs per step across all GPUs: per-device batch x accumulation steps x GPUs. "
    "isopref splits it to fit (layout.microbatch_tokens), which does not change the result."
)


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


def test_missing_file_says_how_to_get_one(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}: no such file. To create a starter config: isopref init {file}"


def test_folder_and_binary_file_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(file)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_data_in_place_of_a_config(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / name)
    told = "expected a config, found a data file. Try: isopref init my.yaml, then set data.train"
    assert str(caught.value) == f"{tmp_path / name}: {told}: {tmp_path / name}"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("model:\n  path: [a\noptim: 1\n", "c.yaml:3: not valid YAML: "),
        ("model:\n\tpath: a\n", "c.yaml:2: not valid YAML: "),
        ("model: 1\n---\nmodel: 2\n", "c.yaml:2: not valid YAML: expected a single document in the stream, but found "),
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
    assert data.startswith("c.yaml: data.train: is required. Preference data")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objective: {betta: 1}", "objective.betta: no such field. Did you mean objective.beta?"),
        ("layout: {lr: 1}", "layout.lr: no such field. Did you mean optim.lr?"),
        (
            "optim: {beta: 1}",
            "optim.beta: no such field. Did you mean optim.betas or objective.beta?",
        ),
        (
            "objective: {zzz: 1}",
            f"objective.zzz: no such field. Known fields: {', '.join(fields('objective'))}.",
        ),
        ("optimizer: {lr: 1}", "optimizer: no such section. Did you mean optim?"),
        ("learning_rate: 1e-6", "learning_rate: no such section. Did you mean optim.lr?"),
        ("optim: {num_train_epochs: 3}", "optim.num_train_epochs: no such field. Did you mean optim.epochs?"),
        (
            "run: {max_prompt_length: 3}",
            "run.max_prompt_length: no such field. data.max_length limits a prompt plus its longest answer.",
        ),
        (
            "layout: {per_device_train_batch_size: 3}",
            f"layout.per_device_train_batch_size: no such field. {BATCH}",
        ),
        (
            "precompute_ref_log_probs: true",
            "precompute_ref_log_probs: no such section. Nothing to set: isopref always does this and caches the "
            "result.",
        ),
        ("beta: 0.1", "beta: no such section. Did you mean objective.beta?"),
        (
            "7: {}",
            "7: no such section. Known sections: model, data, objective, optim, layout, run.",
        ),
        (
            "objective: 3",
            f"objective: must be a section with fields ({', '.join(fields('objective'))}); found 3.",
        ),
        ("optim: {learning-rate: 1}", "optim.learning-rate: no such field. Did you mean optim.lr?"),
        ("optim: {Epochs: 1}", "optim.Epochs: no such field. Did you mean optim.epochs?"),
        ("OPTIM: {lr: 1}", "OPTIM: no such section. Did you mean optim?"),
        ("optim: {lr: fast}", 'optim.lr: must be a number, at least 0; found "fast".'),
        ("optim: {lr: .inf}", "optim.lr: must be a number, at least 0; found .inf."),
        ("optim: {lr: true}", "optim.lr: must be a number, at least 0; found true."),
        ("optim: {lr: null}", "optim.lr: must be a number, at least 0; found null."),
        ("optim: {lr: &a [*a]}", "optim.lr: must be a number, at least 0; found &id001 [*id001]."),
        ("optim: {lr: '1e-6'}", 'optim.lr: must be a number, at least 0; found "1e-6".'),
        ("optim: {epochs: 1.5}", "optim.epochs: must be a whole number, at least 1; found 1.5."),
        ("optim: {max_steps: 0}", "optim.max_steps: must be a whole number, at least 1, or null; found 0."),
        ("optim: {warmup: -0.1}", "optim.warmup: must be a number, at least 0, at most 1; found -0.1."),
        (
            "optim: {betas: [1, 2]}",
            "optim.betas: must be a list of 2, each a number, at least 0, below 1; found [1, 2].",
        ),
        (
            "optim: {betas: [0.9]}",
            "optim.betas: must be a list of 2, each a number, at least 0, below 1; found [0.9].",
        ),
        (
            "objective: {reference_moves: [8, 1.5]}",
            "objective.reference_moves: must be [a whole number, at least 1; a number, above 0, at most 1], or null; "
            "found [8, 1.5].",
        ),
        ("optim: {schedule: step}", 'optim.schedule: must be one of linear, cosine, constant; found "step".'),
        (
            "objective: {loss: dpo}",
            f'{LOSS}; found "dpo". Write sigmoid.',
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
        (
            "optim: {warmup: 10}",
            "optim.warmup: must be a number, at least 0, at most 1; found 10. Write a fraction of all steps: "
            "10 / total steps.",
        ),
        (
            "run: {loggers: wandb}",
            "run.loggers: must be a list, each one of tensorboard, wandb, comet, mlflow, trackio; "
            'found "wandb". Write [wandb].',
        ),
        ("run: {export: 1}", "run.export: must be true or false; found 1."),
        (
            "run: {folder: 12}",
            'run.folder: must be non-empty text or null; found 12. Put it in quotes: "12".',
        ),
        ("run: {folder: ''}", 'run.folder: must be non-empty text or null; found "".'),
        (
            "optim: {seed: 4294967296}",
            "optim.seed: must be a whole number, at least 0, at most 4294967295; found 4294967296.",
        ),
    ],
)
def test_wrong_names_and_values(file: Path, text: str, message: str) -> None:
    assert problems(file, MINIMAL + text) == [f"c.yaml:3: {message}"]


LONG = "é" * 128  # two bytes each


@pytest.mark.parametrize(
    "field", ["run.folder", "model.path", "model.reference", "model.adapter.path", "data.train", "data.eval"]
)
@pytest.mark.parametrize(
    ("path", "must", "found"),
    [
        (r'"a\0b"', "a path without NUL characters", r'"a\u0000b"'),
        (f"a/{LONG}/b", "a path with names of at most 255 bytes", f'"a/{LONG[:74]}...'),
        ("a/" * 2048, "a path of at most 3500 bytes", f'"{"a/" * 38}...'),
        ("~no_such_user/a", "a path in a home folder that exists", '"~no_such_user/a"'),
        ("$SCRATCH/a", "a path without variables such as $HOME: isopref expands only ~", '"$SCRATCH/a"'),
        ("a/${USER}", "a path without variables such as $HOME: isopref expands only ~", '"a/${USER}"'),
    ],
    ids=["NUL", "long name", "long path", "no home", "variable", "variable in braces"],
)
def test_text_that_cannot_be_a_path(file: Path, field: str, path: str, must: str, found: str) -> None:
    override = f"{field}={path}"
    shown = override if len(override) <= 80 else f"{override[:77]}..."
    expected = f"override '{shown}': {field}: must be {must}; found {found}."
    assert problems(file, MINIMAL, override) == [expected]


def test_every_field_that_names_a_file_is_such_a_path(file: Path) -> None:
    nul = r'"a\0b"'
    found = r'must be a path without NUL characters; found "a\u0000b".'
    text = f"model: {{path: m}}\ndata: {{train: [{{path: {nul}}}, {nul}], template: {nul}}}\n"
    fields = ("data.train[0].path", "data.train[1]", "data.template")
    assert problems(file, text) == [f"c.yaml:2: {field}: {found}" for field in fields]


@pytest.mark.parametrize("deep", ["[" * 3000, "{a: " * 3000, "- " * 3000, "? " * 3000], ids=["[", "{", "-", "?"])
def test_yaml_that_is_nested_too_deep(file: Path, deep: str) -> None:
    told = "not valid YAML: nested more than 20 levels deep; a config has at most 6."
    assert problems(file, f"model:\n  {deep}")[0].removeprefix("c.yaml:2: ") == told
    assert problems(file, MINIMAL, f"data.columns={deep}") == [f"override 'data.columns={deep[:64]}...': {told}"]


def test_an_override_of_a_field_too_deep(file: Path) -> None:
    override = f"data.columns{'.a' * 3000}=b"
    told = "nested more than 20 levels deep; a config has at most 6."
    assert problems(file, MINIMAL, override) == [f"override '{override[:77]}...': {told}"]


def test_a_mapping_that_is_nested_too_deep() -> None:
    deep: dict[str, object] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="config: nested more than 20 levels deep"):
        load_config({"model": deep})


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
    way_out = "Remove one of them."
    assert problems(file, text) == [
        f"c.yaml:3: model.path: given twice, first on line 2. {way_out}",
        f"c.yaml:8: data.columns.prompt: given twice, first on line 7. {way_out}",
        f"c.yaml:10: optim: given twice, first on line 9. {way_out}",
    ]


def test_all_problems_are_reported_at_once(file: Path) -> None:
    text = "model: {path: m, path: m}\noptim:\n  lr: fast\n  eps: 0\nlayuot: {}\n"
    lines = problems(file, text, "lr=1", "run.keep=0")
    assert [line.split(": ")[:2] for line in lines] == [
        ["c.yaml:1", "model.path"],
        ["override 'lr=1'", "write section.field=value, e.g. optim.lr=1e-6. Did you mean optim.lr=1?"],
        ["c.yaml", "data.train"],
        ["c.yaml:3", "optim.lr"],
        ["c.yaml:4", "optim.eps"],
        ["override 'run.keep=0'", "run.keep"],
        ["c.yaml:5", "layuot"],
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "write section.field=value, e.g. optim.lr=1e-6."),
        ("=3", "write section.field=value, e.g. optim.lr=1e-6."),
        ("optim.=3", "write section.field=value, e.g. optim.lr=1e-6."),
        ("rl_beta=3", "write section.field=value, e.g. optim.lr=1e-6. Did you mean objective.beta=3?"),
        ("loss_type=dpo", "write section.field=value, e.g. optim.lr=1e-6. Did you mean objective.loss=sigmoid?"),
        ("lora_alpha=32", "write section.field=value, e.g. optim.lr=1e-6. Did you mean model.adapter.alpha=32?"),
        ("per_device_train_batch_size=4", f"write section.field=value, e.g. optim.lr=1e-6. {BATCH}"),
        (
            "zzz=3",
            "write section.field=value, e.g. optim.lr=1e-6. The sections are model, data, objective, optim, layout, "
            "run.",
        ),
        (
            "model.adapter.lora_alpha=32",
            "model.adapter.lora_alpha: no such field. Did you mean model.adapter.alpha?",
        ),
        (
            "model.adapter.lora_target_modules=all",
            "model.adapter.lora_target_modules: no such field. model.adapter.targets takes a list, e.g. "
            "[q_proj, v_proj]; auto means every linear layer.",
        ),
        ("beta=3", "write section.field=value, e.g. optim.lr=1e-6. Did you mean objective.beta=3?"),
        ("optim.lr=fast", 'optim.lr: must be a number, at least 0; found "fast".'),
        ("optim.lr=", "optim.lr: must be a number, at least 0; found null."),
        ("optim.lr.x=1", "optim.lr: must be a number, at least 0; found {x: 1}."),
        ("model.path.x=1", 'model.path is "m", which has no fields.'),
        ("optim.epoch=1", "optim.epoch: no such field. Did you mean optim.epochs?"),
        ("optin.lr=1", "optin: no such section. Did you mean optim?"),
        ("data.columns={a: b, a: c}", "data.columns.a: given twice. Remove one of them."),
        ("data.columns.a=1", "data.columns: must be a mapping from text to text; found {a: 1}."),
    ],
)
def test_wrong_overrides(file: Path, override: str, message: str) -> None:
    assert problems(file, MINIMAL, override) == [f"override '{override}': {message}"]


def test_override_that_is_not_yaml(file: Path) -> None:
    (line,) = problems(file, MINIMAL, "optim.betas=[0.9")
    assert line.startswith("override 'optim.betas=[0.9': not valid YAML: ")
    assert "quotes" not in line


@pytest.mark.parametrize(
    ("overrides", "field", "way_out"),
    [
        (["layout.hsdp_shard=4"], "layout.hsdp_shard", "Set layout.parallel: hsdp, or remove hsdp_shard."),
        (["layout.parallel=hsdp"], "layout.hsdp_shard", "or set layout.parallel: fsdp."),
        (
            ["model.compute_dtype=bfloat16", "layout.parallel=single"],
            "model.compute_dtype",
            "Set layout.parallel to fsdp or auto.",
        ),
        (
            ["model.compute_dtype=float32", "model.dtype=float64", "layout.parallel=ddp"],
            "model.compute_dtype",
            "Set layout.parallel to fsdp or auto.",
        ),
        (
            ["model.compute_dtype=float8", "layout.parallel=ddp"],
            "model.compute_dtype",
            "Set layout.parallel to fsdp or auto.",
        ),
        (
            ["model.compute_dtype=float8", "model.native=true"],
            "model.compute_dtype",
            "Use bfloat16, or change the other setting.",
        ),
        (
            ["model.compute_dtype=float8", "model.adapter={quantize: nf4}"],
            "model.compute_dtype",
            "Use bfloat16, or change the other setting.",
        ),
        (
            ["model.compute_dtype=float8", "run.device=cpu"],
            "model.compute_dtype",
            "Use bfloat16, or change the other setting.",
        ),
        (["data.truncation=keep_end"], "data.truncation", "Set data.max_length, or remove truncation."),
        (["run.eval_every=10"], "run.eval_every", "or remove eval_every."),
        (["objective.gamma=0.5"], "objective.gamma", "or use a loss that has it: simpo."),
        (["objective.loss=simpo", "objective.label_smoothing=0.0"], "objective.label_smoothing", "aot_unpaired."),
        (["objective.loss=aot", "objective.wpo=true"], "objective.wpo", "use another loss."),
        (["objective.loss=softmax", "objective.weighting=gap"], "objective.weighting", "or a loss of pairs."),
        (["objective.loss=simpo", "objective.reference_moves=[8, 0.5]"], "objective.reference_moves", "Remove it."),
        (["objective.loss=exo_pair", "objective.label_smoothing=0.0"], "objective.label_smoothing", "; found 0.0."),
        (
            ["objective.loss={simpo: 1, cpo: 1}", "model.reference=r"],
            "model.reference",
            "uses no reference. Remove it.",
        ),
        (["layout.parallel=single", "layout.grad_sync=every"], "layout.grad_sync", "Remove one of them."),
        (["layout.parallel=single", "layout.grad_sync=last"], "layout.grad_sync", "Remove one of them."),
        (["objective.loss=simpo", "layout.score_tokens=9"], "layout.score_tokens", "or remove score_tokens."),
        (
            ["objective.reference_moves=[8, 1]", "layout.score_tokens=9"],
            "layout.score_tokens",
            "or remove score_tokens.",
        ),
        (["run.spot_checks=s.jsonl", "run.export=false"], "run.spot_checks", "or remove spot_checks."),
        (["layout.offload_activations=full"], "layout.offload_activations", "layout.offload_activations: auto."),
        (
            ["layout.offload_activations=full", "layout.checkpointing=none"],
            "layout.offload_activations",
            "layout.offload_activations: auto.",
        ),
        (
            ["layout.mlp_tile_tokens=512", "layout.microbatch_tokens=512"],
            "layout.mlp_tile_tokens",
            "Set a smaller tile, or null.",
        ),
        (
            ["layout.mlp_tile_tokens=512", "objective.balance_weight=0.1"],
            "layout.mlp_tile_tokens",
            "Remove one of them.",
        ),
        (
            ["layout.mlp_tile_tokens=512", "layout.tensor_parallel=2", "model.native=true"],
            "layout.mlp_tile_tokens",
            "Remove one of them.",
        ),
        (
            ["layout.context_parallel=2", "layout.tensor_parallel=2", "model.native=true"],
            "layout.context_parallel",
            "Remove one of them.",
        ),
    ],
)
def test_impossible_combinations(file: Path, overrides: list[str], field: str, way_out: str) -> None:
    (line,) = problems(file, MINIMAL, *overrides)
    assert f": {field}: " in line
    assert line.endswith(way_out)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ([], "model.native: true"),
        (["model.native=true", "layout.parallel=ddp"], "layout.parallel: fsdp, hsdp or auto"),
        (["model.native=true", "layout.parallel=single"], "layout.parallel: fsdp, hsdp or auto"),
        (["model.native=true", "layout.rows=padded"], "layout.rows: shared or packed"),
        (
            ["layout.parallel=ddp", "layout.rows=padded_separate"],
            "model.native: true and layout.parallel: fsdp, hsdp or auto and layout.rows: shared or packed",
        ),
    ],
)
def test_what_tensor_parallelism_needs(file: Path, overrides: list[str], missing: str) -> None:
    (line,) = problems(file, MINIMAL, *overrides, "layout.tensor_parallel=2")
    told = f"layout.tensor_parallel: 2 needs {missing}. Set that, or remove tensor_parallel."
    assert line == f"override 'layout.tensor_parallel=2': {told}"


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        (["layout.parallel=single"], "layout.parallel: fsdp, hsdp, ddp or auto"),
        (["layout.rows=padded"], "layout.rows: shared or packed"),
        (
            ["layout.parallel=single", "layout.rows=padded_separate"],
            "layout.parallel: fsdp, hsdp, ddp or auto and layout.rows: shared or packed",
        ),
    ],
)
def test_what_context_parallelism_needs(file: Path, overrides: list[str], missing: str) -> None:
    (line,) = problems(file, MINIMAL, *overrides, "layout.context_parallel=2")
    told = f"layout.context_parallel: 2 needs {missing}. Set that, or remove context_parallel."
    assert line == f"override 'layout.context_parallel=2': {told}"


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [(field, theirs, ours) for field, words in VALUES.items() for theirs, ours in words.items()],
)
def test_values_of_other_trainers(file: Path, field: str, theirs: str, ours: str) -> None:
    """Refused as any other wrong value; what is named in its place is taken."""
    (line,) = problems(file, MINIMAL, f"{field}={theirs}")
    assert line.endswith(f'; found "{theirs}". Write {ours}.')
    file.write_text(MINIMAL)
    load_config(file, [f"{field}={ours if ours[0] in '[{' else re.split(', | ', ours)[0]}"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("optim.batch_pairs", "It is now called optim.batch_size."),
        (
            "layout.microbatch_pairs",
            "Set layout.microbatch_tokens; for one pair at a time, use the length of the longest pair.",
        ),
        ("run.sample_tokens", f"Nothing to set: answers are limited to {ANSWER_TOKENS} tokens."),
    ],
)
def test_names_of_earlier_versions(file: Path, name: str, told: str) -> None:
    """In a file, in an override, and in one that lacks the section."""
    section, field = name.split(".")
    assert problems(file, f"{MINIMAL}{section}: {{{field}: 8}}") == [f"c.yaml:3: {name}: no such field. {told}"]
    assert problems(file, MINIMAL, f"{name}=8") == [f"override '{name}=8': {name}: no such field. {told}"]
    form = "write section.field=value, e.g. optim.lr=1e-6."
    assert problems(file, MINIMAL, f"{field}=8") == [f"override '{field}=8': {form} {told}"]


def test_a_tab_is_answered_with_spaces(file: Path) -> None:
    (line,) = problems(file, "model:\n\tpath: a\n")
    assert line.endswith(" Use spaces instead of tabs.")


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
        ["layout.checkpointing=full", "layout.offload_activations=full", "layout.mlp_tile_tokens=512"],
        ["layout.mlp_tile_tokens=512", "layout.microbatch_tokens=513", "layout.checkpointing=none"],
        ["layout.mlp_tile_tokens=null"],
        ["model.compute_dtype=bfloat16"],
        ["model.compute_dtype=bfloat16", "layout.parallel=fsdp"],
        ["model.compute_dtype=bfloat16", "layout.parallel=hsdp", "layout.hsdp_shard=4"],
        ["model.compute_dtype=float32", "layout.parallel=ddp"],
        ["layout.tensor_parallel=1", "layout.parallel=ddp", "layout.rows=padded"],
        ["layout.tensor_parallel=2", "model.native=true", "layout.rows=packed"],
        ["layout.context_parallel=2", "layout.parallel=ddp", "layout.rows=packed"],
        ["layout.context_parallel=4", "model.native=true", "layout.mlp_tile_tokens=512"],
        ["layout.tensor_parallel=2", "model.native=true", "layout.parallel=hsdp", "layout.hsdp_shard=4"],
        ["data.truncation=keep_end", "data.max_length=128"],
        ["run.eval_every=10", "data.eval=e"],
        ["objective.loss=simpo", "objective.gamma=0.5", "objective.beta=2.5"],
        ["objective.loss=exo_pair"],
        ["objective.loss={simpo: 1, hinge: 1}", "model.reference=r"],
        ["layout.parallel=ddp", "layout.grad_sync=every"],
        ["layout.grad_sync=every"],  # on one process it does nothing, but the same file serves several
        ["layout.score_tokens=9"],
        ["objective.loss=simpo", "layout.score_tokens=9", "data.eval=0.1"],
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
