"""State of autograd: whether it runs backward, and the tensors that it has saved in a graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Of the next node here.
now: Any = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def saved_since(outputs: Iterable[torch.Tensor], since: int) -> Iterator[Any]:
    """Yield the `SavedTensor`s, except those with hooks, of graph nodes that were created after `since`; see `now`."""
    for node in nodes_since([tensor.grad_fn for tensor in outputs], since):
        yield from (saved for _, saved in saved_by(node) if saved.unpack_hook is None)


def nodes_since(last: Iterable[Any], since: int) -> Iterator[Any]:
    """Yield the nodes of the graph of `last` that were created after `since`, an earlier `now()`."""
    seen: set[Any] = set()
    nodes = list(last)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        yield node


def saved_by(node: object) -> Iterator[tuple[str, Any]]:
    """Yield (name of the unpacking attribute, `SavedTensor`) of each saved tensor of a node; none after backward."""
    for name, unpacked in _names_of(type(node)):
        try:
            saved: Any = getattr(node, name)
        except RuntimeError:  # its backward is over
            return
        if saved is not None:
            several: tuple[Any, ...] = saved if isinstance(saved, tuple) else (saved,)  # pyright: ignore[reportUnknownVariableType]
            yield from ((unpacked, each) for each in several)


@functools.cache
def _names_of(kind: type) -> list[tuple[str, str]]:
    """Return the attributes of a class of nodes that hold saved tensors: names as saved, and as unpacked."""
    names = [(name, name.removeprefix("_raw")) for name in dir(kind) if name.startswith("_raw_saved_")]
    # Functions written in Python have other names.
    return [(name, unpacked if hasattr(kind, unpacked) else unpacked.removeprefix("_")) for name, unpacked in names]
