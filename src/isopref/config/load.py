"""YAML file and command-line overrides -> Config, reporting all problems at once; and back to YAML.

Owns parsing and the wording of errors. schema.py defines what is allowed.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from isopref.config.describe import adapter_fields, expected, fields, sections, source_fields, source_words
from isopref.config.peers import ADVICE, SAME, instead
from isopref.config.schema import Config
from isopref.config.section import NO_PATH
from isopref.config.values import IS_LIST, IS_SOURCE, TAGS
from isopref.errors import ConfigError

Keys = tuple[str | int, ...]  # ("optim", "lr"), ("data", "train", 1, "weight"): a number is a list index

MERGE = "tag:yaml.org,2002:merge"  # the key <<
DATA_FILES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow")  # .json may be a config: it is YAML too
ADAPTER = ("model", "adapter")  # a field with its own fields
MOST_LEVELS = 20  # of nesting; PyYAML would fail at some hundreds
TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep; a config has at most 6"

# YAML 1.1 reads 1e-6 as text, because it has no dot.
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_FLOAT, _DATE = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number and 2026-01-31 is text (no field is a date, some are folders)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own name and type)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes text which _Loader would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


@dataclass
class _Draft:
    """Values on their way to a config, with the location of each and the problems so far."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Keys, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def place(self, keys: Keys) -> str:
        """Where `keys` were written: their own location, or that of the enclosing value."""
        return next((self.places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.places), self.source)

    def report(self, keys: Keys, what: str, inner: Keys = ()) -> None:
        """Record a problem with the section or field `keys`; `inner` are the keys of the offending part."""
        self.problems.append(f"{self.place(inner or keys)}: {_name(keys)}: {what}")


def load_config(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply overrides (`section.field=value`, the last one wins) and check the result.

    A mapping is treated as the file's content. Raises ConfigError, with one line per problem, for an unusable file or
    override.
    """
    draft = _read(source) if isinstance(source, Path) else _copy(source)
    for override in overrides:
        _apply(override, draft)
    config = _validate(draft)
    if config is None or draft.problems:
        problems = draft.problems
        head = f"{draft.source}: {len(problems)} problems:\n  " if len(problems) > 1 else ""
        raise ConfigError(head + "\n  ".join(problems))
    return config


def read_values(path: Path) -> dict[str, Any]:
    """The raw values of a config file, unchecked: it may be from another version."""
    return _read(path).values


def dump_config(config: Config, notes: Sequence[str] = ()) -> str:
    """The resolved config as YAML, preceded by notes as comments; load_config reads it back to an equal one."""
    head = "".join(f"# {line}\n" for note in notes for line in textwrap.wrap(note, 100))
    return head + yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_yaml(value: Any) -> str:
    """A value as one line of YAML that load_config reads back to an equal one."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n...\n").rstrip("\n")


def override_form(name: str, text: str = "") -> str:
    """How to set a field on the command line, and which fields `name`, without a section, may refer to."""
    form = "write section.field=value, e.g. optim.lr=1e-6."
    if name in ADVICE:
        return f"{form} {ADVICE[name]}."
    if near := [f"{home}={instead(home, text) or text or 'value'}" for home in homes(name)]:
        return f"{form} Did you mean {' or '.join(near)}?"
    return f"{form} The sections are {', '.join(sections())}." if name.isidentifier() else form


def homes(name: str) -> list[str]:
    """The fields called `name`, here or in other trainers, with their sections."""
    own = [f"{section}.{name}" for section in sections() if name in fields(section)]
    return [*own, SAME[name]] if name in SAME else own


def _read(path: Path) -> _Draft:
    draft = _Draft(str(path))
    if path.suffix in DATA_FILES:
        raise ConfigError(
            f"{path}: expected a config, found a data file. Try: isopref init my.yaml, then set data.train: {path}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. To create a starter config: isopref init {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error}). Pass a YAML file in UTF-8.") from error
    node, values = _parse(text, draft.source)
    if not isinstance(values, dict | None):
        raise ConfigError(
            f"{path}: expected sections with fields ({', '.join(sections())}), found {_show(values)}. "
            "To create a starter config: isopref init"
        )
    for keys, line, first_line in _lines(node):
        draft.places[keys] = f"{path}:{line}"
        if first_line:
            draft.report(keys, f"given twice, first on line {first_line}. Remove one of them.")
    draft.values = values or {}
    return draft


