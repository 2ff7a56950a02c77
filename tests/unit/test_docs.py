"""What is generated is what the code says now; what pages name exists: fields, links, commands, messages."""

import ast
import json
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


def speed_rows(page: str) -> list[list[str]]:
    """The cells of README's speed table, row by row."""
    table = page[page.index("| pairs/s |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def test_speed_figures_are_the_measured_ones() -> None:
    """README and RESULTS.md quote benchmarks/measured.json, which bench.py wrote, rounded."""
    measured = json.loads((ROOT / "benchmarks" / "measured.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = speed_rows((ROOT / "README.md").read_text())
    for cell, (_, isopref, *peers) in zip(("1b-chat", "1b-hh", "8b-chat", "8b-lora"), rows, strict=True):
        ours = speed[cell, "isopref"]
        assert float(isopref) == rounded(ours, isopref)
        for system, text in zip(("trl", "trl-liger"), peers, strict=True):
            assert bool(text) == ((cell, system) in speed), (cell, system)
            if text:
                pairs_per_s, ratio = re.fullmatch(r"([\d.]+) \(([\d.]+)x\)", text).groups()  # type: ignore[union-attr]
                theirs = speed[cell, system]
                assert float(pairs_per_s) == rounded(theirs, pairs_per_s)
                assert float(ratio) == rounded(ours / theirs, ratio)
                assert f"{ours / theirs:.2f}x as fast" in results


def test_figures_of_lists_labels_and_rewards_are_the_measured_ones() -> None:
    """README and RESULTS.md quote benchmarks/measured_tasks.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_tasks.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): 1 / one["step_s"] for one in measured}
    results, readme = ((ROOT / name).read_text() for name in ("benchmarks/RESULTS.md", "README.md"))
    ratios = {
        (cell, system): speed[cell, "isopref"] / theirs
        for (cell, system), theirs in speed.items()
        if system != "isopref"
    }
    assert len(ratios) >= 5
    for ratio in ratios.values():
        assert f"{ratio:.2f}x as fast" in results
    for quoted in (("1b-lists", "trl"), ("1b-kto", "trl-liger"), ("1b-reward-chat", "trl"), ("1b-reward-hh", "trl")):
        assert f"{ratios[quoted]:.1f}" in readme


def test_figures_of_late_divergence_are_the_measured_ones() -> None:
    """RESULTS.md, README and docs/conversations.md quote benchmarks/measured_agents.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_agents.json").read_text())["results"]
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("diverge late")[1].split("\n## ")[0]
    for one in measured:
        assert f"{one['pairs_per_s']:.3g} | {one['peak_memory_gib']:.1f}" in results, one["system"]
    ratios = {key: speed[key[0], "isopref"] / theirs for key, theirs in speed.items() if key[1].startswith("trl")}
    for ratio in ratios.values():
        assert f"{ratio:.2f}x as fast" in results
    page, readme = ((ROOT / name).read_text() for name in ("docs/conversations.md", "README.md"))
    assert f"{ratios['1b-agents', 'trl']:.1f} times as fast as with TRL and" in page
    assert f"{ratios['1b-agents-16', 'trl-liger']:.1f} times as fast as with TRL and Liger" in page
    assert f"diverge late run at {ratios['1b-agents', 'trl']:.1f} times TRL's speed" in readme


def test_figures_of_rows_are_the_measured_ones() -> None:
    """RESULTS.md quotes benchmarks/measured_layouts.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_layouts.json").read_text())["results"]
    speed = {(one["model"], one["layout"]): one["pairs_per_s"] for one in measured}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("## Shared rows compared")[1].split("\n## ")[0]
    assert len(speed) >= 6
    for one in measured:
        line = f"| {one['pairs_per_s']:.1f} | {one['peak_memory_gib']:.1f} |"
        if one["layout"] != "shared":
            line += f" {speed[one['model'], 'shared'] / one['pairs_per_s']:.2f}x as fast |"
        assert line in results, one
    steps = next(one["steps_s"] for one in measured if (one["model"], one["layout"]) == ("lfm2", "padded-compiled"))
    others = sorted(steps)[:-1]
    steady = 64 * len(others) / sum(others)
    assert f"took {max(steps)} s" in results
    assert f"runs at {steady:.1f} pairs/s" in results
    assert f"about {speed['lfm2', 'shared'] / steady:.1f} times as fast" in results


def test_figures_of_long_pairs_are_the_measured_ones() -> None:
    """RESULTS.md quotes benchmarks/measured_long.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_long.json").read_text())["results"]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("\n## Long pairs")[1].split("\n## ")[0]
    assert len(measured) >= 4
    for one in measured:
        assert (
            not one["fits"] or f"| {one['tokens']:,} | {one['step_s']:.2f} | {one['peak_memory_gib']:.1f} |" in results
        ), one
    isopref, trl = (
        [one["step_s"] for one in measured if (one["kind"], one["tokens"]) == (kind, 32768)]
        for kind in ("8b-lora", "trl-8b-lora")
    )
    assert f"isopref is {min(trl) / min(isopref):.2f}x as fast" in results
    assert f"| {min(trl) / max(isopref):.2f}x |" in results  # where both recompute all layers
    stayed, left = (one["step_s"] for one in measured if (one["kind"], one["tokens"]) == ("8b-lora", 65536))
    assert f"| {left / stayed - 1:.1%} slower |" in results


def test_sentences_about_speed_are_the_measured_ones() -> None:
    """What README says beside its table: the range of ratios, the card and the day."""
    measured = json.loads((ROOT / "benchmarks" / "measured.json").read_text())
    speed = {(one["cell"], one["system"]): one["pairs_per_s"] for one in measured["results"]}
    ratios = [speed[cell, "isopref"] / theirs for (cell, system), theirs in speed.items() if system.startswith("trl")]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times the speed of TRL" in readme
    card = measured["about"]["device"].removeprefix("NVIDIA ")
    assert f"One {card}, {measured['about']['date']}, compared with TRL {measured['about']['trl'][:4]}" in readme


def test_figures_of_float8_are_the_measured_ones() -> None:
    """docs/concepts.md and NOTES.md quote benchmarks/measured_float8.json, which bench.py wrote."""
    measured = json.loads((ROOT / "benchmarks" / "measured_float8.json").read_text())["results"]
    speed = {one["system"]: one["pairs_per_s"] for one in measured if one.get("cell") == "8b-chat"}
    concepts, notes = ((ROOT / name).read_text() for name in ("docs/concepts.md", "benchmarks/NOTES.md"))
    assert f"{speed['isopref']:.1f} to {speed['isopref-float8']:.1f} pairs/s" in notes
    ratio = speed["isopref-float8"] / speed["isopref"]
    assert f"it trains {int(100 * ratio) / 100} times as many pairs per second" in concepts
    layouts = {one["precision"]: one["layouts"] for one in measured if "precision" in one}
    both = [[one["gradient"] for one in layouts[name].values()] for name in ("bfloat16", "float8")]
    for half, narrow in zip(*both, strict=True):
        assert f"| {half:.1g} | {narrow:.2f} |" in concepts


def rounded(value: float, like: str) -> float:
    """A value with as many decimals as a text has."""
    return round(value, len(like.partition(".")[2]))
