"""The page of public Python names, docs/api.md, made from their source: signatures, docstrings, methods.

Reads the source without importing it, so it needs no torch. `make docs` writes the page.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import isopref

SOURCE = Path(isopref.__file__).parent
WIDTH = 100
HEAD = """\
# Python API

The public names of isopref. `make docs` generates this page from their docstrings; do not edit it. Everything else is
internal and may change. Names in `isopref` are imported on first use, so `import isopref` is fast.
"""
# Section -> what it is for, and module:name of what is in it. A test checks that no public name is missing.
SECTIONS = {
    "Train": (
        "`isopref.train` does what the command does. [Getting started](getting-started.md#5-train) has an example.",
        ("script:train", "runs.read:RunRecord", "runs.read:Series"),
    ),
    "OLMo-core scripts": (
        "Building blocks for a training script under OLMo-core's Trainer ([how they fit together](olmo-core.md)).",
        (
            *("engine.train_module:DPOTrainModule", "engine.loader:ExampleLoader", "batch.packing:Budget"),
            *("data.table:ExampleTable", "examples:Example", "examples:PairTokens", "objectives.loss:pair_loss"),
            *("models.policy:Policy", "models.parallel:parallelize", "score:score_table", "score:TableLogps"),
            *("engine.moving:MovingReference", "engine.padded:DataCollatorForSeq2SeqDPO"),
            "engine.padded:split_batch_dpo",
        ),
    ),
    "Errors": (
        "Errors that a user can cause derive from `isopref.errors.UserError`. Each is a single message with a fix.",
        tuple(f"errors:{name}Error" for name in ("User", "Config", "Data", "Model", "Cache", "Run")),
    ),
    "Your own tests": (
        "Helpers in `isopref.testing` for testing your own objectives and layouts, as isopref tests its own.",
        (
            *("testing.models:tiny_model", "testing.models:tiny_folder", "testing.models:random_pairs"),
            "testing.models:byte_tokenizer",
        ),
    ),
}  # fmt: skip


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, (purpose, names) in SECTIONS.items():
        parts.append(f"## {title}\n\n{purpose}\n")
        parts += [_entry(*name.split(":")) for name in names]
    return "\n".join(parts)


def _entry(module: str, name: str) -> str:
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    known = ast.FunctionDef | ast.ClassDef
    (node,) = (one for one in tree.body if isinstance(one, known) and one.name == name)
    home = "isopref" if name in isopref.__all__ else f"isopref.{module}"
    lines = [f"### {name}", "", "```python", *_signature(f"{home}.{name}", _arguments(node)), "```", ""]
    lines += [*_prose(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        lines += [*_members(node)]
    return "\n".join(lines)


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str] | None:
    """The arguments of a function or a class, as written in the source; None for a class without any."""
    if isinstance(node, ast.FunctionDef):
        return _parameters(node)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return _parameters(one)[1:]
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    given = [ast.unparse(one) for one in fields if not ast.unparse(one.target).startswith("_")]
    return [field for field in given if "ClassVar" not in field] or None


def _parameters(node: ast.FunctionDef) -> list[str]:
    own, defaults = node.args, node.args.defaults
    plain = [*own.posonlyargs, *own.args]
    values = [None] * (len(plain) - len(defaults)) + list(defaults)
    found = [_parameter(arg, value) for arg, value in zip(plain, values, strict=True)]
    if own.vararg is not None:
        found.append(f"*{ast.unparse(own.vararg)}")
    elif own.kwonlyargs:
        found.append("*")
    found += [_parameter(arg, value) for arg, value in zip(own.kwonlyargs, own.kw_defaults, strict=True)]
    return [*found, *([f"**{ast.unparse(own.kwarg)}"] if own.kwarg else [])]


def _parameter(arg: ast.arg, value: ast.expr | None) -> str:
    annotation = "" if arg.annotation is None else f": {ast.unparse(arg.annotation)}"
    default = "" if value is None else f"{' = ' if annotation else '='}{ast.unparse(value)}"
    return f"{arg.arg}{annotation}{default}"


def _signature(name: str, arguments: Sequence[str] | None) -> Iterator[str]:
    if arguments is None:
        yield name
        return
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{name}("
    for argument in arguments:
        yield f"    {argument},"
    yield ")"


def _prose(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: its `:param name:` become a list."""
    for block in docstring.split("\n\n"):
        if block.startswith(":param"):
            for item in re.split(r"\n(?=:param)", block):
                name, _, text = item.removeprefix(":param ").partition(":")
                yield textwrap.fill(f"- `{name}`: {' '.join(text.split())}", 120, subsequent_indent="  ")
        else:
            yield textwrap.fill(" ".join(block.split()), 120, break_long_words=False, break_on_hyphens=False)
        yield ""


def _members(node: ast.ClassDef) -> Iterator[str]:
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    told = [one for one in methods if ast.get_docstring(one)]
    for one in told:
        decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
        call = "" if "property" in decorators else f"({', '.join(_parameters(one)[1:])})"
        first = " ".join((ast.get_docstring(one) or "").split("\n\n")[0].split())
        yield textwrap.fill(f"- `{one.name}{call}`: {first}", 120, subsequent_indent="  ", break_on_hyphens=False)
    if told:
        yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
