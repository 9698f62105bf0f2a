"""Names that Transformers gave its arguments for the cache, and has changed: one file spells them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import trees

HOME = "foundation/hf_forward.py"
NAMES = {"past_key_values", "past_key_value", "layer_past", "cache_params", "cache_position"}


def _spelled(path: str, tree: ast.AST) -> Iterator[str]:
    """Where a name stands as a keyword of a call, an attribute, an argument or a text of its own."""
    for node in ast.walk(tree) if path != HOME else ():
        names = {
            ast.keyword: lambda node: node.arg,
            ast.arg: lambda node: node.arg,
            ast.Attribute: lambda node: node.attr,
            ast.Constant: lambda node: node.value if isinstance(node.value, str) else "",
        }
        name = names.get(type(node), lambda _: "")(node)
        if name in NAMES:
            yield f"{path}:{getattr(node, 'lineno', 0)}: {name}"


def test_one_file_spells_the_names_of_the_cache() -> None:
    assert [where for path, tree in trees().items() for where in _spelled(path, tree)] == []
    assert HOME in trees()


@pytest.mark.parametrize(
    "line", ["model(past_key_values=x)", "out.past_key_values", "given['cache_params']", "def f(layer_past): pass"]
)
def test_the_check_sees_every_way_to_spell_it(line: str) -> None:
    assert list(_spelled("inference/x.py", ast.parse(line)))
