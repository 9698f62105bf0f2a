"""What a docstring lists under `Args:` are parameters of its function, or fields of its class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import definitions, trees

ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):")


def listed(docstring: str) -> list[str]:
    """The names under `Args:`; two may share an entry."""
    section = re.search(r"^Args:\n((?:(?: {4}.*)?\n)+)", docstring + "\n", re.MULTILINE)
    entries = [ENTRY.match(line) for line in (section.group(1).splitlines() if section else [])]
    return [name.lstrip("*") for entry in entries if entry for name in entry.group(1).split(", ")]


def parameters(node: ast.AST) -> set[str] | None:
    """Of a function, of a class by its `__init__` or its fields; None: the class has neither."""
    if isinstance(node, ast.ClassDef):
        init = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
        if init is not None:
            return parameters(init)
        fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
        return {field.id for field in fields if isinstance(field, ast.Name)} or None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in every if arg is not None}


def strange(tree: ast.Module) -> Iterator[str]:
    """Entries that are no parameters."""
    for name, node in definitions(tree):
        known = parameters(node)
        for entry in listed(ast.get_docstring(node) or ""):  # type: ignore[arg-type]
            if known is not None and entry not in known:
                yield f"{name}: {entry}"


def test_arguments_that_are_documented_are_there() -> None:
    assert [f"{path}, {entry}" for path, tree in trees().items() for entry in strange(tree)] == []


def test_one_that_is_not_is_seen() -> None:
    text = 'def f(a, *rest):\n    """F.\n\n    Args:\n        a, b: two.\n        rest: others.\n    """\n'
    assert list(strange(ast.parse(text))) == ["f: b"]
