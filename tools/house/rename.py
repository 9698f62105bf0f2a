"""Renames classes, functions and members by a table, wherever they are named.

python -m tools.house.rename [--table tools/house/renames.tsv] [--dry-run]

A row of the table is `symbol<TAB>new name[<TAB>options]`. A symbol is a class, function or variable of a module
(`Member`), or a member of a class (`ShardGroup.free`); in front may stand the room, or the room and the module's last
name (`zero:Plan`, `zero.prefetch:_Pass`), where a name alone would mean several. Files may move between two runs: rows
name no path.

Names of modules are followed through imports and scopes. The type of what stands before a dot is not known, so members
are renamed by where they stand: `self.member` inside the class; `Class.member`; anything else if every class of the
package that has such a member is in the table with the same new name, or inside the room if every class of the room
is. Uses that neither rule decides are reported. Options, separated by spaces:

    in=PREFIX[:RECEIVER]   rename the member in files below PREFIX too, where the text before the dot matches RECEIVER
    not=PREFIX[:RECEIVER]  and there leave it
    own                    `self.member` inside the class only
    text=PATH              the name means this one in that page or C++ file
    alias                  keep the old name of a class or function importable

Comments, docstrings and pages follow where a name stands in backticks, behind a dot, or cannot be an English word.
`texts.tsv` beside the table has what is left: text as it is after the renames, and what it becomes.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ("deepspeed/", "tests/", "benchmarks/", "examples/", "tools/", "website/")
LEFT_ALONE = (
    "tools/house/",
    "docs/renames.md",
    "CHANGELOG.md",
    "tests/golden/checkpoints",
    "tests/architecture/public_names.txt",
    "examples/quickstart",
)
TEXTS = {".md", ".toml", ".txt", ".yml", ".cfg", ".cpp", ".h", ""}
SETTERS = {"setattr", "getattr", "hasattr", "delattr", "object", "patch", "spy"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Row:
    """A line of the table."""

    room: str
    stem: str
    owner: str
    old: str
    new: str
    options: list[str]
    line: int
    uses: int = 0
    modules: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = ".".join(filter(None, (self.room, self.stem)))
        return f"{where + ':' if where else ''}{self.owner + '.' if self.owner else ''}{self.old}"


@dataclass
class Source:
    """A Python file."""

    path: str
    text: str
    tree: ast.Module
    module: str
    defined: set[str] = field(default_factory=set)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    edits: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    exported: set[object] = field(default_factory=set)

    @property
    def room(self) -> str:
        return room_of(self.module)


def room_of(module: str) -> str:
    """The first folder below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "deepspeed" else ""


def read_table(path: Path) -> list[Row]:
    """Rows of the table; empty lines and comments are skipped."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        symbol, new, *options = line.split("\t")
        where, _, name = symbol.rpartition(":")
        room, _, stem = where.partition(".")
        owner, _, old = name.rpartition(".")
        rows.append(Row(room, stem, owner, old, new.strip(), " ".join(options).split(), number))
    return rows


def list_files() -> list[str]:
    """Files of the repository, new ones too."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({f for f in files if (ROOT / f).is_file() and not f.startswith(LEFT_ALONE)})


