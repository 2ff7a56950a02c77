"""Every command and snippet of README.md and docs/ is executed, with tiny models and data under the names it uses."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from support.chat_server import chat_server
from support.pages import Snippet, snippets
from support.reader import ROOT, Reader, Shelf

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What is not executed, and why. `*` stands for anything.
NOT_RUN = {
    "make *": "installs something, measures for minutes, or runs these tests",
    "pip install *": "needs a package index",
    "source .venv/bin/activate": "is for a shell",
    "python benchmarks/*": "needs a GPU, or many minutes",
    "python examples/*": "tests/e2e/test_examples.py runs the scripts",
    "python -m isopref.cli.elastic": "names a launcher that tests/e2e/test_preemption.py starts",
    "python -m isopref.demo.rejected *": "takes a real model; tests/unit/test_demo.py runs it",
    "isopref push runs/my-ID me/my-model --license *": "needs the hub; tests/e2e/test_push.py uploads to a stand-in",
    "isopref train ... && next": "stands for any run and any command after it",
    "isopref cache rm": "is named without the key of a store",
    "pair 1 *": "is a drawing",
    "x1 x2 x3 *": "is a drawing",
    "start/answers.jsonl *": "lists files",
    '{"index": 0, "origin": *': "is output",
    '{"prompt": "Why is the sky blue?", "responses": *': "is output, abridged",
    '{"chosen": * ... the same three messages ...*': "is abridged",
}


def unique(found: Iterator[Snippet]) -> list[Snippet]:
    """Each snippet once, though several pages have it. The same command for another my.yaml is another snippet."""
    first: dict[tuple[str, str | None], Snippet] = {}
    for one in found:
        needs_config = one.kind == "python" or "my.yaml" in one.line
        first.setdefault((one.line, one.config if needs_config else None), one)
    return list(first.values())


SNIPPETS = unique(one for page in PAGES for one in snippets(str(page.relative_to(ROOT)), page.read_text()))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with chat_server(judge) as server:
        yield Shelf(tmp_path_factory.mktemp("shelf"), server.url)


def judge(request: dict[str, Any]) -> str:
    """Prefers the answer that comes first in the alphabet."""
    _, a, b = re.split(r"\[Answer [AB]\]\n", request["messages"][0]["content"])
    return f"VERDICT: {'A' if a.strip() < b.split('Think it over')[0].strip() else 'B'}"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda one: one.place)
def test_a_snippet_does_what_its_page_says(snippet: Snippet, shelf: Shelf, tmp_path: Path) -> None:
    if any(fnmatchcase(snippet.line, pattern) for pattern in NOT_RUN):
        assert missing(snippet.line) == []
    else:
        Reader(tmp_path, shelf, snippet.config).follow(snippet)


def missing(line: str) -> list[str]:
    """What a command that is not executed names, but does not exist: a make target, a script, a module or an extra."""
    program, *words = line.split()
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words if word not in targets]
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = ",".join(re.findall(r"\[(.*?)\]", line)).split(",")
        return [name for name in named if name not in (*extras, "NAME", "")]
    if words[:1] == ["-m"]:
        return [] if importlib.util.find_spec(words[1]) else [words[1]]
    return [] if program != "python" or (ROOT / words[0]).exists() else [words[0]]


def test_what_is_not_executed_is_on_a_page() -> None:
    assert [pattern for pattern in NOT_RUN if not any(fnmatchcase(one.line, pattern) for one in SNIPPETS)] == []


BROKEN = {
    "    kubectl apply -f job.yaml\n": "nor one that NOT_RUN lists",
    "```bash\nisopref ls\nkubectl apply -f job.yaml\n```\n": "nor one that NOT_RUN lists",
    "```rust\nfn main() {}\n```\n": "nor one that NOT_RUN lists",
    "    isopref train my.yaml --wings 2\n": "No such option: --wings",
    "    isopref train my.yaml \\\n        objective.loss=sigmoyd\n": 'found "sigmoyd"',
    "Try `isopref data yours.yaml`.\n": "yours.yaml: no such file",
    "    torchrun --nnodes many -m isopref train my.yaml --wings 2\n": "No such option: --wings",
    "    torchrun --wings 2 -m isopref ls\n": "torchrun: ",
    "```yaml\noptim: {learning_rate: 1e-6}\n```\n": "optim.learning_rate: no such field",
    "    layout: {parallel: fsdp, context_parallel: 3}\n": "3 does not divide 8 GPUs",
    '```python\nimport isopref\nisopref.fly("my.yaml")\n```\n': "has no attribute 'fly'",
    "```python\nisopref.fly(model: nn.Module)\n```\n": "has no attribute 'fly'",
    "```python\nisopref.Budget(kind: RowKind, wings: int)\n```\n": "wings",
    '    {"prompt": "Name a prime.", "chosen": "7"}\n': "records.jsonl:1: ",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items(), ids=BROKEN.values())
def test_what_is_broken_fails(text: str, message: str, shelf: Shelf, tmp_path: Path) -> None:
    *works, broken = snippets("page.md", f"# A page\n\n{text}")
    for number, one in enumerate(works):
        Reader(tmp_path / str(number), shelf).follow(one)
    with pytest.raises((AssertionError, AttributeError), match=re.escape(message)):
        Reader(tmp_path / "broken", shelf).follow(broken)


def test_what_a_listed_command_names_exists() -> None:
    assert missing("make test soak tea") == ["tea"]
    assert missing("pip install isopref[adapters,wings] .[flash]") == ["wings"]
    assert missing("python benchmarks/nothing.py --gpus 1") == ["benchmarks/nothing.py"]
    assert missing("python -m isopref.nothing") == ["isopref.nothing"]
    assert missing("python examples/olmo_core_packed.py model") == []
    assert missing("source .venv/bin/activate") == []
