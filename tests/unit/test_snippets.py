"""Snippets in the docs: commands go through the real parser, YAML and overrides through the schema, Python compiles."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from isopref.cli.main import app
from isopref.cli.resume import spelled_out
from isopref.config.describe import sections
from isopref.config.load import load_config, read_values
from isopref.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "benchmarks").glob("*.md"))
LEAST = {"model": {"path": "some/model"}, "data": {"train": "train.jsonl"}}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """The words of every isopref command: in blocks, between backquotes, and behind torchrun's -m."""
    joined = re.sub(r" \\\n\s*", " ", text)
    fenced = "".join(f"    {line}\n" for block in blocks(joined, "") for line in block.splitlines())
    lines = re.findall(r"^    (?:\$ )?(?:[A-Z_]+=\S+ )*(isopref [a-z].*)$", joined + fenced, flags=re.MULTILINE)
    lines += re.findall(r"`(?:[A-Z_]+=\S+ )*(isopref [a-z][^`]*)`", joined)
    lines += [f"isopref {rest}" for rest in re.findall(r"-m isopref ([a-z][^`\n]*)", joined)]
    for line in lines:
        command = re.split(r" (?:&&|\||;|>) ", line)[0]
        yield ["2" if word == "N" else word for word in shlex.split(command, comments=True)[1:]]


def wrong_command(words: list[str]) -> str | None:
    """Why the parser, or the schema for an override, refuses a command; None if they take it."""
    command: Any = typer.main.get_command(app)
    name, *arguments = spelled_out(words)
    if len(words) == 1:
        return None if name in command.commands else f"no command {name}"  # mentioned, not written out
    try:
        with command.make_context("isopref", [], resilient_parsing=True) as context:
            found = command.get_command(context, name)
            if found is None:
                return f"no command {name}"
            parsed = found.make_context(name, arguments, parent=context)
    except Exception as error:  # click's, or that of the click bundled with typer
        if type(error).__name__ in HARMLESS:
            return None
        return f"{words}: {getattr(error, 'message', error)}"
    return wrong_overrides(parsed.params.get("overrides") or [])


def wrong_overrides(overrides: list[str]) -> str | None:
    """Why the schema refuses overrides. A config that they would need beside them is no fault of theirs."""
    try:
        load_config(LEAST, [one for one in overrides if one != "..."])
    except ConfigError as error:
        return None if any(sign in str(error) for sign in NEEDS_MORE) else f"{overrides}: {error}"
    return None


HARMLESS = ("Exit", "MissingParameter", "BadOptionUsage")  # --help; a command that is mentioned in part
NEEDS_MORE = ("needs", "requires", "only with", "Only with")


@each_page
def test_commands_are_taken_by_the_parser(page: Path) -> None:
    assert [wrong for wrong in map(wrong_command, commands(page.read_text())) if wrong] == []


def wrong_yaml(text: str, file: Path) -> str | None:
    """Why the schema refuses a snippet of a config; None for one that it takes, and for YAML of something else."""
    content = yaml.safe_load(text)
    if not isinstance(content, dict) or not set(content) <= set(sections()):
        return None
    file.write_text(text)
    content = read_values(file)  # which takes 1e-6 for a number, as YAML 1.2 has it
    merged = {**content, **{name: {**given, **(content.get(name) or {})} for name, given in LEAST.items()}}
    try:
        load_config(merged, [])
    except ConfigError as error:
        return None if any(sign in str(error) for sign in NEEDS_MORE) else str(error)
    return None


@each_page
def test_yaml_is_taken_by_the_schema(page: Path, tmp_path: Path) -> None:
    told = [wrong_yaml(text, tmp_path / "my.yaml") for text in blocks(page.read_text(), "yaml")]
    assert [wrong for wrong in told if wrong] == []


@each_page
def test_python_compiles(page: Path) -> None:
    for number, text in enumerate(blocks(page.read_text(), "python")):
        if page.name != "api.md":  # which has signatures
            compile(text, f"{page.name}, block {number}", "exec")


def test_the_checks_see_what_is_wrong(tmp_path: Path) -> None:
    text = (
        "    isopref train my.yaml --nproc many\n    isopref train my.yaml optim.lr=fast   # comment\n"
        "    isopref ls one two\n    isopref train my.yaml --resume auto optim.lr=2e-6 \\\n      --nproc 8\n"
        "`isopref fly` `isopref ls`\n    torchrun --nnodes 2 -m isopref train my.yaml --wings 2\n"
    )
    told = [wrong_command(words) for words in commands(text)]
    assert [wrong is None for wrong in told] == [False, False, False, True, False, True, False]
    file = tmp_path / "my.yaml"
    assert wrong_yaml("optim: {lr: 1e-6}", file) is None
    assert wrong_yaml("optim: {learning_rate: 1e-6}", file) is not None
    assert wrong_yaml("apiVersion: v1", file) is None
    assert len(list(commands((ROOT / "README.md").read_text()))) > 10