def _copy(content: Mapping[str, Any]) -> _Draft:
    """A draft from a mapping, via YAML: it may contain what a file may, and is not modified."""
    try:
        _, values = _parse(yaml.dump(dict(content), Dumper=_Dumper), "config")
    except RecursionError as error:
        raise ConfigError(f"config: {TOO_DEEP}.") from error
    except yaml.representer.RepresenterError as error:
        raise ConfigError(
            f"config: {error.args[-1]!r} is not a valid config value. Use strings, numbers, booleans, None, lists and "
            "dicts; for a path, str(path)."
        ) from error
    return _Draft("config", values)


def _parse(text: str, source: str) -> tuple[yaml.Node | None, Any]:
    """YAML text -> its nodes, which have line numbers, and its value. Raises ConfigError naming `source`."""
    try:
        _check_depth(text)
        node = _Loader(text).get_single_node()
        return node, _Loader(text).get_single_data()  # from separate nodes: it expands merge keys (<<) in place
    except (yaml.YAMLError, ValueError) as error:  # ValueError: `!!int abc`
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        if problem and problem.startswith("but "):  # for a second document, the sentence starts in the context
            problem = f"{getattr(error, 'context', '')}, {problem}"
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        way_out = " Use spaces instead of tabs." if problem and r"'\t'" in problem else _quotes(error)
        problem = problem or " ".join(str(error).split())
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}.{way_out}") from error


def _quotes(error: Exception) -> str:
    """The fix if text starts with a YAML special character, as far as the error reveals; otherwise empty."""
    words = {"alias": "*", "anchor": "&", "for the tag '!": "!", "character '@'": "@", "character '`'": "`"}
    sign = next((sign for word, sign in words.items() if word in str(error)), None)
    return f' Quote text that starts with {sign}: "{sign}...".' if sign else ""


def _check_depth(text: str) -> None:
    """Raise YAMLError for text nested too deeply for PyYAML, which is recursive."""
    level = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=event.start_mark)


def _lines(node: yaml.Node | None, above: Keys = ()) -> Iterator[tuple[Keys, int, int | None]]:
    """Yield (keys, line, line of an earlier equal key), down to the columns of a source in a list."""
    if len(above) > 4:
        return
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*above, index), item.start_mark.line + 1, None
            yield from _lines(item, (*above, index))
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if key.tag == MERGE:  # its fields apply unless given explicitly
            yield from _lines(value, above)
            continue
        yield (*above, name), line, first_lines.get(name)
        first_lines.setdefault(name, line)
        yield from _lines(value, (*above, name))


def _apply(override: str, draft: _Draft) -> None:
    """Write one `section.field=value` into the draft."""
    source = f"override '{_cut(override)}'"
    name, equals, text = override.partition("=")
    keys = tuple(name.split("."))
    if not equals or len(keys) < 2 or not all(keys):
        draft.problems.append(f"{source}: {override_form(name, text)}")
        return
    if len(keys) > MOST_LEVELS:
        draft.problems.append(f"{source}: {TOO_DEEP}.")
        return
    try:
        node, value = (None, text) if _is_text(text) else _parse(text, source)
    except ConfigError as error:
        draft.problems.append(str(error))
        return
    inside = draft.values
    for depth, key in enumerate(keys[:-1], start=1):
        if inside.get(key) is None:
            inside[key] = {}
        inside = inside[key]
        if not isinstance(inside, dict):
            draft.problems.append(f"{source}: {'.'.join(keys[:depth])} is {_show(inside)}, which has no fields.")
            return
    inside[keys[-1]] = value
    draft.places = {known: place for known, place in draft.places.items() if known[: len(keys)] != keys}
    for n in range(2 if keys[0] in sections() else 1, len(keys)):
        draft.places.setdefault(keys[:n], source)
    draft.places[keys] = source
    for inner, _, first_line in _lines(node, keys):
        draft.places[inner] = source
        if first_line:
            draft.report(inner, "given twice. Remove one of them.")


