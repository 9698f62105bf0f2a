"""What the tests import comes with the extra `dev`: an environment grown by hand hides what a fresh clone lacks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).resolve().parents[2]
OURS = {"deepspeed", "tests"}


def _named(name: str) -> str:
    return name.lower().replace("_", "-")


def _required(name: str) -> list[str]:
    """Of this project from its own file, since what is installed of it may be older."""
    if name != "deepspeed":
        return metadata.requires(name) or []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    marked = [
        f"{text}{' and' if ';' in text else ' ;'} extra == '{extra}'" for extra in extras for text in extras[extra]
    ]
    return [*project["dependencies"], *marked]


def _installed_by(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The distributions that `pip install name[extras]` brings, by what the installed ones require."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    found = {name}
    for text in _required(name):
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found |= _installed_by(_named(wanted.name), frozenset(wanted.extras), seen)
    return found


def _imported_on_load(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_extra_dev_installs_what_the_tests_import() -> None:
    installed = _installed_by("deepspeed", frozenset({"dev"}), set())
    owners = metadata.packages_distributions()
    missing: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module in _imported_on_load(path):
            if module in sys.stdlib_module_names or module in OURS or not owners.get(module):
                continue
            if not installed & {_named(owner) for owner in owners[module]}:
                missing[module] = path.relative_to(ROOT).as_posix()
    assert not missing, f"named by no requirement of pyproject.toml: {missing}"
