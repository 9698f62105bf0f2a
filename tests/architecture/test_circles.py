"""No module knows, through others, one that knows it: imports form no circle, those for types alone counted too."""

from __future__ import annotations

import ast
from pathlib import PurePosixPath

from tests.architecture.sources import trees


def _name(path: str) -> str:
    parts = ["deepspeed", *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules that a module imports anywhere, also inside functions and under `TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that can all reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for module in graph[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        return seen

    reached = {module: reach(module) for module in graph}
    found = {frozenset(o for o in reached[m] if m in reached[o]) for m in graph if m in reached[m]}
    return sorted(sorted(circle) for circle in found)


def test_imports_form_no_circle() -> None:
    sources = {_name(path): tree for path, tree in trees().items()}
    graph = {name: _imports(tree, set(sources)) - {name} for name, tree in sources.items()}
    assert sum(map(len, graph.values())) > 300  # it looks at something
    assert circles(graph) == []


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