def read_sources(files: list[str]) -> dict[str, Source]:
    """Python files by module name."""
    sources = {}
    for path in files:
        if not path.endswith(".py") or not (path.startswith(PYTHON) or "/" not in path):
            continue
        text = (ROOT / path).read_bytes().decode()
        parts = path[:-3].split("/")
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = Source(path, text, ast.parse(text), module)
        source.starts = [0]
        for line in text.encode().splitlines(keepends=True):
            source.starts.append(source.starts[-1] + len(line))
        source.defined, source.imports = bindings(source.tree.body, source)
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                source.exported = {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
        sources[module] = source
    return sources


def bindings(body: list[ast.stmt], source: Source) -> tuple[set[str], dict[str, tuple[str, str | None]]]:
    """Names that statements bind in their own scope: definitions and variables, and imports."""
    names: set[str] = set()
    imports: dict[str, tuple[str, str | None]] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            return
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(imported_names(node, source))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in body:
        visit(statement)
    return names, imports


def imported_names(node: ast.Import | ast.ImportFrom, source: Source) -> dict[str, tuple[str, str | None]]:
    """What an import binds: the module, and the name in it."""
    if isinstance(node, ast.Import):
        names = ((a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names)
        return {name: (module, None) for name, module in names}
    base = node.module or ""
    if node.level:
        package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}".rstrip(".")
    return {a.asname or a.name: (base, a.name) for a in node.names}


class Resolver:
    """Finds which module defines a name, through imports."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources

    def name(self, module: str, name: str, depth: int = 0) -> tuple[str, str] | None:
        """(module, name) of the definition; (module, "") where the name is a module."""
        source = self.sources.get(module)
        if source is None or depth > 12:
            return None
        if name in source.defined:
            return module, name
        if name in source.imports:
            return self.imported(source.imports[name], depth)
        return (f"{module}.{name}", "") if f"{module}.{name}" in self.sources else None

    def imported(self, target: tuple[str, str | None], depth: int = 0) -> tuple[str, str] | None:
        """What an import brings."""
        module, name = target
        if name is None:
            return (module, "") if module in self.sources else None
        if (found := self.name(module, name, depth + 1)) is not None:
            return found
        return (f"{module}.{name}", "") if f"{module}.{name}" in self.sources else None


class Renamer:
    """Collects edits of all files."""

    def __init__(self, rows: list[Row], sources: dict[str, Source]) -> None:
        self.rows, self.sources = rows, sources
        self.resolver = Resolver(sources)
        self.unresolved: list[str] = []
        self.problems: list[str] = []
        self.symbols: dict[tuple[str, str], Row] = {}  # (module, name) of top-level names
        self.members: dict[str, list[Row]] = defaultdict(list)
        self.classes: dict[str, list[str]] = defaultdict(list)  # class name: modules
        self.bases: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.definers: dict[str, set[tuple[str, str]]] = defaultdict(set)  # member: (module, class)
        self.package = [source for source in sources.values() if source.path.startswith("deepspeed/")]
        self.bound: set[str] = set()  # names of parameters, variables and members of the package
        self._index()
        self._match()
        self._check_members()

    def _index(self) -> None:
        for source in self.package:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name].append(source.module)
                    for name in class_members(node):
                        self.definers[name].add((source.module, node.name))
                elif isinstance(node, ast.arg):
                    self.bound.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.bound.add(node.id)
        for source in self.sources.values():
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef):
                    bases = [self.expression(source, base) for base in node.bases]
                    self.bases[source.module, node.name] = [base for base in bases if base and base[1]]

    def expression(self, source: Source, node: ast.AST) -> tuple[str, str] | None:
        """What a name or a dotted name means at the top of a module."""
        if isinstance(node, ast.Subscript):
            return self.expression(source, node.value)
        if isinstance(node, ast.Name):
            return self.resolver.name(source.module, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.expression(source, node.value)) and not owner[1]:
            return self.resolver.name(owner[0], node.attr)
        return None

    def _match(self) -> None:
        """Find what each row names."""
        for row in self.rows:
            wanted = row.owner or row.old
            modules = [
                source.module
                for source in self.package
                if (not row.room or source.room == row.room)
                and (not row.stem or source.module.rpartition(".")[2] in row.stem.split("|"))
                and (wanted in source.defined or source.module in self.classes.get(wanted, ()))
            ]
            if not row.owner:
                modules = [m for m in modules if row.old in self.sources[m].defined]
            if wanted == "*":
                modules = sorted({m for m, _ in self.definers[row.old] if not row.room or room_of(m) == row.room})
            if len(modules) != 1 and wanted != "*":
                self.problems.append(f"{row} (line {row.line}): defined in {modules or 'no module'}")
                continue
            row.modules = modules
            if row.owner:
                if wanted != "*" and (modules[0], row.owner) not in self.definers[row.old]:
                    self.problems.append(f"{row} (line {row.line}): the class has no such member")
                    continue
                self.members[row.old].append(row)
            else:
                self.symbols[modules[0], row.old] = row
        taken = {name for source in self.package for name in source.defined}
        for (module, _), row in self.symbols.items():
            if row.new in self.classes and not any(r.old == row.new for r in self.symbols.values()):
                self.problems.append(f"{row}: a class {row.new} is there already ({self.classes[row.new]})")
            elif row.new in taken and row.new in self.sources[module].defined:
                if (module, row.new) not in self.symbols:
                    self.problems.append(f"{row}: {module} has {row.new} already")

    def _check_members(self) -> None:
        for rows in list(self.members.values()):
            for row in rows:
                for owner in self.definers[row.old] & self.definers.get(row.new, set()):
                    if self.row_of_class(row.old, *owner) is row and self.row_of_class(row.new, *owner) is None:
                        self.problems.append(f"{row}: {owner[1]} has {row.new} already")

    # members

    def owned(self, row: Row, module: str, name: str, seen: int = 0) -> bool:
        """Whether a class is the row's, or one below it."""
        if module in row.modules and row.owner in (name, "*"):
            return True
        return seen < 8 and any(self.owned(row, *base, seen + 1) for base in self.bases.get((module, name), []))

    def row_of_class(self, member: str, module: str, name: str) -> Row | None:
        """The row for a member of a class."""
        return next((row for row in self.members.get(member, ()) if self.owned(row, module, name)), None)

    def everywhere(self, member: str, room: str | None) -> Row | None:
        """The row that holds for any object of the package, or of a room."""
        rows = [row for row in self.members.get(member, ()) if "own" not in row.options]
        definers = [d for d in self.definers[member] if room is None or room_of(d[0]) == room]
        if not rows or not definers or len({row.new for row in rows}) > 1 and room is None:
            return None
        found = {row.new: row for d in definers if (row := self.row_of_class(member, *d))}
        if len(found) != 1 or any(self.row_of_class(member, *d) is None for d in definers):
            return None
        (row,) = found.values()
        return None if "own" in row.options else row

    def member_by_place(self, source: Source, member: str, receiver: str, line: int) -> Row | None:
        """The row for `receiver.member`, told by file and text."""
        rows = self.members.get(member, [])
        for row in rows:
            for option in row.options:
                kind, _, rest = option.partition("=")
                prefix, _, pattern = rest.partition(":")
                if kind in ("in", "not") and source.path.startswith(prefix):
                    if re.fullmatch(pattern or ".*", receiver, re.S):
                        return row if kind == "in" else None
        if (row := self.everywhere(member, None)) is not None:
            return row
        if source.room and (row := self.everywhere(member, source.room)) is not None:
            return row
        if any("own" not in row.options for row in rows):
            there = {room_of(m) for m, _ in self.definers[member]}
            own = any(source.room == room_of(m) for r in rows for m in r.modules)
            if own or source.room not in there:
                text = source.text.splitlines()[line - 1].strip()
                self.unresolved.append(f"{source.path}:{line}: {receiver}.{member}: {text}")
        return None

    # edits

    def edit(self, source: Source, line: int, column: int, row: Row, new: str = "") -> None:
        """Replace a name at a byte position."""
        self.edit_at(source, source.starts[line - 1] + column, row, new)

    def edit_at(self, source: Source, at: int, row: Row, new: str = "") -> bool:
        old = row.old.encode()
        if source.text.encode()[at : at + len(old)] != old:
            return False
        if (at, at + len(old)) not in source.edits:
            row.uses += 1
        source.edits[at, at + len(old)] = (row.old, new or row.new)
        return True


def class_members(node: ast.ClassDef) -> Iterator[str]:
    """Names of methods, class variables, fields, and attributes of `self`."""
    for child in node.body:
        if isinstance(child, FUNCTIONS):
            yield child.name
            for inner in ast.walk(child):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                        yield inner.attr
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
                if isinstance(target, ast.Name) and target.id == "__slots__":
                    yield from (
                        c.value
                        for c in ast.walk(child.value)
                        if isinstance(c, ast.Constant) and isinstance(c.value, str)
                    )
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id


class FileVisitor(ast.NodeVisitor):
    """Walks one file with its scopes."""

    def __init__(self, renamer: Renamer, source: Source) -> None:
        self.renamer, self.source = renamer, source
        self.scopes: list[tuple[set[str], dict[str, tuple[str, str | None]]]] = []
        self.owners: list[str] = []
        self.strings: list[ast.JoinedStr] = []

    # scopes

    def lookup(self, name: str) -> tuple[str, str] | None:
        """What a name means here; None for locals and what is not ours."""
        for names, imports in reversed(self.scopes):
            if name in imports:
                return self.renamer.resolver.imported(imports[name])
            if name in names:
                return None
        return self.renamer.resolver.name(self.source.module, name)

    def meaning(self, node: ast.AST) -> tuple[str, str] | None:
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute) and (owner := self.meaning(node.value)) and not owner[1]:
            return self.renamer.resolver.name(owner[0], node.attr)
        return None

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        a = node.args
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.visit(decorator)
            if node.returns:
                self.visit(node.returns)
        self.visit(a)
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        if isinstance(node, ast.Lambda):
            self.scopes.append(({p.arg for p in parameters}, {}))
            self.visit(node.body)
        else:
            names, imports = bindings(node.body, self.source)
            outer = {n for s in ast.walk(node) if isinstance(s, ast.Global | ast.Nonlocal) for n in s.names}
            self.scopes.append(((names | {p.arg for p in parameters}) - outer, imports))
            for statement in node.body:
                self.visit(statement)
        self.scopes.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_function(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.definition(node)
        self.visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.definition(node)
        self.visit_function(node)

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        row = None
        if self.owners and self.owners[-1]:
            row = self.member(node.name, self.owners[-1])
            if (
                row is None
                and self.source.room == ""
                and isinstance(node, FUNCTIONS)
                and self.renamer.members.get(node.name)
            ):
                row = self.renamer.member_by_place(self.source, node.name, f"class {self.owners[-1]}", node.lineno)
        elif not self.scopes:
            row = self.renamer.symbols.get((self.source.module, node.name))
        if row is not None:
            word = {ast.ClassDef: "class", ast.FunctionDef: "def", ast.AsyncFunctionDef: "async def"}[type(node)]
            self.renamer.edit(self.source, node.lineno, node.col_offset + len(word) + 1, row)

    def member(self, name: str, owner: str) -> Row | None:
        rows = self.renamer.members.get(name)
        return self.renamer.row_of_class(name, self.source.module, owner) if rows else None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.definition(node)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.owners.append(node.name)
        for statement in node.body:
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
            for target in targets:
                if isinstance(target, ast.Name) and (row := self.member(target.id, node.name)):
                    self.renamer.edit(self.source, target.lineno, target.col_offset, row)
            if isinstance(statement, FUNCTIONS):
                self.visit(statement)
            else:
                self.owners.append("")
                self.visit(statement)
                self.owners.pop()
        self.owners.pop()

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.strings.append(node)
        self.generic_visit(node)
        self.strings.pop()

    def place(self, node: ast.expr, row: Row, attribute: bool = False) -> None:
        """Edit a name where it stands; positions inside f-strings are not exact."""
        if self.strings and sys.version_info < (3, 12):
            self.place_in_string(row, attribute)
        elif attribute:
            end = self.source.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            self.renamer.edit_at(self.source, end - len(row.old.encode()), row)
        else:
            self.renamer.edit(self.source, node.lineno, node.col_offset, row)

    def place_in_string(self, row: Row, attribute: bool) -> None:
        outer = self.strings[0]
        start = self.source.starts[outer.lineno - 1] + outer.col_offset
        end = self.source.starts[(outer.end_lineno or 0) - 1] + (outer.end_col_offset or 0)
        data = self.source.text.encode()
        before = rb"(?<=\.)" if attribute else rb"(?<![\w.])"
        for braces in re.finditer(rb"\{[^{}]*\}", data[start:end]):
            for match in re.finditer(before + re.escape(row.old.encode()) + rb"\b", braces.group()):
                self.renamer.edit_at(self.source, start + braces.start() + match.start(), row)

    # uses

    def visit_Name(self, node: ast.Name) -> None:
        if (found := self.lookup(node.id)) and found[1] == node.id and (row := self.renamer.symbols.get(found)):
            self.place(node, row)

    def visit_Global(self, node: ast.Global) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        _, imports = bindings([node], self.source)
        for alias in node.names:
            found = self.renamer.resolver.imported(imports[alias.asname or alias.name])
            if found and found[1] == alias.name and (row := self.renamer.symbols.get(found)):
                both = "alias" in row.options and alias.name in self.source.exported and not alias.asname
                self.renamer.edit(
                    self.source, alias.lineno, alias.col_offset, row, f"{row.new}, {row.old}" if both else ""
                )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if (found := self.meaning(node)) is not None:
            if found[1] == node.attr and (row := self.renamer.symbols.get(found)):
                self.place(node, row, attribute=True)
            return
        if node.attr not in self.renamer.members:
            return
        if (owner := self.meaning(node.value)) is not None:
            if owner[1] and (row := self.renamer.row_of_class(node.attr, *owner)):
                self.place(node, row, attribute=True)
            if not owner[1] or owner[1] in self.renamer.sources[owner[0]].defined:
                return
        current = next((name for name in reversed(self.owners) if name), "")
        receiver = ast.get_source_segment(self.source.text, node.value) or ""
        if receiver in ("self", "cls") and current:
            row = self.member(node.attr, current)
            if row is None and (self.source.module, current) in self.renamer.definers[node.attr]:
                return
            row = row or self.renamer.member_by_place(self.source, node.attr, receiver, node.lineno)
        else:
            row = self.renamer.member_by_place(self.source, node.attr, receiver, node.lineno)
        if row is not None:
            self.place(node, row, attribute=True)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if (owner := self.meaning(node.func)) is not None and owner[1]:
            for keyword in node.keywords:
                if keyword.arg in self.renamer.members and (row := self.renamer.row_of_class(keyword.arg, *owner)):
                    self.renamer.edit(self.source, keyword.lineno, keyword.col_offset, row)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for keyword in node.keywords:
            if called == "replace" and keyword.arg in self.renamer.members:
                if row := self.renamer.member_by_place(self.source, keyword.arg, "replace", node.lineno):
                    self.renamer.edit(self.source, keyword.lineno, keyword.col_offset, row)
        if called not in SETTERS or not node.args:
            return
        first = node.args[0]
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            self.patched(first, node.args[1])

    def patched(self, target: ast.expr, constant: ast.Constant) -> None:
        """`setattr(target, "name", …)`."""
        name = constant.value
        owner = self.meaning(target)
        row = None
        if owner and not owner[1]:
            found = self.renamer.resolver.name(owner[0], name)
            row = self.renamer.symbols.get(found) if found else None
        elif name in self.renamer.members:
            if owner:
                row = self.renamer.row_of_class(name, *owner)
            if row is None:
                text = ast.get_source_segment(self.source.text, target) or ""
                row = self.renamer.member_by_place(self.source, name, text, constant.lineno)
        if row is not None:
            self.renamer.edit(self.source, constant.lineno, constant.col_offset + 1, row)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        exported = any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        slots = any(isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets)
        owner = next((name for name in reversed(self.owners) if name), "")
        if exported or slots:
            for c in ast.walk(node.value):
                if isinstance(c, ast.Constant) and isinstance(c.value, str):
                    found = self.renamer.resolver.name(self.source.module, c.value) if exported else None
                    row = self.renamer.symbols.get(found) if found else self.member(c.value, owner) if slots else None
                    if row is not None:
                        both = exported and "alias" in row.options
                        new = f'{row.new}", "{row.old}' if both else ""
                        self.renamer.edit(self.source, c.lineno, c.col_offset + 1, row, new)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.generic_visit(node)
        if "__getattr__" not in self.source.defined:
            return
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found = self.renamer.resolver.name(self.source.module, key.value)
                if found and (row := self.renamer.symbols.get(found)):
                    same = ast.get_source_segment(self.source.text, value)
                    new = f'{row.new}": {same}, "{row.old}' if "alias" in row.options else ""
                    self.renamer.edit(self.source, key.lineno, key.col_offset + 1, row, new)


# texts

WORD = re.compile(r"(?<![\w])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def not_english(name: str) -> bool:
    """Whether a name cannot be a word of a sentence."""
    return "_" in name.strip("_") or name.startswith("_") or bool(re.search(r"[a-z0-9][A-Z]", name))


def docstring_owners(tree: ast.Module) -> dict[int, str]:
    """First lines of the docstrings of classes and their methods, with the class's name."""
    owners = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in (node, *(child for child in node.body if isinstance(child, FUNCTIONS))):
                first = inner.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    owners[first.lineno] = node.name
    return owners


class TextPass:
    """Names in comments, strings and pages."""

    def __init__(self, renamer: Renamer) -> None:
        self.renamer = renamer
        self.by_name: dict[str, list[tuple[str, Row]]] = defaultdict(list)
        for (module, name), row in renamer.symbols.items():
            self.by_name[name].append((module, row))
        self.defined: dict[str, set[str]] = defaultdict(set)
        for source in renamer.package:
            for name in source.defined:
                self.defined[name].add(source.module)
        self.report: list[str] = []

    def symbol(self, source: Source | None, path: str, parts: list[str]) -> tuple[int, Row] | None:
        """The part of a dotted name that a row renames, with the row."""
        for index, name in enumerate(parts):
            candidates = self.by_name.get(name, [])
            if candidates and index:
                row = self.behind_module(source, parts[:index], name, candidates)
            elif candidates:
                row = self.first(source, path, parts, candidates)
                if row is None:
                    return None
            if candidates and row is not None:
                return index, row
        return None

    def behind_module(
        self, source: Source | None, before: list[str], name: str, candidates: list[tuple[str, Row]]
    ) -> Row | None:
        """The row of `module.Name`, also where the module imports the name."""
        if found := self.renamer.resolver.name(".".join(before), name):
            return self.renamer.symbols.get(found)
        end = ".".join(before).removeprefix("deepspeed")
        fitting = [c for c in candidates if c[0].rpartition(".")[2] == before[-1] and c[0].endswith(end)]
        near = [c for c in fitting if source is not None and room_of(c[0]) == source.room]
        return (near or fitting)[0][1] if len(fitting) == 1 or len(near) == 1 else None

    def first(
        self, source: Source | None, path: str, parts: list[str], candidates: list[tuple[str, Row]]
    ) -> Row | None:
        """The row of `Name` or `Name.member`."""
        name = parts[0]
        if named := [row for _, row in candidates if f"text={path}" in row.options]:
            return named[0]
        if len(parts) > 1:
            having = {m for m, owner in self.renamer.definers.get(parts[1], ()) if owner == name}
            if fitting := [row for module, row in candidates if having == {module}]:
                return fitting[0]
        if source is not None and (found := self.renamer.resolver.name(source.module, name)):
            return self.renamer.symbols.get(found)
        if name in self.renamer.bound and (len(parts) == 1 or name.islower()):
            return None
        if path.endswith((".cpp", ".h")):
            return None
        if len(candidates) == 1 and len(self.defined[name]) == 1 and name[0] != "_":
            return candidates[0][1]
        near = [c for c in candidates if source is not None and room_of(c[0]) == source.room]
        others = [m for m in self.defined[name] if source is not None and room_of(m) == source.room]
        return near[0][1] if len(near) == 1 and len(others) == 1 else None

    def member(
        self, source: Source | None, parts: list[str], coded: bool, owner: str, entry: bool
    ) -> tuple[int, Row] | None:
        for index, name in enumerate(parts):
            rows = self.renamer.members.get(name)
            if not rows:
                continue
            if owner and source is not None and (not index or parts[0] == "self"):
                row = self.renamer.row_of_class(name, source.module, owner)
                if row is not None and (coded or entry or not_english(name)):
                    return index, row
            if index:
                owners = [r for r in rows if r.owner == parts[index - 1]]
                if len(owners) == 1:
                    return index, owners[0]
            if len(parts) == 1 and name in self.renamer.bound:
                continue
            if not_english(name) or (coded and source is not None):
                row = self.renamer.everywhere(name, None)
                if row is None and source is not None and source.room:
                    row = self.renamer.everywhere(name, source.room)
                if row is not None and not (len(parts) == 1 and name in self.by_name):
                    return index, row
        return None

    def replace(self, source: Source | None, text: str, where: str, owner: str = "") -> str:
        """A text with its names renamed."""
        spans = [m.span() for m in re.finditer(r"(`+)(?!`).*?(?<!`)\1(?!`)", text, re.S)]
        fences = [m.span() for m in re.finditer(r"^```.*?^```", text, re.S | re.M)]

        def one(match: re.Match[str]) -> str:
            parts = match.group().split(".")
            coded = any(a <= match.start() < b for a, b in (*spans, *fences))
            if not any(p in self.by_name or p in self.renamer.members for p in parts):
                return match.group()
            entry = text[: match.start()].rpartition("\n")[2].isspace() and text.startswith(":", match.end())
            member = self.member(source, parts, coded, owner, entry)
            edits = dict(filter(None, (self.symbol(source, where.rpartition(":")[0], parts), member)))
            if member and owner and entry:
                return member[1].new
            kept = list(parts)
            for index, row in edits.items():
                if coded or index or len(parts) > 1 and parts[0] == row.old or not_english(row.old):
                    if len(parts) > 1 or coded or not_english(row.old):
                        kept[index] = row.new
                        row.uses += 1
            if len(parts) == 1 and not coded and parts[0] in self.renamer.bound and kept != parts and not owner:
                self.report.append(
                    f"{where}+{text.count(chr(10), 0, match.start())}: {match.group()}, a variable's name too"
                )
                return match.group()
            if kept == parts and (coded or any(not_english(p) for p in parts)):
                line = text.count("\n", 0, match.start())
                if any(p in self.by_name for p in parts) or len(parts) > 1 and parts[-1] in self.renamer.members:
                    self.report.append(f"{where}+{line}: {match.group()}")
            return ".".join(kept)

        return WORD.sub(one, text)

    def python(self, source: Source) -> None:
        """Comments and strings of a file, as edits beside those of its names."""
        data = source.text.encode()
        lines = source.text.splitlines(keepends=True)
        taken = sorted(source.edits)
        owners = docstring_owners(source.tree)
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type not in (tokenize.COMMENT, tokenize.STRING):
                continue
            start = source.starts[token.start[0] - 1] + len(lines[token.start[0] - 1][: token.start[1]].encode())
            end = start + len(token.string.encode())
            if any(start <= a < end for a, _ in taken):
                continue
            if token.type == tokenize.STRING and re.match(r"[rRbBuU]*[fF]", token.string):
                continue
            body = token.string
            if re.fullmatch(r"[\"'][A-Za-z_]\w*[\"']", body):
                name = body[1:-1]
                row = self.renamer.everywhere(name, None) if not_english(name) else None
                if row is not None and source.path.startswith("tests/"):
                    source.edits[start + 1, end - 1] = (name, row.new)
                elif row is not None or name in self.by_name and not_english(name):
                    self.report.append(f"{source.path}:{token.start[0]}: string {body}")
                continue
            new = self.replace(source, body, f"{source.path}:{token.start[0]}", owners.get(token.start[0], ""))
            if new != body:
                source.edits[start, end] = (data[start:end].decode(), new)


def apply(source: Source) -> str:
    """The text with all edits."""
    data = source.text.encode()
    for (start, end), (old, new) in sorted(source.edits.items(), reverse=True):
        if data[start:end].decode() != old:
            raise SystemExit(f"{source.path}: {old!r} is not at {start}")
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def reopen(text: str) -> str:
    """Without `# fmt: skip` where a line has become too long: the formatter breaks it."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.end_lineno is not None:
            span = range(node.lineno - 1, node.end_lineno)
            if lines[span[-1]].rstrip().endswith("# fmt: skip") and any(len(lines[n].rstrip()) > 120 for n in span):
                lines[span[-1]] = re.sub(r"\s*# fmt: skip$", "", lines[span[-1]].rstrip()) + "\n"
    return "".join(lines)


def add_aliases(renamer: Renamer, texts: dict[str, str]) -> None:
    """`Old = New` behind the definition, for names that stay importable."""
    for (module, _), row in renamer.symbols.items():
        if "alias" in row.options:
            path = renamer.sources[module].path
            for node in ast.parse(texts[path]).body:
                if getattr(node, "name", "") == row.new:
                    lines = texts[path].splitlines(keepends=True)
                    lines.insert(
                        node.end_lineno or 0, f"\n\n{row.old} = {row.new}  # the former name, still importable\n"
                    )
                    texts[path] = "".join(lines)


def collisions(renamer: Renamer) -> None:
    """New names that a file binds already."""
    for source in renamer.sources.values():
        bound: set[str] = set(source.defined) | set(source.imports)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
        gone = {row.old for (module, _), row in renamer.symbols.items() if module == source.module}
        gone |= {
            name
            for name, target in source.imports.items()
            if (found := renamer.resolver.imported(target)) and found in renamer.symbols
        }
        symbols = {row.new: row.old for row in renamer.symbols.values()}
        for old, new in sorted(set(source.edits.values())):
            if symbols.get(new) == old and new in bound - gone:
                renamer.problems.append(f"{source.path}: {old} -> {new}, which the file binds already")


def new_texts(renamer: Renamer, texts_pass: TextPass, files: list[str], table: Path) -> dict[str, str]:
    """What files become, by path."""
    texts: dict[str, str] = {}
    for source in renamer.sources.values():
        texts_pass.python(source)
        if source.edits:
            texts[source.path] = reopen(apply(source))
    for path in files:
        content = b"\0" if path.endswith(".py") or Path(path).suffix not in TEXTS else (ROOT / path).read_bytes()
        if b"\0" not in content:
            old = content.decode()
            if (new := texts_pass.replace(None, old, f"{path}:1")) != old:
                texts[path] = new
    add_aliases(renamer, texts)
    for line in (table.parent / "texts.tsv").read_text().splitlines():
        old, new = line.split("\t")
        for path in [path for path, text in texts.items() if old in text]:
            texts[path] = texts[path].replace(old, new)
    return texts


def main() -> int:
    """Rename, and report what needs an eye."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, default=ROOT / "tools/house/renames.tsv")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    files = list_files()
    renamer = Renamer(read_table(options.table), read_sources(files))
    for source in renamer.sources.values():
        FileVisitor(renamer, source).visit(source.tree)
    collisions(renamer)
    texts_pass = TextPass(renamer)
    texts = new_texts(renamer, texts_pass, files, options.table)
    for title, lines in (
        ("problems", renamer.problems),
        ("members that no rule decides", sorted(set(renamer.unresolved))),
        ("texts that no rule decides", sorted(set(texts_pass.report))),
        ("rows without a use", [str(row) for row in renamer.rows if not row.uses]),
    ):
        print(f"== {title}: {len(lines)}")
        print("".join(f"{line}\n" for line in lines), end="")
    print(f"== {len(texts)} files, {sum(row.uses for row in renamer.rows)} names")
    if not options.dry_run:
        for path, text in texts.items():
            (ROOT / path).write_bytes(text.encode())
    return bool(renamer.problems)


if __name__ == "__main__":
    raise SystemExit(main())
