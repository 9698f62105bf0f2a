"""`make licences`: writes the page of the dependencies' licences from what is installed.

python -m tools.licences docs/licences.md
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tools.wheels import REPOSITORY

HEAD = """# Licences of the dependencies

Written by `make licences` from the metadata of what is installed: nothing of these packages is part of this one's
distributions. "Not stated" means that the package's metadata name no licence. The versions are those of
`constraints.txt` where it names one; torch is its CPU build, and its CUDA builds bring NVIDIA's packages under terms of
their own.
"""
# What is longer, in the field for a name, is the text of a licence.
_LONG = 60


def main() -> int:
    if sys.version_info < (3, 11):
        raise SystemExit("licences: Python 3.11 reads pyproject.toml; this is an older one")
    import tomllib

    (page,) = sys.argv[1:]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    always = _closure(project["dependencies"], set())
    parts = [HEAD, "## Always\n", _table(always, _direct(project["dependencies"]))]
    for extra, wanted in sorted(project["optional-dependencies"].items()):
        if extra == "dev":
            wanted = [line for line in wanted if not line.startswith("deepspeed")]
        more = _closure(wanted, set()) - always
        parts += [f"## Extra `{extra}`\n", _table(more | (_direct(wanted) & always), _direct(wanted))]
    Path(page).write_text("\n".join(parts))
    return 0


def _named(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _direct(lines: list[str]) -> set[str]:
    found = [Requirement(line) for line in lines]
    return {_named(one.name) for one in found if one.marker is None or one.marker.evaluate()}


def _closure(lines: list[str], seen: set[str], extras: tuple[str, ...] = ("",)) -> set[str]:
    """The distributions that pip brings for these requirements here."""
    for wanted in map(Requirement, lines):
        name = _named(wanted.name)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        mark = name + "".join(sorted(wanted.extras))
        if mark in seen:
            continue
        seen |= {name, mark}
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError as error:
            raise SystemExit(f"licences: {name} is not installed; `make licences` installs all") from error
        _closure(required, seen, tuple(wanted.extras) or ("",))
    return {name for name in seen if _is_installed(name)}


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.metadata(name)["Name"])
    except metadata.PackageNotFoundError:
        return False


def _table(names: set[str], direct: set[str]) -> str:
    rows = [f"| {name if name in direct else f'{name} (by others)'} | {licence(name)} |" for name in sorted(names)]
    return "\n".join(["| package | licence |", "|---|---|", *rows, ""])


def licence(name: str) -> str:
    """The licence that a package's metadata state: as an expression, by classifiers, or in words."""
    about = metadata.metadata(name)
    if about["License-Expression"]:
        return about["License-Expression"]
    classifiers = [line.split("::")[-1].strip() for line in about.get_all("Classifier", []) if "License ::" in line]
    words = (about["License"] or "").strip()
    if not words or len(words) > _LONG or "\n" in words:
        words = ", ".join(classifiers) or " ".join(words.split())[:_LONG]
    return words or "not stated"


if __name__ == "__main__":
    sys.exit(main())
