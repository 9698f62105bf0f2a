"""Makes one file of several: one docstring, one block of imports, the bodies one behind the other."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.house.scopes import Names

SAME = "="  # instead of a new name: the definition equals that of an earlier file, and goes


@dataclass
class Part:
    """One file, taken apart.

    Args:
        docstring: its text.
        imports: statements at its top.
        typing: imports for types only.
        public: what `__all__` lists.
        body: everything else, as text.
        main: the block that runs it as a program.
    """

    docstring: str
    imports: list[str] = field(default_factory=list)
    typing: list[str] = field(default_factory=list)
    public: list[str] = field(default_factory=list)
    body: str = ""
    main: str = ""


def take_apart(source: str) -> Part:
    """The pieces of a file."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    part = Part(ast.get_docstring(tree, clean=True) or "")
    gone: set[int] = set()
    for index, node in enumerate(tree.body):
        span = range(node.lineno - 1, node.end_lineno or node.lineno)
        text = "".join(lines[i] for i in span).rstrip("\n")
        if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            pass
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            pass
        elif isinstance(node, ast.Import | ast.ImportFrom):
            part.imports.append(text)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not node.orelse:
            part.typing += [ast.unparse(n) for n in node.body if isinstance(n, ast.Import | ast.ImportFrom)]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            part.public += ast.literal_eval(node.value)
        elif isinstance(node, ast.If) and "__name__ ==" in ast.unparse(node.test):
            part.main = text
        else:
            continue
        gone |= set(span)
    part.body = "".join(line for i, line in enumerate(lines) if i not in gone).strip("\n")
    return part


def _first_paragraph(docstring: str) -> tuple[str, str]:
    first, _, rest = docstring.partition("\n\n")
    return " ".join(first.split()), rest.strip("\n")


def docstring_of(first: str, olds: list[str]) -> str:
    """A module docstring: the new first line, and what the old ones say below theirs.

    Args:
        first: the new line.
        olds: the old docstrings.
    """
    rest = [text for text in (_first_paragraph(old)[1] for old in olds) if text]
    text = "\n\n".join([first, *rest])
    raw = "r" if "\\" in text else ""
    return f'{raw}"""{text}\n"""' if rest else f'{raw}"""{text}"""'


def with_docstring(source: str, first: str) -> str:
    """A file whose docstring begins with another line."""
    tree = ast.parse(source)
    node = tree.body[0]
    lines = source.splitlines(keepends=True)
    new = docstring_of(first, [ast.get_docstring(tree, clean=True) or ""])
    return "".join([*lines[: node.lineno - 1], new + "\n", *lines[node.end_lineno :]])


def joined(sources: list[str], first: str) -> str:
    """One file of several.

    Args:
        sources: in the order in which their bodies follow each other.
        first: first line of the docstring.
    """
    parts = [take_apart(source) for source in sources]
    imports = list(dict.fromkeys(text for part in parts for text in part.imports))
    bound = {item for text in imports for item in _bound_by(text)}
    typing = [text for text in dict.fromkeys(t for part in parts for t in part.typing)]
    typing = [text for text in (_without(text, bound) for text in typing) if text]
    public = sorted({name for part in parts for name in part.public}, key=lambda n: (not n.isupper(), n))
    mains = [part.main for part in parts if part.main]
    pieces = [docstring_of(first, [part.docstring for part in parts]), "from __future__ import annotations"]
    pieces.append("\n".join(imports))
    if typing:
        if not any("TYPE_CHECKING" in text for text in imports):
            pieces[-1] += "\nfrom typing import TYPE_CHECKING"
        pieces.append("if TYPE_CHECKING:\n" + "\n".join(f"    {text}" for text in typing))
    if public:
        pieces.append(f"__all__ = {public!r}")
    pieces += [part.body for part in parts if part.body]
    pieces += mains
    return "\n\n\n".join(piece for piece in pieces if piece) + "\n"


def _bound_by(statement: str) -> Iterator[tuple[str, str]]:
    node = ast.parse(statement.strip()).body[0]
    if isinstance(node, ast.ImportFrom):
        yield from ((node.module or "", alias.asname or alias.name) for alias in node.names)


def _without(statement: str, bound: set[tuple[str, str]]) -> str:
    node = ast.parse(statement).body[0]
    if isinstance(node, ast.ImportFrom):
        node.names = [a for a in node.names if (node.module or "", a.asname or a.name) not in bound]
        return ast.unparse(node) if node.names else ""
    return statement


# -- names that clash -------------------------------------------------------------------------------------------------


