"""What is generated is what the code says now; what pages name exists: fields, links, commands, messages."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from isopref.cli.main import app
from isopref.config import objectives_page, starter
from isopref.config.describe import adapter_fields, fields, sections, source_fields
from isopref.config.peers import ADVICE, EARLIER, OTHERWISE, SAME, VALUES
from isopref.testing import exactness_page, matrix

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "benchmarks").glob("*.md"))
FIELDS = {f"{section}.{name}" for section in sections() for name in fields(section)}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_config_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == starter.PAGE + starter.reference(), "run: make docs"


def test_objectives_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "objectives.md").read_text() == objectives_page.page(), "run: make docs"


def test_demo_config_is_the_shipped_one() -> None:
    packaged = Path(starter.__file__).with_name("demo.yaml").read_text()
    assert (ROOT / "examples" / "demo" / "demo.yaml").read_text() == packaged


def test_exactness_page_has_every_group() -> None:
    lines = [line.split("|") for line in (ROOT / "docs" / "exactness.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) == 11]
    page = {tuple(row[:5]) for row in rows[2:]}
    groups: dict[tuple[str, ...], int] = {}
    for ranks in matrix.SPREADS:
        for cell in matrix.cells(ranks):
            key = tuple(map(str, exactness_page.group(cell)))
            groups[key] = groups.get(key, 0) + 1
    assert page == {(*key, str(count)) for key, count in groups.items()}, "run: make exactness"
    assert all(float(row[5]) <= float(row[8]) for row in rows[2:])


def unknown_fields(text: str) -> set[str]:
    """What text names as a field of a config, between backquotes or in front of an equals sign, and is none."""
    section = f"(?:{'|'.join(sections())})"
    named = re.findall(rf"`({section}\.[a-z_]+)\b(?![/(])", text) + re.findall(rf"\b({section}\.[a-z_]+)=", text)
    return {name for name in named if name not in FIELDS}


@each_page
def test_fields_exist(page: Path) -> None:
    assert unknown_fields(page.read_text()) == set()


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


def anchors(text: str) -> set[str]:
    """Headings as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def wrong_commands(text: str) -> list[str]:
    """Commands of isopref, make and our scripts that do not exist, or are given an option that they do not have."""
    group: Any = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    wrong = []
    for line in re.findall(r"(?:^    |`)((?:isopref|make|python) [a-z][^`\n]*)", text, flags=re.MULTILINE):
        program, *words = line.split("#")[0].split()
        if program == "make":
            wrong += [line] if words[0] not in targets else []
        elif program == "python":
            wrong += [line] if not (ROOT / words[0]).exists() and words[0] != "-m" else []
        else:
            found = group.commands.get(words[0])
            inner = [found, *getattr(found, "commands", {}).values()] if found else []
            known = {option for one in inner for part in one.params for option in part.opts}
            options = {word.split("=")[0] for word in words if word.startswith("--")}
            wrong += [line] if found is None or not options <= known | {"--help"} else []
    return wrong


@each_page
def test_commands_exist(page: Path) -> None:
    assert wrong_commands(page.read_text()) == []


def test_the_checks_see_what_is_wrong() -> None:
    page = ROOT / "docs" / "concepts.md"
    assert unknown_fields("`optim.lr`, `optim.learning_rate`, `data/packing`, optim.rate=3") == {
        "optim.learning_rate",
        "optim.rate",
    }
    assert broken_links(page, "[a](config.md#optim) [b](nowhere.md) [c](config.md#nothing) [d](#rows)") == [
        "nowhere.md",
        "config.md#nothing",
    ]
    text = "    isopref train my.yaml --nproc 2\n    isopref fly my.yaml\n`isopref plan my.yaml --wings 2` `make tea`"
    assert wrong_commands(text) == ["isopref fly my.yaml", "isopref plan my.yaml --wings 2", "make tea"]


def test_names_of_other_trainers_lead_to_fields_and_are_on_the_page() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    known = FIELDS | {f"model.adapter.{name}" for name in adapter_fields()}
    told = " ".join(ADVICE.values())
    named = set(re.findall(rf"\b(?:{'|'.join(sections())})\.(?:adapter\.)?[a-z_]+", told))
    assert len(named) > 20
    assert {*SAME.values(), *VALUES, *named} <= known
    assert not set(SAME) & set(OTHERWISE)
    peers = {*SAME, *OTHERWISE}
    assert [name for name in peers if f"`{name}`" not in page] == []
    assert not (peers | set(EARLIER)) & {name.split(".")[1] for name in FIELDS}
    assert not peers & set(EARLIER)
    assert not peers & {*source_fields(), *adapter_fields()}


def messages() -> list[str]:
    """Every text in the code, with `...` for what is put in."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            found.append("".join(text for text in texts if isinstance(text, str)))
    return found


def test_troubleshooting_quotes_real_messages() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \| ", page, flags=re.MULTILINE)
    every = messages()
    assert len(quoted) > 20
    assert [quote for quote in quoted if not any(says(text, quote) for text in every)] == []
    assert not any(says(text, "there is no such weather. Did you bring an umbrella?") for text in every)


def says(text: str, quote: str) -> bool:
    """Whether a quote is part of a text, or a text with more than a few words of its own is part of the quote."""
    if len(text.replace("...", "")) > 25 and pattern(text).search(quote):
        return True
    return pattern(quote).search(text) is not None


@cache
def pattern(text: str) -> re.Pattern[str]:
    """Compiled once: there are more messages than the re module remembers patterns."""
    return re.compile(".*".join(re.escape(part) for part in text.split("...")))
