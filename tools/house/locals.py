"""Renames variables and parameters of functions by a table.

python -m tools.house.locals [--table tools/house/locals.tsv] [--dry-run] [--list ROOM ...]

A row is `room:function:old<TAB>new`, the function with its classes and outer functions (`ShardGroup.free`); names of
files do not count. All scopes inside follow (comprehensions, lambdas, inner functions that read the variable), so do
keyword arguments at calls of a function of that name, and the function's docstring and comments in backticks or as an
entry of `Args:`. Refused: a new name that the function uses already, and parameters of frozen functions. A row
holds for every function of that name in the room. `--list` shows what is still named by how it came about.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.house.rename import ROOT, Source, apply, list_files, read_sources

HISTORY = "found made one at told given kept said mine theirs".split()
VAGUE = "result value item data obj tmp x out".split()
FROZEN = ROOT / "tests/architecture/public_names.txt"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, AnyFunction]]:
    """Functions with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def parameters(function: AnyFunction | ast.Lambda) -> list[ast.arg]:
    """All parameters."""
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]


def own_nodes(function: AnyFunction) -> Iterator[ast.AST]:
    """What lies in a function, without inner functions' bodies."""
    pending: list[ast.AST] = [*parameters(function), *function.body]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, FUNCTIONS):
            pending += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        else:
            pending += ast.iter_child_nodes(node)


def bound(function: AnyFunction) -> dict[str, list[int]]:
    """Names that a function binds, with their lines."""
    names: dict[str, list[int]] = defaultdict(list)
    outer: set[str] = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id].append(node.lineno)
        elif isinstance(node, ast.arg):
            names[node.arg].append(node.lineno)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names[node.name].append(node.lineno)
        elif isinstance(node, ast.Nonlocal | ast.Global):
            outer |= set(node.names)
    return {name: lines for name, lines in names.items() if name not in outer}


