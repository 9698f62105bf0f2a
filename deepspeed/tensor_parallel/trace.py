"""Trace of the data flow between weight matrices, which finds the layers that can be split together.

In a transformer block, only the output projection of attention reads the results of the query, key and value
projections, and only the down projection reads those of gate and up. The channels in between can be split over ranks.
The output projections write to the residual stream, which passes through all blocks and stays whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed.foundation.pytree import tensors_in
from deepspeed.tensor_parallel.layers import is_linear, is_transposed

_CONTRACTIONS = frozenset(
    "linear matmul rmatmul mm bmm addmm addmm_ baddbmm einsum mv addbmm tensordot bilinear conv1d conv2d "
    "conv3d conv_transpose1d conv_transpose2d multi_head_attention_forward".split()
)
STREAM = "input"


@dataclass
class MatrixUse:
    """Use of one weight matrix in a traced forward.

    Args:
        name: name of the parameter.
        lookup: whether the matrix is a lookup table, such as an embedding, instead of a factor of a product.
        sources: names of the matrices that produce its inputs, without another matrix in between; `STREAM` stands for
            a floating-point input of the model.
    """

    name: str
    lookup: bool = False
    sources: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Taint:
    sources: frozenset[str] = frozenset()
    params: frozenset[str] = frozenset()  # taint of a tensor computed from parameters only


class OpTrace(TorchFunctionMode):
    """Torch function mode that records the matrices that a forward uses, and the data flow between them.

    Args:
        model: the model that runs inside the mode.
        inputs: arguments of its forward, any nest of tensors.

    Attributes:
        nodes: uses of matrices by parameter name, in order of first use.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.nodes: dict[str, MatrixUse] = {}
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._taints: Any = WeakTensorKeyDictionary()
        self._written: Any = WeakTensorKeyDictionary()  # taints written through views of a tensor
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                self._taints[tensor] = _Taint(frozenset({STREAM}))

    @staticmethod
    def _carries(tensor: torch.Tensor) -> bool:
        """Return whether a tensor may contain channels: floating point, or complex (rotary embeddings), not integer."""
        return tensor.dtype.is_floating_point or tensor.dtype.is_complex

    @staticmethod
    def _by_channel(name: str, args: Any, kwargs: Any) -> bool:
        """Return whether an operation is a depthwise convolution, which does not mix channels."""
        if not name.startswith("conv") or "transpose" in name:
            return False
        weight = kwargs["weight"] if "weight" in kwargs else args[1]
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        return groups == weight.shape[0] > 1 and weight.shape[1] == 1

    @staticmethod
    def _joined(left: _Taint | None, right: _Taint | None) -> _Taint | None:
        if left is None or right is None:
            return left or right
        sources = left.sources | right.sources
        return _Taint(sources, frozenset() if sources else left.params | right.params)

    def _taint(self, tensor: torch.Tensor) -> _Taint | None:
        if not self._carries(tensor):
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return _Taint(params=frozenset({name}))
        base = tensor._base
        return self._joined(self._taints.get(tensor), None if base is None else self._written.get(base))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and not isinstance(result, torch.Tensor):
            return result
        taints = [t for t in map(self._taint, tensors_in([args, kwargs])) if t is not None]
        if not taints:
            return result
        taint = self._combined(name, taints, not self._by_channel(name, args, kwargs))
        for tensor in tensors_in(result):
            if id(tensor) not in self._names and self._carries(tensor):
                self._taints[tensor] = taint
        if (name.endswith("_") or name == "__setitem__") and args and isinstance(args[0], torch.Tensor):
            self._write(args[0], taint)
        return result

    def _write(self, tensor: torch.Tensor, taint: _Taint) -> None:
        """Taint a written tensor and all tensors that share its memory."""
        if id(tensor) in self._names:
            return
        self._taints[tensor] = self._joined(self._taint(tensor), taint)
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in self._names:
            self._written[base] = self._joined(self._written.get(base), taint)
            self._taints[base] = self._joined(self._taint(base), taint)

    def _combined(self, name: str, taints: list[_Taint], mixes: bool) -> _Taint:
        sources = frozenset().union(*(t.sources for t in taints))
        params = frozenset().union(*(t.params for t in taints))
        if "embedding" in name and params:
            return self._node(params, sources, lookup=True)
        contracts = name.strip("_") in _CONTRACTIONS or name in _CONTRACTIONS or "grouped_mm" in name
        if contracts and mixes and params and sources:
            return self._node(params, sources)
        return _Taint(sources, params if not sources else frozenset())

    def _node(self, params: frozenset[str], sources: frozenset[str], lookup: bool = False) -> _Taint:
        matrices = [name for name in params if not name.endswith("bias")] or list(params)
        for name in matrices:
            self.nodes.setdefault(name, MatrixUse(name, lookup)).sources |= sources
        return _Taint(frozenset(matrices))


