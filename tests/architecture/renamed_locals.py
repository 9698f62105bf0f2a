"""What locals named by how they came about are called now: `python -m tests.architecture.renamed_locals [REVISION]`.

Functions of a commit (by default the last tree before the moves) are matched with those of today: by path, which
`docs/renames.md` translates, and qualified name; else by a qualified name that both trees have once. In each pair, a
name of `HISTORY` that has left was replaced, and a name that came may be its replacement.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.architecture.measure import HISTORY, package_at
from tests.architecture.sources import ROOT

BEFORE_THE_MOVES = "4dfb887"
VAGUE = "result value item data obj tmp x out".split()
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)

Places = dict[tuple[str, str], set[str]]  # locals by path and qualified name of a function


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Variables and parameters of a function, without those of functions inside of it."""
    pending: list[ast.AST] = [function.args, *function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        pending += ast.iter_child_nodes(node)


def functions(texts: dict[str, str], moved: dict[str, str]) -> Places:
    """The functions of a tree with their locals; a path that has moved is the new one."""
    places: Places = {}

    def visit(node: ast.AST, path: str, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                places.setdefault((path, f"{prefix}{child.name}"), set()).update(_bound(child))
            visit(child, path, inner)

    for path, text in texts.items():
        visit(ast.parse(text), moved.get(path, path), "")
    return places


def pairs(before: Places, now: Places) -> Iterator[tuple[set[str], set[str]]]:
    """Locals of each function that both trees have: before, and now."""
    by_name: dict[str, list[set[str]]] = defaultdict(list)
    for (_, name), names in now.items():
        by_name[name].append(names)
    once = Counter(name for _, name in before)
    for (path, name), names in before.items():
        if (path, name) in now:
            yield names, now[path, name]
        elif once[name] == len(by_name[name]) == 1:
            yield names, by_name[name][0]


def main() -> int:
    revision = sys.argv[1] if len(sys.argv) > 1 else BEFORE_THE_MOVES
    moved = dict(_ROW.findall((ROOT / "docs" / "renames.md").read_text()))
    before, now = functions(package_at(revision), moved), functions(package_at(None), {})
    had = sum(len(names & set(HISTORY)) for names in before.values())
    left, came = 0, Counter[str]()
    for old, new in pairs(before, now):
        gone = (old - new) & set(HISTORY)
        if gone:
            left += len(gone)
            came.update(new - old)
    vague = {name: came[name] for name in VAGUE if came[name]}
    share = sum(vague.values()) / max(came.total(), 1)
    print(f"{had} locals named by how they came about at {revision}; {left} of them in functions that are there today")
    print(f"{came.total()} names came in these functions; vague ones: {sum(vague.values())}, {share:.1%}: {vague}")
    print(f"vague ones for each local that left: {sum(vague.values()) / max(left, 1):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
