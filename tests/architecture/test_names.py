"""A class name means one thing: none stands twice in the package, private ones included."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.architecture.sources import ROOT, trees

FROZEN = (ROOT / "tests/architecture/public_names.txt").read_text().splitlines()
# Names of upstream's interface at addresses of upstream's: both stay.
_UPSTREAM = {"DeepSpeedTPConfig", "QuantizationConfig"}


def _classes(sources: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Class names with the files that define them."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in sorted(sources.items()):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return places


def duplicates(sources: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Names that several classes have."""
    return {name: places for name, places in _classes(sources).items() if len(places) > 1}


def test_no_class_name_stands_twice() -> None:
    twice = {name: places for name, places in duplicates(trees()).items() if name not in _UPSTREAM}
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in twice.items())


def test_the_exceptions_are_upstreams_names_and_still_stand_twice() -> None:
    assert set(duplicates(trees())) >= _UPSTREAM
    frozen = {line.partition("(")[0].rpartition(".")[2] for line in FROZEN}
    assert frozen >= _UPSTREAM


def test_a_class_that_stands_twice_is_seen() -> None:
    one, other = ast.parse("class A: ...\nclass B: ..."), ast.parse("def f():\n    class A: ...")
    assert duplicates({"a.py": one, "b.py": other}) == {"A": ["a.py:1", "b.py:2"]}