class Locals:
    """Renames by one table."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self.problems: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.frozen = {line.partition("(")[0] for line in FROZEN.read_text().splitlines()}
        self.places: dict[str, list[tuple[Source, AnyFunction]]] = defaultdict(list)
        self.calls: dict[str, list[tuple[Source, ast.Call]]] = defaultdict(list)
        for source in sources.values():
            self.index_calls(source)
            if source.path.startswith("deepspeed/"):
                for name, function in functions(source.tree):
                    for variable in bound(function):
                        self.places[f"{source.room}:{name}:{variable}"].append((source, function))

    def index_calls(self, source: Source) -> None:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and node.keywords:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name == "partial" and node.args:
                    name = ast.unparse(node.args[0]).rpartition(".")[2]
                self.calls[name].append((source, node))

    def rename(self, key: str, new: str) -> None:
        """One row."""
        places = self.places.get(key, [])
        old = key.rpartition(":")[2]
        reasons = [reason for _, function in places if (reason := self.refusal(key.split(":")[1], function, old, new))]
        if not places or reasons:
            self.problems.append(f"{key} -> {new}: {'; '.join(reasons) or 'no function binds it'}")
            return
        for source, function in places:
            if any(a.arg == old for a in parameters(function)):
                self.keywords(function.name, old, new, key)
            self.scope(source, function, old, new)
            self.words(source, function, old, new)
        self.done.append((key, new))

    def refusal(self, name: str, function: AnyFunction, old: str, new: str) -> str:
        used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        used |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        used |= {n.name for n in ast.walk(function) if isinstance(n, FUNCTIONS) and n is not function}
        if new in used:
            return "the function uses that name already"
        if hasattr(builtins, new):
            return "it would hide a builtin"
        if any(a.endswith(f".{name}") for a in self.frozen) and any(a.arg == old for a in parameters(function)):
            return "a parameter of a frozen name"
        return ""

    def edit(self, source: Source, at: int, old: str, new: str) -> None:
        data = source.text.encode()
        if data[at : at + len(old.encode())] == old.encode():
            source.edits[at, at + len(old.encode())] = (old, new)
        else:
            self.problems.append(f"{source.path}: {old!r} is not at byte {at}")

    def scope(self, source: Source, node: ast.AST, old: str, new: str, string: ast.JoinedStr | None = None) -> None:
        """Rename inside a function, and inside the functions in it that read its variable."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS) and old in bound(child):
                for part in (*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)):
                    self.scope(source, ast.Expr(part), old, new, string)
                continue
            inside = string or (child if isinstance(child, ast.JoinedStr) else None)
            self.node(source, child, old, new, inside)
            self.scope(source, child, old, new, inside)

    def node(self, source: Source, node: ast.AST, old: str, new: str, string: ast.JoinedStr | None) -> None:
        if isinstance(node, ast.Name) and node.id == old:
            if string is not None and sys.version_info < (3, 12):
                self.in_string(source, string, old, new)
            else:
                self.edit(source, source.starts[node.lineno - 1] + node.col_offset, old, new)
        elif isinstance(node, ast.arg) and node.arg == old and string is None:
            self.edit(source, source.starts[node.lineno - 1] + node.col_offset, old, new)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.Nonlocal):
            if old in (getattr(node, "name", None), *getattr(node, "names", ())):
                start = source.starts[node.lineno - 1] + node.col_offset
                end = source.text.encode().index(b"\n", start)
                for match in re.finditer(rb"\b" + old.encode() + rb"\b", source.text.encode()[start:end]):
                    self.edit(source, start + match.start(), old, new)

    def in_string(self, source: Source, string: ast.JoinedStr, old: str, new: str) -> None:
        start = source.starts[string.lineno - 1] + string.col_offset
        end = source.starts[(string.end_lineno or 0) - 1] + (string.end_col_offset or 0)
        data = source.text.encode()[start:end]
        depth, opened = 0, 0
        for index, byte in enumerate(data):
            if byte == ord("{"):
                depth, opened = depth + 1, opened if depth else index
            elif byte == ord("}") and depth:
                depth -= 1
                if not depth:
                    for match in re.finditer(rb"(?<![\w.\"'])" + old.encode() + rb"\b(?![\"'])", data[opened:index]):
                        self.edit(source, start + opened + match.start(), old, new)

    def keywords(self, name: str, old: str, new: str, key: str) -> None:
        """Keyword arguments at calls of the function, or of its class."""
        function = key.split(":")[1]
        called = function.split(".")[-2] if name in ("__init__", "__new__") and "." in function else name
        for source, node in self.calls.get(called, ()):
            for keyword in node.keywords:
                if keyword.arg == old:
                    self.edit(source, source.starts[keyword.lineno - 1] + keyword.col_offset, old, new)

    def words(self, source: Source, function: AnyFunction, old: str, new: str) -> None:
        """The docstring's entry, and backticks in docstring and comments."""
        data = source.text.encode()
        start, end = source.starts[function.lineno - 1], source.starts[function.end_lineno or 0]
        pattern = rb"(?m)^\s+(%s):|`(%s)`" % (old.encode(), old.encode())
        spans = [
            (
                source.starts[c.lineno - 1] + c.col_offset,
                source.starts[(c.end_lineno or 0) - 1] + (c.end_col_offset or 0),
            )
            for c in ast.walk(function)
            if isinstance(c, ast.Constant) and isinstance(c.value, str)
        ]
        first = function.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            low, high = next((s for s in spans if s[0] >= source.starts[first.lineno - 1]), (0, 0))
            for match in re.finditer(pattern, data[low:high]):
                self.edit(source, low + match.start(match.lastindex or 1), old, new)
        for match in re.finditer(rb"#[^\n]*`(%s)`" % old.encode(), data[start:end]):
            self.edit(source, start + match.start(1), old, new)


def listed(work: Locals, rooms: list[str]) -> list[str]:
    """What is named by how it came about."""
    lines = []
    for key, places in work.places.items():
        room, _, variable = key.split(":")
        if variable in HISTORY and (not rooms or room in rooms):
            for source, function in places:
                text = source.text.splitlines()
                lines.append(
                    f"{key}\t{' || '.join(text[n - 1].strip()[:120] for n in sorted(set(bound(function)[variable])))}"
                )
    return lines


def main() -> int:
    """Rename, and report what could not be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, default=ROOT / "tools/house/locals.tsv")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--list", nargs="*", metavar="ROOM")
    options = parser.parse_args()
    work = Locals(read_sources(list_files()))
    if options.list is not None:
        print("\n".join(listed(work, options.list)))
        return 0
    for line in options.table.read_text().splitlines():
        if line and not line.startswith("#"):
            work.rename(*line.split("\t")[:2])
    if not options.dry_run:
        for source in work.sources.values():
            if source.edits:
                (ROOT / source.path).write_bytes(apply(source).encode())
    vague = Counter(new for _, new in work.done if new in VAGUE)
    print("".join(f"{problem}\n" for problem in work.problems), end="")
    print(f"== {len(work.done)} renamed, {len(work.problems)} not; vague: {vague.total()} ({dict(vague)})")
    return bool(work.problems)


if __name__ == "__main__":
    raise SystemExit(main())
