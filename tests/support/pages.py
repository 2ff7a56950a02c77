"""What a page of the docs asks its reader to do: its commands and snippets, taken from Markdown."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["command", "python", "signature", "yaml", "json", "text"]  # text: nothing of the others

LANGUAGES: dict[str, Kind] = {"python": "python", "yaml": "yaml", "json": "json", "jsonl": "json"}
SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = ("isopref", "make", "pip", "python", "source", "torchrun")  # that begin an indented block of commands

FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)    .*\n(?:    .*\n|\n(?=    ))*")
INLINE = re.compile(rf"`((?:isopref [^\s`]+|{'|'.join(PROGRAMS[1:])}) [^`]+)`")  # `isopref plan` alone is only a name
FORMULA = re.compile(r"\S .*?(=|->|\*) ")  # as in docs/objectives.md, which has many; no command of ours looks like one
SECTION = re.compile(r"(model|data|objective|optim|layout|run):")


@dataclass(frozen=True)
class Snippet:
    """`config` is the last complete config before it on the page; `inline`: between backquotes, perhaps only a part."""

    place: str
    kind: Kind
    text: str
    config: str | None = None
    inline: bool = False

    @property
    def line(self) -> str:
        """As one line, without comments: a command's words, or any other text with single spaces."""
        words = shlex.split(self.text, comments=True) if self.kind == "command" else self.text.split()
        return " ".join(words)


def snippets(name: str, text: str) -> list[Snippet]:
    """Of a page's text, in order. Formulas are left out."""
    found = sorted(_found(text))
    config, listed = None, []
    for number, kind, content, inline in found:
        listed.append(Snippet(f"{name}:{number}", kind, content, config, inline))
        if kind == "yaml" and {"model", "data"} <= set(re.findall(r"^(\w+):", content, re.MULTILINE)):
            config = content
    return listed


def _found(text: str) -> Iterator[tuple[int, Kind, str, bool]]:
    """The number of a snippet's first line, and what it is."""
    for block in FENCED.finditer(text):
        language, content = block.groups()
        number = _number(text, block.start()) + 1
        if language in SHELLS:
            yield from _commands(number, content)
        else:
            yield number, _code(language, content), content, False
    text = FENCED.sub(_blank, text)
    for block in INDENTED.finditer(text):
        content = re.sub(r"^    ", "", block[0], flags=re.MULTILINE)
        number = _number(text, block.start())
        kind = _kind(content)
        if kind == "command":
            yield from _commands(number, content)
        elif kind is not None:
            yield number, kind, content, False
    text = INDENTED.sub(_blank, text)
    for span in INLINE.finditer(text):
        yield _number(text, span.start()), "command", " ".join(span[1].split()), True


def _code(language: str, content: str) -> Kind:
    """What a fenced block that is not a shell's contains. docs/api.md shows signatures, with types and no calls."""
    if language == "python" and re.match(r"isopref\.[\w.]+(\((\w+:|\n    \w+:).*)?$", content, re.DOTALL):
        return "signature"
    return LANGUAGES.get(language, "text")


def _kind(content: str) -> Kind | None:
    """What an indented block contains; None for a formula."""
    first = content.split("\n")[0]
    if first.startswith(("{", "[")):
        return "json"
    if SECTION.match(first):
        return "yaml"
    if first.removeprefix("$ ").split()[0] in PROGRAMS:
        return "command"
    return None if FORMULA.search(first) else "text"


def _commands(number: int, content: str) -> Iterator[tuple[int, Kind, str, bool]]:
    """One for each command. If some lines have a prompt, the others are output."""
    prompted = any(line.startswith("$ ") for line in content.splitlines())
    start = number
    for line in re.split(r"(?<!\\)\n", content):
        if line.strip() and prompted == line.startswith("$ ") and not line.startswith("#"):
            for command in line.removeprefix("$ ").replace("\\\n", " ").split(" && "):
                yield start, "command", command, False
        start += line.count("\n") + 1


def _number(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _blank(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")
