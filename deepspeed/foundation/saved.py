"""What autograd keeps of a computation from forward to backward, found in the graph of its outputs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Of the next node here.
now: Any = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]


def saved_since(outputs: Iterable[torch.Tensor], since: int) -> Iterator[Any]:
    """Torch's `SavedTensor`s of a computation; those that nobody's hooks keep already.

    Args:
        outputs: of it.
        since: `now()` before it; older nodes are left alone.
    """
    seen: set[Any] = set()
    nodes: list[Any] = [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        yield from (saved for saved in _saved_by(node) if saved.unpack_hook is None)


def _saved_by(node: object) -> Iterator[Any]:
    for name in _names_of(type(node)):
        try:
            found: Any = getattr(node, name)
        except RuntimeError:  # its backward is over
            return
        if isinstance(found, tuple):
            yield from found
        elif found is not None:
            yield found


@functools.cache
def _names_of(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