_STREAM = "it reads the stream that runs through all blocks"


@dataclass
class ShardableRegion:
    """Column- and row-parallel matrices (Megatron-LM) with common channels, which can be split over ranks.

    Args:
        home: name of the innermost module that contains all matrices of the region.
        columns: names of the matrices with split outputs, such as query, key and value projections.
        rows: names of the matrices that read these outputs, such as the output projection.
        inner: those of `columns` that read outputs of others of `columns`.
        tables: names of lookup tables with results that the rows read too.
        packed: whether the matrices are parameters of `home` itself, as for packed experts.
        heads: whether `home` is an `nn.MultiheadAttention`, split by heads.
    """

    home: str
    columns: list[str]
    rows: list[str]
    inner: set[str] = field(default_factory=set)
    tables: list[str] = field(default_factory=list)
    packed: bool = False
    heads: bool = False

    def row_size(self, module: nn.Module) -> int:
        """Return the number of channels that a row-parallel matrix reads."""
        layer: Any = module.get_submodule(owner(self.rows[0]))
        return layer.weight.shape[0 if is_transposed(layer) else 1]

    def matrices(self) -> list[str]:
        """Return the names of all split matrices."""
        return [*self.columns, *self.rows]

    def renamed(self, change: Callable[[str], str]) -> ShardableRegion:
        """Return a copy of the region with `change` applied to all names."""
        columns, rows, tables = (list(map(change, names)) for names in (self.columns, self.rows, self.tables))
        return ShardableRegion(
            change(self.home), columns, rows, set(map(change, self.inner)), tables, self.packed, self.heads
        )

    def inside(self, home: str) -> ShardableRegion:
        """Return a copy of the region with names relative to the module `home`, without tables outside of it."""
        region = replace(self, tables=[name for name in self.tables if lies_in(name, home)])
        return region.renamed(lambda name: name.removeprefix(home).removeprefix("."))


def owner(param: str) -> str:
    """Return the name of the module that has a parameter: everything before the last dot."""
    return param.rpartition(".")[0]


def join(home: str, name: str) -> str:
    """Return the full name of an object inside a module; the model itself is ""."""
    return f"{home}.{name}" if home and name else home or name


def lies_in(name: str, home: str) -> bool:
    """Return whether `name` is the module `home` itself, or a module or parameter inside it."""
    return not home or f"{name}.".startswith(f"{home}.")


def around(name: str) -> list[str]:
    """Return the names of all enclosing modules and of the module itself, the outermost first."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[:count]) for count in range(1, len(parts) + 1))]


def by_module(params: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the parameters inside each module, by module name."""
    inside: dict[str, list[str]] = {}
    for param in params:
        for module in around(owner(param)):
            inside.setdefault(module, []).append(param)
    return inside


def find_regions(model: nn.Module, nodes: Mapping[str, MatrixUse]) -> tuple[list[ShardableRegion], dict[str, str]]:
    """Return the regions of a model with traced `nodes`, and the reasons why other matrices of blocks stay whole."""
    modules = dict(model.named_modules())
    why: dict[str, str] = {}
    regions: list[ShardableRegion] = []
    order = {name: place for place, name in enumerate(nodes)}
    for members in _spaces(nodes):
        region, reason = _region(modules, nodes, order, members)
        for name in members[1] if region is None else ():
            if block(name) and (reason != _STREAM or name not in why):
                why[name] = reason
        if region is not None:
            regions.append(region)
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    weights = [sum(sizes.get(name, 0) for name in {*region.matrices()}) for region in regions]
    taken: set[str] = set()
    chosen: list[ShardableRegion] = []
    for _, region in sorted(zip(weights, regions, strict=True), key=lambda pair: (-pair[0], pair[1].home)):
        if taken.isdisjoint(region.matrices()) and not all(".lora_" in name for name in region.columns):
            taken.update(region.matrices())
            chosen.append(region)
    chosen.sort(key=lambda region: order[region.rows[0]])
    return chosen, {name: reason for name, reason in why.items() if name not in taken}


