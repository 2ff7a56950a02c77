"""Text generated from the schema: the starter file, the demo config and the config reference."""

import re
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from isopref.config.describe import adapter_fields, choices, default, expected, fields, sections, source_fields
from isopref.config.load import to_yaml
from isopref.config.objective import param_fields
from isopref.config.schema import NOT_MATH, Config

_HEAD = """\
# An isopref config with every field at its default. Set the fields marked "Required"; change or delete
# the rest as you like. Paths are relative to the folder in which you start isopref.
#
#   isopref data THIS_FILE                   shows the data as the model sees it
#   isopref train THIS_FILE                  trains
#   isopref train THIS_FILE optim.lr=2e-6    trains with one field overridden
"""
_MATH = "THE MATH: what is trained. Any change here makes it a different run, with a different run id."
_NOT_MATH = "NOT THE MATH: nothing below changes the trained weights, beyond rounding."

_SOURCE = (
    "An entry of `train` or `eval`, alone or in a list. A plain string is a source with only a path. "
    "`name`, `split` and `revision` are refused for files."
)

_ADAPTER = "The value of `adapter`. Every field is optional: `adapter: {}` means LoRA of rank 16 on all linear layers."

_PARAMS = (
    "`objective` also takes these; each loss has its own defaults ([objectives](objectives.md)). A parameter that "
    "the chosen loss does not take is refused, unless it is null."
)

_DEMO_FOLDER = "examples/demo"  # where demo.yaml says its data is


def starter() -> str:
    """A commented config file with every field at its default, and examples for the required ones."""
    blocks = [_HEAD, _banner(_MATH)]
    for section in sections():
        if section == NOT_MATH[0]:
            blocks.append(_banner(_NOT_MATH))
        lines = [_comment(_describe(section)), f"{section}:"]
        for name, field in fields(section).items():
            lines += [_comment(_meaning(field), indent="  "), f"  {name}: {to_yaml(_value(field))}"]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def demo(folder: Path) -> str:
    """The demo's config, with its data in `folder`."""
    text = resources.files("isopref.config").joinpath("demo.yaml").read_text(encoding="utf-8")
    text = re.sub(rf"(?<=: ){_DEMO_FOLDER}/(\S+)", lambda file: to_yaml(str(folder / file[1])), text)
    return text.replace(f"{_DEMO_FOLDER}/demo.yaml", str(folder / "demo.yaml"))  # in the comments


def reference() -> str:
    """Every field as Markdown: a table for each section, with name, type, default and meaning."""
    parts = []
    for section, known in sections().items():
        parts.append("\n".join([f"## {section}", "", _describe(section), "", *_table(known.model_fields), ""]))
        if section == "model":
            parts.append("\n".join(["### An adapter", "", _ADAPTER, "", *_table(adapter_fields()), ""]))
        if section == "data":
            parts.append("\n".join(["### A source", "", _SOURCE, "", *_table(source_fields()), ""]))
        if section == "objective":
            parts.append("\n".join(["### Parameters of the loss", "", _PARAMS, "", *_table(param_fields()), ""]))
    return "\n".join(parts)


def _table(known: dict[str, FieldInfo]) -> list[str]:
    rows = [
        f"| `{name}` | {expected(field)} | {_default_cell(field)} | {field.description} |"
        for name, field in known.items()
    ]
    return ["| name | value | default | meaning |", "|---|---|---|---|", *rows]


def _describe(section: str) -> str:
    return Config.model_fields[section].description or ""


def _meaning(field: FieldInfo) -> str:
    """The description, plus "Required" and possible values that it does not name: the file shows neither."""
    text = field.description or ""
    unnamed = any(choice not in text for choice in choices(field))
    return f"{'Required. ' * field.is_required()}{text}{f' {expected(field).capitalize()}.' * unnamed}"


def _value(field: FieldInfo) -> Any:
    return (field.examples or [None])[0] if field.is_required() else default(field)


def _default_cell(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{to_yaml(default(field))}`"


def _banner(text: str) -> str:
    line = "# " + "=" * 98
    return f"{line}\n# {text}\n{line}\n"


def _comment(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


PAGE = """\
# Config reference

Every field of a config file. `make docs` generates this page from the schema; do not edit it. `isopref init` writes the
same information as a commented file, except for the fields of an adapter or a source. Only `layout` and `run` do not
affect the math; the run id is a hash of the other sections.

"""

if __name__ == "__main__":
    import sys

    sys.stdout.write(PAGE + reference())