def _is_text(text: str) -> bool:
    """Whether an override's value starts with a YAML special character but is plain text: *.jsonl."""
    return text.startswith(("*", "&", "!", "@", "`", "%", "#")) and not text.startswith("!!")  # !!str 3 is a value


def _validate(draft: _Draft) -> Config | None:
    """The config, or None with the reasons added to the draft's problems."""
    values: dict[Any, Any] = {section: {} for section in sections()}  # a missing or empty section
    values |= {name: value for name, value in draft.values.items() if value is not None or name not in values}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        seen = set()
        for one in error.errors():
            for name, what in one.get("ctx", {}).get("conflicts", ()):
                draft.report(tuple(int(key) if key.isdigit() else key for key in name.split(".")), what)
            in_list = IS_LIST in one["loc"]
            path = [key for key in one["loc"] if key not in TAGS]
            inner = tuple(key if in_list and isinstance(key, int) else str(key) for key in path)
            has_fields = inner[:2] == ADAPTER or IS_SOURCE in one["loc"]
            keys = inner[:4] if in_list else inner[:3] if has_fields else inner[:2]
            if keys and keys not in seen:  # a list with two wrong numbers counts as one problem
                kind = one["type"] if inner == keys else "part"  # a list that is too short lacks a part
                words = one["msg"] if kind == NO_PATH else None
                draft.report(keys, _wrong(kind, keys, values, words), inner)
            seen.add(keys)
        return None


def _wrong(kind: str, keys: Keys, values: dict[Any, Any], words: str | None = None) -> str:
    """What is wrong with the section, field, source or source field at `keys`, and how to fix it.

    `words` says what it must be, if the schema does not.
    """
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(keys)
    known = _siblings(keys)
    if kind == "missing":
        return f"is required. {known[str(keys[-1])].description}"
    value: Any = values
    for key in keys:
        value = value[key]
    if len(keys) == 1:
        return f"must be a section with fields ({', '.join(fields(str(keys[0])))}); found {_show(value)}."
    if words is None:
        words = source_words() if isinstance(keys[-1], int) else expected(known[keys[-1]])
    quote = f' Put it in quotes: "{value}".' if kind == "string_type" and isinstance(value, int | float) else ""
    told = instead(_name(keys), value)
    return f"must be {words}; found {_show(value)}.{quote}{f' Write {told}.' if told else ''}"


def _siblings(keys: Keys) -> dict[str, FieldInfo]:
    """The fields among which to look for the last key."""
    inside = adapter_fields() if keys[:2] == ADAPTER else source_fields()
    return inside if len(keys) > 2 else fields(str(keys[0]))


def _unknown(keys: Keys) -> str:
    """The message for an unknown section or field, with the closest known one."""
    name = str(keys[-1]).lower().replace("-", "_")
    if len(keys) == 1:
        known, what, prefix = list(sections()), "section", ""
    else:
        known, what, prefix = list(_siblings(keys)), "field", f"{_name(keys[:-1])}."
    if name in ADVICE:
        return f"no such {what}. {ADVICE[name]}."
    match = get_close_matches(name, known, n=1) or [field for field in known if name.startswith(f"{field}_")]
    near = [SAME[name]] if name in SAME else dict.fromkeys([*(prefix + field for field in match), *homes(name)])
    if near:
        return f"no such {what}. Did you mean {' or '.join(near)}?"
    every = "Known fields" if len(keys) > 1 else "Known sections"
    return f"no such {what}. {every}: {', '.join(known)}."


def _name(keys: Keys) -> str:
    """Keys in user syntax: data.train[1].weight."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else to_yaml(value)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
