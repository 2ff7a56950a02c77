"""The model card of a run, which a hub shows on the model's page.

It is public, so it names files without their folders and does not name the host.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from isopref import __version__
from isopref.config.load import to_yaml
from isopref.report.degeneration import signs
from isopref.report.figures import field_rows, held_out_title, is_default, shown, trains_rewards, unit
from isopref.report.markdown import cost_table, evaluation_table, plain, row, table_head
from isopref.runs.read import RunRecord

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
FILE_NAME = re.compile(r"\.(jsonl?|csv|parquet|arrow|gguf|ya?ml|txt|jinja)(\.\w+)?$")
NO_LICENSE = "# license: fill in, for example apache-2.0; the base model and the data may restrict it"


def model_card(run: RunRecord, name: str, license_id: str | None = None) -> str:
    """The card as Markdown, preceded by the metadata that a hub reads."""
    lines = ["---", *_metadata(run, license_id), "---", "", f"# {plain(name.rpartition('/')[2])}", "", _about(run), ""]
    lines += [part for sign in signs(run) for part in (f"**Warning:** {plain(sign)}", "")]
    lines += ["## Use", "", "```python", *_loading(run, name), "```", ""]
    if run.evaluation:
        after = run.evaluation["after"]
        title = held_out_title(after["pairs"], after.get("lists", 0), after.get("answers", 0))
        lines += [f"## {title}, with 95% intervals", "", *evaluation_table(run), ""]
    if run.spot_checks:
        lines += ["## What the training cost", "", *cost_table(run), ""]
    lines += ["## Training", "", *_training(run), ""]
    lines += ["## License", "", license_id or "Fill in: the license of this model.", ""]
    return "\n".join(lines)


def _metadata(run: RunRecord, license_id: str | None) -> Iterator[str]:
    is_adapter, is_reward = bool(run.config["model"].get("adapter")), trains_rewards(run)
    known: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if is_reward else "text-generation",
        "tags": ["isopref", "reward-model" if is_reward else "preference-tuning", *_losses(run)],
    }
    base = _base(run)
    if HUB_NAME.fullmatch(base):
        known |= {"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    datasets = [source for source in _sources(run) if HUB_NAME.fullmatch(source)]
    if datasets:
        known["datasets"] = datasets
    yield NO_LICENSE if license_id is None else f"license: {to_yaml(license_id)}"
    for field, value in known.items():
        yield f"{field}: {to_yaml(value)}"


def _about(run: RunRecord) -> str:
    pairs = run.start("pairs")
    count = f"{pairs:,} {unit(run)}s" if pairs else "preferences"
    what = "A reward model from" if trains_rewards(run) else "Tuned from"
    sources = ", ".join(map(plain, _sources(run)))
    return (
        f"{what} {plain(_base(run))} on {count} ({sources}) with the loss {plain(' + '.join(_losses(run)))}, by "
        f"isopref {plain(str(run.start('isopref') or __version__))}."
    )


def _loading(run: RunRecord, name: str) -> Iterator[str]:
    is_reward = trains_rewards(run)
    peft = "Peft" if run.config["model"].get("adapter") else ""
    package = "peft" if peft else "transformers"
    loader = f"Auto{peft}ModelFor{'SequenceClassification' if is_reward else 'CausalLM'}"
    more = ", num_labels=1" if peft and is_reward else ""
    if peft:
        yield f"from {package} import {loader}"
    yield f"from transformers import {'' if peft else f'{loader}, '}AutoTokenizer"
    yield ""
    yield f"model = {loader}.from_pretrained({name!r}{more})"
    yield f"tokenizer = AutoTokenizer.from_pretrained({name!r})"


def _training(run: RunRecord) -> Iterator[str]:
    """The fields of the math that are not at their defaults, then versions and hardware."""
    yield from table_head(["", ""])
    for field in field_rows([run], math=True):
        (value,) = field.values
        if not is_default(field.name, value):
            yield row([field.name, shown(_without_folders(value))])
    steps = run.state.step if run.state is not None else run.last_step
    yield row(["steps", f"{steps:,}"])
    if run.starts:
        yield row(["run id", str(run.start("run_id"))])
        yield row(["hardware", f"{run.start('ranks')} x {run.start('device')}"])
    for package in ("isopref", "torch", "transformers", "olmo_core"):
        if run.start(package):
            yield row([package.replace("_", "-"), str(run.start(package))])


def _losses(run: RunRecord) -> list[str]:
    loss = run.config["objective"]["loss"]
    return [str(name) for name in loss] if isinstance(loss, dict) else [str(loss)]


def _base(run: RunRecord) -> str:
    return str(_without_folders(run.config["model"]["path"]))


def _sources(run: RunRecord) -> list[str]:
    """What the run was trained on: hub names, or names of files."""
    train = run.config["data"]["train"]
    entries = train if isinstance(train, list) else [train]
    paths = [entry["path"] if isinstance(entry, dict) else entry for entry in entries]
    return [str(_without_folders(path)) for path in paths]


def _without_folders(value: Any) -> Any:
    """A config value in which paths on this machine are cut to their last name; hub names stay complete."""
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    is_hub_name = HUB_NAME.fullmatch(value) and not FILE_NAME.search(value) and not Path(value).exists()
    return value if is_hub_name or value.startswith("package:") else PurePath(value).name