def _spaces(nodes: Mapping[str, MatrixUse]) -> list[tuple[set[str], set[str]]]:
    """Return the (writing, reading) matrices of each connected set of channels; lookup tables do not connect sets."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def find(key: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]  # path halving: chains of sources are long
        return key

    writers = {node.name for node in nodes.values() if not node.lookup}
    stream: set[str] = set()  # sources of an earlier reader: each block reads all earlier residual writes
    for node in nodes.values():
        sources = node.sources & writers
        known = bool(stream) and stream <= sources
        for source in [*(sources - stream), next(iter(stream))] if known else sources:
            parent[find(("out", source))] = find(("in", node.name))
        stream = sources if len(sources) > len(stream) else stream
    spaces: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for side, name in list(parent):
        writes, reads = spaces.setdefault(find((side, name)), (set(), set()))
        (writes if side == "out" else reads).add(name)
    return list(spaces.values())


def block(name: str) -> str:
    """Return the outermost numbered module around a parameter, such as "h.0" for "h.0.mlp.weight"; "" if none."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return match.group(0) if match else ""


def _spans(names: Iterable[str]) -> bool:
    """Return whether names belong to several entries of a list of blocks; layers inside one block do not count."""
    seen: dict[str, set[str]] = {}
    for name in names:
        for match in re.finditer(r"(?:(?<=\.)|^)\d+(?=\.)", name):
            if name[: match.end()] == owner(name) and (match.start() == 0 or owner(name) != block(name)):
                continue  # a layer itself, as in `Sequential(Linear, GELU, Linear)`: in a block, or the whole model
            seen.setdefault(name[: match.start()], set()).add(match.group(0))
    return any(len(entries) > 1 for entries in seen.values())


def _region(
    modules: Mapping[str, nn.Module],
    nodes: Mapping[str, MatrixUse],
    order: Mapping[str, int],
    space: tuple[set[str], set[str]],
) -> tuple[ShardableRegion | None, str]:
    columns, reads = (sorted(names, key=order.__getitem__) for names in space)
    sources = set().union(*(nodes[name].sources for name in reads))
    tables = sorted(name for name in sources if name in nodes and nodes[name].lookup)
    rows = [name for name in reads if name not in space[0]]
    inner = {name for name in reads if name in space[0]}
    everything = [*columns, *rows]
    if STREAM in sources or any(not block(name) for name in everything) or _spans(everything):
        return None, _STREAM
    widths = {size for name in rows for size in modules[owner(name)].get_parameter(name.rpartition(".")[2]).shape}
    for name in tables:  # a matrix outside of all blocks, as wide as the rows' outputs, begins the residual stream
        if not block(name) and modules[owner(name)].get_parameter(name.rpartition(".")[2]).shape[-1] in widths:
            return None, _STREAM
    if not rows:
        return None, "its results go back into itself"
    owners = {owner(name) for name in everything}
    if len(owners) == 1 and all(nodes_of.count(".") for nodes_of in everything):
        home = owners.pop()
        if not is_linear(modules[home]):
            return ShardableRegion(home, columns, rows, inner, tables, packed=True), ""
    odd = [name for name in everything if not is_linear(modules[owner(name)])]
    if odd:
        return None, f"{odd[0]} of the same channels belongs to no linear layer"
    home = ".".join(os.path.commonprefix([owner(name).split(".") for name in everything]))
    while home and isinstance(modules[home], (nn.ModuleList, nn.ModuleDict)):
        home = owner(home)  # a container is never called
    return ShardableRegion(home, columns, rows, inner, tables), ""
