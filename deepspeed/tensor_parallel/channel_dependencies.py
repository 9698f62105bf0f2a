"""Finds the channels of a region that each rank needs, by tracing what each channel depends on.

No layout is assumed. A copy of the block's module runs with random values; the gradient of one rank's share of the
channels is zero wherever another rank's weights are, whether query, key and value are three matrices, one after the
other in one, or head by head; whether gate and up lie in halves or in turns; whether heads share keys and values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.partition import partition_uniform
from deepspeed.tensor_parallel.layers import is_transposed
from deepspeed.tensor_parallel.trace import ShardableRegion, owner

DRAWS = 6  # of random values: a channel that an activation shuts in one is open in another
MOST_DRAWS = 30  # while a column's output was shut in all: of many thousands of a ReLU, some are shut in six
Segments = tuple[tuple[int, int], ...]


@dataclass
class TensorSharding:
    """How one tensor of a region is shared out.

    Args:
        name: of the parameter or buffer inside the block's module, or of an argument of its forward.
        dim: that is cut; -1: it stays whole.
        segments: of that dim, by rank.
        copied: ranks use some of it together: it stays whole, its gradients are parts of a sum.
    """

    name: str
    dim: int
    segments: list[Segments]
    copied: bool = False


@dataclass
class ChannelDependencies:
    """A region, shared out.

    Args:
        region: of the traced model, with names inside the block's module.
        rows: inputs of the row-parallel matrices, by rank.
        tensors: parameters and buffers, by name.
        inputs: arguments of forward that have channels of the region, by name.
        partial_inputs: arguments that all ranks' channels depend on.
        bytes: of the largest rank, over those of the dense region.
    """

    region: ShardableRegion
    rows: list[Segments]
    tensors: dict[str, TensorSharding] = field(default_factory=dict)
    inputs: dict[str, TensorSharding] = field(default_factory=dict)
    partial_inputs: list[str] = field(default_factory=list)
    bytes: float = 1.0


@dataclass
class ModuleInputs:
    """What a module is called with, under the names of its parameters."""

    arguments: dict[str, Any]
    positional: list[str]

    @staticmethod
    def of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleInputs:
        """Name the positional arguments."""
        names = _positional(module)
        named = [names[at] if at < len(names) else f"*{at}" for at in range(len(args))]
        return ModuleInputs({**dict(zip(named, args, strict=True)), **kwargs}, named)

    def mapped(self, change: Any) -> ModuleInputs:
        """With every tensor replaced by `change(path, tensor)`; paths are "name" or "name.0"."""

        def walk(path: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return change(path, value)
            if type(value) in (tuple, list):
                return type(value)(walk(f"{path}.{at}", one) for at, one in enumerate(value))
            return value

        return ModuleInputs({name: walk(name, value) for name, value in self.arguments.items()}, self.positional)

    def given(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Which tensors there are, and their shapes."""
        found: list[tuple[str, tuple[int, ...]]] = []

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            found.append((path, tuple(tensor.shape)))
            return tensor

        self.mapped(note)
        return tuple(found)

    def told(self) -> tuple[tuple[str, Any], ...]:
        """Which numbers, flags and words there are; of what else is no tensor, its class."""
        found: list[tuple[str, Any]] = []

        def walk(path: str, value: Any) -> None:
            if type(value) in (tuple, list):
                for at, one in enumerate(value):
                    walk(f"{path}.{at}", one)
            elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
                found.append((path, value))
            elif not isinstance(value, torch.Tensor):
                found.append((path, type(value)))

        for name, value in self.arguments.items():
            walk(name, value)
        return tuple(found)

    def split(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments."""
        args = [self.arguments[name] for name in self.positional]
        return args, {name: value for name, value in self.arguments.items() if name not in self.positional}

    def apart(self) -> ModuleInputs:
        """With objects of its own where a module may change one, such as a cache."""
        return ModuleInputs({name: _apart(value) for name, value in self.arguments.items()}, self.positional)

    def run(self, module: nn.Module) -> Any:
        """Call the module."""
        args, kwargs = self.apart().split()
        return module(*args, **kwargs)


def changing(change: Any) -> Any:
    """Gives a module's forward `change(path, tensor)` for each tensor; see `ModuleInputs.mapped`.

    Args:
        change: called in the order of the arguments.
    """

    def hook(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = ModuleInputs.of(module, args, kwargs).mapped(change).split()
        return tuple(positional), named

    return hook


def _apart(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_apart, value))
    if value is None or isinstance(value, (torch.Tensor, nn.Module, bool, int, float, str)):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # what has no copy is handed on
        return value


def _positional(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def randomised(module: nn.Module, draw: int) -> nn.Module:
    """A copy in fp32, in evaluation mode, with values that hide nothing: no zeros, no ones."""
    made = copy.deepcopy(module).float().eval()
    generator = torch.Generator().manual_seed(1000 + draw)
    with torch.no_grad():
        for param in made.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * (0.5 if param.dim() < 2 else param.shape[-1] ** -0.5))
            param.requires_grad_(True)
    return made


def floating(call: ModuleInputs, grad: bool = False) -> tuple[ModuleInputs, dict[str, torch.Tensor]]:
    """The call with fp32 tensors of its own; and these by path."""
    found: dict[str, torch.Tensor] = {}

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        found[path] = tensor.detach().float().clone().requires_grad_(grad)
        # A unit may change what it is given in place, which autograd forbids for a leaf.
        return found[path].view_as(found[path]) if grad else found[path]

    return call.mapped(change), found


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """One seed inside, for modules that draw numbers in evaluation too; random states as they were after."""
    accelerator = get_accelerator()
    states = torch.get_rng_state(), accelerator.get_rng_state()
    torch.default_generator.manual_seed(11)  # torch.manual_seed takes a millisecond, to note who called
    if accelerator.device_name() != "cpu":
        accelerator.manual_seed(11)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        accelerator.set_rng_state(states[1])


def _taking(given: dict[str, torch.Tensor]) -> Any:
    """A hook that notes the tensors a module is called with first, and gives it copies, which it may change."""
    called: list[bool] = []

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        given[path] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return given[path].clone()

    inner = changing(change)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if called:
            return None
        called.append(True)
        return inner(module, args, kwargs)

    return hook


class _Reads:
    """Captures what the rows of a region read; columns read without a gradient of what is before the region."""

    def __init__(self, module: nn.Module, region: ShardableRegion) -> None:
        self.found: list[torch.Tensor] = []
        modules = dict(module.named_modules())
        inner = {owner(name) for name in region.inner}
        self._handles = [modules[owner(row)].register_forward_pre_hook(self._note) for row in region.rows]
        for name in dict.fromkeys(map(owner, region.columns)):
            if name not in inner:
                self._handles.append(modules[name].register_forward_pre_hook(self._detach))

    def _note(self, module: nn.Module, args: Any) -> None:
        self.found.append(args[0])

    def _detach(self, module: nn.Module, args: Any) -> Any:
        return (args[0].detach(), *args[1:])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def runs(mask: torch.Tensor) -> Segments:
    """(start, length) of the runs of true entries."""
    found: list[tuple[int, int]] = []
    for at in mask.nonzero().flatten().tolist():
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((at, 1))
    return tuple(found)


def parts_of(size: int, units: int, ranks: int) -> list[tuple[int, int]]:
    """(start, length) of each rank's share of `size` channels, in whole units."""
    bounds, step = partition_uniform(units, ranks), size // units
    return [(low * step, (high - low) * step) for low, high in zip(bounds, bounds[1:], strict=False)]


def row_size(module: nn.Module, row: str) -> int:
    """Channels that a row-parallel matrix reads."""
    layer: Any = dict(module.named_modules())[owner(row)]
    return layer.weight.shape[0 if is_transposed(layer) else 1]


def share_out(
    module: nn.Module, region: ShardableRegion, calls: Sequence[ModuleInputs], units: Sequence[int], ranks: int
) -> ChannelDependencies | None:
    """The way to share a region out that leaves the largest rank the least; None where none cuts anything.

    Args:
        module: the block's, dense; it is copied.
        region: with names inside `module`.
        calls: what it is called with, each way.
        units: numbers of equal units the channels may consist of, such as heads.
        ranks: of the axis.
    """
    size, best = row_size(module, region.rows[0]), None
    for count in dict.fromkeys([*units, size]):
        if count < ranks or size % count:
            continue
        found = _dependence(module, region, calls, parts_of(size, count, ranks))
        if found is not None and (best is None or found.bytes < best.bytes - 1e-9):
            best = found
    return best


def _dependence(
    module: nn.Module, region: ShardableRegion, calls: Sequence[ModuleInputs], parts: list[tuple[int, int]]
) -> ChannelDependencies | None:
    masks: dict[tuple[str, bool], list[list[torch.Tensor]]] = {}
    columns = set(region.columns)
    barren = 0  # draws in a row that showed nothing new: what is not covered then is what nobody reads
    for draw in range(MOST_DRAWS):
        new = [_add(masks, _masks(module, region, call, parts, draw), columns) for call in calls]
        barren = 0 if any(new) else barren + 1
        asked = columns if draw >= DRAWS - 1 else {name for name, _ in masks}
        own = [by_rank for (name, is_input), by_rank in masks.items() if not is_input and name in asked]
        if barren == DRAWS or all(map(covered, own)):
            break
    made = ChannelDependencies(region, [(part,) for part in parts])
    for (name, is_input), by_rank in masks.items():
        share = _share(name, by_rank)
        if is_input and share.dim >= 0:
            made.inputs[name] = share
        elif is_input:
            made.partial_inputs.append(name)
        else:
            made.tensors[name] = share
    for name in columns:  # a column's outputs are rows of its matrix
        if name in made.tensors:
            made.tensors[name] = _column_share(module, name, masks[name, False])
    made.bytes = largest_part(module, made)
    return made if any(_is_shared_out(made.tensors.get(name)) for name in columns) else None


def _add(masks: dict[tuple[str, bool], Any], found: Mapping[tuple[str, bool], Any], columns: set[str]) -> bool:
    """Note the indices of one draw; whether a column is among those that were not known."""
    new = False
    for key, by_rank in found.items():
        if key not in masks:
            masks[key] = by_rank
            new = new or key[0] in columns
            continue
        for ours, theirs in zip(masks[key], by_rank, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                new = new or (key[0] in columns and bool((b & ~a).any()))
                a |= b
    return new


def _is_shared_out(share: TensorSharding | None) -> bool:
    """Whether not every rank uses all of it."""
    return share is not None and len(set(share.segments)) > 1


def _masks(
    module: nn.Module, region: ShardableRegion, call: ModuleInputs, parts: list[tuple[int, int]], draw: int
) -> dict[tuple[str, bool], list[list[torch.Tensor]]]:
    """By (name, whether it is an argument), rank and dim: the indices that the rank's channels depend on."""
    twin = randomised(module, draw)
    own, given = floating(call, grad=True)
    reads = _Reads(twin, region)
    if region.home:  # what the unit is given may reach it under another name
        given = {}
        twin.get_submodule(region.home).register_forward_pre_hook(_taking(given), with_kwargs=True)
    with torch.enable_grad(), same_draws():
        own.run(twin)
    reads.remove()
    asked: dict[tuple[str, bool], torch.Tensor] = {(name, False): p for name, p in twin.named_parameters()}
    asked |= {(name, True): tensor for name, tensor in given.items()}
    found: dict[tuple[str, bool], list[list[torch.Tensor]]] = {}
    generator = torch.Generator().manual_seed(draw)
    for at, (start, length) in enumerate(parts):
        shares = [read.narrow(-1, start, length) for read in reads.found if read.requires_grad]
        total = sum(((s * torch.randn(s.shape, generator=generator).to(s)).sum() for s in shares), torch.zeros(()))
        grads = torch.autograd.grad(total, list(asked.values()), retain_graph=True, allow_unused=True)
        for (key, tensor), grad in zip(asked.items(), grads, strict=True):
            if grad is None and key not in found:
                continue
            nonzero = torch.zeros(tensor.shape, dtype=torch.bool) if grad is None else grad != 0
            empty = [[torch.zeros(size, dtype=torch.bool) for size in tensor.shape] for _ in parts]
            found.setdefault(key, empty)[at] = [_any_but(nonzero, dim) for dim in range(tensor.dim())]
    rows = {row for row in region.rows} | {f"{owner(row)}.bias" for row in region.rows}
    return {k: v for k, v in found.items() if k[0] not in rows and any(m.any() for dims in v for m in dims)}


def _any_but(mask: torch.Tensor, dim: int) -> torch.Tensor:
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1).cpu()


def covered(by_rank: list[list[torch.Tensor]]) -> bool:
    """Whether the ranks together depend on every index of every dim."""
    return all(torch.stack(of_dim).any(0).all() for of_dim in zip(*by_rank, strict=True))


def disjoint(masks: Sequence[torch.Tensor]) -> bool:
    """Whether each rank depends on some indices, no two on one, and none on no index: else it would be lost."""
    return bool((torch.stack(list(masks)).sum(0) == 1).all()) and all(mask.any() for mask in masks)


def _share(name: str, by_rank: list[list[torch.Tensor]]) -> TensorSharding:
    for dim, masks in enumerate(zip(*by_rank, strict=True)):
        if len(masks[0]) > 1 and disjoint(masks):
            return TensorSharding(name, dim, [runs(mask) for mask in masks])
    return TensorSharding(name, -1, [() for _ in by_rank], copied=True)


def _column_share(module: nn.Module, name: str, by_rank: list[list[torch.Tensor]]) -> TensorSharding:
    layer = dict(module.named_modules())[owner(name)]
    dim = 1 if is_transposed(layer) else 0
    masks = [dims[dim] for dims in by_rank]
    return TensorSharding(name, dim, [runs(mask) for mask in masks], copied=not disjoint(masks))


def largest_part(module: nn.Module, shares: ChannelDependencies) -> float:
    """The part of a region's matrices that the largest rank holds.

    Args:
        module: the block's, dense.
        shares: of the region.
    """
    region, most = shares.region, 0.0
    sizes = {name: math.prod(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    channels = sum(map(_length, shares.rows))
    for rank, part in enumerate(shares.rows):
        here = sum(sizes[row] * _length(part) / channels for row in region.rows)
        for name in region.columns:
            share = shares.tensors.get(name)
            held = 1.0
            if share is not None and not share.copied:
                held = _length(share.segments[rank]) / sum(map(_length, share.segments))
            here += sizes[name] * held
        most = max(most, here)
    return most / sum(sizes[name] for name in [*region.rows, *region.columns])


def _length(segments: Segments) -> int:
    return sum(length for _, length in segments)
