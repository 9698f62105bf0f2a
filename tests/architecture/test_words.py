"""Words that one room alone may say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.sources import trees

ROOM_OF = {"torch.distributed": "comm/", "torch.cuda": "accelerator/"}
PARTS_OF_THEIR_OWN = tuple(f"torch.distributed.{part}" for part in ("checkpoint", "pipelining", "elastic", "tensor"))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def _names_used(tree: ast.AST) -> list[tuple[int, str]]:
    return list(_names_of(tree))


def _names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    owners = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}  # parts of longer names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and node not in owners:
            yield node.lineno, _dotted(node)


def _within(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _said_elsewhere(word: str, path: str, tree: ast.AST) -> Iterator[str]:
    if not path.startswith(ROOM_OF[word]):
        for line, name in _names_used(tree):
            if _within(name, word) and not _within(name, *PARTS_OF_THEIR_OWN):
                yield f"{path}:{line}: {name}"


@pytest.mark.parametrize("word", ROOM_OF)
def test_a_word_is_said_in_its_room_only(word: str) -> None:
    assert [where for path, tree in trees().items() for where in _said_elsewhere(word, path, tree)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed import all_reduce", True),
        ("torch.distributed.all_reduce(x)", True),
        ("from torch.distributed.tensor import DTensor", False),
        ("import torch.distributed.checkpoint", False),
        ("torch.distributed.checkpoint.save(x)", False),
        ("import torch.utils.checkpoint", False),
    ],
)
def test_the_check_sees_every_way_to_say_it(line: str, found: bool) -> None:
    assert bool(list(_said_elsewhere("torch.distributed", "zero/x.py", ast.parse(line)))) == found
