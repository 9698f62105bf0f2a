"""Table of all keys, derived from the typed sections."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed.config.base_model import Kwargs, Note, Section, note_of
from deepspeed.config.sections.top import TopLevel

Shape = Literal["block", "list", "named", "kwargs"]


@dataclass(frozen=True)
class Child:
    """Section in a field: as a block, a list of blocks, blocks with user-defined names, or keyword arguments."""

    section: type[Section]
    shape: Shape


@dataclass(frozen=True)
class Key:
    """Row of the table of all configuration keys.

    Attributes:
        path: JSON path; `[]` stands for any index, `<name>` for any name.
        kind: description of the type.
        default: default value.
        note: metadata of the key.
        switches: paths of the keys that enable the surrounding blocks; the key has no effect while one is off.
    """

    path: str
    kind: str
    default: Any
    note: Note
    switches: tuple[str, ...] = ()


def child_of(field: FieldInfo) -> Child | None:
    """Return the section that a field contains, or None."""
    for mark in field.metadata:
        if isinstance(mark, Kwargs):
            return Child(mark.model, "kwargs")
    annotation: Any = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Child(annotation, "block")
    shapes: dict[Any, Shape] = {list: "list", dict: "named"}
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return Child(part, shapes.get(get_origin(annotation), "block"))
    return None


@cache
def spellings(section: type[Section]) -> dict[str, tuple[str, bool]]:
    """Return (field name, whether the spelling is deprecated) of each accepted spelling in a section."""
    table: dict[str, tuple[str, bool]] = {}
    for name, field in section.model_fields.items():
        note = note_of(field)
        table[name] = (name, False)
        table.update({alias: (name, False) for alias in note.aliases})
        table.update({old: (name, True) for old in note.deprecated})
    return table


def default_of(field: FieldInfo) -> Any:
    """Return the default value of a field."""
    return field.get_default(call_default_factory=True)


def kind_of(annotation: Any) -> str:
    """Describe a Python type in words of JSON, such as "whole number"."""
    words = {int: "whole number", float: "number", str: "string", bool: "true or false", Any: "anything"}
    if annotation in words:
        return words[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {kind_of(parts[0])}"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return kind_of(parts[0])
    return "object"


def _walk(section: type[Section], path: str, switches: tuple[str, ...]) -> Iterator[Key]:
    if section.switch:
        switches = (*switches, f"{path}.{section.switch}")
    for name, field in section.model_fields.items():
        here = f"{path}.{name}" if path else name
        child = child_of(field)
        if child is None or child.shape in ("list", "named"):
            yield Key(here, kind_of(field.annotation), default_of(field), note_of(field), switches)
        elif note_of(field).status == "not available yet":  # a block whose mere presence asks for the feature
            yield Key(here, "block", None, note_of(field), switches)
        if child is not None:
            suffix = {"block": "", "kwargs": "", "list": "[]", "named": ".<name>"}[child.shape]
            inner = (*switches, here) if note_of(field).status == "not available yet" else switches
            yield from _walk(child.section, here + suffix, inner)


@cache
def all_keys() -> tuple[Key, ...]:
    """Return the table of keys, in the order of the sections."""
    return tuple(_walk(TopLevel, "", ()))


@cache
def sections_by_path() -> dict[str, type[Section]]:
    """Return the section class of every block, by JSON path; the path of the top level is ""."""
    sections: dict[str, type[Section]] = {}

    def visit(section: type[Section], path: str) -> None:
        sections[path] = section
        for name, field in section.model_fields.items():
            child = child_of(field)
            if child is not None:
                visit(child.section, f"{path}.{name}" if path else name)

    visit(TopLevel, "")
    return sections
