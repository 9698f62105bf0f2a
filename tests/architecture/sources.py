"""The package's files as syntax trees, read once for all checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


parsed = cache(ast.parse)  # by text: some checks have texts of commits too


@cache
def trees() -> dict[str, ast.Module]:
    """Path relative to the package, with `/`, to its tree."""
    package = ROOT / "deepspeed"
    return {path.relative_to(package).as_posix(): parsed(path.read_text()) for path in package.rglob("*.py")}


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class below `node` with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)
