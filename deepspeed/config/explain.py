"""Every resolved value with its origin, as rows and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from deepspeed.config.fields import Note, Section, note_of
from deepspeed.config.problems import show
from deepspeed.config.reader import Reading
from deepspeed.config.schema import child_of
from deepspeed.config.sections.top import TopLevel


@dataclass(frozen=True)
class Row:
    """One resolved value.

    Attributes:
        path: JSON path.
        value: what holds.
        origin: "given", "default", or "derived: …", "auto: …", "deprecated: old name".
        remark: what takes the place of a moot key, or why a key is not read.
    """

    path: str
    value: Any
    origin: str
    remark: str = ""


def rows(top: TopLevel, reading: Reading) -> list[Row]:
    """All values in the order of the table of keys."""
    found = list(_section_rows(top, reading, ""))
    return found + [Row(name, value, "given", "accepted and not read") for name, value in reading.tolerated.items()]


def _section_rows(section: Section, reading: Reading, path: str) -> Iterator[Row]:
    for name, field in type(section).model_fields.items():
        here = f"{path}.{name}" if path else name
        value = getattr(section, name)
        child = child_of(field)
        if isinstance(value, Section):
            yield from _section_rows(value, reading, here)
        elif child is not None and child.shape == "kwargs":
            yield from _kwargs_rows(child.section, cast("dict[str, Any]", value), reading, here)
        else:
            yield Row(here, _plain(value), reading.origins.get(here, "default"), _remark(note_of(field)))
            yield from _moot_rows(cast("list[Any]", value) if isinstance(value, list) else [], here)


def _moot_rows(items: list[Any], path: str) -> Iterator[Row]:
    """What a list's sections were given that decides nothing."""
    for at, item in enumerate(items):
        for name, field in type(item).model_fields.items() if isinstance(item, Section) else ():
            if note_of(field).status == "moot by design" and name in item.model_fields_set:
                yield Row(f"{path}[{at}].{name}", _plain(getattr(item, name)), "given", _remark(note_of(field)))


def _kwargs_rows(section: type[Section], value: dict[str, Any], reading: Reading, path: str) -> Iterator[Row]:
    autos = [auto for auto in reading.autos if auto.startswith(path + ".")]
    dropped = [auto for auto in autos if auto.rpartition(".")[2] not in value]
    for name, item in value.items():
        here = f"{path}.{name}"
        field = section.model_fields.get(name)
        yield Row(here, item, reading.origins.get(here, "given"), _remark(note_of(field)) if field else "")
    yield from (Row(auto, None, "auto: the default of the class") for auto in dropped)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in cast("dict[str, Any]", value).items()}
    return value.model_dump() if isinstance(value, Section) else value


def _remark(note: Note) -> str:
    return {
        "implemented": "",
        "moot by design": f"moot by design: {note.instead}",
        "not available yet": "not available yet",
    }[note.status]


def as_text(found: Sequence[Row]) -> str:
    """Rows as aligned lines."""
    columns = [(row.path, show(row.value), row.origin, row.remark) for row in found]
    widths = [max((len(column[at]) for column in columns), default=0) for at in range(3)]
    lines = (
        "  ".join([*(text.ljust(w) for text, w in zip(column, widths, strict=False)), column[3]]) for column in columns
    )
    return "\n".join(line.rstrip() for line in lines)