@dataclass
class Clashes:
    """Names that mean different things in files that become one.

    Args:
        names: (module, name) to the name that it gets.
        imports: the same for names that imports bind, by module.
        duplicates: (module, name) of definitions that stand in an earlier file with the same text.
    """

    names: dict[tuple[str, str], str] = field(default_factory=dict)
    imports: dict[str, dict[str, str]] = field(default_factory=dict)
    duplicates: set[tuple[str, str]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def _meanings(module: str, tree: ast.Module, names: Names) -> dict[str, str]:
    """What each name at the top of a module means."""
    result: dict[str, str] = {}
    for name, nodes in names.top.bindings.items():
        node = nodes[0]
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            result[name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            result[name] = alias.name if alias.asname else name
        else:
            result[name] = f"{module}.{name}"
    return result


def _constant(tree: ast.Module, name: str) -> str:
    """A constant's value as text, if it is one that cannot change."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and ast.unparse(node.targets[0]) == name:
            value = node.value
            simple = isinstance(value, ast.Constant | ast.Tuple)
            if simple or (isinstance(value, ast.Call) and "Var" in ast.unparse(value.func)):
                return ast.dump(value)
    return ""


def clashes(modules: list[str], sources: dict[str, str], wanted: dict[tuple[str, str], str]) -> Clashes:
    """What has to be renamed before files become one.

    Args:
        modules: old dotted names, in the order of their bodies.
        sources: their text.
        wanted: (module, name) to the name it gets in such a case.
    """
    result = Clashes(names={key: new for key, new in wanted.items() if key[0] in modules})
    trees = {module: ast.parse(sources[module]) for module in modules}
    found = {module: Names(trees[module]) for module in modules}
    meanings = {module: _meanings(module, trees[module], found[module]) for module in modules}
    for index, module in enumerate(modules):
        for earlier in modules[:index]:
            for name in sorted(set(meanings[module]) & set(meanings[earlier])):
                if meanings[module][name] != meanings[earlier][name] and name != "__all__":
                    _settle(result, module, earlier, name, meanings, trees)
    for module in modules:
        for other in modules:
            if other != module:
                _keep_builtins(result, module, other, meanings, found)
    return result


def _settle(
    result: Clashes,
    module: str,
    earlier: str,
    name: str,
    meanings: dict[str, dict[str, str]],
    trees: dict[str, ast.Module],
) -> None:
    if result.names.get((module, name)) == SAME:
        del result.names[module, name]
        result.duplicates.add((module, name))
    if (module, name) in result.names or (earlier, name) in result.names or (module, name) in result.duplicates:
        return
    one, two = (meanings[m][name] == f"{m}.{name}" for m in (earlier, module))
    if (
        one
        and two
        and _constant(trees[earlier], name)
        and _constant(trees[earlier], name) == _constant(trees[module], name)
    ):
        result.duplicates.add((module, name))
        return
    if name == "_" or name.startswith("__"):
        return
    if two:
        target = module
    elif one:
        target = earlier
    else:
        if _leaf(meanings[module][name]) == _leaf(meanings[earlier][name]) == name:
            result.notes.append(f"{name}: imported from two places, {meanings[module][name]} {meanings[earlier][name]}")
            return
        result.imports.setdefault(module, {})[name] = _with_stem(module, name)
        result.notes.append(f"import {name} in {module} and {earlier}: {_with_stem(module, name)}")
        return
    if not name.startswith("_") and (earlier if target == module else module) != target and one and two:
        other = earlier if target == module else module
        result.notes.append(f"public {name} in {target} and {other}")
    result.names[target, name] = _with_stem(target, name)
    result.notes.append(
        f"clash\t{target}\t{name}\t{result.names[target, name]}\twith {earlier if target == module else module}"
    )


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _with_stem(module: str, name: str) -> str:
    stem, bare = _leaf(module), name.lstrip("_")
    under = "_" * (len(name) - len(bare))
    if bare.isupper():
        return f"{under}{stem.upper()}_{bare}"
    if bare[:1].isupper():
        return f"{under}{stem.title().replace('_', '')}{bare}"
    return f"{under}{stem}_{bare}"


def _keep_builtins(
    result: Clashes, module: str, other: str, meanings: dict[str, dict[str, str]], found: dict[str, Names]
) -> None:
    """A name of one file must not hide a builtin that another uses."""
    builtin = {n.id for n, scope in found[other].uses if scope.resolve(n.id) is None and hasattr(builtins, n.id)}
    for name in sorted(builtin & set(meanings[module])):
        if (module, name) not in result.names:
            result.names[module, name] = _with_stem(module, name)
            result.notes.append(f"clash\t{module}\t{name}\t{result.names[module, name]}\tbuiltin in {other}")


def without_duplicates(source: str, names: set[str]) -> str:
    """A file without constants that stand in another already."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in reversed(tree.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)
