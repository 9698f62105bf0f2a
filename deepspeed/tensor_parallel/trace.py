"""Which matrix feeds which: one forward of a model, watched at the level of torch's functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed.foundation.tree import tensors_in

_CONTRACTIONS = frozenset(
    "linear matmul rmatmul mm bmm addmm addmm_ baddbmm einsum mv addbmm tensordot bilinear conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d multi_head_attention_forward".split()
)
STREAM = "input"


@dataclass
class Node:
    """A use of one matrix.

    Args:
        name: of the parameter.
        lookup: it is a table that indices choose from, and no matrix that is multiplied.
        sources: names of the nodes whose results it reads, with no other matrix between.
    """

    name: str
    lookup: bool = False
    sources: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Taint:
    sources: frozenset[str] = frozenset()
    params: frozenset[str] = frozenset()  # of a tensor that is made of parameters alone


class Trace(TorchFunctionMode):
    """Watches what runs inside.

    Args:
        model: its parameters are told apart by their names.
        inputs: what it is given.

    Attributes:
        nodes: by parameter name, in the order of first use.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._taints: Any = WeakTensorKeyDictionary()
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                self._taints[tensor] = _Taint(frozenset({STREAM}))

    def _taint(self, tensor: torch.Tensor) -> _Taint | None:
        if not tensor.dtype.is_floating_point:
            return None  # indices choose, and carry no channels
        name = self._names.get(id(tensor))
        return _Taint(params=frozenset({name})) if name is not None else self._taints.get(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and not isinstance(result, torch.Tensor):
            return result
        given = [t for t in map(self._taint, tensors_in([args, kwargs])) if t is not None]
        if not given:
            return result
        made = self._made(name, given)
        for tensor in tensors_in(result):
            if id(tensor) not in self._names and tensor.dtype.is_floating_point:
                self._taints[tensor] = made
        if (name.endswith("_") or name == "__setitem__") and args and isinstance(args[0], torch.Tensor):
            before = self._taint(args[0])
            more = made.sources | (before.sources if before is not None else frozenset())
            if id(args[0]) not in self._names:
                self._taints[args[0]] = _Taint(more, made.params if not more else frozenset())
        return result

    def _made(self, name: str, given: list[_Taint]) -> _Taint:
        sources = frozenset().union(*(t.sources for t in given))
        params = frozenset().union(*(t.params for t in given))
        if "embedding" in name and params:
            return self._node(params, sources, lookup=True)
        contracts = name.strip("_") in _CONTRACTIONS or name in _CONTRACTIONS or "grouped_mm" in name
        if contracts and params and sources:
            return self._node(params, sources)
        return _Taint(sources, params if not sources else frozenset())

    def _node(self, params: frozenset[str], sources: frozenset[str], lookup: bool = False) -> _Taint:
        matrices = [name for name in params if not name.endswith("bias")] or list(params)
        for name in matrices:
            self.nodes.setdefault(name, Node(name, lookup)).sources |= sources
        return _Taint(frozenset(matrices))
