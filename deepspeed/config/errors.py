"""Problems of a configuration, one line each, and the error that lists them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed.config.base_model import Section
from deepspeed.config.schema import child_of, sections_by_path, spellings
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError, NotAvailableError

_LONGEST_VALUE = 60
_TYPO = 2  # so few edits from a key, and a name is that key, spelled wrong


@dataclass(frozen=True)
class Problem:
    """Problem of a configuration: `text` is its line in the error; `kind` selects the class of the error."""

    text: str
    kind: Literal["wrong", "batch", "unavailable"] = "wrong"


def show(value: object) -> str:
    """Format a value as JSON, shortened to 60 characters; a value that JSON cannot express as its type's name."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def wrong(path: str, value: object, text: str) -> Problem:
    """Create the problem of the value at a path; `text` says what is wrong."""
    return Problem(f"{path} = {show(value)}: {text}")


def nearest(name: str, section: type[Section]) -> str:
    """Return a suggestion for an unknown key of a section: its correct block, the most similar name, or the keys."""
    siblings = spellings(section)
    homes = [path for path in _homes(name) if path]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if homes and len(homes) <= 3:
        return "it belongs at " + " or ".join(f'"{path}"' for path in homes)
    if close:
        return f'did you mean "{close[0]}"?'
    everywhere = {spelling for block in sections_by_path().values() for spelling in spellings(block)}
    close = difflib.get_close_matches(name, sorted(everywhere), n=1, cutoff=0.75)
    if close:
        return f'did you mean "{_homes(close[0])[0]}"?'
    if section is sections_by_path()[""]:
        return "no key has a similar name; see docs/configuration.md"
    return "the keys here are " + ", ".join(sorted(section.model_fields))


def near(name: str, value: object, section: type[Section]) -> str | None:
    """Return the key of a section that `name` probably misspells, or None.

    At most two edits are allowed, and at most half the name's length, so that short names do not match every key. The
    name of a block is not suggested if `value` is a text.
    """
    edits = min(_TYPO, len(name) // 2)
    for spelling, (field, _) in spellings(section).items():
        if abs(len(spelling) - len(name)) <= edits and _edits(name, spelling) <= edits:
            child = child_of(section.model_fields[field])
            if child is None or not isinstance(value, str):
                return spelling
    return None


def _edits(left: str, right: str) -> int:
    """Return the Levenshtein distance of two texts."""
    row = list(range(len(right) + 1))
    for row_index, letter in enumerate(left, 1):
        before, row = row, [row_index]
        for to, other in enumerate(right, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (letter != other)))
    return row[-1]


def _homes(name: str) -> list[str]:
    return [
        f"{path}.{name}" if path else name for path, section in sections_by_path().items() if name in spellings(section)
    ]


def raise_for(problems: Sequence[Problem]) -> None:
    """Raise one error that lists all problems, if there are any.

    Raises:
        BatchSizeError: every problem is about the three batch sizes.
        NotAvailableError: every problem is about an unavailable feature.
        DeepSpeedConfigError: any other combination.
    """
    if not problems:
        return
    kinds = {problem.kind for problem in problems}
    error = DeepSpeedConfigError
    if len(kinds) == 1:
        error = {"batch": BatchSizeError, "unavailable": NotAvailableError}.get(problems[0].kind, error)
    lines = list(dict.fromkeys(problem.text for problem in problems))
    if len(lines) == 1:
        raise error(f"The configuration has a problem: {lines[0]}")
    raise error(f"The configuration has {len(lines)} problems:\n  " + "\n  ".join(lines))
