"""Rewrites references to moved modules and renamed names, in Python files and in text."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field

from tools.house.scopes import Names, Scope

PACKAGE = "deepspeed"
_DOTTED = re.compile(r"(?<![\w./-])deepspeed(?:\.[A-Za-z_]\w*)+")
_IMPORT = re.compile(r"\bfrom (deepspeed(?:\.\w+)*) import (\w+)(?: as (\w+))?(?!\w|\s*,)")
_PATH = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*?)(deepspeed/)?((?:[a-z_0-9]+/)+[a-z_0-9]+)\.py\b")
_BARE = re.compile(r"`([a-z_0-9]+)\.py`")
_SHORT = re.compile(r"`(deepspeed/)?((?:[a-z_0-9]+/)+[a-z_0-9]+)`")


@dataclass
class Moves:
    """What moves where.

    Args:
        modules: dotted name of each moved module, to its new one.
        names: module-level names that change: (old module, name) to the new name.
        known: dotted names of all modules of the package as it is before the moves.
        bare: file names that one moved file alone has, without ending, to the new ones.
    """

    modules: dict[str, str]
    names: dict[tuple[str, str], str]
    known: set[str]
    bare: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def path(self, old: str) -> str | None:
        """New place of `room/file` without the ending."""
        new = self.modules.get(f"{PACKAGE}.{old.replace('/', '.')}")
        return None if new is None else new.split(".", 1)[1].replace(".", "/")

    def dotted(self, name: str) -> str:
        """A dotted name with its longest moved module replaced."""
        parts = name.split(".")
        for cut in range(len(parts), 1, -1):
            old = ".".join(parts[:cut])
            if old in self.modules:
                rest = parts[cut:]
                if rest:
                    rest[0] = self.names.get((old, rest[0]), rest[0])
                return ".".join([self.modules[old], *rest])
            if old in self.known:
                break  # the module itself stays
        return name

    def text(self, text: str, short: bool = False) -> str:
        """Text with module names and paths replaced.

        Args:
            text: of any kind.
            short: paths in backticks count without their ending too.
        """

        def from_import(match: re.Match[str]) -> str:
            package, name, alias = match[1], match[2], match[3]
            new = self.modules.get(f"{package}.{name}")
            if new is None:
                return match[0]
            above, stem = new.rsplit(".", 1)
            return f"from {above} import {stem} as {alias or name}"

        def path(match: re.Match[str]) -> str:
            new = self.path(match[3])
            return match[0] if new is None else f"{match[1]}{match[2] or ''}{new}.py"

        def short_path(match: re.Match[str]) -> str:
            new = self.path(match[2])
            return match[0] if new is None else f"`{match[1] or ''}{new}`"

        text = _IMPORT.sub(from_import, text)
        text = _DOTTED.sub(lambda match: self.dotted(match[0]), text)
        text = _PATH.sub(path, text)
        if short:
            text = _SHORT.sub(short_path, text)
            text = _BARE.sub(lambda match: f"`{self.bare.get(match[1], match[1])}.py`", text)
        return text


@dataclass
class _Alias:
    """A local name that an import of something moved binds."""

    old: str  # the old module
    local: str
    new_local: str
    is_module: bool
    own: bool = False  # it is in the file itself from now on


class PythonFile:
    """One Python file, rewritten for the moves.

    Args:
        path: for notes.
        source: its text.
        moves: what moves.
        module: its own dotted name before the moves; empty outside of the package.
        renamed_imports: names its imports get, where those of merged files would clash.
    """

    def __init__(
        self, path: str, source: str, moves: Moves, module: str = "", renamed_imports: dict[str, str] | None = None
    ) -> None:
        self.path, self.moves, self.module = path, moves, module
        self.new_module = moves.modules.get(module, module)
        self._forced = renamed_imports or {}
        self.data = source.encode()
        self.tree = ast.parse(source)
        self.names = Names(self.tree)
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.edits: dict[tuple[int, int], bytes] = {}
        self._aliases: dict[tuple[int, str], _Alias] = {}
        self._dropped = set[ast.AST]()

    def note(self, node: ast.AST, text: str) -> None:
        self.moves.notes.append(f"{self.path}:{getattr(node, 'lineno', 0)}: {text}")

    def rewritten(self) -> str:
        """The new text."""
        for node, scope in self.names.imports:
            self._collect(node, scope)
        self._settle_clashes()
        for node, _ in self.names.imports:
            self._rewrite_import(node)
        self._rewrite_uses()
        self._rewrite_own_names()
        self._rewrite_tokens()
        result = self.data
        last = len(result) + 1
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            if end > last:
                self.moves.notes.append(f"{self.path}: edits overlap near {result[start : start + 60]!r}")
                continue
            result = result[:start] + new + result[end:]
            last = start
        return result.decode()

    # -- imports --------------------------------------------------------------------------------------------------

    def _package_of(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.module.split(".")[: -node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _collect(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            found = self._alias_of(node, alias)
            if found is not None:
                if len({id(n) for n in scope.bindings.get(found.local, [])}) > 1:
                    others = [n for n in scope.bindings[found.local] if not isinstance(n, ast.Import | ast.ImportFrom)]
                    if others:  # also assigned: keep the name
                        found.new_local = found.local
                self._aliases[id(scope), found.local] = found

    def _alias_of(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> _Alias | None:
        modules = self.moves.modules
        if isinstance(node, ast.Import):
            new = modules.get(alias.name)
            if new is None or alias.asname is None:
                return None
            return _Alias(alias.name, alias.asname, alias.asname, True, new == self.new_module)
        package = self._package_of(node)
        full, local = f"{package}.{alias.name}", alias.asname or alias.name
        if full in self.moves.known:
            new = modules.get(full)
            if new is None:
                return None
            stem = new.rsplit(".", 1)[1]
            keep = alias.asname is not None and alias.asname != alias.name
            new_local = self._forced.get(local, local if keep else stem)
            return _Alias(full, local, new_local, True, new == self.new_module)
        if package in modules:
            name = self.moves.names.get((package, alias.name), alias.name)
            own = modules[package] == self.new_module
            new_local = name if own or alias.asname is None else alias.asname
            if not own and local in self._forced:
                new_local = self._forced[local]
            return _Alias(package, local, new_local, False, own)
        if local in self._forced:
            return _Alias(package, local, self._forced[local], False)
        return None

    def _settle_clashes(self) -> None:
        """Local names of modules must mean nothing else where they are used."""
        scopes = {id(scope): scope for _, scope in self.names.imports}
        for (key, local), alias in self._aliases.items():
            if alias.new_local == local or (alias.own and alias.is_module):
                continue
            scope = scopes[key]
            users = [used for node, used in self.names.uses if node.id == local and used.resolve(local) is scope]
            if any(self._means_other(alias, used, scope) for used in [scope, *users]):
                if alias.own:
                    self.moves.notes.append(
                        f"{self.path}: {local} of {alias.old} clashes with a local {alias.new_local}"
                    )
                    continue
                new = self.moves.modules.get(alias.old, alias.old).split(".")
                alias.new_local = f"{new[-2]}_{new[-1]}" if alias.is_module else local

    def _means_other(self, alias: _Alias, used: Scope, scope: Scope) -> bool:
        """Whether the new name of an alias has another meaning in a scope that uses it."""
        there = used.resolve(alias.new_local)
        if there is None:
            return any(
                node.id == alias.new_local and s.resolve(node.id) is None and _below(s, scope)
                for node, s in self.names.uses
            )
        other = self._aliases.get((id(there), alias.new_local))
        if other is not None and other.new_local != alias.new_local:
            return False  # that one is renamed itself
        if other is not None and self.moves.modules.get(other.old) == self.moves.modules.get(alias.old):
            return False
        if alias.own and there is self.names.top:
            return False
        return True

    def _rewrite_import(self, node: ast.Import | ast.ImportFrom) -> None:
        scope = next(scope for other, scope in self.names.imports if other is node)
        if isinstance(node, ast.Import):
            parts = [self._plain_import(node, alias, scope) for alias in node.names]
            old = [f"import {a.name}" + (f" as {a.asname}" if a.asname else "") for a in node.names]
            if [part for part in parts if part] != old:
                self._replace_statement(node, [part for part in parts if part])
            return
        kept: dict[str, list[str]] = {}
        changed = False
        package = self._package_of(node)
        for alias in node.names:
            found = self._aliases.get((id(scope), alias.asname or alias.name))
            if found is None or not self._is_of(found, package, alias):
                target, text = package, alias.name + (f" as {alias.asname}" if alias.asname else "")
                if package in self.moves.modules and alias.name == "*":
                    target, changed = self.moves.modules[package], True
            else:
                changed = True
                if found.own:
                    continue
                if found.is_module:
                    target, name = self.moves.modules[found.old].rsplit(".", 1)
                else:
                    target = self.moves.modules.get(package, package)
                    name = self.moves.names.get((package, alias.name), alias.name)
                text = name if name == found.new_local else f"{name} as {found.new_local}"
            if text not in kept.setdefault(target, []):
                kept[target].append(text)
        if changed:
            self._replace_statement(
                node, [f"from {target} import {', '.join(texts)}" for target, texts in kept.items()]
            )

    def _is_of(self, found: _Alias, package: str, alias: ast.alias) -> bool:
        return found.old == (f"{package}.{alias.name}" if found.is_module else package)

    def _plain_import(self, node: ast.Import, alias: ast.alias, scope: Scope) -> str:
        new = self.moves.modules.get(alias.name, alias.name)
        if new == self.new_module and alias.name in self.moves.modules:
            if alias.asname is None:
                self.note(node, f"imports itself: {alias.name}")
            return ""
        return f"import {new}" + (f" as {alias.asname}" if alias.asname else "")

    def _replace_statement(self, node: ast.Import | ast.ImportFrom, texts: list[str]) -> None:
        start, end = self._span(node)
        segment = self.data[start:end].decode()
        if "#" in segment:
            self.note(node, "a comment inside an import is lost")
        line_end = self.data.find(b"\n", end)
        trailing = self.data[end:line_end].decode()
        if not texts:
            parent = self.names.parents.get(node)
            body = next((b for b in _bodies(parent) if node in b), []) if parent is not None else []
            self._dropped.add(node)
            if body and set(body) <= self._dropped and not isinstance(parent, ast.Module):
                self.edits[start, end] = b"pass"
                if not (isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.unparse(parent.test)):
                    self.note(node, "a block is empty now")
                return
            self.edits[self._starts[node.lineno - 1], line_end + 1] = b""
            return
        indent = "\n" + " " * node.col_offset
        if "noqa" in trailing or "type:" in trailing or "pyright:" in trailing:
            self.edits[start, end] = indent.join([f"{text}{trailing}" for text in texts[:-1]] + texts[-1:]).encode()
        else:
            self.edits[start, end] = indent.join(texts).encode()

    # -- uses -----------------------------------------------------------------------------------------------------

    def _rewrite_uses(self) -> None:
        for node, scope in self.names.uses:
            if node.id == PACKAGE:
                self._rewrite_chain(node)
                continue
            home = scope.resolve(node.id)
            alias = None if home is None else self._aliases.get((id(home), node.id))
            if alias is None:
                continue
            parent = self.names.parents.get(node)
            if alias.is_module and isinstance(parent, ast.Attribute) and parent.value is node:
                name = self.moves.names.get((alias.old, parent.attr), parent.attr)
                if alias.own:
                    if scope.resolve(name) not in (self.names.top, None):
                        self.note(node, f"{node.id}.{parent.attr}: {name} means something else here")
                    if not isinstance(parent.ctx, ast.Load):
                        self.note(node, f"{node.id}.{parent.attr} is set: its own module's now")
                    self._edit(node, parent, name, f"{node.id}.{parent.attr}")
                else:
                    self._edit(node, node, alias.new_local, node.id)
                    if name != parent.attr:
                        self._edit_end(parent, name)
            else:
                if alias.is_module and alias.own:
                    self.note(node, f"{node.id} itself is used: it is this very module now")
                self._edit(node, node, alias.new_local, node.id)
                if alias.is_module:
                    self._rewrite_named(node, parent, alias.old)

    def _rewrite_named(self, node: ast.AST, parent: ast.AST | None, old: str) -> None:
        """`patch(module, "name")`: the string names something of the module."""
        if not isinstance(parent, ast.Call) or len(parent.args) < 2 or parent.args[0] is not node:
            return
        name = parent.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            new = self.moves.names.get((old, name.value))
            if new is not None:
                self.edits[self._span(name)] = f'"{new}"'.encode()

    def _rewrite_chain(self, node: ast.Name) -> None:
        chain: list[ast.Attribute] = []
        parent = self.names.parents.get(node)
        below: ast.AST = node
        while isinstance(parent, ast.Attribute) and parent.value is below:
            chain.append(parent)
            below, parent = parent, self.names.parents.get(parent)
        if not chain:
            return
        old = ".".join([PACKAGE, *(part.attr for part in chain)])
        new = self.moves.dotted(old)
        if new != old:
            self._edit(node, chain[-1], new, old)

    def _rewrite_own_names(self) -> None:
        """Names this file defines that get another name."""
        own = {name: new for (module, name), new in self.moves.names.items() if module == self.module and self.module}
        if not own:
            return
        top = self.names.top
        for node, scope in self.names.uses:
            if node.id in own and scope.resolve(node.id) is top and (id(top), node.id) not in self._aliases:
                self._edit(node, node, own[node.id], node.id)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in own:
                if node in top.bindings.get(node.name, []):
                    start = self.data.index(node.name.encode(), self._offset(node.lineno, node.col_offset) + 4)
                    self.edits[start, start + len(node.name.encode())] = own[node.name].encode()
            elif isinstance(node, ast.Global) and set(node.names) & set(own):
                self.edits[self._span(node)] = ("global " + ", ".join(own.get(n, n) for n in node.names)).encode()
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                for item in getattr(node.value, "elts", []):
                    if item.value in own:
                        self.edits[self._span(item)] = f'"{own[item.value]}"'.encode()

    # -- strings and comments -------------------------------------------------------------------------------------

    def _rewrite_tokens(self) -> None:
        for token in tokenize.generate_tokens(io.StringIO(self.data.decode()).readline):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            multiline = token.string.startswith(('"""', 'r"""'))
            new = self.moves.text(token.string, short=token.type == tokenize.COMMENT or multiline)
            if new == token.string:
                continue
            start = self._char_offset(*token.start)
            end = self._char_offset(*token.end)
            inside = [span for span in self.edits if start <= span[0] < end]
            if inside and any(self.edits[span] != self.data[span[0] : span[1]] for span in inside):
                if any(span != (start, end) for span in inside):
                    self.moves.notes.append(f"{self.path}:{token.start[0]}: a string with names and code in it")
                continue
            self.edits[start, end] = new.encode()

    # -- places ---------------------------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _char_offset(self, line: int, column: int) -> int:
        text = self.data[self._starts[line - 1] : self._starts[line]].decode()
        return self._starts[line - 1] + len(text[:column].encode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _edit(self, first: ast.AST, last: ast.AST, new: str, old: str) -> None:
        """Replace what stands from one node to the end of another, also inside of f-strings."""
        if new == old:
            return
        around = self._f_string(first)
        start, end = self._span(first)[0], self._span(last)[1]
        if around is None or (self.data[start:end].decode() == old and _within((start, end), self._span(around))):
            self.edits[start, end] = new.encode()
            return
        low, high = self._span(around)
        pattern = re.compile(rf"(?<![\w.'\"]){re.escape(old)}(?![\w'\"])".encode())
        places = [m for m in pattern.finditer(self.data, low, high) if _in_braces(self.data[low : m.start()])]
        if not places:
            self.note(first, f"{old} was not found in its f-string")
        for match in places:
            self.edits[match.start(), match.end()] = new.encode()

    def _edit_end(self, attribute: ast.Attribute, name: str) -> None:
        if self._f_string(attribute) is not None:
            self.note(attribute, f"{attribute.attr} in an f-string is {name} now")
        end = self._span(attribute)[1]
        self.edits[end - len(attribute.attr.encode()), end] = name.encode()

    def _f_string(self, node: ast.AST) -> ast.JoinedStr | None:
        outermost = None
        above: ast.AST | None = node
        while above is not None:
            if isinstance(above, ast.JoinedStr):
                outermost = above
            above = self.names.parents.get(above)
        return outermost


def _in_braces(before: bytes) -> bool:
    text = before.replace(b"{{", b"").replace(b"}}", b"")
    return text.count(b"{") > text.count(b"}")


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _below(scope: Scope | None, top: Scope) -> bool:
    while scope is not None:
        if scope is top:
            return True
        scope = scope.parent
    return False


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    return [b for n in ("body", "orelse", "finalbody") if isinstance(b := getattr(node, n, None), list)]
