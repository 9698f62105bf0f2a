"""Which scope each name of a Python file belongs to."""

from __future__ import annotations

import ast

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Scope:
    """A module, class, function, lambda or comprehension, with the names it binds.

    Args:
        kind: "module", "class", "function" or "comprehension".
        parent: the scope around it; None for the module.
    """

    def __init__(self, kind: str, parent: Scope | None = None) -> None:
        self.kind, self.parent = kind, parent
        self.bindings: dict[str, list[ast.AST]] = {}
        self.outer: dict[str, str] = {}  # names declared `global` or `nonlocal`

    def bind(self, name: str, node: ast.AST) -> None:
        """Add a binding, to the module if the name is declared global."""
        target = self
        if self.outer.get(name) == "global":
            target = self.module()
        elif self.outer.get(name) == "nonlocal":
            target = self.resolve(name) or self
        target.bindings.setdefault(name, []).append(node)

    def module(self) -> Scope:
        """The outermost scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def resolve(self, name: str) -> Scope | None:
        """The scope whose binding a use of the name here means; None for builtins."""
        if self.outer.get(name) == "global":
            return self.module()
        scope: Scope | None = self
        first = True
        while scope is not None:
            visible = first or scope.kind != "class"
            if visible and name in scope.bindings and name not in scope.outer:
                return scope
            first, scope = False, scope.parent
        return None


class Names(ast.NodeVisitor):
    """All names of a file with their scopes.

    Args:
        tree: of the file.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.top = self._scope = Scope("module")
        self.uses: list[tuple[ast.Name, Scope]] = []
        self.imports: list[tuple[ast.Import | ast.ImportFrom, Scope]] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.declared: list[ast.Global] = []
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for node in tree.body:
            self.visit(node)

    def _inside(self, kind: str, node: ast.AST, parts: list[ast.AST]) -> None:
        outer, self._scope = self._scope, Scope(kind, self._scope)
        if kind == "function":
            for child in _own_statements(node):
                if isinstance(child, ast.Global | ast.Nonlocal):
                    word = "global" if isinstance(child, ast.Global) else "nonlocal"
                    self._scope.outer.update(dict.fromkeys(child.names, word))
            arguments: ast.arguments = node.args  # type: ignore[attr-defined]
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for argument in (*given, arguments.vararg, arguments.kwarg):
                if argument is not None:
                    self._scope.bind(argument.arg, argument)
        for part in parts:
            self.visit(part)
        self._scope = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope.bind(node.name, node)
        for part in (*node.decorator_list, node.returns, *_annotations(node.args), *_defaults(node.args)):
            if part is not None:
                self.visit(part)
        self._inside("function", node, list(node.body))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in _defaults(node.args):
            self.visit(part)
        self._inside("function", node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name, node)
        for part in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.visit(part)
        self._inside("class", node, list(node.body))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        rest: list[ast.AST] = [first.target, *first.ifs]
        for generator in others:
            rest += [generator.target, generator.iter, *generator.ifs]
        self._inside("comprehension", node, [*rest, *values])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self._scope
        while scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        scope.bind(node.target.id, node)
        self.uses.append((node.target, self._scope))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._scope.bind(node.id, node)
        self.uses.append((node, self._scope))

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            local = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
            self._scope.bind(local, node)
        self.imports.append((node, self._scope))

    visit_ImportFrom = visit_Import

    def visit_Global(self, node: ast.Global) -> None:
        self.declared.append(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._scope.bind(node.name, node)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self._scope.bind(node.name, node)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self._scope.bind(node.rest, node)
        self.generic_visit(node)


def _own_statements(node: ast.AST) -> list[ast.AST]:
    """Statements of a function without those of functions and classes inside."""
    result: list[ast.AST] = []
    waiting = list(getattr(node, "body", [])) if isinstance(node, FUNCTIONS) else []
    while waiting:
        child = waiting.pop()
        result.append(child)
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            waiting += list(ast.iter_child_nodes(child))
    return result


def _annotations(arguments: ast.arguments) -> list[ast.expr | None]:
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [a.annotation for a in (*several, arguments.vararg, arguments.kwarg) if a is not None]


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
