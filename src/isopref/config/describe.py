"""The schema in words, for errors, the starter file and the docs: sections, fields, what a value must be."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from isopref.config.objective import param_fields
from isopref.config.schema import Config
from isopref.config.section import Section
from isopref.config.values import AdapterConfig, SourceConfig
from isopref.objectives.declare import BOUND_WORDS

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}


def sections() -> dict[str, type[Section]]:
    """The sections of a config file by name, in the schema's order."""
    return {name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()}


def fields(section: str) -> dict[str, FieldInfo]:
    """What a section takes by name, in the schema's order: its fields, and in `objective` the parameters of losses.

    Empty for a section that does not exist.
    """
    if section not in sections():
        return {}
    return {**sections()[section].model_fields, **(param_fields() if section == "objective" else {})}


def source_fields() -> dict[str, FieldInfo]:
    """The fields of a source in data.train or data.eval."""
    return SourceConfig.model_fields


def source_words() -> str:
    """What an entry of a list of sources must be."""
    return f"non-empty text or {_words(SourceConfig)}"


def adapter_fields() -> dict[str, FieldInfo]:
    """The fields of model.adapter."""
    return AdapterConfig.model_fields


def default(field: FieldInfo) -> Any:
    """A field's default as plain data, the way YAML and JSON have it."""
    value = field.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a field takes, if it takes only certain ones."""
    kinds = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


def expected(field: FieldInfo) -> str:
    """What a value of the field must be, in words: "a whole number, at least 1, or null"."""
    return _words(field.annotation, field.metadata)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _words(annotation: Any, limits: Sequence[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(args[0], [limit for one in annotation.__metadata__ for limit in getattr(one, "metadata", ())])
    if origin is Literal:
        words = f"one of {', '.join(args)}" if len(args) > 1 else str(args[0])
    elif _is_union(annotation):
        inner = [_words(arg) for arg in args]
        words = (", or " if any("," in one for one in inner) else " or ").join(inner)
    elif origin is list:
        named = get_origin(args[0]) is Literal
        text = get_args(args[0])[:1] == (str,)
        words = f"list, each {_words(args[0])}" if named else "list of text" if text else "list of sources"
    elif annotation is SourceConfig:
        words = f"a source ({', '.join(source_fields())})"
    elif annotation is AdapterConfig:
        words = f"an adapter ({', '.join(adapter_fields())})"
    elif origin is tuple:
        same = len(set(args)) == 1
        words = f"a list of {len(args)}, each {_words(args[0])}" if same else f"[{'; '.join(map(_words, args))}]"
    elif origin is dict:
        words = f"mapping from {'text' if args[0] is str else 'these'} to {_words(args[1])}"
    else:
        words = _WORDS[annotation]
    non_empty = "non-empty " * any(hasattr(limit, "min_length") for limit in limits)
    words = f"{'a ' * (origin in (list, dict))}{non_empty}{words}"
    bounds = [
        f"{BOUND_WORDS[name]} {getattr(one, name)}" for one in limits for name in BOUND_WORDS if hasattr(one, name)
    ]
    return ", ".join([words, *bounds])
