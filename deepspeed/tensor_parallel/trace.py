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


def _carries(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have channels: rotary positions may be complex; indices choose, and carry none."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _by_channel(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a convolution has a filter for each channel, as those over time have: it mixes no channels."""
    if not name.startswith("conv") or "transpose" in name:
        return False
    weight = kwargs["weight"] if "weight" in kwargs else args[1]
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    return groups == weight.shape[0] > 1 and weight.shape[1] == 1


def _joined(one: _Taint | None, other: _Taint | None) -> _Taint | None:
    if one is None or other is None:
        return one or other
    sources = one.sources | other.sources
    return _Taint(sources, frozenset() if sources else one.params | other.params)


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
        self._written: Any = WeakTensorKeyDictionary()  # what was written into some views of a tensor
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                self._taints[tensor] = _Taint(frozenset({STREAM}))

    def _taint(self, tensor: torch.Tensor) -> _Taint | None:
        if not _carries(tensor):
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return _Taint(params=frozenset({name}))
        base = tensor._base
        return _joined(self._taints.get(tensor), None if base is None else self._written.get(base))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and not isinstance(result, torch.Tensor):
            return result
        given = [t for t in map(self._taint, tensors_in([args, kwargs])) if t is not None]
        if not given:
            return result
        made = self._made(name, given, not _by_channel(name, args, kwargs))
        for tensor in tensors_in(result):
            if id(tensor) not in self._names and _carries(tensor):
                self._taints[tensor] = made
        if (name.endswith("_") or name == "__setitem__") and args and isinstance(args[0], torch.Tensor):
            self._write(args[0], made)
        return result

    def _write(self, tensor: torch.Tensor, made: _Taint) -> None:
        """What a tensor is written is in all tensors that share its memory."""
        if id(tensor) in self._names:
            return
        self._taints[tensor] = _joined(self._taint(tensor), made)
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in self._names:
            self._written[base] = _joined(self._written.get(base), made)
            self._taints[base] = _joined(self._taint(base), made)

    def _made(self, name: str, given: list[_Taint], mixes: bool) -> _Taint:
        sources = frozenset().union(*(t.sources for t in given))
        params = frozenset().union(*(t.params for t in given))
        if "embedding" in name and params:
            return self._node(params, sources, lookup=True)
        contracts = name.strip("_") in _CONTRACTIONS or name in _CONTRACTIONS or "grouped_mm" in name
        if contracts and mixes and params and sources:
            return self._node(params, sources)
        return _Taint(sources, params if not sources else frozenset())

    def _node(self, params: frozenset[str], sources: frozenset[str], lookup: bool = False) -> _Taint:
        matrices = [name for name in params if not name.endswith("bias")] or list(params)
        for name in matrices:
            self.nodes.setdefault(name, Node(name, lookup)).sources |= sources
        return _Taint(frozenset(matrices))
